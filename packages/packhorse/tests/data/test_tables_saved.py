"""Tables of `datasets`: in memory, streaming, saved to a folder; and folders that were damaged."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from packhorse.data.tables import (
    SPLITS,
    STATE,
    Record,
    arrow_files,
    as_texts,
    read_rows,
    read_texts,
)
from packhorse.data.tasks.squad import Gold, SquadQuestion, read_squad
from packhorse.errors import InputError, MissingExtra

TEXTS = ["one", "zwei", "四", "four"]
LABELS = [0, 1, 0, 1]


@pytest.fixture(scope="module")
def datasets() -> Any:
    return pytest.importorskip("datasets", reason="datasets is not installed (extra hf)")


@pytest.fixture(scope="module")
def table(datasets: Any) -> Any:
    return datasets.Dataset.from_dict({"body": TEXTS, "label": LABELS})


@pytest.fixture(scope="module")
def home(datasets: Any, table: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The table in two files, splits of it, a single split."""
    home = tmp_path_factory.mktemp("saved")
    table.save_to_disk(home / "table", num_shards=2)
    splits = {"train": table, "test": table.select([2])}
    datasets.DatasetDict(splits).save_to_disk(home / "splits")
    datasets.DatasetDict(train=table).save_to_disk(home / "alone")
    return home


def texts(source: Any, **options: Any) -> list[Any]:
    return [record.text for record in read_texts(source, **options)]


def test_the_only_column_of_text_needs_no_name(table: Any, home: Path) -> None:
    assert texts(table) == texts(home / "table") == texts(str(home / "table")) == TEXTS
    assert texts(table.to_iterable_dataset()) == TEXTS
    assert texts(table.with_format("numpy").select([3, 0])) == ["four", "one"]


def test_columns_are_named_or_told(datasets: Any) -> None:
    built = datasets.Dataset.from_dict({"id": ["a"], "title": ["x"], "body": ["y"], "n": [1]})
    assert list(read_texts(built, "body")) == [Record("a", "y")]
    assert texts(built, column=["title", "body"]) == [("x", "y")]
    with pytest.raises(InputError, match=r"the dataset: no column 'text'.*'title', 'body', 'n'"):
        texts(built)
    with pytest.raises(InputError, match="row 0: column 'n' is not text but int"):
        texts(built, column="n")
    assert texts(built.rename_column("body", "text")) == ["y"], "as in files"


def test_a_stream_that_does_not_tell_its_columns(datasets: Any) -> None:
    built = datasets.IterableDataset.from_generator(lambda: ({"n": i, "body": "x"} for i in "ab"))
    assert built.column_names is None
    with pytest.raises(InputError, match=r"one column of texts.*'n', 'body'"):
        as_texts(built)
    assert texts(built, column="n") == ["a", "b"]
    numbered = built.map(lambda row: {"n": 7})
    assert as_texts(numbered) == texts(numbered) == ["x", "x"]


def test_a_split_is_a_folder_and_the_only_one_is_meant(home: Path) -> None:
    assert texts(home / "splits" / "test") == ["四"]
    assert texts(home / "alone") == TEXTS
    with pytest.raises(InputError, match=r"holds splits; name one.*splits/test, .*splits/train$"):
        texts(home / "splits")
    (empty := home / "none").mkdir()
    shutil.copy(home / "splits" / SPLITS, empty)
    with pytest.raises(InputError, match="lists splits, but there are none"):
        texts(empty)


def test_splits_in_memory(datasets: Any, table: Any) -> None:
    assert texts(datasets.DatasetDict(train=table)) == TEXTS
    assert as_texts(datasets.DatasetDict(train=table)) == TEXTS
    splits = datasets.DatasetDict(train=table, test=table)
    for read in (texts, as_texts):
        with pytest.raises(InputError, match="splits, not rows; pass one of them: train, test"):
            read(splits)


def test_what_is_given_for_a_list(table: Any) -> None:
    assert as_texts(table) == as_texts(table.to_iterable_dataset()) == TEXTS
    assert as_texts(table["body"]) == as_texts(table.to_iterable_dataset()["body"]) == TEXTS
    assert as_texts(iter(TEXTS)) == TEXTS
    assert as_texts(TEXTS) is TEXTS
    several = table.add_column("title", TEXTS)
    with pytest.raises(InputError, match=r"one column of texts; pass dataset.*'body', 'title'$"):
        as_texts(several)
    with pytest.raises(InputError, match="of: none"):
        as_texts(table.select_columns(["label"]))


def test_all_columns_of_all_rows(home: Path) -> None:
    rows = list(read_rows(home / "table"))
    assert [row.cells for row in rows] == [
        {"body": text, "label": label} for text, label in zip(TEXTS, LABELS, strict=True)
    ]
    assert rows[3].place == f"{home / 'table'}, row 3"


def test_arrow_files_in_their_order(home: Path) -> None:
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    assert arrow_files(home / "table") == [home / "table" / name for name in names]


LAST = "data-00001-of-00002.arrow"
DAMAGE: dict[str, tuple[Callable[[Path], object], bool]] = {  # and whether `state.json` shows it
    "state.json cut": (lambda folder: (folder / STATE).write_text("{"), True),
    "state.json of something else": (lambda folder: (folder / STATE).write_text("{}"), True),
    "state.json is a list": (lambda folder: (folder / STATE).write_text("[]"), True),
    "no rows": (lambda folder: (folder / LAST).unlink(), True),
    "no features": (lambda folder: (folder / "dataset_info.json").unlink(), False),
    "odd features": (
        lambda folder: (folder / "dataset_info.json").write_text('{"features": 3}'),
        False,
    ),
    "rows cut": (lambda folder: _cut(folder / LAST, 0.5), False),
    "rows empty": (lambda folder: (folder / LAST).write_bytes(b""), False),
    "noise for rows": (lambda folder: (folder / LAST).write_bytes(b"\7" * 999), False),
}


def _cut(path: Path, share: float) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_folder_is_one_line(case: str, home: Path, tmp_path: Path) -> None:
    harm, in_state = DAMAGE[case]
    folder = Path(shutil.copytree(home / "table", tmp_path / "harmed"))
    harm(folder)
    with pytest.raises(InputError, match=r"harmed.*(cannot be read|not a dataset)") as caught:
        texts(folder)
    assert "\n" not in str(caught.value)
    if in_state:
        with pytest.raises(InputError, match=r"harmed.*(not as `datasets` writes|does not exist)"):
            arrow_files(folder)
    else:
        arrow_files(folder)


def test_names_outside_the_folder_are_refused(home: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(home / "table", tmp_path / "sly"))
    outside = f"../{folder.name}/{LAST}"
    state = (folder / STATE).read_text().replace(LAST, outside)
    (folder / STATE).write_text(state)
    with pytest.raises(InputError, match="does not exist"):
        arrow_files(folder)


def test_any_other_folder_is_reported(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="from a folder that datasets did not save; use one of"):
        texts(tmp_path)


def test_datasets_is_an_extra(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtra, match=r"packhorse\[hf\]"):
        texts(home / "table")


SQUAD = {
    "id": ["q1", "q2", "q3"],
    "title": ["Mules", "Mules", "Oats"],
    "context": ["A mule eats oats.", "A mule eats oats.", "Oats are grass."],
    "question": ["What eats?", "Why?", "What are oats?"],
    "answers": [
        {"text": ["A mule", "mule"], "answer_start": [0, 2]},
        {"text": [], "answer_start": []},
        {"text": ["grass"], "answer_start": [9]},
    ],
}


def test_questions_as_the_hub_has_them(datasets: Any, tmp_path: Path) -> None:
    built = datasets.Dataset.from_dict(SQUAD)
    built.save_to_disk(tmp_path / "squad")
    mule, oats = SQUAD["context"][1:]
    assert list(read_squad(built)) == list(read_squad(tmp_path / "squad"))
    assert list(read_squad(built)) == [
        SquadQuestion("q1", "What eats?", mule, (Gold("A mule", 0), Gold("mule", 2)), False, 0),
        SquadQuestion("q2", "Why?", mule, (), True, 0),
        SquadQuestion("q3", "What are oats?", oats, (Gold("grass", 9),), False, 1),
    ]


@pytest.mark.parametrize(
    ("column", "values", "says"),
    [
        ("id", ["q1", "q1", "q3"], "question 'q1': two have this id"),
        ("context", [None] * 3, "row 0: 'context' is missing"),
        ("answers", [{"text": ["a"], "answer_start": [0, 1]}] * 3, "row 0: 1 answers and 2 places"),
        ("answers", ["a"] * 3, "row 0: 'answers' is 'a'"),
        ("answers", [{"text": ["a"], "answer_start": [-1]}] * 3, "not an answer and its place"),
    ],
)
def test_questions_that_cannot_be_used(
    datasets: Any, column: str, values: list[Any], says: str
) -> None:
    with pytest.raises(InputError, match=says):
        list(read_squad(datasets.Dataset.from_dict(SQUAD | {column: values})))
