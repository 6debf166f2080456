"""A pytest plugin for PopTorch's own tests: what of its inside they import or look at.

Loaded with `-p standins` in a Python that `packhorse port` has prepared, where `poptorch` is
`packhorse.port`. Nothing here changes how a model is run.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import poptorch  # pyright: ignore[reportMissingImports]


def core() -> ModuleType:
    """`poptorch.poptorch_core`, the compiled part: the error, and a check that finds no fault."""
    module: Any = ModuleType("poptorch.poptorch_core")
    module.Error = poptorch.Error
    module._validateOptions = lambda options: None
    return module


sys.modules["poptorch.poptorch_core"] = poptorch.poptorch_core = core()
poptorch.optim.VariableAttributes._allowed_attributes = property(lambda self: self._allowed)
