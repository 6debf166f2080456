"""`packhorse run`: encode texts and print the results, write them to a file, or measure the speed.

The flags are those of the tool it replaces, with its short names and underscores, plus files.
Flags and texts are checked before the model is loaded, which takes longer. Results go to a file
chunk by chunk and survive a kill (`data/output/resumable.py`); on the screen only the first texts
of a file are shown, and only they are encoded.
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

from packhorse.checkpoint import hub
from packhorse.cli import perf
from packhorse.cli.console import emit, note, summarize_warnings
from packhorse.cli.flags import RunFlags
from packhorse.cli.tasks import TASKS, prepare_texts, result_rows, spec_of
from packhorse.cli.writing import run_facts, write, write_calibration
from packhorse.data.output import Row, format_of
from packhorse.data.tables import Record, kept_names, read_texts, split_pair
from packhorse.errors import InputError

if TYPE_CHECKING:
    from packhorse.runtime.encoder import Encoder

DEFAULT_TEXT = "Hello world!"
MAX_SHOWN = 20  # texts of a file that are shown on the screen
# The columns by which formats that hold only vectors know them.
VECTOR_SHAPES = {
    "embed": {"vector": []},
    "sparse": {"indices": [], "weights": [], "words": []},
    "multi": {"vectors": []},
}
PIPE_SECONDS = 2.0  # without input from a pipe, after which a note says what the command waits for


def run(
    *texts: Annotated[str, Parameter(name="TEXT", help="Texts to encode; default Hello world!")],
    flags: RunFlags = RunFlags(),  # noqa: B008
) -> None:
    """Encode texts with a model: hidden states, vectors, answers, words, labels, rankings.

    Try:
      packhorse run "Paris is the capital of France." --task embed
      packhorse run --task answer --question "Who rode?" "Ann rode." -m FOLDER
      packhorse run --task embed --input texts.csv --column body --out vectors.npy
      packhorse run --task embed --precision int8 --input texts.txt --out vectors.npy
      packhorse run --dtype bf16 --graphs -bs 12 -i 100 --perf
    """
    if not texts and not flags.input and _is_piped():
        flags = replace(flags, input="-")
    _check_flags(texts, flags)
    records = _read_records(texts, flags)
    devices = flags.devices.split(",") if flags.devices else [flags.device]
    encoders = _load(flags, devices, has_text=bool(texts or flags.input))
    encoder = encoders[0]
    from packhorse.runtime.encoder import TruncationWarning

    with summarize_warnings(TruncationWarning):
        if flags.perf:
            _measure(records, encoder, flags)
        elif flags.write_calibration:
            facts = write_calibration(records, encoder, flags)
            emit({**run_facts([encoder], flags), **facts}, flags.json)
        elif flags.out:
            emit({**run_facts(encoders, flags), **write(records, encoders, flags)}, flags.json)
        else:
            _print_results(records, encoder, flags)


def _is_piped() -> bool:
    """Return whether text is piped in; a note tells the user if none arrives for a while."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
        if not (stat.S_ISFIFO(mode) or stat.S_ISREG(mode)):
            return False
        ready, _, _ = select.select([sys.stdin], [], [], PIPE_SECONDS)
    except (AttributeError, OSError, ValueError):  # no standard input, or not a real one
        return False
    if not ready:
        note("waiting for text from the pipe; to use no pipe, pass a TEXT or </dev/null")
    return True


def _check_flags(texts: Sequence[str], flags: RunFlags) -> None:
    """Refuse counts below 1 and flags that contradict each other."""
    for name in ("batch_size", "iterations", "top_k", "chunk"):
        value = getattr(flags, name)
        if value is not None and value < 1:
            raise InputError(f"--{name.replace('_', '-')} is {value}; it must be 1 or more")
    has_copies = flags.batch_size > 1
    is_rerank = flags.task == "rerank"
    is_quantized = flags.precision != "float32"
    conflicts = {
        "--devices names all devices; leave out --device": flags.devices and flags.device,
        "--devices is for --out": flags.devices and not flags.out,
        "--keep is for files with columns; write .jsonl or .parquet": flags.keep
        and (not flags.out or flags.kept is None),
        "--skip-empty and --keep-empty contradict each other": flags.skip_empty
        and flags.keep_empty,
        "TEXT and --input both name texts; leave one out": texts and flags.input,
        "--column is for files; pass --input": flags.column and not flags.input,
        "--prompt is for the tasks embed, sparse and multi": flags.prompt
        and flags.task not in VECTOR_SHAPES,
        "--as-query is for the tasks sparse and multi": flags.as_query
        and flags.task not in ("sparse", "multi"),
        "--raw is for the task rerank": flags.raw and not is_rerank,
        "--truncate-dim is for the task embed": flags.truncate_dim is not None
        and flags.task != "embed",
        "--stride is for the tasks label and answer": flags.stride is not None
        and flags.task not in ("label", "answer"),
        "--precision is for the task embed": is_quantized and flags.task != "embed",
        "--calibration is for --precision int8 and uint8": flags.calibration
        and flags.precision not in ("int8", "uint8"),
        "--perf measures the model alone; leave out --precision": flags.perf and is_quantized,
        "--write-calibration is for the task embed": flags.write_calibration
        and flags.task != "embed",
        "--write-calibration takes vectors as they are; leave out --out, --perf and --precision": (
            flags.write_calibration and (flags.out or flags.perf or is_quantized)
        ),
        "--perf reads no windows; leave out --stride": flags.perf and flags.stride is not None,
        "--perf takes no --prompt; write it into the text": flags.prompt and flags.perf,
        "--perf measures and writes no results; leave out --out": flags.out and flags.perf,
        "--out writes each text once; leave out --batch-size and --iterations": flags.out
        and (has_copies or flags.iterations > 1),
        "rerank orders all texts at once and takes no --out; use --json": flags.out and is_rerank,
        "rerank takes its documents as one batch; leave out --batch-size": is_rerank
        and has_copies
        and not flags.perf,
    }
    for message, conflict in conflicts.items():
        if conflict:
            raise InputError(message)
    if flags.calibration:
        from packhorse.runtime.precision import load_ranges

        load_ranges(flags.calibration)  # refuses what is no such file
    if flags.out:  # refuses a format that cannot hold the results
        format_of(flags.out, VECTOR_SHAPES.get(flags.task, {}))


def _read_records(texts: Sequence[str], flags: RunFlags) -> Iterable[Record]:
    """Return the texts to encode; the first is read at once, so that a bad file fails early."""
    if not flags.input:
        records = _argument_records(texts or [DEFAULT_TEXT], flags)
        prepare_texts(flags.task, [record.text for record in records], flags.query)
        return records
    if flags.input == "-":
        hub.resolve(flags.checkpoint or flags.model)  # before it waits for a slow pipe
    stream = read_texts(
        flags.input,
        flags.column,
        pair=flags.pair,
        skip_empty=flags.skip_empty,
        keep_empty=flags.keep_empty,
        keep=flags.kept,
        form=flags.form,
    )
    first = next(stream, None)
    if first is None:
        source = "standard input" if flags.input == "-" else flags.input
        if not flags.out:
            raise InputError(f"{source} holds no text")
        note(f"{source} holds no text; the results are an empty file")
        return iter(())
    prepare_texts(flags.task, [first.text], flags.query)
    return chain([first], stream)


def _argument_records(texts: Sequence[str], flags: RunFlags) -> list[Record]:
    for number, text in enumerate(texts, 1):
        if not text.strip() and not flags.keep_empty:
            raise InputError(
                f"text {number} is empty; there is nothing to encode (--keep-empty encodes it)"
            )
    names = kept_names(["text"], flags.kept, "the texts")
    return [
        Record(
            i,
            split_pair(text, f"text {i + 1}") if flags.pair else text,
            i,
            {new: text for new in names.values()},
        )
        for i, text in enumerate(texts)
    ]


def _load(flags: RunFlags, devices: Sequence[str | None], has_text: bool) -> list["Encoder"]:
    from packhorse.device import describe, dtype_name
    from packhorse.runtime.loading import load

    encoders = [
        load(
            flags.checkpoint or flags.model,
            device=device,
            dtype=flags.dtype if flags.dtype or has_text else "fp32",
            kernel=flags.kernel,
            graphs=flags.graphs,
            invariant=flags.invariant,
            truncate_dim=flags.truncate_dim,
            **flags.model_flags.load_options(),
        )
        for device in devices
    ]
    encoder = encoders[0]
    places = " and ".join(describe(encoder.device) for encoder in encoders)
    facts = [places, dtype_name(encoder.dtype), f"{encoder.kernel} kernel"]
    facts += [name for name in ("graphs", "invariant") if getattr(flags, name)]
    note(f"{encoder.name}: {', '.join(facts)}")
    return encoders


def _print_results(records: Iterable[Record], encoder: "Encoder", flags: RunFlags) -> None:
    show_all = flags.json or not flags.input or flags.task == "rerank"
    remaining = iter(records)
    chosen = list(remaining if show_all else islice(remaining, MAX_SHOWN))
    results: list[tuple[Record, Row]] = []
    for _ in range(flags.iterations):
        results = result_rows(flags.task, chosen, encoder, flags.task_options, flags.batch_size)
    rows = [{"id": record.id, "text": _joined(record.text), **row} for record, row in results]
    if not flags.json:
        TASKS[flags.task].show(rows)
    emit({**run_facts([encoder], flags), "results": rows}, flags.json)
    if next(remaining, None) is not None:
        note(f"these are the first {MAX_SHOWN} texts; --out FILE or --json gives all")


def _joined(text: str | tuple[str, str]) -> str:
    return text if isinstance(text, str) else "\t".join(text)


def _measure(records: Iterable[Record], encoder: "Encoder", flags: RunFlags) -> None:
    texts = prepare_texts(flags.task, [record.text for record in records], flags.query)
    if flags.task == "rerank":
        texts = [(flags.query or "", str(text)) for text in texts]
    sizes = {"batch_size": flags.batch_size, "iterations": flags.iterations}
    spec = spec_of(flags.task)
    head = spec.head if spec.head in ("hidden", *encoder.heads) else spec.instead or spec.head
    figures = perf.measure(encoder, texts, head, max_length=flags.max_length, **sizes)
    if not flags.json:
        perf.show(figures)
    emit({**run_facts([encoder], flags), **sizes, **figures}, flags.json)
