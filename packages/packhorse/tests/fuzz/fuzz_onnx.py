"""Fuzz the ONNX reader: whatever the file, what the onnx package reads or a CheckpointError.

    python tests/fuzz/fuzz_onnx.py -max_total_time=60

Needs atheris. The seeds are the files of tests/checkpoint/test_onnx_bad.py; other arguments are
libFuzzer's, a folder that is named keeps the inputs it found.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import atheris

with atheris.instrument_imports(include=["packhorse"]):
    from packhorse.checkpoint import onnx as reader
    from packhorse.errors import CheckpointError

CASES = Path(__file__).resolve().parents[1] / "checkpoint" / "test_onnx_bad.py"
SEED_LIMIT = 4096  # bytes; larger ones only slow it down


def cases() -> ModuleType:
    spec = importlib.util.spec_from_file_location("onnx_cases", CASES)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    # libFuzzer ends the process by itself, so a folder of its own would never be removed.
    folder = Path(tempfile.gettempdir()) / "packhorse-fuzz-onnx"
    path, seeds = folder / "model.onnx", folder / "seeds"
    seeds.mkdir(parents=True, exist_ok=True)
    (folder / "w").write_bytes(bytes(48))  # what the seeds with external data point at
    known = cases()
    bad = [content for content, _ in known.BAD.values()]
    for number, content in enumerate([known.SEED, *known.FINE.values(), *bad]):
        if len(content) <= SEED_LIMIT:
            (seeds / str(number)).write_bytes(content)

    def once(content: bytes) -> None:
        path.write_bytes(content)
        reader.sniff(path)
        try:
            reader.read(path)
        except CheckpointError as error:
            assert str(path) in str(error)
        else:
            known.agrees(folder, content)

    atheris.Setup([*sys.argv, str(seeds)], once)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
