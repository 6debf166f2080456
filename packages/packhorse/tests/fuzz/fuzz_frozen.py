"""Fuzz the reader of frozen graphs: whatever the file, weights or a CheckpointError.

    python tests/fuzz/fuzz_frozen.py -max_total_time=60

Needs atheris. The seeds are the good graph and the bad ones of tests/checkpoint/test_frozen_bad.py;
other arguments are libFuzzer's, a folder that is named keeps the inputs it found.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import atheris

with atheris.instrument_imports(include=["packhorse"]):
    from packhorse.checkpoint.tensorflow import frozen
    from packhorse.errors import CheckpointError

CASES = Path(__file__).resolve().parents[1] / "checkpoint" / "test_frozen_bad.py"
SEED_LIMIT = 4096  # bytes; larger ones only slow it down


def cases() -> ModuleType:
    spec = importlib.util.spec_from_file_location("frozen_cases", CASES)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    # libFuzzer ends the process by itself, so a folder of its own would never be removed.
    folder = Path(tempfile.gettempdir()) / "packhorse-fuzz-frozen"
    path, seeds = folder / "frozen.pb", folder / "seeds"
    seeds.mkdir(parents=True, exist_ok=True)
    known = cases()
    graphs = [known.GOOD, known.META, *(content for content, _ in known.BAD.values())]
    for number, content in enumerate(graphs):
        if len(content) <= SEED_LIMIT:
            (seeds / str(number)).write_bytes(content)

    def once(content: bytes) -> None:
        path.write_bytes(content)
        frozen.sniff(path)
        try:
            frozen.read(path)
        except CheckpointError as error:
            assert str(path) in str(error)

    atheris.Setup([*sys.argv, str(seeds)], once)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
