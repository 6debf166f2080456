"""Extractive question answering (SQuAD): predictions, scores and the best threshold.

The model runs once, for its best spans and for how far "no answer" scores above them; predictions,
scores and the best threshold all follow from that without another run. Questions are run in chunks,
because the tokens of a whole training set would take gigabytes.

The measures are those of `data/tasks/squad_score.py`, the scores of spans those of
`results.answers`.
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

QUESTIONS_PER_CHUNK = 1024


@dataclass(frozen=True, slots=True)
class SpanReply:
    """A model's best spans for a question, and by how much "no answer" beats the first."""

    spans: tuple[Answer, ...]
    null: float

    def texts(self, no_answer: float | None = None) -> list[str]:
        """Return the answers, best first, preceded by "" if `null` is above `no_answer`.

        With None there is a "" only where the model has no span at all.
        """
        texts = [span.text for span in self.spans]
        unanswered = not self.spans or (no_answer is not None and self.null > no_answer)
        return ["", *texts] if unanswered else texts


@dataclass(frozen=True, slots=True)
class AnsweringReport:
    """The predictions and their scores; `within` counts a hit among the `top_k` best answers."""

    predictions: dict[str, str]
    score: dict[str, Score]  # "all"; in v2.0 also "has_answer" and "no_answer"
    within: Score
    best: dict[str, Threshold]  # v2.0: by measure


def ask(
    encoder: Encoder,
    questions: Sequence[SquadQuestion],
    *,
    top_k: int = 1,
    max_length: int | None = None,
    stride: int | None = None,
    max_answer_tokens: int = 30,
    progress: Progress | None = None,
) -> list[SpanReply]:
    """Return the model's reply to each question; the options are those of `Encoder.answer`."""
    replies: list[SpanReply] = []
    for begin in range(0, len(questions), QUESTIONS_PER_CHUNK):
        chunk = questions[begin : begin + QUESTIONS_PER_CHUNK]
        try:
            answers = encoder.answer(
                [(question.question, question.context) for question in chunk],
                top_k=top_k + 1,  # "no answer" is one of them, because of `no_answer`
                max_length=max_length,
                stride=stride,
                max_answer_tokens=max_answer_tokens,
                no_answer=-math.inf,
                progress=_part(progress, begin, len(chunk), len(questions)),
            )
        except InputError as error:
            ids = f"{chunk[0].id} to {chunk[-1].id}"
            raise InputError(f"among the questions {ids}: {error}") from error
        replies += map(_reply, answers)
    return replies


def _part(progress: Progress | None, begin: int, size: int, total: int) -> Progress | None:
    """Report the progress of a chunk's windows as progress in all questions."""
    if progress is None:
        return None
    return lambda finished, windows: progress(begin + size * finished // windows, total)


def _reply(answers: Sequence[Answer]) -> SpanReply:
    """Scores are shares of one softmax, so their logarithms differ as the logits do."""
    spans = tuple(answer for answer in answers if answer.text)
    refusal = sum(answer.score for answer in answers if not answer.text)
    return SpanReply(spans, _log(refusal) - _log(spans[0].score) if spans else math.inf)


def _log(share: float) -> float:
    return math.log(share) if share else -math.inf


def judge(
    questions: Sequence[SquadQuestion],
    replies: Sequence[SpanReply],
    no_answer: float | None,
    top_k: int = 1,
) -> AnsweringReport:
    """Score the replies; those whose `null` is above `no_answer` count as unanswered."""
    ids = [question.id for question in questions]
    texts = [reply.texts(no_answer)[:top_k] for reply in replies]
    predictions = {id: text for id, (text, *_) in zip(ids, texts, strict=True)}
    within = marks(questions, dict(zip(ids, texts, strict=True)))
    return AnsweringReport(
        predictions,
        score(questions, marks(questions, {id: [text] for id, text in predictions.items()})),
        score(questions, within)["all"],
        _best(questions, replies) if is_v2(questions) else {},
    )


def _best(questions: Sequence[SquadQuestion], replies: Sequence[SpanReply]) -> dict[str, Threshold]:
    pairs = zip(questions, replies, strict=True)
    answered = marks(questions, {question.id: reply.texts()[:1] for question, reply in pairs})
    impossible = [question.impossible for question in questions]
    nulls = [reply.null for reply in replies]
    return {
        measure: best_threshold([getattr(mark, measure) for mark in answered], impossible, nulls)
        for measure in Mark._fields
    }
