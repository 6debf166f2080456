"""How well a model does a task whose answers are known: so far extractive question answering.

A model is asked once, for its best spans and for how far it would rather not answer; predictions,
scores and the best threshold all follow from that without asking again. Questions go to the model
in chunks, because the tokens of a whole training set would take gigabytes.

Measures are those of `data/squad_score.py`; what a span is worth, that of `results.answers`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from packhorse.data.tasks.squad import (
    Mark,
    Score,
    SquadQuestion,
    Threshold,
    best_threshold,
    is_v2,
    marks,
    score,
)
from packhorse.errors import InputError
from packhorse.results import Answer
from packhorse.runtime.encoder import Encoder, Progress

QUESTIONS_A_CHUNK = 1024


@dataclass(frozen=True, slots=True)
class Reply:
    """A model's best spans for a question, and how far above the first "no answer" is."""

    spans: tuple[Answer, ...]
    null: float

    def texts(self, no_answer: float | None = None) -> list[str]:
        """The best first: "" where `null` is above `no_answer`; None: only where there is none."""
        refused = not self.spans or (no_answer is not None and self.null > no_answer)
        return [""] * refused + [span.text for span in self.spans]


@dataclass(frozen=True, slots=True)
class Report:
    """What was predicted and how good it is; `within`, if any of the `top_k` best may be right."""

    predictions: dict[str, str]
    score: dict[str, Score]  # of all; in v2.0 also has_answer and no_answer
    within: Score
    best: dict[str, Threshold]  # v2.0: for each measure


def ask(
    encoder: Encoder,
    questions: Sequence[SquadQuestion],
    *,
    top_k: int = 1,
    max_length: int | None = None,
    stride: int | None = None,
    max_answer_tokens: int = 30,
    progress: Progress | None = None,
) -> list[Reply]:
    """The model's reply to each question; the options are those of `Encoder.answer`."""
    replies: list[Reply] = []
    for begin in range(0, len(questions), QUESTIONS_A_CHUNK):
        chunk = questions[begin : begin + QUESTIONS_A_CHUNK]
        try:
            found = encoder.answer(
                [(question.question, question.context) for question in chunk],
                top_k=top_k + 1,  # "no answer" is one of them
                max_length=max_length,
                stride=stride,
                max_answer_tokens=max_answer_tokens,
                no_answer=-math.inf,
                progress=_part(progress, begin, len(chunk), len(questions)),
            )
        except InputError as error:
            ids = f"{chunk[0].id} to {chunk[-1].id}"
            raise InputError(f"among the questions {ids}: {error}") from error
        replies += map(_reply, found)
    return replies


def _part(progress: Progress | None, begin: int, size: int, total: int) -> Progress | None:
    """The progress of a chunk's windows as that of all questions."""
    if progress is None:
        return None
    return lambda done, windows: progress(begin + size * done // windows, total)


def _reply(answers: Sequence[Answer]) -> Reply:
    """Scores are shares of one softmax: their logarithms differ as the logits do."""
    spans = tuple(answer for answer in answers if answer.text)
    refusal = sum(answer.score for answer in answers if not answer.text)
    return Reply(spans, _log(refusal) - _log(spans[0].score) if spans else math.inf)


def _log(share: float) -> float:
    return math.log(share) if share else -math.inf


def judge(
    questions: Sequence[SquadQuestion],
    replies: Sequence[Reply],
    no_answer: float | None,
    top_k: int = 1,
) -> Report:
    """Score the replies, leaving unanswered what `no_answer` says (None: nothing)."""
    ids = [question.id for question in questions]
    texts = [reply.texts(no_answer)[:top_k] for reply in replies]
    predictions = {id: text for id, (text, *_) in zip(ids, texts, strict=True)}
    within = marks(questions, dict(zip(ids, texts, strict=True)))
    return Report(
        predictions,
        score(questions, marks(questions, {id: [text] for id, text in predictions.items()})),
        score(questions, within)["all"],
        _best(questions, replies) if is_v2(questions) else {},
    )


def _best(questions: Sequence[SquadQuestion], replies: Sequence[Reply]) -> dict[str, Threshold]:
    pairs = zip(questions, replies, strict=True)
    answered = marks(questions, {question.id: reply.texts()[:1] for question, reply in pairs})
    impossible = [question.impossible for question in questions]
    nulls = [reply.null for reply in replies]
    return {
        measure: best_threshold([getattr(each, measure) for each in answered], impossible, nulls)
        for measure in Mark._fields
    }
