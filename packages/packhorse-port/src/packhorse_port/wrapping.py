"""`trainingModel` and `inferenceModel`: a module becomes an executor, whose call is a host call.

training = trainingModel(model, options=opts, optimizer=optimizer)
inference = inferenceModel(model.eval(), options=opts)
"""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from typing import Any

import torch
from torch import nn

from packhorse.errors import InputError
from packhorse_port import saved
from packhorse_port.executor import PoplarExecutor
from packhorse_port.notices import place, say_once
from packhorse_port.options import Options
from packhorse_port.wrapped import refuse_wrapped

RATE = 0.01  # of the optimizer that PopTorch takes where none is given


def trainingModel(
    model: nn.Module | PoplarExecutor,
    options: Options | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> PoplarExecutor:
    """Wrap a module whose forward returns a loss; without an optimizer, SGD with a rate of 0.01."""
    module = _module(model, "trainingModel")
    options = _options(options, "trainingModel")
    refuse_wrapped(module)
    if optimizer is None:
        optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
        say_once("optimizer", f"no optimizer was given: SGD with lr={RATE}, as PopTorch takes")
    return PoplarExecutor(module, options, True, optimizer)


def inferenceModel(
    model: nn.Module | PoplarExecutor, options: Options | None = None
) -> PoplarExecutor:
    """Wrap a module to be run without gradients, in the mode it is in; say `model.eval()` first."""
    module, options = _module(model, "inferenceModel"), _options(options, "inferenceModel")
    if options.gradient_accumulation != 1:
        raise InputError(
            f"{place()}You must set poptorch.Options().Training.gradientAccumulation to 1 or leave"
            " it as its default value (1) when running a poptorch.inferenceModel(). Give it options"
            " of its own: poptorch.Options().deviceIterations(n)"
        )
    return PoplarExecutor(module, options, False)


def load(
    filename: str | PathLike[str], edit_opts_fn: Callable[[Options], Any] | None = None
) -> PoplarExecutor:
    """The executor that `save` or `compileAndExport` wrote, its module's class being imported."""
    found = saved.read(filename)
    options = Options.fromDict(found.about["options"])
    if edit_opts_fn is not None:
        edit_opts_fn(options)
    module = saved.rebuild(found)
    optimizer = saved.rebuild_optimizer(found, module)
    make = PoplarExecutor(module, options, found.about["training"], optimizer)
    make._restore(found)
    return make


def _module(model: Any, what: str) -> nn.Module:
    if isinstance(model, PoplarExecutor):
        return model.model
    if not isinstance(model, nn.Module):
        raise InputError(
            f"{place()}{what} takes a torch.nn.Module, not a {type(model).__name__}; write"
            f" {what}(model, options=opts)"
        )
    return model


def _options(options: Any, what: str) -> Options:
    if options is not None and not isinstance(options, Options):
        raise InputError(
            f"{place()}the options of {what} are a {type(options).__name__}; write"
            f" {what}(model, options=poptorch.Options())"
        )
    return options if options is not None else Options()
