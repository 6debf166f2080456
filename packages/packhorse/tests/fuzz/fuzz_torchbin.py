"""Fuzz the reader of torch files: any bytes are read, or refused with a CheckpointError.

python tests/fuzz/fuzz_torchbin.py -max_total_time=60

Arguments are libFuzzer's; a folder among them keeps the corpus. The seeds are written by the real
torch.save. A mutant of the archive's bytes seldom gets past its checksums, so that most mutants are
of the pickle or of one other record, in an archive that is made anew around it. What is read must
be what torch reads.
"""

from __future__ import annotations

import io
import sys
import tempfile
import zipfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["packhorse"]):
    from packhorse.checkpoint import torchbin

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "checkpoint"))
from test_torchbin_bad import BAD, GOOD, Record, agrees, archive

FOLDER = Path(tempfile.mkdtemp(prefix="packhorse-fuzz-"))


def read(data: bytes) -> None:
    """Read and compared with torch, unless it is refused; any other exception is a finding."""
    agrees(FOLDER, data)


def mutate(data: bytes, size: int, seed: int) -> bytes:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as file:
            # Without those that only torch reads: what it makes of them is no measure.
            names = [name for name in file.namelist() if "/." not in name]
            records = [Record(name, file.read(name)) for name in names]
    except Exception:
        return atheris.Mutate(data, size)
    if seed % 4 == 0 or not records or sum(len(r.data) for r in records) > 1 << 20:
        return atheris.Mutate(data, size)
    pickles = [record for record in records if record.name.endswith("/data.pkl")]
    chosen = pickles[0] if pickles and seed % 4 < 3 else records[seed % len(records)]
    room = max(1, size - len(data) + len(chosen.data))
    chosen.data = atheris.Mutate(chosen.data, room)
    return archive(records)[:size]


def seeds(folder: Path) -> None:
    import torch

    layer = torch.nn.Linear(2, 3)
    numbers = torch.arange(6.0).reshape(2, 3)
    values = {
        "state": layer.state_dict(),
        "views": {"a": numbers, "b": numbers.T, "c": numbers[1].half(), "d": torch.tensor(3)},
        "nested": {"model": dict(layer.named_parameters()), "epoch": 3, "x": [0.5, (None, "y")]},
    }
    for name, value in values.items():
        for protocol in (2, 4):
            torch.save(value, folder / f"{name}-{protocol}", pickle_protocol=protocol)
    (folder / "good").write_bytes(GOOD)
    for name, (content, _) in BAD.items():
        if isinstance(content, bytes) and len(content) < 2_000:
            (folder / name.replace("/", "-")).write_bytes(content)


def main() -> None:
    corpus = FOLDER / "corpus"
    corpus.mkdir()
    seeds(corpus)
    torchbin.read_tensors(corpus, "good")
    atheris.Setup([*sys.argv, "-max_len=8192", str(corpus)], read, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
