"""The measures of retrieval, as trec_eval counts them, and so pytrec_eval, BEIR and MTEB.

A grade above 0 is an answer. nDCG's gain is the grade itself and its discount log2(place + 1); the
ideal has all that was judged, found or not. Average precision counts answers that were not found
as found never. A query none of whose documents is an answer has 0 everywhere. The reciprocal rank
ends at 10, as BEIR's and MS MARCO's do; trec_eval's own does not end.

Järvelin and Kekäläinen (2002); https://github.com/usnistgov/trec_eval.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

DEPTH = 1000  # documents of a ranking that count, as is the custom
CUT = 10
RECALLS = (1, 10, 100)


def measures(ranking: Sequence[str], grades: Mapping[str, int]) -> dict[str, float]:
    """Of one query: its documents, the best first, and what was judged."""
    gains = np.array([max(grades.get(id, 0), 0) for id in ranking], np.float64)
    ideal = -np.sort(-np.array([max(grade, 0) for grade in grades.values()], np.float64))
    answers, hits = int((ideal > 0).sum()), gains > 0
    found = {
        f"ndcg@{CUT}": _share(_discounted(gains), _discounted(ideal)),
        "map": _share(float((hits.cumsum() / np.arange(1, len(hits) + 1))[hits].sum()), answers),
        f"mrr@{CUT}": 1 / (1 + int(hits[:CUT].argmax())) if hits[:CUT].any() else 0.0,
    }
    return found | {f"recall@{k}": _share(int(hits[:k].sum()), answers) for k in RECALLS}


def averages(each: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Over all queries, each counting the same."""
    every = list(each)
    return {name: float(np.mean([found[name] for found in every])) for name in every[0]}


def _discounted(gains: np.ndarray) -> float:
    best = gains[:CUT]
    return float((best / np.log2(np.arange(2, len(best) + 2))).sum())


def _share(part: float, whole: float) -> float:
    return float(part / whole) if whole else 0.0
