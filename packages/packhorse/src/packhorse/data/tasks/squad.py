"""SQuAD v1.1 and v2.0: questions about a context, predictions for them, and the official scores.

    questions = list(read_squad("dev-v2.0.json"))
    score(questions, marks(questions, {"id": ["a predicted answer"]}))["all"].f1

A `Dataset` has the columns of the hub's SQuAD (id, title, context, question, answers). The format
of a file is detected from its content, not its name: JSON, or JSON in gzip or in a zip. It is
parsed as a whole (the largest SQuAD is 42 MB) up to a limit, so that a small archive cannot unpack
into a huge one. Everything that a score depends on is checked, and messages name file and question.
Only whether an answer stands at the stated position is left to the caller (`misplaced`): no score
uses the position, and some published files count in other units than code points.

Scores are exact match and F1 as the official scripts define them. Texts are compared without case,
ASCII punctuation, English articles and extra blanks; a question counts with its best gold answer.
The two versions differ in two details, which are followed: gold answers that normalize to nothing
(v1.1's dev set has three) count for v1.1's exact match alone; and in v2.0 "no answer" is the right
answer to an impossible question. Where the scripts are inconsistent this is simpler: a question
without a prediction counts as wrong (v2.0's script drops it from the mean), and the best threshold
is one that can be realized, also among ties.

Follows https://rajpurkar.github.io/SQuAD-explorer: the dataset, and `{id: text}` for predictions.
Rajpurkar et al., "SQuAD" (2016) and "Know What You Don't Know" (2018).
"""

from __future__ import annotations

import gzip
import json
import re
import string
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from packhorse.atomic import new_file
from packhorse.data.tables import TableSource, name_of, open_source, read_rows
from packhorse.errors import InputError

LIMIT = 256 << 20  # bytes of JSON
ARCHIVE_ERRORS = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, UnicodeDecodeError)

ARTICLE = re.compile(r"\b(a|an|the)\b")
NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


class Gold(NamedTuple):
    """A right answer, and the code point of the context at which it begins."""

    text: str
    start: int


@dataclass(frozen=True, slots=True)
class SquadQuestion:
    """A question about a context and its right answers; none if it is impossible."""

    id: str
    question: str
    context: str
    answers: tuple[Gold, ...]
    impossible: bool = False
    article: int = 0  # number in the file; questions of one article must not be separated

    def misplaced(self) -> list[Gold]:
        """The answers that do not stand at their position in the context."""
        return [gold for gold in self.answers if not self.context.startswith(*gold)]


# Files -------------------------------------------------------------------------------------------


def read_squad(source: TableSource) -> Iterator[SquadQuestion]:
    """Read the questions of a SQuAD file, or of a `Dataset` with the columns of the hub's.

    Questions are v2.0 if they have `is_impossible`, or in a `Dataset` if they have no answers.
    """
    name = name_of(source) or "the dataset"
    source = open_source(source)
    is_file = isinstance(source, str | Path)
    questions = _file_questions(source) if is_file else _table_questions(source, name)
    seen: set[str] = set()
    for question in questions:
        if question.id in seen:
            raise InputError(f"{name}, question {question.id!r}: two have this id")
        seen.add(question.id)
        yield question


def _file_questions(path: str | Path) -> Iterator[SquadQuestion]:
    document = _read_json(Path(path))
    for a, article in enumerate(_get(document, "data", list, str(path))):
        place = f"{path}, article {a}"
        for p, paragraph in enumerate(_get(article, "paragraphs", list, place)):
            place = f"{path}, article {a}, paragraph {p}"
            context = _get(paragraph, "context", str, place)
            for question in _get(paragraph, "qas", list, place):
                yield _question(question, context, path, place, a)


def _table_questions(source: TableSource, name: str) -> Iterator[SquadQuestion]:
    """One question per row; rows with one title, or else one context, are of one article."""
    articles: dict[str, int] = {}
    for row in read_rows(source, name=name):
        cells = dict(row.cells)
        context = _get(cells, "context", str, row.place)
        article = articles.setdefault(str(cells.get("title") or context), len(articles))
        answers = _get(cells, "answers", dict, row.place)
        texts = _get(answers, "text", list, row.place)
        starts = _get(answers, "answer_start", list, row.place)
        if len(texts) != len(starts):
            raise InputError(f"{row.place}: {len(texts)} answers and {len(starts)} places")
        pairs = zip(texts, starts, strict=True)
        cells["answers"] = [{"text": text, "answer_start": start} for text, start in pairs]
        cells["is_impossible"] = not texts
        yield _question(cells, context, name, row.place, article)


def _question(
    fields: Any, context: str, path: str | Path, place: str, article: int
) -> SquadQuestion:
    identity = _get(fields, "id", str, f"{place}, a question")
    place = f"{path}, question {identity!r}"
    impossible = "is_impossible" in fields and _get(fields, "is_impossible", bool, place)
    golds = tuple(_gold(answer, place) for answer in _get(fields, "answers", list, place))
    if impossible and golds:
        raise InputError(f"{place}: impossible, yet has answers; it cannot be scored")
    if not impossible and not golds:
        raise InputError(f"{place}: without an answer, yet not impossible; it cannot be scored")
    text = _get(fields, "question", str, place)
    return SquadQuestion(identity, text, context, golds, impossible, article)


def _gold(fields: Any, place: str) -> Gold:
    gold = Gold(_get(fields, "text", str, place), _get(fields, "answer_start", int, place))
    if not gold.text or gold.start < 0:
        raise InputError(f"{place}: not an answer and its place: {fields!r:.80}")
    return gold


def read_predictions(path: str | Path) -> dict[str, str]:
    """Read the predicted text for each id."""
    predictions = _read_json(Path(path))
    if not isinstance(predictions, dict):
        raise InputError(f"{path}: not predictions; those are a JSON object of id and text")
    for identity, text in predictions.items():
        if not isinstance(text, str):
            raise InputError(f"{path}, question {identity!r}: not a text but {text!r:.40}")
    return predictions


def write_predictions(path: str | Path, predictions: Mapping[str, str]) -> None:
    """Write `{id: text}`, whole or not at all, in place of an older file."""
    with new_file(Path(path)) as file:
        file.write(json.dumps(predictions, indent=0).encode())


def _get(holder: Any, key: str, kind: type, place: str) -> Any:
    value = holder.get(key) if isinstance(holder, dict) else None
    # Compared by `type`, because True is an instance of int.
    if type(value) is not kind:
        problem = "is missing" if value is None else f"is {value!r:.40}"
        raise InputError(f"{place}: {key!r} {problem}; a SQuAD file has a {kind.__name__} there")
    return value


def _read_json(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            text = _unpack(file, path)
    except ARCHIVE_ERRORS as error:
        raise InputError(f"{path}: a damaged or encrypted archive: {error}") from error
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error
    if len(text) > LIMIT:
        raise InputError(f"{path}: more than {LIMIT >> 20} MiB of JSON; divide it")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not JSON: {error}") from error


def _unpack(file: BinaryIO, path: Path) -> bytes:
    """The content, at most one byte more than the limit, which then shows that it is exceeded."""
    magic = file.read(4)
    file.seek(0)
    if magic.startswith(b"\x1f\x8b"):
        return gzip.GzipFile(fileobj=file).read(LIMIT + 1)
    if magic.startswith(b"PK"):
        with zipfile.ZipFile(file) as archive, archive.open(_member(archive, path)) as member:
            return member.read(LIMIT + 1)
    return file.read(LIMIT + 1)


def _member(archive: zipfile.ZipFile, path: Path) -> zipfile.ZipInfo:
    """The only JSON file of an archive; macOS adds files of its own, which do not count."""
    members = [
        info
        for info in archive.infolist()
        if info.filename.endswith(".json") and not info.filename.startswith("__MACOSX/")
    ]
    if len(members) != 1:
        raise InputError(f"{path}: {len(members)} JSON files in the archive; one is expected")
    if members[0].compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise InputError(f"{path}: compressed in an unusual way; zip it again (deflate)")
    return members[0]


# Scores ------------------------------------------------------------------------------------------


class Mark(NamedTuple):
    """How right one prediction is, 0 to 1."""

    exact_match: float
    f1: float


@dataclass(frozen=True, slots=True)
class Score:
    """The mean of the marks of some questions, in percent."""

    exact_match: float
    f1: float
    questions: int


class Threshold(NamedTuple):
    """The best mean, in percent, and by how much "no answer" must beat the best span for it."""

    score: float
    threshold: float


def normalize_answer(text: str) -> str:
    """The text without case, punctuation, articles and extra blanks, for comparison."""
    return " ".join(ARTICLE.sub(" ", text.lower().translate(NO_PUNCTUATION)).split())


def f1(prediction: Sequence[str], gold: Sequence[str]) -> float:
    """The harmonic mean of precision and recall of words; without words, whether both have none."""
    if not prediction or not gold:
        return float(prediction == gold)
    common = (Counter(prediction) & Counter(gold)).total()
    return 2 * common / (len(prediction) + len(gold))


def mark(prediction: str, golds: Sequence[str], v2: bool = False) -> Mark:
    """The best of each measure over the gold answers; in v2.0, without any, "" is right."""
    predicted = normalize_answer(prediction)
    normalized = [normalize_answer(gold) for gold in golds]
    not_empty = [gold for gold in normalized if gold]
    if v2:
        not_empty = not_empty or [""]
        normalized = not_empty
    best = max((f1(predicted.split(), gold.split()) for gold in not_empty), default=0.0)
    return Mark(float(predicted in normalized), best)


def is_v2(questions: Sequence[SquadQuestion]) -> bool:
    """Whether any question is impossible."""
    return any(question.impossible for question in questions)


def marks(questions: Sequence[SquadQuestion], predicted: Mapping[str, Sequence[str]]) -> list[Mark]:
    """For each question the best mark of its predicted texts; 0 without any."""
    v2 = is_v2(questions)
    best_marks: list[Mark] = []
    for question in questions:
        golds = [gold.text for gold in question.answers]
        best = Mark(0.0, 0.0)
        for text in predicted.get(question.id, ()):
            exact_match, words = mark(text, golds, v2)
            best = Mark(max(best.exact_match, exact_match), max(best.f1, words))
        best_marks.append(best)
    return best_marks


def score(questions: Sequence[SquadQuestion], marks: Sequence[Mark]) -> dict[str, Score]:
    """The mean of all marks; in v2.0 also of questions with and of those without an answer."""
    parts = {"all": list(marks)}
    if is_v2(questions):
        pairs = list(zip(questions, marks, strict=True))
        parts["has_answer"] = [mark for question, mark in pairs if not question.impossible]
        parts["no_answer"] = [mark for question, mark in pairs if question.impossible]
    return {name: _mean(part) for name, part in parts.items()}


def _mean(marks: Sequence[Mark]) -> Score:
    if not marks:
        return Score(0.0, 0.0, 0)
    exact_match, words = (100 * float(np.mean(column)) for column in zip(*marks, strict=True))
    return Score(exact_match, words, len(marks))


def best_threshold(
    marks: Sequence[float], impossible: Sequence[bool], nulls: Sequence[float]
) -> Threshold:
    """The threshold with the best mean, if questions whose null is above it stay unanswered.

    marks: of the answers. nulls: by how much "no answer" beats each answer.
    """
    order = np.argsort(nulls, kind="stable")
    null = np.asarray(nulls)[order]
    refused = np.asarray(impossible, float)[order]
    gain = np.asarray(marks, float)[order] - refused  # of answering instead of refusing
    total = refused.sum() + np.concatenate([[0.0], np.cumsum(gain)])
    # No threshold can separate questions with equal nulls.
    possible = np.append(np.append(True, null[1:] != null[:-1]), True)
    best = int(np.argmax(np.where(possible, total, -np.inf)))
    threshold = null[best - 1] if best else np.nextafter(null[0], -np.inf)
    return Threshold(100 * float(total[best]) / len(null), float(threshold))
