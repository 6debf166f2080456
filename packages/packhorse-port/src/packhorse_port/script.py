"""Run a script written for PopTorch or TensorFlow's IPU, as `python SCRIPT` would.

    run(["train.py", "--epochs", "3"])     # this process becomes `python train.py --epochs 3`

The process is replaced by a fresh Python that runs the script, so that everything is Python's own:
`sys.argv`, `__main__`, `sys.path`, tracebacks, exit codes, signals, `-`, a missing file. The only
difference is `PYTHONPATH`, which leads to `startup/sitecustomize.py`: Python runs it first, here
and in every process the script starts (workers of a DataLoader, by fork or spawn), and it calls
`install()`. This costs one more start of Python, about 30 ms, and does not work for a Python that
ignores its environment (-I, -E, -S).

`install()` adds an import finder: `poptorch` is another name of the module `packhorse_port`;
`torchvision` is the installed one, or ours if there is none or it fails to import;
`tensorflow.python.ipu` and similar modules come from `packhorse_port.tensorflow`. Libraries that
ask whether torchvision is installed, as transformers does before it defines its models, do not see
ours: it lacks what they need.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any, Literal, NoReturn

from packhorse.errors import InputError

STARTUP_FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "startup")
RUN_VARIABLE = "PACKHORSE_PORT_RUN"  # "PID SUMMARY" of the process that runs the script
Summary = Literal["text", "json", "quiet"]

PORT = "packhorse_port"
TORCHVISION = "packhorse_port.torchvision"
TENSORFLOW = "packhorse_port.tensorflow"
IPU_MODULES = (
    "tensorflow.python.ipu",
    "tensorflow.keras.ipu",
    "keras.ipu",
    "ipu_tensorflow_addons",
    "popdist",
)

# Modules beside poptorch, where they are not installed, and where ours are.
COMPANIONS = {
    "popdist": "packhorse_port.popdist",
    "popdist.poptorch": "packhorse_port.popdist.poptorch",
    "popart": "packhorse_port.companions.popart",
    "examples_utils": "packhorse_port.companions.examples_utils",
    "horovod": "packhorse_port.companions.horovod",
    "horovod.torch": "packhorse_port.companions.horovod.torch",
}
POPART = "graphs of PopART cannot run here; write the model in PyTorch"

# Modules of the SDK that are not provided, and what to do instead.
SDK = {
    "popxl": "graphs of PopXL cannot run here; write the model in PyTorch",
    "poplar": "Poplar programs cannot run here; write the operation in PyTorch",
    "poprt": "packhorse.PackRunner packs and runs requests; see docs/coming-from.md",
    "gcipuinfo": "packhorse monitor --json tells about devices",
    "poptorch_geometric": "use torch_geometric: its models and loaders run without fixed sizes",
    "poptorch_experimental_addons": "write the layer in PyTorch",
    "pva": "there are no Poplar reports; profile with torch.profiler",
    "libpvti": "profile with torch.profiler",
}


def run(arguments: Sequence[str], summary: Summary = "text") -> NoReturn:
    """Become `python SCRIPT ARGS…`; `summary` is the format of the summary at its end."""
    command = [sys.executable, *_interpreter_flags(), *arguments]
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(
        [STARTUP_FOLDER, *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    environment[RUN_VARIABLE] = f"{os.getpid()} {summary}"
    sys.stdout.flush()
    sys.stderr.flush()
    if os.name == "nt":  # where exec ends this process at once and the shell does not wait
        import subprocess

        raise SystemExit(subprocess.run(command, env=environment).returncode)
    os.execve(sys.executable, command, environment)


def _interpreter_flags() -> list[str]:
    """This Python's options (-O, -W, -X …), for the Python that runs the script."""
    import subprocess

    if sys.flags.ignore_environment or sys.flags.no_site:
        raise InputError(
            "python -I, -E and -S hide PYTHONPATH, through which poptorch is provided;"
            " run packhorse port without them"
        )
    unbuffered = ["-u"] if getattr(sys.stdout, "write_through", False) else []
    return [*subprocess._args_from_interpreter_flags(), *unbuffered]  # pyright: ignore[reportAttributeAccessIssue]


def install() -> None:
    """Provide the modules, and print the summary at exit of the script's own process."""
    if ImportFinder not in sys.meta_path:
        sys.meta_path.insert(0, ImportFinder)
        importlib.util.find_spec = hide_torchvision(importlib.util.find_spec)
    process_id, _, summary = os.environ.get(RUN_VARIABLE, "").partition(" ")
    if summary == "quiet":
        import logging

        logging.getLogger(PORT).setLevel(logging.ERROR)
    elif summary and _runs_script(process_id):
        import atexit

        from packhorse_port.notices import print_summary

        # With the process id, because a fork inherits the registration and must stay silent.
        atexit.register(print_summary, os.getpid(), summary == "json")


def _runs_script(process_id: str) -> bool:
    """Whether this process runs the script itself; of several ranks, only the first."""
    # Windows has no exec: `run` started this process as a child and waits for it.
    own_id = os.getppid() if os.name == "nt" else os.getpid()
    return str(own_id) == process_id and os.environ.get("RANK", "0") == "0"


def hide_torchvision(
    original: Callable[..., ModuleSpec | None],
) -> Callable[..., ModuleSpec | None]:
    """`importlib.util.find_spec` that does not find our torchvision."""

    def find_spec(name: str, package: str | None = None) -> ModuleSpec | None:
        if (name in SDK or name in COMPANIONS) and not _is_installed(name):
            return None
        if name.partition(".")[0] == "torchvision":
            loaded = sys.modules.get("torchvision")
            provided = loaded is not None and loaded is sys.modules.get(TORCHVISION)
            if provided or not PathFinder.find_spec("torchvision"):
                return None
        return original(name, package)

    return find_spec


class ImportFinder:
    """Finds the modules that we provide; used as a class, without instances."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: ModuleType | None = None) -> Any:
        top, _, rest = name.partition(".")
        if name in COMPANIONS and not _is_installed(name):
            return _spec(name, AliasLoader(COMPANIONS[name]))
        if name.startswith(IPU_MODULES) and find_spec(TENSORFLOW):
            return _spec(name, IpuLoader)
        # A script's own poptorch.py, in its folder (the first entry of the path), wins.
        if name == "poptorch" and not PathFinder.find_spec(name, sys.path[:1]):
            return _spec(name, AliasLoader(PORT))
        if name == "torchvision":
            return _spec(name, TorchvisionLoader(PathFinder.find_spec(name, path)))
        for alias, home in (("poptorch", PORT), ("torchvision", TORCHVISION)):
            provided = home in sys.modules and sys.modules.get(top) is sys.modules[home]
            if top == alias and provided:
                target_spec = find_spec(f"{home}.{rest}")
                if target_spec:
                    return _spec(name, AliasLoader(target_spec.name))
                return _raise_missing(name)
        if not rest and name in SDK and not _is_installed(name):
            return _raise_missing(name)
        return None


def _is_installed(name: str) -> bool:
    """Whether a module of that name, other than ours, is on the path."""
    return PathFinder.find_spec(name.partition(".")[0]) is not None


def _raise_missing(name: str) -> None:
    """Raise for a module of PopTorch or its SDK if it is known what to write instead."""
    from packhorse_port.names import FAILS
    from packhorse_port.notices import line_prefix

    if hint := SDK.get(name) or FAILS.get(name.removeprefix("poptorch.").partition(".")[0]):
        raise ModuleNotFoundError(f"{line_prefix()}{name} is not provided here: {hint}", name=name)


def _spec(name: str, loader: Any) -> ModuleSpec:
    # Any: subclassing importlib.abc.Loader would import a lot at every start of Python.
    return ModuleSpec(name, loader, is_package=True)


class AliasLoader:
    """Loads a module under a second name; one object, so that its classes exist once."""

    def __init__(self, home: str) -> None:
        self.home = home

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        # Python uses the entry of sys.modules after this call, not the empty module it passed in.
        sys.modules[module.__name__] = import_module(self.home)


class TorchvisionLoader:
    """Loads the installed torchvision, or ours if it fails, as one built for another torch does."""

    def __init__(self, installed: ModuleSpec | None) -> None:
        self.installed = installed

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        from packhorse_port.notices import log_once

        reason = "it is not installed"
        if self.installed and self.installed.loader:
            try:
                installed = module_from_spec(self.installed)
                sys.modules["torchvision"] = installed
                return self.installed.loader.exec_module(installed)
            except Exception as error:
                reason = f"the installed one fails with {type(error).__name__}: {error}"
                for name in [name for name in sys.modules if name.startswith("torchvision.")]:
                    del sys.modules[name]
        sys.modules["torchvision"] = import_module(TORCHVISION)
        log_once(
            "torchvision", f"torchvision is packhorse's, datasets and transforms only: {reason}"
        )


class IpuLoader:
    """Loads TensorFlow's modules for the IPU, all at once."""

    @staticmethod
    def create_module(spec: ModuleSpec) -> None:
        return None

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        name = module.__name__
        del sys.modules[name]
        import_module(TENSORFLOW).install()
        if name not in sys.modules:
            raise ModuleNotFoundError(f"packhorse_port provides no {name}", name=name)
