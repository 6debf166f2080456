"""BERT (Devlin et al. 2018) over a flat batch: every linear layer works on real tokens only.

RoBERTa, DistilBERT and ELECTRA are this model too: they differ in how tokens are embedded, by axes
of `BertConfig`. There is no padded twin of this model. Attention is the one place where sequences
could meet; it is a kernel handed in from outside, which plans once for each batch and is shared by
every layer. In training hidden states are dropped out; attention probabilities only where a rate is
asked for (`attention_dropout`), because the fastest kernel cannot, and MLPerf's packed BERT reached
its target without.

Shapes: T tokens, H heads, D head width, E hidden width, F feed-forward width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from packhorse.attention import Kernel
from packhorse.model.config import BertConfig
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
        self.layers = nn.ModuleList(Layer(config, kernel) for _ in range(config.layers))

    def forward(self, packed: Packed) -> Tensor:
        """The last layer's hidden states, [T, E]."""
        x, plan = self.embed(packed), self._plan(packed)
        for layer in self.layers:
            x = layer(x, plan)
        return x

    def _plan(self, packed: Packed) -> Any:
        dropout = self.attention_dropout if self.training else 0.0
        return self.kernel.plan(packed, dropout) if dropout else self.kernel.plan(packed)

    def use(self, kernel: Kernel) -> None:
        """Exchange the attention kernel; weights stay."""
        for module in self.modules():
            if isinstance(module, Bert | Attention):
                module.kernel = kernel


class Embeddings(nn.Module):
    """Word + position + token type, normalised; projected where the layers are wider."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        width, self.offset = config.embedding_size, config.position_offset
        self.words = nn.Embedding(config.vocab_size, width)
        self.positions = nn.Embedding(config.max_positions + self.offset, width)
        types = config.type_vocab_size
        self.types = nn.Embedding(types, width) if types else None
        self.norm = nn.LayerNorm(width, eps=config.norm_eps)
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
        positions = after_padding(packed, self.offset) if self.offset else packed.positions
        return self.project(self.dropout(self.norm(x + self.positions(positions))))


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

    def __init__(self, config: BertConfig, kernel: Kernel) -> None:
        super().__init__()
        self.attention = Attention(config, kernel)
        self.attention_norm = AddNorm(config.hidden_size, config.norm_eps)
        self.up = Up(config)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size)
        self.norm = AddNorm(config.hidden_size, config.norm_eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, plan: Any) -> Tensor:
        """[T, E] to [T, E]."""
        x = self.attention_norm(x, self.dropout(self.attention(x, plan)))
        return self.norm(x, self.dropout(self.down(self.up(x))))


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

    def __init__(self, config: BertConfig, kernel: Kernel) -> None:
        super().__init__()
        self.shape = (3, config.heads, config.head_size)
        self.kernel = kernel
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.out = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor, plan: Any) -> Tensor:
        """[T, E] to [T, E]."""
        qkv = self.qkv(x).unflatten(-1, self.shape)  # [T, 3, H, D]
        return self.out(self.kernel(qkv, plan).flatten(1))


class Up(nn.Module):
    """The feed-forward's first half: widen and activate. One module, so that it can be fused."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.intermediate_size)
        self.activation = config.activation

    def forward(self, x: Tensor) -> Tensor:
        """[T, E] to [T, F]."""
        return ACTIVATIONS[self.activation](self.dense(x))
