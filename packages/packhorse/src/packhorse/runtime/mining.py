"""Hard negatives for embedding models: texts that are near an anchor and are not its positive.

All anchors and all candidates (the positives of the file, and a corpus if there is one) are encoded
once; search is exact. Of the nearest candidates those remain that are likely no answers in truth:
neither the anchor nor a positive of it, by the score far enough below the anchor's worst positive
(`margin`, or `relative_margin` as a share of that score; NV-Retriever, Moreira et al. 2024), and
within `min_score` and `max_score`. With a reranker, scores and order of the candidates are its own.

Shapes: Q anchors, N candidates, E width of a vector.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from packhorse.errors import InputError
from packhorse.runtime.encoder import Encoder
from packhorse.runtime.evaluation.reading import prompt_of
from packhorse.runtime.teaching import Teacher

SCORES_AT_ONCE = 1 << 24  # similarities in memory: 64 MiB

Progress = Callable[[str, int, int], None]  # stage, done, total


@dataclass(frozen=True, slots=True)
class MiningOptions:
    """Which of the nearest texts become negatives."""

    negatives: int = 5  # of an anchor, at most
    depth: int = 100  # nearest candidates that are looked at
    skip: int = 0  # of the nearest, which may be answers that nobody marked
    margin: float | None = None  # a negative's score is at least this much below the positive's
    relative_margin: float | None = None  # the same as a share of the positive's score
    max_score: float | None = None
    min_score: float | None = None
    sampling: Literal["top", "random"] = "top"
    seed: int = 42

    def __post_init__(self) -> None:
        if self.negatives < 1 or self.skip < 0 or self.depth <= self.skip:
            raise InputError(
                f"negatives {self.negatives}, skip {self.skip}, depth {self.depth}: at least one "
                "negative is taken from the candidates between skip and depth"
            )
        for name in ("margin", "relative_margin", "max_score", "min_score"):
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                raise InputError(f"{name} is {value}; it must be a finite number")


@dataclass(frozen=True, slots=True)
class MinedGroup:
    """An anchor with its positives and the negatives that were found, each with its score."""

    anchor: str
    positives: tuple[str, ...]
    negatives: tuple[str, ...]
    positive_scores: tuple[float, ...]
    negative_scores: tuple[float, ...]

    def row(self) -> dict[str, Any]:
        """The group as FlagEmbedding has it in a line of JSON, with the scores."""
        return {
            "query": self.anchor,
            "pos": list(self.positives),
            "neg": list(self.negatives),
            "pos_scores": list(self.positive_scores),
            "neg_scores": list(self.negative_scores),
        }


def mine(
    encoder: Encoder,
    positives: Mapping[str, Sequence[str]],
    corpus: Sequence[str] = (),
    options: MiningOptions = MiningOptions(),  # noqa: B008 (frozen)
    reranker: Teacher | None = None,
    progress: Progress = lambda stage, done, total: None,
) -> Iterator[MinedGroup]:
    """Yield a group for each anchor, which may have found no negative.

    positives: by their anchor. corpus: further candidates.
    """
    every = [text for texts in positives.values() for text in texts]
    candidates = list(dict.fromkeys([*corpus, *every]))
    anchors = list(positives)
    vectors = _unit(encoder, candidates, "document", "encoding candidates", progress)
    queries = _unit(encoder, anchors, "query", "encoding anchors", progress)
    number = {text: i for i, text in enumerate(candidates)}
    own = [[number[text] for text in positives[anchor]] for anchor in anchors]
    # In pairs of sentences an anchor may be the positive of another, and is nearest to itself.
    taken = [
        [*rows, *([number[anchor]] if anchor in number and number[anchor] not in rows else [])]
        for anchor, rows in zip(anchors, own, strict=True)
    ]
    random = np.random.default_rng(options.seed)
    nearest = _nearest(queries, vectors, taken, options.depth)
    for row, (anchor, (order, scores)) in enumerate(zip(anchors, nearest, strict=True)):
        truth = queries[row] @ vectors[own[row]].T
        order, scores = order[options.skip :], scores[options.skip :]
        if reranker is not None:
            texts = [candidates[i] for i in (*own[row], *order.tolist())]
            (judged,) = reranker.scores([(anchor, *texts)])
            truth, scores = judged[: len(own[row])], judged[len(own[row]) :]
            by_score = np.argsort(-scores, kind="stable")
            order, scores = order[by_score], scores[by_score]
        usable = np.flatnonzero(_usable(scores, float(truth.min()), options))
        if options.sampling == "random" and len(usable) > options.negatives:
            usable = np.sort(random.choice(usable, options.negatives, replace=False))
        chosen = usable[: options.negatives]
        negatives: list[int] = order[chosen].tolist()
        truths: list[float] = truth.tolist()
        judged_scores: list[float] = scores[chosen].tolist()
        progress("choosing negatives", row + 1, len(anchors))
        yield MinedGroup(
            anchor,
            tuple(positives[anchor]),
            tuple(candidates[i] for i in negatives),
            tuple(truths),
            tuple(judged_scores),
        )


def _usable(scores: np.ndarray, positive: float, options: MiningOptions) -> np.ndarray:
    """Which of the candidates are neither too near to be wrong nor too far to be hard."""
    limit = math.inf if options.max_score is None else options.max_score
    if options.margin is not None:
        limit = min(limit, positive - options.margin)
    if options.relative_margin is not None:
        limit = min(limit, positive - abs(positive) * options.relative_margin)
    least = -math.inf if options.min_score is None else options.min_score
    return (scores <= limit) & (scores >= least)


def _nearest(
    queries: np.ndarray, vectors: np.ndarray, taken: Sequence[Sequence[int]], depth: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """For each query the numbers and cosines of its `depth` nearest candidates but those taken."""
    step = max(1, SCORES_AT_ONCE // len(vectors))
    for begin in range(0, len(queries), step):
        for row, scores in enumerate(queries[begin : begin + step] @ vectors.T, begin):  # [N]
            scores[list(taken[row])] = -np.inf
            keep = min(depth, len(scores) - len(taken[row]))
            nearest = np.argpartition(-scores, keep - 1)[:keep] if keep else np.arange(0)
            # Of equal scores the earlier candidate comes first, wherever it was partitioned to.
            nearest = nearest[np.lexsort((nearest, -scores[nearest]))]
            yield nearest, scores[nearest]


def _unit(
    encoder: Encoder,
    texts: Sequence[str],
    role: Literal["query", "document"],
    stage: str,
    progress: Progress,
) -> np.ndarray:
    """The vectors of texts, each of length 1, [n, E]."""
    vectors = encoder.embed(
        texts,
        prompt=prompt_of(role, encoder.prompts),
        progress=lambda done, total: progress(stage, done, total),
    )
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.maximum(lengths, np.finfo(np.float32).tiny)
