"""Every format of a file of lengths, and every mistake told with its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from packhorse.errors import InputError
from packhorse.reports.lengths import read_histogram, read_lengths


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, "utf-8")
    return path


@pytest.mark.parametrize(
    ("name", "text", "which"),
    [
        ("a.json", "[0, 2, 1.0]", ""),
        ("a.json", '{"about": "x", "only": [0, 2, 1]}', ""),
        ("a.json", '{"one": [5], "two": [0, 2, 1]}', ":two"),
        ("a.json", '{"about": "x", "histograms": {"one": [5], "two": [0, 2, 1]}}', ":two"),
        ("a.txt", " [0, 2, 1]", ""),
        ("a.csv", "length,count\n2,2\n3,1\n", ""),
        ("a.csv", "\ufeff3,1\n\n 2 , 1\n2,1\n", ""),
    ],
)
def test_formats(name: str, text: str, which: str, tmp_path: Path) -> None:
    path = written(tmp_path, name, text)
    assert read_histogram(f"{path}{which}").tolist() == [0, 2, 1]


def test_a_name_with_a_colon_is_still_a_file(tmp_path: Path) -> None:
    assert read_histogram(str(written(tmp_path, "a:b.json", "[1]"))).tolist() == [1]


@pytest.mark.parametrize(
    ("name", "text", "which", "message"),
    [
        ("a.json", "[1, 2", "", "line 1"),
        ("a.json", "[1, -2]", "", "entry 1: -2"),
        ("a.json", "[1, 2.5]", "", "entry 1 is 2.5"),
        ("a.json", '[1, "2"]', "", "entry 1 is '2'"),
        ("a.json", "[true]", "", "entry 0 is True"),
        ("a.json", "[1, NaN]", "", "entry 1 is nan"),
        ("a.json", "[0, 0]", "", "no sequence"),
        ("a.json", "[1]", ":x", "leave out :x"),
        ("a.json", "{}", "", "no list"),
        ("a.json", "7", "", "no list"),
        ("a.json", '{"a": [1], "b": [1]}', "", "holds a, b; name one"),
        ("a.json", '{"a": [1], "b": [1]}', ":c", "'c' is not among them"),
        ("a.csv", "length,count\n2,x\n", "", "line 2: 'x' is not a count"),
        ("a.csv", "2,1\n0,1\n", "", "line 2: 0 is not a length"),
        ("a.csv", "2,1\n2\n", "", "line 2: '2' is not `length,count`"),
        ("a.csv", "99999999999,1\n", "", "line 1: 99999999999"),
        ("a.csv", "2,1\n", ":x", "leave out :x"),
        ("a.csv", "", "", "no sequence"),
        ("none.csv", None, "", "cannot be read"),
    ],
)
def test_mistakes(name: str, text: str | None, which: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / name if text is None else written(tmp_path, name, text)
    with pytest.raises(InputError) as caught:
        read_histogram(f"{path}{which}")
    assert message in str(caught.value) and name in str(caught.value)


def test_lengths_are_counted(tmp_path: Path) -> None:
    assert read_lengths(written(tmp_path, "a.txt", "3\n1\n\n 3 \n")).tolist() == [1, 0, 2]


@pytest.mark.parametrize(
    ("text", "message"),
    [("3\nfour\n", "line 2: 'four'"), ("3\n0\n", "line 2: 0"), ("\n", "no length")],
)
def test_bad_lengths(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        read_lengths(written(tmp_path, "a.txt", text))


def test_a_binary_file_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not a text file"):
        read_lengths(path)
