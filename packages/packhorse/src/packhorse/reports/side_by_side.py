"""Encode the same texts packed and padded, in the same precision, and compare vectors and times.

The padded side is transformers if it is installed; otherwise our own engine with one sequence per
row, whose padding attends only to itself: it costs the linear layers in full and attention less.
Batches are padded as they come and sorted by length. Each method encodes the texts once; batches of
the methods alternate, so that other load on the machine slows all of them alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from packhorse import device as devices
from packhorse.checkpoint import hub, sentence
from packhorse.packing.batch import Packed
from packhorse.reports import padded
from packhorse.runtime.batches import by_tokens
from packhorse.runtime.encoder import Encoder
from packhorse.tokens import Encoding

Run = Callable[[Sequence[Encoding]], np.ndarray]  # one batch → its vectors
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class EncodingMethod:
    """A way to cut the texts into batches and to run one batch."""

    name: str
    batches: list[list[int]]
    run: Run
    padded: bool = True

    def computed(self, lengths: np.ndarray) -> int:
        """Count the tokens of all batches, padding included."""
        if not self.padded:
            return int(lengths.sum())
        return sum(len(batch) * int(lengths[batch].max()) for batch in self.batches)


@dataclass(frozen=True)
class MethodTiming:
    """The time and padding of one method."""

    way: str
    seconds: float
    sequences_per_second: float
    padding: float  # share of the computed tokens
    ratio: float  # time divided by that of the packed method


@dataclass(frozen=True)
class PaddingComparison:
    """All methods, packed first, and how far the vectors of the padded ones are from it."""

    sides: tuple[MethodTiming, ...]
    vectors: np.ndarray  # of the packed method
    largest_difference: float
    smallest_cosine: float


def compare(
    encoder: Encoder,
    model: str,
    sequences: Sequence[Encoding],
    batch_size: int = 16,
    progress: Progress | None = None,
) -> PaddingComparison:
    """Encode `sequences` with each method; `model` is what the encoder was loaded from."""
    methods = _methods(encoder, model, sequences, batch_size)
    lengths = np.array([len(sequence) for sequence in sequences])
    vectors = [np.zeros((0, 0), np.float32) for _ in methods]
    seconds = [0.0 for _ in methods]
    for method in methods:
        method.run([sequences[i] for i in method.batches[0]])  # warm-up
    turns = _alternate(methods)
    for done, (number, batch) in enumerate(turns, 1):
        start = time.perf_counter()
        rows = methods[number].run([sequences[i] for i in batch])
        seconds[number] += time.perf_counter() - start
        if not vectors[number].size:
            vectors[number] = np.zeros((len(sequences), rows.shape[1]), np.float32)
        vectors[number][batch] = rows
        if progress is not None:
            progress(done, len(turns))
    difference, cosine = _largest_difference(vectors)
    return PaddingComparison(_timings(methods, seconds, lengths), vectors[0], difference, cosine)


def packed_vectors(
    encoder: Encoder, sequences: Sequence[Encoding], progress: Progress | None = None
) -> np.ndarray:
    """Encode without padding; returns [n, E]."""
    return np.stack([row for (row,) in encoder.run(sequences, "embed", progress=progress)])


def padded_by_ours(encoder: Encoder) -> Run:
    """Run our own engine with one sequence per row, so that the tail of each row is padding."""

    def run(batch: Sequence[Encoding]) -> np.ndarray:
        rows = Packed.rows(batch, [[i] for i in range(len(batch))], max(map(len, batch)))
        (vectors,) = encoder.backend(rows, ["embed"])
        return rows.pick(vectors.float().cpu()).numpy()

    return run


def padded_by_transformers(encoder: Encoder, model: str, batch_size: int) -> Run:
    """Run transformers in the encoder's precision, or that of what ours does not round to int8 or
    float8; vectors are normalized means.
    """
    folder = hub.resolve(model)
    layout = sentence.read(folder)
    home = layout.transformer if layout else folder
    setting = padded.PeerSetting(home, encoder.device, batch_size, encoder.max_length, Path())
    floats = devices.float_dtype(encoder.dtype, encoder.device)
    engine = padded.transformers(setting, devices.dtype_name(floats))
    return lambda batch: engine.run(list(batch), "arrival")


def _methods(
    encoder: Encoder, model: str, sequences: Sequence[Encoding], batch_size: int
) -> list[EncodingMethod]:
    if find_spec("transformers"):
        name = "transformers"
        run = padded_by_transformers(encoder, model, batch_size)
    else:
        name = "our engine"
        run = padded_by_ours(encoder)
    packed = EncodingMethod(
        "packed",
        [batch.tolist() for batch in by_tokens(list(map(len, sequences)), encoder.budget)],
        lambda batch: packed_vectors(encoder, batch),
        padded=False,
    )
    methods = [packed]
    for order, label in (("sorted", "sorted by length"), ("arrival", "as they come")):
        indices = padded.in_order(sequences, order).tolist()
        batches = [indices[i : i + batch_size] for i in range(0, len(indices), batch_size)]
        methods.append(EncodingMethod(f"padded by {name}, {label}", batches, run))
    return methods


def _alternate(methods: Sequence[EncodingMethod]) -> list[tuple[int, list[int]]]:
    """Return (method, batch) of all batches, each method spread evenly over the whole run."""
    timed = [
        ((index + 0.5) / len(method.batches), number, batch)
        for number, method in enumerate(methods)
        for index, batch in enumerate(method.batches)
    ]
    return [(number, batch) for _, number, batch in sorted(timed, key=lambda turn: turn[:2])]


def _timings(
    methods: Sequence[EncodingMethod], seconds: Sequence[float], lengths: np.ndarray
) -> tuple[MethodTiming, ...]:
    real_tokens = int(lengths.sum())
    return tuple(
        MethodTiming(
            way=method.name,
            seconds=elapsed,
            sequences_per_second=len(lengths) / elapsed,
            padding=1 - real_tokens / method.computed(lengths),
            ratio=elapsed / seconds[0],
        )
        for method, elapsed in zip(methods, seconds, strict=True)
    )


def _largest_difference(vectors: Sequence[np.ndarray]) -> tuple[float, float]:
    """Return the largest difference and the smallest cosine between the first and the others."""
    first = vectors[0]  # [n, E]
    others = np.stack(vectors[1:])  # [methods - 1, n, E]
    norms = np.linalg.norm(first, axis=-1) * np.linalg.norm(others, axis=-1)
    cosines = (others * first).sum(-1) / norms
    return float(np.abs(others - first).max()), float(cosines.min())
