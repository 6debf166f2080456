"""The same texts encoded packed and padded, in the same precision, and whether the vectors agree.

The padded side is transformers where it is installed; elsewhere our own engine with one sequence a
row, which pays for padding in the linear layers only. Either pads in the order of arrival and
sorted by length. One timed pass each after a short warm-up: a demonstration, not a benchmark.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from packhorse import device as devices
from packhorse.bench import peers
from packhorse.bench.waste import padded_tokens
from packhorse.checkpoint import hub, sentence
from packhorse.packing.batch import Packed
from packhorse.runtime.encoder import Encoder
from packhorse.tokens import Encoding

Run = Callable[[Sequence[Encoding]], np.ndarray]
WARM_UP = 32  # sequences


@dataclass(frozen=True)
class Side:
    """One way to encode the texts."""

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
    progress: Callable[[int, int], None] | None = None,
) -> Comparison:
    """Encode `sequences` every way; `model` is what the encoder was loaded from."""
    name, padded = _padded_side(encoder, model, batch_size)
    lengths = np.array([len(s) for s in sequences])
    real = int(lengths.sum())
    runs: list[tuple[str, Run, int]] = [
        ("packed", lambda some: packed_vectors(encoder, some), real),
        (
            f"padded ({name}), sorted by length",
            lambda some: padded(some, "sorted"),
            padded_tokens(np.sort(lengths)[::-1], batch_size),
        ),
        (
            f"padded ({name}), as they come",
            lambda some: padded(some, "arrival"),
            padded_tokens(lengths, batch_size),
        ),
    ]
    seconds, found = [], []
    for done, (_, run, _) in enumerate(runs, 1):
        run(sequences[:WARM_UP])
        seconds.append(_timed(run, sequences, encoder.device, found))
        if progress is not None:
            progress(done, len(runs))
    sides = tuple(
        Side(way, s, len(sequences) / s, 1 - real / computed, s / seconds[0])
        for (way, _, computed), s in zip(runs, seconds, strict=True)
    )
    others = np.stack(found[1:])
    return Comparison(
        sides,
        found[0],
        float(np.abs(others - found[0]).max()),
        float(_cosines(others, found[0]).min()),
    )


def packed_vectors(
    encoder: Encoder,
    sequences: Sequence[Encoding],
    progress: Callable[[int, int], None] | None = None,
) -> np.ndarray:
    """[n, E], without padding."""
    return np.stack([row for (row,) in encoder.run(sequences, "embed", progress=progress)])


def padded_by_ours(encoder: Encoder, batch_size: int) -> peers.Run:
    """Our own engine with one sequence a row: each row's tail is computed for nothing."""

    def vectors(sequences: Sequence[Encoding], order: str) -> np.ndarray:
        places = peers.in_order(sequences, order)
        out: list[np.ndarray] = [np.empty(0)] * len(sequences)
        for start in range(0, len(places), batch_size):
            chosen = places[start : start + batch_size].tolist()
            batch = [sequences[i] for i in chosen]
            rows = Packed.rows(batch, [[i] for i in range(len(batch))], max(map(len, batch)))
            (found,) = encoder.backend(rows, ["embed"])
            for i, vector in zip(chosen, rows.pick(found.float().cpu()).numpy(), strict=True):
                out[i] = vector
        return np.stack(out)

    return vectors


def _padded_side(encoder: Encoder, model: str, batch_size: int) -> tuple[str, peers.Run]:
    if find_spec("transformers") is None:
        return "packhorse", padded_by_ours(encoder, batch_size)
    folder = hub.resolve(model)
    layout = sentence.read(folder)
    home = layout.transformer if layout else folder
    setting = peers.Setting(home, encoder.device, batch_size, encoder.max_length, Path())
    engine = peers.transformers(setting, devices.dtype_name(encoder.dtype))
    return "transformers", engine.run


def _timed(
    run: Run, sequences: Sequence[Encoding], device: torch.device, found: list[np.ndarray]
) -> float:
    devices.synchronize(device)
    start = time.perf_counter()
    found.append(run(sequences))
    return time.perf_counter() - start


def _cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a * b).sum(-1) / (np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1))
