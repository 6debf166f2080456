"""Labeled sets: GLUE's own files, every format and `datasets`, and each bad row by name."""

from __future__ import annotations

import csv
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from packhorse.data.tasks.labeled import LabeledTexts, TableLayout, read_labeled
from packhorse.errors import InputError

Columns = dict[str, list[Any]]
ROWS: Columns = {"id": [7, 8, 9], "text": ["good, really", 'a "bad" one', "四"], "label": [1, 0, 1]}


@pytest.fixture(scope="session")
def datasets():
    return pytest.importorskip("datasets", reason="datasets is not installed (extra hf)")


def write(path: Path, columns: Columns) -> Path:
    """The same table in the format that the suffix names."""
    rows = [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    elif path.suffix == ".parquet":
        parquet.write_table(pa.table(columns), path)
    elif path.suffix == ".tsv":
        lines = [list(columns), *(list(row.values()) for row in rows)]
        path.write_text("".join("\t".join(map(str, line)) + "\n" for line in lines), "utf-8")
    else:
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([list(columns), *(list(row.values()) for row in rows)])
    return path


def values(*labels: Any, problem: Any = None, known: Any = (), **layout: Any) -> LabeledTexts:
    rows = [{"text": f"text {i}", "label": label} for i, label in enumerate(labels)]
    return read_labeled(rows, TableLayout(**layout), problem=problem, labels=known)


def spoken(pairs: list[Any]) -> set[str]:
    return {part for pair in pairs for part in pair if '"' in part}


GLUE = {  # rows, and how often each label
    "SST-2-train.tsv": (60_614, {0: 26_786, 1: 33_828}),
    "SST-2-test.tsv": (872, {0: 428, 1: 444}),
    "CoLA-train.tsv": (7_250, {0: 2_162, 1: 5_088}),
    "CoLA-dev.tsv": (1_043, {0: 322, 1: 721}),
    "msr-para-train.tsv": (3_576, {0: 1_169, 1: 2_407}),
    "msr-para-test.tsv": (1_725, {0: 578, 1: 1_147}),
}


@pytest.mark.parametrize("name", GLUE)
def test_glue_as_it_is_handed_around(name: str, shared_data: Path) -> None:
    result = read_labeled(shared_data / "glue" / name)
    rows, counts = GLUE[name]
    assert len(result.texts) == len(result.targets) == rows
    assert Counter(result.targets) == counts
    assert (result.labels, result.problem) == (("0", "1"), "single_label")
    assert all(isinstance(text, tuple) == name.startswith("msr") for text in result.texts)


def test_glue_the_texts(shared_data: Path) -> None:
    glue = shared_data / "glue"
    assert read_labeled(glue / "SST-2-dev.tsv").texts[1] == "well-conceived "
    cola = read_labeled(glue / "CoLA-val.tsv")
    assert (cola.texts[2], cola.targets[2]) == ("The car honked down the road.", 0)
    first, second = read_labeled(glue / "msr-para-train.tsv").texts[0]
    assert first.startswith('Amrozi accused his brother, whom he called "the witness", of')
    assert second.startswith('Referring to him as only "the witness", Amrozi')


def test_a_quote_of_mrpc_is_not_one_of_csv(shared_data: Path) -> None:
    path = shared_data / "glue" / "msr-para-val.tsv"
    raw = path.read_text("utf-8-sig").splitlines()[1:]
    plain = {cell for line in raw for cell in line.split("\t") if '"' in cell}
    assert plain and spoken(read_labeled(path).texts) == plain
    with pytest.raises(InputError, match="not csv"):
        read_labeled(path, TableLayout(quotes=True))


def test_stsb_is_scores(shared_data: Path) -> None:
    path = shared_data / "glue" / "stsb-en-dev.csv"
    result = read_labeled(path)
    assert (len(result.texts), result.problem, result.labels) == (1_500, "regression", ("score",))
    assert result.texts[1][0] == "A young child is riding a horse." and result.targets[1] == 4.75
    scaled = read_labeled(path, TableLayout(scale=(0, 5)))
    assert np.allclose(np.multiply(scaled.targets, 5), result.targets)
    assert (min(scaled.targets), max(scaled.targets)) == (0.0, 1.0)


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".parquet"])
def test_every_format(suffix: str, tmp_path: Path) -> None:
    result = read_labeled(write(tmp_path / f"set{suffix}", ROWS))
    assert result == LabeledTexts(ROWS["text"], [1, 0, 1], ("0", "1"), "single_label")


@pytest.mark.parametrize(
    "columns",
    [
        ("premise", "hypothesis", "gold_label"),
        ("question1", "question2", "is_duplicate"),
        ("question", "sentence", "label"),
        ("sentence1", "sentence2", "similarity_score"),
    ],
)
def test_columns_known_by_name(columns: tuple[str, str, str], tmp_path: Path) -> None:
    a, b, label = columns
    path = write(tmp_path / "set.tsv", {"idx": [0, 1], label: ["x", "y"], b: ["2", "4"], a: [1, 3]})
    result = read_labeled(path)
    assert (result.texts, result.labels) == ([("1", "2"), ("3", "4")], ("x", "y"))


def test_columns_by_option(tmp_path: Path) -> None:
    path = write(tmp_path / "set.csv", {"title": ["a", "b"], "body": ["c", "d"], "stars": [5, 1]})
    result = read_labeled(path, TableLayout(text=("title", "body"), label=("stars",)))
    assert result == LabeledTexts([("a", "c"), ("b", "d")], [1, 0], ("1", "5"), "single_label")
    (tmp_path / "bare.csv").write_text("5,fine\n1,poor\n")
    bare = read_labeled(tmp_path / "bare.csv", TableLayout(header=("label", "text")))
    assert (bare.texts, bare.targets) == (["fine", "poor"], [1, 0])


def test_a_tsv_may_have_quotes(tmp_path: Path) -> None:
    path = tmp_path / "set.tsv"
    path.write_text('text\tlabel\n"one\ttab"\ta\ntwo\tb\n')
    assert read_labeled(path, TableLayout(quotes=True)).texts == ["one\ttab", "two"]
    with pytest.raises(InputError, match=r"line 2: 3 cells, but 2 columns \(quotes count as text"):
        read_labeled(path)


@pytest.mark.parametrize(
    ("inputs", "labels", "targets", "problem"),
    [
        (["b", "a", "b"], ("a", "b"), [1, 0, 1], "single_label"),
        ([10, 9, 2], ("2", "9", "10"), [2, 1, 0], "single_label"),
        (["10", "9", "2"], ("2", "9", "10"), [2, 1, 0], "single_label"),
        ([1, -1], ("-1", "1"), [1, 0], "single_label"),
        (["2", "two"], ("2", "two"), [0, 1], "single_label"),
        ([True, False], ("False", "True"), [1, 0], "single_label"),
        ([np.int64(1), np.int64(0)], ("0", "1"), [1, 0], "single_label"),
        ([0.5, 1], ("label",), [0.5, 1.0], "regression"),
        (["1.0", "2"], ("label",), [1.0, 2.0], "regression"),
        ([["b", "a"], [], ["b"]], ("a", "b"), [(0, 1), (), (1,)], "multi_label"),
        ([[3, 11], [3]], ("3", "11"), [(0, 1), (0,)], "multi_label"),
    ],
)
def test_the_problem_and_the_numbers_follow_from_the_values(
    inputs: list[Any], labels: tuple[str, ...], targets: list[Any], problem: str
) -> None:
    result = values(*inputs)
    assert (result.labels, result.targets, result.problem) == (labels, targets, problem)


def test_the_problem_may_be_passed() -> None:
    assert values(1, 2, problem="regression").targets == [1.0, 2.0]
    assert values(1.0, 2.0, problem="single_label").labels == ("1", "2")
    assert values("a|b", "b", separator="|").targets == [(0, 1), (1,)]


def test_flags_in_columns_of_their_own(tmp_path: Path) -> None:
    columns = {"text": ["x", "y"], "rude": [1, 0], "loud": [1, 1]}
    layout = TableLayout(label=("rude", "loud"))
    for suffix in (".csv", ".parquet"):
        result = read_labeled(write(tmp_path / f"set{suffix}", columns), layout)
        assert (result.labels, result.targets) == (("rude", "loud"), [(0, 1), (1,)])
    columns["loud"] = [1, 2]
    with pytest.raises(InputError, match="line 3: column 'loud' is '2', neither 0 nor 1"):
        read_labeled(write(tmp_path / "set.csv", columns), layout)


def test_a_development_set_uses_the_numbers_of_its_training_set() -> None:
    train = values("b", "a", "c")
    dev = values("c", "c", problem=train.problem, known=train.labels)
    assert (dev.targets, dev.labels) == ([2, 2], ("a", "b", "c"))
    with pytest.raises(InputError, match="row 1: label 'd' is none of 'a', 'b', 'c'"):
        values("c", "d", problem=train.problem, known=train.labels)


def test_a_number_may_stand_for_a_models_label() -> None:
    assert values(1, 0, known=("negative", "positive")).targets == [1, 0]
    assert values("1", "0", known=("1", "0")).targets == [0, 1]  # names, as it happens
    with pytest.raises(InputError, match="label '2' is none of 'negative', 'positive'"):
        values(1, 2, known=("negative", "positive"))


BAD: dict[str, tuple[list[dict[str, Any]], dict[str, Any], str]] = {
    "no text column": ([{"body": "x", "label": 1}], {}, "row 0: no column is known to hold texts"),
    "no label column": ([{"text": "x", "i": 1}], {}, "row 0: no column is known to hold labels"),
    "a column that is not there": (
        [{"text": "x", "label": 1}],
        {"text": ("title",)},
        "row 0: no column 'title'; there are 'text', 'label'",
    ),
    "a later row without it": (
        [{"text": "x", "label": 1}, {"text": "y"}],
        {},
        "row 1: no column 'label'; there are 'text'",
    ),
    "no label": ([{"text": "x", "label": None}], {}, "row 0: no label (None)"),
    "a blank label": ([{"text": "x", "label": " "}], {}, "row 0: no label ('')"),
    "annotators disagreed": ([{"text": "x", "gold_label": "-"}], {}, "row 0: no label ('-')"),
    "a missing number": ([{"text": "x", "label": float("nan")}], {}, "row 0: no label (nan)"),
    "NaN as text": (
        [{"text": "x", "label": "1.5"}, {"text": "y", "label": "nan"}],
        {},
        "row 1: the score 'nan' is not a finite number",
    ),
    "infinite": ([{"text": "x", "label": 1e999}], {}, "row 0: the score inf is not a finite"),
    "off the scale": (
        [{"text": "x", "label": 5.5}],
        {"scale": (0, 5)},
        "row 0: the score 5.5 is not within 0 to 5",
    ),
    "an empty text": ([{"text": " ", "label": 1}], {}, "row 0: the text is empty"),
    "half a pair": (
        [{"sentence1": "x", "sentence2": None, "label": 1}],
        {},
        "row 0: the text is empty",
    ),
    "a text that is none": ([{"text": 5, "label": 1}], {}, "'text' is not text but int: 5"),
    "a label that is none": ([{"text": "x", "label": {}}], {}, "neither the name nor the number"),
    "a label in a list": ([{"text": "x", "label": [None]}], {}, "row 0: None is neither the name"),
    "one label": ([{"text": "x", "label": -1}] * 3, {}, "too few labels to tell apart"),
    "scaled labels": ([{"text": "x", "label": "a"}], {"scale": (0, 5)}, "a scale is for scores"),
    "not a row": (["text"], {}, "row 0 has no columns: it is a str"),  # type: ignore[dict-item]
    "no rows": ([], {}, "the dataset holds no rows"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_rows(case: str) -> None:
    rows, layout, message = BAD[case]
    with pytest.raises(InputError) as caught:
        read_labeled(rows, TableLayout(**layout))
    assert message in str(caught.value)


def test_bad_options(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="unknown problem 'ranking'; known are single_label"):
        values(1, 2, problem="ranking")
    with pytest.raises(InputError, match="not a list; if they are one text"):
        values("a,b", problem="multi_label")
    with pytest.raises(InputError, match="the score 'good' is not a finite number"):
        values("good", problem="regression")
    with pytest.raises(InputError, match="two labels have one name"):
        values("a", known=("a", "a"))
    with pytest.raises(InputError, match="two for a pair"):
        TableLayout(text=("a", "b", "c"))
    with pytest.raises(InputError, match="does not rise"):
        TableLayout(scale=(5, 0))
    (tmp_path / "gap.jsonl").write_text('{"text": "x", "label": 1}\n\n')
    with pytest.raises(InputError, match=r"gap\.jsonl, line 2: an empty line"):
        read_labeled(tmp_path / "gap.jsonl")
    (tmp_path / "test.tsv").write_text("index\tsentence\n0\tunlabeled\n")
    with pytest.raises(InputError, match="test set that has none: 'index', 'sentence'"):
        read_labeled(tmp_path / "test.tsv")


def dataset(datasets: Any, labels: list[int], names: list[str]) -> Any:
    features = datasets.Features(
        {
            "sentence": datasets.Value("string"),
            "label": datasets.ClassLabel(names=names),
            "idx": datasets.Value("int32"),
        }
    )
    rows = {"sentence": [f"s{i}" for i in range(len(labels))], "label": labels}
    return datasets.Dataset.from_dict(rows | {"idx": [*range(len(labels))]}, features=features)


def test_a_dataset_names_its_labels(datasets: Any, tmp_path: Path) -> None:
    built = dataset(datasets, [2, 0, 2], ["no", "maybe", "yes"])
    want = LabeledTexts(["s0", "s1", "s2"], [2, 0, 2], ("no", "maybe", "yes"), "single_label")
    assert read_labeled(built) == want
    assert read_labeled(built.with_format("numpy")) == want
    assert read_labeled(built.to_iterable_dataset()) == want
    built.save_to_disk(tmp_path / "saved")
    assert read_labeled(tmp_path / "saved") == read_labeled(str(tmp_path / "saved")) == want
    # A model may number the same names otherwise.
    assert read_labeled(built, labels=("yes", "no", "maybe")).targets == [0, 1, 0]
    assert read_labeled(built.select([2, 1])).texts == ["s2", "s1"]


def test_a_dataset_of_many_rows_comes_in_its_order(datasets: Any) -> None:
    scores = np.linspace(0, 1, 2500)
    built = datasets.Dataset.from_dict({"text": [str(x) for x in scores], "score": scores})
    result = read_labeled(built.shuffle(seed=1))
    assert [float(text) for text in result.texts] == result.targets != sorted(scores)
    assert sorted(result.targets) == sorted(scores)


def test_a_dataset_with_several_labels(datasets: Any) -> None:
    kind = datasets.List(datasets.ClassLabel(names=["joy", "fear", "awe"]))
    features = datasets.Features({"text": datasets.Value("string"), "labels": kind})
    rows = {"text": ["x", "y"], "labels": [[2, 0], []]}
    result = read_labeled(datasets.Dataset.from_dict(rows, features=features))
    assert (result.labels, result.targets) == (("joy", "fear", "awe"), [(0, 2), ()])


def test_a_dataset_that_cannot_be_used(datasets: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"row 1: no label \(-1\); the dataset has 'no', 'yes'"):
        read_labeled(dataset(datasets, [0, -1], ["no", "yes"]))
    splits = dict.fromkeys(("train", "test"), dataset(datasets, [0], ["a", "b"]))
    with pytest.raises(InputError, match="these are splits, not rows; pass one of them: train"):
        read_labeled(datasets.DatasetDict(splits))
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "all")
    assert read_labeled(tmp_path / "all" / "train").labels == ("a", "b")
    dataset(datasets, [0, -1], ["no", "yes"]).save_to_disk(tmp_path / "bad")
    with pytest.raises(InputError, match="bad, row 1: no label"):
        read_labeled(tmp_path / "bad")
