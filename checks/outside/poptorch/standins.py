"""A pytest plugin for PopTorch's own tests: what of its inside they import or look at.

Loaded with `-p standins` in a Python that `packhorse port` has prepared, where `poptorch` is
`packhorse_port`. Nothing here changes how a model is run.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import poptorch  # pyright: ignore[reportMissingImports]
import torch.utils.data

from packhorse import optim


def core() -> ModuleType:
    """`poptorch.poptorch_core`, the compiled part: the error, and a check that finds no fault."""
    module: Any = ModuleType("poptorch.poptorch_core")
    module.Error = poptorch.Error
    module._validateOptions = lambda options: None
    return module


class LAMB(optim.LAMB):
    """A class that tests extend; ours is a function that makes such an optimizer."""

    def __init__(self, params: Any, **settings: Any) -> None:
        optimizer = make_lamb(params, **settings)
        self.__dict__.update(vars(optimizer))


make_lamb = poptorch.optim.LAMB
poptorch.optim.LAMB = LAMB
sys.modules["poptorch.poptorch_core"] = poptorch.poptorch_core = core()
poptorch.optim.VariableAttributes._allowed_attributes = property(lambda self: self._allowed)


def _take_source(self: Any, data_source: Any = None) -> None:
    """torch 2.0's `Sampler` took the data set; PopTorch's tests pass it."""


torch.utils.data.Sampler.__init__ = _take_source
