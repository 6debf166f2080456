"""Classification into labels of the request, with a natural language inference model.

Follows Yin, Hay, Roth: Benchmarking zero-shot text classification, 2019, and transformers' pipeline
of that name: the text is the premise, "This example is LABEL." the hypothesis, and the label's
score is how strongly the model considers it entailed. If exactly one label is true, scores are the
softmax over all entailment logits. If several may be true (`multi_label`, or a single candidate),
a label's score is the softmax of its entailment against its contradiction.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
from starlette.requests import Request

from packhorse.errors import InputError
from packhorse.serve.dialects.tasks import Truncation, check_token_count, run_task
from packhorse.serve.failures import Empty
from packhorse.serve.hosting import ServedModel, entailment

TEMPLATE = "This example is {}."


def read_labels(labels: str | Sequence[str] | None) -> list[str]:
    """Return the candidate labels; a single text is split at commas."""
    if isinstance(labels, str):
        labels = [label.strip() for label in labels.split(",") if label.strip()]
    if not labels:
        raise Empty("the request has no candidate_labels")
    if not all(labels):
        raise Empty("a candidate label is empty")
    return list(labels)


async def classify(
    request: Request,
    model: ServedModel,
    texts: Sequence[str],
    labels: Sequence[str],
    template: str | None,
    multi_label: bool,
    truncation: Truncation,
) -> list[list[dict[str, Any]]]:
    """Return all labels with their scores for each text, best first.

    Each pair of a text and a label is an input of its own. Texts may be truncated, labels never.
    """
    model.check_task("zero_shot")
    hypotheses = [_fill(template or TEMPLATE, label) for label in labels]
    # At least half of the model's length is left for the text.
    half = model.encoder.max_length // 2
    await asyncio.to_thread(check_token_count, model, set(hypotheses), half, "a hypothesis")
    pairs = [(text, hypothesis) for text in texts for hypothesis in hypotheses]
    result = await run_task(request, model, "classify", pairs, truncation, problem="raw")
    contradicted, entailed = entailment(model.encoder.labels)
    logits = [(value.scores[contradicted], value.scores[entailed]) for value in result.values]
    # [texts, labels, (contradiction, entailment)]
    table = np.array(logits, np.float64).reshape(len(texts), len(labels), 2)
    independent = multi_label or len(labels) == 1
    scores = _softmax(table)[..., 1] if independent else _softmax(table[..., 1])
    return [_sort(labels, row) for row in scores]


def _fill(template: str, label: str) -> str:
    """Put the label into the template.

    Not by `str.format`, whose other fields ({0.__class__}) would let a client read our objects.
    """
    before, braces, after = template.partition("{}")
    if not braces or any(brace in before + after for brace in "{}"):
        raise InputError("hypothesis_template must have exactly one {}, in place of the label")
    return before + label + after


def _softmax(logits: np.ndarray) -> np.ndarray:
    # The largest logit is subtracted so that exp cannot overflow.
    exponentials = np.exp(logits - logits.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


def _sort(labels: Sequence[str], scores: np.ndarray) -> list[dict[str, Any]]:
    order = np.argsort(-scores, kind="stable").tolist()
    return [{"label": labels[i], "score": float(scores[i])} for i in order]
