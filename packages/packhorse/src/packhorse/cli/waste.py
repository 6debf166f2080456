"""`packhorse waste`: show what padding costs for the user's own texts."""

import time
from collections.abc import Iterable
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from packhorse.cli.console import JsonFlag, emit, note, progress, table
from packhorse.cli.flags import DEFAULT_MODEL, ModelFlags, flag
from packhorse.data.tables import Record, read_texts
from packhorse.errors import InputError

if TYPE_CHECKING:
    import numpy as np

    from packhorse.runtime.encoder import Encoder
    from packhorse.tokens import Encoding

CHUNK = 4096  # texts tokenized at a time
SAMPLE = 256  # texts kept to measure the speed with


def waste(
    file: Annotated[
        str,
        Parameter(help="txt, jsonl, csv, tsv, parquet or a saved Dataset; - is standard input."),
    ],
    /,
    *,
    column: Annotated[
        list[str] | None,
        flag(help="Column of the text; pass it twice for the two texts of a pair."),
    ] = None,
    model: Annotated[
        str,
        flag("--model", "-m", help="The model whose tokenizer counts; default all-MiniLM-L6-v2."),
    ] = DEFAULT_MODEL,
    model_flags: ModelFlags = ModelFlags(),  # noqa: B008 (frozen)
    max_length: Annotated[
        int, Parameter(help="Truncate texts to this many tokens; 0 is the model's own limit.")
    ] = 0,
    batch_size: Annotated[
        int, flag("--batch-size", "-bs", help="Texts per padded batch.", show_default=True)
    ] = 16,
    price: Annotated[float | None, Parameter(help="Price of an hour of the machine.")] = None,
    tokens_per_second: Annotated[
        float | None,
        Parameter(help="Speed in tokens per second; default measured on this machine."),
    ] = None,
    skip_empty: Annotated[bool, flag(help="Skip empty texts.")] = False,
    plot: Annotated[
        Path | None, Parameter(help="Plot lengths and padding: png, svg or pdf.")
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Show how much of the work on your own texts would be padding, and what it costs.

    Counts the tokens that a model computes if texts are padded (to one fixed
    length, in batches as they come, in batches sorted by length) and if they are
    packed. The cost is that of the computed tokens, at --price per hour;
    attention, which padding makes more expensive still, is not counted.

    Try:
      packhorse waste texts.txt
      packhorse waste reviews.csv --column body --price 3.50 --plot waste.png
    """
    from packhorse.packing.histogram import histogram_of
    from packhorse.reports import plots
    from packhorse.reports import tables as report
    from packhorse.reports import waste as padding
    from packhorse.runtime.loading import load

    plots.check(plot)
    _check_flags(price, tokens_per_second)
    records = read_texts(file, column, skip_empty=skip_empty)
    encoder = load(model, **model_flags.load_options())
    limit = _length_limit(encoder, max_length)
    lengths, sample = _tokenize(records, encoder, limit, file)
    rows = padding.measure(lengths, limit, batch_size)
    speed = tokens_per_second
    if price is not None and speed is None:
        speed = _measure_speed(encoder, sample)
        note(f"speed, measured here: {speed:,.0f} tokens per second ({encoder!r})")
    costs = None
    if price is not None and speed is not None:
        costs = [padding.cost(row.computed, len(lengths), speed, price) for row in rows]
    shown = report.waste_table(rows, costs)
    tokens = int(lengths.sum())
    title = f"{len(lengths):,} texts, {tokens:,} tokens, {tokens / len(lengths):.1f} per text"
    table(title, shown.columns, shown.rows)
    if plot:
        plots.draw_waste(plot, histogram_of(lengths), rows)
        note(f"plotted: {plot}")
    ways: list[dict[str, Any]] = [asdict(row) for row in rows]
    if costs is not None:
        for way, cost in zip(ways, costs, strict=True):
            way["cost_of_a_million"] = cost
    document = {
        "texts": len(lengths),
        "tokens": tokens,
        "max_length": limit,
        "batch_size": batch_size,
        "price": price,
        "tokens_per_second": speed,
        "ways": ways,
    }
    emit(document, json)


def _check_flags(price: float | None, tokens_per_second: float | None) -> None:
    for name, value in (("--price", price), ("--tokens-per-second", tokens_per_second)):
        if value is not None and not 0 < value < float("inf"):
            raise InputError(f"{name} is {value}; it must be more than 0")
    if tokens_per_second is not None and price is None:
        raise InputError("--tokens-per-second is for the cost; pass --price too")


def _length_limit(encoder: "Encoder", max_length: int) -> int:
    if max_length > encoder.max_length:
        raise InputError(
            f"--max-length is {max_length}, but {encoder.name} takes {encoder.max_length} tokens"
        )
    return max_length if max_length > 0 else encoder.max_length


def _tokenize(
    records: Iterable[Record], encoder: "Encoder", limit: int, file: str
) -> "tuple[np.ndarray, list[Encoding]]":
    """Return the length of each text, and the first few texts; one chunk is in memory at a time."""
    import numpy as np

    lengths: list[int] = []
    sample: list[Encoding] = []
    remaining = iter(records)
    truncated = 0
    with progress("tokenizing") as advance:
        while texts := [record.text for record in islice(remaining, CHUNK)]:
            encodings = encoder.tokenizer.encode(texts, limit)
            sample += encodings[: SAMPLE - len(sample)]
            lengths += map(len, encodings)
            truncated += sum(bool(encoding.truncated) for encoding in encodings)
            advance(len(lengths), 0)
    if not lengths:
        raise InputError(f"{file} holds no text")
    if truncated:
        note(f"{truncated:,} texts are longer than {limit} tokens and count as {limit}")
    return np.array(lengths), sample


def _measure_speed(encoder: "Encoder", sample: "list[Encoding]") -> float:
    """Return the tokens per second of this model here: the better of two passes over a sample."""
    from packhorse.device import synchronize

    head = "embed" if "embed" in encoder.heads else "hidden"
    encoder.run(sample[:8], head)  # warm-up
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        encoder.run(sample, head)
        synchronize(encoder.device)
        seconds.append(time.perf_counter() - start)
    return sum(map(len, sample)) / min(seconds)
