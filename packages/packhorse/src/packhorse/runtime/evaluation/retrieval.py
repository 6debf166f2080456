"""Retrieval: are the documents nearest to a query those that answer it?

Search is exact, a matrix product over chunks of queries: an index would add its own mistakes to
the model's. Of documents with the same score the one with the larger id comes first, as trec_eval
has it, so a ranking does not depend on the order of a file.

Shapes: Q queries, N documents, E width of a vector.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np

from packhorse.data.tasks.retrieval import DEPTH, Collection, averages, measures
from packhorse.runtime.encoder import Progress
from packhorse.runtime.evaluation.reading import Read

Likeness = Literal["cosine", "dot"]
SCORES_A_CHUNK = 1 << 24  # 64 MiB


def judge(
    read: Read,
    collection: Collection,
    likeness: Likeness = "cosine",
    skip_same_id: bool = False,
    progress: Progress | None = None,
) -> dict[str, float]:
    """nDCG@10, MAP, MRR@10 and recalls, averaged over the queries.

    skip_same_id: a document with the id of the query is the query itself (ArguAna, Quora) and no
    answer to it.
    """
    ids, asked = list(collection.documents), list(collection.queries)
    total = len(ids) + len(asked)
    documents = read(list(collection.documents.values()), "document", _after(progress, 0, total))
    queries = read(list(collection.queries.values()), "query", _after(progress, len(ids), total))
    if likeness == "cosine":
        documents, queries = _normalised(documents), _normalised(queries)
    rankings = search(queries, documents, ids, DEPTH + skip_same_id)
    return averages(
        measures(_without(ranking, id if skip_same_id else None), collection.judgments[id])
        for id, ranking in zip(asked, rankings, strict=True)
    )


def search(
    queries: np.ndarray, documents: np.ndarray, ids: Sequence[str], depth: int
) -> Iterator[list[str]]:
    """For each query [Q, E] the ids of the `depth` best documents [N, E]."""
    order = sorted(range(len(ids)), key=ids.__getitem__, reverse=True)
    names, laid = [ids[i] for i in order], documents[order]
    step = max(1, SCORES_A_CHUNK // len(ids))
    for begin in range(0, len(queries), step):
        for scores in queries[begin : begin + step] @ laid.T:  # [N]
            yield [names[i] for i in _best(scores, depth)]


def _best(scores: np.ndarray, depth: int) -> np.ndarray:
    """Places of the highest scores; equals in the order they lie, at the last place as well."""
    among = np.arange(len(scores))
    if depth < len(scores):
        among = np.flatnonzero(scores >= np.partition(scores, -depth)[-depth])
    return among[np.argsort(-scores[among], kind="stable")][:depth]


def _without(ranking: list[str], id: str | None) -> list[str]:
    return [other for other in ranking if other != id][:DEPTH]


def _normalised(vectors: np.ndarray) -> np.ndarray:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.maximum(lengths, np.finfo(np.float32).tiny)


def _after(progress: Progress | None, before: int, total: int) -> Progress | None:
    """The progress of a part as that of the whole."""
    return progress and (lambda done, part: progress(before + done, total))
