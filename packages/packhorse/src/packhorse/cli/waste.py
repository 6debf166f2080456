"""`packhorse waste`: what padding costs on the user's own texts."""

import time
from collections.abc import Iterable
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from packhorse.cli.console import JsonFlag, emit, note, progress, table
from packhorse.cli.flags import DEFAULT_MODEL, Beside
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
        str, Parameter(help="txt, jsonl, csv, tsv, parquet, a saved Dataset; - is stdin.")
    ],
    /,
    *,
    column: Annotated[
        list[str] | None, Parameter(negative="", help="The text's column; twice: of a pair.")
    ] = None,
    model: Annotated[
        str, Parameter(name=("--model", "-m"), help="Whose tokenizer counts.", show_default=False)
    ] = DEFAULT_MODEL,
    beside: Beside = Beside(),  # noqa: B008 (frozen)
    max_length: Annotated[int, Parameter(help="Tokens a text at most; 0: the model's.")] = 0,
    batch_size: Annotated[
        int, Parameter(name=("--batch-size", "-bs"), help="Texts a padded batch.")
    ] = 16,
    price: Annotated[float | None, Parameter(help="What an hour of the machine costs.")] = None,
    tokens_per_second: Annotated[
        float | None, Parameter(help="Tokens it computes a second; default measured here.")
    ] = None,
    skip_empty: Annotated[
        bool, Parameter(negative="", show_default=False, help="Pass over empty texts.")
    ] = False,
    plot: Annotated[Path | None, Parameter(help="Draw lengths and padding: png, svg, pdf.")] = None,
    json: JsonFlag = False,
) -> None:
    """Show how much of the work on your own texts would be padding, and what that costs.

    Counts the tokens a model computes when texts are padded (to one fixed
    length, in batches as they come, in batches sorted by length) and when they
    are packed. The cost is that of the tokens computed, at --price an hour;
    attention, which padding makes dearer still, is not counted.

    Try:
      packhorse waste texts.txt
      packhorse waste reviews.csv --column body --price 3.50 --plot waste.png
    """
    from packhorse.packing.histogram import histogram_of
    from packhorse.reports import plots
    from packhorse.reports import tables as report
    from packhorse.reports import waste as bench
    from packhorse.runtime.loading import load

    plots.check(plot)
    _check(price, tokens_per_second)
    records = read_texts(file, column, skip_empty=skip_empty)
    encoder = load(model, **beside.given())
    limit = _limit(encoder, max_length)
    lengths, sample = _count(records, encoder, limit, file)
    rows = bench.measure(lengths, limit, batch_size)
    speed = tokens_per_second
    if price is not None and speed is None:
        speed = _speed(encoder, sample)
        note(f"speed, measured here: {speed:,.0f} tokens a second ({encoder!r})")
    costs = None
    if price is not None and speed is not None:
        costs = [bench.cost(row.computed, len(lengths), speed, price) for row in rows]
    shown = report.waste_table(rows, costs)
    tokens = int(lengths.sum())
    about = f"{len(lengths):,} texts, {tokens:,} tokens, {tokens / len(lengths):.1f} a text"
    table(about, shown.columns, shown.rows)
    if plot:
        plots.draw_waste(plot, histogram_of(lengths), rows)
        note(f"drawn: {plot}")
    priced = [{}] * len(rows) if costs is None else [{"cost_of_a_million": c} for c in costs]
    emit(
        {
            "texts": len(lengths),
            "tokens": tokens,
            "max_length": limit,
            "batch_size": batch_size,
            "price": price,
            "tokens_per_second": speed,
            "ways": [asdict(row) | cost for row, cost in zip(rows, priced, strict=True)],
        },
        json,
    )


def _check(price: float | None, tokens_per_second: float | None) -> None:
    for name, value in (("--price", price), ("--tokens-per-second", tokens_per_second)):
        if value is not None and not 0 < value < float("inf"):
            raise InputError(f"{name} is {value}; it must be more than 0")
    if tokens_per_second is not None and price is None:
        raise InputError("--tokens-per-second says what an hour is worth only with --price")


def _limit(encoder: "Encoder", max_length: int) -> int:
    if max_length > encoder.max_length:
        raise InputError(
            f"--max-length is {max_length}, but {encoder.name} takes {encoder.max_length} tokens"
        )
    return max_length if max_length > 0 else encoder.max_length


def _count(
    records: Iterable[Record], encoder: "Encoder", limit: int, file: str
) -> "tuple[np.ndarray, list[Encoding]]":
    """The tokens of every text, and the first few texts; one chunk is in memory at a time."""
    import numpy as np

    lengths: list[int] = []
    sample: list[Encoding] = []
    left, cut = iter(records), 0
    with progress("tokenizing") as advance:
        while texts := [record.text for record in islice(left, CHUNK)]:
            encodings = encoder.tokenizer.encode(texts, limit)
            sample += encodings[: SAMPLE - len(sample)]
            lengths += map(len, encodings)
            cut += sum(bool(encoding.truncated) for encoding in encodings)
            advance(len(lengths), 0)
    if not lengths:
        raise InputError(f"{file} holds no text")
    if cut:
        note(f"{cut:,} texts are longer than {limit} tokens and count as {limit}")
    return np.array(lengths), sample


def _speed(encoder: "Encoder", sample: "list[Encoding]") -> float:
    """Tokens a second of this model on this machine: the better of two passes over some texts."""
    from packhorse.device import synchronize

    head = "embed" if "embed" in encoder.heads else "hidden"
    encoder.run(sample[:8], head)
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        encoder.run(sample, head)
        synchronize(encoder.device)
        seconds.append(time.perf_counter() - start)
    return sum(map(len, sample)) / min(seconds)
