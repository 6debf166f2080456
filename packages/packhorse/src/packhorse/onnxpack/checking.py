"""Compare a packed model with the one it was made of, sequence by sequence, on random tokens.

Rewriting a stranger's graph can go wrong in ways no one foresaw; then this refuses the result
before anyone sees it. Two things are checked. The numbers are those of the original, run on each
sequence alone; not to the bit, for another layout sums in another order, and fp16 is coarser. And
neighbors change no bit: the same sequences are run again beside others.

An int8 graph is compared with nothing fused on either side. ONNX Runtime fuses what it can, which
moves a number in its last bit; where that tips a rounding to int8, the difference grows with every
layer. Measured on MiniLM, the original against itself, fused and not: 0.02 to 0.11 of the output's
size with dynamic scales, 0.7 with static ones. That difference is reported, it refuses nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from packhorse.errors import CheckpointError
from packhorse.onnxpack.engine import blaming, open_session
from packhorse.onnxpack.facts import Facts
from packhorse.onnxpack.probe import numpy_type, roles
from packhorse.onnxpack.scales import REMEDY
from packhorse.onnxpack.session import OnnxBackend
from packhorse.packing.batch import Packed
from packhorse.packing.online import OnlinePacker

LENGTHS = (9, 1, 24, 5, 16, 3)
SPECIAL = 3  # ids below are padding and the like, which RoBERTa does not count
# The difference that passes. Measured on MiniLM: 8e-7 in fp32, up to 2e-7 in int8 unless a rounding
# tips over (0.1); 0.5 to 0.8 where sequences see each other.
LIMITS = {"fp32": 1e-4, "fp16": 3e-2, "int8": 0.25}


@dataclass(frozen=True)
class Sequence:
    """Random tokens."""

    ids: np.ndarray
    types: np.ndarray


@dataclass(frozen=True)
class Difference:
    """How far a sequence's output is from the original's at most, of the output's size."""

    as_run: float  # by ONNX Runtime as it runs a model, with nodes fused
    as_written: float  # with nothing fused


def compare(original: Path, packed: Path, facts: Facts, numbers: str) -> Difference:
    """The difference between the models; refused if too large, or if neighbors change a bit.

    numbers: the coarsest that the packed model computes with, one of LIMITS.
    """
    sequences, names = _random(facts, seed=0), list(facts.outputs)
    backend = _open(original, packed)
    _check_isolation(original, backend, numbers)
    as_run = _differences(original, backend, sequences, names)
    as_written = as_run
    if numbers == "int8":
        plain = _open(original, packed, plain=True)
        as_written = _differences(original, plain, sequences, names, plain=True)
    for name, off in as_written.items():
        if not off <= LIMITS[numbers]:  # NaN is refused as well
            raise CheckpointError(
                f"{original} cannot be packed in this mode: its output {name!r} would be off by "
                f"{off:.2g} of its size, for a reason that the graph does not show"
            )
    return Difference(max(as_run.values()), max(as_written.values()))


def _open(original: Path, packed: Path, *, plain: bool = False) -> OnnxBackend:
    try:
        return OnnxBackend(packed, plain=plain)
    except CheckpointError as error:
        raise CheckpointError(f"{original} cannot be packed in this mode: {error}") from error


def _differences(
    original: Path,
    backend: OnnxBackend,
    sequences: list[Sequence],
    names: list[str],
    *,
    plain: bool = False,
) -> dict[str, float]:
    """By output, the largest difference of a sequence, of the output's size."""
    theirs = _alone(original, sequences, names, plain=plain)
    try:
        ours = _packed(backend, sequences, names)
    except CheckpointError as error:
        raise CheckpointError(f"{original} cannot be packed in this mode: {error}") from error
    found = {}
    for name, mine, wanted in zip(names, ours, theirs, strict=True):
        size = _size(np.concatenate([x.reshape(-1) for x in wanted])) or 1.0
        found[name] = max(_distance(a, b) for a, b in zip(mine, wanted, strict=True)) / size
    return found


def _check_isolation(original: Path, backend: OnnxBackend, numbers: str) -> None:
    """Refuse a model in which other tokens beside a sequence change a bit of its outputs."""
    facts, names = backend.facts, list(backend.facts.outputs)
    # Without a mask, mode positions takes sequences of one length only.
    even = facts.mode == "positions" and "mask" not in facts.inputs
    sequences, others = (_random(facts, seed=seed, even=even) for seed in (0, 1))
    before = _packed_batch(backend, _lay(sequences, facts), names)
    for kept in (0, 1):  # every second sequence stays, then the others
        mixed = [
            own if number % 2 == kept else other
            for number, (own, other) in enumerate(zip(sequences, others, strict=True))
        ]
        after = _packed_batch(backend, _lay(mixed, facts), names)
        for name, old, new in zip(names, before, after, strict=True):
            for a, b in list(zip(old, new, strict=True))[kept::2]:
                if not np.array_equal(a, b, equal_nan=True):
                    cause = "something in it is computed over a whole row or batch"
                    if numbers == "int8":
                        cause = f"an int8 scale may be taken over a whole batch; {REMEDY}"
                    raise CheckpointError(
                        f"{original} cannot be packed in this mode: neighbors change a text's "
                        f"output {name!r} (by {np.abs(a - b).max():.2g}); {cause}"
                    )


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


def _random(facts: Facts, *, seed: int, even: bool = False) -> list[Sequence]:
    """Sequences of LENGTHS, as far as they fit; `even`: all as long as the first."""
    rng = np.random.default_rng(seed)
    room = facts.shape[1] if facts.shape else facts.max_positions
    lengths = [min(LENGTHS[0] if even else length, room, facts.max_positions) for length in LENGTHS]
    low = min(SPECIAL, facts.vocab_size - 1)
    return [
        Sequence(rng.integers(low, facts.vocab_size, n), np.zeros(n, np.int64)) for n in lengths
    ]


def _lay(sequences: list[Sequence], facts: Facts) -> Packed:
    if facts.mode != "mask":
        return Packed.build(sequences)
    capacity = facts.shape[1] if facts.shape else max(LENGTHS) + 4
    packer = OnlinePacker(capacity, rows=None, policy="first_fit")
    for sequence in sequences:
        packer.add(len(sequence.ids))
    return Packed.rows(sequences, packer.flush(), capacity)


def _alone(
    path: Path, sequences: list[Sequence], names: list[str], *, plain: bool
) -> list[list[np.ndarray]]:
    """For each output, what the original says of each sequence alone."""
    session = open_session(path, plain=plain)
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
