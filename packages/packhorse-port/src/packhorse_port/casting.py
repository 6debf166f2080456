"""Numbers of 16 bits: PopTorch's casts between half and float, and `autocast`.

    casts = MixedTypes()
    with casts:                  # around the forward and backward pass of a micro batch
        loss = model(half_inputs, labels)
        loss.backward()
    casts.needed                 # whether half and float met where PyTorch refuses

Elementwise operations of half and float give float, in PopTorch as in PyTorch. Where PyTorch
refuses, PopTorch casts: a linear layer, a convolution or a matrix product computes in, and returns,
the type of its activations, and so do normalizations. So `model.half()` runs with float inputs, and
float weights ("master weights") with half inputs; gradients arrive in the type of each weight.

The casts are made below autograd, on the operations that layers are made of, so that attention,
einsum and the backward pass have them too; a few functions check or promote types before that, and
are intercepted when they are called. That costs some microseconds per operation, and only models
that need it pay.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from packhorse.device import choose_device

HALVES = (torch.float16, torch.bfloat16)
aten = torch.ops.aten
# The argument that holds the activations (in a backward pass: their gradient), whose type the
# others are cast to.
PRODUCTS = {
    aten.mm.default: 0,
    aten.bmm.default: 0,
    aten.mv.default: 0,
    aten.dot.default: 0,
    aten.addmm.default: 1,
    aten.addmv.default: 1,
    aten.baddbmm.default: 1,
}
CHECKED_EARLY = (
    functional.linear,
    torch.conv1d,
    torch.conv2d,
    torch.conv3d,
    torch.conv_transpose1d,
    torch.conv_transpose2d,
    torch.conv_transpose3d,
    functional.bilinear,
    functional.scaled_dot_product_attention,
    functional.multi_head_attention_forward,
)
# PyTorch takes half activations with float weights here, but not the reverse.
NORMS = {
    aten.native_layer_norm.default: 0,
    aten.native_layer_norm_backward.default: 0,
    aten.native_group_norm.default: 0,
    aten.native_group_norm_backward.default: 0,
    aten.native_batch_norm.default: 0,
    aten.native_batch_norm_backward.default: 0,
}
RUNNING_STATISTICS = slice(3, 5)  # of native_batch_norm's arguments, which it changes
# Of a batch norm's arguments the weight and bias, which have the type of the statistics.
SCALES = {aten.native_batch_norm.default: (1, 2), aten.native_batch_norm_backward.default: (2,)}


class MixedTypes:
    """A context that casts the arguments of products and normalizations where types differ."""

    def __init__(self) -> None:
        self.needed = False
        self._modes = (FunctionCasts(self), OperationCasts(self))
        self._entered = ExitStack()

    def __enter__(self) -> Self:
        for mode in self._modes:
            self._entered.enter_context(mode)
        return self

    def __exit__(self, *_: object) -> None:
        self._entered.close()


class FunctionCasts(TorchFunctionMode):
    """The casts of functions that check or promote types before autograd."""

    def __init__(self, owner: MixedTypes) -> None:
        super().__init__()
        self.owner = owner

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in CHECKED_EARLY and _is_mixed([*args, *kwargs.values()]):
            self.owner.needed = True
            dtype = next(v.dtype for v in [*args, *kwargs.values()] if isinstance(v, Tensor))
            args = tuple(_cast(value, dtype) for value in args)
            kwargs = {name: _cast(value, dtype) for name, value in kwargs.items()}
        return func(*args, **kwargs)


class OperationCasts(TorchDispatchMode):
    """The casts of operations below autograd."""

    def __init__(self, owner: MixedTypes) -> None:
        super().__init__()
        self.owner = owner

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        position = PRODUCTS.get(func, NORMS.get(func))
        if position is None or not _is_mixed(args):
            return func(*args, **kwargs)
        self.owner.needed = True
        dtype = args[position].dtype
        if func in NORMS and dtype in HALVES:
            return func(*_like_statistics(func, args), **kwargs)
        cast = [_cast(value, dtype) for value in args]
        result = func(*cast, **kwargs)
        if func is aten.native_batch_norm.default:
            for value, changed in zip(
                args[RUNNING_STATISTICS], cast[RUNNING_STATISTICS], strict=True
            ):
                if value is not None and value is not changed:
                    value.copy_(changed)
        return result


def _like_statistics(func: Any, args: tuple[Any, ...]) -> list[Any]:
    """The arguments, with the weight and bias of a batch norm in the type of its statistics."""
    cast = list(args)
    for position in SCALES.get(func, ()):
        if args[3] is not None:
            cast[position] = _cast(args[position], args[3].dtype)
    return cast


def _is_mixed(values: Any) -> bool:
    """Whether a half and a tensor of another floating type are among the arguments."""
    dtypes = {v.dtype for v in values if isinstance(v, Tensor) and v.is_floating_point()}
    return len(dtypes) > 1 and not dtypes.isdisjoint(HALVES)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    is_float = isinstance(value, Tensor) and value.is_floating_point()
    return value.to(dtype) if is_float else value


class autocast(torch.autocast):
    """`torch.autocast` to half on the device at hand, as a context or a decorator."""

    def __init__(self, enabled: bool = True, dtype: torch.dtype = torch.float16) -> None:
        super().__init__(choose_device().type, dtype=dtype, enabled=enabled)
