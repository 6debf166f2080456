"""Fuzz the reader of TensorFlow checkpoints: whatever the index, tensors or a CheckpointError.

    python tests/fuzz/fuzz_tf1.py -max_total_time=60

Needs atheris. The input is the index; the data file stays the same. Checksums would stop every
mutant at the door, so the mutator changes a value or a key and builds the table anew, or changes
the table's own bytes and seals its blocks again. The seeds are the bundles of
tests/checkpoint/test_tf1_bad.py; other arguments are libFuzzer's, a folder that is named keeps the
inputs it found.
"""

from __future__ import annotations

import importlib.util
import random
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import atheris

with atheris.instrument_imports(include=["packhorse"]):
    from packhorse import wire
    from packhorse.checkpoint.tensorflow import sstable, tf1
    from packhorse.errors import CheckpointError

CASES = Path(__file__).resolve().parents[1] / "checkpoint" / "test_tf1_bad.py"
SEED_LIMIT = 4096  # bytes; larger ones only slow it down


def cases() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tf1_cases", CASES)
    assert spec is not None and spec.loader is not None
    module = sys.modules["tf1_cases"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def mutate(content: bytes, limit: int, seed: int) -> bytes:
    rng = random.Random(seed)
    way = rng.randrange(10)
    if way:
        try:
            pairs = [(item.key, content[item.begin : item.end]) for item in sstable.items(content)]
        except CheckpointError:
            pairs = []
        if way < 4 or not pairs:
            content = sealed(atheris.Mutate(content, len(content)))
        else:
            content = sstable.build(sorted(changed(pairs, rng, way == 4)))
        if len(content) <= limit:
            return content
    return atheris.Mutate(content, limit)


def changed(
    pairs: list[tuple[bytes, bytes]], rng: random.Random, in_key: bool
) -> list[tuple[bytes, bytes]]:
    """One key or one value mutated."""
    at = rng.randrange(len(pairs))
    key, value = pairs[at]
    if in_key:
        key = atheris.Mutate(key or b"\0", 64)
    else:
        value = atheris.Mutate(value or b"\0", 256)
    return [*pairs[:at], (key, value), *pairs[at + 1 :]]


def sealed(content: bytes) -> bytes:
    """The blocks that footer and index still name, with checksums that are right."""
    table = bytearray(content)
    try:
        handles, at = [], len(content) - sstable.FOOTER
        for _ in range(4):
            number, at = wire.varint(content, at, len(content))
            handles.append(number)
        blocks = [(0, handles[0] - sstable.TRAILER), handles[:2], handles[2:]]
    except (CheckpointError, IndexError):
        return content
    for offset, size in blocks:
        end = offset + size + 1
        if 0 <= offset < end <= len(table) - 4:
            table[end : end + 4] = wire.mask(wire.crc32c(bytes(table[offset:end]))).to_bytes(
                4, "little"
            )
    return bytes(table)


def main() -> None:
    # libFuzzer ends the process by itself, so a folder of its own would never be removed.
    folder = Path(tempfile.gettempdir()) / "packhorse-fuzz-tf1"
    seeds = folder / "seeds"
    seeds.mkdir(parents=True, exist_ok=True)
    known = cases()
    prefix = known.GOOD.write(folder)
    for number, bundle in enumerate([known.GOOD, *(bundle for bundle, _ in known.BAD.values())]):
        if len(content := bundle.index()) <= SEED_LIMIT:
            (seeds / str(number)).write_bytes(content)

    def once(content: bytes) -> None:
        (folder / known.INDEX).write_bytes(content)
        tf1.find(prefix)
        try:
            tf1.read(prefix, slots=True)
        except CheckpointError as error:
            assert str(folder) in str(error)

    atheris.Setup([*sys.argv, str(seeds)], once, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
