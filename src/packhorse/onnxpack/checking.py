"""Compare a packed model with the one it was made of, sequence by sequence, on random tokens.

Rewriting a stranger's graph can go wrong in ways no one foresaw; then this refuses the result
before anyone sees it. The numbers need not be equal: another layout sums in another order, fp16 is
coarser, and models quantised dynamically choose their scales by all that shares a batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from packhorse.errors import CheckpointError
from packhorse.onnxpack.engine import blaming, open_session
from packhorse.onnxpack.facts import Facts
from packhorse.onnxpack.probe import numpy_type, roles
from packhorse.onnxpack.session import OnnxBackend
from packhorse.packing.batch import Packed
from packhorse.packing.online import OnlinePacker

LENGTHS = (9, 1, 24, 5, 16, 3)
SPECIAL = 3  # ids below are padding and the like, which RoBERTa does not count
# The difference that passes. Measured on MiniLM: 8e-7 in fp32 and 0.3 in int8 where all is right,
# 0.5 to 0.8 where sequences see each other; of int8 only gross mistakes show.
LIMITS = {"fp32": 1e-4, "fp16": 3e-2, "int8": 0.5}


@dataclass(frozen=True)
class Sequence:
    """Random tokens."""

    ids: np.ndarray
    types: np.ndarray


def compare(original: Path, packed: Path, facts: Facts, numbers: str) -> float:
    """How far a sequence's answer is off at most, of the output's size; refused if too far.

    numbers: the coarsest that the packed model computes with, one of LIMITS.
    """
    sequences, names = _random(facts), list(facts.outputs)
    theirs = _alone(original, sequences, names)
    try:
        ours = _packed(OnnxBackend(packed), sequences, names)
    except CheckpointError as error:
        raise CheckpointError(f"{original} cannot be packed in this mode: {error}") from error
    worst = 0.0
    for name, mine, wanted in zip(names, ours, theirs, strict=True):
        size = _size(np.concatenate([x.reshape(-1) for x in wanted])) or 1.0
        off = max(_distance(a, b) for a, b in zip(mine, wanted, strict=True)) / size
        if not off <= LIMITS[numbers]:  # NaN is refused as well
            raise CheckpointError(
                f"{original} cannot be packed in this mode: its output {name!r} would be off by "
                f"{off:.2g} of its size, for a reason that the graph does not show"
            )
        worst = max(worst, off)
    return worst


def _size(values: np.ndarray) -> float:
    """The root of the mean square."""
    return float(np.sqrt(np.mean(values.astype(np.float64) ** 2)))


def _distance(ours: np.ndarray, theirs: np.ndarray) -> float:
    if ours.size != theirs.size:
        return float("inf")
    return _size(ours.reshape(-1).astype(np.float64) - theirs.reshape(-1))


def _packed(
    backend: OnnxBackend, sequences: list[Sequence], names: list[str]
) -> list[list[np.ndarray]]:
    """For each output, what the packed model says of each sequence."""
    facts = backend.facts
    if facts.mode == "positions":  # one at a time: how a model pads is its own affair
        alone = [_packed_batch(backend, Packed.build([one]), names) for one in sequences]
        return [[part[0] for part in parts] for parts in zip(*alone, strict=True)]
    return _packed_batch(backend, _lay(sequences, facts), names)


def _packed_batch(backend: OnnxBackend, batch: Packed, names: list[str]) -> list[list[np.ndarray]]:
    return [
        [piece.numpy() for piece in batch.split(result)]
        if backend.facts.outputs[name] == "token"
        else list(batch.pick(result).numpy())
        for name, result in zip(names, backend(batch, names), strict=True)
    ]


def _random(facts: Facts) -> list[Sequence]:
    rng = np.random.default_rng(0)
    room = facts.shape[1] if facts.shape else facts.max_positions
    lengths = [min(length, room, facts.max_positions) for length in LENGTHS]
    low = min(SPECIAL, facts.vocab_size - 1)
    return [
        Sequence(rng.integers(low, facts.vocab_size, n), np.zeros(n, np.int64)) for n in lengths
    ]


def _lay(sequences: list[Sequence], facts: Facts) -> Packed:
    if facts.mode == "repack":
        return Packed.build(sequences)
    capacity = facts.shape[1] if facts.shape else max(LENGTHS) + 4
    packer = OnlinePacker(capacity, rows=None, policy="first_fit")
    for sequence in sequences:
        packer.add(len(sequence.ids))
    return Packed.rows(sequences, packer.flush(), capacity)


def _alone(path: Path, sequences: list[Sequence], names: list[str]) -> list[list[np.ndarray]]:
    """For each output, what the original says of each sequence alone."""
    session = open_session(path)
    types = {given.name: numpy_type(given.type) for given in session.get_inputs()}
    found = []
    for sequence in sequences:
        count = len(sequence.ids)
        columns = {
            "ids": sequence.ids,
            "types": sequence.types,
            "mask": np.ones(count),
            "positions": np.arange(count),
        }
        feeds = {
            name: columns[role][None].astype(types[name]) for role, name in roles(types).items()
        }
        with blaming(f"{path} does not run on {count} tokens"):
            found.append(session.run(names, feeds))
    return [[np.asarray(result)[0] for result in results] for results in zip(*found, strict=True)]
