"""BERT (Devlin et al. 2018) over a flat batch: every linear layer works on real tokens only.

RoBERTa, DistilBERT, ELECTRA, MPNet and ModernBERT are this model too: they differ in parts, which
axes of `BertConfig` choose when a model is built, so that what runs has nothing left to decide.
There is no padded twin of this model. Attention is the one place where sequences could meet; it is
a kernel handed in from outside, which plans once for each batch (once more for layers that see a
window) and is shared by every layer. In training hidden states are dropped out; attention
probabilities only where a rate is asked for (`attention_dropout`), because not every kernel can,
and MLPerf's packed BERT reached its target without.

Shapes: T tokens, H heads, D head width, E hidden width, F feed-forward width.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from packhorse.attention import Kernel
from packhorse.attention.reach import Reach
from packhorse.model.config import BertConfig
from packhorse.model.positions import Distances, Turning, turned
from packhorse.packing.batch import Packed

ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
}


class Bert(nn.Module):
    """Packed tokens in, one hidden state a token out."""

    def __init__(self, config: BertConfig, kernel: Kernel) -> None:
        super().__init__()
        self.config = config
        self.kernel = kernel
        self.attention_dropout = config.attention_dropout
        self.embed = Embeddings(config)
        buckets = config.distance_buckets
        self.distances = Distances(buckets, config.heads) if buckets else None
        self.local = [number in config.local_layers for number in range(config.layers)]
        layer = NormFirst if config.norm_first else Layer
        self.layers = nn.ModuleList(layer(config, kernel, not n) for n in range(config.layers))
        self.norm = _norm(config) if config.norm_first else nn.Identity()

    def forward(self, packed: Packed) -> Tensor:
        """The last layer's hidden states, [T, E]."""
        x, plans = self.embed(packed), self._plans(packed)
        for layer, local in zip(self.layers, self.local, strict=True):
            x = layer(x, plans[local])
        return self.norm(x)

    def _plans(self, packed: Packed) -> dict[bool, Any]:
        """One for local layers, one for the others: what there is of these."""
        bias = self.distances() if self.distances is not None else None
        return {local: self._plan(packed, local, bias) for local in set(self.local)}

    def _plan(self, packed: Packed, local: bool, bias: Tensor | None) -> Any:
        config = self.config
        told: dict[str, Any] = {}
        # No more is said than there is to say: a kernel need not know what its models never ask.
        if self.training and self.attention_dropout:
            told["dropout"] = self.attention_dropout
        if local or bias is not None:
            told["reach"] = Reach(config.window if local else None, bias)
        plan = self.kernel.plan(packed, **told)
        base = config.local_rotary_base if local else config.rotary_base
        return turned(plan, packed.positions, base, config.head_size) if base else plan

    def use(self, kernel: Kernel) -> None:
        """Exchange the attention kernel; weights stay."""
        self.kernel = kernel
        for module in self.modules():
            if isinstance(module, Attention):
                module.attend_with(kernel)


def _norm(config: BertConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config.hidden_size, eps=config.norm_eps, bias=config.norm_bias)


class Embeddings(nn.Module):
    """Word + position + token type, normalised; projected where the layers are wider."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        width, self.offset = config.embedding_size, config.position_offset
        self.words = nn.Embedding(config.vocab_size, width)
        rows = 0 if config.rotary_base else config.max_positions + self.offset
        self.positions = nn.Embedding(rows, width) if rows else None
        types = config.type_vocab_size
        self.types = nn.Embedding(types, width) if types else None
        self.norm = nn.LayerNorm(width, eps=config.norm_eps, bias=config.norm_bias)
        self.dropout = nn.Dropout(config.dropout)
        projected = width != config.hidden_size
        self.project = nn.Linear(width, config.hidden_size) if projected else nn.Identity()

    def forward(self, packed: Packed) -> Tensor:
        """[T, E]."""
        x = self.words(packed.ids)
        if self.types is not None:
            # A tokenizer may tell the second text of a pair apart where its model does not.
            single = self.types.num_embeddings == 1
            x = x + (self.types.weight[0] if single else self.types(packed.types))
        if self.positions is not None:
            numbers = after_padding(packed, self.offset) if self.offset else packed.positions
            x = x + self.positions(numbers)
        return self.project(self.dropout(self.norm(x)))


def after_padding(packed: Packed, offset: int) -> Tensor:
    """RoBERTa's positions, [T]: from `offset` on; the padding word, one less, is not counted.

    That word has no place in a batch without padding, but a text may spell it.
    """
    counted = (packed.ids != offset - 1).long()
    total = counted.cumsum(0)
    first = torch.arange(len(total), device=total.device) - packed.positions
    return offset - 1 + counted * (total - total[first] + counted[first])


class Layer(nn.Module):
    """Attention and feed-forward, each with its residual and normalised after it."""

    def __init__(self, config: BertConfig, kernel: Kernel, first: bool = False) -> None:
        super().__init__()
        self.attention = Attention(config, kernel)
        self.attention_norm = AddNorm(config.hidden_size, config.norm_eps)
        self.up, self.down = _feed_forward(config)
        self.norm = AddNorm(config.hidden_size, config.norm_eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, plan: Any) -> Tensor:
        """[T, E] to [T, E]."""
        x = self.attention_norm(x, self.dropout(self.attention(x, plan)))
        return self.norm(x, self.dropout(self.down(self.up(x))))


class NormFirst(nn.Module):
    """The same parts, but each normalised before it (Xiong et al. 2020).

    The first layer's attention is handed what the embeddings have just normalised.
    """

    def __init__(self, config: BertConfig, kernel: Kernel, first: bool = False) -> None:
        super().__init__()
        self.attention_norm = nn.Identity() if first else _norm(config)
        self.attention = Attention(config, kernel)
        self.norm = _norm(config)
        self.up, self.down = _feed_forward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, plan: Any) -> Tensor:
        """[T, E] to [T, E]."""
        x = x + self.dropout(self.attention(self.attention_norm(x), plan))
        return x + self.dropout(self.down(self.up(self.norm(x))))


def _feed_forward(config: BertConfig) -> tuple[Up | GatedUp, nn.Linear]:
    """Its two halves."""
    down = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
    return (GatedUp if config.gated else Up)(config), down


class AddNorm(nn.Module):
    """A residual sum and its LayerNorm. One module, so that it can be fused."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """[T, E] each, and the result."""
        return F.layer_norm(x + residual, self.weight.shape, self.weight, self.bias, self.eps)


class Attention(nn.Module):
    """Queries, keys and values in one product; the kernel; the output product."""

    # LAMB's trust ratio is of query, key and value each by itself (`optim.parameter_groups`).
    stacked_tensors: ClassVar[dict[str, int]] = {"qkv": 3}

    def __init__(self, config: BertConfig, kernel: Kernel) -> None:
        super().__init__()
        self.shape = (3, config.heads, config.head_size)
        self.rotary = config.rotary_base > 0
        width, bias = config.hidden_size, config.attention_bias
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)
        self.attend_with(kernel)

    def attend_with(self, kernel: Kernel) -> None:
        """Exchange the kernel."""
        self.kernel = Turning(kernel) if self.rotary else kernel

    def forward(self, x: Tensor, plan: Any) -> Tensor:
        """[T, E] to [T, E]."""
        qkv = self.qkv(x).unflatten(-1, self.shape)  # [T, 3, H, D]
        return self.out(self.kernel(qkv, plan).flatten(1))


class Up(nn.Module):
    """The feed-forward's first half: widen and activate. One module, so that it can be fused."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        width, wide = config.hidden_size, config.intermediate_size
        self.dense = nn.Linear(width, wide, bias=config.mlp_bias)
        self.activation = config.activation

    def forward(self, x: Tensor) -> Tensor:
        """[T, E] to [T, F]."""
        return ACTIVATIONS[self.activation](self.dense(x))


class GatedUp(nn.Module):
    """The same with gates: twice as wide, one half activated, the other what it is scaled by."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        width, wide = config.hidden_size, 2 * config.intermediate_size
        self.dense = nn.Linear(width, wide, bias=config.mlp_bias)
        self.activation = config.activation

    def forward(self, x: Tensor) -> Tensor:
        """[T, E] to [T, F]."""
        activated, gates = self.dense(x).chunk(2, -1)
        return ACTIVATIONS[self.activation](activated) * gates
