"""BERT (Devlin et al. 2018) over a flat batch: every linear layer works on real tokens only.

RoBERTa, DistilBERT, ALBERT, DeBERTa, ELECTRA, MPNet, ModernBERT and later encoders are this model
too, and so are the decoders that embedding models are made of: they differ in parts that
`BertConfig` selects when a model is built, so that nothing is left to decide when it runs. There is
no padded variant of this model. Attention is the only place where sequences could mix, beside
DeBERTa's convolution, which knows their bounds; it is a kernel passed in from outside, which plans
once per batch (once more for layers with a local window) and is shared by every layer. In training
hidden states are dropped out. Attention probabilities are dropped out only if a rate is set
(`attention_dropout`), because not every kernel can, and MLPerf's packed BERT reached its target
without.

The names of modules and parameters are those of saved training states and of the tables in
`checkpoint.names`: renaming one changes the file format.

Shapes: T tokens, H heads, D head width, E hidden width, F feed-forward width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from packhorse.attention.kernels import AttentionPlan, Kernel
from packhorse.attention.scope import AttentionScope
from packhorse.model.config import BertConfig
from packhorse.model.disentangled import (
    Convolution,
    DisentangledPlan,
    DisentangledSelfAttention,
    DistanceTable,
)
from packhorse.model.positions import (
    RelativePositionBias,
    RotaryAttention,
    alibi_slopes,
    rotary_plan,
)
from packhorse.packing.batch import Packed

Layer = Callable[[Tensor, AttentionPlan], Tensor]
ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
}


class Bert(nn.Module):
    """The encoder: packed tokens in, one hidden state per token out."""

    def __init__(self, config: BertConfig, kernel: Kernel) -> None:
        super().__init__()
        self.config = config
        self.kernel = kernel
        self.attention_dropout = config.attention_dropout
        self.embed = BertEmbeddings(config)
        buckets = config.distance_buckets
        self.distances = RelativePositionBias(buckets, config.heads) if buckets else None
        self.relative = DistanceTable(config) if config.disentangled else None
        self.folded = False  # layers have the vectors of distances projected
        self.recompute = False  # layers run again in the backward pass, to save their memory
        activation = ACTIVATIONS[config.conv_activation]
        self.convolution = Convolution(config, activation) if config.conv_width else None
        self.order = config.layer_order or tuple(range(config.layers))
        self.local = [step in config.local_layers for step in range(len(self.order))]
        layer = PreNormLayer if config.norm_first else BertLayer
        self.layers = nn.ModuleList(
            layer(config, kernel, first=number == 0) for number in range(config.stored_layers)
        )
        self.norm = _norm(config) if config.norm_first else nn.Identity()

    def forward(self, packed: Packed, layers: Sequence[Layer] | None = None) -> Tensor:
        """The last layer's hidden states, [T, E]; `layers` replace the model's own, compiled."""
        x = self.embed(packed)
        plans = self._plans(packed)
        stored = layers or self.layers
        for step, (number, local) in enumerate(zip(self.order, self.local, strict=True)):
            layer = stored[number]
            if self.recompute and self.training and torch.is_grad_enabled():
                y = _recomputed(layer, x, plans[local])
            else:
                y = layer(x, plans[local])
            mixed = self.convolution if step == 0 else None
            x = y if mixed is None else mixed(x, y, packed)
        return self.norm(x)

    def _plans(self, packed: Packed) -> dict[bool, AttentionPlan]:
        """A plan for local layers and one for global layers, if the model has such layers."""
        bias = self.distances() if self.distances is not None else None
        return {local: self._plan(packed, local, bias) for local in set(self.local)}

    def _plan(self, packed: Packed, local: bool, bias: Tensor | None) -> AttentionPlan:
        config = self.config
        # Pass only options in use, so a kernel need not support what its models never need.
        options: dict[str, Any] = {}
        if self.training and self.attention_dropout:
            options["dropout"] = self.attention_dropout
        rows = self.relative.rows(packed.ids.device) if self.relative is not None else None
        slopes = alibi_slopes(config.heads, packed.ids.device) if config.alibi else None
        window = config.window if local else None
        if local or config.causal or any(x is not None for x in (bias, rows, slopes)):
            options["scope"] = AttentionScope(window, bias, rows, config.causal, slopes)
        plan = self.kernel.plan(packed, **options)
        if self.relative is not None:
            return DisentangledPlan(plan, None if self.folded else self.relative())
        base = config.local_rotary_base if local else config.rotary_base
        return rotary_plan(plan, packed, base, config) if base else plan

    def use(self, kernel: Kernel) -> None:
        """Replace the attention kernel; the weights stay."""
        self.kernel = kernel
        for module in self.modules():
            if isinstance(module, SelfAttention | DisentangledSelfAttention):
                module.use(kernel)

    def fold(self) -> None:
        """Compute what is the same for all batches; the weights must not change afterwards."""
        if self.relative is None or self.folded:
            return
        table = self.relative()
        for module in self.modules():
            if isinstance(module, DisentangledSelfAttention):
                module.fold(table)
        self.folded = True


def _recomputed(layer: Layer, x: Tensor, plan: AttentionPlan) -> Tensor:
    """The layer's result, of which the backward pass computes the inside again (Chen et al. 2016).

    With the same random numbers, so dropout is the same.
    """
    from torch.utils.checkpoint import checkpoint

    result: Any = checkpoint(layer, x, plan, use_reentrant=False)
    return result


def _norm(config: BertConfig, width: int = 0) -> nn.LayerNorm | RMSNorm:
    width = width or config.hidden_size
    if config.norm_kind == "layer":
        return nn.LayerNorm(width, eps=config.norm_eps, bias=config.norm_bias)
    return RMSNorm(width, config.norm_eps, config.norm_kind == "rms_offset")


class RMSNorm(nn.Module):
    """Division by the root mean square (Zhang and Sennrich 2019), in fp32 or wider.

    Gemma stores weights that are 1 less, so that they start at 0, and multiplies before it rounds.
    """

    def __init__(self, width: int, eps: float, offset: bool = False) -> None:
        super().__init__()
        self.eps = eps
        self.offset = offset
        self.weight = nn.Parameter((torch.zeros if offset else torch.ones)(width))

    def forward(self, x: Tensor) -> Tensor:
        """[…, E] to […, E]."""
        wide = x if x.dtype == torch.float64 else x.float()
        y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        if self.offset:
            return (y * (1 + self.weight.to(y.dtype))).to(x.dtype)
        return y.to(x.dtype) * self.weight


class BertEmbeddings(nn.Module):
    """Word + position + token type, normalized or scaled; projected if the layers are wider."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        width = config.embedding_size
        self.offset = config.position_offset
        self.words = nn.Embedding(config.vocab_size, width)
        rows = config.position_rows
        self.positions = nn.Embedding(rows, width) if rows else None
        types = config.type_vocab_size
        self.types = nn.Embedding(types, width) if types else None
        self.scale = width**0.5 if config.scaled_words else None
        self.norm = _norm(config, width) if config.embed_norm else nn.Identity()
        self.dropout = nn.Dropout(config.dropout)
        projected = config.always_project or width != config.hidden_size
        self.project = nn.Linear(width, config.hidden_size) if projected else nn.Identity()

    def forward(self, packed: Packed) -> Tensor:
        """[T, E]."""
        x = self.words(packed.ids)
        if self.scale is not None:
            x = x * x.new_full((), self.scale)  # rounded to the dtype first, as Gemma does
        if self.types is not None:
            # A tokenizer may give the second text of a pair type 1 even if the model has only one
            # type (RoBERTa): looking it up would index out of range.
            single = self.types.num_embeddings == 1
            x = x + (self.types.weight[0] if single else self.types(packed.types))
        if self.positions is not None:
            offset = self.offset
            numbers = positions_after_padding(packed, offset) if offset else packed.positions
            x = x + self.positions(numbers)
        return self.project(self.dropout(self.norm(x)))


def positions_after_padding(packed: Packed, offset: int) -> Tensor:
    """RoBERTa's positions, [T]: counted from `offset`; padding tokens get `offset` - 1.

    RoBERTa counts only tokens that are not padding, whose id is `offset` - 1. A batch without
    padding has none, but a text may spell the padding token out.
    """
    counted = (packed.ids != offset - 1).long()
    total = counted.cumsum(0)
    first = torch.arange(len(total), device=total.device) - packed.positions  # of its sequence
    return offset - 1 + counted * (total - total[first] + counted[first])


class BertLayer(nn.Module):
    """Attention and feed-forward, each with a residual and a LayerNorm after it."""

    def __init__(self, config: BertConfig, kernel: Kernel, first: bool = False) -> None:
        super().__init__()
        self.attention = _attention(config, kernel)
        self.attention_norm = AddNorm(config.hidden_size, config.norm_eps)
        self.up, self.down = _feed_forward(config)
        self.norm = AddNorm(config.hidden_size, config.norm_eps)
        self.dropout = nn.Dropout(config.dropout)
        # The layer in few kernels while it trains (`model.fused_layer`), if it can.
        self.fused: Callable[[BertLayer, Tensor, AttentionPlan], Tensor] | None = None

    def forward(self, x: Tensor, plan: AttentionPlan) -> Tensor:
        """[T, E] to [T, E]."""
        if self.training and self.fused is not None:
            return self.fused(self, x, plan)
        x = self.attention_norm(x, self.dropout(self.attention(x, plan)))
        return self.norm(x, self.dropout(self.down(self.up(x))))


class PreNormLayer(nn.Module):
    """The same parts with a LayerNorm before each (Xiong et al. 2020).

    The first layer has no norm before its attention if the embeddings have just been normalized.
    Gemma normalizes the results of attention and feed-forward too, before they are added.
    """

    def __init__(self, config: BertConfig, kernel: Kernel, first: bool = False) -> None:
        super().__init__()
        normalized = first and config.embed_norm
        self.attention_norm = nn.Identity() if normalized else _norm(config)
        self.attention = _attention(config, kernel)
        self.norm = _norm(config)
        self.up, self.down = _feed_forward(config)
        self.attention_result_norm = _norm(config) if config.branch_norms else nn.Identity()
        self.result_norm = _norm(config) if config.branch_norms else nn.Identity()
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, plan: AttentionPlan) -> Tensor:
        """[T, E] to [T, E]."""
        attended = self.attention_result_norm(self.attention(self.attention_norm(x), plan))
        x = x + self.dropout(attended)
        return x + self.dropout(self.result_norm(self.down(self.up(self.norm(x)))))


def _attention(config: BertConfig, kernel: Kernel) -> SelfAttention | DisentangledSelfAttention:
    disentangled = bool(config.disentangled)
    return (
        DisentangledSelfAttention(config, kernel) if disentangled else SelfAttention(config, kernel)
    )


def _feed_forward(config: BertConfig) -> tuple[UpProjection | GatedUpProjection, nn.Linear]:
    """The two halves of the feed-forward layer."""
    # `down` first: the order in which layers draw their initial weights decides what a seed gives.
    down = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
    up = GatedUpProjection(config) if config.gated else UpProjection(config)
    return up, down


class AddNorm(nn.Module):
    """A residual sum and its LayerNorm, in one module so that they can be fused."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """Both inputs and the result are [T, E]."""
        return F.layer_norm(x + residual, self.weight.shape, self.weight, self.bias, self.eps)


class SelfAttention(nn.Module):
    """Queries, keys and values in one product; the kernel; the output product.

    Where several heads of queries share one of keys and values (Ainslie et al. 2023), queries have
    a product of their own, and keys and values are repeated, so that a kernel need not know of it.
    """

    def __init__(self, config: BertConfig, kernel: Kernel) -> None:
        super().__init__()
        self.shape = (3, config.heads, config.head_size)
        self.kv_heads = config.key_heads
        # LAMB takes the trust ratio of query, key and value separately (`optim.parameter_groups`).
        grouped = config.key_heads != config.heads
        self.by_head = config.qkv_by_head
        self.stacked_tensors = {} if self.by_head else {"kv": 2} if grouped else {"qkv": 3}
        self.rotary = config.rotary_base > 0
        self.interleaved = config.rotary_interleaved
        inputs = config.hidden_size
        width = config.heads * config.head_size
        bias = config.attention_bias
        if grouped:
            self.q = nn.Linear(inputs, width, bias=bias)
            self.kv = nn.Linear(inputs, 2 * config.key_heads * config.head_size, bias=bias)
        else:
            self.qkv = nn.Linear(inputs, 3 * width, bias=bias)
        self.out = nn.Linear(width, inputs, bias=bias)
        self.normalized = config.query_key_norm
        if self.normalized:
            self.query_norm = _norm(config, config.head_size)
            self.key_norm = _norm(config, config.head_size)
        self.use(kernel)

    def use(self, kernel: Kernel) -> None:
        """Replace the kernel."""
        self.kernel = RotaryAttention(kernel, self.interleaved) if self.rotary else kernel

    def forward(self, x: Tensor, plan: AttentionPlan) -> Tensor:
        """[T, E] to [T, E]."""
        return self.out(self.attend(x, plan))

    def attend(self, x: Tensor, plan: AttentionPlan) -> Tensor:
        """What the heads attend to, side by side, before the output product."""
        return self.kernel(self._project(x), plan).flatten(1)

    def _project(self, x: Tensor) -> Tensor:
        """[T, E] to [T, 3, H, D]."""
        _, heads, width = self.shape
        shared = heads // self.kv_heads
        if shared == 1:
            qkv = self.qkv(x)
            if self.by_head:
                qkv = qkv.unflatten(-1, (heads, 3, width)).transpose(1, 2)
            else:
                qkv = qkv.unflatten(-1, self.shape)
            if not self.normalized:
                return qkv
            q, k, v = qkv.unbind(1)
        else:
            q = self.q(x).unflatten(-1, (heads, width))
            k, v = self.kv(x).unflatten(-1, (2, self.kv_heads, width)).unbind(1)
        if self.normalized:
            q, k = self.query_norm(q), self.key_norm(k)
        if shared > 1:
            k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
        return torch.stack((q, k, v), 1)


class UpProjection(nn.Module):
    """The feed-forward's first half, product and activation in one module to be fused."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        bias = config.mlp_bias and config.up_bias
        self.dense = nn.Linear(config.hidden_size, config.intermediate_size, bias=bias)
        self.activation = config.activation

    def forward(self, x: Tensor) -> Tensor:
        """[T, E] to [T, F]."""
        return ACTIVATIONS[self.activation](self.dense(x))


class GatedUpProjection(nn.Module):
    """The same with gates (GLU, Shazeer 2020): half of the product is activated, half scales it."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        outputs = 2 * config.intermediate_size
        bias = config.mlp_bias and config.up_bias
        self.dense = nn.Linear(config.hidden_size, outputs, bias=bias)
        self.activation = config.activation
        self.gate_first = config.gate_first

    def forward(self, x: Tensor) -> Tensor:
        """[T, E] to [T, F]."""
        values, gates = self.dense(x).chunk(2, -1)
        if self.gate_first:
            values, gates = gates, values
        return ACTIVATIONS[self.activation](values) * gates
