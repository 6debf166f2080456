"""Groups of texts from the files that people have, and what is refused in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from packhorse.data.tasks.pairs import TextGroup, is_scored, read_groups
from packhorse.errors import InputError


def jsonl(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def texts(groups: list[TextGroup]) -> list[tuple[str, ...]]:
    return [group.texts for group in groups]


def test_columns_of_sentence_transformers(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(
        "id,anchor,positive,negative_1,negative_2\n7,a,b,c,d\n8,e,f,g,h\n"
    )
    assert texts(read_groups(tmp_path / "a.csv")) == [("a", "b", "c", "d"), ("e", "f", "g", "h")]
    (tmp_path / "b.tsv").write_text("question\tanswer\na\tb\n")
    assert texts(read_groups(tmp_path / "b.tsv")) == [("a", "b")]
    (tmp_path / "c.csv").write_text("one,two,three\na,b,c\n")  # by order
    assert texts(read_groups(tmp_path / "c.csv")) == [("a", "b", "c")]
    assert texts(read_groups(tmp_path / "c.csv", ("three", "one"))) == [("c", "a")]


def test_parquet(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    from pyarrow import parquet

    table = arrow.table({"query": ["a"], "pos": [["b", "c"]], "neg": [["d"]], "extra": [1]})
    parquet.write_table(table, tmp_path / "a.parquet")
    assert texts(read_groups(tmp_path / "a.parquet")) == [("a", "b", "d"), ("a", "c", "d")]


def test_lists_of_flag_embedding(tmp_path: Path) -> None:
    path = jsonl(
        tmp_path / "a.jsonl",
        {"query": "a", "pos": ["b", "c"], "neg": ["d", "e", "f"], "prompt": "x"},
        {"query": "g", "pos": ["h"], "neg": ["i", "j"], "prompt": "x"},
    )
    assert texts(read_groups(path)) == [
        ("a", "b", "d", "e"),
        ("a", "c", "d", "e"),
        ("g", "h", "i", "j"),
    ]
    repeated = texts(read_groups(path, negatives=3))
    assert repeated[0] == ("a", "b", "d", "e", "f") and repeated[2] == ("g", "h", "i", "j", "i")


def test_scores_of_a_teacher(tmp_path: Path) -> None:
    path = jsonl(
        tmp_path / "a.jsonl",
        {"query": "a", "pos": ["b"], "neg": ["c", "d"], "pos_scores": [3], "neg_scores": [1, 0.5]},
    )
    assert read_groups(path, scored=True) == [TextGroup(("a", "b", "c", "d"), (3.0, 1.0, 0.5))]
    assert read_groups(path, negatives=1, scored=True)[0].scores == (3.0, 1.0)
    (tmp_path / "m.csv").write_text("anchor,positive,negative,label\na,b,c,2.5\n")
    assert read_groups(tmp_path / "m.csv", scored=True)[0].scores == (2.5,)


def test_scored_pairs_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "s.csv").write_text("sentence1,sentence2,score\na,b,0.5\n")
    (tmp_path / "t.csv").write_text("anchor,positive,negative,score\na,b,c,0.5\n")
    (tmp_path / "p.csv").write_text("anchor,positive\na,b\n")
    kinds = [is_scored(tmp_path / name) for name in ("s.csv", "t.csv", "p.csv")]
    assert kinds == [True, False, False]


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({"anchor": "a"}, {}, "needs an anchor and a positive"),
        ({"anchor": "a", "positive": " "}, {}, "column 'positive' is empty"),
        ({"anchor": "a", "positive": 3}, {}, "which is no text"),
        ({"query": "a", "pos": []}, {}, "column 'pos' has no text"),
        ({"query": ["a", "b"], "pos": ["c"]}, {}, "column 'query' has no text"),
        ({"anchor": "a", "positive": "b"}, {"negatives": 2}, "packhorse data mine"),
        ({"anchor": "a", "positive": "b"}, {"scored": True}, "teacher's scores"),
        (
            {"anchor": "a", "positive": "b", "negative": "c", "scores": [1, "x"]},
            {"scored": True},
            "not finite numbers",
        ),
        (
            {"anchor": "a", "positive": "b", "negative": "c", "scores": [1, 2, 3]},
            {"scored": True},
            "3 scores for a positive and 1 negatives",
        ),
        (
            {"query": "a", "pos": ["b"], "neg": ["c"], "pos_scores": [1], "neg_scores": []},
            {"scored": True},
            "1 and 0 scores",
        ),
        (
            {"query": "a", "pos": ["b", "c"], "neg": ["d"], "scores": [2, 1]},
            {"scored": True},
            "2 positives and one list of scores",
        ),
    ],
)
def test_what_is_refused(
    tmp_path: Path, row: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        read_groups(jsonl(tmp_path / "a.jsonl", row), **options)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no rows"):
        read_groups(jsonl(tmp_path / "a.jsonl"))
