"""`packhorse demo`: real texts encoded packed and padded, side by side, and then searched.

The texts are the docstrings of Python's own standard library, so they are on every machine. All of
it stays under two minutes on two cores: a first look at the speed decides how many texts are
compared, and the comparison how many are searched.
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
    from packhorse.reports.side_by_side import Comparison
    from packhorse.runtime.encoder import Encoder
    from packhorse.tokens import Encoding

DEFAULT_QUERY = "pack files into a compressed archive"
FIRST_LOOK = 48  # texts
MOST_COMPARED = 1000
COMPARE_SECONDS, SEARCH_SECONDS = 36.0, 30.0  # what the two long parts may take
BATCH_SIZE = 16  # of the padded sides
FOUND = 5
# How far apart the sides may be: rounding differs with the shape of a product, and no more.
LIMITS = {"fp32": (1e-4, 0.99999), "bf16": (0.05, 0.999), "fp16": (0.01, 0.9999)}


class Disagreement(PackhorseError):
    """Packed and padded do not give the same vectors."""

    exit_code = 1


def demo(
    query: Annotated[str | None, Parameter(help="What to look for; asked for otherwise.")] = None,
    /,
    *,
    sample: Annotated[
        int | None, Parameter(help="Texts to compare on; default what 36 seconds allow.")
    ] = None,
    texts: Annotated[
        int | None, Parameter(help="Texts to search; default what 30 seconds more allow.")
    ] = None,
    dtype: Annotated[Literal["fp32", "bf16", "fp16", "auto"], Parameter(help="Both sides'.")] = (
        "fp32"
    ),
    device: Annotated[str | None, Parameter(help="cpu, cuda …; default cpu.")] = "cpu",
    plot: Annotated[Path | None, Parameter(help="Draw the speeds: png, svg, pdf.")] = None,
    json: JsonFlag = False,
) -> None:
    """Encode Python's own docstrings without padding and with it, compare, then search them.

    Texts and model (all-MiniLM-L6-v2) are on this machine; nothing is fetched.
    The vectors of both sides must agree, or the demo fails.

    Try:
      packhorse demo "how do I sort a list by a key?"
      packhorse demo --dtype bf16 --plot demo.png
    """
    from packhorse.reports import plots, side_by_side
    from packhorse.runtime.loading import load

    plots.check(plot)
    _check(sample, texts)
    documents = _documents()
    encoder = load(DEFAULT_MODEL, device=device, dtype=dtype)
    note(repr(encoder))
    sequences = _tokenized(encoder, documents)
    some = sequences[: sample or _affordable(encoder, sequences)]
    with progress(f"{len(some):,} texts, packed and padded") as advance:
        found = side_by_side.compare(encoder, DEFAULT_MODEL, some, BATCH_SIZE, advance)
    _show(found, some, plot)
    _agree(found, encoder)
    more = int(found.sides[0].sequences_per_second * SEARCH_SECONDS)
    rest = sequences[len(some) : len(some) + more if texts is None else max(texts, len(some))]
    vectors = _extended(encoder, found.vectors, rest)
    note(f"{len(vectors):,} docstrings can be searched")
    answers = _search(encoder, vectors, documents, query)
    emit(_document(found, some, len(vectors), answers), json)


def _check(sample: int | None, texts: int | None) -> None:
    for name, value in (("--sample", sample), ("--texts", texts)):
        if value is not None and value < 1:
            raise InputError(f"{name} is {value}; it must be 1 or more")


def _documents() -> "list[Docstring]":
    """In random order: then the first are a fair sample of all."""
    from packhorse.reports import docstrings

    with progress("reading the standard library's docstrings") as advance:
        found = docstrings.read(progress=advance)
    random.Random(0).shuffle(found)
    return found


def _tokenized(encoder: "Encoder", documents: "list[Docstring]") -> "list[Encoding]":
    sequences = encoder.tokenizer.encode([d.text for d in documents], encoder.max_length)
    cut = sum(bool(sequence.truncated) for sequence in sequences)
    tokens = sum(map(len, sequences))
    note(f"{len(sequences):,} docstrings, {tokens:,} tokens; {cut:,} cut to {encoder.max_length}")
    return sequences


def _affordable(encoder: "Encoder", sequences: "list[Encoding]") -> int:
    """How many texts the comparison has time for, from a first look at few."""
    from packhorse.reports.side_by_side import compare

    first = sequences[:FIRST_LOOK]
    sides = compare(encoder, DEFAULT_MODEL, first, BATCH_SIZE).sides
    allowed = COMPARE_SECONDS / sum(side.seconds for side in sides) * len(first)
    return max(len(first), min(MOST_COMPARED, int(allowed)))


def _show(found: "Comparison", sequences: "list[Encoding]", plot: Path | None) -> None:
    from packhorse.reports.tables import Table

    texts, tokens = len(sequences), sum(map(len, sequences))
    names, speeds = [s.way for s in found.sides], [s.sequences_per_second for s in found.sides]
    shown = Table.of(
        ("way", "padding", "seconds", "texts/s", "time (packed = 1)"),
        [
            (s.way, f"{s.padding:.1%}", f"{s.seconds:.1f}", f"{speed:,.0f}", f"{s.ratio:.2f}x")
            for s, speed in zip(found.sides, speeds, strict=True)
        ],
    )
    table(f"The same {texts:,} texts ({tokens:,} tokens), one pass each", shown.columns, shown.rows)
    _bars(names, speeds)
    if plot:
        from packhorse.reports.plots import draw_speeds

        draw_speeds(plot, names, speeds, f"{texts:,} docstrings of Python's standard library")
        note(f"drawn: {plot}")


def _bars(names: list[str], values: list[float], width: int = 40) -> None:
    """A bar a name, in blocks where the terminal has them."""
    try:
        "█".encode(sys.stdout.encoding or "ascii")
        block = "█"
    except UnicodeEncodeError:
        block = "#"
    most, column = max(values), max(map(len, names))
    for name, value in zip(names, values, strict=True):
        bar = block * max(1, round(width * value / most))
        print(f"{name:>{column}} {bar} {value:,.0f} texts/s")


def _agree(found: "Comparison", encoder: "Encoder") -> None:
    from packhorse.device import dtype_name

    difference, cosine = LIMITS[dtype_name(encoder.dtype)]
    how = (
        f"largest difference {found.largest_difference:.1e}, "
        f"smallest cosine {found.smallest_cosine:.6f}"
    )
    if found.largest_difference > difference or not found.smallest_cosine >= cosine:
        raise Disagreement(f"packed and padded vectors do not agree: {how}")
    print(f"The vectors agree: {how}")


def _extended(encoder: "Encoder", vectors: "np.ndarray", rest: "list[Encoding]") -> "np.ndarray":
    import numpy as np

    from packhorse.reports.side_by_side import packed_vectors

    if not rest:
        return vectors
    with progress(f"encoding {len(rest):,} more to search, packed") as advance:
        return np.concatenate([vectors, packed_vectors(encoder, rest, advance)])


def _search(
    encoder: "Encoder", vectors: "np.ndarray", documents: "list[Docstring]", query: str | None
) -> list[dict[str, Any]]:
    """Answer the query; without one, all that is typed, or on no terminal the default one."""
    if query is not None or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return [_answer(encoder, vectors, documents, query or DEFAULT_QUERY)]
    print("Search the docstrings; an empty line ends.")
    answers = []
    while asked := _typed():
        answers.append(_answer(encoder, vectors, documents, asked))
    return answers


def _typed() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""


def _answer(
    encoder: "Encoder", vectors: "np.ndarray", documents: "list[Docstring]", query: str
) -> dict[str, Any]:
    scores = vectors @ encoder.embed([query])[0]
    best = [(documents[i], float(scores[i])) for i in (-scores).argsort()[:FOUND]]
    rows = [(f"{score:.3f}", d.name, short(d.text, 60)) for d, score in best]
    table(query, ("score", "name", "docstring"), rows)
    results = [{"score": score, "name": d.name, "text": d.text} for d, score in best]
    return {"query": query, "results": results}


def _document(
    found: "Comparison", sequences: "list[Encoding]", searched: int, answers: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "texts": len(sequences),
        "tokens": sum(map(len, sequences)),
        "ways": [asdict(side) for side in found.sides],
        "largest_difference": found.largest_difference,
        "smallest_cosine": found.smallest_cosine,
        "searched": searched,
        "answers": answers,
    }
