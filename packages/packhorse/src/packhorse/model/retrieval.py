"""Heads for retrieval by words and by tokens: sparse vectors, and one vector per token.

*Sparse*: SPLADE (Formal et al. 2021, arXiv 2107.05720 and 2109.10086) scores all words of the
vocabulary for each token and keeps, per word, the maximum or the sum over the tokens. The scores of
all tokens, [T, V], would take gigabytes. `Splade` computes them for a block of tokens at a time and
keeps one row per sequence: logarithms are monotone, so a maximum is taken of the raw scores and the
logarithms of the maximum alone. `TokenWeights` is bge-m3's lexical weight (arXiv 2402.03216): one
number per token, which belongs to the token's own word.

*Multi-vector*: ColBERT (Khattab and Zaharia 2020, arXiv 2004.12832) projects every token and
compares a query with a document by the best match of each of the query's tokens (MaxSim).

The settings classes here say how a text is prepared before the model and which of the head's
numbers count after it; `runtime.tasks` reads them.

Shapes: T tokens, S sequences, E hidden width, V vocabulary, D width of a token's vector.
"""

# torch leaves some of its functions untyped (tolist).
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from packhorse.model.heads import TOKEN_HEADS, Mlm
from packhorse.model.vectors import Dense
from packhorse.packing.batch import Packed

SPLADE_POOLINGS = ("max", "sum")
SPLADE_ACTIVATIONS = ("relu", "log1p_relu")
BLOCK_TOKENS = 512  # whose scores of all words exist at a time: 60 MB for BERT's vocabulary in fp32


@dataclass(frozen=True, slots=True)
class SparseSettings:
    """How texts become sparse vectors."""

    width: int  # of a vector: the words of the vocabulary
    head: str  # "sparse" returns weights of all words, "lexical" the weight of each token
    skipped: tuple[int, ...] = ()  # tokens that get no weight
    # [V] the weight of each word in a query, which then needs no model; None: as documents.
    query_weights: np.ndarray | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class TokenSide:
    """How a query, or a document, becomes the tokens whose vectors are compared."""

    length: int = 0  # tokens at most; 0: as many as the model takes
    marker: int | None = None  # token that follows the first one, to tell queries from documents
    filler: int | None = None  # token that fills a text up to `length`; None: none does
    skipped: tuple[int, ...] = ()  # tokens whose vectors are left out


@dataclass(frozen=True, slots=True)
class MultiSettings:
    """How texts become one vector per token."""

    width: int  # of a token's vector
    query: TokenSide = TokenSide()
    document: TokenSide = TokenSide()
    # Do other tokens attend to those that fill a query up?
    attends_to_filler: bool = False
    drops_first: bool = False  # leave the first token's vector out

    @property
    def hides_filler(self) -> bool:
        """Whether there are tokens that attend and are not attended to."""
        return self.query.filler is not None and not self.attends_to_filler


class Splade(nn.Module):
    """The weight of every word of the vocabulary in a sequence, from the scores of an MLM head."""

    def __init__(self, scores: Mlm, pooling: str = "max", activation: str = "relu") -> None:
        super().__init__()
        # In a tuple, so that the weights of the MLM head are not registered a second time.
        self._scores = (scores,)
        self.pooling = pooling
        self.activation = activation

    def forward(self, hidden: Tensor, packed: Packed) -> Tensor:
        """[T, E] to [S, V], in fp32 or wider."""
        wide = torch.promote_types(hidden.dtype, torch.float32)
        # 0 is the smallest weight: a score below it weighs as much as none.
        total = hidden.new_zeros(len(packed), self._scores[0].words, dtype=wide)
        for begin in range(0, len(hidden), BLOCK_TOKENS):
            block = hidden[begin : begin + BLOCK_TOKENS]
            scores = self._scores[0](block, packed).to(wide)  # [block, V]
            if self.pooling == "sum":
                scores = self._weights(scores)
            self._add(total, scores, packed.cu_seqlens.long() - begin)
        return total if self.pooling == "sum" else self._weights(total)

    def _weights(self, scores: Tensor) -> Tensor:
        weights = scores.relu_().log1p_()
        return weights.log1p_() if self.activation == "log1p_relu" else weights

    def _add(self, total: Tensor, scores: Tensor, ends: Tensor) -> None:
        """Add the block's scores [n, V] to [S, V]; `ends` are the sequences' in the block."""
        ends = ends.clamp(0, len(scores))
        if not scores.is_cuda:
            for row, part in _parts(ends, scores):
                if self.pooling == "max":
                    torch.maximum(total[row], part.amax(0), out=total[row])
                else:
                    total[row] += part.sum(0)
            return
        # Without reading the lengths, for which the host would wait for the device.
        lengths = ends.diff()
        reduction = self.pooling
        part = torch.segment_reduce(
            scores, reduction, lengths=lengths, axis=0, unsafe=True, initial=0
        )
        if self.pooling == "max":
            torch.maximum(total, part, out=total)
        else:
            total += part


def _parts(ends: Tensor, scores: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield the sequences of a block and their rows; on a CPU this is the faster way by far."""
    bounds: list[int] = ends.tolist()
    for row, (begin, end) in enumerate(pairwise(bounds)):
        if begin < end:
            yield row, scores[begin:end]


class TokenWeights(nn.Module):
    """A weight per token, which its sequence gives to the token's word if it is above 0."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 1)

    def forward(self, hidden: Tensor, packed: Packed) -> Tensor:
        """[T]."""
        return self.linear(hidden).squeeze(-1)


class MultiVector(nn.Module):
    """A vector per token: projected, by default of length 1."""

    def __init__(self, stages: Sequence[nn.Module] = (), normalize: bool = True) -> None:
        """Build the head; stages: modules that states go through, see `vectors`."""
        super().__init__()
        self.stages = nn.ModuleList(stages)
        self.normalize = normalize

    def width(self, hidden_size: int) -> int:
        """The dimension of a vector."""
        widths = [stage.width for stage in self.stages if isinstance(stage, Dense)]
        return widths[-1] if widths else hidden_size

    def forward(self, hidden: Tensor, packed: Packed) -> Tensor:
        """[T, D], in fp32 or wider."""
        x = hidden if hidden.dtype == torch.float64 else hidden.float()
        for stage in self.stages:
            x = stage(x)
        return F.normalize(x, dim=-1) if self.normalize else x


# Heads that may get only some of the tokens, those of retrieval included.
HEADS_BY_TOKEN = (*TOKEN_HEADS, TokenWeights, MultiVector)
