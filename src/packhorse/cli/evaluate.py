"""`packhorse evaluate`: how well a model, or a file of predictions, does a task.

SQuAD's official scripts score a file of predictions. So does this (`--predictions-in`), with the
same numbers, and it writes such a file (`--predictions`) for anyone to check with theirs. What is
asked is checked before the model is opened, because that is what takes time.
"""

import time
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from packhorse.cli.console import emit, note, progress, table
from packhorse.cli.flags import Beside
from packhorse.data.tasks import Question, read_predictions, read_squad, write_predictions
from packhorse.errors import InputError

if TYPE_CHECKING:
    from packhorse.data.squad_score import Score
    from packhorse.runtime.encoder import Encoder

SWITCH = Parameter(negative="", show_default=False)


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The flags of `packhorse evaluate`."""

    task: Annotated[Literal["squad"], Parameter(help="What is in the input.")]
    input: Annotated[Path, Parameter(help="SQuAD v1.1 or v2.0: JSON, also in gzip or zip.")]
    model: Annotated[
        str | None, Parameter(name=("--model", "-m"), help="A folder, a file or a hub id.")
    ] = None
    beside: Beside = Beside()  # noqa: RUF009 (frozen)
    device: Annotated[str | None, Parameter(help="cpu, cuda, cuda:1.")] = None
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16", "auto"] | None, Parameter(help="Number format.")
    ] = None
    max_length: Annotated[
        int, Parameter(help="Tokens a window at most; the model's own length if that is less.")
    ] = 384
    stride: Annotated[
        int | None,
        Parameter(help="Tokens that windows share; default 128, or a quarter of shorter ones."),
    ] = None
    max_answer_tokens: Annotated[int, Parameter(help="Tokens an answer has at most.")] = 30
    no_answer: Annotated[
        float | None,
        Parameter(
            help="Answer nothing where that scores higher than the best answer by more than this; "
            "default 0 for v2.0, for v1.1 always answer."
        ),
    ] = None
    top_k: Annotated[int, Parameter(help="Also count the best of so many answers.")] = 1
    limit: Annotated[int | None, Parameter(help="Only the first so many questions.")] = None
    predictions: Annotated[
        Path | None, Parameter(help="Write what is predicted, as JSON of id and text.")
    ] = None
    overwrite: Annotated[bool, SWITCH, Parameter(help="Replace that file.")] = False
    predictions_in: Annotated[
        Path | None, Parameter(help="Score this file of predictions; no model is needed.")
    ] = None
    json: Annotated[bool, SWITCH, Parameter(help="One line of JSON at the end.")] = False


def evaluate(options: Options) -> None:
    """Score a model on SQuAD: exact match and F1, as the official scripts count them.

    Contexts longer than a window are read in several. For v2.0, questions with
    and without an answer are also scored apart, and the --no-answer that would
    have been best is given.

    Try:
      packhorse evaluate --task squad --input dev-v1.1.json --model ./bert-squad
      packhorse evaluate --task squad --input dev-v2.0.json --predictions-in p.json
    """
    _check(options)
    questions = _read(options)
    given = options.predictions_in is not None
    found = _scored(questions, options) if given else _evaluated(questions, options)
    _show(found)
    emit({"task": options.task, "input": str(options.input), **found}, options.json)


def _check(options: Options) -> None:
    """Refuse what cannot be meant."""
    for name in ("top_k", "limit", "max_answer_tokens"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise InputError(f"--{name.replace('_', '-')} is {value}; it must be 1 or more")
    if (options.model is None) == (options.predictions_in is None):
        raise InputError("pass either --model or, to score a file, --predictions-in")
    if out := options.predictions:
        if options.predictions_in is not None:
            raise InputError("--predictions is what a model predicts; pass --model")
        if out.exists() and not options.overwrite:
            raise InputError(f"{out} exists; choose another name or pass --overwrite")
        if not out.parent.is_dir():
            raise InputError(f"{out}: there is no folder {out.parent}")


def _read(options: Options) -> list[Question]:
    questions = list(islice(read_squad(options.input), options.limit))
    if not questions:
        raise InputError(f"{options.input}: there is no question in it")
    misplaced = sum(len(question.misplaced()) for question in questions)
    if misplaced:
        every = sum(len(question.answers) for question in questions)
        note(
            f"warning: {misplaced} of {every} answers do not stand in their context where "
            f"{options.input} says; only their text is used"
        )
    return questions


def _scored(questions: list[Question], options: Options) -> dict[str, Any]:
    """The score of a file of predictions."""
    from packhorse.data.squad_score import marks, score

    predicted = read_predictions(options.predictions_in or Path())
    missing = sum(question.id not in predicted for question in questions)
    if missing:
        note(f"warning: {missing} of {len(questions)} questions have no prediction: counted wrong")
    found = score(questions, marks(questions, {id: [text] for id, text in predicted.items()}))
    return {**_parts(found), "missing": missing}


def _evaluated(questions: list[Question], options: Options) -> dict[str, Any]:
    """The score of a model, which is asked all the questions."""
    from packhorse.data.squad_score import is_v2
    from packhorse.runtime.evaluation import ask, judge

    encoder = _load(options)
    how = _windows(options, encoder.max_length)
    start = time.perf_counter()
    with progress("answering") as advance:
        asked = {"top_k": options.top_k, "max_answer_tokens": options.max_answer_tokens}
        replies = ask(encoder, questions, **how, **asked, progress=advance)
    seconds = time.perf_counter() - start
    threshold = 0.0 if options.no_answer is None and is_v2(questions) else options.no_answer
    report = judge(questions, replies, threshold, options.top_k)
    if options.predictions:
        write_predictions(options.predictions, report.predictions)
        note(f"{options.predictions}: {len(report.predictions):,} predictions")
    within = {"within_top_k": asdict(report.within)} if options.top_k > 1 else {}
    best = {"best": {name: best._asdict() for name, best in report.best.items()}}
    times = {"seconds": seconds, "questions_per_second": len(questions) / seconds}
    run = {"model": encoder.name, "threshold": threshold, **how, **asked}
    return {**_parts(report.score), **within, **(best if report.best else {}), **times, **run}


def _windows(options: Options, longest: int) -> dict[str, Any]:
    """How long contexts are read: as is the custom, where the model is long enough for that."""
    length = min(options.max_length, longest) if options.max_length > 0 else longest
    stride = 128 if options.stride is None and length >= 384 else options.stride
    shared = "a quarter is" if stride is None else f"{stride} are"
    note(f"windows of {length} tokens, of which {shared} shared with the next")
    return {"max_length": length, "stride": stride}


def _parts(found: "dict[str, Score]") -> dict[str, Any]:
    """The score of all, and by name those of some."""
    parts = {name: asdict(part) for name, part in found.items()}
    return {**parts.pop("all"), **parts}


def _load(options: Options) -> "Encoder":
    from packhorse.device import describe, dtype_name
    from packhorse.runtime.loading import load

    kind = {"device": options.device, "dtype": options.dtype}
    encoder = load(options.model or "", **kind, **options.beside.given())
    how = (describe(encoder.device), dtype_name(encoder.dtype), f"{encoder.kernel} kernel")
    note(f"{encoder.name}: {', '.join(how)}")
    return encoder


PARTS = {
    "has_answer": "with an answer",
    "no_answer": "without an answer",
    "within_top_k": "best of top-k",
}


def _show(found: dict[str, Any]) -> None:
    timed = "seconds" in found
    times = [found["seconds"], found["questions_per_second"]] if timed else []
    rows = [["all questions", found["exact_match"], found["f1"], found["questions"], *times]]
    for name, label in PARTS.items():
        if isinstance(part := found.get(name), dict):
            rows.append([label, *part.values(), *[None] * len(times)])
    names = ["", "exact match", "F1", "questions", *["seconds", "questions/s"][: len(times)]]
    table(None, names, rows)
    for measure, best in found.get("best", {}).items():
        name = measure.replace("_", " ")
        note(f"best {name} {best['score']:.2f}, with --no-answer {best['threshold']:.4g}")
