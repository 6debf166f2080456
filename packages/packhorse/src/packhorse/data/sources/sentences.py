"""A text cut into sentences.

The cutting is nupunkt's: the Punkt algorithm (Kiss and Strunk 2006) with a model of English that
comes with the package, in pure Python. It was chosen over blingfire and syntok after measuring all
three (docs/decisions.md). Only the places it finds are used, never its strings, so that whatever it
does, no character but white space is lost. It is slow on very long runs without a space, by the
square of their length; such a run is no sentence and is never shown to it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby

from packhorse.errors import MissingExtra

LONGEST_WORD = 1000

_BLANK_LINE = re.compile(r"\n\s*\n")


def split(text: str) -> list[str]:
    """The sentences, each on one line with single spaces; a blank line always ends one."""
    found: list[str] = []
    for paragraph in _BLANK_LINE.split(text):
        words = paragraph.split()
        if max(map(len, words), default=0) <= LONGEST_WORD:
            found += _sentences(" ".join(words))
            continue
        for too_long, run in groupby(words, key=lambda word: len(word) > LONGEST_WORD):
            run = list(run)
            found += run if too_long else _sentences(" ".join(run))
    return found


def _sentences(text: str) -> Iterator[str]:
    try:
        import nupunkt
    except ImportError as error:
        raise MissingExtra("nupunkt", "data") from error

    inner = [start for start, _ in nupunkt.sent_spans(text)][1:]
    for start, end in zip([0, *inner], [*inner, len(text)], strict=True):
        if sentence := text[start:end].strip():
            yield sentence
