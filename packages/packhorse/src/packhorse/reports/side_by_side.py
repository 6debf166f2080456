"""The same texts encoded packed and padded, in the same precision, and whether the vectors agree.

The padded side is transformers where it is installed; elsewhere our own engine with one sequence a
row, whose padding attends only to itself: it costs the linear layers in full and attention less. It
pads batches as they come and batches sorted by length. Every way goes once through the texts; their
batches take turns, so that whatever else the machine does falls on all of them alike.
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
class Way:
    """How to cut the texts into batches, and how to run one of them."""

    name: str
    batches: list[list[int]]
    run: Run
    padded: bool = True

    def computed(self, lengths: np.ndarray) -> int:
        """Tokens of all batches, padding included."""
        if not self.padded:
            return int(lengths.sum())
        return sum(len(batch) * int(lengths[batch].max()) for batch in self.batches)


@dataclass(frozen=True)
class Side:
    """What one way took."""

    way: str
    seconds: float
    sequences_per_second: float
    padding: float  # share of the computed tokens
    ratio: float  # how many times longer it took than packed


@dataclass(frozen=True)
class Comparison:
    """All sides, packed first, and how far the vectors of the padded ones are from it."""

    sides: tuple[Side, ...]
    vectors: np.ndarray  # of the packed side
    largest_difference: float
    smallest_cosine: float


def compare(
    encoder: Encoder,
    model: str,
    sequences: Sequence[Encoding],
    batch_size: int = 16,
    progress: Progress | None = None,
) -> Comparison:
    """Encode `sequences` every way; `model` is what the encoder was loaded from."""
    ways = _ways(encoder, model, sequences, batch_size)
    lengths = np.array([len(s) for s in sequences])
    vectors = [np.zeros((0, 0), np.float32)] * len(ways)
    seconds = [0.0] * len(ways)
    for way in ways:
        way.run([sequences[i] for i in way.batches[0]])  # what is prepared once is prepared now
    turns = _turns(ways)
    for done, (number, batch) in enumerate(turns, 1):
        start = time.perf_counter()
        found = ways[number].run([sequences[i] for i in batch])
        seconds[number] += time.perf_counter() - start
        if not vectors[number].size:
            vectors[number] = np.zeros((len(sequences), found.shape[1]), np.float32)
        vectors[number][batch] = found
        if progress is not None:
            progress(done, len(turns))
    return Comparison(_sides(ways, seconds, lengths), vectors[0], *_apart(vectors))


def packed_vectors(
    encoder: Encoder, sequences: Sequence[Encoding], progress: Progress | None = None
) -> np.ndarray:
    """[n, E], without padding."""
    return np.stack([row for (row,) in encoder.run(sequences, "embed", progress=progress)])


def padded_by_ours(encoder: Encoder) -> Run:
    """Our own engine with one sequence a row: each row's tail is computed for nothing."""

    def run(batch: Sequence[Encoding]) -> np.ndarray:
        rows = Packed.rows(batch, [[i] for i in range(len(batch))], max(map(len, batch)))
        (found,) = encoder.backend(rows, ["embed"])
        return rows.pick(found.float().cpu()).numpy()

    return run


def padded_by_transformers(encoder: Encoder, model: str, batch_size: int) -> Run:
    """transformers in the encoder's precision; its vectors are the mean, normalised."""
    folder = hub.resolve(model)
    layout = sentence.read(folder)
    home = layout.transformer if layout else folder
    setting = padded.PeerSetting(home, encoder.device, batch_size, encoder.max_length, Path())
    engine = padded.transformers(setting, devices.dtype_name(encoder.dtype))
    return lambda batch: engine.run(list(batch), "arrival")


def _ways(
    encoder: Encoder, model: str, sequences: Sequence[Encoding], batch_size: int
) -> list[Way]:
    if find_spec("transformers"):
        name, run = "transformers", padded_by_transformers(encoder, model, batch_size)
    else:
        name, run = "our engine", padded_by_ours(encoder)
    packed = list(by_tokens([len(s) for s in sequences], encoder.budget))
    ways = [Way("packed", packed, lambda batch: packed_vectors(encoder, batch), padded=False)]
    for order, label in (("sorted", "sorted by length"), ("arrival", "as they come")):
        places = padded.in_order(sequences, order).tolist()
        cut = [places[i : i + batch_size] for i in range(0, len(places), batch_size)]
        ways.append(Way(f"padded by {name}, {label}", cut, run))
    return ways


def _turns(ways: Sequence[Way]) -> list[tuple[int, list[int]]]:
    """(way, batch) of all batches, each way spread evenly over the whole time."""
    timed = [
        ((place + 0.5) / len(way.batches), number, batch)
        for number, way in enumerate(ways)
        for place, batch in enumerate(way.batches)
    ]
    return [(number, batch) for _, number, batch in sorted(timed, key=lambda turn: turn[:2])]


def _sides(ways: Sequence[Way], seconds: Sequence[float], lengths: np.ndarray) -> tuple[Side, ...]:
    real = int(lengths.sum())
    return tuple(
        Side(way.name, s, len(lengths) / s, 1 - real / way.computed(lengths), s / seconds[0])
        for way, s in zip(ways, seconds, strict=True)
    )


def _apart(vectors: Sequence[np.ndarray]) -> tuple[float, float]:
    """The largest difference and the smallest cosine between the first and any of the others."""
    first, others = vectors[0], np.stack(vectors[1:])
    norms = np.linalg.norm(first, axis=-1) * np.linalg.norm(others, axis=-1)
    return float(np.abs(others - first).max()), float(((others * first).sum(-1) / norms).min())
