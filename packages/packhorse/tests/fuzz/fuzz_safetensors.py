"""Fuzz the safetensors reader: any bytes are read, or refused with a CheckpointError.

python tests/fuzz/fuzz_safetensors.py -max_total_time=60

Arguments are libFuzzer's; a folder among them keeps the corpus. The seeds are written by the real
library. What is read must be what the library reads.
"""

from __future__ import annotations

import struct
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["packhorse"]):
    from packhorse.checkpoint import safetensors
from packhorse.errors import CheckpointError

FOLDER = Path(tempfile.mkdtemp(prefix="packhorse-fuzz-"))


def read(data: bytes) -> None:
    import torch
    from safetensors.torch import load

    (FOLDER / "x.safetensors").write_bytes(data)
    try:
        result = safetensors.read_tensors(FOLDER, "x.safetensors")
    except CheckpointError:
        return
    want = load(data)
    if result.keys() != want.keys():
        raise AssertionError("the library reads other tensors")
    for name, tensor in want.items():
        actual, expected = (
            t.contiguous().view(-1).view(torch.uint8) for t in (result[name], tensor)
        )
        if result[name].shape != tensor.shape or not torch.equal(actual, expected):
            raise AssertionError(f"the library reads another {name!r}")


def mutate(data: bytes, size: int, seed: int) -> bytes:
    """Mostly the header alone, with the length that it then has."""
    length = int.from_bytes(data[:8], "little")
    if seed % 4 == 0 or length > len(data):
        return atheris.Mutate(data, size)
    body = data[8 + length :]
    room = size - 8 - len(body)
    if room < 1:
        return atheris.Mutate(data, size)
    header = atheris.Mutate(data[8 : 8 + length], room)
    return struct.pack("<Q", len(header)) + header + body


def seeds(folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    floats = {"a": torch.arange(4.0).reshape(2, 2), "b": torch.ones(3).half()}
    save_file(floats, folder / "floats", {"format": "pt"})
    others = {name: torch.arange(2).to(dtype) for name, dtype in safetensors.DTYPES.items()}
    save_file(others, folder / "others")
    save_file({"scalar": torch.tensor(1), "empty": torch.ones(0, 3)}, folder / "shapes")


def main() -> None:
    corpus = FOLDER / "corpus"
    corpus.mkdir()
    seeds(corpus)
    atheris.Setup([*sys.argv, str(corpus)], read, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
