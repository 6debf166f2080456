"""`packhorse data`: what build, import and stats print, write and refuse."""

from __future__ import annotations

import importlib.util
import json
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from packhorse import progress
from packhorse.data.packed import shards

pytest.importorskip("pyarrow", reason="no pyarrow: pip install 'packhorse[data]'")
pytest.importorskip("nupunkt", reason="no nupunkt: pip install 'packhorse[data]'")

ALL = ["build", "{home}/part-00000", "{home}/out", "--tokenizer", "{home}/vocab.txt"]
WORDS = ["mule", "horse", "sack", "road", "market", "town", "rain", "hill"]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A vocabulary and sixty documents, a sentence a line."""
    rng = random.Random(0)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", "##s"]
    (tmp_path / "vocab.txt").write_text("\n".join([*special, *WORDS]) + "\n")
    documents = [
        "\n".join(" ".join(rng.choices(WORDS, k=9)) + " ." for _ in range(rng.randint(2, 9)))
        for _ in range(60)
    ]
    (tmp_path / "part-00000").write_text("\n\n".join(documents) + "\n")
    return tmp_path


def build(home: Path, *more: object) -> tuple[object, ...]:
    flags = ("--tokenizer", home / "vocab.txt", "--max-length", 64, "--workers", 1)
    return ("data", "build", home / "part-00000", home / "out", *flags, *more)


def test_a_single_document_is_warned_of(cli, home: Path, tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("the mule rests. the horse rests.\n" * 9)
    flags = ("--tokenizer", home / "vocab.txt", "--max-length", 32, "--workers", 1)
    result = cli("data", "build", tmp_path / "one.txt", tmp_path / "pairs", *flags)
    assert (
        result.code == 0
        and "every sentence pair is consecutive, because a document stood alone" in result.err
    )
    result = cli("data", "build", tmp_path / "one.txt", tmp_path / "single", *flags, "--single")
    assert result.code == 0 and "stood alone" not in result.err


def test_a_seed_below_zero_is_refused(cli, tmp_path: Path) -> None:
    result = cli("data", "stats", tmp_path, "--seed", "-1")
    assert result.code == 2 and "--seed is -1; it must be 0 or more" in result.err


def test_build_then_stats(cli, home: Path) -> None:
    result = cli(*build(home, "--json"))
    assert result.code == 0, result.err
    document = result.document
    assert document["found"]["documents"] == 60 and not document["already"]
    train = document["train"]
    assert train["rows"] >= train["lower_bound"] and train["efficiency"] <= 1
    assert "no plan is fuller" in result.err and f"{train['efficiency']:.2%}" in result.err
    assert "reading:" not in result.err, "with --json no progress is shown"
    read = "60 documents, 0 of them held out, "
    assert read in result.err and "0 redirects" in result.err and "0 without text" in result.err

    stats = cli("data", "stats", home / "out", "--json", "--verify", "--samples", 2, "--top", 4)
    assert stats.code == 0, stats.err
    shown = stats.document["train"]
    assert {name: shown[name] for name in train} == train
    assert sum(shown["lengths"]) == train["sequences"] and stats.document["verified"]
    assert sum(shown["row_tokens"]) == train["rows"]
    assert len(shown["strategies"]) == 4 and len(shown["samples"]) == 2
    assert "[MASK=" in shown["samples"][0]["text"] and "[MASK=" in stats.err
    assert "█" in stats.err and "drawn when loading" in stats.err
    assert "every byte" in stats.err and read in stats.err


def test_progress_of_each_stage(cli, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PAUSE", 0.0)
    result = cli(*build(home))
    assert result.code == 0, result.err
    assert re.search(r"^reading: .* \(100%\), 60 documents, .* MB/s$", result.err, re.MULTILINE)
    assert re.search(r"^writing train: .* \(100%\), [\d,]+ sequences$", result.err, re.MULTILINE)


def test_the_same_again_and_another(cli, home: Path) -> None:
    cli(*build(home))
    again = cli(*build(home))
    assert again.code == 0 and "nothing to do" in again.err
    changed = cli(*build(home, "--seed", 1))
    assert changed.code == 2 and "recipe.seed" in changed.err and "--overwrite" in changed.err
    assert cli(*build(home, "--seed", 1, "--overwrite")).code == 0


def test_every_flag_arrives(cli, home: Path) -> None:
    flags = ("--static-masks", "--whole-words", "--single", "--duplicates", 2, "--max-per-pack", 0)
    more = ("--max-predictions", 0, "--mask-probability", 0.2, "--short-probability", 0.5)
    cli(*build(home, *flags, *more, "--seed", 3, "--shard-bytes", 5000, "--chunk-bytes", 3000))
    manifest = json.loads((home / "out" / "train" / "manifest.json").read_text())
    made_by = manifest["config"]["made_by"]
    assert made_by["recipe"] == {
        "max_length": 64,
        "short_probability": 0.5,
        "mask_probability": 0.2,
        "max_predictions": None,
        "whole_words": True,
        "span_length": 0.0,
        "duplicates": 2,
        "static_masks": True,
        "seed": 3,
        "next_sentence": False,
    }
    assert (made_by["shard_bytes"], made_by["chunk_bytes"]) == (5000, 3000)
    assert manifest["max_per_pack"] is None and len(manifest["shards"]) > 1
    assert manifest["next_sentence"] is False
    assert "next sentence" not in cli("data", "stats", home / "out").out
    cli(*build(home, "--overwrite"))
    assert "next sentence: " in cli("data", "stats", home / "out").out


def test_bad_input_is_counted_at_the_end(cli, home: Path) -> None:
    with (home / "part-00000").open("ab") as file:
        file.write(b"\nbroken \xff .\n")
    result = cli(*build(home))
    assert result.code == 2 and "not UTF-8" in result.err and "--max-bad 1" in result.err
    result = cli(*build(home, "--max-bad", 1))
    assert result.code == 0 and "warning: 1 unreadable documents" in result.err


def test_a_plot(cli, home: Path) -> None:
    pytest.importorskip("matplotlib")
    cli(*build(home))
    result = cli("data", "stats", home / "out" / "train", "--plot", home / "a.png", "--samples", 0)
    assert result.code == 0 and "plotted" in result.err
    assert (home / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["build", "{home}/part-00000", "--tokenizer", "{home}/vocab.txt"], "name one source"),
        (["build", "{home}/none", "{home}/out", "--tokenizer", "{home}/vocab.txt"], "not exist"),
        (["build", "{home}/part-00000", "{home}/out"], "--tokenizer"),
        (["build", "{home}/part-00000", "{home}/out", "--tokenizer", "{home}/none"], "none"),
        (
            ["build", "{home}", "{home}/out", "--tokenizer", "{home}/vocab.txt", "--format", "x"],
            "x",
        ),
        (
            ["build", "{home}", "{home}/out", "--tokenizer", "{home}/vocab.txt"],
            "lies in the source folder",
        ),
        (
            [*ALL, "--eval-count", "5"],
            "--eval-count needs --eval-fraction or --eval-hashes",
        ),
        ([*ALL, "--max-bad", "-1"], "max_bad is -1"),
        ([*ALL, "--seed", "-1"], "seed is -1"),
        ([*ALL, "--max-per-pack", "-1"], "as many as fit 0"),
        (["stats", "{home}"], "no manifest"),
        (["stats", "{home}/none"], "not a folder"),
        (["stats", "{home}", "--plot", "a.gif"], "ends in"),
    ],
)
def test_mistakes_are_one_line(cli, home: Path, arguments: list[str], part: str) -> None:
    result = cli("data", *(argument.format(home=home) for argument in arguments))
    assert result.code == 2 and part in result.err
    assert result.err.startswith("packhorse: ") and result.err.count("\n") == 1
    assert not (home / "out").exists()


def test_a_flipped_byte_is_found(cli, home: Path) -> None:
    cli(*build(home))
    shard = home / "out" / "train" / "shard-00000.arrow"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    for flags in ((), ("--verify",)):
        result = cli("data", "stats", home / "out", *flags)
        assert result.code == 2 and "shard-00000.arrow is damaged" in result.err


def test_no_tokenizer_no_samples(cli, home: Path) -> None:
    cli(*build(home))
    (home / "out" / "train").rename(home / "alone")
    result = cli("data", "stats", home / "alone")
    assert result.code == 0 and "no tokenizer" in result.err and "[MASK" not in result.out


# packhorse data import -------------------------------------------------------------------------

IMPORT_VOCABULARY = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    *(f"w{number}" for number in range(95)),
]


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
def sequences(record_files: ModuleType, rng: np.random.Generator) -> list:
    return [record_files.draw(rng, 40, 100) for _ in range(60)]


@pytest.fixture
def unpacked(record_files: ModuleType, sequences: list, tmp_path: Path) -> Path:
    records = (
        record_files.example(record_files.unpacked(sequence, 40, 7)) for sequence in sequences
    )
    return record_files.write(tmp_path / "part-00000.tfrecord", records, "gzip")


def test_records_become_a_dataset(
    cli: Callable[..., Any],
    record_files: ModuleType,
    sequences: list,
    unpacked: Path,
    tmp_path: Path,
) -> None:
    vocab, out = tmp_path / "vocab.txt", tmp_path / "out"
    vocab.write_text("\n".join(IMPORT_VOCABULARY) + "\n")
    records = (
        record_files.example(record_files.unpacked(sequence, 40, 7)) for sequence in sequences[:9]
    )
    held = record_files.write(tmp_path / "eval_9", records)
    command = (unpacked, out, "--tokenizer", vocab, "--eval", held, "--workers", 1)
    result = cli("data", "import", *command, "--json")
    assert result.code == 0, result.err
    train, held_out = result.document["train"], result.document["eval"]
    assert (train["files"], train["records"], train["sequences"]) == (1, 60, 60)
    assert held_out["sequences"] == 9
    assert train["lower_bound"] <= train["rows"] < 60
    assert (out / "tokenizer" / "vocab.txt").read_bytes() == vocab.read_bytes()
    dataset = shards.open_dataset(out / "train", verify=True)
    assert len(dataset) == train["rows"]
    assert "imported in" in result.err and "train" in result.err
    stats = cli("data", "stats", out, "--samples", 2, "--json")
    assert stats.code == 0, stats.err
    assert "=w" in stats.out  # a masked word, shown as text
    again = cli("data", "import", *command, "--json")
    assert again.document["already"] and "imported already" in again.err
    assert "imported before" in again.err and "imported in" not in again.err


def test_graphcore_files_and_rows(
    cli: Callable[..., Any], record_files: ModuleType, sequences: list, tmp_path: Path
) -> None:
    rows = record_files.packs(sequences, 40, 2)
    source, out = tmp_path / "strategy_20_20_part_0", tmp_path / "out"
    empty = {name: [0] * len(v) for name, v in record_files.ten_arrays([], 40, 7, 2).items()}
    content = [record_files.ten_arrays(row, 40, 7, 2) for row in rows]
    source.write_bytes(b"".join(map(record_files.words, [*content, empty])))
    command = ["data", "import", source, out, "--vocab-size", 100, "--workers", 1, "--json"]
    result = cli(*command, "--max-length", 40, "--max-predictions", 7)
    assert result.code == 2
    assert "not a whole number of records" in result.err
    sizes = ("--max-length", 40, "--max-predictions", 7, "--max-sequences-per-pack", 2)
    result = cli(*command, *sizes)
    assert result.code == 0, result.err
    assert result.document["train"]["rows"] == len(rows)
    assert "1 records held no sequence" in result.err
    result = cli(*command, *sizes, "--repack")
    assert result.code == 2
    assert "--overwrite" in result.err
    result = cli(*command, *sizes, "--repack", "--overwrite", "--max-per-pack", 0)
    assert result.document["train"]["sequences"] == 60
    assert result.document["train"]["rows"] <= len(rows)


def test_what_is_wrong_is_one_line(cli: Callable[..., Any], unpacked: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    damaged.write_bytes(unpacked.read_bytes()[:-30])
    out = tmp_path / "out"
    for arguments, message in (
        ((unpacked,), "the folder for the result"),
        ((unpacked, out), "--tokenizer PATH or --vocab-size N"),
        ((damaged, out, "--vocab-size", 100), "damaged, record"),
        ((unpacked, out, "--vocab-size", 20), "not of the vocabulary"),
        ((unpacked, out, "--vocab-size", 100, "--format", "csv"), "format"),
        ((unpacked, out, "--vocab-size", 100, "--max-length", 0), "must be 1 or more"),
    ):
        result = cli("data", "import", *arguments)
        assert (result.code, result.err.count("\n")) == (2, 1), result.err
        assert message in result.err
        assert not out.exists()


def test_the_real_file(cli: Callable[..., Any], shared_data: Path, tmp_path: Path) -> None:
    source = shared_data / "packing" / "sample_text_packed.tfrecord"
    vocab = shared_data / "vocab" / "bert-base-uncased-vocab.txt"
    out = tmp_path / "out"
    result = cli("data", "import", source, out, "--tokenizer", vocab, "--workers", 1, "--json")
    assert result.code == 0, result.err
    train = result.document["train"]
    assert (train["records"], train["rows"], train["sequences"]) == (44, 44, 45)
    stats = cli("data", "stats", out, "--samples", 1, "--json")
    assert stats.code == 0, stats.err
    manifest = json.loads((out / "train" / "manifest.json").read_text())
    assert manifest["static_masks"] and manifest["capacity"] == 128


def test_a_corpus_is_cleaned_and_shown_on_a_page(cli, home: Path) -> None:
    pytest.importorskip("rensa", reason="no rensa: pip install 'packhorse[clean]'")
    pytest.importorskip("py3langid", reason="no py3langid: pip install 'packhorse[clean]'")
    sentence = "The mule carries the sacks to the market, and the farmer walks beside it."
    lines = [f"{sentence} {word} is here." for word in WORDS] * 2
    (home / "part-00000").unlink()
    (home / "texts.txt").write_text("\n".join([*lines, "Short."]) + "\n")
    flags = ("--tokenizer", home / "vocab.txt", "--max-length", 64, "--workers", 1)
    more = ("--documents", "lines", "--dedup", "exact", "--languages", "en,de")
    result = cli(
        "data", "build", home / "texts.txt", home / "out", *flags, *more, "--min-characters", 20
    )
    assert result.code == 0, result.err
    assert "17 documents" in result.out and f"{len(WORDS)} duplicates" in result.out
    assert "1 too short" in result.out and "repaired" not in result.out
    result = cli("data", "stats", home / "out", "--html", home / "page.html", "--samples", 2)
    assert result.code == 0 and "wrote" in result.err
    page = (home / "page.html").read_text()
    assert "Documents by language" in page and "<td>duplicates</td>" in page
    result = cli("data", "stats", home / "out", "--html", home / "none" / "page.html")
    assert result.code == 2 and "there is no folder" in result.err


def test_words_that_look_like_flags_are_no_sources(cli, home: Path) -> None:
    result = cli(*build(home, "--colunm", "text"))
    assert result.code == 2 and "unknown option: --colunm" in result.err
    assert not (home / "out").exists()
