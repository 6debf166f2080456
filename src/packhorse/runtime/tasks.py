"""The tasks, each as its two ends: texts to jobs, and what a job's numbers mean.

Everything that can be refused is refused here, before the model runs: a head that is not there, an
option out of range, a text that cannot be tokenized. A task is a function from an encoder's
description and a list of texts to a list of jobs; a new one is a function and a line in `TASKS`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, Protocol, cast

import numpy as np

from packhorse import results
from packhorse.errors import CheckpointError, InputError
from packhorse.results import Answer, Entity, Filled, Hidden, Ranked
from packhorse.runtime.jobs import Given, Job, Row, from_ids, is_ids
from packhorse.tokens import Encoding, Text, Tokenizer


class TruncationWarning(UserWarning):
    """Texts were cut to the model's length."""


class Described(Protocol):
    """What a task has to know of a model; an `Encoder` says it."""

    @property
    def name(self) -> str: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def heads(self) -> tuple[str, ...]: ...
    @property
    def labels(self) -> tuple[str, ...]: ...
    @property
    def problem(self) -> str: ...
    @property
    def prompts(self) -> Mapping[str, str]: ...
    @property
    def default_prompt(self) -> str | None: ...
    @property
    def max_length(self) -> int: ...


def prepare(model: Described, task: str, texts: Sequence[Given], **options: Any) -> list[Job]:
    """A job for each text; options are those of the encoder's method of the task's name."""
    if task not in TASKS:
        raise InputError(f"unknown task {task!r}; there are {', '.join(TASKS)}")
    return TASKS[task](model, texts, **options)


def encode(
    model: Described, texts: Sequence[Given], max_length: int | None = None, depth: int = 3
) -> list[Encoding]:
    """Tokenize; token ids stay as they are. Warns, `depth` frames up, when texts had to be cut."""
    limit = _limit(model, max_length)
    if isinstance(texts, str) or not any(map(is_ids, texts)):
        encodings = model.tokenizer.encode(cast("Sequence[Text]", texts), limit)
    else:
        encodings = [_encode_one(model, text, limit) for text in texts]
    cut = sum(bool(e.truncated) for e in encodings)
    if cut:
        message = f"{cut} of {len(encodings)} texts were cut to {limit} tokens"
        warnings.warn(message, TruncationWarning, stacklevel=depth)
    return encodings


def _encode_one(model: Described, text: Given, limit: int) -> Encoding:
    if is_ids(text):
        return from_ids(text, limit, model.tokenizer.vocab_size)
    return model.tokenizer.encode([cast("Text", text)], limit)[0]


# A task is called by `prepare`, that by the encoder, and that by the method its user called.
_encode = partial(encode, depth=6)


def _embed(
    model: Described,
    texts: Sequence[Given],
    prompt: str | None = None,
    max_length: int | None = None,
) -> list[Job]:
    _need(model, "embed")
    found = _encode(model, _prompted(model, texts, prompt), max_length)
    # A copy: a vector that is kept should not keep those of its whole batch.
    return [Job((encoding,), ("embed",), lambda rows: rows[0][0].copy()) for encoding in found]


def _hidden(model: Described, texts: Sequence[Given], max_length: int | None = None) -> list[Job]:
    heads = ("hidden", "pooled") if "pooled" in model.heads else ("hidden",)
    found = _encode(model, texts, max_length)
    return [Job((e,), heads, partial(_states, model.tokenizer, e)) for e in found]


def _states(tokenizer: Tokenizer, encoding: Encoding, rows: Sequence[Row]) -> Hidden:
    states, *pooled = rows[0]
    words = tuple(map(tokenizer.token, encoding.ids.tolist()))
    return Hidden(states, pooled[0].copy() if pooled else None, words)


def _classify(model: Described, texts: Sequence[Given], max_length: int | None = None) -> list[Job]:
    _need(model, "classify")
    labels, problem = model.labels, model.problem
    return [
        Job((e,), ("classify",), lambda rows: results.classified(rows[0][0], labels, problem))
        for e in _encode(model, texts, max_length)
    ]


def _rerank(
    model: Described,
    queries: Sequence[str],
    documents: Sequence[str],
    top_k: int | None = None,
    max_length: int | None = None,
) -> list[Job]:
    _need(model, "classify")
    if len(model.labels) != 1:
        raise CheckpointError(
            f"reranking needs a head with one output; {model.name} classifies into "
            f"{len(model.labels)} labels"
        )
    pairs = [(query, document) for query in queries for document in documents]
    found = iter(_encode(model, pairs, max_length))

    def ranked(rows: Sequence[Row]) -> list[Ranked]:
        return results.ranked(np.array([row[0] for (row,) in rows]), documents, top_k)

    return [Job(tuple(islice(found, len(documents))), ("classify",), ranked) for _ in queries]


def _answer(
    model: Described,
    pairs: Sequence[tuple[str, str]],
    top_k: int = 1,
    max_length: int | None = None,
    stride: int | None = None,
    max_answer_tokens: int = 30,
    no_answer: float | None = None,
) -> list[Job]:
    _need(model, "span")
    how = (top_k, max_answer_tokens, no_answer)

    def job(windows: Sequence[Encoding], context: str) -> Job:
        def best(rows: Sequence[Row]) -> list[Answer]:
            return results.answers([row for (row,) in rows], windows, context, *how)

        return Job(tuple(windows), ("span",), best)

    found = model.tokenizer.windows(pairs, _limit(model, max_length), stride)
    return [job(windows, context) for windows, (_, context) in zip(found, pairs, strict=True)]


def _fill(
    model: Described, texts: Sequence[str], top_k: int = 5, max_length: int | None = None
) -> list[Job]:
    _need(model, "mlm")
    tokenizer = model.tokenizer

    def job(encoding: Encoding, text: str) -> Job:
        def words(rows: Sequence[Row]) -> list[list[Filled]]:
            return results.filled(rows[0][0], encoding, text, tokenizer, top_k)

        return Job((encoding,), ("mlm",), words, only=tokenizer.mask_id)

    encodings = _encode(model, _single(texts, "fill"), max_length)
    for i, encoding in enumerate(encodings):
        if tokenizer.mask_id not in encoding.ids:
            mask = tokenizer.token(tokenizer.mask_id or 0)
            cut = " within the model's length" if encoding.truncated else ""
            raise InputError(f"text {i} has no {mask} to fill{cut}")
    return list(map(job, encodings, texts))


def _label(model: Described, texts: Sequence[str], max_length: int | None = None) -> list[Job]:
    _need(model, "tokens")
    labels = model.labels

    def job(encoding: Encoding, text: str) -> Job:
        def stretches(rows: Sequence[Row]) -> list[Entity]:
            return results.entities(rows[0][0], encoding, text, labels)

        return Job((encoding,), ("tokens",), stretches)

    return list(map(job, _encode(model, _single(texts, "label"), max_length), texts))


TASKS: dict[str, Callable[..., list[Job]]] = {
    "embed": _embed,
    "hidden": _hidden,
    "classify": _classify,
    "rerank": _rerank,
    "answer": _answer,
    "fill": _fill,
    "label": _label,
}


def _need(model: Described, head: str) -> None:
    if head not in model.heads:
        have = ", ".join(model.heads) or "none"
        raise CheckpointError(
            f"{model.name} has no {head!r} head (it has: {have}); "
            "load a checkpoint that was trained for this task"
        )


def _limit(model: Described, max_length: int | None) -> int:
    if max_length is None or max_length <= 0:
        return model.max_length
    if max_length > model.max_length:
        raise InputError(
            f"max_length is {max_length}, but {model.name} takes {model.max_length} tokens"
        )
    return max_length


def _prompted(model: Described, texts: Sequence[Given], prompt: str | None) -> Sequence[Given]:
    name = model.default_prompt if prompt is None else prompt
    if name is None or (prompt is None and all(map(is_ids, texts))):
        return texts
    if name not in model.prompts:
        known = ", ".join(model.prompts) or "none"
        raise InputError(f"{model.name} has no prompt {name!r}; it has: {known}")
    if not all(isinstance(text, str) for text in texts):
        raise InputError("a prompt goes before single texts, not before pairs or token ids")
    return [model.prompts[name] + str(text) for text in texts]


def _single(texts: Sequence[Text], task: str) -> Sequence[Text]:
    if not all(isinstance(text, str) for text in texts):
        raise InputError(f"{task} takes single texts, not pairs or token ids")
    return texts
