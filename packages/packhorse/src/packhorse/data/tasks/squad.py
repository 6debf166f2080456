"""Files of tasks with known answers, and of predictions for them: so far SQuAD, v1.1 and v2.0.

A `Dataset` has the columns that the hub's SQuAD has (id, title, context, question, answers). A file
is taken for what it holds, not for its name: JSON, or JSON in gzip or in a zip. It is parsed
whole (the largest SQuAD is 42 MB) up to a limit that a small archive cannot exceed by unpacking
into a large one. All that a score depends on is checked, and a message names file and question.
Only whether an answer lies where the file says is left to the caller (`misplaced`): no score uses
the place, and published files exist that count in other units than code points.

Follows https://rajpurkar.github.io/SQuAD-explorer: the dataset, and `{id: text}` for predictions.
"""

from __future__ import annotations

import gzip
import json
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from packhorse.atomic import new_file
from packhorse.data.tables.reading import Source, name_of, open_source, read_rows
from packhorse.errors import InputError

LIMIT = 256 << 20  # bytes of JSON
ARCHIVE_ERRORS = zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, UnicodeDecodeError


class Gold(NamedTuple):
    """An answer that counts as right, and the code point of the context at which it begins."""

    text: str
    start: int


@dataclass(frozen=True, slots=True)
class Question:
    """A question about a context, and what people answered: nothing where it is impossible."""

    id: str
    question: str
    context: str
    answers: tuple[Gold, ...]
    impossible: bool = False
    article: int = 0  # by its number in the file: what is asked of one must not be split

    def misplaced(self) -> list[Gold]:
        """The answers that do not stand in the context where they should."""
        return [gold for gold in self.answers if not self.context.startswith(*gold)]


def read_squad(source: Source) -> Iterator[Question]:
    """Each question in its order, of SQuAD's file or of a `Dataset` with the columns of the hub's.

    v2.0 is what has `is_impossible`, and in a `Dataset` a question without answers.
    """
    name, source = name_of(source) or "the dataset", open_source(source)
    found = _of_file(source) if isinstance(source, str | Path) else _of_rows(source, name)
    seen: set[str] = set()
    for question in found:
        if question.id in seen:
            raise InputError(f"{name}, question {question.id!r}: two have this id")
        seen.add(question.id)
        yield question


def _of_file(path: str | Path) -> Iterator[Question]:
    document = _parsed(Path(path))
    for a, article in enumerate(_get(document, "data", list, str(path))):
        where = f"{path}, article {a}"
        for p, paragraph in enumerate(_get(article, "paragraphs", list, where)):
            where = f"{path}, article {a}, paragraph {p}"
            context = _get(paragraph, "context", str, where)
            for each in _get(paragraph, "qas", list, where):
                yield _question(each, context, path, where, a)


def _of_rows(source: Source, name: str) -> Iterator[Question]:
    """A row a question; those of one title, or else of one context, are one article's."""
    articles: dict[str, int] = {}
    for row in read_rows(source, name=name):
        cells = dict(row.cells)
        context = _get(cells, "context", str, row.where)
        article = articles.setdefault(str(cells.get("title") or context), len(articles))
        answers = _get(cells, "answers", dict, row.where)
        texts, starts = (_get(answers, key, list, row.where) for key in ("text", "answer_start"))
        if len(texts) != len(starts):
            raise InputError(f"{row.where}: {len(texts)} answers and {len(starts)} places")
        pairs = zip(texts, starts, strict=True)
        cells["answers"] = [{"text": text, "answer_start": start} for text, start in pairs]
        cells["is_impossible"] = not texts
        yield _question(cells, context, name, row.where, article)


def _question(found: Any, context: str, path: str | Path, where: str, article: int) -> Question:
    identity = _get(found, "id", str, f"{where}, a question")
    where = f"{path}, question {identity!r}"
    impossible = "is_impossible" in found and _get(found, "is_impossible", bool, where)
    golds = tuple(_gold(each, where) for each in _get(found, "answers", list, where))
    if impossible == bool(golds):
        what = "impossible, yet has answers" if golds else "without an answer, yet not impossible"
        raise InputError(f"{where}: {what}; it cannot be scored")
    asked = _get(found, "question", str, where)
    return Question(identity, asked, context, golds, impossible, article)


def _gold(found: Any, where: str) -> Gold:
    gold = Gold(_get(found, "text", str, where), _get(found, "answer_start", int, where))
    if not gold.text or gold.start < 0:
        raise InputError(f"{where}: not an answer and its place: {found!r:.80}")
    return gold


def read_predictions(path: str | Path) -> dict[str, str]:
    """The text that was predicted for each id."""
    found = _parsed(Path(path))
    if not isinstance(found, dict):
        raise InputError(f"{path}: not predictions; those are a JSON object of id and text")
    for identity, text in found.items():
        if not isinstance(text, str):
            raise InputError(f"{path}, question {identity!r}: not a text but {text!r:.40}")
    return found


def write_predictions(path: str | Path, predictions: Mapping[str, str]) -> None:
    """Write `{id: text}` whole or not at all; what was there before goes."""
    with new_file(Path(path)) as file:
        file.write(json.dumps(predictions, indent=0).encode())


def _get(holder: Any, key: str, kind: type, where: str) -> Any:
    found = holder.get(key) if isinstance(holder, dict) else None
    # `type`, because True is an int as well.
    if type(found) is not kind:
        have = "is missing" if found is None else f"is {found!r:.40}"
        raise InputError(f"{where}: {key!r} {have}; a SQuAD file has a {kind.__name__} there")
    return found


def _parsed(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            text = _unpacked(file, path)
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


def _unpacked(file: BinaryIO, path: Path) -> bytes:
    """Up to a byte more than the limit, so that the excess shows."""
    magic = file.read(4)
    file.seek(0)
    if magic.startswith(b"\x1f\x8b"):
        return gzip.GzipFile(fileobj=file).read(LIMIT + 1)
    if magic.startswith(b"PK"):
        with zipfile.ZipFile(file) as archive, archive.open(_member(archive, path)) as member:
            return member.read(LIMIT + 1)
    return file.read(LIMIT + 1)


def _member(archive: zipfile.ZipFile, path: Path) -> zipfile.ZipInfo:
    """The one JSON file there is; some systems add files of their own about it."""
    found = [
        info
        for info in archive.infolist()
        if info.filename.endswith(".json") and not info.filename.startswith("__MACOSX/")
    ]
    if len(found) != 1:
        raise InputError(f"{path}: {len(found)} JSON files in the archive; one is expected")
    if found[0].compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise InputError(f"{path}: compressed in an unusual way; zip it again (deflate)")
    return found[0]
