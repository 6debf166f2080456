"""Collections to search: documents, queries, and which documents answer which query.

A folder is read as BEIR lays it out: `corpus.jsonl` (_id, title, text), `queries.jsonl` (_id, text)
and `qrels/SPLIT.tsv` (query-id, corpus-id, score). A file is SQuAD, made into such a collection: a
question looks for its paragraph among all of them. Documents are held whole, since each of them is
encoded anyway.

A judgement about a document or a query that is not there is refused: it would count as never found,
and a score that is too low looks like any other.

Thakur et al., "BEIR" (2021).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packhorse.data.tables.reading import Form, Row, read_rows
from packhorse.data.tasks.squad import Question, read_squad
from packhorse.errors import InputError

CORPUS, QUERIES, JUDGEMENTS = "corpus.jsonl", "queries.jsonl", "qrels"
COLUMNS = ("query-id", "corpus-id", "score")
USUAL = "test"  # the split, where there are several


@dataclass(frozen=True, slots=True)
class Collection:
    """Texts by their ids; every query has judgements, a grade a document (0: not an answer)."""

    documents: dict[str, str]
    queries: dict[str, str]
    judgements: dict[str, dict[str, int]]

    def first(self, queries: int | None) -> Collection:
        """With so many queries only, among all documents."""
        kept = dict(list(self.queries.items())[:queries])
        return Collection(self.documents, kept, {id: self.judgements[id] for id in kept})


def read_collection(path: str | Path, split: str | None = None) -> Collection:
    """BEIR's folder, with the judgements of `split` (its only one, or test), or a SQuAD file."""
    folder = Path(path)
    if folder.is_dir():
        return _beir(folder, split)
    if split is not None:
        raise InputError(f"{path}: a file has no splits; they are of a folder as BEIR lays it out")
    return of_questions(read_squad(path), str(path))


def of_questions(questions: Iterable[Question], name: str = "SQuAD") -> Collection:
    """Each answerable question looks for its paragraph among those of all."""
    documents: dict[str, str] = {}  # ids by text, until it is complete
    queries, judgements = {}, {}
    for each in questions:
        place = documents.setdefault(each.context, f"paragraph-{len(documents)}")
        if not each.impossible:
            queries[each.id], judgements[each.id] = each.question, {place: 1}
    if not queries:
        raise InputError(f"{name}: there is no question with an answer in it")
    return Collection({id: text for text, id in documents.items()}, queries, judgements)


def _beir(folder: Path, split: str | None) -> Collection:
    documents = dict(_texts(folder / CORPUS, titled=True))
    queries = dict(_texts(folder / QUERIES))
    place = _split(folder, split)
    judgements: dict[str, dict[str, int]] = {}
    for row in read_rows(place, lambda have, where: COLUMNS, Form(quotes=False)):
        query, document, grade = _judgement(row)
        for id, known, home in ((query, queries, QUERIES), (document, documents, CORPUS)):
            if id not in known:
                raise InputError(f"{row.where}: {id!r:.80} is not in {folder / home}")
        judgements.setdefault(query, {})[document] = grade
    if not judgements:
        raise InputError(f"{place} holds no judgements")
    asked = {id: text for id, text in queries.items() if id in judgements}
    return Collection(documents, asked, {id: judgements[id] for id in asked})


def _split(folder: Path, split: str | None) -> Path:
    """The file of judgements that is meant."""
    found = {path.stem: path for path in sorted((folder / JUDGEMENTS).glob("*.tsv"))}
    wanted = split or (next(iter(found)) if len(found) == 1 else USUAL)
    if wanted not in found:
        have = ", ".join(found) or "none"
        raise InputError(f"{folder / JUDGEMENTS}: no {wanted}.tsv; splits that are there: {have}")
    return found[wanted]


def _texts(path: Path, titled: bool = False) -> Iterator[tuple[str, str]]:
    """Ids and texts; the title, where there is one, goes before the text."""
    seen: set[str] = set()
    for row in read_rows(path, lambda have, where: have):
        if not row.cells:
            continue
        id, text = _cell(row, "_id"), _cell(row, "text")
        if id in seen:
            raise InputError(f"{row.where}: two have the id {id!r:.80}")
        seen.add(id)
        title = row.cells.get("title") if titled else None
        yield id, f"{title} {text}".strip() if isinstance(title, str) else text
    if not seen:
        raise InputError(f"{path} holds no texts")


def _cell(row: Row, name: str) -> str:
    found: Any = row.cells.get(name)
    if not isinstance(found, str):
        have = "is missing" if found is None else f"is {found!r:.40}, not a text"
        raise InputError(f"{row.where}: {name!r} {have}; BEIR has it in every line")
    return found


def _judgement(row: Row) -> tuple[str, str, int]:
    if missing := [name for name in COLUMNS if name not in row.cells]:
        raise InputError(f"{row.where}: no column {missing[0]!r}; BEIR has {', '.join(COLUMNS)}")
    query, document, grade = (str(row.cells[name]) for name in COLUMNS)
    try:
        return query, document, int(grade)
    except ValueError as error:
        raise InputError(f"{row.where}: the score {grade!r:.40} is not a whole number") from error
