"""From what a dialect was told to what the model is asked: truncation, vectors, pairs, questions.

    host = hosts.find(body.model, "embed")
    outcome = await vectors(request, host, texts, cut, normalise=True, dimensions=64)

`Cut` is what becomes of a text that is too long, whatever a dialect calls it. Whoever does not ask
for truncation is refused, as with text-embeddings-inference: a vector of half a text looks like any
other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from starlette.requests import Request

from packhorse.errors import InputError
from packhorse.results import Ranked, sigmoid
from packhorse.runtime.tasks import Long, TaskInput, is_ids
from packhorse.serve.calls import Outcome, call
from packhorse.serve.failures import TooLarge
from packhorse.serve.hosting import Hosted

LEAST_WINDOW = 64  # tokens; many small windows of a long context would cost more than its tokens


@dataclass(frozen=True, slots=True)
class Cut:
    """What becomes of a text that is too long."""

    long: Long = "truncate"
    allowed: bool = False  # may anything be lost?

    @classmethod
    def read(
        cls, truncate: bool | None = None, direction: str = "right", long: str | None = None
    ) -> Cut:
        """As `truncate` and `truncation_direction` say, or over both `long`."""
        if long == "chunk":
            return cls("chunk", True)
        allowed = bool(truncate) if long is None else long == "truncate"
        return cls("truncate_left" if direction.lower() == "left" else "truncate", allowed)


async def ask(
    request: Request,
    host: Hosted,
    task: str,
    texts: Sequence[TaskInput],
    cut: Cut,
    **options: Any,
) -> Outcome:
    """The task for each text; longer ones than the model takes are cut or refused."""
    longest = host.encoder.max_length
    for number, text in enumerate(texts):
        if is_ids(text) and len(cast("Sequence[int]", text)) > longest:
            raise TooLarge(
                f"input {number} has more token ids than the {longest} that {host.name} takes; "
                "they are never cut"
            )
    how = {"truncate": cut.allowed, "long": cut.long, **options}
    return await call(request, host, task, texts, **how)


async def vectors(
    request: Request,
    host: Hosted,
    texts: Sequence[TaskInput],
    cut: Cut,
    *,
    normalise: bool | None = None,
    dimensions: int | None = None,
    prompt: str | None = None,
) -> Outcome:
    """A vector a text; of its first `dimensions` numbers, made one long unless that is unwanted."""
    width = host.encoder.width
    if dimensions is not None and dimensions > width:
        raise InputError(f"dimensions is {dimensions}; {host.name} gives vectors of {width}")
    found = await ask(request, host, "embed", texts, cut, normalise=normalise, prompt=prompt)
    if dimensions is None:
        return found
    short = [vector[:dimensions] for vector in found.values]
    return replace(found, values=short if normalise is False else [unit(v) for v in short])


def unit(vector: np.ndarray) -> np.ndarray:
    """The same direction, one long; what has no direction stays."""
    length = np.linalg.norm(vector)
    return vector / length if length else vector


async def ranking(
    request: Request,
    host: Hosted,
    query: str,
    documents: Sequence[str],
    cut: Cut,
    top: int | None = None,
    raw: bool = False,
) -> tuple[list[Ranked], Outcome]:
    """The documents, best first. Each is a request of its own, and packs with those of others.

    Scores are the model's logits where they are wanted `raw`, else between 0 and 1.
    """
    pairs = [(query, document) for document in documents]
    outcome = await ask(request, host, "classify", pairs, cut, problem="raw")
    logits = np.array([value.score for value in outcome.values], np.float64)
    scores = logits if raw else sigmoid(logits)
    order: list[int] = np.argsort(-logits, kind="stable")[:top].tolist()
    ranked = [Ranked(i, float(scores[i]), documents[i]) for i in order]
    return ranked, outcome


async def answers(
    request: Request,
    host: Hosted,
    pairs: Sequence[tuple[str, str]],
    *,
    window: int | None = None,
    stride: int | None = None,
    longest_question: int | None = None,
    **options: Any,
) -> Outcome:
    """The best spans of each (question, context), the context read in windows.

    A window must have room for the context: the question may take half of it, and windows may share
    half of the rest. Beyond that a long context would be read hundreds of times. A question with
    more than `longest_question` tokens of its own is refused, too.
    """
    longest = host.encoder.max_length
    length = longest if window is None else max(min(window, longest), min(LEAST_WINDOW, longest))
    half = length // 2
    if stride is not None and stride > half // 2:
        raise InputError(f"stride is {stride}; windows of {length} tokens can share {half // 2}")
    most = half
    if longest_question is not None:
        specials = host.encoder.tokenizer.specials_per(pair=False)
        most = min(half, longest_question + specials)
    questions = {question for question, _ in pairs}
    await asyncio.to_thread(check_short, host, questions, most, "a question")
    how = {"max_length": length, "stride": stride, **options}
    return await call(request, host, "answer", pairs, **how)


def check_short(host: Hosted, texts: set[str], most: int, what: str) -> None:
    """Refuse texts with more tokens, special ones included."""
    for encoding in host.encoder.tokenizer.encode(list(texts), most):
        if encoding.truncated:
            longest = host.encoder.max_length
            raise TooLarge(
                f"{what} has more than {most} tokens; {host.name} takes {longest} in all"
            )
