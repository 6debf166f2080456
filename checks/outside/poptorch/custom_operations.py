"""Stand-ins in PyTorch for the custom operations of PopTorch's tests (their C++ is for Poplar).

The runner names this file in PACKHORSE_PORT_OPS, as a user does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from packhorse_port.custom_ops import registerCustomOp

DOMAIN = "test.poptorch"
MANY = {
    "float_one": 1.0,
    "float_minus_two": -2.0,
    "int_zero": 0,
    "int_minus_five": -5,
    "floats_one_two_three": [1.0, 2.0, 3.0],
    "floats_minus_one_two_three": [-1.0, -2.0, -3.0],
    "ints_one_two_three": [1, 2, 3],
    "ints_minus_one_two_three": [-1, -2, -3],
    "a_string": "string with quotes and slash \" ' \\ end",
    "strs": ["\x01", "\x02", "\x03"],
}


@registerCustomOp("Cube", "com.acme")
def cube(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return x**3 + bias, x**3


@registerCustomOp("LeakyRelu", "com.acme")
def leaky_relu(x: Tensor, alpha: float) -> Tensor:
    return torch.nn.functional.leaky_relu(x, alpha)


@registerCustomOp("AddScalarFloat", DOMAIN)
@registerCustomOp("AddScalarInt", DOMAIN)
def add_scalar(x: Tensor, scalar: float) -> Tensor:
    return x + scalar


@registerCustomOp("AddScalarVecFloat", DOMAIN)
@registerCustomOp("AddScalarVecInt", DOMAIN)
def add_vector(x: Tensor, vec: list[float]) -> Tensor:
    return x + torch.tensor(vec)


@registerCustomOp("AddVecScalarMulFloat", DOMAIN)
def add_and_multiply(x: Tensor, vec: list[float], scalar: float) -> Tensor:
    return (x + torch.tensor(vec)) * scalar


@registerCustomOp("ReduceOp", DOMAIN)
def reduce(x: Tensor, reduction: str) -> Tensor:
    return {"sum": x.sum, "mean": x.mean}[reduction]()


@registerCustomOp("ThreeReduceOp", DOMAIN)
def reduce_three(x: Tensor, y: Tensor, z: Tensor, reductions: list[str]) -> list[Tensor]:
    return [reduce(value, name) for value, name in zip((x, y, z), reductions, strict=True)]


@registerCustomOp("ManyAttributeOp", DOMAIN)
def has_all_attributes(x: Tensor, **attributes: Any) -> Tensor:
    return torch.full_like(x, attributes == MANY)
