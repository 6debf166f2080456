"""`custom_op`: operations written for an IPU, replaced by stand-ins that the user registers.

    @poptorch.registerCustomOp("Cube", "com.acme")
    def cube(x, bias):
        return x**3 + bias, x**3

    y, z = poptorch.custom_op([x, bias], "Cube", "com.acme", 1, example_outputs=[x, x])

A custom operation is C++ for Poplar, which nothing here can run. Its stand-in is any callable over
tensors: a Python function, `apply` of a torch.autograd.Function that has a gradient of its own, or
an operation in C++ (`torch.ops.load_library("cube.so")`, then `torch.ops.acme.cube`). It gets the
inputs and, by name, the attributes. For scripts that run unchanged, PACKHORSE_PORT_OPS names Python
files that register stand-ins; they are run at the first `custom_op`.
"""

from __future__ import annotations

import os
import runpy
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor

from packhorse_port.names import CUSTOM_OPS
from packhorse_port.notices import UsageError, line_prefix

Function = TypeVar("Function", bound=Callable[..., Any])

_stand_ins: dict[tuple[str, str], Callable[..., Any]] = {}  # by (domain, name)
_files_run: set[str] = set()


def _fast_gather(data: Tensor, index: Tensor, **attributes: Any) -> Tensor:
    return data.gather(-1, index.long())


# The only operation that PopTorch itself brings.
_stand_ins["poptorch.custom_ops", "FastGatherLastDim"] = _fast_gather


def registerCustomOp(name: str, domain: str) -> Callable[[Function], Function]:
    """A decorator: the function computes the custom operation `name` of `domain`."""

    def register(function: Function) -> Function:
        if not callable(function):
            raise UsageError(
                f"{line_prefix()}the stand-in for {domain}.{name} is a {type(function).__name__};"
                " register a function of tensors"
            )
        _stand_ins[domain, name] = function
        return function

    return register


def custom_op(
    inputs: Sequence[Tensor],
    name: str,
    domain: str,
    domain_version: int,
    example_outputs: Sequence[Tensor],
    attributes: dict[str, Any] | None = None,
) -> list[Tensor]:
    """The outputs of the stand-in for a custom operation, as many as there are examples."""
    _run_files()
    stand_in = _stand_ins.get((domain, name))
    if stand_in is None:
        raise UsageError(
            f"{line_prefix()}custom_op: {domain}.{name} was compiled for an IPU. Write it in"
            f' PyTorch: @packhorse_port.registerCustomOp("{name}", "{domain}") above'
            f" def {name.lower()}(tensors…, attributes…), in the script or in a file that"
            f" {CUSTOM_OPS} names"
        )
    outputs = stand_in(*inputs, **(attributes or {}))
    tensors = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    if len(tensors) != len(example_outputs):
        raise UsageError(
            f"{line_prefix()}custom_op: the stand-in for {domain}.{name} returned {len(tensors)}"
            f" tensors; example_outputs has {len(example_outputs)}"
        )
    return tensors


def _run_files() -> None:
    """Run the files that the environment names, once each."""
    for path in filter(None, os.environ.get(CUSTOM_OPS, "").split(os.pathsep)):
        if path not in _files_run:
            if not os.path.exists(path):
                raise UsageError(f"{CUSTOM_OPS} names {path}, which does not exist")
            _files_run.add(path)
            runpy.run_path(path)
