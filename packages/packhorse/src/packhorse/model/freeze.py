"""Prepare layers for CPU inference: weights reordered once; activations, sums and norms fused.

Products in fp32 of narrow layers are our own C on x86 (product.c): as fast as oneDNN's, with a GELU
that costs less, and a row's result has the same bits whatever the other rows are. All others are
oneDNN's: torch reorders a weight on every call of a linear layer; doing it once saves a tenth of
each product, and oneDNN applies the activation while the result is still in a register. The
operators are those that torch's own compiler emits, but they are not public: if one is missing,
layers stay as they are. So do the norms if add_norm.c cannot be compiled. A frozen model has no
weights to train or save.

On a processor without bf16 multiplication, products are computed in fp32: weights and inputs are
widened and results rounded to bf16. Hardware with bf16 computes the same (exact products, sums in
fp32), so that both give equal results up to rounding. It takes the time and memory of fp32: a
fourth to a twelfth of the time of torch's own bf16 on such a processor.

Shapes: T tokens, E hidden width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from packhorse.errors import KernelError
from packhorse.model.bert import AddNorm, UpProjection
from packhorse.native import (
    FLOAT,
    INT,
    LONG,
    POINTER,
    UNSIGNED,
    Obstacle,
    function,
    openmp_entry,
    warn_slow,
)
from packhorse.processor import features

# Our activation names as oneDNN's post-operations: (operation, its algorithm).
FUSED = {"gelu": ("gelu", "none"), "gelu_tanh": ("gelu", "tanh"), "relu": ("relu", "")}
ACTIVATIONS = (None, *FUSED)  # in the order of product.c
SUPPORTED_DTYPES = (torch.float32, torch.bfloat16)
ADD_NORM = Path(__file__).with_name("add_norm.c")
PRODUCT = Path(__file__).with_name("product.c")
LARGEST_PACKED = 1 << 20  # numbers of a weight; with more, oneDNN's products are faster
PANEL = 32  # columns that product.c has weights padded to a multiple of
BLOCK = 64  # columns that add_norm.c computes at once; weight and bias are padded to a multiple
FEW_ROWS = 32  # with fewer rows, waking the other threads costs more than they save
FEW_PRODUCTS = 1 << 20  # multiplications, likewise


class FrozenLinear(nn.Module):
    """A linear layer (and activation) over a weight in oneDNN's own layout."""

    def __init__(self, linear: nn.Linear, activation: str | None = None) -> None:
        super().__init__()
        dtype = _product_dtype(linear.weight.dtype)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach().to(dtype))
        self.bias = None if linear.bias is None else linear.bias.detach().to(dtype)
        self.operation, self.algorithm = FUSED[activation] if activation else ("none", "")

    def forward(self, x: Tensor) -> Tensor:
        """[T, in] to [T, out]."""
        y = torch.ops.mkldnn._linear_pointwise(
            x.to(self.weight.dtype), self.weight, self.bias, self.operation, [], self.algorithm
        )
        return y.to(x.dtype)


class PackedLinear(nn.Module):
    """A linear layer (and activation) in fp32 by compiled C, product.c.

    Inputs and results may be bf16. A row's bits depend neither on other rows nor on the threads.
    """

    def __init__(self, linear: nn.Linear, activation: str | None = None) -> None:
        super().__init__()
        self.inputs = linear.in_features
        self.outputs = linear.out_features
        self.activation = ACTIVATIONS.index(activation)
        padding = -self.outputs % PANEL
        weight = linear.weight.detach().float().contiguous()
        self.weight = torch.zeros(self.outputs + padding, self.inputs)
        _products().pack(weight.data_ptr(), self.weight.data_ptr(), *reversed(weight.shape))
        bias = torch.zeros(self.outputs) if linear.bias is None else linear.bias.detach().float()
        self.bias = F.pad(bias, (0, padding))

    def forward(self, x: Tensor) -> Tensor:
        """[T, in] to [T, out]."""
        if x.shape[-1] != self.inputs or x.device.type != "cpu":
            raise KernelError(
                f"a frozen linear layer takes [tokens, {self.inputs}] on the CPU, not "
                f"{list(x.shape)} on {x.device}"
            )
        wide = x.float().contiguous()
        rows = wide.numel() // self.inputs
        out = torch.empty(*x.shape[:-1], self.outputs)
        _products().product(
            wide.data_ptr(),
            self.weight.data_ptr(),
            self.bias.data_ptr(),
            out.data_ptr(),
            rows,
            self.inputs,
            self.outputs,
            self.activation,
            openmp_entry(),
            torch.get_num_threads() if rows * self.weight.numel() >= FEW_PRODUCTS else 1,
        )
        return out.to(x.dtype)


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
        self.width = len(norm.weight)
        self.dtype = norm.weight.dtype
        self.eps = norm.eps
        padding = (0, -self.width % BLOCK)
        self.weight = F.pad(norm.weight.detach().float(), padding)
        self.bias = F.pad(norm.bias.detach().float(), padding)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """Both inputs and the result are [T, E]."""
        self._check(x, residual)
        x = x.contiguous()
        residual = residual.contiguous()
        threads = torch.get_num_threads() if len(x) >= FEW_ROWS else 1
        out = torch.empty_like(x)
        scratch = torch.empty(threads, len(self.weight))  # a row of x + residual per thread
        _add_norm(self.dtype == torch.bfloat16)(
            x.data_ptr(),
            residual.data_ptr(),
            self.weight.data_ptr(),
            self.bias.data_ptr(),
            out.data_ptr(),
            scratch.data_ptr(),
            len(x),
            self.width,
            len(self.weight),
            self.eps,
            openmp_entry(),
            threads,
        )
        return out

    def _check(self, *tensors: Tensor) -> None:
        """Check what torch would check: C reads or writes out of bounds instead of raising."""
        expected = (len(tensors[0]), self.width)
        for x in tensors:
            if x.shape != expected or x.dtype != self.dtype or x.device.type != "cpu":
                raise KernelError(
                    f"a frozen LayerNorm takes two tensors [tokens, {self.width}] of {self.dtype} "
                    f"on the CPU, not {list(x.shape)} of {x.dtype} on {x.device}"
                )


@cache
def _add_norm(bf16: bool) -> Callable[..., None]:
    argument_types = (*[POINTER] * 6, *[LONG] * 3, FLOAT, POINTER, UNSIGNED)
    defines = (f"BF16={int(bf16)}", f"BLOCK={BLOCK}")
    return function(ADD_NORM, "packhorse_add_norm", argument_types, defines)


class Products(NamedTuple):
    """The functions of product.c."""

    pack: Callable[..., None]
    product: Callable[..., None]


@cache
def _products() -> Products:
    if not features().avx2:
        reason = "products in C are for x86 with AVX2; elsewhere oneDNN's were not compared"
        raise Obstacle(reason, fixable=False)
    openmp_entry()  # or the obstacle would come with the first batch
    types = (*[POINTER] * 4, *[LONG] * 3, INT, POINTER, UNSIGNED)
    pack = function(PRODUCT, "packhorse_pack_weight", (POINTER, POINTER, LONG, LONG))
    return Products(pack, function(PRODUCT, "packhorse_product", types))


@cache
def _has_products() -> bool:
    try:
        _products()
    except Obstacle as reason:  # oneDNN's will do
        warn_slow(reason)
        return False
    return True


def _frozen(linear: nn.Linear, activation: str | None = None) -> nn.Module:
    """The layer by the fastest code for its products."""
    use_product_c = (
        _product_dtype(linear.weight.dtype) == torch.float32
        and linear.weight.numel() <= LARGEST_PACKED
        and _has_products()
    )
    return (PackedLinear if use_product_c else FrozenLinear)(linear, activation)


@cache  # or every norm of a model would try the compiler again
def _has_fused_add_norm(dtype: torch.dtype) -> bool:
    try:
        _add_norm(dtype == torch.bfloat16)
        openmp_entry()
    except Obstacle as reason:  # torch's own LayerNorm will do
        warn_slow(reason)
        return False
    return dtype in SUPPORTED_DTYPES


def _product_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a model of `dtype` computes products: one the processor can multiply."""
    wide = dtype == torch.bfloat16 and not features().bf16
    return torch.float32 if wide else dtype


def can_freeze(dtype: torch.dtype) -> bool:
    """Does this build of torch have what `freeze` needs?"""
    operators = ("_reorder_linear_weight", "_linear_pointwise")
    has_operators = all(hasattr(torch.ops.mkldnn, name) for name in operators)
    return has_operators and torch.backends.mkldnn.is_available() and dtype in SUPPORTED_DTYPES


def freeze(module: nn.Module) -> None:
    """Replace the linear layers and norms below `module` in place, for inference on a CPU."""
    for name, child in module.named_children():
        plain = isinstance(getattr(child, "dense", None), nn.Linear)  # not of another dtype
        if isinstance(child, UpProjection) and plain and child.activation in FUSED:
            setattr(module, name, _frozen(child.dense, child.activation))
        elif isinstance(child, nn.Linear):
            setattr(module, name, _frozen(child))
        elif isinstance(child, AddNorm) and _has_fused_add_norm(child.weight.dtype):
            setattr(module, name, FrozenAddNorm(child))
        else:
            freeze(child)


def widen(module: nn.Module) -> None:
    """Make linear layers multiply in fp32 if the processor has no bf16 multiplication.

    For layers that cannot be frozen because they are compiled.
    """
    for name, child in module.named_children():
        if (
            isinstance(child, nn.Linear)
            and _product_dtype(child.weight.dtype) != child.weight.dtype
        ):
            setattr(module, name, WideLinear(child))
        else:
            widen(child)
