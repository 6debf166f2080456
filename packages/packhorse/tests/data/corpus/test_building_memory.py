"""Memory does not grow with the corpus: what all processes of a build take together."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from packhorse.data.packed import shards

pytest.importorskip("pyarrow", reason="no pyarrow: pip install 'packhorse[data]'")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc to measure by"),
]

MB = 10**6


def write_corpus(path: Path, size: int) -> None:
    """About `size` bytes in MLPerf's form: Zipf's words, documents of all lengths."""
    rng = random.Random(0)
    words = ["".join(rng.choices("etaoinshrdlu", k=rng.randint(1, 9))) for _ in range(50_000)]
    weights = [1 / rank for rank in range(1, len(words) + 1)]
    blocks = [_block(rng, words, weights) for _ in range(40)]
    with path.open("wb") as file:
        while file.tell() < size:
            file.write(rng.choice(blocks))


def _block(rng: random.Random, words: list[str], weights: list[float]) -> bytes:
    drawn, lines = rng.choices(words, weights, k=100_000), []
    for begin in range(0, len(drawn), 20):
        lines.append(" ".join(drawn[begin : begin + rng.randint(4, 20)]) + " .\n")
        lines.append("\n" * (rng.random() < 0.05))
    return "".join(lines).encode()


def write_vocabulary(path: Path) -> None:
    letters = "abcdefghijklmnopqrstuvwxyz."
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pairs = [first + second for first in letters[:-1] for second in letters[:-1]]
    pieces = [*letters, *pairs]
    path.write_text("\n".join([*special, *pieces, *(f"##{piece}" for piece in pieces)]) + "\n")


def resident(pid: int) -> int:
    """Bytes of a process and all below it; a library that they share counts for each."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return 0
    resident_bytes = next(
        (int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS")), 0
    )
    return resident_bytes + sum(resident(int(child)) for child in children)


def build(home: Path, size: int) -> int:
    """Build a corpus of this size with two workers; the most memory that was seen."""
    folder = home / f"{size // MB}"
    folder.mkdir()
    write_corpus(folder / "part-00000", size)
    write_vocabulary(folder / "vocab.txt")
    words = ["data", "build", folder / "part-00000", folder / "out", "--workers=2"]
    command = [sys.executable, "-m", "packhorse", *words, f"--tokenizer={folder / 'vocab.txt'}"]
    most = 0
    with subprocess.Popen([*map(str, command)], stderr=subprocess.DEVNULL) as process:
        while process.poll() is None:
            most = max(most, resident(process.pid))
            time.sleep(0.02)
    assert process.returncode == 0
    shards.open_dataset(folder / "out" / "train")
    (folder / "part-00000").unlink()
    return most


@pytest.mark.timeout(900)
def test_four_times_the_corpus_takes_no_more_memory(tmp_path: Path) -> None:
    small, large = build(tmp_path, 120 * MB), build(tmp_path, 480 * MB)
    assert large < 1.25 * small < 1500 * MB


@pytest.mark.timeout(3600)
def test_two_gigabytes_within_two_gigabytes(tmp_path: Path) -> None:
    assert build(tmp_path, 2000 * MB) < 2000 * MB
