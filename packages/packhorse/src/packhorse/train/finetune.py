"""The examples of a task to fine-tune on, and the objective that learns them.

A table of texts and labels, of pairs and scores, of pairs alone, or SQuAD's questions. What kind of
problem it is follows from the settings and the table. A classifier that is trained on keeps its
labels and their head where the table has the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from packhorse import checkpoint
from packhorse.checkpoint import Checkpoint
from packhorse.data.tables import read_texts
from packhorse.data.tasks.labeled import LabeledTexts, TableLayout, read_labeled
from packhorse.data.tasks.squad import read_squad
from packhorse.data.tasks.targets import TrainingTask, contrastive_task, labeled_task, span_task
from packhorse.errors import InputError
from packhorse.tokens import Tokenizer
from packhorse.train.objectives import OBJECTIVES, Objective, SpanEnds
from packhorse.train.objectives.span import asked
from packhorse.train.preparing import Labels
from packhorse.train.settings import Settings


@dataclass(frozen=True, slots=True)
class Data:
    """A task's examples, and what learns them."""

    train: TrainingTask
    eval: TrainingTask | None
    objective: Objective
    labels: Labels = Labels()  # noqa: RUF009 (frozen)
    notes: tuple[str, ...] = ()


def read(settings: Settings, found: Checkpoint) -> Data:
    """What the settings name, in the tokens of the model."""
    # Vectors were learned up to a length; for anything else there are as many as positions.
    vectors = settings.task in ("similarity", "contrastive")
    most = found.max_length if vectors else found.config.max_positions
    if settings.max_length > most:
        raise InputError(f"max_length is {settings.max_length}; {found.name} takes {most} tokens")
    reader = {"answer": _spans, "contrastive": _pairs}.get(settings.task, _labelled)
    return reader(settings, found, checkpoint.tokenizer(found))


def _labelled(settings: Settings, found: Checkpoint, tokenizer: Tokenizer) -> Data:
    apart = settings.task == "similarity"
    layout = TableLayout(
        text=settings.text,
        label=settings.label,
        separator=settings.separator,
        scale=(settings.scale[0], settings.scale[1]) if settings.scale else None,
    )
    problem: Any = None if settings.problem == "auto" else settings.problem
    read = partial(read_labeled, layout=layout, problem="regression" if apart else problem)
    table = _as_the_model_names(read, settings.train, found) or read(settings.train)
    task = partial(labeled_task, tokenizer=tokenizer, apart=apart)
    most = settings.max_length or None
    known = {"problem": table.problem, "labels": table.labels}
    held_out = read_labeled(settings.eval, layout, **known) if settings.eval else None
    train = task(table, max_length=most)
    return Data(
        train,
        task(held_out, max_length=most) if held_out else None,
        OBJECTIVES[train.problem](**({} if apart else {"agreement": settings.agreement})),
        Labels() if apart else Labels(table.labels, table.problem),
        _cut(train),
    )


def _as_the_model_names(
    read: partial[LabeledTexts], source: str, found: Checkpoint
) -> LabeledTexts | None:
    """The table by the labels of a classifier that is trained on, if they are the same ones."""
    if "classify" not in found.model.heads or found.problem == "regression":
        return None
    try:
        return read(source, labels=found.labels)
    except InputError:
        return None  # other labels: a new head; what else is wrong shows when it is read again


def _pairs(settings: Settings, found: Checkpoint, tokenizer: Tokenizer) -> Data:
    def task(source: str) -> TrainingTask:
        rows = read_texts(source, settings.text or None)
        return contrastive_task([row.text for row in rows], tokenizer, settings.max_length or None)

    train = task(settings.train)
    objective = OBJECTIVES["contrastive"](settings.temperature)
    return Data(train, task(settings.eval) if settings.eval else None, objective)


def _spans(settings: Settings, found: Checkpoint, tokenizer: Tokenizer) -> Data:
    lengths = settings.max_length or None, settings.stride or None
    train, report = span_task(list(read_squad(settings.train)), tokenizer, *lengths)
    notes = ()
    if report.dropped:
        first, why = next(iter(report.dropped.items()))
        notes = (f"{len(report.dropped)} questions cannot be taught; {first}: {why}",)
    if not settings.eval:
        return Data(train, None, SpanEnds(), notes=notes)
    laid_out = asked(list(read_squad(settings.eval)), tokenizer, *lengths)
    return Data(train, laid_out.task(), SpanEnds(laid_out), notes=notes)


def _cut(task: TrainingTask) -> tuple[str, ...]:
    if not task.truncated:
        return ()
    return (f"{task.truncated:,} of {len(task.examples):,} examples were cut to the length",)
