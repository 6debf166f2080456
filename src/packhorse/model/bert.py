"""BERT (Devlin et al. 2018) over a flat batch: every linear layer works on real tokens only.

There is no padded twin of this model. Attention is the one place where sequences could meet; it is
a kernel handed in from outside, which plans once for each batch and is shared by every layer.
Attention probabilities are never dropped out, only hidden states are, as in MLPerf's packed BERT.

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
        self.embed = Embeddings(config)
        self.layers = nn.ModuleList(Layer(config, kernel) for _ in range(config.layers))

    def forward(self, packed: Packed) -> Tensor:
        """The last layer's hidden states, [T, E]."""
        x, plan = self.embed(packed), self.kernel.plan(packed)
        for layer in self.layers:
            x = layer(x, plan)
        return x

    def use(self, kernel: Kernel) -> None:
        """Exchange the attention kernel; weights stay."""
        for module in self.modules():
            if isinstance(module, Bert | Attention):
                module.kernel = kernel


class Embeddings(nn.Module):
    """Word + position + token type, normalised."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.words = nn.Embedding(config.vocab_size, config.hidden_size)
        self.positions = nn.Embedding(config.max_positions, config.hidden_size)
        self.types = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, packed: Packed) -> Tensor:
        """[T, E]."""
        x = self.words(packed.ids) + self.types(packed.types) + self.positions(packed.positions)
        return self.dropout(self.norm(x))


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
        q, k, v = self.qkv(x).unflatten(-1, self.shape).unbind(1)  # [T, H, D] each
        return self.out(self.kernel(q, k, v, plan).flatten(1))


class Up(nn.Module):
    """The feed-forward's first half: widen and activate. One module, so that it can be fused."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.intermediate_size)
        self.activation = config.activation

    def forward(self, x: Tensor) -> Tensor:
        """[T, E] to [T, F]."""
        return ACTIVATIONS[self.activation](self.dense(x))
