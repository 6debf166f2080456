"""Compare a packed model with the one it was made of, sequence by sequence, on random tokens.

Rewriting an unknown graph can go wrong in unforeseen ways; this check then refuses the result
before it is used. Two things are checked. The numbers are those of the original, run on each
sequence alone; not to the bit, since another layout sums in another order, and fp16 is coarser. And
neighbors change no bit: the same sequences are run again with other neighbors.

An int8 graph is compared with nothing fused on either side. ONNX Runtime fuses what it can, which
changes numbers in their last bit; where that changes a rounding to int8, the difference grows with
every layer. Measured on MiniLM, the original against itself, fused and not: 0.02 to 0.11 of the
output's size with dynamic scales, 0.7 with static ones. That difference is reported, not refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from packhorse.errors import CheckpointError
from packhorse.onnxpack.engine import open_session, runtime_errors
from packhorse.onnxpack.facts import PackedModelFacts
from packhorse.onnxpack.probe import numpy_type, roles
from packhorse.onnxpack.scales import REMEDY
from packhorse.onnxpack.session import OnnxBackend
from packhorse.packing.batch import Packed
from packhorse.packing.online import OnlinePacker

LENGTHS = (9, 1, 24, 5, 16, 3)
SPECIAL = 3  # smaller ids are special tokens; RoBERTa does not count its padding
# The largest accepted difference. Measured on MiniLM: 8e-7 in fp32, up to 2e-7 in int8 unless a
# rounding changes (0.1); 0.5 to 0.8 if sequences attend to each other.
LIMITS = {"fp32": 1e-4, "fp16": 3e-2, "int8": 0.25}


@dataclass(frozen=True)
class RandomSequence:
    """A sequence of random tokens."""

    ids: np.ndarray
    types: np.ndarray


@dataclass(frozen=True)
class PackingDifference:
    """The largest difference of a sequence's output from the original's, relative to its size."""

    as_run: float  # as ONNX Runtime runs a model, with nodes fused
    as_written: float  # with nothing fused


def compare(
    original: Path, packed: Path, facts: PackedModelFacts, numbers: str
) -> PackingDifference:
    """Measure the difference between the models; raises if it is too large.

    Raises too if neighbors change a bit. numbers: the coarsest number format that the packed model
    computes with, one of LIMITS.
    """
    sequences = _random(facts, seed=0)
    names = list(facts.outputs)
    backend = _open(original, packed)
    _check_isolation(original, backend, numbers)
    as_run = _differences(original, backend, sequences, names)
    as_written = as_run
    if numbers == "int8":
        plain = _open(original, packed, plain=True)
        as_written = _differences(original, plain, sequences, names, plain=True)
    for name, difference in as_written.items():
        if not difference <= LIMITS[numbers]:  # written so that NaN is refused too
            raise CheckpointError(
                f"{original} cannot be packed in this mode: its output {name!r} would be off by "
                f"{difference:.2g} of its size, for a reason that the graph does not show"
            )
    return PackingDifference(max(as_run.values()), max(as_written.values()))


def _open(original: Path, packed: Path, *, plain: bool = False) -> OnnxBackend:
    try:
        return OnnxBackend(packed, plain=plain)
    except CheckpointError as error:
        raise CheckpointError(f"{original} cannot be packed in this mode: {error}") from error


def _differences(
    original: Path,
    backend: OnnxBackend,
    sequences: list[RandomSequence],
    names: list[str],
    *,
    plain: bool = False,
) -> dict[str, float]:
    """Output → the largest difference of a sequence, relative to the output's size."""
    expected = _run_alone(original, sequences, names, plain=plain)
    try:
        actual = _run_packed(backend, sequences, names)
    except CheckpointError as error:
        raise CheckpointError(f"{original} cannot be packed in this mode: {error}") from error
    differences = {}
    for name, packed, alone in zip(names, actual, expected, strict=True):
        size = _rms(np.concatenate([output.reshape(-1) for output in alone])) or 1.0
        largest = max(_distance(a, b) for a, b in zip(packed, alone, strict=True))
        differences[name] = largest / size
    return differences


def _check_isolation(original: Path, backend: OnnxBackend, numbers: str) -> None:
    """Raise if a bit of a sequence's outputs depends on its neighbors."""
    facts = backend.facts
    names = list(facts.outputs)
    # Without a mask, mode positions takes sequences of one length only.
    even = facts.mode == "positions" and "mask" not in facts.inputs
    sequences = _random(facts, seed=0, even=even)
    replacements = _random(facts, seed=1, even=even)
    before = _run_batch(backend, _lay_out(sequences, facts), names)
    for parity in (0, 1):  # the sequences of this parity stay, the others are replaced
        mixed = [
            sequence if number % 2 == parity else replacement
            for number, (sequence, replacement) in enumerate(
                zip(sequences, replacements, strict=True)
            )
        ]
        after = _run_batch(backend, _lay_out(mixed, facts), names)
        for name, old, new in zip(names, before, after, strict=True):
            for a, b in list(zip(old, new, strict=True))[parity::2]:
                if not np.array_equal(a, b, equal_nan=True):
                    cause = "something in it is computed over a whole row or batch"
                    if numbers == "int8":
                        cause = f"an int8 scale may be taken over a whole batch; {REMEDY}"
                    raise CheckpointError(
                        f"{original} cannot be packed in this mode: neighbors change a text's "
                        f"output {name!r} (by {np.abs(a - b).max():.2g}); {cause}"
                    )


def _rms(values: np.ndarray) -> float:
    """The root mean square."""
    return float(np.sqrt(np.mean(values.astype(np.float64) ** 2)))


def _distance(actual: np.ndarray, expected: np.ndarray) -> float:
    if actual.size != expected.size:
        return float("inf")
    return _rms(actual.reshape(-1).astype(np.float64) - expected.reshape(-1))


def _run_packed(
    backend: OnnxBackend, sequences: list[RandomSequence], names: list[str]
) -> list[list[np.ndarray]]:
    """The packed model's results, by output and sequence."""
    facts = backend.facts
    if facts.mode == "positions":  # one at a time, since a model may treat padding in its own way
        batches = [Packed.build([sequence]) for sequence in sequences]
        results = [_run_batch(backend, batch, names) for batch in batches]
        return [[output[0] for output in outputs] for outputs in zip(*results, strict=True)]
    return _run_batch(backend, _lay_out(sequences, facts), names)


def _run_batch(backend: OnnxBackend, batch: Packed, names: list[str]) -> list[list[np.ndarray]]:
    return [
        [piece.numpy() for piece in batch.split(result)]
        if backend.facts.outputs[name] == "token"
        else list(batch.pick(result).numpy())
        for name, result in zip(names, backend(batch, names), strict=True)
    ]


def _random(facts: PackedModelFacts, *, seed: int, even: bool = False) -> list[RandomSequence]:
    """Sequences of LENGTHS, truncated to the model's limits; `even`: all as long as the first."""
    rng = np.random.default_rng(seed)
    room = facts.shape[1] if facts.shape else facts.max_positions
    lengths = [min(LENGTHS[0] if even else length, room, facts.max_positions) for length in LENGTHS]
    low = min(SPECIAL, facts.vocab_size - 1)
    return [
        RandomSequence(rng.integers(low, facts.vocab_size, n), np.zeros(n, np.int64))
        for n in lengths
    ]


def _lay_out(sequences: list[RandomSequence], facts: PackedModelFacts) -> Packed:
    if facts.mode != "mask":
        return Packed.build(sequences)
    capacity = facts.shape[1] if facts.shape else max(LENGTHS) + 4
    packer = OnlinePacker(capacity, rows=None, policy="first_fit")
    for sequence in sequences:
        packer.add(len(sequence.ids))
    return Packed.rows(sequences, packer.flush(), capacity)


def _run_alone(
    path: Path, sequences: list[RandomSequence], names: list[str], *, plain: bool
) -> list[list[np.ndarray]]:
    """The original's results on each sequence alone, by output and sequence."""
    session = open_session(path, plain=plain)
    types = {value.name: numpy_type(value.type) for value in session.get_inputs()}
    runs = []
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
        with runtime_errors(f"{path} does not run on {count} tokens"):
            runs.append(session.run(names, feeds))
    return [[np.asarray(result)[0] for result in results] for results in zip(*runs, strict=True)]
