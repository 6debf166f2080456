"""`packhorse evaluate` of vectors and labels: ours, and the same weights by another library.

A task is a function of whatever reads the texts, so both sides go through the same one. The library
beside is a courtesy where nobody asked for it: if it cannot open the model, a line says so and ours
is scored alone. Where it was asked for, that is an error.
"""

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from packhorse.cli.console import emit, note, once, progress, table
from packhorse.cli.evaluate_flags import Options, open_model
from packhorse.cli.flags import DEFAULT_MODEL
from packhorse.data.tasks.labeled import LabeledTexts, TableLayout, read_labeled
from packhorse.data.tasks.retrieval import Collection, read_collection
from packhorse.errors import InputError, PackhorseError
from packhorse.tokens import Text

if TYPE_CHECKING:
    from packhorse.reports.quality import Side, Task
    from packhorse.runtime.encoder import Encoder
    from packhorse.runtime.evaluation.reading import TextReader


@dataclass(frozen=True)
class Work:
    """A task, ready to be done by any side."""

    head: str
    task: "Task"
    sample: Sequence[Text]
    counts: dict[str, int]  # what there is in the input


@dataclass(frozen=True)
class _Subject:
    """The model, for those who read Hugging Face's folders only."""

    model: str
    config: str | None
    vocab: str | None
    heads: int | None
    seed: int = 0


def compare(options: Options) -> None:
    """Do the task, with each side in turn, and show what they made of it."""
    from packhorse.reports import tables as report

    report.check_writable(options.note)
    given = _read(options)
    encoder = open_model(options)
    work = _prepared(given, encoder, options)
    sides = _sides(work, encoder, options)
    _show(sides, work, encoder, options)


def _read(options: Options) -> LabeledTexts | Collection | None:
    """What can be read, and so refused, before there is a model; labels wait for its own."""
    if options.task == "retrieval":
        return read_collection(options.input, options.split).first(options.limit)
    if options.task == "classification":
        return None
    scale = (0.0, 5.0) if options.task == "stsb" else None
    layout = TableLayout(text=options.text, label=options.label, scale=scale)
    rows = read_labeled(options.input, layout, problem="regression")
    if not isinstance(rows.texts[0], tuple):
        raise InputError(f"{options.input}: similarity is of pairs; name two columns with --text")
    return _first(rows, options.limit)


def _first(rows: LabeledTexts, limit: int | None) -> LabeledTexts:
    return replace(rows, texts=rows.texts[:limit], targets=rows.targets[:limit])


def _prepared(
    given: LabeledTexts | Collection | None, encoder: "Encoder", options: Options
) -> Work:
    from packhorse.runtime.evaluation import retrieval, similarity

    if isinstance(given, Collection):
        own = "dot" if encoder.similarity_fn_name == "dot" else "cosine"
        how = {"similarity": options.similarity or own, "skip_same_id": options.skip_same_id}
        counts = {"documents": len(given.documents), "queries": len(given.queries)}
        search = partial(_given, retrieval.judge, given, **how)
        return Work("embed", search, list(given.documents.values()), counts)
    if given is not None:
        alike = partial(_given, similarity.judge, given.texts, given.targets)
        singles = [text for pair in given.texts[:32] for text in pair]
        return Work("embed", alike, singles, {"pairs": len(given.texts)})
    return _classification(encoder, options)


def _given(judge: Any, *data: Any, **how: Any) -> dict[str, float]:
    """Judges take the reader first and the progress last."""
    *known, read, advance = data
    return judge(read, *known, **how, progress=advance)


def _classification(encoder: "Encoder", options: Options) -> Work:
    """By the head, where the model has one; else by its vectors."""
    from packhorse.runtime.evaluation import classification

    layout = TableLayout(text=options.text, label=options.label)
    if "classify" in encoder.heads:
        if options.train:
            raise InputError(f"{encoder.name} classifies by itself; leave --train out")
        known: dict[str, Any] = {"problem": encoder.problem, "labels": encoder.labels}
        rows = _first(read_labeled(options.input, layout, **known), options.limit)
        return Work(
            "classify", partial(_given, classification.judge, rows), rows.texts, _count(rows)
        )
    if not options.train:
        raise InputError(
            f"{encoder.name} has no head that classifies; pass --train FILE, so that a regression "
            "can learn from its vectors"
        )
    train = read_labeled(options.train, layout, problem="single_label")
    rows = read_labeled(options.input, layout, problem="single_label", labels=train.labels)
    rows = _first(rows, options.limit)
    learn = partial(_given, classification.probe, train, rows)
    return Work("embed", learn, rows.texts, _count(rows) | {"train_rows": len(train.texts)})


def _count(rows: LabeledTexts) -> dict[str, int]:
    return {"rows": len(rows.texts), "labels": len(rows.labels)}


def _sides(work: Work, encoder: "Encoder", options: Options) -> list["Side"]:
    """Ours first; the other is opened before, so that what is wrong with it shows at once."""
    from packhorse.reports import quality, text_peers
    from packhorse.runtime.encoder import TruncationWarning
    from packhorse.runtime.evaluation.reading import reader

    wanted = None if options.peer == "none" else text_peers.choose(options.peer, work.head)
    if wanted is None and options.peer is None:
        note("neither sentence-transformers nor transformers is installed: ours alone is scored")
    longest = options.max_length if (options.max_length or 0) > 0 else None
    sides: list[Side] = []

    def measure(engine: str, read: "TextReader") -> None:
        with progress(f"{engine} reads") as advance:
            sides.append(quality.measure(engine, read, work.task, work.sample, advance))

    with TemporaryDirectory(prefix="packhorse-", ignore_cleanup_errors=True) as scratch:
        peer = None
        with _as_asked(options):
            folder = _folder(options, Path(scratch)) if wanted else None
            if wanted and folder:
                length = longest or encoder.max_length
                of = text_peers.Setting(folder, encoder, work.head, length, options.batch_size)
                peer = text_peers.open_peer(wanted, of)
        with once(TruncationWarning):
            measure(quality.OURS, reader(encoder, work.head, longest))
        with _as_asked(options):
            if wanted and peer:
                measure(wanted, peer)
    return sides


@contextmanager
def _as_asked(options: Options) -> Iterator[None]:
    """An error of the other library is one only if it was asked for."""
    try:
        yield
    except PackhorseError as error:
        if options.peer is not None:
            raise
        note(f"ours alone is scored: {error}")


def _folder(options: Options, scratch: Path) -> Path:
    """The model as every library reads it."""
    from packhorse import checkpoint
    from packhorse.reports import subject

    given, model = options.beside, options.model or DEFAULT_MODEL
    if given.gelu or given.ignore:  # which only a folder written anew can say to others
        return checkpoint.write(
            scratch / "model", checkpoint.load(model, **given.given(), dtype=None)
        )
    config, vocab = (path and str(path) for path in (given.config, given.vocab))
    return subject.folder(_Subject(model, config, vocab, given.heads), scratch)


def _show(sides: list["Side"], work: Work, encoder: "Encoder", options: Options) -> None:
    from packhorse.device import dtype_name
    from packhorse.reports import quality
    from packhorse.reports import tables as report

    apart, shown = quality.difference(sides), quality.table(sides)
    table(None, shown.columns, shown.rows)
    remarks = [] if apart is None else [f"largest difference of a measure: {apart:.1e}"]
    for remark in remarks:
        note(remark)
    kind = {"model": encoder.name, "dtype": dtype_name(encoder.dtype)}
    about = {"task": options.task, "input": options.input.name, **kind, **work.counts}
    about |= report.machine(encoder.device)
    if options.note:
        command = shlex.join(["packhorse", *sys.argv[1:]])
        title = f"Quality, {options.task}, {about['date']}"
        facts = {name: str(value) for name, value in about.items()}
        report.write_note(options.note, title, command, facts, shown, remarks)
        note(f"written: {options.note}")
    found = {
        **(about | {"input": str(options.input)}),
        "engines": [asdict(s) | {"texts_per_second": s.texts_per_second} for s in sides],
        "ratio": quality.ratio(sides),
        "largest_difference": apart,
        "equal_to_four_digits": None if apart is None else apart < quality.SAME,
    }
    emit(found, options.json)
