"""int8 on CPUs: linear layers, and the rest of a BERT layer in one call of compiled C, int8.c.

Weights have a scale per output channel, activations a scale and a zero point per token. A scale per
batch or static ranges are what other runtimes use, and cheaper to compute; but per token a
neighbor cannot move a result, outliers of one token do not cost the others precision, and no
calibration is needed. Products are sums of integers, which are exact in any order, and the rest is
computed per token in one order: results are equal bit by bit in every batch.

Hidden states, sums, norms and heads stay fp32, attention is bf16 where the processor multiplies it.
The C has code for AVX-512 VNNI and for AVX2. Other processors, and systems without the C, compute
the same in fp32 steps: inputs are rounded to the same 256 steps and multiplied with the same
rounded weights. That gives equal results up to rounding, at the speed of fp32.

Shapes: T tokens, E hidden width, K inputs and N outputs of a layer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from packhorse.attention.kernels import AttentionPlan
from packhorse.errors import KernelError
from packhorse.model.bert import (
    ACTIVATIONS,
    AddNorm,
    BertLayer,
    SelfAttention,
    UpProjection,
)
from packhorse.native import (
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

SOURCE = Path(__file__).with_name("int8.c")
CHANNELS = 64  # int8.c reads arrays of output channels up to a multiple of this
BLOCK = 48  # tokens that a thread takes through a layer; a multiple of the 6 of a tile
CACHE = 720 * 1024  # bytes of a block's activations, at most; second-level caches begin at 1 MB
ROUNDED = 2  # bytes of a rounded activation, at most: with VNNI it has one
FEW_ROWS = 32  # with fewer tokens, waking the other threads costs more than they save
STEPS = 255
LARGEST = 127  # of a weight
SMALLEST_SCALE = 1e-30  # below it a row of activations is taken for zeros
# Our names of activations as int8.c numbers them.
CODES = {None: 0, "gelu": 1, "gelu_tanh": 2, "relu": 3}


class QuantizedWeight(NamedTuple):
    """A weight in integers: `values` [N, K] times `scale` [N]."""

    values: Tensor
    scale: Tensor

    def dequantize(self) -> Tensor:
        """The numbers that the integers stand for, [N, K] in fp32."""
        return self.values.float() * self.scale[:, None]


def quantize_weight(weight: Tensor) -> QuantizedWeight:
    """Round [N, K] to integers of -127 to 127, the largest of each output channel being 127.

    What `dequantize` returns gives the same integers again.
    """
    weight = weight.detach().float()
    scale = weight.abs().amax(1) / LARGEST
    steps = torch.where(scale > SMALLEST_SCALE, 1 / scale, 0)
    return QuantizedWeight((weight * steps[:, None]).round().to(torch.int8), scale)


class QuantizedTokens(NamedTuple):
    """Activations in integers: `scale` [T] times (`values` [T, K] less `zero` [T])."""

    values: Tensor
    scale: Tensor
    zero: Tensor

    def dequantize(self) -> Tensor:
        """The numbers that the integers stand for, [T, K] in fp32."""
        return (self.values - self.zero[:, None]) * self.scale[:, None]


def quantize_tokens(x: Tensor) -> QuantizedTokens:
    """Round each row of [T, K] to 256 steps over its own range, which includes 0.

    A row with NaN or infinity has the scale NaN. The values are floats.
    """
    x = x.float()
    low = x.amin(1).clamp(max=0)
    high = x.amax(1).clamp(min=0)
    scale = (high - low) / STEPS
    steps = torch.where(scale > SMALLEST_SCALE, 1 / scale, 0)
    zero = (-low * steps).round()
    values = ((x * steps[:, None]).round() + zero[:, None]).clamp(0, STEPS)
    return QuantizedTokens(values, scale + (x * 0).sum(1), zero)


class LinearArguments(ctypes.Structure):
    """`Linear` of int8.c."""

    _fields_ = (
        ("weight", POINTER),
        ("scale", POINTER),
        ("bias", POINTER),
        ("sums", POINTER),
        ("inputs", LONG),
        ("outputs", LONG),
    )


class NormArguments(ctypes.Structure):
    """`Norm` of int8.c."""

    _fields_ = (
        ("weight", POINTER),
        ("bias", POINTER),
        ("width", LONG),
        ("eps", ctypes.c_float),
    )


class Int8Linear(nn.Module):
    """A linear layer (and activation) with an int8 product; takes fp32 or bf16."""

    def __init__(
        self, linear: nn.Linear, activation: str | None = None, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        quantized = quantize_weight(linear.weight)
        self.outputs, self.inputs = linear.weight.shape
        self.activation = activation
        self.dtype = dtype  # of the results
        bias = torch.zeros(self.outputs) if linear.bias is None else linear.bias.detach().float()
        self.native = is_native()
        if self.native:
            self.weight = _packed(quantized.values)
            self.scale = _padded(quantized.scale)
            self.bias = _padded(bias)
            self.sums = _padded(quantized.values.sum(1, dtype=torch.int32))
        else:
            self.weight = quantized.dequantize()
            self.bias = bias

    def arguments(self) -> LinearArguments:
        """The layer as C reads it, while the layer exists."""
        tensors = (self.weight, self.scale, self.bias, self.sums)
        return LinearArguments(*[x.data_ptr() for x in tensors], self.inputs, self.outputs)

    def forward(self, x: Tensor) -> Tensor:
        """[T, K] to [T, N]."""
        if not self.native:
            return self.in_fp32_steps(x)
        check_input(x, self.inputs)
        x = x.contiguous()
        out = torch.empty(len(x), self.outputs, dtype=self.dtype)
        layers = (LinearArguments * 1)(self.arguments())
        _call(layers, None, x, None, out, self.activation, 8 * self.inputs)
        return out

    def in_fp32_steps(self, x: Tensor) -> Tensor:
        """The same result with a product of floats."""
        y = F.linear(quantize_tokens(x).dequantize(), self.weight, self.bias)
        if self.activation:
            y = ACTIVATIONS[self.activation](y)
        return y.to(self.dtype)


class Int8Layer(nn.Module):
    """A BERT layer: queries, keys and values; the attention kernel; the rest in one call."""

    def __init__(self, layer: BertLayer) -> None:
        super().__init__()
        attention = layer.attention
        up = layer.up
        if not isinstance(attention, SelfAttention) or not isinstance(up, UpProjection):
            raise KernelError("only a plain layer can be fused")
        dtype = torch.bfloat16 if features().avx512_bf16 else torch.float32
        self.out = Int8Linear(attention.out)
        self.up = Int8Linear(up.dense, up.activation)
        self.down = Int8Linear(layer.down)
        # In a tuple, because `freeze` would replace them if they were modules of this one.
        self.norms = (layer.attention_norm, layer.norm)
        # `setattr`, because their type is that of the linear layers they replace.
        setattr(attention, "qkv", Int8Linear(attention.qkv, dtype=dtype))  # noqa: B010
        setattr(attention, "out", nn.Identity())  # noqa: B010
        self.attention = attention

    def forward(self, x: Tensor, plan: AttentionPlan) -> Tensor:
        """[T, E] to [T, E]."""
        attended = self.attention(x, plan)
        check_input(attended, self.out.inputs)
        check_input(x, self.down.outputs)
        attended = attended.contiguous()
        x = x.contiguous()
        out = torch.empty_like(x)
        linears = (self.out, self.up, self.down)
        layers = (LinearArguments * 3)(*[linear.arguments() for linear in linears])
        norms = (NormArguments * 2)(*map(_norm_arguments, self.norms))
        width = self.out.outputs
        inner = self.up.outputs
        # What `rest_of_layer` of int8.c takes: fp32 rows of the three layers' outputs, rounded
        # rows of their inputs, and the scale and zero point of each of these, with alignment.
        bytes_per_token = 4 * (2 * width + inner) + 64
        bytes_per_token += ROUNDED * (self.out.inputs + width + inner)
        _call(layers, norms, attended, x, out, self.up.activation, bytes_per_token)
        return out


def can_fuse(layer: nn.Module) -> bool:
    """Whether `Int8Layer` computes what the layer does."""
    if not (is_native() and isinstance(layer, BertLayer)):
        return False
    attention = layer.attention
    return (
        isinstance(attention, SelfAttention)
        and hasattr(attention, "qkv")
        and not (attention.normalized or attention.rotary)
        and isinstance(layer.up, UpProjection)
        and layer.up.activation in CODES
    )


def freeze_int8(module: nn.Module, kept: Collection[str] = (), prefix: str = "") -> None:
    """Replace the linear layers below `module` in place, for inference on a CPU.

    Those whose names (below `module`) are in `kept` stay as they are.
    """
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        all_int8 = not any(other == path or other.startswith(f"{path}.") for other in kept)
        if all_int8 and can_fuse(child):
            setattr(module, name, Int8Layer(child))  # pyright: ignore[reportArgumentType]
        elif all_int8 and isinstance(child, UpProjection) and child.activation in CODES:
            setattr(module, name, Int8Linear(child.dense, child.activation))
        elif all_int8 and isinstance(child, nn.Linear):
            setattr(module, name, Int8Linear(child))
        else:
            freeze_int8(child, kept, f"{path}.")


@cache
def is_native() -> bool:
    """Whether int8 products run in C here; warns once if not and the user could change that."""
    try:
        _functions()
        openmp_entry()
    except Obstacle as reason:
        warn_slow(reason)
        return False
    return True


class Functions(NamedTuple):
    """What int8.c exports."""

    run: Callable[..., None]
    pack: Callable[..., None]


@cache
def _functions() -> Functions:
    if not features().avx2:
        raise Obstacle("this processor has no AVX2", fixable=False)
    argument_types = (*[POINTER] * 5, *[INT] * 3, LONG, LONG, INT, POINTER, *[LONG] * 3)
    return Functions(
        function(SOURCE, "packhorse_int8", (*argument_types, POINTER, UNSIGNED)),
        function(SOURCE, "packhorse_int8_pack", (POINTER, POINTER, LONG, LONG)),
    )


def _call(
    layers: ctypes.Array[LinearArguments],
    norms: ctypes.Array[NormArguments] | None,
    x: Tensor,
    residual: Tensor | None,
    out: Tensor,
    activation: str | None,
    bytes_per_token: int,
) -> None:
    """Run C over the tokens of `x`; scratch memory is for a block of tokens per thread."""
    tokens = len(x)
    threads = torch.get_num_threads() if tokens >= FEW_ROWS else 1
    block = max(6, min(BLOCK, CACHE // bytes_per_token) // 6 * 6)
    scratch_bytes = block * bytes_per_token + 2048  # each of a dozen arrays is rounded up
    scratch = torch.empty(threads * scratch_bytes + 64, dtype=torch.uint8)
    _functions().run(
        layers,
        norms,
        x.data_ptr(),
        None if residual is None else residual.data_ptr(),
        out.data_ptr(),
        x.dtype == torch.bfloat16,
        residual is not None and residual.dtype == torch.bfloat16,
        out.dtype == torch.bfloat16,
        x.shape[1],
        out.shape[1],
        CODES[activation],
        -(-scratch.data_ptr() // 64) * 64,
        scratch_bytes // 64 * 64,
        tokens,
        block,
        openmp_entry(),
        threads,
    )


def check_input(x: Tensor, width: int) -> None:
    """Check what torch would check: C reads or writes out of bounds instead of raising."""
    supported = x.dtype in (torch.float32, torch.bfloat16) and x.device.type == "cpu"
    if x.ndim != 2 or x.shape[1] != width or not supported:
        raise KernelError(
            f"an int8 layer takes [tokens, {width}] of fp32 or bf16 on the CPU, not "
            f"{list(x.shape)} of {x.dtype} on {x.device}"
        )


def _norm_arguments(norm: AddNorm) -> NormArguments:
    width = len(norm.weight)
    return NormArguments(norm.weight.data_ptr(), norm.bias.data_ptr(), width, norm.eps)


def _padded(x: Tensor) -> Tensor:
    """[N] with zeros up to what C reads."""
    return F.pad(x, (0, -len(x) % CHANNELS)).contiguous()


def _packed(values: Tensor) -> Tensor:
    """[N, K] in the order in which C reads it."""
    outputs, inputs = values.shape
    packed = torch.zeros(outputs + -outputs % CHANNELS, inputs + -inputs % 4, dtype=torch.int8)
    values = values.contiguous()
    _functions().pack(values.data_ptr(), packed.data_ptr(), inputs, outputs)
    return packed
