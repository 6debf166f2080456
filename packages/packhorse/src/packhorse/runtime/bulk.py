"""Vectors of a list of texts, without a Python object or a numpy call per text.

A fast GPU takes 20 microseconds for a short text, and Python for one `Encoding` as long. Here texts
are tokenized in pieces into flat arrays (`Tokenizer.encode_flat`), in a thread beside the one that
launches, so that the device starts with the first piece. A batch is gathered from the arrays of its
piece, by length, and its vectors are written to their places in the result when it is back, while
the next one runs. Tokens, batches of up to a piece, and therefore vectors, are those of the jobs
that `runtime.tasks` prepares; these remain the way of all other tasks.

Shapes: T tokens of a batch, S sequences.
"""

# torch leaves from_numpy untyped.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch

from packhorse.errors import InputError
from packhorse.packing.batch import Packed
from packhorse.runtime import batches, tasks
from packhorse.runtime.batches import LaunchedBatch
from packhorse.runtime.tasks import Long, Progress, TaskInput, TaskModel
from packhorse.tokens.tokenizer import FlatEncodings

# Characters of the texts that are tokenized together: a quarter of a million tokens and more, so
# that batches by length are full, and a few hundredths of a second for one thread.
PIECE_CHARACTERS = 1 << 20
PIECES_AHEAD = 2


class BulkModel(TaskModel, Protocol):
    """What this way needs of an encoder; `Encoder` implements it."""

    @property
    def device(self) -> torch.device: ...
    @property
    def capacity(self) -> int: ...
    @property
    def budget(self) -> int: ...
    @property
    def launch(self) -> Callable[[Packed, tuple[str, ...]], LaunchedBatch]: ...


def serves(encoder: BulkModel, texts: Sequence[TaskInput], long: Long | None) -> bool:
    """Return whether `embed` can be used: plain texts that are cut at the end, a ragged batch."""
    return (
        long in (None, "truncate")
        and not encoder.capacity
        and len(texts) > 1
        and isinstance(texts, list | tuple | np.ndarray)  # others, as a set, cannot be sliced
        and all(isinstance(text, str) for text in texts)
    )


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

    def tokenize(piece: slice) -> FlatEncodings:
        part = texts[piece]
        return encoder.tokenizer.encode_flat([prefix + t for t in part] if prefix else part, limit)

    vectors = np.empty((len(texts), 0), np.float32)
    finished = 0
    truncated = 0

    def keep(indices: np.ndarray, batch: LaunchedBatch) -> None:
        nonlocal finished, vectors
        (output,) = batch.wait().outputs  # [S, width]
        if not finished:
            width = min(output.shape[1], encoder.truncate_dim or output.shape[1])
            vectors = np.empty((len(texts), width), np.float32)
        vectors[indices] = output.numpy()[:, : vectors.shape[1]]
        finished += len(indices)
        if progress is not None:
            progress(finished, len(texts))

    running: tuple[np.ndarray, LaunchedBatch] | None = None
    pieces = _pieces(texts)
    on_cpu = encoder.device.type == "cpu"  # where a thread would only take cores from the model
    encoded = map(tokenize, pieces) if on_cpu else _ahead(tokenize, pieces)
    for piece, flat in zip(pieces, encoded, strict=True):
        truncated += flat.truncated
        lengths = np.diff(flat.bounds)
        if not lengths.all():
            index = piece.start + int(lengths.argmin())
            raise InputError(f"text {index} has no tokens; leave it out")
        for selected in batches.by_tokens(lengths, encoder.budget, by_length=by_length):
            batch = encoder.launch(gather(flat, selected, excluded), heads)
            if running is not None:  # read one batch late, so that the device never waits
                keep(*running)
            running = piece.start + selected, batch
    if running is not None:
        keep(*running)
    if normalize:
        for index, vector in enumerate(vectors):
            vectors[index] = tasks.normalized(vector)
    if warn:
        tasks.warn_of_cut_texts(truncated, len(texts), limit, depth=4)
    return vectors


def gather(flat: FlatEncodings, selected: np.ndarray, excluded: int = 0) -> Packed:
    """Lay the selected sequences end to end; pooling leaves out `excluded` tokens of each."""
    begins = flat.bounds[selected]
    lengths = flat.bounds[selected + 1] - begins
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    # Of each token, its index in the batch minus the index of its sequence's first token.
    positions = np.arange(int(bounds[-1])) - np.repeat(bounds[:-1], lengths)  # [T]
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


def _pieces(texts: Sequence[str]) -> list[slice]:
    """Cut a list into slices of about `PIECE_CHARACTERS`, of whole texts."""
    ends = np.cumsum(np.fromiter(map(len, texts), np.int64, len(texts)))
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
