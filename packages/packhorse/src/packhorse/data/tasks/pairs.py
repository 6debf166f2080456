"""Texts that belong together, for embedding models: an anchor, a positive, and hard negatives.

Files as people have them: columns `anchor`, `positive` and `negative`, `negative_1` … (those of
sentence-transformers), lists `query`, `pos` and `neg` (FlagEmbedding's), or any two or more columns
in this order. A row with several positives becomes as many groups, with the same negatives.

Every group of a set has the same size, because a batch of them is one tensor: by default as many
negatives as the row with the fewest has. If more are asked for, a row with fewer repeats its own,
as FlagEmbedding's trainer does; one that has none is an error.

A teacher's judgments may stand beside the texts: `scores` of the positive and each negative, or
their margins (`label`, one number a negative), or FlagEmbedding's `pos_scores` and `neg_scores`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

from packhorse.data.tables import TableRow, TableSource, name_of, read_rows
from packhorse.errors import InputError

ANCHORS = ("anchor", "query", "question", "sentence1", "premise", "text1")
POSITIVES = ("positive", "pos", "answer", "document", "passage", "sentence2", "text2")
NEGATIVE = re.compile(r"neg(ative)?s?(_?\d+)?")
SCORES = ("scores", "score", "labels", "label", "margin", "margins")
LISTED_SCORES = ("pos_scores", "neg_scores")
NO_TEXTS = ("id", "_id", "prompt", "type", *SCORES, *LISTED_SCORES)


@dataclass(frozen=True, slots=True)
class TextGroup:
    """An anchor, its positive and its negatives, and a teacher's scores if the file has them."""

    texts: tuple[str, ...]
    scores: tuple[float, ...] = ()  # of the positive and each negative; or a margin per negative
    unused: int = 0  # negatives of the row beyond the size of groups


@dataclass(frozen=True, slots=True)
class _GroupColumns:
    """Which columns hold what."""

    anchor: str
    positive: str
    negatives: tuple[str, ...]
    scores: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _RowGroup:
    """The texts of one positive of a row, before all groups get one size."""

    place: str
    anchor: str
    positive: str
    negatives: list[str]
    scores: list[float]


def read_groups(
    source: TableSource,
    columns: Sequence[str] = (),
    negatives: int = 0,
    *,
    scored: bool = False,
) -> list[TextGroup]:
    """Read the groups of a table.

    columns: anchor, positive and negatives; by default they are recognized. negatives: how many
    of each row to use; 0: as many as every row has. scored: each group needs a teacher's scores.
    """
    name = name_of(source)
    chosen: list[_GroupColumns] = []

    def choose(available: Sequence[str], place: str) -> list[str]:
        group = _columns(available, columns, scored, place)
        return [group.anchor, group.positive, *group.negatives, *group.scores]

    rows: list[_RowGroup] = []
    for row in read_rows(source, choose, name=name):
        if not row.cells:
            raise InputError(f"{row.place}: an empty line; remove it")
        if not chosen:
            chosen.append(_columns(list(row.cells), columns, scored, row.place))
        rows += _row_groups(row, chosen[0])
    if not rows:
        raise InputError(f"{name or 'the dataset'} holds no rows")
    size = negatives or min(len(row.negatives) for row in rows)
    return [_group(row, size, scored) for row in rows]


def is_scored(source: TableSource) -> bool:
    """Does each row have two texts and one score, so that it is no group but a scored pair?"""
    for row in read_rows(source):
        names = [name for name in SCORES if name in row.cells]
        if not names or any(NEGATIVE.fullmatch(name) for name in row.cells):
            return False
        cell = row.cells[names[0]]
        return not isinstance(cell, list | tuple) and _is_number(cell)
    return False


def _columns(
    available: Sequence[str], named: Sequence[str], scored: bool, place: str
) -> _GroupColumns:
    for name in named:
        if name not in available:
            raise InputError(f"{place}: no column {name!r}; there are {', '.join(available)}")
    texts = list(named) or _text_columns(available)
    if len(texts) < 2:
        raise InputError(
            f"{place}: a row needs an anchor and a positive; name their columns (text): "
            f"{', '.join(map(repr, available)) or 'none'}"
        )
    scores: tuple[str, ...] = ()
    if scored:
        if set(LISTED_SCORES) <= set(available):
            scores = LISTED_SCORES
        else:
            scores = tuple(name for name in SCORES if name in available)[:1]
        if not scores:
            raise InputError(
                f"{place}: no column with a teacher's scores ({', '.join(SCORES)}, or "
                f"{' and '.join(LISTED_SCORES)}); add one, or set teacher to a model"
            )
    return _GroupColumns(texts[0], texts[1], tuple(texts[2:]), scores)


def _text_columns(available: Sequence[str]) -> list[str]:
    """Anchor, positive and negatives by the names of their columns, else by their order."""
    anchor = next((name for name in ANCHORS if name in available), None)
    positive = next((name for name in POSITIVES if name in available), None)
    negatives = [name for name in available if NEGATIVE.fullmatch(name)]
    if anchor and positive:
        return [anchor, positive, *negatives]
    return [name for name in available if name not in NO_TEXTS]


def _row_groups(row: TableRow, columns: _GroupColumns) -> Iterator[_RowGroup]:
    """The groups of a row, one for each of its positives."""
    anchors = _texts(row, columns.anchor)
    positives = _texts(row, columns.positive)
    negatives = [text for name in columns.negatives for text in _texts(row, name)]
    if len(anchors) != 1 or not positives:
        missing = columns.positive if len(anchors) == 1 else columns.anchor
        raise InputError(f"{row.place}: column {missing!r} has no text; remove the row")
    listed = [_numbers(row, name) for name in columns.scores]
    for number, positive in enumerate(positives):
        scores = listed[0] if listed else []
        if len(listed) == 2:
            if len(listed[0]) != len(positives) or len(listed[1]) != len(negatives):
                raise InputError(
                    f"{row.place}: {len(positives)} positives and {len(negatives)} negatives, but "
                    f"{len(listed[0])} and {len(listed[1])} scores"
                )
            scores = [listed[0][number], *listed[1]]
        elif listed and len(positives) > 1:
            raise InputError(
                f"{row.place}: {len(positives)} positives and one list of scores; give "
                f"{' and '.join(LISTED_SCORES)}, or a row for each positive"
            )
        yield _RowGroup(row.place, anchors[0], positive, negatives, scores)


def _group(row: _RowGroup, size: int, scored: bool) -> TextGroup:
    """The group with so many negatives."""
    if size and not row.negatives:
        raise InputError(
            f"{row.place}: no negative, and {size} are asked for; mine some with "
            "`packhorse data mine`, or remove the row"
        )
    texts = (row.anchor, row.positive, *islice(cycle(row.negatives), size))
    available = len(row.negatives)
    unused = max(0, available - size)
    if not scored:
        return TextGroup(texts, unused=unused)
    if len(row.scores) not in (available, available + 1):
        raise InputError(
            f"{row.place}: {len(row.scores)} scores for a positive and {available} negatives; give "
            "one for each, or one margin per negative"
        )
    head = row.scores[: len(row.scores) - available]
    tail = row.scores[len(row.scores) - available :]
    return TextGroup(texts, (*head, *islice(cycle(tail), size)), unused)


def _texts(row: TableRow, name: str) -> list[str]:
    """The texts in a cell, which may be a list; a column that this row lacks has none."""
    cell: Any = row.cells.get(name)
    cells = list(cell) if isinstance(cell, list | tuple) else [] if cell is None else [cell]
    for text in cells:
        if not isinstance(text, str) or not text.strip():
            kind = "empty" if isinstance(text, str) else f"{text!r:.40}, which is no text"
            raise InputError(f"{row.place}: column {name!r} is {kind}; remove the row")
    return cells


def _numbers(row: TableRow, name: str) -> list[float]:
    cell: Any = row.cells.get(name)
    cells = list(cell) if isinstance(cell, list | tuple) else [cell]
    if not all(map(_is_number, cells)):
        raise InputError(f"{row.place}: column {name!r} is {cell!r:.40}, not finite numbers")
    return [float(value) for value in cells]


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return False
    try:
        return math.isfinite(float(value))
    except (ValueError, OverflowError):
        return False
