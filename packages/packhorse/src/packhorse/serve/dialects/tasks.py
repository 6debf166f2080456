"""The tasks as dialects need them: embed, rerank and answer, with truncation and further checks.

    model = models.find(body.model, "embed")
    result = await embed(request, model, texts, truncation, normalize=True, dimensions=64)

`Truncation` is what to do with a text that is too long, whatever a dialect calls it. The request's
own field decides; if it has none, `--auto-truncate` or `--no-truncate`; if neither was set, the
route: each does what the server whose API it follows does (`by_default`). Whatever was cut is told
in the response header `x-packhorse-truncated`, because a vector of half a text looks like any
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
from packhorse.serve.calls import CallResult, call
from packhorse.serve.failures import TooLarge
from packhorse.serve.hosting import ServedModel
from packhorse.serve.settings import ServeSettings

# Tokens. In smaller windows the question and the special tokens, which every window repeats, would
# cost more than the context.
MIN_WINDOW = 64


@dataclass(frozen=True, slots=True)
class Truncation:
    """What to do with a text that has more tokens than the model takes."""

    long: Long = "truncate"
    allowed: bool | None = None  # False refuses such a text; None: the request does not say
    by_default: bool = False  # what the route does if neither request nor settings say

    @classmethod
    def read(
        cls,
        truncate: bool | None = None,
        direction: str = "right",
        long: str | None = None,
        by_default: bool = False,
    ) -> Truncation:
        """Combine a body's `truncate` and `truncation_direction`; `long` overrides both."""
        if long == "chunk":
            return cls("chunk", True)
        allowed = truncate if long is None else long == "truncate"
        way: Long = "truncate_left" if direction.lower() == "left" else "truncate"
        return cls(way, allowed, by_default)

    def is_allowed(self, settings: ServeSettings) -> bool:
        """Return whether a text may be cut: by the request, else the settings, else the route."""
        if self.allowed is not None:
            return self.allowed
        return self.by_default if settings.auto_truncate is None else settings.auto_truncate


async def run_task(
    request: Request,
    model: ServedModel,
    task: str,
    texts: Sequence[TaskInput],
    truncation: Truncation,
    **options: Any,
) -> CallResult:
    """Run a task for each text; texts longer than the model takes are cut or refused."""
    limit = model.encoder.max_length
    whose = f"{model.name} takes"
    if 0 < (options.get("max_length") or 0) < limit:
        limit = options["max_length"]
        whose = "the request allows"
    for number, text in enumerate(texts):
        if is_ids(text) and len(cast("Sequence[int]", text)) > limit:
            raise TooLarge(
                f"input {number} has more token ids than the {limit} that {whose}; "
                "token ids are never truncated"
            )
    allowed = truncation.is_allowed(request.app.state.settings)
    arguments = {"truncate": allowed, "long": truncation.long, **options}
    return await call(request, model, task, texts, **arguments)


async def embed(
    request: Request,
    model: ServedModel,
    texts: Sequence[TaskInput],
    truncation: Truncation,
    *,
    normalize: bool | None = None,
    dimensions: int | None = None,
    prompt: str | None = None,
    max_length: int | None = None,
    late_chunking: bool = False,
) -> CallResult:
    """Embed each text; with `dimensions`, keep so many numbers of each vector.

    Shortened vectors are scaled to length one again, unless `normalize` is False. With
    `late_chunking` the texts are read as one; see `runtime.tasks`.
    """
    width = model.encoder.get_embedding_dimension()
    if dimensions is not None and dimensions > width:
        raise InputError(
            f"dimensions is {dimensions}; vectors of {model.name} have {width} dimensions"
        )
    result = await run_task(
        request,
        model,
        "embed",
        texts,
        truncation,
        normalize=normalize,
        prompt=prompt,
        max_length=max_length,
        late_chunking=late_chunking,
    )
    if late_chunking:
        result = replace(result, values=list(result.values[0]))
    if dimensions is None:
        return result
    vectors = [vector[:dimensions] for vector in result.values]
    if normalize is not False:
        vectors = [unit(vector) for vector in vectors]
    return replace(result, values=vectors)


def unit(vector: np.ndarray) -> np.ndarray:
    """Scale a vector to length one; a zero vector stays as it is."""
    length = np.linalg.norm(vector)
    return vector / length if length else vector


async def rerank(
    request: Request,
    model: ServedModel,
    query: str,
    documents: Sequence[str],
    truncation: Truncation,
    top: int | None = None,
    raw: bool = False,
) -> tuple[list[Ranked], CallResult]:
    """Rank the documents by the query, best first.

    Each pair of query and document is an input of its own and is packed with those of other
    requests. Scores are logits with `raw`, otherwise between 0 and 1, as the servers promise whose
    routes these are, whatever the model's own activation; of a multi-vector model they are those of
    MaxSim, which has no such range.
    """
    if "classify" not in model.encoder.heads:
        result = await run_task(
            request, model, "rerank", [query], truncation, documents=documents, top_k=top
        )
        return result.values[0], result
    pairs = [(query, document) for document in documents]
    result = await run_task(request, model, "classify", pairs, truncation, problem="raw")
    logits = np.array([value.score for value in result.values], np.float64)
    scores = logits if raw else sigmoid(logits)
    order: list[int] = np.argsort(-logits, kind="stable")[:top].tolist()
    ranked = [Ranked(i, float(scores[i]), documents[i]) for i in order]
    return ranked, result


async def label(
    request: Request,
    model: ServedModel,
    texts: Sequence[TaskInput],
    truncation: Truncation,
    *,
    stride: int | None = None,
    **options: Any,
) -> CallResult:
    """Find the entities of each text; with `stride` a long one is read in windows.

    Windows may share at most half of their tokens, so that a text is read at most twice.
    """
    if stride is None:
        return await run_task(request, model, "label", texts, truncation, **options)
    length = model.encoder.max_length
    max_stride = (length - model.encoder.tokenizer.specials_per(pair=False)) // 2
    if stride > max_stride:
        raise InputError(f"stride is {stride}; windows of {length} tokens can share {max_stride}")
    return await run_task(
        request, model, "label", texts, truncation, stride=stride, long=None, **options
    )


async def answer(
    request: Request,
    model: ServedModel,
    pairs: Sequence[tuple[str, str]],
    *,
    window: int | None = None,
    stride: int | None = None,
    default_stride: int | None = None,
    max_question_tokens: int | None = None,
    **options: Any,
) -> CallResult:
    """Find the best spans for each (question, context); a long context is read in windows.

    The number of windows is bounded by bounding what they repeat: a question may take at most half
    of a window, and neighboring windows may share at most a third of one. Otherwise a long context
    would be read hundreds of times. `default_stride` is shortened to that. A question with more
    than `max_question_tokens` tokens of its own is refused as well.
    """
    max_length = model.encoder.max_length
    length = max_length
    if window is not None:
        length = max(min(window, max_length), min(MIN_WINDOW, max_length))
    half = length // 2
    max_stride = length // 3
    if stride is None and default_stride is not None:
        stride = min(default_stride, max_stride)
    if stride is not None and stride > max_stride:
        raise InputError(f"stride is {stride}; windows of {length} tokens can share {max_stride}")
    limit = half
    if max_question_tokens is not None:
        specials = model.encoder.tokenizer.specials_per(pair=False)
        limit = min(half, max_question_tokens + specials)
    questions = {question for question, _ in pairs}
    await asyncio.to_thread(check_token_count, model, questions, limit, "a question")
    arguments = {"max_length": length, "stride": stride, **options}
    return await call(request, model, "answer", pairs, **arguments)


def check_token_count(model: ServedModel, texts: set[str], limit: int, kind: str) -> None:
    """Raise `TooLarge` if a text has more than `limit` tokens, special tokens included."""
    for encoding in model.encoder.tokenizer.encode(list(texts), limit):
        if encoding.truncated:
            raise TooLarge(
                f"{kind} has more than {limit} tokens; "
                f"{model.name} takes {model.encoder.max_length} in all"
            )
