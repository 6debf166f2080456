"""Retrieval: whether the documents nearest to a query are those that answer it.

Search is exact, a matrix product over chunks of queries: an index would add its own errors to the
model's. Of documents with equal scores the one with the larger id comes first, as in trec_eval, so
a ranking does not depend on the order of a file.

Shapes: Q queries, N documents, E width of a vector.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np

from packhorse.data.tasks.retrieval import DEPTH, Collection, averages, measures
from packhorse.runtime.encoder import Progress
from packhorse.runtime.evaluation.reading import TextReader

VectorSimilarity = Literal["cosine", "dot"]
SCORES_PER_CHUNK = 1 << 24  # 64 MiB of float32


def judge(
    read: TextReader,
    collection: Collection,
    similarity: VectorSimilarity = "cosine",
    skip_same_id: bool = False,
    progress: Progress | None = None,
) -> dict[str, float]:
    """Return nDCG@10, MAP, MRR@10 and recalls, averaged over the queries.

    skip_same_id: ignore a document with the id of the query, which is the query itself (ArguAna,
    Quora).
    """
    ids = list(collection.documents)
    query_ids = list(collection.queries)
    total = len(ids) + len(query_ids)
    documents = read(list(collection.documents.values()), "document", _after(progress, 0, total))
    queries = read(list(collection.queries.values()), "query", _after(progress, len(ids), total))
    if similarity == "cosine":
        documents = _normalized(documents)
        queries = _normalized(queries)
    rankings = search(queries, documents, ids, DEPTH + skip_same_id)
    return averages(
        measures(_without(ranking, id if skip_same_id else None), collection.judgments[id])
        for id, ranking in zip(query_ids, rankings, strict=True)
    )


def search(
    queries: np.ndarray, documents: np.ndarray, ids: Sequence[str], depth: int
) -> Iterator[list[str]]:
    """Yield for each query [Q, E] the ids of the `depth` best documents [N, E]."""
    order = sorted(range(len(ids)), key=ids.__getitem__, reverse=True)
    sorted_ids = [ids[i] for i in order]
    sorted_documents = documents[order]
    step = max(1, SCORES_PER_CHUNK // len(ids))
    for begin in range(0, len(queries), step):
        for scores in queries[begin : begin + step] @ sorted_documents.T:  # [N]
            yield [sorted_ids[i] for i in _best(scores, depth)]


def _best(scores: np.ndarray, depth: int) -> np.ndarray:
    """Return the indices of the highest scores; equal ones in their order, at the cut as well."""
    candidates = np.arange(len(scores))
    if depth < len(scores):
        candidates = np.flatnonzero(scores >= np.partition(scores, -depth)[-depth])
    return candidates[np.argsort(-scores[candidates], kind="stable")][:depth]


def _without(ranking: list[str], id: str | None) -> list[str]:
    return [document for document in ranking if document != id][:DEPTH]


def _normalized(vectors: np.ndarray) -> np.ndarray:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.maximum(lengths, np.finfo(np.float32).tiny)


def _after(progress: Progress | None, before: int, total: int) -> Progress | None:
    """Report the progress of a part as progress of the whole."""
    return progress and (lambda finished, part: progress(before + finished, total))
