"""`packhorse data build` and `stats`: what they say, and to whom."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

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
    said = cli("data", "build", tmp_path / "one.txt", tmp_path / "pairs", *flags)
    assert said.code == 0 and "of a single document every sentence pair follows" in said.err
    said = cli("data", "build", tmp_path / "one.txt", tmp_path / "single", *flags, "--single")
    assert said.code == 0 and "single document" not in said.err


def test_a_seed_below_zero_is_refused(cli, tmp_path: Path) -> None:
    said = cli("data", "stats", tmp_path, "--seed", "-1")
    assert said.code == 2 and "--seed is -1; it must be 0 or more" in said.err


def test_build_then_stats(cli, home: Path) -> None:
    said = cli(*build(home, "--json"))
    assert said.code == 0, said.err
    found = said.document
    assert found["found"]["documents"] == 60 and not found["already"]
    train = found["train"]
    assert train["rows"] >= train["lower_bound"] and train["efficiency"] <= 1
    assert "no plan is fuller" in said.err and f"{train['efficiency']:.2%}" in said.err
    assert "reading: 100%, 60 documents" in said.err and "MB/s" in said.err
    assert "writing train: 100%" in said.err
    read = "60 documents, 0 of them held out, "
    assert read in said.err and "0 redirects" in said.err and "0 without text" in said.err

    told = cli("data", "stats", home / "out", "--json", "--verify", "--samples", 2, "--top", 4)
    assert told.code == 0, told.err
    shown = told.document["train"]
    assert {name: shown[name] for name in train} == train
    assert sum(shown["lengths"]) == train["sequences"] and told.document["verified"]
    assert sum(shown["row_tokens"]) == train["rows"]
    assert len(shown["strategies"]) == 4 and len(shown["samples"]) == 2
    assert "[MASK=" in shown["samples"][0]["text"] and "[MASK=" in told.err
    assert "█" in told.err and "drawn when loading" in told.err
    assert "every byte" in told.err and read in told.err


def test_the_same_again_and_another(cli, home: Path) -> None:
    cli(*build(home))
    again = cli(*build(home))
    assert again.code == 0 and "nothing to do" in again.err
    other = cli(*build(home, "--seed", 1))
    assert other.code == 2 and "recipe.seed" in other.err and "--overwrite" in other.err
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
    said = cli(*build(home))
    assert said.code == 2 and "not UTF-8" in said.err and "--max-bad 1" in said.err
    said = cli(*build(home, "--max-bad", 1))
    assert said.code == 0 and "warning: 1 documents or places" in said.err


def test_a_plot(cli, home: Path) -> None:
    pytest.importorskip("matplotlib")
    cli(*build(home))
    said = cli("data", "stats", home / "out" / "train", "--plot", home / "a.png", "--samples", 0)
    assert said.code == 0 and "drawn" in said.err
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
            "--eval-count is for --eval-hashes",
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
    said = cli("data", *(argument.format(home=home) for argument in arguments))
    assert said.code == 2 and part in said.err
    assert said.err.startswith("packhorse: ") and said.err.count("\n") == 1
    assert not (home / "out").exists()


def test_a_flipped_byte_is_found(cli, home: Path) -> None:
    cli(*build(home))
    shard = home / "out" / "train" / "shard-00000.arrow"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    for flags in ((), ("--verify",)):
        said = cli("data", "stats", home / "out", *flags)
        assert said.code == 2 and "shard-00000.arrow is damaged" in said.err


def test_no_tokenizer_no_samples(cli, home: Path) -> None:
    cli(*build(home))
    (home / "out" / "train").rename(home / "alone")
    said = cli("data", "stats", home / "alone")
    assert said.code == 0 and "no tokenizer" in said.err and "[MASK" not in said.out
