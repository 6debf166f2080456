"""Classification into labels that the request brings, by a model of natural language inference.

Yin, Hay, Roth: Benchmarking zero-shot text classification, 2019, and transformers' pipeline of that
name: a text is the premise, "This example is LABEL." the hypothesis, and how strongly the model
calls it entailed is the label's score. One true label: softmax of all entailments. Several
(`multi_label`, or a single candidate): each label's entailment against its contradiction.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from starlette.requests import Request

from packhorse.errors import InputError
from packhorse.serve.dialects.asking import Cut, ask, check_short
from packhorse.serve.failures import Empty
from packhorse.serve.hosting import Hosted, entailment

TEMPLATE = "This example is {}."


def labels_of(labels: str | Sequence[str] | None) -> list[str]:
    """The candidates; a single text may hold several, with commas between."""
    if isinstance(labels, str):
        labels = [label.strip() for label in labels.split(",") if label.strip()]
    if not labels:
        raise Empty("there are no candidate_labels to choose from")
    if not all(labels):
        raise Empty("a candidate label is empty")
    return list(labels)


async def classify(
    request: Request,
    host: Hosted,
    texts: Sequence[str],
    labels: Sequence[str],
    template: str | None,
    multi_label: bool,
    cut: Cut,
) -> list[list[dict[str, Any]]]:
    """For each text all labels with their scores, the likeliest first.

    Each pair of a text and a label is an input of its own. Only texts are ever cut, never labels.
    """
    host.check("zero_shot")
    hypotheses = [_filled(template or TEMPLATE, label) for label in labels]
    half = host.encoder.max_length // 2
    await asyncio.to_thread(check_short, host, set(hypotheses), half, "a hypothesis")
    pairs = [(text, hypothesis) for text in texts for hypothesis in hypotheses]
    outcome = await ask(request, host, "classify", pairs, cut, problem="raw")
    logits = [_pair(value.scores, host.encoder.labels) for value in outcome.values]
    # [texts, labels, (contradiction, entailment)]
    table = np.array(logits, np.float64).reshape(len(texts), len(labels), 2)
    independent = multi_label or len(labels) == 1
    scores = _softmax(table)[..., 1] if independent else _softmax(table[..., 1])
    return [_sorted(labels, row) for row in scores]


def _filled(template: str, label: str) -> str:
    """Only {} is replaced: what else Python's formatting knows would read our objects."""
    before, hole, after = template.partition("{}")
    if not hole or any(brace in before + after for brace in "{}"):
        raise InputError("hypothesis_template must have one {}, where the label goes")
    return before + label + after


def _pair(scores: Mapping[str, float], labels: Sequence[str]) -> tuple[float, float]:
    contradicted, entailed = entailment(labels)
    return scores[contradicted], scores[entailed]


def _softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def _sorted(labels: Sequence[str], scores: np.ndarray) -> list[dict[str, Any]]:
    order = np.argsort(-scores, kind="stable").tolist()
    return [{"label": labels[i], "score": float(scores[i])} for i in order]
