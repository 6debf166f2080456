"""What docs/extending.md names is there: every path, and every name in a file beside it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "packages" / "packhorse" / "src" / "packhorse"
CODE = re.compile(r"`([^`\n]+)`")
PATH = re.compile(r"[\w.]+/([\w./]+)?|\w+\.(py|md)|Makefile")
NAME = re.compile(r"[A-Z_a-z]\w+")
ELSEWHERE = {"1_Pooling/config.json"}  # in a user's folder
WORDS = {"load", "run", "serve", "convert", "pooling_mode"}  # commands, and a key of that file


def files(path: str) -> list[Path]:
    """The file, or all Python files in the folder; empty if there is no such path."""
    for place in (SOURCE / path, ROOT / path):
        if place.exists():
            return [place] if place.is_file() else sorted(place.rglob("*.py"))
    return []


def problems(text: str) -> list[str]:
    """Paths that do not exist, and names that no file of the same paragraph has."""
    result = []
    for paragraph in re.split(r"\n\n|\n(?=\d+\. |## )", text):
        spans = [span for span in CODE.findall(paragraph) if span not in ELSEWHERE | WORDS]
        paths = [span for span in spans if PATH.fullmatch(span)]
        result += [f"{path} does not exist" for path in paths if not files(path)]
        contents = "\n".join(file.read_text("utf-8") for path in paths for file in files(path))
        names = [span for span in spans if NAME.fullmatch(span) and span not in paths]
        if paths:
            result += [
                f"{name} is not in {', '.join(paths)}"
                for name in names
                if not re.search(rf"\b{name}\b", contents)
            ]
    return result


def test_the_page_names_what_there_is() -> None:
    assert problems((ROOT / "docs" / "extending.md").read_text("utf-8")) == []


def test_what_is_not_there_is_noticed() -> None:
    """The control."""
    text = "1. `model/pool.py`: a line.\n2. `model/pooling.py`: `POOLINGS` and `POOLS`.\n"
    assert problems(text) == [
        "model/pool.py does not exist",
        "POOLS is not in model/pooling.py",
    ]
