"""The tasks of `packhorse run`: for each the rows of results, their types, and how to show them.

A row is a plain dict, the same on the screen, in JSON and in a file; `shape` gives its types to
formats that must know them in advance. States and vectors stay arrays until they are written.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packhorse.cli.console import short, table
from packhorse.data.tables import Record
from packhorse.errors import InputError

if TYPE_CHECKING:
    from packhorse.data.output import Row, Shape
    from packhorse.runtime.encoder import Encoder
    from packhorse.runtime.tasks import Progress, TaskSpec
    from packhorse.tokens.tokenizer import Text

EDGE = 3  # numbers and tokens shown at each end of a long row


@dataclass(frozen=True, slots=True)
class TaskOptions:
    """What a task may need besides its texts; each task uses those that concern it."""

    query: str | None = None
    prompt: str | None = None
    top_k: int | None = None
    max_length: int | None = None
    precision: str = "float32"
    calibration: Path | None = None
    stride: int | None = None
    as_query: bool = False
    raw: bool = False
    progress: "Progress | None" = None  # called after each batch; what it raises ends the call

    @property
    def vector_type(self) -> str:
        """The number type of a vector."""
        return {"binary": "int8", "ubinary": "uint8"}.get(self.precision, self.precision)


@dataclass(frozen=True, slots=True)
class Task:
    """A task: one row per text, in the order of the texts (rerank: of the ranking)."""

    rows: Callable[["Encoder", Sequence["Text"], TaskOptions], list["Row"]]
    shape: Callable[["Encoder", TaskOptions], "Shape"]
    show: Callable[[Sequence["Row"]], None]
    chunk: int = 2048  # texts per chunk of a file, so that their results fit in memory
    accelerator_chunk: int = 0  # on a GPU, which takes a chunk in milliseconds; 0: the same


def result_rows(
    task: str, records: Sequence[Record], encoder: "Encoder", options: TaskOptions, copies: int = 1
) -> list[tuple[Record, "Row"]]:
    """Return the row of each text; with copies, each text runs as a batch of equal copies."""
    texts = prepare_texts(task, [record.text for record in records], options.query)
    encode = TASKS[task].rows
    if copies == 1:
        rows = encode(encoder, texts, options)
    else:
        # The encoder would split a batch above its token budget; the copies must stay one batch.
        encoder = replace(encoder, budget=max(encoder.budget, copies * encoder.max_length))
        rows = [encode(encoder, [text] * copies, options)[0] for text in texts]
    return [(records[row.get("index", i)], row) for i, row in enumerate(rows)]


def spec_of(task: str) -> "TaskSpec":
    """Return the task's line in the table of `runtime.tasks`; imported late, it needs numpy."""
    from packhorse.runtime.tasks import TASKS as SPECS

    return SPECS[task]


def prepare_texts(task: str, texts: Sequence["Text"], query: str | None) -> list["Text"]:
    """Return the texts as the task takes them; answer pairs each with the query."""
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


def _hidden(encoder: "Encoder", texts: Sequence["Text"], options: TaskOptions) -> list["Row"]:
    results = encoder.hidden(texts, max_length=options.max_length, progress=options.progress)
    return [
        {"tokens": list(result.tokens), "states": result.states, "pooled": result.pooled}
        for result in results
    ]


def _embed(encoder: "Encoder", texts: Sequence["Text"], options: TaskOptions) -> list["Row"]:
    vectors = encoder.embed(
        texts, prompt=options.prompt, max_length=options.max_length, progress=options.progress
    )
    if options.precision != "float32":
        from packhorse.runtime.precision import load_ranges, quantize_singly

        ranges = load_ranges(options.calibration) if options.calibration else None
        vectors = quantize_singly(vectors, options.precision, ranges)
    return [{"vector": vector} for vector in vectors]


def _sparse(encoder: "Encoder", texts: Sequence["Text"], options: TaskOptions) -> list["Row"]:
    vectors = encoder.sparse(
        texts,
        query=options.as_query,
        prompt=options.prompt,
        top_k=options.top_k,
        max_length=options.max_length,
        progress=options.progress,
    )
    from packhorse.results import vectors_of, words

    return [
        {
            "indices": vector.indices,
            "weights": vector.weights,
            "words": words(vector, encoder.tokenizer),
        }
        for vector in vectors_of(vectors)
    ]


def _multi(encoder: "Encoder", texts: Sequence["Text"], options: TaskOptions) -> list["Row"]:
    vectors = encoder.multi(
        [str(text) for text in texts],
        query=options.as_query,
        prompt=options.prompt,
        max_length=options.max_length,
        progress=options.progress,
    )
    return [{"vectors": vector} for vector in vectors]


def _classify(encoder: "Encoder", texts: Sequence["Text"], options: TaskOptions) -> list["Row"]:
    results = encoder.classify(texts, max_length=options.max_length, progress=options.progress)
    return [{"label": r.label, "score": r.score, "scores": r.scores} for r in results]


def _rerank(encoder: "Encoder", texts: Sequence["Text"], options: TaskOptions) -> list["Row"]:
    documents = [str(text) for text in texts]
    ranking = encoder.rerank(
        options.query or "",
        documents,
        top_k=options.top_k,
        max_length=options.max_length,
        raw=options.raw,
    )
    return [asdict(ranked) for ranked in ranking]


def _answer(encoder: "Encoder", texts: Sequence["Text"], options: TaskOptions) -> list["Row"]:
    pairs = [text for text in texts if isinstance(text, tuple)]
    results = encoder.answer(
        pairs,
        top_k=options.top_k or 1,
        max_length=options.max_length,
        stride=options.stride,
        progress=options.progress,
    )
    return [{"answers": [asdict(answer) for answer in answers]} for answers in results]


def _fill(encoder: "Encoder", texts: Sequence["Text"], options: TaskOptions) -> list["Row"]:
    single_texts = [str(text) for text in texts]
    results = encoder.fill(
        single_texts,
        top_k=options.top_k or 5,
        max_length=options.max_length,
        progress=options.progress,
    )
    return [{"masks": [[asdict(word) for word in mask] for mask in masks]} for masks in results]


def _label(encoder: "Encoder", texts: Sequence["Text"], options: TaskOptions) -> list["Row"]:
    single_texts = [str(text) for text in texts]
    results = encoder.label(
        single_texts,
        max_length=options.max_length,
        stride=options.stride,
        progress=options.progress,
    )
    return [{"entities": [asdict(entity) for entity in entities]} for entities in results]


def _numbers(values: Any) -> list[str]:
    """Format the numbers at both ends of a vector."""
    style = "d" if values.dtype.kind in "iu" else "+.4f"
    shown = [format(value, style) for value in values.tolist()]
    return shown if len(shown) <= 2 * EDGE else [*shown[:EDGE], "…", *shown[-EDGE:]]


def _indices(width: int) -> list[str]:
    """Return the indices of the numbers that `_numbers` shows."""
    indices = [str(i) for i in range(width)]
    return indices if width <= 2 * EDGE else [*indices[:EDGE], "…", *indices[-EDGE:]]


def _show_hidden(rows: Sequence["Row"]) -> None:
    for row in rows:
        count, width = row["states"].shape
        pairs = zip(row["tokens"], row["states"], strict=True)
        lines = [[token, *_numbers(state)] for token, state in pairs]
        if count > 4 * EDGE:
            omitted = [f"… {count - 3 * EDGE} more"] + [""] * (len(lines[0]) - 1)
            lines[2 * EDGE : -EDGE] = [omitted]
        if row["pooled"] is not None:
            lines.append(["pooled", *_numbers(row["pooled"])])
        table(f"{short(row['text'])}: [{count}, {width}]", ["token", *_indices(width)], lines)


def _show_embed(rows: Sequence["Row"]) -> None:
    width = len(rows[0]["vector"])
    lines = [[short(row["text"]), *_numbers(row["vector"])] for row in rows]
    table(f"vectors: [{len(rows)}, {width}]", ["text", *_indices(width)], lines)


def _show_sparse(rows: Sequence["Row"]) -> None:
    def heaviest(row: "Row") -> str:
        words = sorted(zip(row["weights"], row["words"], strict=True), key=lambda pair: -pair[0])
        return ", ".join(f"{word} {weight:.2f}" for weight, word in words[: 2 * EDGE])

    lines = [[short(row["text"]), len(row["indices"]), heaviest(row)] for row in rows]
    table("sparse vectors", ["text", "words", "heaviest"], lines)


def _show_multi(rows: Sequence["Row"]) -> None:
    width = rows[0]["vectors"].shape[1]
    lines = [
        [short(row["text"]) if i == 0 else "", str(i), *_numbers(vector)]
        for row in rows
        for i, vector in enumerate(row["vectors"][: 2 * EDGE])
    ]
    table(
        f"vectors of tokens, the first of each text: [{width}]",
        ["text", "token", *_indices(width)],
        lines,
    )


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
    table(None, ["text", "label", "span", "score", "characters"], lines)


_SPAN = {"text": str, "start": int, "end": int, "score": float}
_STATES = {"tokens": [str], "states": [["float32"]], "pooled": ["float32"]}
_SPARSE = {"indices": [int], "weights": ["float32"], "words": [str]}
_VECTORS = {"vectors": [["float32"]]}
_WORDS = {"masks": [[{"word": str, "score": float, "text": str, "id": int}]]}


def _vector(encoder: "Encoder", options: TaskOptions) -> "Shape":
    return {"vector": [options.vector_type]}


def _labels(encoder: "Encoder", options: TaskOptions) -> "Shape":
    return {"label": str, "score": float, "scores": dict.fromkeys(encoder.labels, float)}


TASKS = {
    "hidden": Task(_hidden, lambda *_: _STATES, _show_hidden, chunk=64),
    "embed": Task(_embed, _vector, _show_embed, accelerator_chunk=16384),
    "sparse": Task(_sparse, lambda *_: _SPARSE, _show_sparse),
    "multi": Task(_multi, lambda *_: _VECTORS, _show_multi, chunk=512),
    "fill": Task(_fill, lambda *_: _WORDS, _show_fill),
    "answer": Task(_answer, lambda *_: {"answers": [_SPAN]}, _show_answer),
    "classify": Task(_classify, _labels, _show_classify, accelerator_chunk=16384),
    "rerank": Task(_rerank, lambda *_: {}, _show_rerank),
    "label": Task(_label, lambda *_: {"entities": [{"label": str, **_SPAN}]}, _show_label),
}
