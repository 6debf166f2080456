"""Inference in float8: matrix products of the encoder in e4m3, with scales that do not change.

A weight has one scale, and so has the input of a product, chosen before by calibration: the largest
number that texts showed, with as much room above (`HEADROOM`). e4m3 has a constant relative
precision over 14 binades, so that a scale per channel or per token would hardly be more exact, and
room costs nothing. Because an input's scale is fixed, nothing is measured while the model runs,
whatever makes a tensor can write it in float8, and a neighbor changes no bit of a result. Numbers
beyond the range become its largest; NaN stays NaN.

Sums, norms, GELU and attention's scores are not float8: hidden states are bf16 on CUDA.
`Float8Product` is a linear layer; a layer of BERT on CUDA runs as `Float8Layer`, in which
attention, GELU and norms write float8 themselves (`float8_kernels`). Where a device has no float8
products, they are computed from the same rounded numbers in fp32: equal up to the rounding of sums,
at the speed of fp32.

Shapes: T tokens, E hidden width, K inputs and N outputs of a product, H heads, D head width.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from packhorse.attention.fused import Fused, FusedPlan
from packhorse.attention.kernels import AttentionPlan
from packhorse.device import fast_float8, float8_products, runs_triton
from packhorse.errors import KernelError
from packhorse.model.bert import (
    AddNorm,
    Bert,
    BertLayer,
    SelfAttention,
    UpProjection,
)
from packhorse.packing.batch import Packed

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max
SMALLEST = 1e-12  # of a scale, for an input that was always 0
HEADROOM = 2.0  # the largest number of an input, over the largest that calibration saw
WIDTH = 256  # of a tile of `float8_product`
TILES = 184 << 10  # bytes of shared memory that its tiles take, at most
MULTIPLE = 16  # torch._scaled_mm needs both sides of a weight to be multiples of this


class RoundedWeight(NamedTuple):
    """A weight in float8: `values` [N, K] times `scale`."""

    values: Tensor
    scale: float

    def dequantize(self) -> Tensor:
        """The numbers that it stands for, [N, K] in fp32."""
        return self.values.float() * self.scale


def round_weight(weight: Tensor) -> RoundedWeight:
    """Round [N, K] to float8, its largest number to float8's largest.

    What `dequantize` returns gives the same float8 numbers again.
    """
    weight = weight.detach().float()
    scale = max(float(weight.abs().max()) / LARGEST, SMALLEST)
    return RoundedWeight(to_float8(weight, 1 / scale), scale)


def to_float8(x: Tensor, steps: float) -> Tensor:
    """`steps` times x, rounded to float8."""
    return (x.float() * steps).clamp(-LARGEST, LARGEST).to(E4M3)


class Float8Product(nn.Module):
    """A linear layer whose product is float8, of an input whose scale is fixed."""

    weight: Tensor
    weight_scale: Tensor
    input_scale: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear, scale: float, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        rounded = round_weight(linear.weight)
        device = linear.weight.device
        self.outputs, self.inputs = linear.weight.shape
        self.dtype = dtype or linear.weight.dtype  # of the results
        self.scale = max(scale, SMALLEST)
        self.steps = 1 / self.scale
        self.factor = self.scale * rounded.scale  # of a product of float8 numbers
        self.native = float8_products(device)
        self.register_buffer("weight", rounded.values if self.native else rounded.dequantize())
        numbers = partial(torch.tensor, dtype=torch.float32, device=device)
        self.register_buffer("weight_scale", numbers(rounded.scale))
        self.register_buffer("input_scale", numbers(self.scale))
        bias = None if linear.bias is None else linear.bias.detach()
        exact = self.dtype if self.native else torch.float32
        self.register_buffer("bias", None if bias is None else bias.to(exact))

    def forward(self, x: Tensor) -> Tensor:
        """[T, K] to [T, N]."""
        return self.multiply(to_float8(x, self.steps))

    def multiply(self, x: Tensor) -> Tensor:
        """The same of x in float8."""
        if not self.native:
            y = F.linear(x.float() * self.input_scale, self.weight, self.bias)
            return y.to(self.dtype)
        return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
            x,
            self.weight.t(),
            self.input_scale,
            self.weight_scale,
            self.bias,
            out_dtype=self.dtype,
            use_fast_accum=True,
        )


class Float8Hidden(NamedTuple):
    """Hidden states on their way to the next `Float8Layer`."""

    hidden: Tensor  # [T, E]
    rounded: Tensor  # the same in float8, in the next layer's scale
    blocks: Tensor | None  # of queries, as `triton_float8.blocks` lists them for all layers


class Float8Layer(nn.Module):
    """A BERT layer in which whatever makes the input of a product writes it in float8."""

    def __init__(self, layer: BertLayer) -> None:
        super().__init__()
        attention, up = layer.attention, layer.up
        if not isinstance(attention, SelfAttention) or not isinstance(up, UpProjection):
            raise KernelError("only a plain layer can be fused")
        self.attention = attention  # for its kernel, which may be replaced
        self.qkv = _product(attention.qkv)
        self.out = _product(attention.out)
        self.up = _product(up.dense)
        self.down = _product(layer.down)
        self.activation = up.activation
        self.attention_norm = layer.attention_norm
        self.norm = layer.norm
        # The first product of the feed-forward is ours, with its activation, on Hopper.
        self.one_kernel = _has_product(self.up.weight.device) and not self.up.outputs % WIDTH
        self.next_steps: float | None = None  # of the float8 that the following layer reads

    def forward(self, x: Tensor | Float8Hidden, plan: AttentionPlan) -> Tensor | Float8Hidden:
        """[T, E] to [T, E]."""
        from packhorse.model.float8_kernels import add_norm_cast, cast

        if isinstance(x, Tensor):
            x = Float8Hidden(x, cast(x, self.qkv.steps), self._blocks(x, plan))
        hidden, rounded, blocks = x
        attended = self._attend(self.qkv.multiply(rounded), plan, blocks)
        norm = self.attention_norm
        hidden, rounded = add_norm_cast(
            self.out.multiply(attended), hidden, norm.weight, norm.bias, norm.eps, self.up.steps
        )
        y = self.down.multiply(self._widened(rounded))
        norm = self.norm
        hidden, rounded = add_norm_cast(
            y, hidden, norm.weight, norm.bias, norm.eps, self.next_steps or 1.0
        )
        return Float8Hidden(hidden, rounded, blocks) if self.next_steps else hidden

    def _widened(self, x: Tensor) -> Tensor:
        """The feed-forward's first half of x in float8: [T, E] to [T, F] in float8."""
        from packhorse.model.float8_kernels import cast

        up, steps = self.up, self.down.steps
        if not self.one_kernel or up.bias is None:
            return cast(up.multiply(x), steps, self.activation)
        from packhorse.model.float8_product import product

        return product(x, up.weight, up.bias, up.factor, steps, self.activation)

    def _attend(self, qkv: Tensor, plan: AttentionPlan, blocks: Tensor | None) -> Tensor:
        """[T, 3 E] to [T, E] in float8."""
        qkv = qkv.unflatten(1, self.attention.shape)
        if blocks is None:
            from packhorse.model.float8_kernels import cast

            return cast(self.attention.kernel(qkv, plan).flatten(1), self.out.steps)
        from packhorse.attention import triton_float8

        return triton_float8.forward(qkv, blocks, self.out.steps).flatten(1)

    def _blocks(self, x: Tensor, plan: AttentionPlan) -> Tensor | None:
        if not isinstance(self.attention.kernel, Fused) or not isinstance(plan, FusedPlan):
            return None
        from packhorse.attention import triton_float8

        tuning = triton_float8.FORWARD.get(self.attention.shape[-1])
        if tuning is None:  # `fused` may serve heads that were not tuned here
            return None
        return triton_float8.blocks(plan.cu_seqlens, plan.order, len(x), tuning[0])


def _has_product(device: torch.device) -> bool:
    """Whether `float8_product` runs there; Blackwell's small GPUs have no room for its tiles."""
    if not fast_float8(device):
        return False
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin >= TILES


def _product(module: nn.Module) -> Float8Product:
    if not isinstance(module, Float8Product):
        raise KernelError("only a layer whose products are all float8 can be fused")
    return module


def linear_layers(bert: Bert) -> dict[str, nn.Linear]:
    """The linear layers whose products can be float8, by their names below `layers`."""
    return {
        name: module
        for name, module in bert.layers.named_modules()
        if isinstance(module, nn.Linear)
        and not (module.in_features % MULTIPLE or module.out_features % MULTIPLE)
    }


@torch.inference_mode()
def calibrate(bert: Bert, batches: Iterable[Packed]) -> dict[str, float]:
    """The scale of each product's input, by name below `layers`, from what batches show."""
    linear = linear_layers(bert)
    largest = {name: torch.zeros((), device=layer.weight.device) for name, layer in linear.items()}
    with _watched(linear, largest):
        for packed in batches:
            bert(packed.to(bert.embed.words.weight.device))
    return {name: max(float(most) * HEADROOM / LARGEST, SMALLEST) for name, most in largest.items()}


@contextmanager
def _watched(linear: Mapping[str, nn.Linear], largest: dict[str, Tensor]) -> Iterator[None]:
    """Have every layer note the largest absolute number that it is given."""

    def note(name: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        largest[name] = torch.maximum(largest[name], inputs[0].abs().max().float())

    hooks = [layer.register_forward_pre_hook(partial(note, name)) for name, layer in linear.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def use_float8(
    bert: Bert,
    scales: Mapping[str, float],
    kept: Collection[str] = (),
    fuse: bool = True,
    dtype: torch.dtype | None = None,
) -> None:
    """Replace the linear layers in place, for inference, but those `kept` or without a scale.

    `scales` are those of `calibrate`. fuse: use `Float8Layer` where it can run. dtype: of hidden
    states and of all that is not float8, by default the model's. Weights are rounded as they are,
    so that a model is best passed in fp32.
    """
    products = {
        name: Float8Product(linear, scales[name], dtype)
        for name, linear in linear_layers(bert).items()
        if name in scales and name not in kept
    }
    if dtype is not None:
        bert.to(dtype)  # before it has float8, which would be converted too
    for name, product in products.items():
        parent, _, attribute = name.rpartition(".")
        setattr(bert.layers.get_submodule(parent), attribute, product)
    if fuse and _has_kernels(bert):
        _fuse(bert)


def _has_kernels(bert: Bert) -> bool:
    """Whether the Triton kernels can run where the model is."""
    device = bert.embed.words.weight.device
    return float8_products(device) and runs_triton(device)


def _fuse(bert: Bert) -> None:
    """Run the layers that can as `Float8Layer`, which hand one another float8."""
    for number, layer in enumerate(bert.layers):
        if can_fuse(layer):
            bert.layers[number] = Float8Layer(layer)  # pyright: ignore[reportArgumentType]
    if bert.order != tuple(range(len(bert.layers))) or bert.convolution is not None:
        return  # what follows a layer is not always the same
    for layer, following in zip(bert.layers[:-1], bert.layers[1:], strict=True):
        if isinstance(layer, Float8Layer) and isinstance(following, Float8Layer):
            layer.next_steps = following.qkv.steps


def can_fuse(layer: nn.Module) -> bool:
    """Whether `Float8Layer` computes what the layer does."""
    from packhorse.model.float8_kernels import ACTIVATIONS

    if not isinstance(layer, BertLayer) or not isinstance(layer.up, UpProjection):
        return False
    attention = layer.attention
    if not isinstance(attention, SelfAttention) or not hasattr(attention, "qkv"):
        return False
    products = (attention.qkv, attention.out, layer.up.dense, layer.down)
    return (
        all(isinstance(product, Float8Product) for product in products)
        and not (attention.normalized or attention.rotary or attention.by_head)
        and isinstance(layer.norm, AddNorm)
        and layer.up.activation in ACTIVATIONS
    )
