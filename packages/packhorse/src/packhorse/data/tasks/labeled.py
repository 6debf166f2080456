"""Labeled texts and pairs from a table: one label per row, several labels, or a score.

Any table that `tables` reads will do. Columns are recognized by the names that GLUE and similar
sets use, or named by the user. Two of GLUE's sets have no header and are recognized by their first
row (CoLA: four cells, the second 0 or 1; STS-B as csv: three, the last a number). A tsv has no
quoting unless asked for: in GLUE's files a quote is text, and MRPC cannot be read otherwise.

The kind of problem follows from the values: lists are several labels; numbers of which one has a
fraction or a decimal point are scores; everything else is one label. Labels are numbered in sorted
order (whole numbers by size, so 0 to n - 1 keep theirs), or as a `Dataset` names them, or as a
given model does. The set is read as a whole, since a label's number depends on all rows. A row that
cannot be learned from (no label, an unknown one, no text, a score that is no number) is an error:
left out silently it would change what is measured.

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

from packhorse.data.delimited import CsvFormat
from packhorse.data.tables import (
    TableRow,
    TableSource,
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
    "label",
    "labels",
    "gold_label",
    "Quality",
    "is_duplicate",
    "score",
    "similarity_score",
)
COLA = ("source", "label", "mark", "sentence")
STSB = ("sentence1", "sentence2", "score")
UNLABELED = ("", "-")  # the second where annotators of SNLI and MNLI did not agree
WHOLE = re.compile(r"0|-?[1-9][0-9]{0,17}")
FLAGS = {"0": False, "1": True, "0.0": False, "1.0": True, "False": False, "True": True}
SHOWN = 12  # labels in a message


@dataclass(frozen=True, slots=True)
class TableLayout:
    """Which columns hold texts and labels; fields that are not set are detected."""

    text: tuple[str, ...] = ()  # a column, or two for pairs
    label: tuple[str, ...] = ()  # a column; or several of 0 and 1, one per label
    header: tuple[str, ...] = ()  # names of the columns, if the first row of a file has none
    quotes: bool | None = None  # whether cells may be quoted; None: in a csv, not in a tsv
    separator: str = ""  # between the labels in one cell, if there may be several
    scale: tuple[float, float] | None = None  # lowest and highest score, which become 0 and 1

    def __post_init__(self) -> None:
        if len(self.text) > 2:
            raise InputError(f"a text is one column, or two for a pair; not {self.text!r}")
        if self.scale and not self.scale[0] < self.scale[1]:
            raise InputError(f"the scale {self.scale} does not rise; name the lowest score first")


@dataclass(frozen=True, slots=True)
class LabeledTexts:
    """Texts with their targets; `labels` and `problem` as in a model's configuration."""

    texts: list[Text]
    targets: list[Target]
    labels: tuple[str, ...]  # names by number; for a regression the name of its column
    problem: Problem


class _RawLabel(NamedTuple):
    """The label of a row as the table has it."""

    place: str
    value: Any


def read_labeled(
    source: TableSource,
    layout: TableLayout | None = None,
    *,
    problem: Problem | None = None,
    labels: Sequence[str] = (),
) -> LabeledTexts:
    """Read a set from a file, a folder saved by `datasets`, or a `datasets.Dataset`.

    problem, labels: those of a model, or of the training set that a development set belongs to; any
    other label is then an error. A whole number as a label may stand for the number of a name.
    """
    if problem not in (None, *get_args(Problem)):
        known = ", ".join(get_args(Problem))
        raise InputError(f"unknown problem {problem!r}; known are {known}")
    name = name_of(source)
    source = open_source(source)
    texts, raw_labels, layout = _read(source, layout or TableLayout(), name)
    problem = problem or _detect_problem(raw_labels, layout)
    if problem == "regression":
        scores: list[Target] = [_score(raw, layout.scale) for raw in raw_labels]
        return LabeledTexts(texts, scores, tuple(labels) or layout.label, problem)
    if layout.scale:
        raise InputError(f"a scale is for scores (regression); these are labels ({problem})")
    class_names = _class_names(source, layout.label)
    row_names = [_label_names(raw, class_names, layout.separator, problem) for raw in raw_labels]
    all_labels = tuple(labels) or class_names or _sorted_names(row_names)
    if len(all_labels) < 2:
        listed = _listed(all_labels)
        raise InputError(f"too few labels to tell apart in {name or 'the dataset'}: {listed}")
    targets = _label_numbers(raw_labels, row_names, all_labels, problem)
    return LabeledTexts(texts, targets, all_labels, problem)


# Rows and columns --------------------------------------------------------------------------------


def _read(
    source: TableSource, layout: TableLayout, name: str
) -> tuple[list[Text], list[_RawLabel], TableLayout]:
    """Texts, raw labels, and the layout with the columns that were detected."""
    texts: list[Text] = []
    raw_labels: list[_RawLabel] = []

    def choose(available: Sequence[str], place: str) -> list[str]:
        texts_in = _text_columns(available, layout, place)
        return [*texts_in, *_label_columns(available, layout, place)]

    for row in read_rows(source, choose, _csv_format(source, layout), name):
        available = list(row.cells)
        if not available:
            raise InputError(f"{row.place}: an empty line; remove it")
        if not texts:
            layout = replace(
                layout,
                text=_text_columns(available, layout, row.place),
                label=_label_columns(available, layout, row.place),
            )
        _require_columns((*layout.text, *layout.label), available, row.place)
        text = text_of(row, layout.text)
        if is_blank(text):
            raise InputError(f"{row.place}: the text is empty; remove the row")
        texts.append(text)
        raw_labels.append(_RawLabel(row.place, _label_value(row, layout.label)))
    if not texts:
        raise InputError(f"{name or 'the dataset'} holds no rows")
    return texts, raw_labels, layout


def _csv_format(source: TableSource, layout: TableLayout) -> CsvFormat:
    is_tsv = isinstance(source, str | Path) and Path(source).suffix.lower() == ".tsv"
    quotes = not is_tsv if layout.quotes is None else layout.quotes

    def names(first: Sequence[str]) -> Sequence[str]:
        if layout.header:
            return layout.header
        if len(first) == len(COLA) and first[1] in ("0", "1"):
            return COLA
        return STSB if len(first) == len(STSB) and _number(first[2]) is not None else ()

    return CsvFormat(quote='"' if quotes else "", names=names)


def _text_columns(available: Sequence[str], layout: TableLayout, place: str) -> tuple[str, ...]:
    if layout.text:
        return _require_columns(layout.text, available, place)
    for columns in TEXT_COLUMNS:
        if set(columns) <= set(available):
            return columns
    raise InputError(f"{place}: no column is known to hold texts; name it: {_listed(available)}")


def _label_columns(available: Sequence[str], layout: TableLayout, place: str) -> tuple[str, ...]:
    if layout.label:
        return _require_columns(layout.label, available, place)
    for column in LABEL_COLUMNS:
        if column in available:
            return (column,)
    raise InputError(
        f"{place}: no column is known to hold labels; name it, if this is not a test set that "
        f"has none: {_listed(available)}"
    )


def _require_columns(
    columns: tuple[str, ...], available: Sequence[str], place: str
) -> tuple[str, ...]:
    for name in columns:
        if name not in available:
            raise InputError(f"{place}: no column {name!r}; there are {_listed(available)}")
    return columns


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return (", ".join(map(repr, names[:SHOWN])) or "none") + more


# Labels ------------------------------------------------------------------------------------------


def _label_value(row: TableRow, columns: Sequence[str]) -> Any:
    """The cell of one column; of several, the names of those that are set."""
    if len(columns) > 1:
        return [name for name in columns if _flag(row, name)]
    value = row.cells[columns[0]]
    if hasattr(value, "tolist"):  # numpy's
        value = value.tolist()
    if isinstance(value, str):
        value = value.strip()
    if value is None or value in UNLABELED or (isinstance(value, float) and math.isnan(value)):
        raise InputError(f"{row.place}: no label ({value!r}); every row needs one, or remove it")
    return value


def _flag(row: TableRow, name: str) -> bool:
    text = str(row.cells[name]).strip()
    if text not in FLAGS:
        raise InputError(f"{row.place}: column {name!r} is {text!r:.40}, neither 0 nor 1")
    return FLAGS[text]


def _detect_problem(raw_labels: Sequence[_RawLabel], layout: TableLayout) -> Problem:
    values = [raw.value for raw in raw_labels]
    if layout.separator or any(isinstance(value, list | tuple) for value in values):
        return "multi_label"
    numeric = all(_number(value) is not None for value in values)
    return "single_label" if not numeric or all(map(_is_whole, values)) else "regression"


def _is_whole(value: Any) -> bool:
    """Whether the value is written as a whole number; a bool is a name."""
    return WHOLE.fullmatch(str(value)) is not None


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def _score(raw: _RawLabel, scale: tuple[float, float] | None) -> float:
    score = _number(raw.value)
    if score is None or not math.isfinite(score):
        raise InputError(f"{raw.place}: the score {raw.value!r:.40} is not a finite number")
    if scale is None:
        return score
    low, high = scale
    if not low <= score <= high:
        raise InputError(f"{raw.place}: the score {score:g} is not within {low:g} to {high:g}")
    return (score - low) / (high - low)


def _class_names(source: TableSource, columns: Sequence[str]) -> tuple[str, ...]:
    """Names of the labels, if a `Dataset` has them or each label has a column of its own."""
    if len(columns) > 1:
        return tuple(columns)
    feature = (getattr(source, "features", None) or {}).get(columns[0])
    return tuple(getattr(getattr(feature, "feature", feature), "names", None) or ())


def _label_names(
    raw: _RawLabel, class_names: Sequence[str], separator: str, problem: Problem
) -> tuple[str, ...]:
    """The name of the label, or the names of several."""
    value = raw.value
    if problem == "single_label":
        return (_label_name(value, class_names, raw.place),)
    if separator and isinstance(value, str):
        value = [part.strip() for part in value.split(separator)]
    if not isinstance(value, list | tuple):
        raise InputError(
            f"{raw.place}: the labels {value!r:.40} are not a list; if they are one text, say "
            "what separates them"
        )
    return tuple(_label_name(label, class_names, raw.place) for label in value)


def _label_name(value: Any, class_names: Sequence[str], place: str) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # pandas writes whole numbers so if some are missing
    if not isinstance(value, int | str) or value == "":
        raise InputError(f"{place}: {value!r:.40} is neither the name nor the number of a label")
    if class_names and type(value) is int:
        if not 0 <= value < len(class_names):  # `datasets` has -1 for unlabeled rows
            raise InputError(f"{place}: no label ({value}); the dataset has {_listed(class_names)}")
        return class_names[value]
    return str(value)


def _sorted_names(rows: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    names = set(chain.from_iterable(rows))
    return tuple(sorted(names, key=int if all(map(_is_whole, names)) else None))


def _label_numbers(
    raw_labels: Sequence[_RawLabel],
    row_names: Sequence[tuple[str, ...]],
    labels: tuple[str, ...],
    problem: Problem,
) -> list[Target]:
    number = {label: i for i, label in enumerate(labels)}
    if len(number) < len(labels):
        raise InputError(f"two labels have one name: {_listed(labels)}")
    if not any(map(_is_whole, labels)):
        number |= {str(i): i for i in range(len(labels))}
    targets: list[Target] = []
    for raw, names in zip(raw_labels, row_names, strict=True):
        for name in names:
            if name not in number:
                raise InputError(f"{raw.place}: label {name!r:.40} is none of {_listed(labels)}")
        numbers = tuple(sorted({number[name] for name in names}))
        targets.append(numbers[0] if problem == "single_label" else numbers)
    return targets
