"""A pytest plugin for PopTorch's own tests: what of its inside they import or look at.

Loaded with `-p standins` in a Python that `packhorse port` has prepared, where `poptorch` is
`packhorse_port`. Nothing here changes how a model is run.
"""

from __future__ import annotations

import enum
import subprocess
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import poptorch as packhorse_port  # pyright: ignore[reportMissingImports]
import pytest
import torch.utils.data

poptorch: Any = packhorse_port

CUSTOM_LIBRARIES = ("libcustom_cube_op.so", "libcustom_leaky_relu_op.so")


class TestErrorType(enum.Enum):
    """Failures that PopTorch's compiled part can pretend."""

    __test__ = False
    PoplarUnrecoverable = 0
    PoplarUnknown = 1
    PoplarRecoverableFullReset = 2
    PoplarLinkError = 3


def set_popart_log_level(level: Any) -> None:
    """Of PopART's log only its levels are known here."""
    if level not in ("TRACE", "DEBUG", "INFO", "WARN", "ERR", "OFF"):
        raise ValueError(f"Level must be one of PopART's, not {level}")


def private_modules() -> None:
    """Modules of PopTorch that begin with an underscore, as far as its tests use them."""
    logging: Any = ModuleType("poptorch._logging")
    logging.setPopartLogLevel = set_popart_log_level
    logging.setLogLevel = poptorch.setLogLevel
    implementation: Any = ModuleType("poptorch._impl")
    implementation.isDispatchTracing = lambda: False
    implementation._restoreWrapperIfNecessary = lambda model: model
    for module in (logging, implementation):
        sys.modules[module.__name__] = module
        setattr(poptorch, module.__name__.rpartition(".")[2], module)
    core: Any = poptorch.poptorch_core
    core._validateOptions = lambda options: None  # finds no fault
    core.isCompilingWithDispatcher = lambda: False
    core.TestErrorType = TestErrorType


def torch_of_that_time() -> None:
    """What torch 2.0 took and torch of today refuses."""
    torch.utils.data.Sampler.__init__ = lambda self, data_source=None: None
    for owner in (torch, torch.Tensor):
        for name in ("scatter", "scatter_"):
            if original := getattr(owner, name, None):
                setattr(owner, name, reduce_by_position(original))


def reduce_by_position(original: Callable[..., Any]) -> Callable[..., Any]:
    """`scatter` that takes its `reduce` by position."""

    @wraps(original)
    def scatter(*args: Any, **kwargs: Any) -> Any:
        if len(args) > 4:
            kwargs["reduce"] = args[4]
        if kwargs.get("reduce", "") is None:
            del kwargs["reduce"]
        return original(*args[:4], **kwargs)

    return scatter


def torchvision_models() -> None:
    """Skip the tests that make a model of torchvision, where it is not installed."""
    torchvision: Any = __import__("torchvision")
    if not hasattr(torchvision, "models"):
        module: Any = ModuleType("torchvision.models")
        module.__getattr__ = skip_torchvision
        torchvision.models = sys.modules["torchvision.models"] = module


def skip_torchvision(name: str) -> NoReturn:
    if name.startswith("__"):
        raise AttributeError(name)
    pytest.skip(f"torchvision.models.{name} is not installed", allow_module_level=True)


def custom_libraries() -> None:
    """Libraries for the tests to load; the operations themselves are in custom_operations.py."""
    folder = Path.cwd() / "tests"
    folder.mkdir(exist_ok=True)
    library = next(Path(torch.__file__).parent.glob("lib/libtorch_python.*"))  # any that loads
    for name in CUSTOM_LIBRARIES:
        if not (folder / name).exists():
            (folder / name).symlink_to(library)


def patient_processes() -> None:
    """Twenty times the seconds that a test gives another Python, on a machine with other work."""
    original = subprocess.Popen.communicate

    def communicate(self: Any, input: Any = None, timeout: float | None = None) -> Any:
        return original(self, input, timeout and 20 * timeout)

    subprocess.Popen.communicate = communicate


private_modules()
patient_processes()
torch_of_that_time()
torchvision_models()
custom_libraries()
poptorch.optim.VariableAttributes._allowed_attributes = property(lambda self: self._allowed)
