"""`packhorse data import`, from files to a dataset that `packhorse data stats` shows."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from packhorse.data.packed import shards

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{number}" for number in range(95))]


@pytest.fixture(scope="module")
def record_files() -> ModuleType:
    """Records of every form, put together by plain loops (see the module)."""
    path = Path(__file__).parents[1] / "data" / "record_files.py"
    spec = importlib.util.spec_from_file_location("record_files", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def made(record_files: ModuleType, rng: np.random.Generator) -> list:
    return [record_files.draw(rng, 40, 100) for _ in range(60)]


@pytest.fixture
def unpacked(record_files: ModuleType, made: list, tmp_path: Path) -> Path:
    records = (record_files.example(record_files.unpacked(one, 40, 7)) for one in made)
    return record_files.write(tmp_path / "part-00000.tfrecord", records, "gzip")


def test_records_become_a_dataset(
    cli: Callable[..., Any], record_files: ModuleType, made: list, unpacked: Path, tmp_path: Path
) -> None:
    vocab, out = tmp_path / "vocab.txt", tmp_path / "out"
    vocab.write_text("\n".join(WORDS) + "\n")
    records = (record_files.example(record_files.unpacked(one, 40, 7)) for one in made[:9])
    held = record_files.write(tmp_path / "eval_9", records)
    command = (unpacked, out, "--tokenizer", vocab, "--eval", held, "--workers", 1)
    spoken = cli("data", "import", *command, "--json")
    assert spoken.code == 0, spoken.err
    train, held_out = spoken.document["train"], spoken.document["eval"]
    assert (train["files"], train["records"], train["sequences"]) == (1, 60, 60)
    assert held_out["sequences"] == 9
    assert train["lower_bound"] <= train["rows"] < 60
    assert (out / "tokenizer" / "vocab.txt").read_bytes() == vocab.read_bytes()
    dataset = shards.open(out / "train", verify=True)
    assert len(dataset) == train["rows"]
    assert "imported in" in spoken.err and "train" in spoken.err
    stats = cli("data", "stats", out, "--samples", 2, "--json")
    assert stats.code == 0, stats.err
    assert "=w" in stats.out  # a masked word, shown as text
    again = cli("data", "import", *command, "--json")
    assert again.document["already"] and "imported already" in again.err
    assert "imported before" in again.err and "imported in" not in again.err


def test_graphcore_files_and_rows(
    cli: Callable[..., Any], record_files: ModuleType, made: list, tmp_path: Path
) -> None:
    rows = record_files.packs(made, 40, 2)
    source, out = tmp_path / "strategy_20_20_part_0", tmp_path / "out"
    empty = {name: [0] * len(v) for name, v in record_files.ten_arrays([], 40, 7, 2).items()}
    content = [record_files.ten_arrays(row, 40, 7, 2) for row in rows]
    source.write_bytes(b"".join(map(record_files.words, [*content, empty])))
    command = ["data", "import", source, out, "--vocab-size", 100, "--workers", 1, "--json"]
    spoken = cli(*command, "--max-length", 40, "--max-predictions", 7)
    assert spoken.code == 2
    assert "not a whole number of records" in spoken.err
    sizes = ("--max-length", 40, "--max-predictions", 7, "--max-sequences-per-pack", 2)
    spoken = cli(*command, *sizes)
    assert spoken.code == 0, spoken.err
    assert spoken.document["train"]["rows"] == len(rows)
    assert "1 records held no sequence" in spoken.err
    spoken = cli(*command, *sizes, "--repack")
    assert spoken.code == 2
    assert "--overwrite" in spoken.err
    spoken = cli(*command, *sizes, "--repack", "--overwrite", "--max-per-pack", 0)
    assert spoken.document["train"]["sequences"] == 60
    assert spoken.document["train"]["rows"] <= len(rows)


def test_what_is_wrong_is_one_line(cli: Callable[..., Any], unpacked: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    damaged.write_bytes(unpacked.read_bytes()[:-30])
    out = tmp_path / "out"
    for arguments, said in (
        ((unpacked,), "the folder for the result"),
        ((unpacked, out), "--tokenizer PATH or --vocab-size N"),
        ((damaged, out, "--vocab-size", 100), "damaged, record"),
        ((unpacked, out, "--vocab-size", 20), "not of the vocabulary"),
        ((unpacked, out, "--vocab-size", 100, "--format", "csv"), "format"),
        ((unpacked, out, "--vocab-size", 100, "--max-length", 0), "must be 1 or more"),
    ):
        spoken = cli("data", "import", *arguments)
        assert (spoken.code, spoken.err.count("\n")) == (2, 1), spoken.err
        assert said in spoken.err
        assert not out.exists()


def test_the_real_file(cli: Callable[..., Any], shared_data: Path, tmp_path: Path) -> None:
    source = shared_data / "packing" / "sample_text_packed.tfrecord"
    vocab = shared_data / "vocab" / "bert-base-uncased-vocab.txt"
    out = tmp_path / "out"
    spoken = cli("data", "import", source, out, "--tokenizer", vocab, "--workers", 1, "--json")
    assert spoken.code == 0, spoken.err
    found = spoken.document["train"]
    assert (found["records"], found["rows"], found["sequences"]) == (44, 44, 45)
    stats = cli("data", "stats", out, "--samples", 1, "--json")
    assert stats.code == 0, stats.err
    manifest = json.loads((out / "train" / "manifest.json").read_text())
    assert manifest["static_masks"] and manifest["capacity"] == 128
