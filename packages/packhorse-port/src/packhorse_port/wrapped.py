"""Which modules a trainingModel has wrapped: two at a time would train two sets of weights.

PopTorch gives a module that it has wrapped two methods of the executor; so do we, in an object that
a pickle or a copy of the module leaves behind empty.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from packhorse.errors import PackhorseError
from packhorse_port.notices import place

METHODS = ("destroy", "copyWeightsToHostIfNeeded")
_wrapped: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Any]] = weakref.WeakKeyDictionary()


class AlreadyWrapped(PackhorseError, RuntimeError):
    """A module was given to a second trainingModel; a RuntimeError in PopTorch."""


class ExecutorMethod:
    """A method of the executor that wraps a module; of none once it was copied or has ended."""

    def __init__(self, name: str = "", executor: weakref.ref[Any] | None = None) -> None:
        self.name = name
        self.executor = executor

    def __call__(self) -> Any:
        executor = self.executor() if self.executor else None
        return getattr(executor, self.name)() if executor else False

    def __reduce__(self) -> Any:
        return ExecutorMethod, (self.name,)


def refuse_wrapped(model: nn.Module) -> None:
    """The words are PopTorch's."""
    reference = _wrapped.get(model)
    if reference is not None and reference() is not None:
        raise AlreadyWrapped(
            f"{place()}Model has already been wrapped in 'poptorch.trainingModel'. Call"
            " model.destroy() on the model to unwrap before wrapping again."
        )


def wrap(model: nn.Module, executor: object) -> None:
    """A trainingModel has this module from now on."""
    reference = weakref.ref(executor)
    _wrapped[model] = reference
    for name in METHODS:
        if not hasattr(model, name):
            model.__dict__[name] = ExecutorMethod(name, reference)


def unwrap(model: nn.Module) -> None:
    """It may be wrapped again."""
    _wrapped.pop(model, None)
    for name in METHODS:
        if isinstance(model.__dict__.get(name), ExecutorMethod):
            del model.__dict__[name]
