"""Every method makes rows of the same documents; figures follow from what was timed."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from packhorse.data.packed.examples import Sequences
from packhorse.data.packed.masking import Masks
from packhorse.errors import InputError
from packhorse.reports import docstrings
from packhorse.reports import tables as report
from packhorse_bench import data

pytest.importorskip("pyarrow")

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
SMALL = {"megabytes": 0.05, "max_length": 64, "workers": 1, "repeats": 1, "duplicates": 1}


@pytest.fixture
def vocabulary(tmp_path: Path) -> Path:
    letters = [chr(code) for code in range(33, 127)]
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join([*SPECIAL, *letters, *(f"##{letter}" for letter in letters)]))
    return path


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "LOADER_SECONDS", 0.05)


@pytest.fixture
def setup(vocabulary: Path, tmp_path: Path) -> data.DataSetup:
    """Two files of articles, a sentence a line."""
    for name in ("part-00000", "part-00001"):
        text = "a sentence of " * 3 + "words\n"
        (tmp_path / name).write_text("\n".join([text * 5] * 40))
    sources = (str(tmp_path / "part-00000"), str(tmp_path / "part-00001"))
    return data.DataSetup(str(vocabulary), sources, "sentences", **SMALL)


def test_every_method_makes_rows_of_the_same_text(setup: data.DataSetup) -> None:
    progress: list[tuple[int, int]] = []
    comparison = data.measure(setup, lambda *at: progress.append(at))
    assert progress == [(i, 3) for i in range(1, 4)]
    assert comparison.documents == 80 and comparison.sentences == 400 and comparison.loading > 0
    assert comparison.cleaning is not None and comparison.cleaning > 0
    packhorse_row, lists, reference = comparison.rows
    assert [row.method for row in comparison.rows] == list(data.METHODS)
    assert lists.sequences == reference.sequences and lists.rows == reference.rows
    for row in comparison.rows:
        assert row.problem is None and row.rows <= row.sequences
        steps = row.tokenize_seconds + row.examples_seconds + row.packing_seconds
        assert row.seconds == pytest.approx(steps) and row.planning_seconds > 0
        assert row.megabytes_per_second == pytest.approx(comparison.bytes / row.seconds / 1e6)
        assert row.tokens == pytest.approx(packhorse_row.tokens, rel=0.2)
    assert reference.over_reference == lists.over_lists == 1
    assert packhorse_row.over_lists == pytest.approx(lists.seconds / packhorse_row.seconds)
    assert packhorse_row.over_reference == pytest.approx(reference.seconds / packhorse_row.seconds)
    shown = data.table(comparison.rows)
    assert [cells[0] for cells in shown.rows] == list(data.METHODS)
    facts = data.describe(setup, comparison)
    assert "80 documents" in facts["workload"] and "MB/s" in facts["clean-up"]


def test_docstrings_where_no_source_is_named(
    vocabulary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_one_package = partial(docstrings.read, Path(asyncio.__file__).parent)
    monkeypatch.setattr(docstrings, "read", read_one_package)
    comparison = data.measure(data.DataSetup(str(vocabulary), **SMALL, methods=(data.OURS,)))
    (row,) = comparison.rows
    assert comparison.cleaning is None and comparison.documents > 10
    assert row.sequences > 100 and row.over_lists is None and row.over_reference is None
    assert "docstrings" in data.describe(data.DataSetup(""), comparison)["workload"]


def test_two_processes_share_the_documents(setup: data.DataSetup) -> None:
    both = data.measure(replace(setup, workers=2, methods=(data.OURS,)))
    (row,) = both.rows
    assert row.problem is None and both.documents == 80 and row.sequences > 80


def test_what_a_method_cannot_do_is_a_row(setup: data.DataSetup, tmp_path: Path) -> None:
    roberta = tmp_path / "other"
    roberta.mkdir()
    names = ["<pad>", "<unk>", "<s>", "</s>", "<mask>"]
    words = [*names, *"abcdefghijklmnopqrstuvwxyz.", "##e"]
    pad, unk, cls, sep, mask = (f'"{name}"' for name in names)
    (roberta / "vocab.txt").write_text("\n".join(words))
    (roberta / "tokenizer_config.json").write_text(
        f'{{"pad_token": {pad}, "unk_token": {unk}, "cls_token": {cls}, "sep_token": {sep}, '
        f'"mask_token": {mask}}}'
    )
    comparison = data.measure(replace(setup, tokenizer=str(roberta)))
    assert [row.problem is None for row in comparison.rows] == [True, False, False]
    assert any("special tokens" in problem for problem in report.problems(comparison.rows))


def test_taking_sequences_in_another_order() -> None:
    masks = Masks(np.array([1, 0, 2]), np.array([7, 8, 9]), np.array([1, 0, 2]))
    lengths, labels = np.array([2, 1, 3], np.uint16), np.array([True, False, True])
    examples = Sequences(np.arange(10, 16), lengths, lengths, labels, masks)
    taken = data._taken(examples, np.array([2, 0, 1]))
    assert taken.ids.tolist() == [13, 14, 15, 10, 11, 12]
    assert taken.lengths.tolist() == [3, 2, 1] and taken.random_next.tolist() == [True, True, False]
    assert taken.masked is not None and taken.masked.counts.tolist() == [2, 1, 0]
    assert taken.masked.positions.tolist() == [0, 2, 1] and taken.masked.ids.tolist() == [8, 9, 7]


@pytest.mark.parametrize("wrong", [{"repeats": 0}, {"methods": ("magic",)}, {"workers": 0}])
def test_a_wrong_question_is_an_error(setup: data.DataSetup, wrong: dict) -> None:
    with pytest.raises(InputError):
        data.measure(replace(setup, **wrong))


def test_too_little_text_is_an_error(setup: data.DataSetup, tmp_path: Path) -> None:
    (tmp_path / "part-00000").write_text("one article alone\n")
    with pytest.raises(InputError, match="too few"):
        data.measure(replace(setup, sources=setup.sources[:1]))
