"""`packhorse demo`: encode real texts packed and padded, compare, and then search them.

The texts are the docstrings of Python's standard library, so they are on every machine. Everything
together stays under two minutes on two cores: a trial on a few texts decides how many are compared,
and the speed of the comparison how many are searched.
"""

import random
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from packhorse.cli.console import JsonFlag, emit, note, progress, short, table
from packhorse.cli.flags import DEFAULT_MODEL
from packhorse.errors import InputError, PackhorseError

if TYPE_CHECKING:
    import numpy as np

    from packhorse.reports.docstrings import Docstring
    from packhorse.reports.side_by_side import PaddingComparison
    from packhorse.runtime.encoder import Encoder
    from packhorse.tokens import Encoding

DEFAULT_QUERY = "pack files into a compressed archive"
TRIAL_TEXTS = 48
MAX_COMPARED = 1000
COMPARE_SECONDS = 36.0  # time for the comparison
SEARCH_SECONDS = 30.0  # time for encoding more texts to search
BATCH_SIZE = 16  # of the padded sides
RESULTS = 5
# Largest difference and smallest cosine allowed: products of other shapes round differently.
LIMITS = {"fp32": (1e-4, 0.99999), "bf16": (0.05, 0.999), "fp16": (0.01, 0.9999)}


class Disagreement(PackhorseError):
    """Packed and padded batches do not give the same vectors."""

    exit_code = 1


def demo(
    query: Annotated[
        str | None, Parameter(help="What to search for; without it you are asked.")
    ] = None,
    /,
    *,
    sample: Annotated[
        int | None, Parameter(help="Number of texts to compare; default as many as 36 s allow.")
    ] = None,
    texts: Annotated[
        int | None,
        Parameter(help="Number of texts to search; default as many as 30 s more allow."),
    ] = None,
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16", "auto"], Parameter(help="Number format of both sides.")
    ] = "fp32",
    device: Annotated[str | None, Parameter(help="cpu, cuda or cuda:1.")] = "cpu",
    plot: Annotated[Path | None, Parameter(help="Plot the speeds: png, svg or pdf.")] = None,
    json: JsonFlag = False,
) -> None:
    """Encode Python's docstrings packed and padded, compare, then search them.

    Texts and model (all-MiniLM-L6-v2) are on this machine; nothing is downloaded.
    The vectors of both sides must agree, or the demo fails.

    Try:
      packhorse demo "how do I sort a list by a key?"
      packhorse demo --dtype bf16 --plot demo.png
    """
    from packhorse.reports import plots, side_by_side
    from packhorse.runtime.loading import load

    plots.check(plot)
    for name, value in (("--sample", sample), ("--texts", texts)):
        if value is not None and value < 1:
            raise InputError(f"{name} is {value}; it must be 1 or more")
    encoder = load(DEFAULT_MODEL, device=device, dtype=dtype)
    note(repr(encoder))
    documents = _read_documents()
    sequences = _tokenize(encoder, documents)
    compared = sequences[: sample or _affordable_texts(encoder, sequences)]
    with progress(f"{len(compared):,} texts, packed and padded") as advance:
        comparison = side_by_side.compare(encoder, DEFAULT_MODEL, compared, BATCH_SIZE, advance)
    _show(comparison, compared, plot)
    _check_agreement(comparison, encoder)
    if texts is None:
        affordable = int(comparison.sides[0].sequences_per_second * SEARCH_SECONDS)
        searched = len(compared) + affordable
    else:
        searched = max(texts, len(compared))
    vectors = _encode_more(encoder, comparison.vectors, sequences[len(compared) : searched])
    note(f"{len(vectors):,} docstrings can be searched")
    answers = _search(encoder, vectors, documents, query)
    document = {
        "texts": len(compared),
        "tokens": sum(map(len, compared)),
        "ways": [asdict(side) for side in comparison.sides],
        "largest_difference": comparison.largest_difference,
        "smallest_cosine": comparison.smallest_cosine,
        "searched": len(vectors),
        "answers": answers,
    }
    emit(document, json)


def _read_documents() -> "list[Docstring]":
    """Read the docstrings in random order, so that the first ones are a fair sample."""
    from packhorse.reports import docstrings

    with progress("reading the standard library's docstrings") as advance:
        documents = docstrings.read(progress=advance)
    random.Random(0).shuffle(documents)
    return documents


def _tokenize(encoder: "Encoder", documents: "list[Docstring]") -> "list[Encoding]":
    texts = [document.text for document in documents]
    sequences = encoder.tokenizer.encode(texts, encoder.max_length)
    truncated = sum(bool(sequence.truncated) for sequence in sequences)
    tokens = sum(map(len, sequences))
    note(
        f"{len(sequences):,} docstrings, {tokens:,} tokens; "
        f"{truncated:,} truncated to {encoder.max_length}"
    )
    return sequences


def _affordable_texts(encoder: "Encoder", sequences: "list[Encoding]") -> int:
    """Return how many texts the comparison has time for, from a trial on a few."""
    from packhorse.reports.side_by_side import compare

    trial = sequences[:TRIAL_TEXTS]
    sides = compare(encoder, DEFAULT_MODEL, trial, BATCH_SIZE).sides
    affordable = COMPARE_SECONDS / sum(side.seconds for side in sides) * len(trial)
    return max(len(trial), min(MAX_COMPARED, int(affordable)))


def _show(comparison: "PaddingComparison", sequences: "list[Encoding]", plot: Path | None) -> None:
    from packhorse.reports.tables import Table

    texts = len(sequences)
    tokens = sum(map(len, sequences))
    names = [side.way for side in comparison.sides]
    speeds = [side.sequences_per_second for side in comparison.sides]
    shown = Table.of(
        ("way", "padding", "seconds", "texts/s", "time (packed = 1)"),
        [
            (
                side.way,
                f"{side.padding:.1%}",
                f"{side.seconds:.1f}",
                f"{side.sequences_per_second:,.0f}",
                f"{side.ratio:.2f}x",
            )
            for side in comparison.sides
        ],
    )
    table(f"The same {texts:,} texts ({tokens:,} tokens), one pass each", shown.columns, shown.rows)
    _print_bars(names, speeds)
    if plot:
        from packhorse.reports.plots import draw_speeds

        draw_speeds(plot, names, speeds, f"{texts:,} docstrings of Python's standard library")
        note(f"plotted: {plot}")


def _print_bars(names: list[str], values: list[float], width: int = 40) -> None:
    """Print a bar per name, in block characters if the terminal has them."""
    try:
        "█".encode(sys.stdout.encoding or "ascii")
        block = "█"
    except UnicodeEncodeError:
        block = "#"
    largest = max(values)
    name_width = max(map(len, names))
    for name, value in zip(names, values, strict=True):
        bar = block * max(1, round(width * value / largest))
        print(f"{name:>{name_width}} {bar} {value:,.0f} texts/s")


def _check_agreement(comparison: "PaddingComparison", encoder: "Encoder") -> None:
    from packhorse.device import dtype_name

    max_difference, min_cosine = LIMITS[dtype_name(encoder.dtype)]
    difference = comparison.largest_difference
    cosine = comparison.smallest_cosine
    figures = f"largest difference {difference:.1e}, smallest cosine {cosine:.6f}"
    if difference > max_difference or not cosine >= min_cosine:  # a cosine of NaN fails too
        raise Disagreement(f"packed and padded vectors do not agree: {figures}")
    print(f"The vectors agree: {figures}")


def _encode_more(
    encoder: "Encoder", vectors: "np.ndarray", sequences: "list[Encoding]"
) -> "np.ndarray":
    """Append the vectors of more sequences."""
    import numpy as np

    from packhorse.reports.side_by_side import packed_vectors

    if not sequences:
        return vectors
    with progress(f"encoding {len(sequences):,} more to search, packed") as advance:
        return np.concatenate([vectors, packed_vectors(encoder, sequences, advance)])


def _search(
    encoder: "Encoder", vectors: "np.ndarray", documents: "list[Docstring]", query: str | None
) -> list[dict[str, Any]]:
    """Answer the query, or those typed on a terminal; off a terminal, the default one."""
    if query is not None or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return [_answer(encoder, vectors, documents, query or DEFAULT_QUERY)]
    print("Search the docstrings; an empty line ends.")
    answers = []
    while typed := _read_query():
        answers.append(_answer(encoder, vectors, documents, typed))
    return answers


def _read_query() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""


def _answer(
    encoder: "Encoder", vectors: "np.ndarray", documents: "list[Docstring]", query: str
) -> dict[str, Any]:
    scores = vectors @ encoder.embed([query])[0]
    best = [(documents[i], float(scores[i])) for i in (-scores).argsort()[:RESULTS]]
    rows = [(f"{score:.3f}", document.name, short(document.text, 60)) for document, score in best]
    table(query, ("score", "name", "docstring"), rows)
    results = [
        {"score": score, "name": document.name, "text": document.text} for document, score in best
    ]
    return {"query": query, "results": results}
