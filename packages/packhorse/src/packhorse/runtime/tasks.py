"""The tasks that a model can run: one table, and for each task the code before and after the model.

`TASKS` is the only place that says which head a task needs, which `Encoder` method runs it, which
HTTP route and which command offer it. The encoder, the ONNX backend, the command line and the
server all read it. A new task is a function that prepares jobs and a line in the table; the method,
the command and the route that the line names are written in their own modules.

A task has two ends. `prepare` turns texts into `InferenceJob`s and refuses everything that can be
refused before the model runs: a missing head, an option out of range, a text that cannot be
tokenized. A job's `finish` turns the numbers of its sequences into the answer. The encoder runs
both in one call, the runner runs batches in between; since both use the same code, a single request
gets the same answer as one text of a long list.

The option `long` says what to do with a text that is longer than the model accepts. By default its
end is cut off and a warning is given. "truncate" does the same without a warning, "truncate_left"
cuts off the beginning, "error" raises, and "chunk" runs the text in chunks that do not overlap.
Vectors and scores of chunks are averaged, weighted by tokens; entities and words of all chunks are
returned. A chunk does not see the other chunks: the average is a summary, not what a model with a
longer context would return.

This module does not import torch, so that the command line can read the table before loading it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast, get_args

import numpy as np

from packhorse import results
from packhorse.data.tables import as_texts
from packhorse.errors import CheckpointError, InputError
from packhorse.results import (
    Aggregation,
    Answer,
    Classified,
    Entity,
    Filled,
    Hidden,
    Ranked,
    SparseVector,
)
from packhorse.tokens.pair_template import PairTemplate
from packhorse.tokens.tokenizer import Encoding, OnLong, Text, Tokenizer

if TYPE_CHECKING:
    from packhorse.model.heads import Embed
    from packhorse.model.retrieval import MultiSettings, SparseSettings, TokenSide

TaskInput = Text | Encoding | Sequence[int] | np.ndarray  # a text, a pair, or token ids
Row = tuple[np.ndarray, ...]  # the outputs for one sequence, one array per head
Progress = Callable[[int, int], None]  # called with the sequences done, and all sequences
Scoring = Literal["joint", "pipeline"]  # of answers; see `results`
Long = Literal["truncate", "truncate_left", "error", "chunk"]
UNIT_NORM_TOLERANCE = 1e-3  # how far the norm of a normalized vector may be from 1
COMPACT = np.dtype([("index", np.int32), ("weight", np.float32)])  # of a word with a weight
UNSIGNED = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}  # by bytes per number


class TruncationWarning(UserWarning):
    """Texts were cut to the model's length."""


class TaskModel(Protocol):
    """What a task needs to know about a model; `Encoder` implements it."""

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
    def score_activation(self) -> str: ...
    @property
    def truncate_dim(self) -> int | None: ...
    @property
    def pair_template(self) -> PairTemplate | None: ...
    @property
    def prompts(self) -> Mapping[str, str]: ...
    @property
    def default_prompt(self) -> str | None: ...
    @property
    def max_length(self) -> int: ...
    @property
    def embedder(self) -> Embed | None: ...
    @property
    def sparse_settings(self) -> SparseSettings | None: ...
    @property
    def multi_settings(self) -> MultiSettings | None: ...


@dataclass(frozen=True, slots=True)
class InferenceJob:
    """One request, tokenized and ready to run.

    It has several sequences where a long text is run in chunks, a context in windows, or a query is
    scored against documents.
    """

    sequences: tuple[Encoding, ...]
    heads: tuple[str, ...]
    finish: Callable[[Sequence[Row]], Any]  # turns the rows of all sequences into the answer
    only: int | None = None  # run per-token heads on tokens with this id alone
    # How many requests of the caller it is made of: a server runs all inputs of a client's request
    # as one job, and limits and counters are about inputs.
    inputs: int = 1

    @property
    def tokens(self) -> int:
        """The tokens of all sequences."""
        return sum(map(len, self.sequences))


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """A line of the table: what a task needs, and where users find it."""

    head: str  # the head it runs; every model has "hidden"
    method: str  # the method of `Encoder` that runs it
    route: str  # the HTTP route that is made for it; other dialects offer it under their own names
    command: str | None  # the value of `packhorse run --task`; None: the command line has no such
    prepare: Callable[..., list[InferenceJob]] | None  # None: the caller prepares `method` instead
    takes_pairs: bool = True  # an input may be two texts
    takes_query: bool = False  # one question or query is asked of all inputs
    uses_labels: bool = False  # the head's outputs are named by the model's labels
    fine_tuned: bool = False  # states of a model with this head do not make good sentence vectors
    instead: str | None = None  # another head that does as well

    def is_served_by(self, heads: Sequence[str]) -> bool:
        """Whether a model with these heads has one for this task."""
        return self.head == "hidden" or self.head in heads or self.instead in heads


def prepare(
    model: TaskModel, task: str, texts: Sequence[TaskInput], **options: Any
) -> list[InferenceJob]:
    """Return one job per text; the options are those of the encoder's method for the task."""
    spec = TASKS.get(task)
    if spec is None or spec.prepare is None:
        known = ", ".join(name for name, spec in TASKS.items() if spec.prepare)
        raise InputError(f"unknown task {task!r}; use one of {known}")
    texts = as_texts(texts)
    check_head(model, spec)
    return spec.prepare(model, texts, **options)


def check_head(model: TaskModel, spec: TaskSpec) -> None:
    """Raise if the model does not have the head of a task."""
    if not spec.is_served_by(model.heads):
        available = ", ".join(model.heads) or "none"
        raise CheckpointError(
            f"{model.name} has no {spec.head!r} head (it has: {available}); "
            "load a checkpoint that was trained for this task"
        )


def tokenize(
    model: TaskModel, texts: Sequence[TaskInput], max_length: int | None = None, depth: int = 3
) -> list[Encoding]:
    """Tokenize texts; token ids stay as they are. Warns, `depth` frames up, if texts were cut."""
    sequences = _sequences(model, as_texts(texts), max_length, None, depth + 1)
    return [sequence for (sequence,) in sequences]


# The warning must name the user's line. Six frames up from here: a function of the table called
# this, `prepare` called that, then come `Encoder.prepare`, a method of the encoder and the user.
def _sequences(
    model: TaskModel,
    texts: Sequence[TaskInput],
    max_length: int | None,
    long: Long | None,
    depth: int = 6,
) -> list[tuple[Encoding, ...]]:
    """Tokenize each text into one sequence, or a long one into several chunks."""
    limit = length_limit(model, max_length)
    if long not in (None, *get_args(Long)):
        raise InputError(f"long is {long!r}; use one of {', '.join(get_args(Long))}")
    tokenize = _chunks if long == "chunk" else partial(_whole, on_long=long or "truncate")
    has_pairs = not isinstance(texts, str) and not all(isinstance(text, str) for text in texts)
    if long != "chunk" and has_pairs and model.pair_template is not None:
        tokenize = partial(_templated, template=model.pair_template, on_long=long or "truncate")
    if isinstance(texts, str) or not any(map(is_ids, texts)):
        encoded = tokenize(model.tokenizer, cast("Sequence[Text]", texts), limit)
    else:
        size = model.tokenizer.vocab_size
        encoded = [
            (from_ids(text, limit, size),)
            if is_ids(text)
            else tokenize(model.tokenizer, [cast("Text", text)], limit)[0]
            for text in texts
        ]
    if long is None:
        cut = sum(bool(sequence.truncated) for sequences in encoded for sequence in sequences)
        warn_of_cut_texts(cut, len(encoded), limit, depth + 1)
    return encoded


def warn_of_cut_texts(cut: int, texts: int, limit: int, depth: int) -> None:
    """Warn, `depth` frames up, if any of so many texts were cut to the limit."""
    if cut:
        message = f"{cut} of {texts} texts were cut to {limit} tokens"
        warnings.warn(message, TruncationWarning, stacklevel=depth)


def _whole(
    tokenizer: Tokenizer, texts: Sequence[Text], limit: int, on_long: OnLong
) -> list[tuple[Encoding, ...]]:
    return [(encoding,) for encoding in tokenizer.encode(texts, limit, on_long)]


def _templated(
    tokenizer: Tokenizer,
    texts: Sequence[Text],
    limit: int,
    template: PairTemplate,
    on_long: OnLong,
) -> list[tuple[Encoding, ...]]:
    """Pairs within the model's words for them; single texts as they are."""
    pairs = [text for text in texts if not isinstance(text, str)]
    framed = iter(template.encode(tokenizer, pairs, limit, on_long) if pairs else ())
    return [
        _whole(tokenizer, [text], limit, on_long)[0] if isinstance(text, str) else (next(framed),)
        for text in texts
    ]


def _chunks(tokenizer: Tokenizer, texts: Sequence[Text], limit: int) -> list[tuple[Encoding, ...]]:
    if not (isinstance(texts, str) or all(isinstance(text, str) for text in texts)):
        raise InputError('a pair cannot be run in chunks; use long="truncate"')
    return [tuple(windows) for windows in tokenizer.windows(texts, limit)]


def is_ids(text: TaskInput) -> bool:
    """Return whether the input is token ids, rather than a text to tokenize."""
    if isinstance(text, str):  # most are, and a request may have thousands
        return False
    # Tuples of classes: `list | tuple` would make a new object at every call.
    if isinstance(text, (list, tuple)):
        return len(text) > 0 and isinstance(text[0], (int, np.integer))
    return isinstance(text, (Encoding, np.ndarray))


def from_ids(ids: TaskInput, limit: int, vocabulary: int) -> Encoding:
    """Make a sequence of token ids as they are, special tokens included; raise if it cannot run."""
    array = ids.ids if isinstance(ids, Encoding) else np.asarray(ids)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InputError(f"token ids must be a flat list of integers, not {ids!r:.80}")
    if not 1 <= len(array) <= limit:
        raise InputError(f"there are {len(array)} token ids; the model takes 1 to {limit}")
    # Viewed as unsigned, a negative id is too large as well: one pass instead of two.
    if array.view(UNSIGNED[array.itemsize]).max() >= vocabulary:
        raise InputError(
            f"token ids must be from 0 to {vocabulary - 1}; these are {array.min()} to "
            f"{array.max()}"
        )
    if isinstance(ids, Encoding):
        return ids
    return Encoding(array.astype(np.int32), *_plain_fields(len(array)))


@lru_cache(maxsize=1024)
def _plain_fields(n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, tuple[slice, ...]]:
    """Types, offsets, special flags and spans for `n` bare ids; read-only, because shared."""
    types = np.zeros(n, np.uint8)
    offsets = np.zeros((n, 2), np.int32)
    special = np.zeros(n, bool)
    for array in (types, offsets, special):
        array.flags.writeable = False
    return types, offsets, special, (slice(0, n),)


def _average(rows: Sequence[Row], sequences: Sequence[Encoding]) -> np.ndarray:
    """Average a per-sequence head over the chunks of a text, weighted by their tokens."""
    if len(rows) == 1:
        # A copy, so that a vector that a caller keeps does not keep its whole batch alive.
        return rows[0][0].copy()
    weights = [sequence.spans[-1].stop - sequence.spans[-1].start for sequence in sequences]
    return np.average([row[0] for row in rows], 0, weights).astype(rows[0][0].dtype)


def _embed(
    model: TaskModel,
    texts: Sequence[TaskInput],
    prompt: str | None = None,
    max_length: int | None = None,
    long: Long | None = None,
    normalize: bool | None = None,
    normalise: bool | None = None,
    late_chunking: bool = False,
) -> list[InferenceJob]:
    if normalise is not None:
        # From here up to the user's line: `prepare`, `Encoder.prepare`, the method that was called.
        message = "normalise= is now called normalize=; the old name goes with 0.3"
        warnings.warn(message, DeprecationWarning, stacklevel=5)
        normalize = normalise if normalize is None else normalize
    heads = embed_heads(model, normalize)
    if late_chunking:
        return _embed_late(model, texts, prompt, max_length, normalize)
    encoded = _sequences(model, prompted(model, texts, prompt), max_length, long)
    prefix = _prompt(model, texts, prompt)
    if excluded := excluded_tokens(model, prefix, length_limit(model, max_length)):
        encoded = [_without_prompt(sequences, excluded, long) for sequences in encoded]
    return [
        InferenceJob(sequences, heads, partial(_vector, sequences, normalize, model.truncate_dim))
        for sequences in encoded
    ]


def _embed_late(
    model: TaskModel,
    chunks: Sequence[TaskInput],
    prompt: str | None,
    max_length: int | None,
    normalize: bool | None,
) -> list[InferenceJob]:
    """One job for all chunks of a text: they are read together, then each is averaged by itself.

    The chunks are joined by blanks. The special tokens before the text, and a prompt, count to the
    first chunk, those after it to the last: a single chunk has the vector of the text. This is late
    chunking (Günther et al. 2024, arXiv 2409.04701).
    """
    head = model.embedder
    if head is None or not head.is_average:
        raise CheckpointError(
            f"late chunking averages the states of each chunk, but {model.name} makes its vectors "
            "in another way; leave out late_chunking, or use a model with mean pooling"
        )
    texts = [str(chunk) for chunk in _single(cast("Sequence[Text]", chunks), "late chunking")]
    if not texts:
        return []
    prefix = prompt_text(model, prompt) or ""
    limit = length_limit(model, max_length)
    (sequence,) = model.tokenizer.encode([prefix + " ".join(texts)], limit)
    if sequence.truncated:
        raise InputError(
            f"with late chunking all inputs are read together, and {model.name} takes {limit} "
            "tokens; send fewer or shorter ones"
        )
    # Where each chunk begins, in characters of the joined text.
    sizes = [len(text) + 1 for text in texts]
    starts = len(prefix) + np.cumsum([0, *sizes[:-1]])
    # A token belongs to the chunk of its last character: it may begin with the blank before it.
    ends = np.maximum(sequence.offsets[:, 0], sequence.offsets[:, 1] - 1)
    chunk_of_token = np.searchsorted(starts, ends, side="right") - 1  # -1: the prompt
    text_tokens = sequence.spans[0]
    missing = set(range(len(texts))) - set(chunk_of_token[text_tokens].tolist())
    if missing:
        raise InputError(f"input {min(missing)} has no token; leave it out")
    chunk_of_token[: text_tokens.start] = -1
    chunk_of_token[text_tokens.stop :] = len(texts) - 1
    if not prefix or head.include_prompt:
        chunk_of_token[chunk_of_token < 0] = 0

    def average(rows: Sequence[Row]) -> np.ndarray:
        states = rows[0][0].astype(np.float32)  # [n, E]
        vectors = np.stack(
            [states[chunk_of_token == chunk].mean(axis=0) for chunk in range(len(texts))]
        )
        if not (head.normalize if normalize is None else normalize):
            return vectors[:, : model.truncate_dim]
        if normalize:  # a model's own normalization comes before the cut
            vectors = vectors[:, : model.truncate_dim]
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
        return (vectors / np.maximum(norms, np.finfo(np.float32).tiny))[:, : model.truncate_dim]

    return [InferenceJob((sequence,), ("hidden",), average)]


def embed_heads(model: TaskModel, normalize: bool | None) -> tuple[str]:
    """Return the head that makes vectors: before normalization if that is not wanted."""
    if normalize is False and model.embedder is None:
        raise CheckpointError(
            f"{model.name} is a graph that computes its vectors itself, so they cannot be had "
            "before normalization; leave out normalize=False"
        )
    raw = normalize is False and model.embedder is not None and model.embedder.normalize
    return ("raw",) if raw else ("embed",)


def excluded_tokens(model: TaskModel, prompt: str | None, limit: int) -> int:
    """Return how many leading tokens pooling leaves out, for models that exclude a prompt.

    They are the prompt's and the special ones before it, as sentence-transformers counts them.
    """
    if not prompt or model.embedder is None or model.embedder.include_prompt:
        return 0
    (alone,) = model.tokenizer.encode([prompt], limit)
    return len(alone) - int(alone.special[-1])


def _without_prompt(
    sequences: tuple[Encoding, ...], length: int, long: Long | None
) -> tuple[Encoding, ...]:
    """Mark the prompt, which the first sequence begins with, as not to be pooled."""
    first, *later = sequences
    if long == "truncate_left" and first.truncated:
        raise InputError(
            "a text was cut at its beginning, but there stands the prompt, which this model "
            'excludes from pooling; use long="truncate"'
        )
    return replace(first, prompt_length=length), *later


def _vector(
    sequences: Sequence[Encoding],
    normalize: bool | None,
    width: int | None,
    rows: Sequence[Row],
) -> np.ndarray:
    """The vector of a text; `width`: the numbers that are kept of it, None: all."""
    vector = _average(rows, sequences)
    if normalize is None and len(rows) > 1:
        # An average of unit vectors is shorter than 1: normalize it if those of the chunks are.
        norms = [np.linalg.norm(row[0]) for row in rows]
        if np.allclose(norms, 1, atol=UNIT_NORM_TOLERANCE):
            vector = normalized(vector)
    vector = vector[:width]
    return normalized(vector) if normalize else vector


def normalized(vector: np.ndarray) -> np.ndarray:
    """Return a vector at length 1."""
    return vector / max(np.linalg.norm(vector), np.finfo(np.float32).tiny)


def _hidden(
    model: TaskModel,
    texts: Sequence[TaskInput],
    prompt: str | None = None,
    max_length: int | None = None,
    long: Long | None = None,
) -> list[InferenceJob]:
    heads = ("hidden", "pooled") if "pooled" in model.heads else ("hidden",)
    if long == "chunk":
        raise InputError(
            "hidden states are per sequence and chunks of a text cannot share them; "
            "use another value of long, or split the text"
        )
    if prompt is not None:
        texts = prompted(model, texts, prompt)
    return [
        InferenceJob(sequences, heads, partial(_states, model.tokenizer, sequences[0]))
        for sequences in _sequences(model, texts, max_length, long)
    ]


def _states(tokenizer: Tokenizer, encoding: Encoding, rows: Sequence[Row]) -> Hidden:
    states, *pooled = rows[0]
    tokens = tuple(map(tokenizer.token, encoding.ids.tolist()))
    return Hidden(states, pooled[0].copy() if pooled else None, tokens)


def _classify(
    model: TaskModel,
    texts: Sequence[TaskInput],
    max_length: int | None = None,
    long: Long | None = None,
    problem: str | None = None,
) -> list[InferenceJob]:
    def job(sequences: tuple[Encoding, ...]) -> InferenceJob:
        def label(rows: Sequence[Row]) -> Classified:
            scores = _average(rows, sequences)
            return results.classified(scores, model.labels, problem or model.problem)

        return InferenceJob(sequences, ("classify",), label)

    return list(map(job, _sequences(model, texts, max_length, long)))


def _sparse(
    model: TaskModel,
    texts: Sequence[TaskInput],
    query: bool = False,
    prompt: str | None = None,
    top_k: int | None = None,
    max_length: int | None = None,
    long: Long | None = None,
) -> list[InferenceJob]:
    settings = sparse_settings(model, top_k)
    texts = prompted(model, texts, side_prompt(model, texts, query, prompt))
    weights = settings.query_weights if query else None
    if weights is not None:
        return _weighed(model, texts, weights, top_k, max_length, long)

    def job(sequences: tuple[Encoding, ...]) -> InferenceJob:
        def vector(rows: Sequence[Row]) -> SparseVector:
            columns = [row[0] for row in rows]
            if settings.head == "sparse":
                return results.largest(_heaviest(columns), top_k)
            ids = [sequence.ids for sequence in sequences]
            return results.largest(results.lexical(columns, ids, settings.skipped), top_k)

        return InferenceJob(sequences, (settings.head,), vector)

    return list(map(job, _sequences(model, texts, max_length, long)))


def sparse_settings(model: TaskModel, top_k: int | None) -> SparseSettings:
    """Return the model's settings for sparse vectors; raise if there are none."""
    check_head(model, TASKS["sparse"])
    if model.sparse_settings is None:
        raise CheckpointError(f"{model.name} has no settings for sparse vectors")
    if top_k is not None and top_k < 1:
        raise InputError(f"top_k is {top_k}; keep at least 1 word of each text")
    return model.sparse_settings


def _heaviest(chunks: Sequence[np.ndarray]) -> SparseVector:
    """The weights of words in a text: of those of its chunks the largest."""
    vectors = [
        SparseVector(chunk["index"], chunk["weight"])
        if chunk.dtype == COMPACT
        else results.sparse(chunk)
        for chunk in chunks
    ]
    if len(vectors) == 1:
        return vectors[0]
    return results.lexical([v.weights for v in vectors], [v.indices for v in vectors], ())


def compact(heads: Sequence[str], row: Row) -> Row:
    """A row that a list of many can hold: of all words of a vocabulary those that have a weight."""
    if "sparse" not in heads:
        return row
    return tuple(
        _compact(column) if head == "sparse" else column
        for head, column in zip(heads, row, strict=True)
    )


def _compact(weights: np.ndarray) -> np.ndarray:
    vector = results.sparse(weights)
    column = np.empty(len(vector.indices), COMPACT)
    column["index"] = vector.indices
    column["weight"] = vector.weights
    return column


def _weighed(
    model: TaskModel,
    texts: Sequence[TaskInput],
    weights: np.ndarray,
    top_k: int | None,
    max_length: int | None,
    long: Long | None,
) -> list[InferenceJob]:
    """Jobs that run nothing: the words of a query have weights of their own."""
    jobs: list[InferenceJob] = []
    # Of such a query the library that has these models counts the tokens without special ones.
    specials = model.tokenizer.specials_per(pair=False)
    limit = length_limit(model, max_length)
    encoded = [
        (from_ids(text, limit, model.tokenizer.vocab_size),)
        if is_ids(text)
        else _whole(model.tokenizer, [cast("Text", text)], limit + specials, "truncate")[0]
        for text in texts
    ]
    if long == "error":
        cut = next((i for i, (sequence,) in enumerate(encoded) if sequence.truncated), None)
        if cut is not None:
            raise InputError(f"text {cut} is too long: the model takes {limit} tokens")
    for (sequence,) in encoded:
        words = np.unique(sequence.ids[~sequence.special])
        vector = results.largest(SparseVector(words, weights[words]), top_k)
        kept = vector.weights > 0
        vector = SparseVector(vector.indices[kept].astype(np.int32), vector.weights[kept])
        jobs.append(InferenceJob((), ("sparse",), partial(_constant, vector)))
    return jobs


def _constant(value: Any, rows: Sequence[Row]) -> Any:
    return value


def side_prompt(
    model: TaskModel, texts: Sequence[TaskInput], query: bool, prompt: str | None
) -> str | None:
    """The name of the prompt before queries or documents: the model's own, unless one is named."""
    side = "query" if query else "document"
    if prompt is not None or side not in model.prompts or all(map(is_ids, texts)):
        return prompt
    return side if model.prompts[side] else ""


def _multi(
    model: TaskModel,
    texts: Sequence[TaskInput],
    query: bool = False,
    prompt: str | None = None,
    max_length: int | None = None,
    long: Long | None = None,
) -> list[InferenceJob]:
    settings, side, _ = multi_side(model, query, max_length)
    encoded = _token_side(model, settings, texts, query, prompt, max_length, long)
    return [
        InferenceJob((sequence,), ("multi",), partial(_kept, settings, side, sequence))
        for sequence in encoded
    ]


def multi_side(
    model: TaskModel, query: bool, max_length: int | None
) -> tuple[MultiSettings, TokenSide, int]:
    """Return the settings for vectors of tokens, those of this side, and its limit of tokens."""
    check_head(model, TASKS["multi"])
    settings = model.multi_settings
    if settings is None:
        raise CheckpointError(f"{model.name} has no settings for vectors of tokens")
    side = settings.query if query else settings.document
    limit = length_limit(model, max_length)
    return settings, side, min(limit, side.length or limit)


def _token_side(
    model: TaskModel,
    settings: MultiSettings,
    texts: Sequence[TaskInput],
    query: bool,
    prompt: str | None,
    max_length: int | None,
    long: Long | None,
) -> list[Encoding]:
    """Queries or documents with the tokens that tell them apart, and queries filled up."""
    if long == "chunk":
        raise InputError('vectors of tokens are not made in chunks; use long="truncate"')
    texts = prompted(model, texts, side_prompt(model, texts, query, prompt))
    texts = _single(cast("Sequence[Text]", texts), "multi")
    _, side, limit = multi_side(model, query, max_length)
    marked = side.marker is not None
    encoded = _sequences(model, texts, limit - marked, long, depth=7)
    return [_filled_up(sequence, side, settings, limit) for (sequence,) in encoded]


def _filled_up(
    sequence: Encoding, side: TokenSide, settings: MultiSettings, limit: int
) -> Encoding:
    if side.marker is not None:
        sequence = _with_tokens(sequence, 1, [side.marker])
    if side.filler is None or len(sequence) >= limit:
        return sequence
    length = len(sequence)
    filled = _with_tokens(sequence, length, [side.filler] * (limit - length))
    return filled if settings.attends_to_filler else replace(filled, key_length=length)


def _with_tokens(sequence: Encoding, at: int, ids: Sequence[int]) -> Encoding:
    """The sequence with special tokens before the one at `at`."""
    place = [at] * len(ids)
    shift = len(ids) if at <= sequence.spans[0].start else 0
    spans = tuple(slice(span.start + shift, span.stop + shift) for span in sequence.spans)
    return replace(
        sequence,
        ids=np.insert(sequence.ids, place, ids),
        types=np.insert(sequence.types, place, 0),
        offsets=np.insert(sequence.offsets, place, 0, axis=0),
        special=np.insert(sequence.special, place, True),
        spans=spans,
    )


def _kept(
    settings: MultiSettings, side: TokenSide, sequence: Encoding, rows: Sequence[Row]
) -> np.ndarray:
    """[n, D] the vectors of the tokens that count."""
    kept = ~np.isin(sequence.ids, side.skipped)
    if settings.drops_first:
        kept[0] = False
    return rows[0][0][kept]


def _rerank_by_tokens(
    model: TaskModel,
    settings: MultiSettings,
    queries: Sequence[str],
    documents: Sequence[str],
    top_k: int | None,
    max_length: int | None,
    long: Long | None,
) -> list[InferenceJob]:
    """Jobs that rank documents by `results.maxsim`."""
    query_encodings = _token_side(model, settings, queries, True, None, max_length, long)
    document_encodings = _token_side(model, settings, documents, False, None, max_length, long)

    def job(question: Encoding) -> InferenceJob:
        def ranked(rows: Sequence[Row]) -> list[Ranked]:
            query = _kept(settings, settings.query, question, rows[:1])
            vectors = [
                _kept(settings, settings.document, sequence, [row])
                for sequence, row in zip(document_encodings, rows[1:], strict=True)
            ]
            return results.ranked(results.maxsim([query], vectors)[0], documents, top_k)

        return InferenceJob((question, *document_encodings), ("multi",), ranked)

    return list(map(job, query_encodings))


def _rerank(
    model: TaskModel,
    queries: Sequence[str],
    documents: Sequence[str],
    top_k: int | None = None,
    max_length: int | None = None,
    long: Long | None = None,
    raw: bool = False,
) -> list[InferenceJob]:
    if long == "chunk":
        raise InputError(
            'rerank cannot run documents in chunks; use long="truncate", or split them'
        )
    if model.multi_settings is not None and "classify" not in model.heads:
        return _rerank_by_tokens(
            model,
            model.multi_settings,
            as_texts(queries),
            as_texts(documents),
            top_k,
            max_length,
            long,
        )
    check_one_label(model)
    documents = as_texts(documents)
    pairs = [(query, document) for query in queries for document in documents]
    sequences = iter([sequence for (sequence,) in _sequences(model, pairs, max_length, long)])

    def ranked(rows: Sequence[Row]) -> list[Ranked]:
        logits = np.array([row[0] for (row,) in rows], np.float64)
        return ranking(model, logits, documents, top_k, raw)

    return [
        InferenceJob(tuple(islice(sequences, len(documents))), ("classify",), ranked)
        for _ in queries
    ]


def check_one_label(model: TaskModel) -> None:
    """Raise if the model's classifier is not one for reranking."""
    if len(model.labels) != 1:
        raise CheckpointError(
            f"rerank needs a head with one output, but {model.name} classifies into "
            f"{len(model.labels)} labels; load a cross-encoder"
        )


def ranking(
    model: TaskModel, logits: np.ndarray, documents: Sequence[str], top_k: int | None, raw: bool
) -> list[Ranked]:
    """Return documents in the order of their logits, with scores unless these are wanted `raw`."""
    order = results.ranked(logits, documents, top_k)
    if raw:
        return order
    kept = logits[[document.index for document in order]]
    scores = results.activated(kept, model.score_activation)
    return [replace(rank, score=score) for rank, score in zip(order, scores, strict=True)]


def _answer(
    model: TaskModel,
    pairs: Sequence[tuple[str, str]],
    top_k: int = 1,
    max_length: int | None = None,
    stride: int | None = None,
    max_answer_tokens: int = 30,
    no_answer: float | None = None,
    scoring: Scoring = "joint",
    align_to_words: bool = True,
) -> list[InferenceJob]:
    if scoring not in get_args(Scoring):
        raise InputError(f"scoring is {scoring!r}; use one of {', '.join(get_args(Scoring))}")

    def job(windows: Sequence[Encoding], context: str) -> InferenceJob:
        def best(rows: Sequence[Row]) -> list[Answer]:
            logits = [row for (row,) in rows]
            if scoring == "pipeline":
                tokenizer = model.tokenizer
                return results.pipeline_answers(
                    logits,
                    windows,
                    context,
                    tokenizer.word_spans(context) if align_to_words else None,
                    tokenizer.cls_id,
                    top_k,
                    max_answer_tokens,
                    no_answer is not None,
                )
            return results.answers(logits, windows, context, top_k, max_answer_tokens, no_answer)

        return InferenceJob(tuple(windows), ("span",), best)

    windows = model.tokenizer.windows(pairs, length_limit(model, max_length), stride)
    contexts = [context for _, context in pairs]
    return list(map(job, windows, contexts))


def _fill(
    model: TaskModel,
    texts: Sequence[str],
    top_k: int = 5,
    max_length: int | None = None,
    long: Long | None = None,
    targets: Sequence[str] | None = None,
    decoded: bool = False,
) -> list[InferenceJob]:
    tokenizer = model.tokenizer
    among = None if targets is None else _first_tokens(tokenizer, targets)

    def job(sequences: tuple[Encoding, ...], text: str) -> InferenceJob:
        def words(rows: Sequence[Row]) -> list[list[Filled]]:
            masks: list[list[Filled]] = []
            for (logits,), sequence in zip(rows, sequences, strict=True):
                masks += results.filled(logits, sequence, text, tokenizer, top_k, among, decoded)
            return masks

        # The vocabulary is wide: logits are computed for the mask tokens alone.
        return InferenceJob(sequences, ("mlm",), words, only=tokenizer.mask_id)

    encoded = _sequences(model, _single(texts, "fill"), max_length, long)
    for i, sequences in enumerate(encoded):
        if not any(tokenizer.mask_id in sequence.ids for sequence in sequences):
            mask = tokenizer.token(tokenizer.mask_id or 0)
            within = " within the model's length" if sequences[0].truncated else ""
            raise InputError(f"text {i} has no {mask} to fill{within}")
    return list(map(job, encoded, texts))


def _first_tokens(tokenizer: Tokenizer, words: Sequence[str]) -> list[int]:
    """Return each word's token, or the first of those it is split into.

    A word that is spelled like a token of the vocabulary (`##ing`) is that token.
    """
    if not words:
        raise InputError("targets is empty; name at least one word, or leave it out")
    tokens: list[int] = []
    for encoding, word in zip(tokenizer.encode(words), words, strict=True):
        if (known := tokenizer.find(word)) is not None:
            tokens.append(known)
            continue
        ids = encoding.ids[encoding.spans[0]]
        if not len(ids):
            raise InputError(f"{word!r} has no token that could fill a mask")
        tokens.append(int(ids[0]))
    return tokens


def _label(
    model: TaskModel,
    texts: Sequence[str],
    logits: bool = False,  # return those of each token, special ones included, instead of entities
    max_length: int | None = None,
    long: Long | None = None,
    aggregation: Aggregation = "simple",
    stride: int | None = None,
) -> list[InferenceJob]:
    labels = model.labels
    tokenizer = model.tokenizer
    if aggregation not in get_args(Aggregation):
        known = ", ".join(get_args(Aggregation))
        raise InputError(f"aggregation is {aggregation!r}; use one of {known}")

    def job(sequences: tuple[Encoding, ...], text: str) -> InferenceJob:
        def entities(rows: Sequence[Row]) -> list[Entity]:
            merged: list[Entity] = []
            for (logits,), sequence in zip(rows, sequences, strict=True):
                merged += results.entities(logits, sequence, text, labels, aggregation, tokenizer)
            if stride is not None and len(sequences) > 1:
                return results.without_overlaps(merged)
            return merged

        return InferenceJob(sequences, ("tokens",), entities)

    texts = cast("Sequence[str]", _single(texts, "label"))
    if stride is None:
        encoded = _sequences(model, texts, max_length, long)
    else:
        if aggregation == "none" or logits:
            raise InputError(
                "with stride a token can be in two windows, and only entities are joined; "
                'use another aggregation than "none", or long="chunk"'
            )
        if long is not None:
            raise InputError(f"stride reads the whole text; leave out long={long!r}")
        windows = tokenizer.windows(texts, length_limit(model, max_length), stride)
        encoded = list(map(tuple, windows))
    if logits:
        return [InferenceJob(sequences, ("tokens",), _token_logits) for sequences in encoded]
    return list(map(job, encoded, texts))


def _token_logits(rows: Sequence[Row]) -> np.ndarray:
    """Return the logits of all tokens of a text, [n, C]."""
    return np.concatenate([logits for (logits,) in rows])


# The order is that in which the server lists what a model can do. Two tasks ask for more than a
# head: rerank needs exactly one label, and zero_shot needs a label for entailment.
TASKS: dict[str, TaskSpec] = {
    "embed": TaskSpec(
        head="embed",
        method="embed",
        route="/embed",
        command="embed",
        prepare=_embed,
    ),
    "classify": TaskSpec(
        head="classify",
        method="classify",
        route="/classify",
        command="classify",
        prepare=_classify,
        uses_labels=True,
        fine_tuned=True,
    ),
    "rerank": TaskSpec(
        head="classify",
        method="rerank",
        route="/rerank",
        command="rerank",
        prepare=_rerank,
        takes_pairs=False,
        takes_query=True,
        uses_labels=True,
        fine_tuned=True,
        instead="multi",
    ),
    # The server makes a pair of the text and each label of the request, and classifies the pairs.
    "zero_shot": TaskSpec(
        head="classify",
        method="classify",
        route="/models/{name:path}/pipeline/{task}",
        command=None,
        prepare=None,
        uses_labels=True,
        fine_tuned=True,
    ),
    "answer": TaskSpec(
        head="span",
        method="answer",
        route="/answer",
        command="answer",
        prepare=_answer,
        takes_query=True,
        fine_tuned=True,
    ),
    "fill": TaskSpec(
        head="mlm",
        method="fill",
        route="/fill",
        command="fill",
        prepare=_fill,
        takes_pairs=False,
    ),
    "label": TaskSpec(
        head="tokens",
        method="label",
        route="/ner",
        command="label",
        prepare=_label,
        takes_pairs=False,
        uses_labels=True,
        fine_tuned=True,
    ),
    "sparse": TaskSpec(
        head="sparse",
        method="sparse",
        route="/embed_sparse",
        command="sparse",
        prepare=_sparse,
        takes_pairs=False,
        instead="lexical",
    ),
    "multi": TaskSpec(
        head="multi",
        method="multi",
        route="/embed_multi",
        command="multi",
        prepare=_multi,
        takes_pairs=False,
    ),
    "hidden": TaskSpec(
        head="hidden",
        method="hidden",
        route="/embed_all",
        command="hidden",
        prepare=_hidden,
    ),
}


def length_limit(model: TaskModel, max_length: int | None) -> int:
    """Return the tokens that a text may have: `max_length`, or the model's own limit."""
    if max_length is None or max_length <= 0:
        return model.max_length
    if max_length > model.max_length:
        raise InputError(
            f"max_length is {max_length}, but {model.name} takes {model.max_length} tokens"
        )
    return max_length


def prompted(
    model: TaskModel, texts: Sequence[TaskInput], prompt: str | None
) -> Sequence[TaskInput]:
    """Put the model's prompt of this name before each text; without a name its default, if any."""
    prefix = _prompt(model, texts, prompt)
    if prefix is None:
        return texts
    if not all(isinstance(text, str) for text in texts):
        raise InputError("a prompt goes before single texts, not before pairs or token ids")
    return [prefix + str(text) for text in texts]


def task_prompt(
    model: TaskModel,
    task: str,
    texts: Sequence[TaskInput],
    prompt: str | None,
    query: bool = False,
) -> str:
    """Return what a task puts before these texts; empty if nothing."""
    if task in ("sparse", "multi"):
        prompt = side_prompt(model, texts, query, prompt)
    if task in ("embed", "sparse", "multi"):
        return _prompt(model, texts, prompt) or ""
    return (prompt_text(model, prompt) or "") if prompt is not None else ""


def _prompt(model: TaskModel, texts: Sequence[TaskInput], prompt: str | None) -> str | None:
    """Return what goes before the texts; token ids get no prompt unless one is named."""
    if prompt is None and all(map(is_ids, texts)):
        return None
    return prompt_text(model, prompt)


def prompt_text(model: TaskModel, name: str | None) -> str | None:
    """Return the model's prompt of this name; None: its default, if any. An empty name is none."""
    name = model.default_prompt if name is None else name
    if not name:
        return None
    if name not in model.prompts:
        known = ", ".join(model.prompts) or "none"
        raise InputError(f"{model.name} has no prompt {name!r}; it has: {known}")
    return model.prompts[name]


def _single(texts: Sequence[Text], task: str) -> Sequence[Text]:
    if not all(isinstance(text, str) for text in texts):
        raise InputError(f"{task} takes single texts, not pairs or token ids")
    return texts
