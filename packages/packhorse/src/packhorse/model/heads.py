"""The heads: from the hidden states of a packed batch to the outputs of a task.

Each is `forward(hidden, packed) -> tensors`, per token or per sequence. These include the dummy
sequences that fill up a batch; the caller selects its own with `Packed.split` and `Packed.pick`.

Shapes: T tokens, S sequences, E hidden width, V vocabulary, C labels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from packhorse.model.bert import ACTIVATIONS
from packhorse.model.config import BertConfig
from packhorse.model.pooling import pool
from packhorse.model.vectors import Dense
from packhorse.packing.batch import Packed


class Pooler(nn.Module):
    """A pooled state through a dense layer; with "cls" and tanh, BERT's own pooled output."""

    def __init__(self, config: BertConfig, activation: str = "tanh", pooling: str = "cls") -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size, bias=config.head_bias)
        self.activation = activation
        self.norm = _head_norm(config)
        self.pooling = pooling

    def forward(self, hidden: Tensor, packed: Packed) -> Tensor:
        """[S, E]."""
        if self.pooling == "late":
            return pool("mean", self._transform(hidden), packed)
        return self._transform(pool(self.pooling, hidden, packed))

    def _transform(self, x: Tensor) -> Tensor:
        return self.norm(ACTIVATIONS[self.activation](self.dense(x)))


class Transform(nn.Module):
    """The layers of a pooler on every token: what the heads of ModernBERT begin with."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size, bias=config.head_bias)
        self.activation = config.classify_activation or config.activation
        self.norm = _head_norm(config)

    def forward(self, x: Tensor) -> Tensor:
        """[n, E] to [n, E]."""
        return self.norm(ACTIVATIONS[self.activation](self.dense(x)))


def _head_norm(config: BertConfig) -> nn.Module:
    width, eps = config.hidden_size, config.norm_eps
    return nn.LayerNorm(width, eps, bias=config.norm_bias) if config.head_norm else nn.Identity()


class Mlm(nn.Module):
    """Masked-language model: a score for every word of the vocabulary, per token.

    V is large, so pass only the hidden states of the masked tokens.
    """

    def __init__(self, config: BertConfig, words: nn.Embedding, tied: bool = True) -> None:
        super().__init__()
        width = config.embedding_size
        self.transformed = config.mlm_dense
        if self.transformed:
            self.dense = nn.Linear(config.hidden_size, width, bias=config.head_bias)
            self.activation = config.mlm_activation
            self.norm = nn.LayerNorm(width, eps=config.norm_eps, bias=config.norm_bias)
        self.decoder = nn.Linear(width, config.vocab_size, bias=config.decoder_bias)
        self.words = config.vocab_size
        self.spare = -config.vocab_size % 8  # up to the next multiple of 8, see `_scores`
        if tied:
            self.decoder.weight = words.weight

    def forward(self, hidden: Tensor, packed: Packed) -> Tensor:
        """[n, E] states of any tokens to [n, V]."""
        if not self.transformed:
            return self._scores(hidden)
        return self._scores(self.norm(ACTIVATIONS[self.activation](self.dense(hidden))))

    def _scores(self, x: Tensor) -> Tensor:
        """[n, V]; on tensor cores V that is not a multiple of 8 would take three times as long."""
        if not (self.spare and x.is_cuda and x.element_size() == 2):
            return self.decoder(x)
        weight = F.pad(self.decoder.weight, (0, 0, 0, self.spare))
        bias = self.decoder.bias
        bias = None if bias is None else F.pad(bias, (0, self.spare))
        return F.linear(x, weight, bias)[:, : -self.spare]


class ReplacedTokenDetection(nn.Module):
    """ELECTRA's discriminator: a logit per token, above 0 if the token was likely replaced."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = config.activation
        self.score = nn.Linear(config.hidden_size, 1)

    def forward(self, hidden: Tensor, packed: Packed) -> Tensor:
        """[T]."""
        return self.score(ACTIVATIONS[self.activation](self.dense(hidden))).squeeze(-1)


class PooledLabels(nn.Module):
    """A linear layer on a pooled output: NSP (2 labels), classification, reranking (1 label)."""

    def __init__(self, config: BertConfig, pooler: Pooler, labels: int) -> None:
        super().__init__()
        self.pooler = pooler
        self.dropout = nn.Dropout(config.dropout)
        self.dense = nn.Linear(config.hidden_size, labels)

    def forward(self, hidden: Tensor, packed: Packed) -> Tensor:
        """[S, C]."""
        return self.dense(self.dropout(self.pooler(hidden, packed)))


class LastTokenLabels(nn.Module):
    """A product with the state of the last token, without a bias: how decoders classify."""

    def __init__(self, config: BertConfig, labels: int) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, labels, bias=False)

    def forward(self, hidden: Tensor, packed: Packed) -> Tensor:
        """[S, C]."""
        return self.dense(pool("lasttoken", hidden, packed))


class TokenLabels(nn.Module):
    """A linear layer on every token: entity labels (C), or answer spans (start and end, C = 2)."""

    def __init__(self, config: BertConfig, labels: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.transform = Transform(config) if config.head_norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.dense = nn.Linear(config.hidden_size, labels)

    def forward(self, hidden: Tensor, packed: Packed) -> Tensor:
        """[T, C]."""
        return self.dense(self.dropout(self.transform(hidden)))


class Embed(nn.Module):
    """One vector per sequence: pooled (several poolings concatenated), projected, normalized."""

    def __init__(
        self,
        pooling: Sequence[str] = ("mean",),
        stages: Sequence[nn.Module] = (),
        normalize: bool = True,
        include_prompt: bool = True,
    ) -> None:
        """Build the head.

        stages: modules that vectors go through after pooling, see `vectors`.
        include_prompt: whether the tokens of a prompt are pooled with those of the text.
        """
        super().__init__()
        self.pooling = tuple(pooling)
        self.stages = nn.ModuleList(stages)
        self.normalize = normalize
        self.include_prompt = include_prompt

    @property
    def is_average(self) -> bool:
        """Whether a vector is nothing but the average of its tokens, perhaps normalized."""
        return self.pooling == ("mean",) and not len(self.stages)

    def width(self, hidden_size: int) -> int:
        """The dimension of a vector."""
        widths = [stage.width for stage in self.stages if isinstance(stage, Dense)]
        return widths[-1] if widths else len(self.pooling) * hidden_size

    def forward(self, hidden: Tensor, packed: Packed) -> Tensor:
        """[S, E], in fp32 or wider."""
        x = self.raw(hidden, packed)
        return F.normalize(x, dim=-1) if self.normalize else x

    def raw(self, hidden: Tensor, packed: Packed) -> Tensor:
        """[S, E] before normalization, in fp32: sums of many half-precision numbers lose digits."""
        wide = hidden if hidden.dtype == torch.float64 else hidden.float()
        x = torch.cat([pool(mode, wide, packed) for mode in self.pooling], dim=-1)
        for stage in self.stages:
            x = stage(x)
        return x


# Heads that may get only some of the tokens; the others need all of them.
TOKEN_HEADS = (Mlm, ReplacedTokenDetection, TokenLabels)
