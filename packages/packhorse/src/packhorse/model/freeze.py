"""Layers prepared for CPU inference: weights laid out once; GELU, sums and norms fused.

torch reorders a weight on every call of a linear layer; done once it saves a tenth of each product,
and oneDNN applies the activation while the result is still in a register. The operators are torch's
own, those its compiler emits, but not public: where one is missing, layers stay as they are. So do
the norms where add_norm.c cannot be compiled. A frozen model has no weights to train or save.

A processor that does not multiply bf16 multiplies in fp32: weights and inputs are widened, results
rounded to bf16. That is what bf16 hardware computes too (exact products, sums in fp32), so a model
gives the same on both to rounding; it takes the time and the memory of fp32, a fourth to a twelfth
of the time of torch's own bf16 on such a processor.

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
from packhorse.native import (
    FLOAT,
    LONG,
    POINTER,
    UNSIGNED,
    Obstacle,
    function,
    openmp_entry,
    warn_lost,
)
from packhorse.processor import features

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
        dtype = _multiplied(linear.weight.dtype)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach().to(dtype))
        self.bias = None if linear.bias is None else linear.bias.detach().to(dtype)
        self.post, self.algorithm = FUSED[activation] if activation else ("none", "")

    def forward(self, x: Tensor) -> Tensor:
        """[T, in] to [T, out]."""
        y = torch.ops.mkldnn._linear_pointwise(
            x.to(self.weight.dtype), self.weight, self.bias, self.post, [], self.algorithm
        )
        return y.to(x.dtype)


class WideLinear(nn.Module):
    """A linear layer whose inputs and results are bf16 and whose product is fp32."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        bias = None if linear.bias is None else linear.bias.detach().float()
        self.register_buffer("weight", linear.weight.detach().float())
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        """[T, in] to [T, out]."""
        return F.linear(x.float(), self.weight, self.bias).to(x.dtype)


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
    except Obstacle as reason:  # then torch's own will do
        warn_lost(reason)
        return False
    return dtype in SERVED


def _multiplied(dtype: torch.dtype) -> torch.dtype:
    """The format of the products of a model in `dtype`: what the processor multiplies."""
    wide = dtype == torch.bfloat16 and not features().bf16
    return torch.float32 if wide else dtype


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


def widen(module: nn.Module) -> None:
    """Have linear layers that stay as they are multiply in fp32 where the processor has no bf16.

    For what cannot be frozen: layers that are compiled.
    """
    for name, child in module.named_children():
        if isinstance(child, nn.Linear) and _multiplied(child.weight.dtype) != child.weight.dtype:
            setattr(module, name, WideLinear(child))
        else:
            widen(child)
