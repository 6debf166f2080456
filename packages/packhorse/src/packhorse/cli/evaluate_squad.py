"""`packhorse evaluate --task squad`: exact match and F1 of a model, or of a file of predictions.

SQuAD's official scripts score a file of predictions. So does this (`--predictions-in`), with the
same numbers, and it writes such a file (`--predictions`) for anyone to check with theirs.
"""

import time
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packhorse.cli.console import emit, note, progress, table
from packhorse.cli.evaluate_flags import Options, open_model
from packhorse.data.tasks.squad import (
    SquadQuestion,
    read_predictions,
    read_squad,
    write_predictions,
)
from packhorse.errors import InputError

if TYPE_CHECKING:
    from packhorse.data.tasks.squad import Score

WINDOW = 384  # tokens


def answer(options: Options) -> None:
    """Read the questions, have them answered, show the score."""
    _check(options)
    questions = _read(options)
    given = options.predictions_in is not None
    found = _scored(questions, options) if given else _evaluated(questions, options)
    _show(found)
    emit({"task": options.task, "input": str(options.input), **found}, options.json)


def _check(options: Options) -> None:
    """Refuse what cannot be meant."""
    if (options.model is None) == (options.predictions_in is None):
        raise InputError("pass either --model or, to score a file, --predictions-in")
    if out := options.predictions:
        if options.predictions_in is not None:
            raise InputError("--predictions is what a model predicts; pass --model")
        if out.exists() and not options.overwrite:
            raise InputError(f"{out} exists; choose another name or pass --overwrite")
        if not out.parent.is_dir():
            raise InputError(f"{out}: there is no folder {out.parent}")


def _read(options: Options) -> list[SquadQuestion]:
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


def _scored(questions: list[SquadQuestion], options: Options) -> dict[str, Any]:
    """The score of a file of predictions."""
    from packhorse.data.tasks.squad import marks, score

    predicted = read_predictions(options.predictions_in or Path())
    missing = sum(question.id not in predicted for question in questions)
    if missing:
        note(f"warning: {missing} of {len(questions)} questions have no prediction: counted wrong")
    found = score(questions, marks(questions, {id: [text] for id, text in predicted.items()}))
    return {**_parts(found), "missing": missing}


def _evaluated(questions: list[SquadQuestion], options: Options) -> dict[str, Any]:
    """The score of a model, which is asked all the questions."""
    from packhorse.data.tasks.squad import is_v2
    from packhorse.runtime.evaluation.answering import ask, judge

    encoder = open_model(options)
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
    wanted = WINDOW if options.max_length is None else options.max_length
    length = min(wanted, longest) if wanted > 0 else longest
    stride = 128 if options.stride is None and length >= 384 else options.stride
    shared = "a quarter is" if stride is None else f"{stride} are"
    note(f"windows of {length} tokens, of which {shared} shared with the next")
    return {"max_length": length, "stride": stride}


def _parts(found: "dict[str, Score]") -> dict[str, Any]:
    """The score of all, and by name those of some."""
    parts = {name: asdict(part) for name, part in found.items()}
    return {**parts.pop("all"), **parts}


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
