"""The tasks, each as its two ends: texts to jobs, and what a job's numbers mean.

Everything that can be refused is refused here, before the model runs: a head that is not there, an
option out of range, a text that cannot be tokenized. A task is a function from an encoder's
description and a list of texts to a list of jobs; a new one is a function and a line in `TASKS`.

What becomes of a text longer than the model takes is `long`: it is cut at its end, and a warning
says so; the same in silence ("truncate"), at its beginning ("truncate_left"), refused ("error"), or
read in chunks that share no token ("chunk"). Vectors and scores of chunks are averaged, each chunk
weighing as much as it has tokens; entities and words are those of all chunks. A chunk does not see
the others: the average is a summary, not what a model of that length would say.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, Literal, Protocol, cast, get_args

import numpy as np

from packhorse import results
from packhorse.data.tables import as_texts
from packhorse.errors import CheckpointError, InputError
from packhorse.model.heads import Embed
from packhorse.results import Answer, Classified, Entity, Filled, Hidden, Ranked
from packhorse.runtime.jobs import Given, Job, Row, from_ids, is_ids
from packhorse.tokens import Encoding, OnLong, Text, Tokenizer

Long = Literal["truncate", "truncate_left", "error", "chunk"]
ONE_LONG = 1e-3  # how far from 1 the length of a normalised vector may be


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
    @property
    def embedder(self) -> Embed | None: ...


def prepare(model: Described, task: str, texts: Sequence[Given], **options: Any) -> list[Job]:
    """A job for each text; options are those of the encoder's method of the task's name."""
    if task not in TASKS:
        raise InputError(f"unknown task {task!r}; there are {', '.join(TASKS)}")
    return TASKS[task](model, as_texts(texts), **options)


def tokenize(
    model: Described, texts: Sequence[Given], max_length: int | None = None, depth: int = 3
) -> list[Encoding]:
    """Tokenize; token ids stay as they are. Warns, `depth` frames up, when texts had to be cut."""
    return [one for (one,) in _sequences(model, as_texts(texts), max_length, None, depth + 1)]


# A task is called by `prepare`, that by the encoder, and that by the method its user called.
def _sequences(
    model: Described,
    texts: Sequence[Given],
    max_length: int | None,
    long: Long | None,
    depth: int = 6,
) -> list[tuple[Encoding, ...]]:
    """The sequences of each text: one, or the chunks of a long one."""
    limit = _limit(model, max_length)
    if long not in (None, *get_args(Long)):
        raise InputError(f"long is {long!r}; use one of {', '.join(get_args(Long))}")
    tokenize = _chunks if long == "chunk" else partial(_whole, on_long=long or "truncate")
    if isinstance(texts, str) or not any(map(is_ids, texts)):
        found = tokenize(model.tokenizer, cast("Sequence[Text]", texts), limit)
    else:
        size = model.tokenizer.vocab_size
        found = [
            (from_ids(text, limit, size),)
            if is_ids(text)
            else tokenize(model.tokenizer, [cast("Text", text)], limit)[0]
            for text in texts
        ]
    cut = sum(bool(e.truncated) for each in found for e in each) if long is None else 0
    if cut:
        message = f"{cut} of {len(found)} texts were cut to {limit} tokens"
        warnings.warn(message, TruncationWarning, stacklevel=depth)
    return found


def _whole(
    tokenizer: Tokenizer, texts: Sequence[Text], limit: int, on_long: OnLong
) -> list[tuple[Encoding, ...]]:
    return [(encoding,) for encoding in tokenizer.encode(texts, limit, on_long)]


def _chunks(tokenizer: Tokenizer, texts: Sequence[Text], limit: int) -> list[tuple[Encoding, ...]]:
    if not (isinstance(texts, str) or all(isinstance(text, str) for text in texts)):
        raise InputError("a pair is not read in chunks; let it be truncated")
    return [tuple(windows) for windows in tokenizer.windows(texts, limit)]


def _average(rows: Sequence[Row], sequences: Sequence[Encoding]) -> np.ndarray:
    """What a head that answers once a sequence says of all chunks together."""
    if len(rows) == 1:
        return rows[0][0].copy()  # a vector that is kept should not keep those of its whole batch
    weights = [each.spans[-1].stop - each.spans[-1].start for each in sequences]
    return np.average([row[0] for row in rows], 0, weights).astype(rows[0][0].dtype)


def _embed(
    model: Described,
    texts: Sequence[Given],
    prompt: str | None = None,
    max_length: int | None = None,
    long: Long | None = None,
    normalise: bool | None = None,
) -> list[Job]:
    _need(model, "embed")
    if normalise is False and model.embedder is None:
        raise CheckpointError(f"{model.name} gives no vectors but those its graph makes")
    raw = normalise is False and model.embedder is not None and model.embedder.normalise
    heads = ("raw",) if raw else ("embed",)
    found = _sequences(model, prompted(model, texts, prompt), max_length, long)
    excluded = model.embedder is not None and not model.embedder.include_prompt
    if excluded and (before := _prompt(model, texts, prompt)):
        length = _prompt_length(model.tokenizer, before, _limit(model, max_length))
        found = [_unpooled(sequences, length, long) for sequences in found]
    return [Job(each, heads, partial(_vector, each, normalise)) for each in found]


def _prompt_length(tokenizer: Tokenizer, prompt: str, limit: int) -> int:
    """Tokens of a prompt with what the template puts before it, as sentence-transformers counts."""
    (alone,) = tokenizer.encode([prompt], limit)
    return len(alone) - int(alone.special[-1])


def _unpooled(
    sequences: tuple[Encoding, ...], length: int, long: Long | None
) -> tuple[Encoding, ...]:
    """The same, where the prompt that the first one begins with is left out of the pooling."""
    first, *others = sequences
    if long == "truncate_left" and first.truncated:
        raise InputError(
            "a text was cut at its beginning, where the prompt stands that this model leaves out "
            'of its vectors; use long="truncate"'
        )
    return replace(first, prompt_length=length), *others


def _vector(
    sequences: Sequence[Encoding], normalise: bool | None, rows: Sequence[Row]
) -> np.ndarray:
    vector = _average(rows, sequences)
    if normalise is None and len(rows) > 1:  # as those of the chunks are
        lengths = [np.linalg.norm(row[0]) for row in rows]
        normalise = np.allclose(lengths, 1, atol=ONE_LONG)
    return vector / max(np.linalg.norm(vector), np.finfo(np.float32).tiny) if normalise else vector


def _hidden(
    model: Described,
    texts: Sequence[Given],
    prompt: str | None = None,
    max_length: int | None = None,
    long: Long | None = None,
) -> list[Job]:
    heads = ("hidden", "pooled") if "pooled" in model.heads else ("hidden",)
    if long == "chunk":
        raise InputError("states are those of one sequence; chunks of a text have none in common")
    given = texts if prompt is None else prompted(model, texts, prompt)
    found = _sequences(model, given, max_length, long)
    return [Job(each, heads, partial(_states, model.tokenizer, each[0])) for each in found]


def _states(tokenizer: Tokenizer, encoding: Encoding, rows: Sequence[Row]) -> Hidden:
    states, *pooled = rows[0]
    words = tuple(map(tokenizer.token, encoding.ids.tolist()))
    return Hidden(states, pooled[0].copy() if pooled else None, words)


def _classify(
    model: Described,
    texts: Sequence[Given],
    max_length: int | None = None,
    long: Long | None = None,
    problem: str | None = None,
) -> list[Job]:
    _need(model, "classify")

    def job(sequences: tuple[Encoding, ...]) -> Job:
        def label(rows: Sequence[Row]) -> Classified:
            scores = _average(rows, sequences)
            return results.classified(scores, model.labels, problem or model.problem)

        return Job(sequences, ("classify",), label)

    return list(map(job, _sequences(model, texts, max_length, long)))


def _rerank(
    model: Described,
    queries: Sequence[str],
    documents: Sequence[str],
    top_k: int | None = None,
    max_length: int | None = None,
    long: Long | None = None,
) -> list[Job]:
    _need(model, "classify")
    if long == "chunk":
        raise InputError("a ranking has no chunks; let long documents be truncated, or split them")
    if len(model.labels) != 1:
        raise CheckpointError(
            f"reranking needs a head with one output; {model.name} classifies into "
            f"{len(model.labels)} labels"
        )
    documents = as_texts(documents)
    pairs = [(query, document) for query in queries for document in documents]
    found = iter([one for (one,) in _sequences(model, pairs, max_length, long)])

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
    model: Described,
    texts: Sequence[str],
    top_k: int = 5,
    max_length: int | None = None,
    long: Long | None = None,
    targets: Sequence[str] | None = None,
) -> list[Job]:
    _need(model, "mlm")
    tokenizer = model.tokenizer
    among = None if targets is None else _first_tokens(tokenizer, targets)

    def job(sequences: tuple[Encoding, ...], text: str) -> Job:
        def words(rows: Sequence[Row]) -> list[list[Filled]]:
            every = zip(rows, sequences, strict=True)
            how = (text, tokenizer, top_k, among)
            return [mask for row, each in every for mask in results.filled(row[0], each, *how)]

        return Job(sequences, ("mlm",), words, only=tokenizer.mask_id)

    found = _sequences(model, _single(texts, "fill"), max_length, long)
    for i, sequences in enumerate(found):
        if not any(tokenizer.mask_id in each.ids for each in sequences):
            mask = tokenizer.token(tokenizer.mask_id or 0)
            cut = " within the model's length" if sequences[0].truncated else ""
            raise InputError(f"text {i} has no {mask} to fill{cut}")
    return list(map(job, found, texts))


def _first_tokens(tokenizer: Tokenizer, words: Sequence[str]) -> list[int]:
    """A word's token, or the first of those it is split into."""
    encodings = tokenizer.encode(words)
    found = [(e.ids[e.spans[0]], word) for e, word in zip(encodings, words, strict=True)]
    if empty := [word for ids, word in found if not len(ids)]:
        raise InputError(f"{empty[0]!r} has no token that could fill a mask")
    if not found:
        raise InputError("targets is empty; name a word, or leave it out")
    return [int(ids[0]) for ids, _ in found]


def _label(
    model: Described,
    texts: Sequence[str],
    max_length: int | None = None,
    long: Long | None = None,
    join: bool = True,
) -> list[Job]:
    _need(model, "tokens")
    labels = model.labels

    def job(sequences: tuple[Encoding, ...], text: str) -> Job:
        def stretches(rows: Sequence[Row]) -> list[Entity]:
            every = zip(rows, sequences, strict=True)
            found = (results.entities(row[0], each, text, labels, join) for row, each in every)
            return [entity for chunk in found for entity in chunk]

        return Job(sequences, ("tokens",), stretches)

    return list(map(job, _sequences(model, _single(texts, "label"), max_length, long), texts))


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


def prompted(model: Described, texts: Sequence[Given], prompt: str | None) -> Sequence[Given]:
    """The texts after the model's prompt of this name; without a name its default, if any."""
    before = _prompt(model, texts, prompt)
    if before is None:
        return texts
    if not all(isinstance(text, str) for text in texts):
        raise InputError("a prompt goes before single texts, not before pairs or token ids")
    return [before + str(text) for text in texts]


def _prompt(model: Described, texts: Sequence[Given], prompt: str | None) -> str | None:
    """What goes before the texts; nothing goes before token ids unless it is named."""
    name = model.default_prompt if prompt is None else prompt
    if name is None or (prompt is None and all(map(is_ids, texts))):
        return None
    if name not in model.prompts:
        known = ", ".join(model.prompts) or "none"
        raise InputError(f"{model.name} has no prompt {name!r}; it has: {known}")
    return model.prompts[name]


def _single(texts: Sequence[Text], task: str) -> Sequence[Text]:
    if not all(isinstance(text, str) for text in texts):
        raise InputError(f"{task} takes single texts, not pairs or token ids")
    return texts
