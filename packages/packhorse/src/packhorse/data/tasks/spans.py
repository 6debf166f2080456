"""Questions about a context as targets for training: the tokens of the answer in each window.

A context too long for one sequence is cut into overlapping windows, as when the model is asked
(`Encoder.answer`). A window that holds the whole answer learns its first and last token, any other
learns "no answer" at token 0. Of several gold answers the first is used that can be taught exactly,
else the first that can be taught at all.

An answer that cannot be taught as it is, is told, never passed over: where it begins or ends inside
a token ("1990" of "1990s") the tokens around it are taught and counted as widened; where it does
not stand in the context, has no token, or fits no window whole, the question is left out by name:
teaching "no answer" there would be wrong.

Follows Devlin et al., "BERT" (2019), for SQuAD v1.1 and v2.0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from packhorse.data.tasks.squad import Gold, Question
from packhorse.data.tasks.targets import Example, Span, Task
from packhorse.errors import InputError
from packhorse.tokens import Encoding, Tokenizer

QUESTIONS_A_CHUNK = 1024
NOT_HERE = Span(0, 0)


@dataclass(frozen=True, slots=True)
class Report:
    """What became of the questions."""

    questions: int
    windows: int
    answered: int  # windows that hold their answer
    widened: tuple[str, ...]  # ids of questions whose answer ends inside a token
    dropped: dict[str, str]  # ids of questions that are not taught, and why


class _Place(NamedTuple):
    """The answer's tokens among all of the context, and whether they are no more than it."""

    first: int
    last: int
    exact: bool


def span_task(
    questions: Sequence[Question],
    tokenizer: Tokenizer,
    max_length: int | None = None,
    stride: int | None = None,
) -> tuple[Task, Report]:
    """An example for each window; lengths and stride are those of `Tokenizer.windows`."""
    examples: list[Example] = []
    widened: list[str] = []
    dropped: dict[str, str] = {}
    for question, windows in _windowed(questions, tokenizer, max_length, stride):
        place = None if question.impossible else _locate(question, windows)
        if isinstance(place, str):
            dropped[question.id] = place
            continue
        if place and not place.exact:
            widened.append(question.id)
        examples += [Example((window,), _within(window, place)) for window in windows]
    answered = sum(example.target != NOT_HERE for example in examples)
    report = Report(len(questions), len(examples), answered, tuple(widened), dropped)
    return Task(examples, "span"), report


def _windowed(
    questions: Sequence[Question],
    tokenizer: Tokenizer,
    max_length: int | None,
    stride: int | None,
) -> Iterator[tuple[Question, list[Encoding]]]:
    for begin in range(0, len(questions), QUESTIONS_A_CHUNK):
        chunk = questions[begin : begin + QUESTIONS_A_CHUNK]
        pairs = [(question.question, question.context) for question in chunk]
        try:
            found = tokenizer.windows(pairs, max_length, stride)
        except InputError as error:
            ids = f"{chunk[0].id} to {chunk[-1].id}"
            raise InputError(f"among the questions {ids}: {error}") from error
        yield from zip(chunk, found, strict=True)


def _locate(question: Question, windows: Sequence[Encoding]) -> _Place | str:
    """Where an answer is, one that is exact if there is any; or why none can be taught."""
    offsets = _offsets(windows)
    tried = [_try(gold, question.context, offsets, windows) for gold in question.answers]
    places = [place for place in tried if isinstance(place, _Place)]
    return next((place for place in places if place.exact), *places[:1] or tried[:1])


def _try(
    gold: Gold, context: str, offsets: np.ndarray, windows: Sequence[Encoding]
) -> _Place | str:
    if not context.startswith(*gold):
        return f"{gold.text!r:.40} does not stand at {gold.start}"
    text = gold.text.strip()
    begin = gold.start + gold.text.find(text)
    first = int(np.searchsorted(offsets[:, 1], begin, "right"))
    last = int(np.searchsorted(offsets[:, 0], begin + len(text), "left")) - 1
    if first > last or not text:
        return f"{gold.text!r:.40} has no token"
    around = context[offsets[first, 0] : offsets[last, 1]]
    place = _Place(first, last, around.strip() == text)
    whole = any(_holds(window, place) for window in windows)
    return place if whole else f"{gold.text!r:.40} fits no window whole"


def _offsets(windows: Sequence[Encoding]) -> np.ndarray:
    """Of every token of the context, from the windows that share it: [n, 2]."""
    offsets = np.zeros((max(w.start + _size(w) for w in windows), 2), np.int64)
    for window in windows:
        offsets[window.start : window.start + _size(window)] = window.offsets[window.spans[-1]]
    return offsets


def _size(window: Encoding) -> int:
    return window.spans[-1].stop - window.spans[-1].start


def _holds(window: Encoding, place: _Place) -> bool:
    return window.start <= place.first and place.last < window.start + _size(window)


def _within(window: Encoding, place: _Place | None) -> Span:
    if place is None or not _holds(window, place):
        return NOT_HERE
    shift = window.spans[-1].start - window.start
    return Span(place.first + shift, place.last + shift)
