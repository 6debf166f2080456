"""Texts and pairs with what is known of them: a label, several labels, or a score.

Any table that `tables.reading` reads will do. Columns are found by the names that GLUE and its like
use, or named; two of GLUE's sets have no header and are known by their first row (CoLA: four cells,
the second 0 or 1; STS-B as csv: three, the last a number). A tsv has no quoting unless asked for:
in GLUE's a quote is text, and MRPC cannot be read otherwise.

What kind of problem it is follows from the values: lists are several labels, numbers of which one
has a fraction or a point are scores, all else is one label. Labels are numbered in sorted order
(whole numbers by size, so 0 to n - 1 keep theirs), or as a `Dataset` names them, or as a model that
is given does. The set is read whole, since a label's number depends on all rows, and a row that
cannot be learned from (no label, an unknown one, no text, a score that is no number) is refused by
name: left out in silence it would change what is measured.

Wang et al., "GLUE" (2018).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from packhorse.data.tables.reading import (
    Form,
    Row,
    Source,
    Text,
    is_blank,
    name_of,
    open_source,
    read_rows,
    text_of,
)
from packhorse.errors import InputError

Problem = Literal["single_label", "multi_label", "regression"]
Target = int | float | tuple[int, ...]  # a label's number, a score, the numbers of several labels

TEXT_COLUMNS = (
    ("sentence1", "sentence2"),  # MRPC, RTE, STS-B, WNLI
    ("#1 String", "#2 String"),  # MRPC as it was published
    ("question1", "question2"),  # QQP
    ("premise", "hypothesis"),  # MNLI, SNLI
    ("question", "sentence"),  # QNLI
    ("sentence",),  # CoLA, SST-2
    ("text",),
)
LABEL_COLUMNS = (
    *("label", "labels", "gold_label", "Quality", "is_duplicate", "score", "similarity_score"),
)
COLA = ("source", "label", "mark", "sentence")
STSB = ("sentence1", "sentence2", "score")
UNLABELLED = ("", "-")  # the second where SNLI's and MNLI's annotators did not agree
WHOLE = re.compile(r"0|-?[1-9][0-9]{0,17}")
FLAGS = {"0": False, "1": True, "0.0": False, "1.0": True, "False": False, "True": True}
SHOWN = 12  # labels in a message


@dataclass(frozen=True, slots=True)
class Layout:
    """Where in a table things are; what is left empty is found by itself."""

    text: tuple[str, ...] = ()  # a column, or two for pairs
    label: tuple[str, ...] = ()  # a column; or several of 0 and 1, each a label that may hold
    header: tuple[str, ...] = ()  # names of the columns, where the first row of a file has none
    quotes: bool | None = None  # may cells stand in quotes? None: in a csv, not in a tsv
    separator: str = ""  # between the labels in one cell, where there may be several
    scale: tuple[float, float] | None = None  # scores from 0 to 5, say, become 0 to 1

    def __post_init__(self) -> None:
        if len(self.text) > 2:
            raise InputError(f"a text is one column, or two for a pair; not {self.text!r}")
        if self.scale and not self.scale[0] < self.scale[1]:
            raise InputError(f"the scale {self.scale} does not rise; name its least score first")


@dataclass(frozen=True, slots=True)
class Labelled:
    """Texts with their targets; `labels` and `problem` are what a model's configuration says."""

    texts: list[Text]
    targets: list[Target]
    labels: tuple[str, ...]  # names by number; of a regression its column's name
    problem: Problem


class _Found(NamedTuple):
    """A row's label as it stands there."""

    where: str
    value: Any


def read_labelled(
    source: Source,
    layout: Layout | None = None,
    *,
    problem: Problem | None = None,
    labels: Sequence[str] = (),
) -> Labelled:
    """The set in a file, a folder saved by `datasets`, or a `datasets.Dataset`.

    problem, labels: those of a model, or of the training set a development set belongs to; any
    other label is then an error. A label that is a whole number may stand for a name's number.
    """
    if problem not in (None, *get_args(Problem)):
        known = ", ".join(get_args(Problem))
        raise InputError(f"unknown problem {problem!r}; there are {known}")
    name, source = name_of(source), open_source(source)
    texts, found, layout = _read(source, layout or Layout(), name)
    problem = problem or _problem(found, layout)
    if problem == "regression":
        scores: list[Target] = [_score(each, layout.scale) for each in found]
        return Labelled(texts, scores, tuple(labels) or layout.label, problem)
    if layout.scale:
        raise InputError(f"a scale is for scores (regression); these are labels ({problem})")
    named = _class_names(source, layout.label)
    words = [_words(each, named, layout.separator, problem) for each in found]
    every = tuple(labels) or named or _sorted(words)
    if len(every) < 2:
        raise InputError(
            f"too few labels to tell apart in {name or 'the dataset'}: {_listed(every)}"
        )
    return Labelled(texts, _numbers(found, words, every, problem), every, problem)


def _read(source: Source, layout: Layout, name: str) -> tuple[list[Text], list[_Found], Layout]:
    """Texts, labels as they stand there, and the layout with the columns that were found."""
    texts: list[Text] = []
    found: list[_Found] = []

    def needed(have: Sequence[str], where: str) -> list[str]:
        return [*_text_columns(have, layout, where), *_label_columns(have, layout, where)]

    for row in read_rows(source, needed, _form(source, layout), name):
        have = list(row.cells)
        if not have:
            raise InputError(f"{row.where}: an empty line; remove it")
        if not texts:
            text = _text_columns(have, layout, row.where)
            label = _label_columns(have, layout, row.where)
            layout = replace(layout, text=text, label=label)
        _present((*layout.text, *layout.label), have, row.where)
        texts.append(_text(row, layout.text))
        found.append(_Found(row.where, _value(row, layout.label)))
    if not texts:
        raise InputError(f"{name or 'the dataset'} holds no rows")
    return texts, found, layout


def _form(source: Source, layout: Layout) -> Form:
    tabs = isinstance(source, str | Path) and Path(source).suffix.lower() == ".tsv"
    quotes = not tabs if layout.quotes is None else layout.quotes

    def names(first: Sequence[str]) -> Sequence[str]:
        if layout.header:
            return layout.header
        if len(first) == len(COLA) and first[1] in ("0", "1"):
            return COLA
        return STSB if len(first) == len(STSB) and _number(first[2]) is not None else ()

    return Form(quotes, names)


def _text_columns(have: Sequence[str], layout: Layout, where: str) -> tuple[str, ...]:
    if layout.text:
        return _present(layout.text, have, where)
    for columns in TEXT_COLUMNS:
        if set(columns) <= set(have):
            return columns
    raise InputError(f"{where}: no column is known to hold texts; name it: {_listed(have)}")


def _label_columns(have: Sequence[str], layout: Layout, where: str) -> tuple[str, ...]:
    if layout.label:
        return _present(layout.label, have, where)
    for column in LABEL_COLUMNS:
        if column in have:
            return (column,)
    raise InputError(
        f"{where}: no column is known to hold labels; name it, if this is not a test set that "
        f"has none: {_listed(have)}"
    )


def _present(columns: tuple[str, ...], have: Sequence[str], where: str) -> tuple[str, ...]:
    for name in columns:
        if name not in have:
            raise InputError(f"{where}: no column {name!r}; there are {_listed(have)}")
    return columns


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return (", ".join(map(repr, names[:SHOWN])) or "none") + more


def _text(row: Row, columns: Sequence[str]) -> Text:
    text = text_of(row, columns)
    if is_blank(text):
        raise InputError(f"{row.where}: the text is empty; remove the row")
    return text


def _value(row: Row, columns: Sequence[str]) -> Any:
    """The cell of one column; of several, the names of those that hold."""
    if len(columns) > 1:
        return [name for name in columns if _flag(row, name)]
    value = row.cells[columns[0]]
    value = value.tolist() if hasattr(value, "tolist") else value  # numpy's
    value = value.strip() if isinstance(value, str) else value
    if value is None or value in UNLABELLED or (isinstance(value, float) and math.isnan(value)):
        raise InputError(f"{row.where}: no label ({value!r}); every row needs one, or remove it")
    return value


def _flag(row: Row, name: str) -> bool:
    found = str(row.cells[name]).strip()
    if found not in FLAGS:
        raise InputError(f"{row.where}: column {name!r} is {found!r:.40}, neither 0 nor 1")
    return FLAGS[found]


def _problem(found: Sequence[_Found], layout: Layout) -> Problem:
    values = [value for _, value in found]
    if layout.separator or any(isinstance(value, list | tuple) for value in values):
        return "multi_label"
    scores = all(_number(value) is not None for value in values)
    return "single_label" if not scores or all(map(_whole, values)) else "regression"


def _whole(value: Any) -> bool:
    """Is it a whole number, written as one? A bool is a name."""
    return WHOLE.fullmatch(str(value)) is not None


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def _score(found: _Found, scale: tuple[float, float] | None) -> float:
    score = _number(found.value)
    if score is None or not math.isfinite(score):
        raise InputError(f"{found.where}: the score {found.value!r:.40} is not a finite number")
    if scale is None:
        return score
    low, high = scale
    if not low <= score <= high:
        raise InputError(f"{found.where}: the score {score:g} is not within {low:g} to {high:g}")
    return (score - low) / (high - low)


def _class_names(source: Source, columns: Sequence[str]) -> tuple[str, ...]:
    """What a `Dataset` calls the labels it numbers, or flags in columns of their own are called."""
    if len(columns) > 1:
        return tuple(columns)
    feature = (getattr(source, "features", None) or {}).get(columns[0])
    return tuple(getattr(getattr(feature, "feature", feature), "names", None) or ())


def _words(
    found: _Found, named: Sequence[str], separator: str, problem: Problem
) -> tuple[str, ...]:
    """The name of the label, or the names of several."""
    value = found.value
    if problem == "single_label":
        return (_word(value, named, found.where),)
    if separator and isinstance(value, str):
        value = [part.strip() for part in value.split(separator)]
    if not isinstance(value, list | tuple):
        raise InputError(
            f"{found.where}: the labels {value!r:.40} are not a list; if they are one text, say "
            "what separates them"
        )
    return tuple(_word(each, named, found.where) for each in value)


def _word(value: Any, named: Sequence[str], where: str) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # whole numbers beside missing ones, as pandas writes them
    if not isinstance(value, int | str) or value == "":
        raise InputError(f"{where}: {value!r:.40} is neither the name nor the number of a label")
    if named and type(value) is int:
        if not 0 <= value < len(named):  # datasets says -1 of what is not labelled
            raise InputError(f"{where}: no label ({value}); the dataset has {_listed(named)}")
        return named[value]
    return str(value)


def _sorted(words: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    every = set(chain.from_iterable(words))
    return tuple(sorted(every, key=int if all(map(_whole, every)) else None))


def _numbers(
    found: Sequence[_Found],
    words: Sequence[tuple[str, ...]],
    labels: tuple[str, ...],
    problem: Problem,
) -> list[Target]:
    number = {label: i for i, label in enumerate(labels)}
    if len(number) < len(labels):
        raise InputError(f"two labels have one name: {_listed(labels)}")
    if not any(map(_whole, labels)):
        number |= {str(i): i for i in range(len(labels))}
    targets: list[Target] = []
    for (where, _), mine in zip(found, words, strict=True):
        if unknown := [word for word in mine if word not in number]:
            raise InputError(f"{where}: label {unknown[0]!r:.40} is none of {_listed(labels)}")
        several = tuple(sorted({number[word] for word in mine}))
        targets.append(several[0] if problem == "single_label" else several)
    return targets
