"""Results of a list of texts, without a Python object or a numpy call per text.

A fast GPU takes 20 microseconds for a short text, and Python for one `Encoding` as long. Here texts
are tokenized in pieces into flat arrays (`Tokenizer.encode_flat`), in a thread beside the one that
launches, so that the device starts after the first piece. A batch is gathered from the arrays of
its piece, by length, and its results are stored while the next batch runs. Tokens, and batches
within a piece, are those of the jobs that `runtime.tasks` prepares, and so are the results. Hidden
states, entities, answers and words for masks still use jobs, because they need the characters or
windows of each text; so do options that are rare in long lists.

Shapes: T tokens of a batch, S sequences.
"""

# torch leaves from_numpy untyped.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol, final

import numpy as np
import torch

from packhorse.errors import InputError
from packhorse.packing.batch import Packed
from packhorse.runtime import batches, tasks
from packhorse.runtime.batches import LaunchedBatch
from packhorse.runtime.tasks import Long, Progress, TaskInput, TaskModel
from packhorse.tokens.tokenizer import FlatEncodings

if TYPE_CHECKING:
    from scipy.sparse import csr_array  # pyright: ignore[reportMissingTypeStubs]

    from packhorse.model.retrieval import SparseSettings

# Characters of the texts that are tokenized together: a quarter of a million tokens and more, so
# that batches by length are full, and a few hundredths of a second for one thread.
PIECE_CHARACTERS = 1 << 20
PIECES_AHEAD = 2
# Texts in a batch of sparse vectors: each has a number per word of the vocabulary until it is read.
MOST_SPARSE = 512
NO_VECTORS = np.empty((0, 0), np.float32)


class BulkModel(TaskModel, Protocol):
    """What this module needs of an encoder; `Encoder` implements it."""

    @property
    def device(self) -> torch.device: ...
    @property
    def capacity(self) -> int: ...
    @property
    def budget(self) -> int: ...
    @property
    def launch(self) -> Callable[[Packed, tuple[str, ...]], LaunchedBatch]: ...


def serves(
    encoder: BulkModel, texts: Sequence[TaskInput], long: Long | None, *, pairs: bool = False
) -> bool:
    """Return whether the functions here can be used: for texts, or pairs, that are truncated."""
    if (
        long not in (None, "truncate")
        or encoder.capacity
        or len(texts) < 2
        or not isinstance(texts, list | tuple | np.ndarray)  # others, as a set, cannot be sliced
    ):
        return False
    if all(isinstance(text, str) for text in texts):
        return True
    # The words that a model has around a pair are joined text by text.
    return pairs and encoder.pair_template is None and all(map(_is_pair, texts))


def _is_pair(text: TaskInput) -> bool:
    if not isinstance(text, tuple) or len(text) != 2:
        return False
    return isinstance(text[0], str) and isinstance(text[1], str)


def embed(
    encoder: BulkModel,
    texts: Sequence[Any],
    *,
    prompt: str | None = None,
    max_length: int | None = None,
    normalize: bool | None = None,
    warn: bool = False,
    progress: Progress | None = None,
    by_length: bool = True,
) -> np.ndarray:
    """Return one vector per text, [n, width], as `Encoder.embed` does.

    Without `by_length` batches are cut in the order of the texts, as if these just came in.
    """
    tasks.check_head(encoder, tasks.TASKS["embed"])
    heads = tasks.embed_heads(encoder, normalize)
    prefix = tasks.prompt_text(encoder, prompt) or ""
    limit = tasks.length_limit(encoder, max_length)
    excluded = tasks.excluded_tokens(encoder, prefix, limit)
    run = _Run(encoder, texts, prefix=prefix, limit=limit, by_length=by_length, progress=progress)
    vectors = run.matrix(heads, excluded=excluded, width=encoder.truncate_dim)
    if normalize:
        for index, vector in enumerate(vectors):
            vectors[index] = tasks.normalized(vector)
    if warn:
        tasks.warn_of_cut_texts(run.truncated, len(texts), limit, depth=4)
    return vectors


def logits(
    encoder: BulkModel,
    texts: Sequence[Any],
    task: str,
    *,
    max_length: int | None = None,
    warn: bool = False,
    progress: Progress | None = None,
) -> np.ndarray:
    """Return the logits of each text or pair, [n, labels], for `classify` and `rerank`."""
    tasks.check_head(encoder, tasks.TASKS[task])
    limit = tasks.length_limit(encoder, max_length)
    run = _Run(encoder, texts, limit=limit, progress=progress)
    matrix = run.matrix(("classify",))
    if warn:
        tasks.warn_of_cut_texts(run.truncated, len(texts), limit, depth=4)
    return matrix


def sparse(
    encoder: BulkModel,
    texts: Sequence[Any],
    *,
    query: bool = False,
    prompt: str | None = None,
    top_k: int | None = None,
    max_length: int | None = None,
    warn: bool = False,
    progress: Progress | None = None,
) -> csr_array:
    """Return the weights of words in each text as `Encoder.sparse` does."""
    from scipy.sparse import csr_array  # pyright: ignore[reportMissingTypeStubs]

    settings = tasks.sparse_settings(encoder, top_k)
    name = tasks.side_prompt(encoder, texts, query, prompt)
    prefix = tasks.prompt_text(encoder, name) or ""
    limit = tasks.length_limit(encoder, max_length)
    run = _Run(encoder, texts, prefix=prefix, limit=limit, progress=progress)
    sizes = np.zeros(len(texts), np.int64)
    parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    max_texts = MOST_SPARSE if settings.head == "sparse" else 0
    for selected, batch in run.batches((settings.head,), max_texts=max_texts):
        (output,) = batch.outputs
        if settings.head == "sparse":
            rows, words, weights = _words_with_weight(output.numpy())
        else:
            rows, words, weights = _largest_by_word(batch.packed, output.numpy(), settings)
        if top_k is not None:
            kept = _heaviest(rows, weights, top_k)
            rows, words, weights = rows[kept], words[kept], weights[kept]
        sizes[selected] = np.bincount(rows, minlength=len(selected))
        parts.append((selected[rows], words, weights))
    if warn:
        tasks.warn_of_cut_texts(run.truncated, len(texts), limit, depth=4)
    ends = _bounds(sizes)
    indices = np.empty(int(ends[-1]), np.int32)
    data = np.empty(int(ends[-1]), np.float32)
    for owners, words, weights in parts:  # those of a text are end to end, in its part
        counts = np.diff(np.flatnonzero(np.diff(owners, prepend=-1, append=-1)))
        places = np.repeat(ends[owners[_bounds(counts)[:-1]]], counts) + _within(counts)
        indices[places] = words
        data[places] = weights
    return csr_array((data, indices, ends), shape=(len(texts), settings.width))


def _words_with_weight(output: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of [S, V] weights those above 0: row, word and weight of each, in order."""
    rows, words = (output > 0).nonzero()
    return rows, words, output[rows, words]


def _largest_by_word(
    packed: Packed, output: np.ndarray, settings: SparseSettings
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of weights of tokens [T] the largest of each word in each sequence, in order."""
    ids = packed.ids.numpy()
    weights = output.reshape(len(ids))
    rows = np.repeat(np.arange(len(packed)), packed.cu_seqlens.diff().numpy())
    counted = (weights > 0) & ~np.isin(ids, settings.skipped)
    keys = rows[counted] * np.int64(settings.width) + ids[counted]
    keys, inverse = np.unique(keys, return_inverse=True)
    largest = np.zeros(len(keys), np.float32)
    np.maximum.at(largest, inverse, weights[counted])
    return *np.divmod(keys, settings.width), largest


def _heaviest(rows: np.ndarray, weights: np.ndarray, count: int) -> np.ndarray:
    """Which weights are among the `count` largest of their row; of equal ones the first."""
    order = np.lexsort((-weights, rows))
    sizes = np.bincount(rows)
    heaviest = np.zeros(len(rows), bool)
    heaviest[order[_within(sizes) < count]] = True
    return heaviest


def multi(
    encoder: BulkModel,
    texts: Sequence[Any],
    *,
    query: bool = False,
    prompt: str | None = None,
    max_length: int | None = None,
    warn: bool = False,
    progress: Progress | None = None,
) -> list[np.ndarray]:
    """Return the vectors of each text's tokens as `Encoder.multi` does."""
    settings, side, limit = tasks.multi_side(encoder, query, max_length)
    name = tasks.side_prompt(encoder, texts, query, prompt)
    prefix = tasks.prompt_text(encoder, name) or ""
    limit -= side.marker is not None
    run = _Run(encoder, texts, prefix=prefix, limit=limit, marker=side.marker, progress=progress)
    vectors: list[np.ndarray] = [NO_VECTORS] * len(texts)
    for selected, batch in run.batches(("multi",)):
        (output,) = batch.outputs  # [T, D]
        packed = batch.packed
        kept = ~np.isin(packed.ids.numpy(), side.skipped)
        starts = packed.cu_seqlens.numpy()[:-1]
        if settings.drops_first:
            kept[starts] = False
        ends = np.cumsum(np.add.reduceat(kept, starts, dtype=np.int64)).tolist()
        counted = output.numpy()[kept]
        for index, begin, end in zip(selected.tolist(), [0, *ends], ends, strict=False):
            vectors[index] = counted[begin:end]
    if warn:
        tasks.warn_of_cut_texts(run.truncated, len(texts), limit, depth=4)
    return vectors


@final
class _Run:
    """One pass over a list of texts: tokens by piece, batches by length, results one batch late."""

    def __init__(
        self,
        encoder: BulkModel,
        texts: Sequence[Any],
        *,
        limit: int,
        prefix: str = "",
        marker: int | None = None,
        by_length: bool = True,
        progress: Progress | None = None,
    ) -> None:
        self._encoder = encoder
        self._texts = texts
        self._limit = limit
        self._prefix = prefix
        self._marker = marker
        self._by_length = by_length
        self._progress = progress
        self.truncated = 0  # texts of which a part was left out

    def matrix(
        self, heads: tuple[str, ...], *, excluded: int = 0, width: int | None = None
    ) -> np.ndarray:
        """Return the output of a head that has one row per text, cut to `width` columns."""
        matrix = np.empty((len(self._texts), 0), np.float32)
        for selected, batch in self.batches(heads, excluded=excluded):
            (output,) = batch.outputs  # [S, columns]
            columns = min(output.shape[1], width or output.shape[1])
            if not matrix.shape[1]:
                matrix = np.empty((len(self._texts), columns), np.float32)
            matrix[selected] = output.numpy()[:, :columns]
        return matrix

    def batches(
        self, heads: tuple[str, ...], *, excluded: int = 0, max_texts: int = 0
    ) -> Generator[tuple[np.ndarray, LaunchedBatch]]:
        """Yield the indices of the texts of each batch and its results, which are on the host.

        `max_texts`: texts in a batch; 0: any number. Pooling leaves out `excluded` tokens of each.
        """
        encoder = self._encoder
        running: tuple[np.ndarray, LaunchedBatch] | None = None
        pieces = _pieces(self._texts)
        on_cpu = encoder.device.type == "cpu"  # where a thread would only take cores from the model
        encoded = map(self._tokenize, pieces) if on_cpu else _ahead(self._tokenize, pieces)
        finished = 0
        for piece, flat in zip(pieces, encoded, strict=True):
            self.truncated += flat.truncated
            lengths = np.diff(flat.bounds)
            if not lengths.all():
                index = piece.start + int(lengths.argmin())
                raise InputError(f"text {index} has no tokens; leave it out")
            by_tokens = batches.by_tokens(
                lengths, encoder.budget, max_texts, by_length=self._by_length
            )
            for selected in by_tokens:
                batch = encoder.launch(gather(flat, selected, excluded), heads)
                if running is not None:  # read one batch late, so that the device never waits
                    finished = self._report(finished, running)
                    yield running[0], running[1].wait()
                running = piece.start + selected, batch
        if running is not None:
            self._report(finished, running)
            yield running[0], running[1].wait()

    def _tokenize(self, piece: slice) -> FlatEncodings:
        part = self._texts[piece]
        if self._prefix:
            part = [self._prefix + text for text in part]
        return self._encoder.tokenizer.encode_flat(part, self._limit, self._marker)

    def _report(self, finished: int, batch: tuple[np.ndarray, LaunchedBatch]) -> int:
        finished += len(batch[0])
        if self._progress is not None:
            self._progress(finished, len(self._texts))
        return finished


def gather(flat: FlatEncodings, selected: np.ndarray, excluded: int = 0) -> Packed:
    """Lay the selected sequences end to end; pooling leaves out `excluded` tokens of each."""
    begins = flat.bounds[selected]
    lengths = flat.bounds[selected + 1] - begins
    bounds = _bounds(lengths)
    positions = _within(lengths)  # [T]
    source = positions + np.repeat(begins, lengths)  # [T]
    if flat.types is None:
        types = np.zeros(len(source), np.int64)
    else:
        types = flat.types[source].astype(np.int64)
    prompt_lengths = torch.from_numpy(np.minimum(excluded, lengths)) if excluded else None
    return Packed(
        ids=torch.from_numpy(flat.ids[source].astype(np.int64)),
        types=torch.from_numpy(types),
        positions=torch.from_numpy(positions),
        cu_seqlens=torch.from_numpy(bounds.astype(np.int32)),
        max_seqlen=int(lengths.max()),
        places=tuple(range(len(selected))),
        prompt_lengths=prompt_lengths,
    )


def _bounds(sizes: np.ndarray) -> np.ndarray:
    """Where each item begins, and the end: [n + 1]."""
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])


def _within(sizes: np.ndarray) -> np.ndarray:
    """The index of each item in its own group, for groups of these sizes laid end to end."""
    bounds = _bounds(sizes)
    return np.arange(int(bounds[-1])) - np.repeat(bounds[:-1], sizes)


def _pieces(texts: Sequence[Any]) -> list[slice]:
    """Cut a list into slices of about `PIECE_CHARACTERS`, of whole texts or pairs."""
    if isinstance(texts[0], str):
        sizes = np.fromiter(map(len, texts), np.int64, len(texts))
    else:
        sizes = np.fromiter((len(a) + len(b) for a, b in texts), np.int64, len(texts))
    ends = np.cumsum(sizes)
    total = int(ends[-1])
    cuts = np.searchsorted(ends, range(PIECE_CHARACTERS, total, PIECE_CHARACTERS)) + 1
    bounds = np.unique([0, *cuts.tolist(), len(texts)]).tolist()
    return [slice(begin, end) for begin, end in pairwise(bounds)]


def _ahead(
    tokenize: Callable[[slice], FlatEncodings], pieces: Iterable[slice]
) -> Generator[FlatEncodings]:
    """Tokenize pieces in a thread that is a few pieces ahead; the results are in order."""
    with ThreadPoolExecutor(1, "packhorse-tokenize") as pool:
        waiting: list[Future[FlatEncodings]] = []
        try:
            for piece in pieces:
                waiting.append(pool.submit(tokenize, piece))
                if len(waiting) > PIECES_AHEAD:
                    yield waiting.pop(0).result()
            while waiting:
                yield waiting.pop(0).result()
        finally:
            for future in waiting:
                future.cancel()
