"""Run a script written for PopTorch or TensorFlow's IPU, as `python SCRIPT` would.

    run(["train.py", "--epochs", "3"])     # this process becomes `python train.py --epochs 3`

The process is replaced by a fresh Python that runs the script itself, so that everything about it
is Python's own: `sys.argv`, `__main__`, `sys.path`, tracebacks, exit codes, signals, `-`, a missing
file. The one difference is `PYTHONPATH`, which leads to `startup/sitecustomize.py`: Python runs it
before anything else, here and in every process the script starts (the workers of a DataLoader, by
fork or spawn), and it calls `install()`. The price is one more start of Python, some 30 ms; and a
Python that ignores its environment (-I, -E, -S) cannot be helped.

`install()` adds an import finder: `poptorch` is `packhorse_port`, under both names one module;
`torchvision` is the installed one, or ours where there is none or it fails to import;
`tensorflow.python.ipu` and its like come from `packhorse_port.tensorflow`. A library that asks
whether there is a torchvision, as transformers does before it defines its models, is told of the
installed one only: ours would not serve it.
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

STARTUP = os.path.join(os.path.dirname(os.path.abspath(__file__)), "startup")
RUN = "PACKHORSE_PORT_RUN"  # "the process's number, what it shall say at its end"
Say = Literal["text", "json", "quiet"]

PORT, TORCHVISION, TENSORFLOW = (
    "packhorse_port",
    "packhorse_port.torchvision",
    "packhorse_port.tensorflow",
)
IPU = ("tensorflow.python.ipu", "tensorflow.keras.ipu", "keras.ipu")


def run(words: Sequence[str], say: Say = "text") -> NoReturn:
    """Become `python SCRIPT ARGS…`; `say` is how the summary at its end is given."""
    command = [sys.executable, *_flags(), *words]
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(
        [STARTUP, *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    environment[RUN] = f"{os.getpid()} {say}"
    sys.stdout.flush()
    sys.stderr.flush()
    if os.name == "nt":  # there exec ends this process before the script's, and the shell goes on
        import subprocess

        raise SystemExit(subprocess.run(command, env=environment).returncode)
    os.execve(sys.executable, command, environment)


def _flags() -> list[str]:
    """This Python's own options (-O, -W, -X …), for the one that runs the script."""
    import subprocess

    if sys.flags.ignore_environment or sys.flags.no_site:
        raise InputError(
            "python -I, -E and -S hide PYTHONPATH, through which poptorch is provided;"
            " run packhorse port without them"
        )
    unbuffered = ["-u"] if getattr(sys.stdout, "write_through", False) else []
    return [*subprocess._args_from_interpreter_flags(), *unbuffered]  # pyright: ignore[reportAttributeAccessIssue]


def install() -> None:
    """Provide the modules from now on; and, in the script's own process, the summary at the end."""
    if Finder not in sys.meta_path:
        sys.meta_path.insert(0, Finder)
        importlib.util.find_spec = hide_torchvision(importlib.util.find_spec)
    number, _, say = os.environ.get(RUN, "").partition(" ")
    if say == "quiet":
        import logging

        logging.getLogger(PORT).setLevel(logging.ERROR)
    elif say and _is_asked(number):
        import atexit

        from packhorse_port.summary import tell

        # Given the process, because a fork inherits the registration and must stay silent.
        atexit.register(tell, os.getpid(), say == "json")


def _is_asked(number: str) -> bool:
    """Is this the process that became the script? Of several ranks, the first."""
    process = os.getppid() if os.name == "nt" else os.getpid()
    return str(process) == number and os.environ.get("RANK", "0") == "0"


def hide_torchvision(ask: Callable[..., ModuleSpec | None]) -> Callable[..., ModuleSpec | None]:
    """`importlib.util.find_spec` that does not tell of the torchvision that is ours."""

    def find_spec(name: str, package: str | None = None) -> ModuleSpec | None:
        if name.partition(".")[0] == "torchvision":
            loaded = sys.modules.get("torchvision")
            ours = loaded is not None and loaded is sys.modules.get(TORCHVISION)
            if ours or not PathFinder.find_spec("torchvision"):
                return None
        return ask(name, package)

    return find_spec


class Finder:
    """Which loader brings a module, for those that are ours to bring; never made, only asked."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: ModuleType | None = None) -> Any:
        top, _, rest = name.partition(".")
        if name.startswith(IPU) and find_spec(TENSORFLOW):
            return _spec(name, Ipu)
        if name == "poptorch" and not PathFinder.find_spec(name, sys.path[:1]):
            return _spec(name, Alias(PORT))
        if name == "torchvision":
            return _spec(name, Torchvision(PathFinder.find_spec(name, path)))
        for alias, home in (("poptorch", PORT), ("torchvision", TORCHVISION)):
            if top == alias and sys.modules.get(top) is sys.modules.get(home, name):
                ours = find_spec(f"{home}.{rest}")
                return _spec(name, Alias(ours.name)) if ours else _missing(name)
        return None


def _missing(name: str) -> None:
    """A submodule of PopTorch's that is not there: what to write instead, where that is known."""
    from packhorse_port.names import FAILS
    from packhorse_port.notices import place

    if hint := FAILS.get(name.removeprefix("poptorch.").partition(".")[0]):
        raise ModuleNotFoundError(f"{place()}{name} is not provided here: {hint}", name=name)


def _spec(name: str, loader: Any) -> ModuleSpec:
    # Any: to subclass importlib.abc.Loader would import much at every start of Python.
    return ModuleSpec(name, loader, is_package=True)


class Alias:
    """A second name of a module: both are one, so that its classes are not made twice."""

    def __init__(self, home: str) -> None:
        self.home = home

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        # Python takes what stands here when the loader is done, not the empty module it gave us.
        sys.modules[module.__name__] = import_module(self.home)


class Torchvision:
    """The installed torchvision if it imports; built for another torch, it often does not."""

    def __init__(self, installed: ModuleSpec | None) -> None:
        self.installed = installed

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        from packhorse_port.notices import say_once

        why = "it is not installed"
        if self.installed and self.installed.loader:
            try:
                sys.modules["torchvision"] = real = module_from_spec(self.installed)
                return self.installed.loader.exec_module(real)
            except Exception as error:
                why = f"the installed one fails with {type(error).__name__}: {error}"
                for name in [name for name in sys.modules if name.startswith("torchvision.")]:
                    del sys.modules[name]
        sys.modules["torchvision"] = import_module(TORCHVISION)
        say_once("torchvision", f"torchvision is packhorse's, datasets and transforms only: {why}")


class Ipu:
    """TensorFlow's modules for the IPU, all at once."""

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
