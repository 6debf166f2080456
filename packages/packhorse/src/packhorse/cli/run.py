"""`packhorse run`: inference from the shell, on the screen, into a file, or against the clock.

The flags are those of the tool it replaces, with its short names and underscores, plus files. What
is asked is checked before the model is opened, because that is what takes time. Results go to a
file chunk by chunk and survive a kill (`data/output.py`); on the screen only the first
few texts of a file are shown, and only they are encoded.
"""

import os
import select
import stat
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from packhorse.cli import perf
from packhorse.cli.console import emit, note, once
from packhorse.cli.flags import Options
from packhorse.cli.tasks import TASKS, prepared, rows_of, spec_of
from packhorse.cli.writing import made_with, write
from packhorse.data.output import Row, format_of
from packhorse.data.tables import Record, read_texts, split_pair
from packhorse.errors import InputError

if TYPE_CHECKING:
    from packhorse.runtime.encoder import Encoder

DEFAULT_TEXT = "Hello world!"
SHOWN = 20  # texts of a file that go to the screen
PATIENCE = 2.0  # seconds before someone who waits for a pipe is told


def run(
    *texts: Annotated[str, Parameter(name="TEXT", help="Texts; without any, Hello world!")],
    options: Options = Options(),  # noqa: B008
) -> None:
    """Encode texts with a model: hidden states, vectors, answers, words, labels, rankings.

    Try:
      packhorse run "Paris is the capital of France." --task embed
      packhorse run --task answer --question "Who rode?" "Ann rode." -m FOLDER
      packhorse run --task embed --input texts.csv --column body --out vectors.npy
      packhorse run --dtype bf16 --graphs -bs 12 -i 100 --perf
    """
    if not texts and not options.input and _is_piped():
        options = replace(options, input="-")
    _check(texts, options)
    records = _records(texts, options)
    encoder = _load(options, bool(texts or options.input))
    from packhorse.runtime.encoder import TruncationWarning

    with once(TruncationWarning):
        if options.perf:
            _measure(records, encoder, options)
        elif options.out:
            emit({**made_with(encoder, options), **write(records, encoder, options)}, options.json)
        else:
            _print(records, encoder, options)


def _is_piped() -> bool:
    """Is text piped in? It may be long in coming; who waits for nothing is told for what."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
        if not (stat.S_ISFIFO(mode) or stat.S_ISREG(mode)):
            return False
        ready, _, _ = select.select([sys.stdin], [], [], PATIENCE)
    except (AttributeError, OSError, ValueError):  # no standard input, or not a real one
        return False
    if not ready:
        note("waiting for text from the pipe; name a TEXT, or </dev/null, to do without")
    return True


def _check(texts: Sequence[str], options: Options) -> None:
    """Refuse what cannot be meant."""
    for name in ("batch_size", "iterations", "top_k", "chunk"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise InputError(f"--{name.replace('_', '-')} is {value}; it must be 1 or more")
    copies = options.batch_size > 1
    rerank, out = options.task == "rerank", options.out
    clashes = {
        "TEXT and --input both name texts; leave one out": texts and options.input,
        "--column is for files; pass --input": options.column and not options.input,
        "--prompt is for the task embed": options.prompt and options.task != "embed",
        "--perf takes no --prompt; write it into the text": options.prompt and options.perf,
        "--perf measures and writes no results; leave out --out": out and options.perf,
        "--out writes each text once; leave out --batch-size and --iterations": out
        and (copies or options.iterations > 1),
        "rerank orders all texts at once and takes no --out; use --json": out and rerank,
        "rerank takes its documents as one batch; leave out --batch-size": rerank
        and copies
        and not options.perf,
    }
    for complaint, clash in clashes.items():
        if clash:
            raise InputError(complaint)
    if out:
        format_of(out, {"vector": []} if options.task == "embed" else {})


def _records(texts: Sequence[str], options: Options) -> Iterable[Record]:
    """The texts to encode; the first is read at once, so that a bad file costs no waiting."""
    if not options.input:
        given = _given(texts or [DEFAULT_TEXT], options.pair)
        prepared(options.task, [record.text for record in given], options.query)
        return given
    found = read_texts(
        options.input, options.column, pair=options.pair, skip_empty=options.skip_empty
    )
    first = next(found, None)
    if first is None:
        where = "standard input" if options.input == "-" else options.input
        raise InputError(f"{where} holds no text")
    prepared(options.task, [first.text], options.query)
    return chain([first], found)


def _given(texts: Sequence[str], pair: bool) -> list[Record]:
    for number, text in enumerate(texts, 1):
        if not text.strip():
            raise InputError(f"text {number} is empty; there is nothing to encode")
    return [
        Record(i, split_pair(text, f"text {i + 1}") if pair else text)
        for i, text in enumerate(texts)
    ]


def _load(options: Options, given: bool) -> "Encoder":
    from packhorse.device import describe, dtype_name
    from packhorse.runtime.loading import load

    encoder = load(
        options.checkpoint or options.model,
        device=options.device,
        dtype=options.dtype if options.dtype or given else "fp32",
        kernel=options.kernel,
        graphs=options.graphs,
        invariant=options.invariant,
        **options.beside.given(),
    )
    how = [describe(encoder.device), dtype_name(encoder.dtype), f"{encoder.kernel} kernel"]
    how += [way for way in ("graphs", "invariant") if getattr(options, way)]
    note(f"{encoder.name}: {', '.join(how)}")
    return encoder


def _print(records: Iterable[Record], encoder: "Encoder", options: Options) -> None:
    every = options.json or not options.input or options.task == "rerank"
    left = iter(records)
    some = list(left if every else islice(left, SHOWN))
    found: list[tuple[Record, Row]] = []
    for _ in range(options.iterations):
        found = rows_of(options.task, some, encoder, options.ask, options.batch_size)
    rows = [{"id": record.id, "text": _joined(record.text), **row} for record, row in found]
    if not options.json:
        TASKS[options.task].show(rows)
    emit({**made_with(encoder, options), "results": rows}, options.json)
    if next(left, None) is not None:
        note(f"these are the first {SHOWN} texts; --out FILE or --json gives all")


def _joined(text: str | tuple[str, str]) -> str:
    return text if isinstance(text, str) else "\t".join(text)


def _measure(records: Iterable[Record], encoder: "Encoder", options: Options) -> None:
    texts = prepared(options.task, [record.text for record in records], options.query)
    if options.task == "rerank":
        texts = [(options.query or "", str(text)) for text in texts]
    sizes = {"batch_size": options.batch_size, "iterations": options.iterations}
    head, length = spec_of(options.task).head, options.max_length
    found = perf.measure(encoder, texts, head, max_length=length, **sizes)
    if not options.json:
        perf.show(found)
    emit({**made_with(encoder, options), **sizes, **found}, options.json)
