"""Layers prepared for CPU inference: weights laid out once; GELU, sums and norms fused.

torch reorders a weight on every call of a linear layer; done once it saves a tenth of each product,
and oneDNN applies the activation while the result is still in a register. The operators are torch's
own, those its compiler emits, but not public: where one is missing, layers stay as they are. So do
the norms where add_norm.c cannot be compiled. A frozen model has no weights to train or save.

Shapes: T tokens, E hidden width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from packhorse.errors import KernelError
from packhorse.model.bert import AddNorm, Up
from packhorse.native import FLOAT, LONG, POINTER, UNSIGNED, Obstacle, function, openmp_entry

# Our activation names as oneDNN's post-operations: (operation, its algorithm).
FUSED = {"gelu": ("gelu", "none"), "gelu_tanh": ("gelu", "tanh"), "relu": ("relu", "")}
SERVED = (torch.float32, torch.bfloat16)
ADD_NORM = Path(__file__).with_name("add_norm.c")
BLOCK = 64  # columns that add_norm.c computes at once; what it reads of ours is filled up to that
FEW_ROWS = 32  # below, waking the other threads costs more than they save


class FrozenLinear(nn.Module):
    """A linear layer (and activation) over a weight in oneDNN's own layout."""

    def __init__(self, linear: nn.Linear, activation: str | None = None) -> None:
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())
        self.bias = None if linear.bias is None else linear.bias.detach()
        self.post, self.algorithm = FUSED[activation] if activation else ("none", "")

    def forward(self, x: Tensor) -> Tensor:
        """[T, in] to [T, out]."""
        return torch.ops.mkldnn._linear_pointwise(
            x, self.weight, self.bias, self.post, [], self.algorithm
        )


class FrozenAddNorm(nn.Module):
    """A residual sum and its LayerNorm in one pass of compiled C, add_norm.c."""

    def __init__(self, norm: AddNorm) -> None:
        super().__init__()
        self.width, self.dtype, self.eps = len(norm.weight), norm.weight.dtype, norm.eps
        fill = (0, -self.width % BLOCK)
        self.weight, self.bias = (F.pad(x.detach().float(), fill) for x in (norm.weight, norm.bias))

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """[T, E] each, and the result."""
        self._check(x, residual)
        x, residual = x.contiguous(), residual.contiguous()
        threads = torch.get_num_threads() if len(x) >= FEW_ROWS else 1
        out, scratch = torch.empty_like(x), torch.empty(threads, len(self.weight))
        _add_norm(self.dtype == torch.bfloat16)(
            *(y.data_ptr() for y in (x, residual, self.weight, self.bias, out, scratch)),
            *(len(x), self.width, len(self.weight)),
            *(self.eps, openmp_entry(), threads),
        )
        return out

    def _check(self, *tensors: Tensor) -> None:
        """C would read or write astray where torch would raise."""
        expected = (len(tensors[0]), self.width)
        for x in tensors:
            if x.shape != expected or x.dtype != self.dtype or x.device.type != "cpu":
                raise KernelError(
                    f"a frozen LayerNorm takes two tensors [tokens, {self.width}] of {self.dtype} "
                    f"on the CPU, not {list(x.shape)} of {x.dtype} on {x.device}"
                )


@cache
def _add_norm(bf16: bool) -> Callable[..., None]:
    takes = (*[POINTER] * 6, *[LONG] * 3, FLOAT, POINTER, UNSIGNED)
    defines = (f"BF16={int(bf16)}", f"BLOCK={BLOCK}")
    return function(ADD_NORM, "packhorse_add_norm", takes, defines)


@cache  # else every norm of a model would try the compiler again
def _adds(dtype: torch.dtype) -> bool:
    try:
        _add_norm(dtype == torch.bfloat16)
    except Obstacle:  # then torch's own will do
        return False
    return dtype in SERVED


def can_freeze(dtype: torch.dtype) -> bool:
    """Does this build of torch have what `freeze` needs?"""
    present = all(
        hasattr(torch.ops.mkldnn, name) for name in ("_reorder_linear_weight", "_linear_pointwise")
    )
    return present and torch.backends.mkldnn.is_available() and dtype in SERVED


def freeze(module: nn.Module) -> None:
    """Replace the linear layers and norms below `module` in place, for inference on a CPU."""
    for name, child in module.named_children():
        if isinstance(child, Up) and child.activation in FUSED:
            setattr(module, name, FrozenLinear(child.dense, child.activation))
        elif isinstance(child, nn.Linear):
            setattr(module, name, FrozenLinear(child))
        elif isinstance(child, AddNorm) and _adds(child.weight.dtype):
            setattr(module, name, FrozenAddNorm(child))
        else:
            freeze(child)
