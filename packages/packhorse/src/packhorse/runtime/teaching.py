"""A teacher for embeddings: a reranker that scores pairs, or a model that makes vectors.

Training (`packhorse train`, distill) asks it about all texts before the first step, and mining
(`mining`) about candidates. Its fingerprint stands for its numbers in that of the training data: a
resumed run, which asks it again, refuses another teacher and not another rounding.

Shapes: N groups of K texts, E width of a vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import final

import numpy as np

from packhorse.errors import InputError
from packhorse.runtime.encoder import Encoder
from packhorse.runtime.loading import load

Groups = Sequence[Sequence[str]]


@final
@dataclass(frozen=True, eq=False)
class Teacher:
    """A loaded model that judges groups of texts."""

    encoder: Encoder

    @property
    def fingerprint(self) -> str:
        """What stands for its numbers."""
        return self.encoder.fingerprint

    def scores(self, groups: Groups) -> list[np.ndarray]:
        """Scores of the anchor with each other text, [K - 1]: a reranker's logits, or products."""
        encoder = self.encoder
        if "classify" not in encoder.heads:
            return [vectors[1:] @ vectors[0] for vectors in self.vectors(groups)]
        if len(encoder.labels) != 1:
            raise InputError(
                f"the teacher {encoder.name} has {len(encoder.labels)} labels; a reranker has one "
                "score"
            )
        if encoder.pair_template is not None:  # words around each pair, which rerank knows
            return [_reranked(encoder, anchor, others) for anchor, *others in groups]
        pairs = [(anchor, text) for anchor, *others in groups for text in others]
        logits = encoder.run(encoder.tokenize(pairs), "classify")
        scores = np.array([row[0] for (row,) in logits], np.float32)
        sizes = [len(group) - 1 for group in groups]
        return np.split(scores, np.cumsum(sizes)[:-1])

    def vectors(self, groups: Groups) -> list[np.ndarray]:
        """The vectors of all texts, [K, E]; each different text is encoded once."""
        rows = {text: row for row, text in enumerate(dict.fromkeys(chain.from_iterable(groups)))}
        vectors = self.encoder.embed(list(rows))
        return [vectors[[rows[text] for text in group]] for group in groups]


def _reranked(encoder: Encoder, anchor: str, others: Sequence[str]) -> np.ndarray:
    scores = np.empty(len(others), np.float32)
    for ranked in encoder.rerank(anchor, others, raw=True):
        scores[ranked.index] = ranked.score
    return scores


def open_teacher(model: str, device: str | None) -> Teacher:
    """Load the model that teaches."""
    return Teacher(load(model, device=None if device == "auto" else device))
