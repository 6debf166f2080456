"""Folders that `datasets` saved, given to the commands in place of files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

TEXTS = ["horse", "the horse carries sacks", "mule", "the mule carries sacks to market"]
SQUAD = {
    "id": ["a", "b"],
    "title": ["Mules", "Mules"],
    "context": ["the mule carries sacks to market"] * 2,
    "question": ["what carries", "the horse"],
    "answers": [
        {"text": ["mule"], "answer_start": [4]},
        {"text": [], "answer_start": []},
    ],
}


@pytest.fixture(scope="module")
def datasets() -> Any:
    return pytest.importorskip("datasets", reason="datasets is not installed (extra hf)")


@pytest.fixture
def home(datasets: Any, tmp_path: Path) -> Path:
    """The same texts as a file and in two splits; questions as a file and as a table."""
    lines = [json.dumps({"body": text, "n": n}) for n, text in enumerate(TEXTS)]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines) + "\n")
    table = datasets.Dataset.from_dict({"body": TEXTS, "n": range(len(TEXTS))})
    datasets.DatasetDict(train=table, test=table.select([1])).save_to_disk(tmp_path / "saved")
    datasets.Dataset.from_dict(SQUAD).save_to_disk(tmp_path / "squad")
    return tmp_path


def test_run(cli, tiny, home: Path) -> None:
    vectors = []
    for source in ("texts.jsonl", "saved/train"):
        out = home / f"{len(vectors)}.npy"
        flags = ("--input", home / source, "--column", "body", "--out", out, "-m", tiny("embed"))
        assert cli("run", "--task", "embed", *flags).code == 0
        vectors.append(np.load(out))
    assert vectors[0].tobytes() == vectors[1].tobytes() and len(vectors[1]) == len(TEXTS)


def test_a_run_does_not_go_on_with_another_table(cli, tiny, home: Path) -> None:
    from packhorse.cli.flags import RunFlags
    from packhorse.cli.writing import _input_stamp

    flags = RunFlags(input=str(home / "saved" / "train"))
    before = _input_stamp([], flags)
    assert _input_stamp([], flags) == before
    (file,) = (home / "saved" / "train").glob("*.arrow")
    os.utime(file, ns=(1, 1))  # the folder itself looks as it did
    assert _input_stamp([], flags) != before


def test_waste(cli, tiny, home: Path) -> None:
    documents = [
        cli("waste", home / source, *more, "-m", tiny("embed"), "--json").document
        for source, *more in (("texts.jsonl", "--column", "body"), ("saved/train",))
    ]
    assert documents[0] == documents[1] and documents[1]["texts"] == len(TEXTS)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("run", "--input", "saved"), "holds splits; name one of them"),
        (("waste", "saved"), "holds splits; name one of them"),
        (("waste", "squad"), "no column 'text'; name one with --column: 'id', 'title'"),
        (("waste", "saved/train", "--column", "n"), "column 'n' is not text but int"),
    ],
)
def test_mistakes_are_one_line(
    cli, tiny, home: Path, arguments: tuple[str, ...], says: str
) -> None:
    words = [home / word if (home / word).exists() else word for word in arguments]
    result = cli(*words, "-m", tiny("embed"))
    assert result.code == 2 and says in result.err
    assert len([line for line in result.err.splitlines() if says in line]) == 1


def test_build(cli, home: Path, datasets: Any) -> None:
    pytest.importorskip("nupunkt", reason="no nupunkt: pip install 'packhorse[data]'")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", "mule", "horse", "sacks"]
    (home / "vocab.txt").write_text("\n".join(words) + "\n")
    texts = [f"mule horse {'sacks ' * (n % 5)}. horse mule." for n in range(40)]
    (home / "corpus.jsonl").write_text("".join(json.dumps({"body": t}) + "\n" for t in texts))
    datasets.Dataset.from_dict({"body": texts}).save_to_disk(home / "corpus", num_shards=2)
    flags = ("--tokenizer", home / "vocab.txt", "--max-length", 32, "--workers", 1, "--json")
    documents = []
    for source, *more in (("corpus.jsonl", "--column", "body"), ("corpus",)):
        result = cli("data", "build", home / source, home / f"out-{source}", *more, *flags)
        assert result.code == 0, result.err
        documents.append(result.document)
    for name in ("documents", "sentences", "bad"):
        assert documents[0]["found"][name] == documents[1]["found"][name], name
    assert documents[1]["found"]["documents"] == 40


def test_evaluate_squad(cli, tiny, home: Path) -> None:
    result = cli(
        *("evaluate", "--task", "squad", "--input", home / "squad", "-m", tiny("span"), "--json")
    )
    assert result.code == 0, result.err
    assert result.document["questions"] == 2
