"""Multiple choice: a text, several endings or answers, and which of them is right.

Columns as the sets have them: `ending0`, `ending1` … (SWAG, whose `sent2` begins each ending), or
one list: `endings`, `choices` or `options` (HellaSwag, RACE; CommonsenseQA and ARC, whose lists
`text` and `label` say how the right one is called). The text is in `sent1`, `context`, `ctx`,
`article` or `question`; with a question beside an article or a context, it begins each answer. The
right one is named by its number from 0 or its letter. Every row has as many choices as the first: a
batch of them is one tensor.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from packhorse.data.tables import TableRow, TableSource, name_of, read_rows
from packhorse.errors import InputError

TEXTS = ("sent1", "article", "context", "ctx", "question", "premise", "startphrase")
BEGINNINGS = ("sent2", "question")  # put before each choice, if they are not the text
LISTS = ("endings", "choices", "options", "answers")
ENDING = re.compile(r"(?:ending|choice|option)_?(\d+)")
RIGHT = ("label", "answer", "answerKey", "gold")


@dataclass(frozen=True, slots=True)
class ChoiceTexts:
    """Pairs of the text and each of its choices, and the number of the right one."""

    pairs: list[tuple[tuple[str, str], ...]]
    right: list[int]


def read_choices(source: TableSource, columns: Sequence[str] = ()) -> ChoiceTexts:
    """Read questions with their choices. columns: of the text, and of the choices if not a list."""
    name = name_of(source)
    result = ChoiceTexts([], [])
    for row in read_rows(source, name=name):
        if not row.cells:
            raise InputError(f"{row.place}: an empty line; remove it")
        text, beginning, choices, called = _texts(row, columns)
        if len(choices) < 2 or (result.pairs and len(choices) != len(result.pairs[0])):
            expected = len(result.pairs[0]) if result.pairs else "two or more"
            raise InputError(f"{row.place}: {len(choices)} choices; there must be {expected}")
        result.pairs.append(tuple((text, f"{beginning} {c}".strip()) for c in choices))
        result.right.append(_right(row, len(choices), called))
    if not result.pairs:
        raise InputError(f"{name or 'the dataset'} holds no rows")
    return result


def _texts(row: TableRow, columns: Sequence[str]) -> tuple[str, str, list[str], list[str]]:
    """The text, what begins each choice, the choices, and what they are called if they say so."""
    cells = row.cells
    for name in columns:
        if name not in cells:
            raise InputError(f"{row.place}: no column {name!r}; there are {', '.join(cells)}")
    text = columns[0] if columns else next((name for name in TEXTS if name in cells), "")
    numbered = sorted((int(m[1]), n) for n in cells if (m := ENDING.fullmatch(n)))
    listed = next((name for name in LISTS if name in cells), "")
    if len(columns) > 1:
        source: Any = cells[columns[1]] if len(columns) == 2 else [cells[n] for n in columns[1:]]
    else:
        source = [cells[n] for _, n in numbered] if numbered else cells.get(listed)
    called: list[str] = []
    if isinstance(source, Mapping):
        called = [str(name) for name in _as_list(source.get("label"))]
        source = source.get("text")
    choices = _as_list(source)
    if not text or not choices:
        raise InputError(
            f"{row.place}: a text and its choices (ending0 …, or a list called "
            f"{', '.join(LISTS)}); name their columns (text): {', '.join(map(repr, cells))}"
        )
    beginning = next((cells[n] for n in BEGINNINGS if n in cells and n != text), "")
    for cell in (cells[text], beginning, *choices):
        if not isinstance(cell, str):
            raise InputError(f"{row.place}: {cell!r:.40} is not a text")
    return cells[text], beginning, choices, called


def _as_list(cell: Any) -> list[Any]:
    return list(cell) if isinstance(cell, list | tuple) else []


def _right(row: TableRow, count: int, called: Sequence[str]) -> int:
    """The number of the right choice."""
    name = next((name for name in RIGHT if name in row.cells), "")
    value = str(row.cells.get(name, "")).strip()
    if value in called[:count]:  # ARC has 1 to 4 in some rows, and A to D in others
        number = called.index(value)
    elif re.fullmatch("[A-Za-z]", value):
        number = ord(value.upper()) - ord("A")
    else:
        number = int(value) if re.fullmatch("[0-9]+", value) else -1
    if not 0 <= number < count:
        raise InputError(
            f"{row.place}: the right choice is {value!r:.40}; it must be a number from 0 to "
            f"{count - 1} or a letter ({', '.join(RIGHT)})"
        )
    return number
