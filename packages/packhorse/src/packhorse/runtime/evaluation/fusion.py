"""Retrieval by several outputs of a model, each by itself and together.

Every output scores every document: dense vectors by cosine or dot product, sparse ones by dot
product, vectors of tokens by MaxSim. Search is exact, as in `retrieval`. Rankings are combined by
reciprocal rank fusion (Cormack, Clarke and Büttcher 2009: the sum of 1 / (60 + rank)), which needs
no scale, or by a weighted sum of scores, each scaled to 0 … 1 over the documents of a query.

Shapes: Q queries, N documents.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np

from packhorse.data.tasks.retrieval import DEPTH, Collection, averages, measures
from packhorse.errors import InputError
from packhorse.results import maxsim
from packhorse.runtime.encoder import Encoder, Progress
from packhorse.runtime.evaluation.reading import Role, prompt_of
from packhorse.runtime.evaluation.retrieval import SCORES_PER_CHUNK, VectorSimilarity

Fusion = Literal["rrf", "weighted"]
OUTPUTS = {"dense": "embed", "sparse": "sparse", "multi": "multi"}  # and their tasks
RRF_OFFSET = 60  # added to a rank, so that the first few do not decide alone


class OutputReader(Protocol):
    """Turns texts into outputs by name: dense [n, E], sparse CSR [n, V], multi a list of [k, D]."""

    def __call__(
        self, texts: Sequence[str], role: Role | None = None, progress: Progress | None = None
    ) -> dict[str, Any]: ...


def parse_outputs(text: str) -> tuple[str, ...]:
    """Return the names in a list such as "dense,sparse"."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    unknown = [name for name in names if name not in OUTPUTS]
    if unknown:
        raise InputError(f"there is no output {unknown[0]!r}; there are {', '.join(OUTPUTS)}")
    return names


def parse_weights(text: str | None, outputs: Sequence[str]) -> dict[str, float]:
    """Return the weight of each output, from a list such as "0.4,0.2,0.4"; by default all equal."""
    if text is None:
        return dict.fromkeys(outputs, 1.0)
    try:
        weights = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise InputError(f"the weights {text!r} are not numbers, as 0.4,0.2,0.4") from error
    if len(weights) != len(outputs) or min(weights) < 0 or not np.isfinite(weights).all():
        raise InputError(
            f"the weights are {text!r}; give one of at least 0 for each of {', '.join(outputs)}"
        )
    return dict(zip(outputs, weights, strict=True))


def reader(encoder: Encoder, outputs: Sequence[str], max_length: int | None = None) -> OutputReader:
    """Return a reader of an encoder's outputs, all of one pass where that is possible."""
    tasks = {OUTPUTS[output]: output for output in outputs}

    def read(
        texts: Sequence[str], role: Role | None = None, progress: Progress | None = None
    ) -> dict[str, Any]:
        outputs_by_task = encoder.outputs(
            texts,
            tuple(tasks),
            query=role == "query",
            prompt=prompt_of(role, encoder.prompts),
            max_length=max_length,
            progress=progress,
        )
        return {tasks[task]: values for task, values in outputs_by_task.items()}

    return read


def judge(
    read: OutputReader,
    collection: Collection,
    outputs: Sequence[str],
    fusion: Fusion = "rrf",
    weights: Mapping[str, float] | None = None,
    similarity: VectorSimilarity = "cosine",
    skip_same_id: bool = False,
    progress: Progress | None = None,
) -> dict[str, float]:
    """Return the measures of each output and, if there are several, of their fusion."""
    ids = sorted(collection.documents, reverse=True)  # of equal scores the larger id comes first
    documents = read([collection.documents[id] for id in ids], "document", progress)
    queries = read(list(collection.queries.values()), "query", progress)
    measured: dict[str, list[dict[str, float]]] = {}  # by output, a row per query
    for number, (id, scores) in enumerate(
        zip(collection.queries, _scores(queries, documents, outputs, similarity), strict=True)
    ):
        rows = dict(zip(outputs, scores, strict=True))
        if len(outputs) > 1:
            rows[fusion] = fuse(scores, fusion, [(weights or {}).get(o, 1.0) for o in outputs])
        skipped = ids.index(id) if skip_same_id and id in collection.documents else None
        for name, row in rows.items():
            order: list[int] = _order(row, skipped).tolist()
            ranking = [ids[i] for i in order]
            measured.setdefault(name, []).append(measures(ranking, collection.judgments[id]))
        if progress is not None:
            progress(number + 1, len(collection.queries))
    return {
        f"{name} {measure}": value
        for name, rows in measured.items()
        for measure, value in averages(rows).items()
    }


def fuse(scores: np.ndarray, fusion: Fusion, weights: Sequence[float]) -> np.ndarray:
    """Combine the scores of one query, [outputs, N], to [N]; the module says how."""
    total = np.zeros(scores.shape[1])
    for row, weight in zip(scores.astype(np.float64), weights, strict=True):
        if fusion == "rrf":
            order = np.argsort(-row, kind="stable")[:DEPTH]
            total[order] += weight / (RRF_OFFSET + np.arange(1, len(order) + 1))
        else:
            spread = row.max() - row.min()
            total += weight * (row - row.min()) / (spread or 1.0)
    return total


def _order(scores: np.ndarray, skipped: int | None) -> np.ndarray:
    order = np.argsort(-scores, kind="stable")
    return (order if skipped is None else order[order != skipped])[:DEPTH]


def _scores(
    queries: Mapping[str, Any],
    documents: Mapping[str, Any],
    outputs: Sequence[str],
    similarity: VectorSimilarity,
) -> Iterator[np.ndarray]:
    """Yield the scores [outputs, N] of each query; memory is bounded by chunks of queries."""
    count = _count(documents, outputs[0])
    total = _count(queries, outputs[0])
    dense = {}
    if "dense" in outputs:
        sides = {"queries": queries["dense"], "documents": documents["dense"]}
        dense = {name: _unit(x) if similarity == "cosine" else x for name, x in sides.items()}
    step = max(1, SCORES_PER_CHUNK // (count * len(outputs)))
    for begin in range(0, total, step):
        part = slice(begin, begin + step)
        scored = {
            "dense": lambda part=part: dense["queries"][part] @ dense["documents"].T,
            "sparse": lambda part=part: (queries["sparse"][part] @ documents["sparse"].T).toarray(),
            "multi": lambda part=part: maxsim(queries["multi"][part], documents["multi"]),
        }
        yield from np.stack([scored[output]() for output in outputs], axis=1)


def _count(sides: Mapping[str, Any], output: str) -> int:
    """How many texts were read; a CSR matrix has no length."""
    return sides[output].shape[0] if output == "sparse" else len(sides[output])


def _unit(vectors: np.ndarray) -> np.ndarray:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.maximum(lengths, np.finfo(np.float32).tiny)
