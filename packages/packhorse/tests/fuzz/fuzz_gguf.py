"""Fuzz the GGUF reader: any bytes are read, or refused with a CheckpointError.

python tests/fuzz/fuzz_gguf.py -max_total_time=60

Arguments are libFuzzer's; a folder among them keeps the corpus. The seeds are llama.cpp's own files
in tests/checkpoint/ggufs, without most of their weights.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["packhorse"]):
    from packhorse import gguf as container
    from packhorse.checkpoint import gguf as reader
from packhorse.errors import CheckpointError, MissingExtra

FILES = Path(__file__).resolve().parents[1] / "checkpoint" / "ggufs"
FOLDER = Path(tempfile.mkdtemp(prefix="packhorse-fuzz-"))


def read(data: bytes) -> None:
    path = FOLDER / "model.gguf"
    path.write_bytes(container.MAGIC + data[len(container.MAGIC) :])
    for function in (reader.read, reader.pooling):
        with suppress(CheckpointError, MissingExtra):
            function(path)
    from packhorse.tokens import Tokenizer

    with suppress(CheckpointError):
        Tokenizer.load(path)


def main() -> None:
    corpus = FOLDER / "corpus"
    corpus.mkdir()
    for path in FILES.glob("*.gguf"):
        (corpus / path.name).write_bytes(path.read_bytes()[:8192])
        (corpus / f"whole-{path.name}").write_bytes(path.read_bytes())
    atheris.Setup([*sys.argv, str(corpus)], read)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
