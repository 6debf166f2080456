"""Retrieval: collections of documents and queries, and the measures of a ranking.

A folder has BEIR's layout: `corpus.jsonl` (_id, title, text), `queries.jsonl` (_id, text) and
`qrels/SPLIT.tsv` (query-id, corpus-id, score). A file is SQuAD, turned into such a collection: each
question looks for its paragraph among all paragraphs. All documents are kept in memory, since each
of them is encoded anyway. A judgment about an unknown document or query is refused: it would count
as never found, and a score that is too low looks like any other.

The measures are those of trec_eval, and so of pytrec_eval, BEIR and MTEB. A document with a grade
above 0 is relevant. The gain in nDCG is the grade itself and its discount log2(rank + 1); the ideal
ranking has all judged documents, retrieved or not. For average precision, relevant documents that
were not retrieved add nothing. A query without relevant documents has 0 everywhere. The reciprocal
rank is cut at 10, as in BEIR and MS MARCO; trec_eval does not cut it.

Thakur et al., "BEIR" (2021); Järvelin and Kekäläinen (2002);
https://github.com/usnistgov/trec_eval.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from packhorse.data.delimited import CsvFormat
from packhorse.data.tables import TableRow, read_rows
from packhorse.data.tasks.squad import SquadQuestion, read_squad
from packhorse.errors import InputError

CORPUS = "corpus.jsonl"
QUERIES = "queries.jsonl"
JUDGMENTS = "qrels"
COLUMNS = ("query-id", "corpus-id", "score")
DEFAULT_SPLIT = "test"  # if there are several

DEPTH = 1000  # documents of a ranking that count, as is customary
CUT = 10
RECALLS = (1, 10, 100)


# Collections -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Collection:
    """Texts by id; every query has judgments, one grade per document (0: not relevant)."""

    documents: dict[str, str]
    queries: dict[str, str]
    judgments: dict[str, dict[str, int]]

    def first(self, queries: int | None) -> Collection:
        """The collection with only the first queries, but all documents."""
        selected = dict(list(self.queries.items())[:queries])
        judgments = {id: self.judgments[id] for id in selected}
        return Collection(self.documents, selected, judgments)


def read_collection(path: str | Path, split: str | None = None) -> Collection:
    """Read BEIR's folder with the judgments of `split` (its only one, or test), or a SQuAD file."""
    folder = Path(path)
    if folder.is_dir():
        return _read_beir(folder, split)
    if split is not None:
        raise InputError(f"{path}: a file has no splits; only a folder in BEIR's layout has")
    return from_questions(read_squad(path), str(path))


def from_questions(questions: Iterable[SquadQuestion], name: str = "SQuAD") -> Collection:
    """A collection in which each answerable question looks for its paragraph."""
    ids: dict[str, str] = {}  # of paragraphs, by their text
    queries: dict[str, str] = {}
    judgments: dict[str, dict[str, int]] = {}
    for question in questions:
        paragraph = ids.setdefault(question.context, f"paragraph-{len(ids)}")
        if not question.impossible:
            queries[question.id] = question.question
            judgments[question.id] = {paragraph: 1}
    if not queries:
        raise InputError(f"{name}: there is no question with an answer in it")
    return Collection({id: text for text, id in ids.items()}, queries, judgments)


def _read_beir(folder: Path, split: str | None) -> Collection:
    documents = dict(_read_texts(folder / CORPUS, titled=True))
    queries = dict(_read_texts(folder / QUERIES))
    path = _judgments_path(folder, split)
    judgments: dict[str, dict[str, int]] = {}
    for row in read_rows(path, lambda available, place: COLUMNS, CsvFormat(quote="")):
        query, document, grade = _judgment(row)
        if query not in queries:
            raise InputError(f"{row.place}: {query!r:.80} is not in {folder / QUERIES}")
        if document not in documents:
            raise InputError(f"{row.place}: {document!r:.80} is not in {folder / CORPUS}")
        judgments.setdefault(query, {})[document] = grade
    if not judgments:
        raise InputError(f"{path} holds no judgments")
    judged = {id: text for id, text in queries.items() if id in judgments}
    return Collection(documents, judged, {id: judgments[id] for id in judged})


def _judgments_path(folder: Path, split: str | None) -> Path:
    splits = {path.stem: path for path in sorted((folder / JUDGMENTS).glob("*.tsv"))}
    if split is None:
        split = next(iter(splits)) if len(splits) == 1 else DEFAULT_SPLIT
    if split not in splits:
        names = ", ".join(splits) or "none"
        raise InputError(f"{folder / JUDGMENTS}: no {split}.tsv; splits that are there: {names}")
    return splits[split]


def _read_texts(path: Path, titled: bool = False) -> Iterator[tuple[str, str]]:
    """Ids and texts; the title, if there is one, is put before the text."""
    seen: set[str] = set()
    for row in read_rows(path, lambda available, place: available):
        if not row.cells:
            continue
        id = _text_cell(row, "_id")
        text = _text_cell(row, "text")
        if id in seen:
            raise InputError(f"{row.place}: two have the id {id!r:.80}")
        seen.add(id)
        title = row.cells.get("title") if titled else None
        yield id, f"{title} {text}".strip() if isinstance(title, str) else text
    if not seen:
        raise InputError(f"{path} holds no texts")


def _text_cell(row: TableRow, name: str) -> str:
    cell: Any = row.cells.get(name)
    if not isinstance(cell, str):
        problem = "is missing" if cell is None else f"is {cell!r:.40}, not a text"
        raise InputError(f"{row.place}: {name!r} {problem}; BEIR has it in every line")
    return cell


def _judgment(row: TableRow) -> tuple[str, str, int]:
    if missing := [name for name in COLUMNS if name not in row.cells]:
        raise InputError(f"{row.place}: no column {missing[0]!r}; BEIR has {', '.join(COLUMNS)}")
    query, document, grade = (str(row.cells[name]) for name in COLUMNS)
    try:
        return query, document, int(grade)
    except ValueError as error:
        raise InputError(f"{row.place}: the score {grade!r:.40} is not a whole number") from error


# Measures ----------------------------------------------------------------------------------------


def measures(ranking: Sequence[str], grades: Mapping[str, int]) -> dict[str, float]:
    """The measures of one query, from its ranked documents, best first, and its judgments."""
    gains = np.array([max(grades.get(id, 0), 0) for id in ranking], np.float64)
    ideal = -np.sort(-np.array([max(grade, 0) for grade in grades.values()], np.float64))
    relevant = int((ideal > 0).sum())
    hits = gains > 0
    precisions = hits.cumsum() / np.arange(1, len(hits) + 1)
    values = {
        f"ndcg@{CUT}": _share(_discounted(gains), _discounted(ideal)),
        "map": _share(float(precisions[hits].sum()), relevant),
        f"mrr@{CUT}": 1 / (1 + int(hits[:CUT].argmax())) if hits[:CUT].any() else 0.0,
    }
    for k in RECALLS:
        values[f"recall@{k}"] = _share(int(hits[:k].sum()), relevant)
    return values


def averages(queries: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each measure over all queries."""
    rows = list(queries)
    return {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}


def _discounted(gains: np.ndarray) -> float:
    best = gains[:CUT]
    return float((best / np.log2(np.arange(2, len(best) + 2))).sum())


def _share(part: float, whole: float) -> float:
    return float(part / whole) if whole else 0.0
