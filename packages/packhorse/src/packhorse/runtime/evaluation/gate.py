"""One number for how well a model does on a user's own task: the gate that a cheaper copy of it has
to pass.

The numbers are those that papers report: Spearman's correlation for similarity, accuracy for
classification (Spearman for scores), F1 for SQuAD, nDCG@10 for retrieval.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from packhorse.data.tasks.labeled import TableLayout, read_labeled
from packhorse.data.tasks.retrieval import read_collection
from packhorse.data.tasks.squad import is_v2, read_squad
from packhorse.errors import InputError
from packhorse.runtime.encoder import Encoder
from packhorse.runtime.evaluation import answering, classification, retrieval, similarity
from packhorse.runtime.evaluation.reading import reader

Score = Callable[[Encoder], float]
GateTask = Literal["squad", "stsb", "sts", "retrieval", "classification"]
WINDOW = 384  # tokens of SQuAD's usual windows
STRIDE = 128


def open_gate(task: GateTask, path: Path, limit: int | None = None) -> Score:
    """Read and check the data; return what scores an encoder by it. More is better."""
    if task == "squad":
        return _squad(path, limit)
    if task == "retrieval":
        collection = read_collection(path).first(limit)
        return lambda encoder: retrieval.judge(reader(encoder, "embed"), collection)["ndcg@10"]
    if task == "classification":
        return lambda encoder: _classified(encoder, path, limit)
    scale = (0.0, 5.0) if task == "stsb" else None
    rows = read_labeled(path, TableLayout(scale=scale), problem="regression")
    if not isinstance(rows.texts[0], tuple):
        raise InputError(f"{path}: similarity needs pairs of texts")
    pairs = rows.texts[:limit]
    scores: list[Any] = [*rows.targets[:limit]]  # numbers, in a regression
    return lambda encoder: similarity.judge(reader(encoder, "embed"), pairs, scores)[
        "cosine_spearman"
    ]


def _squad(path: Path, limit: int | None) -> Score:
    questions = list(islice(read_squad(path), limit))
    if not questions:
        raise InputError(f"{path}: there is no question in it")
    threshold = 0.0 if is_v2(questions) else None

    def score(encoder: Encoder) -> float:
        length = min(WINDOW, encoder.max_length)
        stride = STRIDE if length == WINDOW else None
        replies = answering.ask(encoder, questions, max_length=length, stride=stride)
        return answering.judge(questions, replies, threshold).score["all"].f1

    return score


def _classified(encoder: Encoder, path: Path, limit: int | None) -> float:
    if "classify" not in encoder.heads:
        raise InputError(f"{encoder.name} has no head that classifies; gate it by another task")
    problem: Any = encoder.problem  # a str of the checkpoint, checked when it was loaded
    rows = read_labeled(path, problem=problem, labels=encoder.labels)
    rows = replace(rows, texts=rows.texts[:limit], targets=rows.targets[:limit])
    measures = classification.judge(reader(encoder, "classify"), rows)
    return measures["spearman" if problem == "regression" else "accuracy"]
