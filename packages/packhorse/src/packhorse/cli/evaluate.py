"""`packhorse evaluate`: score a model on a task, alone or compared with another library.

All tasks share one list of flags. A flag that the chosen task does not use is refused, because the
user expects it to change something. Flags and input are checked before the model is loaded, which
takes longer.

SQuAD's official scripts score a file of predictions. So does `--predictions-in`, with the same
numbers, and `--predictions` writes such a file for anyone to check with those scripts.

The other tasks are functions of a reader, which turns texts into vectors or logits, so both
libraries are scored by the same code. If the user did not choose the other library and it cannot
open the model, a line says so and ours is scored alone; if the user chose it, that is an error.
"""

import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Group, Parameter

from packhorse.cli.console import JsonFlag, emit, note, progress, summarize_warnings, table
from packhorse.cli.flags import DEFAULT_MODEL, ModelFlags, flag
from packhorse.errors import InputError, PackhorseError

if TYPE_CHECKING:
    import numpy as np

    from packhorse.data.tasks.labeled import LabeledTexts
    from packhorse.data.tasks.retrieval import Collection
    from packhorse.data.tasks.squad import Score, SquadQuestion
    from packhorse.reports.quality import EngineScore, ScoringTask
    from packhorse.runtime.encoder import Encoder
    from packhorse.runtime.evaluation.reading import TextReader
    from packhorse.tokens.tokenizer import Text

COMPARED = Group("Similarity, retrieval, classification", sort_key=2)
SQUAD = Group("Squad", sort_key=3)

SQUAD_WINDOW = 384  # tokens, as BERT's own script
SQUAD_STRIDE = 128
SQUAD_PARTS = {
    "has_answer": "with an answer",
    "no_answer": "without an answer",
    "within_top_k": "best of top-k",
}

# The tasks of each flag; a flag that is not listed belongs to all of them.
SQUAD_ONLY = ("squad",)
LABELED = ("stsb", "sts", "classification")
VECTORS_ONLY = ("stsb", "sts", "retrieval")
NOT_SQUAD = ("stsb", "sts", "retrieval", "classification")
TASKS_OF_FLAG: dict[str, tuple[str, ...]] = {
    "stride": SQUAD_ONLY,
    "max_answer_tokens": SQUAD_ONLY,
    "no_answer": SQUAD_ONLY,
    "top_k": SQUAD_ONLY,
    "predictions": SQUAD_ONLY,
    "overwrite": SQUAD_ONLY,
    "predictions_in": SQUAD_ONLY,
    "text": LABELED,
    "label": LABELED,
    "train": ("classification",),
    "split": ("retrieval",),
    "similarity": ("retrieval",),
    "skip_same_id": ("retrieval",),
    "precision": VECTORS_ONLY,
    "calibration": VECTORS_ONLY,
    "outputs": ("retrieval",),
    "fusion": ("retrieval",),
    "weights": ("retrieval",),
    "peer": NOT_SQUAD,
    "batch_size": NOT_SQUAD,
    "note": NOT_SQUAD,
}
POSITIVE_FLAGS = ("top_k", "limit", "max_answer_tokens", "batch_size")


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateFlags:
    """The flags of `packhorse evaluate`."""

    task: Annotated[
        Literal["squad", "stsb", "sts", "retrieval", "classification"],
        flag(help="What to score."),
    ]
    input: Annotated[
        Path,
        flag(
            help="The data. squad: JSON, also gzip or zip. stsb, sts, classification: csv, tsv, "
            "jsonl, parquet. retrieval: a folder in BEIR's layout, or a SQuAD file."
        ),
    ]
    model: Annotated[
        str | None,
        flag(
            "--model",
            "-m",
            help="A folder, a file or a hub id; default all-MiniLM-L6-v2, except for squad.",
        ),
    ] = None
    model_flags: ModelFlags = ModelFlags()  # noqa: RUF009 (frozen)
    device: Annotated[str | None, flag(help="cpu, cuda or cuda:1.")] = None
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16", "int8", "float8", "auto"] | None,
        flag(help="Number format."),
    ] = None
    max_length: Annotated[
        int | None,
        flag(
            help="Truncate texts to this many tokens; default the model's own limit, for squad "
            "windows of 384."
        ),
    ] = None
    limit: Annotated[int | None, flag(help="Use only the first N questions, rows or queries.")] = (
        None
    )
    json: JsonFlag = False

    peer: Annotated[
        Literal["sentence-transformers", "transformers", "none"] | None,
        flag(
            "--beside",
            group=COMPARED,
            help="Score the same weights with this library too; default one that is installed.",
        ),
    ] = None
    batch_size: Annotated[
        int, flag(group=COMPARED, help="Batch size of that library.", show_default=True)
    ] = 32
    text: Annotated[
        tuple[str, ...],
        flag(group=COMPARED, help="Column of the text; pass it twice for the texts of a pair."),
    ] = ()
    label: Annotated[
        tuple[str, ...], flag(group=COMPARED, help="Column of the label or score.")
    ] = ()
    train: Annotated[
        Path | None,
        flag(
            group=COMPARED,
            help="For classification by vectors: labeled rows to train the classifier on.",
        ),
    ] = None
    split: Annotated[
        str | None, flag(group=COMPARED, help="For retrieval: use qrels/SPLIT.tsv; default test.")
    ] = None
    similarity: Annotated[
        Literal["cosine", "dot"] | None,
        flag(group=COMPARED, help="For retrieval: similarity of vectors; default the model's own."),
    ] = None
    skip_same_id: Annotated[
        bool,
        flag(
            group=COMPARED,
            help="For retrieval: never count the document with the query's own id (ArguAna).",
        ),
    ] = False
    precision: Annotated[
        tuple[Literal["int8", "ubinary"], ...],
        flag(
            group=COMPARED,
            help="For similarity and retrieval: also score vectors in bytes (int8) or bits "
            "(ubinary), beside our own; repeatable.",
        ),
    ] = ()
    calibration: Annotated[
        Path | None,
        flag(
            group=COMPARED,
            help="Also score int8 by the ranges of this file, which run --write-calibration wrote.",
        ),
    ] = None
    outputs: Annotated[
        str | None,
        flag(
            group=COMPARED,
            help="For retrieval: what to compare by, of dense, sparse and multi, as dense,sparse; "
            "each is scored by itself, and several also together. Default dense, or what the "
            "model makes.",
        ),
    ] = None
    fusion: Annotated[
        Literal["rrf", "weighted"],
        flag(
            group=COMPARED,
            help="For several outputs: combine them by their ranks (rrf), or by a weighted sum of "
            "their scores, each scaled to 0 … 1 for a query.",
            show_default=True,
        ),
    ] = "rrf"
    weights: Annotated[
        str | None,
        flag(group=COMPARED, help="Weights of the outputs, as 0.4,0.2,0.4; default all equal."),
    ] = None
    note: Annotated[
        Path | None,
        flag(
            group=COMPARED, help="Write a dated Markdown note with the machine, command and table."
        ),
    ] = None

    stride: Annotated[
        int | None,
        flag(
            group=SQUAD,
            help="Tokens that consecutive windows share; default 128, or a quarter of shorter "
            "windows.",
        ),
    ] = None
    max_answer_tokens: Annotated[
        int, flag(group=SQUAD, help="Maximum tokens of an answer.", show_default=True)
    ] = 30
    no_answer: Annotated[
        float | None,
        flag(
            group=SQUAD,
            help="Predict no answer if that scores higher than the best answer by more than this; "
            "default 0 for v2.0, for v1.1 always answer.",
        ),
    ] = None
    top_k: Annotated[
        int, flag(group=SQUAD, help="Also score the best of the top N answers.", show_default=True)
    ] = 1
    predictions: Annotated[
        Path | None,
        flag(group=SQUAD, help="Write the predictions to this file, as JSON of id and text."),
    ] = None
    overwrite: Annotated[bool, flag(group=SQUAD, help="Replace that file if it exists.")] = False
    predictions_in: Annotated[
        Path | None,
        flag(group=SQUAD, help="Score this file of predictions instead of a model."),
    ] = None


def evaluate(flags: EvaluateFlags) -> None:
    """Score a model on a task with known answers.

    squad: exact match and F1, as the official scripts compute them. Contexts
    longer than a window are read in several windows. For v2.0, questions with and
    without an answer are also scored separately, and the best value of
    --no-answer is shown.

    stsb, sts: correlation between the similarity of vectors and human scores (0 to
    5 for stsb, any for sts). retrieval: nDCG@10, MAP, MRR@10 and recall, as
    trec_eval computes them. classification: accuracy, F1 and Matthews correlation
    of a model's head; for a model without one, of a logistic regression on its
    vectors, as in MTEB (--train). These tasks also score the same weights with
    sentence-transformers or transformers in the same run, and show both times.

    Try:
      packhorse evaluate --task stsb --input stsb-en-dev.csv
      packhorse evaluate --task stsb --input dev.csv --precision int8 --precision ubinary
      packhorse evaluate --task retrieval --input ./scifact --beside none
      packhorse evaluate --task retrieval --input ./scifact --outputs dense,sparse,multi
      packhorse evaluate --task retrieval --input dev-v1.1.json --json
      packhorse evaluate --task classification --input test.tsv --train train.tsv
      packhorse evaluate --task squad --input dev-v1.1.json --model ./bert-squad
      packhorse evaluate --task squad --input dev-v2.0.json --predictions-in p.json
    """
    _check_flags(flags)
    if flags.task == "squad":
        _evaluate_squad(flags)
    else:
        _evaluate_compared(flags)


def _check_flags(flags: EvaluateFlags) -> None:
    """Refuse counts below 1, flags of another task, and those that contradict each other."""
    for name in POSITIVE_FLAGS:
        value = getattr(flags, name)
        if value is not None and value < 1:
            raise InputError(f"{_spelling(name)} is {value}; it must be 1 or more")
    for field in fields(flags):
        tasks = TASKS_OF_FLAG.get(field.name, (flags.task,))
        if flags.task not in tasks and getattr(flags, field.name) != field.default:
            raise InputError(f"{_spelling(field.name)} is for --task {' or '.join(tasks)}")
    if flags.precision and flags.peer not in (None, "none"):
        raise InputError("--precision compares our own vectors; leave out --beside")
    if flags.calibration and "int8" not in flags.precision:
        raise InputError("--calibration has ranges of int8; pass --precision int8")
    if flags.calibration:
        from packhorse.runtime.precision import load_ranges

        load_ranges(flags.calibration)  # refuses what is no such file


def _spelling(field_name: str) -> str:
    return "--beside" if field_name == "peer" else f"--{field_name.replace('_', '-')}"


def _load_model(flags: EvaluateFlags) -> "Encoder":
    from packhorse.device import describe, dtype_name
    from packhorse.runtime.loading import load

    encoder = load(
        flags.model or DEFAULT_MODEL,
        device=flags.device,
        dtype=flags.dtype,
        **flags.model_flags.load_options(),
    )
    note(
        f"{encoder.name}: {describe(encoder.device)}, {dtype_name(encoder.dtype)}, "
        f"{encoder.kernel} kernel"
    )
    return encoder


# Similarity, retrieval and classification: ours compared with another library ------------------


@dataclass(frozen=True)
class PreparedTask:
    """A task with its data, ready to be scored with any library."""

    head: str
    task: "ScoringTask"
    sample: Sequence["Text"]
    counts: dict[str, int]  # what the input holds
    outputs: tuple[str, ...] = ()  # of retrieval by other outputs than dense vectors


@dataclass(frozen=True)
class _ModelToWrite:
    """The model to write as a folder that other libraries read (`reports.subject`)."""

    model: str
    config: str | None
    vocab: str | None
    heads: int | None
    seed: int = 0


def _evaluate_compared(flags: EvaluateFlags) -> None:
    """Score the task with each library in turn, and show the scores."""
    from packhorse.reports import tables as report

    report.check_writable(flags.note)
    data = _read_data(flags)
    encoder = _load_model(flags)
    work = (
        _prepare_classification(encoder, flags) if data is None else _prepare(data, encoder, flags)
    )
    scores = _score_engines(work, encoder, flags)
    _show_scores(scores, work, encoder, flags)


def _read_data(flags: EvaluateFlags) -> "LabeledTexts | Collection | None":
    """Read and check the data before the model is loaded; None if it needs the model's labels."""
    from packhorse.data.tasks.labeled import TableLayout, read_labeled
    from packhorse.data.tasks.retrieval import read_collection

    if flags.task == "retrieval":
        return read_collection(flags.input, flags.split).first(flags.limit)
    if flags.task == "classification":
        return None
    scale = (0.0, 5.0) if flags.task == "stsb" else None
    layout = TableLayout(text=flags.text, label=flags.label, scale=scale)
    rows = read_labeled(flags.input, layout, problem="regression")
    if not isinstance(rows.texts[0], tuple):
        raise InputError(f"{flags.input}: similarity needs pairs; name two columns with --text")
    return _first_rows(rows, flags.limit)


def _first_rows(rows: "LabeledTexts", limit: int | None) -> "LabeledTexts":
    return replace(rows, texts=rows.texts[:limit], targets=rows.targets[:limit])


def _prepare(
    data: "LabeledTexts | Collection", encoder: "Encoder", flags: EvaluateFlags
) -> PreparedTask:
    from packhorse.data.tasks.retrieval import Collection
    from packhorse.runtime.evaluation import fusion, retrieval, similarity

    if isinstance(data, Collection):
        default = "dot" if encoder.similarity_fn_name == "dot" else "cosine"
        counts = {"documents": len(data.documents), "queries": len(data.queries)}
        outputs = _outputs(encoder, flags)
        if flags.weights is not None and len(outputs) == 1:
            raise InputError(
                f"--weights is for several outputs, and {outputs[0]} alone would be scored; name "
                "them with --outputs, as dense,sparse"
            )
        if outputs != ("dense",):
            if flags.precision:
                raise InputError(
                    f"--precision is for dense vectors, and {', '.join(outputs)} would be scored; "
                    "leave one out"
                )
            task = partial(
                _judge,
                fusion.judge,
                data,
                outputs=outputs,
                fusion=flags.fusion,
                weights=fusion.parse_weights(flags.weights, outputs),
                similarity=flags.similarity or default,
                skip_same_id=flags.skip_same_id,
            )
            sample = list(data.documents.values())
            return PreparedTask("outputs", task, sample, counts, outputs)
        task = partial(
            _judge,
            retrieval.judge,
            data,
            similarity=flags.similarity or default,
            skip_same_id=flags.skip_same_id,
        )
        return PreparedTask("embed", task, list(data.documents.values()), counts)
    task = partial(_judge, similarity.judge, data.texts, data.targets)
    sample = [text for pair in data.texts[:32] for text in pair]
    return PreparedTask("embed", task, sample, {"pairs": len(data.texts)})


def _outputs(encoder: "Encoder", flags: EvaluateFlags) -> tuple[str, ...]:
    """Return the outputs to compare by, which the model must have."""
    from packhorse.runtime.evaluation.fusion import OUTPUTS, parse_outputs
    from packhorse.runtime.tasks import TASKS

    able = [o for o, task in OUTPUTS.items() if TASKS[task].is_served_by(encoder.heads)]
    if flags.outputs is None:
        return ("dense",) if "dense" in able or not able else (able[0],)
    outputs = parse_outputs(flags.outputs)
    lacking = [output for output in outputs if output not in able]
    if lacking:
        raise InputError(
            f"{encoder.name} makes no {lacking[0]} output; it makes {', '.join(able) or 'none'}"
        )
    return outputs


def _judge(judge: Any, *arguments: Any, **options: Any) -> dict[str, float]:
    """Call a judge of `runtime.evaluation`, which takes the reader first and the progress last."""
    *data, read, advance = arguments
    return judge(read, *data, **options, progress=advance)


def _prepare_classification(encoder: "Encoder", flags: EvaluateFlags) -> PreparedTask:
    """Classify with the model's head if it has one, else with a regression on its vectors."""
    from packhorse.data.tasks.labeled import TableLayout, read_labeled
    from packhorse.runtime.evaluation import classification

    layout = TableLayout(text=flags.text, label=flags.label)
    if "classify" in encoder.heads:
        if flags.train:
            raise InputError(f"{encoder.name} has a head that classifies; leave --train out")
        problem: Any = encoder.problem  # a str of the checkpoint, checked when it was loaded
        rows = read_labeled(flags.input, layout, problem=problem, labels=encoder.labels)
        rows = _first_rows(rows, flags.limit)
        task = partial(_judge, classification.judge, rows)
        return PreparedTask("classify", task, rows.texts, _count(rows))
    if not flags.train:
        raise InputError(
            f"{encoder.name} has no head that classifies; pass --train FILE to train a regression "
            "on its vectors"
        )
    train = read_labeled(flags.train, layout, problem="single_label")
    rows = read_labeled(flags.input, layout, problem="single_label", labels=train.labels)
    rows = _first_rows(rows, flags.limit)
    task = partial(_judge, classification.probe, train, rows)
    counts = _count(rows) | {"train_rows": len(train.texts)}
    return PreparedTask("embed", task, rows.texts, counts)


def _count(rows: "LabeledTexts") -> dict[str, int]:
    return {"rows": len(rows.texts), "labels": len(rows.labels)}


def _score_engines(
    work: PreparedTask, encoder: "Encoder", flags: EvaluateFlags
) -> list["EngineScore"]:
    """Score ours, then the peer; the peer is opened first, so that its errors show at once."""
    from packhorse.reports import quality, text_peers
    from packhorse.runtime.encoder import TruncationWarning
    from packhorse.runtime.evaluation import fusion
    from packhorse.runtime.evaluation.reading import quantized, reader

    is_alone = flags.peer == "none" or bool(flags.precision)
    peer = None if is_alone else text_peers.choose_peer(flags.peer, work.head)
    if peer is None and not is_alone:
        note("neither sentence-transformers nor transformers is installed: ours alone is scored")
    max_length = flags.max_length if (flags.max_length or 0) > 0 else None
    precisions = _precisions(flags)
    scores: list[EngineScore] = []

    def measure(engine: str, read: "TextReader") -> None:
        with progress(f"{engine} reads") as advance:
            scores.append(quality.measure(engine, read, work.task, work.sample, advance))

    with TemporaryDirectory(prefix="packhorse-", ignore_cleanup_errors=True) as scratch:
        peer_reader = None
        with _optional_peer(flags):
            if peer:
                setting = text_peers.TextPeerSetting(
                    _model_folder(flags, Path(scratch)),
                    encoder,
                    work.head,
                    max_length or encoder.max_length,
                    flags.batch_size,
                    work.outputs,
                )
                peer_reader = text_peers.open_peer(peer, setting)
        with summarize_warnings(TruncationWarning):
            our_reader: Any = (
                fusion.reader(encoder, work.outputs, max_length)
                if work.outputs
                else reader(encoder, work.head, max_length)
            )
            measure(quality.OURS, our_reader)
            for name, precision, ranges in precisions:
                measure(name, quantized(our_reader, precision, ranges))
        with _optional_peer(flags):
            if peer and peer_reader:
                measure(peer, peer_reader)
    return scores


def _precisions(flags: EvaluateFlags) -> "list[tuple[str, str, np.ndarray | None]]":
    """Return the number types to score beside floats: a name, the type, its ranges."""
    from packhorse.reports.quality import OURS
    from packhorse.runtime.precision import load_ranges

    rows: list[tuple[str, str, np.ndarray | None]] = []
    for precision in flags.precision:
        rows.append((f"{OURS} {precision}", precision, None))
        if precision == "int8" and flags.calibration:
            rows.append((f"{OURS} int8 calibrated", precision, load_ranges(flags.calibration)))
    return rows


@contextmanager
def _optional_peer(flags: EvaluateFlags) -> Iterator[None]:
    """Turn an error of the peer into a note, unless the user chose it."""
    try:
        yield
    except PackhorseError as error:
        if flags.peer is not None:
            raise
        note(f"ours alone is scored: {error}")


def _model_folder(flags: EvaluateFlags, scratch: Path) -> Path:
    """Return the model as a folder that every library reads."""
    from packhorse import checkpoint
    from packhorse.reports import subject

    options = flags.model_flags
    model = flags.model or DEFAULT_MODEL
    # Other libraries learn of these only from a new folder.
    if options.gelu or options.ignore or options.adapter:
        loaded = checkpoint.load(model, **options.load_options(), dtype=None)
        return checkpoint.write(scratch / "model", loaded)
    config = str(options.config) if options.config else None
    vocab = str(options.vocab) if options.vocab else None
    return subject.folder(_ModelToWrite(model, config, vocab, options.heads), scratch)


def _show_scores(
    scores: list["EngineScore"], work: PreparedTask, encoder: "Encoder", flags: EvaluateFlags
) -> None:
    from packhorse.device import dtype_name
    from packhorse.reports import quality
    from packhorse.reports import tables as report

    difference = None if flags.precision else quality.difference(scores)
    shown = quality.table(scores)
    table(None, shown.columns, shown.rows)
    remarks = [] if difference is None else [f"largest difference of a measure: {difference:.1e}"]
    for remark in remarks:
        note(remark)
    facts = {
        "task": flags.task,
        "input": flags.input.name,
        "model": encoder.name,
        "dtype": dtype_name(encoder.dtype),
        **work.counts,
        **report.machine(encoder.device),
    }
    if flags.note:
        command = shlex.join(["packhorse", *sys.argv[1:]])
        title = f"Quality, {flags.task}, {facts['date']}"
        lines = {name: str(value) for name, value in facts.items()}
        report.write_note(flags.note, title, command, lines, shown, remarks)
        note(f"written: {flags.note}")
    document = {
        **facts,
        "input": str(flags.input),
        "engines": [
            asdict(score) | {"texts_per_second": score.texts_per_second} for score in scores
        ],
        "ratio": quality.ratio(scores),
        "largest_difference": difference,
        "equal_to_four_digits": None if difference is None else difference < quality.SAME,
    }
    emit(document, flags.json)


# SQuAD -----------------------------------------------------------------------------------------


def _evaluate_squad(flags: EvaluateFlags) -> None:
    """Score a model, or a file of predictions, on SQuAD's questions."""
    _check_squad_flags(flags)
    questions = _read_questions(flags)
    if flags.predictions_in is not None:
        result = _score_predictions(questions, flags.predictions_in)
    else:
        result = _score_answers(questions, flags)
    _show_squad(result)
    emit({"task": flags.task, "input": str(flags.input), **result}, flags.json)


def _check_squad_flags(flags: EvaluateFlags) -> None:
    if (flags.model is None) == (flags.predictions_in is None):
        raise InputError("pass either --model or, to score a file, --predictions-in")
    if out := flags.predictions:
        if flags.predictions_in is not None:
            raise InputError("--predictions writes what a model predicts; pass --model")
        if out.exists() and not flags.overwrite:
            raise InputError(f"{out} exists; choose another name or pass --overwrite")
        if not out.parent.is_dir():
            raise InputError(f"{out}: there is no folder {out.parent}")


def _read_questions(flags: EvaluateFlags) -> list["SquadQuestion"]:
    from packhorse.data.tasks.squad import read_squad

    questions = list(islice(read_squad(flags.input), flags.limit))
    if not questions:
        raise InputError(f"{flags.input}: there is no question in it")
    misplaced = sum(len(question.misplaced()) for question in questions)
    if misplaced:
        answers = sum(len(question.answers) for question in questions)
        note(
            f"warning: {misplaced} of {answers} answers are not at the offset in their context "
            f"that {flags.input} states; only their text is used"
        )
    return questions


def _score_predictions(questions: list["SquadQuestion"], path: Path) -> dict[str, Any]:
    """Score a file of predictions."""
    from packhorse.data.tasks.squad import marks, read_predictions, score

    predictions = read_predictions(path)
    missing = sum(question.id not in predictions for question in questions)
    if missing:
        note(f"warning: {missing} of {len(questions)} questions have no prediction: counted wrong")
    answers = {id: [text] for id, text in predictions.items()}
    return {**_flatten(score(questions, marks(questions, answers))), "missing": missing}


def _score_answers(questions: list["SquadQuestion"], flags: EvaluateFlags) -> dict[str, Any]:
    """Ask a model all questions, and score its answers."""
    from packhorse.data.tasks.squad import is_v2, write_predictions
    from packhorse.runtime.evaluation.answering import ask, judge

    encoder = _load_model(flags)
    settings = {
        **_squad_windows(flags, encoder.max_length),
        "top_k": flags.top_k,
        "max_answer_tokens": flags.max_answer_tokens,
    }
    start = time.perf_counter()
    with progress("answering") as advance:
        replies = ask(encoder, questions, **settings, progress=advance)
    seconds = time.perf_counter() - start
    threshold = 0.0 if flags.no_answer is None and is_v2(questions) else flags.no_answer
    report = judge(questions, replies, threshold, flags.top_k)
    if flags.predictions:
        write_predictions(flags.predictions, report.predictions)
        note(f"{flags.predictions}: {len(report.predictions):,} predictions")
    result = _flatten(report.score)
    if flags.top_k > 1:
        result["within_top_k"] = asdict(report.within)
    if report.best:
        result["best"] = {name: best._asdict() for name, best in report.best.items()}
    return {
        **result,
        "seconds": seconds,
        "questions_per_second": len(questions) / seconds,
        "model": encoder.name,
        "threshold": threshold,
        **settings,
    }


def _squad_windows(flags: EvaluateFlags, model_length: int) -> dict[str, Any]:
    """Return length and stride of the windows: the usual ones, if the model is long enough."""
    length = SQUAD_WINDOW if flags.max_length is None else flags.max_length
    length = min(length, model_length) if length > 0 else model_length
    stride = flags.stride
    if stride is None and length >= SQUAD_WINDOW:
        stride = SQUAD_STRIDE
    shared = "a quarter is" if stride is None else f"{stride} are"
    note(f"windows of {length} tokens, of which {shared} shared with the next")
    return {"max_length": length, "stride": stride}


def _flatten(scores: "dict[str, Score]") -> dict[str, Any]:
    """Return the score of all questions, followed by those of each part by name."""
    parts = {name: asdict(part) for name, part in scores.items()}
    return {**parts.pop("all"), **parts}


def _show_squad(result: dict[str, Any]) -> None:
    columns = ["", "exact match", "F1", "questions"]
    row = ["all questions", result["exact_match"], result["f1"], result["questions"]]
    rows = [row]
    for name, label in SQUAD_PARTS.items():
        if isinstance(part := result.get(name), dict):
            rows.append([label, *part.values()])
    if "seconds" in result:  # a file of predictions has no time
        columns += ["seconds", "questions/s"]
        row += [result["seconds"], result["questions_per_second"]]
        for part_row in rows[1:]:
            part_row += [None, None]
    table(None, columns, rows)
    for measure, best in result.get("best", {}).items():
        name = measure.replace("_", " ")
        note(f"best {name} {best['score']:.2f}, with --no-answer {best['threshold']:.4g}")
