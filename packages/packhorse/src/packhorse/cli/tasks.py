"""What `packhorse run` can ask of a model: for each task its rows, their shape, and their looks.

A row is a plain dict, the same on the screen, in JSON and in a file; `shape` tells its types to a
format that must know them beforehand. States and vectors stay arrays until someone writes them.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from packhorse.cli.console import short, table
from packhorse.data.tables import Record
from packhorse.errors import InputError

if TYPE_CHECKING:
    from packhorse.data.output import Row, Shape
    from packhorse.runtime.encoder import Encoder
    from packhorse.runtime.tasks import TaskSpec
    from packhorse.tokens import Text

EDGE = 3  # numbers and tokens shown at each end of a long row


@dataclass(frozen=True, slots=True)
class Ask:
    """What a task may be told besides its texts; each uses what concerns it."""

    query: str | None = None
    prompt: str | None = None
    top_k: int | None = None
    max_length: int | None = None


@dataclass(frozen=True, slots=True)
class Task:
    """One row a text, in the order of the texts (rerank: in the order of the ranking)."""

    rows: Callable[["Encoder", Sequence["Text"], Ask], list["Row"]]
    shape: Callable[["Encoder"], "Shape"]
    show: Callable[[Sequence["Row"]], None]
    chunk: int = 2048  # texts a chunk of a file, so that its results fit in memory


def rows_of(
    task: str, records: Sequence[Record], encoder: "Encoder", ask: Ask, copies: int = 1
) -> list[tuple[Record, "Row"]]:
    """Each text's row; with copies, that of the first of so many that made a batch."""
    texts = prepared(task, [record.text for record in records], ask.query)
    find = TASKS[task].rows
    if copies == 1:
        rows = find(encoder, texts, ask)
    else:
        # One batch must be one batch, whatever budget the encoder would cut it by.
        encoder = replace(encoder, budget=max(encoder.budget, copies * encoder.max_length))
        rows = [find(encoder, [text] * copies, ask)[0] for text in texts]
    return [(records[row.get("index", i)], row) for i, row in enumerate(rows)]


def spec_of(task: str) -> "TaskSpec":
    """The task's line in the table of `runtime.tasks`, imported late because it needs numpy."""
    from packhorse.runtime.tasks import TASKS

    return TASKS[task]


def prepared(task: str, texts: Sequence["Text"], query: str | None) -> list["Text"]:
    """The texts as the task takes them: with the query before each, where it takes pairs."""
    pairs = any(isinstance(text, tuple) for text in texts)
    if query is not None and not spec_of(task).takes_query:
        raise InputError(f"--query is for the tasks rerank and answer, not for {task}")
    if pairs and not spec_of(task).takes_pairs:
        raise InputError(f"{task} takes single texts, not pairs")
    if task == "rerank" and query is None:
        raise InputError("rerank needs --query; the texts are its documents")
    if task == "answer" and (query is None) != pairs:
        raise InputError("answer needs --question for its texts, or pairs of question and context")
    if task == "answer":
        return [text if isinstance(text, tuple) else (query or "", text) for text in texts]
    return list(texts)


def _hidden(encoder: "Encoder", texts: Sequence["Text"], ask: Ask) -> list["Row"]:
    found = encoder.hidden(texts, max_length=ask.max_length)
    return [{"tokens": list(h.tokens), "states": h.states, "pooled": h.pooled} for h in found]


def _embed(encoder: "Encoder", texts: Sequence["Text"], ask: Ask) -> list["Row"]:
    vectors = encoder.embed(texts, prompt=ask.prompt, max_length=ask.max_length)
    return [{"vector": vector} for vector in vectors]


def _classify(encoder: "Encoder", texts: Sequence["Text"], ask: Ask) -> list["Row"]:
    return [asdict(found) for found in encoder.classify(texts, max_length=ask.max_length)]


def _rerank(encoder: "Encoder", texts: Sequence["Text"], ask: Ask) -> list["Row"]:
    documents = [str(text) for text in texts]
    found = encoder.rerank(ask.query or "", documents, top_k=ask.top_k, max_length=ask.max_length)
    return [asdict(ranked) for ranked in found]


def _answer(encoder: "Encoder", texts: Sequence["Text"], ask: Ask) -> list["Row"]:
    pairs = [text for text in texts if isinstance(text, tuple)]
    found = encoder.answer(pairs, top_k=ask.top_k or 1, max_length=ask.max_length)
    return [{"answers": [asdict(answer) for answer in answers]} for answers in found]


def _fill(encoder: "Encoder", texts: Sequence["Text"], ask: Ask) -> list["Row"]:
    whole = [str(text) for text in texts]
    found = encoder.fill(whole, top_k=ask.top_k or 5, max_length=ask.max_length)
    return [{"masks": [[asdict(word) for word in mask] for mask in masks]} for masks in found]


def _label(encoder: "Encoder", texts: Sequence["Text"], ask: Ask) -> list["Row"]:
    whole = [str(text) for text in texts]
    found = encoder.label(whole, max_length=ask.max_length)
    return [{"entities": [asdict(entity) for entity in entities]} for entities in found]


def _numbers(values: Any) -> list[str]:
    """The ends of a vector."""
    shown = [f"{float(value):+.4f}" for value in values]
    return shown if len(shown) <= 2 * EDGE else [*shown[:EDGE], "…", *shown[-EDGE:]]


def _places(width: int) -> list[str]:
    """The numbers of the places that `_numbers` shows."""
    every = [str(i) for i in range(width)]
    return every if width <= 2 * EDGE else [*every[:EDGE], "…", *every[-EDGE:]]


def _show_hidden(rows: Sequence["Row"]) -> None:
    for row in rows:
        count, width = row["states"].shape
        pairs = zip(row["tokens"], row["states"], strict=True)
        lines = [[token, *_numbers(state)] for token, state in pairs]
        if count > 4 * EDGE:
            lines[2 * EDGE : -EDGE] = [[f"… {count - 3 * EDGE} more", *[""] * len(lines[0][1:])]]
        if row["pooled"] is not None:
            lines.append(["pooled", *_numbers(row["pooled"])])
        table(f"{short(row['text'])}: [{count}, {width}]", ["token", *_places(width)], lines)


def _show_embed(rows: Sequence["Row"]) -> None:
    width = len(rows[0]["vector"])
    lines = [[short(row["text"]), *_numbers(row["vector"])] for row in rows]
    table(f"vectors: [{len(rows)}, {width}]", ["text", *_places(width)], lines)


def _show_classify(rows: Sequence["Row"]) -> None:
    def others(row: "Row") -> str:
        return ", ".join(f"{k} {v:.3f}" for k, v in list(row["scores"].items())[1:4])

    lines = [[short(row["text"]), row["label"], row["score"], others(row)] for row in rows]
    table(None, ["text", "label", "score", "others"], lines)


def _show_rerank(rows: Sequence["Row"]) -> None:
    lines = [[i, row["score"], row["id"], short(row["text"], 64)] for i, row in enumerate(rows, 1)]
    table(None, ["rank", "score", "id", "document"], lines)


def _show_answer(rows: Sequence["Row"]) -> None:
    lines = [
        [short(row["text"]), short(a["text"], 64), a["score"], f"{a['start']}:{a['end']}"]
        for row in rows
        for a in row["answers"] or [{"text": "", "score": 0.0, "start": 0, "end": 0}]
    ]
    table(None, ["question and context", "answer", "score", "characters"], lines)


def _show_fill(rows: Sequence["Row"]) -> None:
    lines = [
        [i, word["word"], word["score"], short(word["text"], 64)]
        for row in rows
        for i, mask in enumerate(row["masks"], 1)
        for word in mask
    ]
    table(None, ["mask", "word", "score", "text"], lines)


def _show_label(rows: Sequence["Row"]) -> None:
    lines = [
        [short(row["text"]), e["label"], short(e["text"]), e["score"], f"{e['start']}:{e['end']}"]
        for row in rows
        for e in row["entities"]
    ]
    table(None, ["text", "label", "stretch", "score", "characters"], lines)


_SPAN = {"text": str, "start": int, "end": int, "score": float}
_STATES = {"tokens": [str], "states": [["float32"]], "pooled": ["float32"]}
_WORDS = {"masks": [[{"word": str, "score": float, "text": str, "id": int}]]}


def _labels(encoder: "Encoder") -> "Shape":
    return {"label": str, "score": float, "scores": dict.fromkeys(encoder.labels, float)}


TASKS = {
    "hidden": Task(_hidden, lambda encoder: _STATES, _show_hidden, chunk=64),
    "embed": Task(_embed, lambda encoder: {"vector": ["float32"]}, _show_embed),
    "fill": Task(_fill, lambda encoder: _WORDS, _show_fill),
    "answer": Task(_answer, lambda encoder: {"answers": [_SPAN]}, _show_answer),
    "classify": Task(_classify, _labels, _show_classify),
    "rerank": Task(_rerank, lambda encoder: {}, _show_rerank),
    "label": Task(_label, lambda encoder: {"entities": [{"label": str, **_SPAN}]}, _show_label),
}
