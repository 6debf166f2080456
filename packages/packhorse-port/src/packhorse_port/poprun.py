"""`python -m packhorse_port.poprun`: start a script as poprun did, as several processes here.

    python -m packhorse_port.poprun --num-instances 2 --num-replicas 4 python train.py --epochs 3

Instances are processes of this machine, each with its share of the replicas; `import poptorch` and
`import popdist` work in them. They are started by `packhorse.launcher`, so no port is open to
another machine. Options about hosts, partitions, MPI and NUMA are accepted and have no effect.
Several machines need torchrun on each: `popdist` reads its variables.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence

from packhorse.errors import InputError, PackhorseError
from packhorse.launcher import launch
from packhorse_port.popdist import IPUS_PER_REPLICA, TOTAL_REPLICAS
from packhorse_port.script import STARTUP_FOLDER

# Of poprun's options, those that are followed by a value if there is no `=`.
NUMBERS = ("--num-instances", "--num-replicas", "--ipus-per-replica")
WITH_VALUE = (
    *NUMBERS,
    "--num-ilds",
    "--host",
    "--hosts",
    "--host-subnet",
    "--vipu-server-host",
    "--vipu-server-port",
    "--vipu-server-timeout",
    "--vipu-partition",
    "--vipu-cluster",
    "--vipu-allocation",
    "--mpi-global-args",
    "--mpi-local-args",
    "--update-partition",
    "--remove-partition",
    "--reset-partition",
    "--sync-type",
    "--topology",
    "--executable-cache-path",
    "--numa-aware",
    "--offline-mode",
    "--instance-args",
    "--only-output-from-instance",
    "--only-stdout-from-instance",
    "--only-stderr-from-instance",
)
PYTHONS = ("python", "python3")


def parse(arguments: Sequence[str]) -> tuple[dict[str, int], list[str]]:
    """The numbers that poprun was given, by option, and the command to start."""
    numbers = dict.fromkeys(NUMBERS, 1)
    rest = list(arguments)
    while rest and rest[0].startswith("-"):
        name, equals, value = rest.pop(0).partition("=")
        if name in WITH_VALUE and not equals:
            if not rest:
                raise InputError(f"{name} is followed by a value")
            value = rest.pop(0)
        if name in NUMBERS:
            if not value.isdecimal() or int(value) < 1:
                raise InputError(f"{name} takes a number from 1 on, not {value!r}")
            numbers[name] = int(value)
    if not rest:
        raise InputError("poprun starts a command: poprun --num-instances 2 python train.py")
    instances = numbers["--num-instances"]
    replicas = max(numbers["--num-replicas"], instances)
    if replicas % instances:
        raise InputError(
            f"--num-replicas {replicas} cannot be shared by --num-instances {instances}; write a"
            " multiple of it"
        )
    return numbers | {"--num-replicas": replicas}, rest


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the command; returns its exit code."""
    try:
        numbers, command = parse(sys.argv[1:] if arguments is None else arguments)
        if command[0] in PYTHONS:
            command[0] = sys.executable
        if shutil.which(command[0]) is None:
            raise InputError(f"{command[0]} is no command that can be run")
        path = [STARTUP_FOLDER, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            "PYTHONPATH": os.pathsep.join(path),
            TOTAL_REPLICAS: str(numbers["--num-replicas"]),
            IPUS_PER_REPLICA: str(numbers["--ipus-per-replica"]),
        }
        return launch(numbers["--num-instances"], command, environ=environment, report=_report)
    except PackhorseError as error:
        _report(str(error))
        return error.exit_code


def _report(message: str) -> None:
    sys.stderr.write(f"poprun: {message}\n")


if __name__ == "__main__":
    sys.exit(main())
