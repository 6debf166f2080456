"""SQuAD as targets: the tokens that are taught say the answer, in the real set and at each edge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from packhorse.data.tasks.squad import Gold, SquadQuestion, read_squad
from packhorse.data.tasks.targets import (
    NO_ANSWER,
    Span,
    SpanReport,
    TaskExample,
    TaskLoader,
    span_task,
)
from packhorse.errors import InputError
from packhorse.tokens import Encoding, Tokenizer

CONTEXT = "Sacks of 茶 are carried by a horse, or by two mules."
WORDS = [
    *("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "who", "?", "sacks", "of", "茶", "are"),
    *("carried", "by", "a", "horse", ",", "or", "two", "mule", "mules", "."),
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "vocab.txt"
    path.write_text("\n".join(WORDS))
    return Tokenizer.load(path)


def ask(*answers: str, context: str = CONTEXT, shift: int = 0, id: str = "q") -> SquadQuestion:
    golds = tuple(Gold(text, context.index(text) + shift) for text in answers)
    return SquadQuestion(id, "who?", context, golds, impossible=not answers)


def taught(example: TaskExample, context: str) -> str:
    """What the target says, as characters of the context."""
    window, span = example.sequences[0], example.target
    assert isinstance(window, Encoding) and isinstance(span, Span)
    assert not window.special[[*span]].any() and window.types[span.start] == 1
    return context[window.offsets[span.start, 0] : window.offsets[span.end, 1]]


def test_the_tokens_of_an_answer(tokenizer: Tokenizer) -> None:
    for answer in ("a horse", "茶", "two mules.", "Sacks", CONTEXT, " horse, "):
        task, report = span_task([ask(answer)], tokenizer, 64)
        (example,) = task.examples
        assert taught(example, CONTEXT) == answer.strip()
        assert report == SpanReport(1, 1, 1, (), {}) and task.problem == "span"


def test_only_a_window_with_the_whole_answer_learns_it(tokenizer: Tokenizer) -> None:
    task, report = span_task([ask("a horse,")], tokenizer, 12, 4)
    taught_texts = [
        None if example.target == NO_ANSWER else taught(example, CONTEXT)
        for example in task.examples
    ]
    answer = {WORDS.index(word) for word in ("a", "horse", ",")}
    whole = [answer <= set(e.sequences[0].ids.tolist()) for e in task.examples]
    touched = [answer & set(e.sequences[0].ids.tolist()) != set() for e in task.examples]
    assert taught_texts == ["a horse," if item else None for item in whole]
    assert (
        sum(whole) < sum(touched) < len(touched)
    )  # one window cuts the answer, one does not see it
    assert (report.windows, report.answered) == (len(taught_texts), sum(whole))


def test_an_impossible_question_has_no_answer_anywhere(tokenizer: Tokenizer) -> None:
    task, report = span_task([ask()], tokenizer, 12, 4)
    assert {example.target for example in task.examples} == {Span(0, 0)}
    assert report == SpanReport(1, len(task.examples), 0, (), {}) and report.windows > 1
    assert {e.sequences[0].ids[0] for e in task.examples} == {tokenizer.cls_id}


def test_an_answer_inside_a_token_is_widened_and_reported(tokenizer: Tokenizer) -> None:
    task, report = span_task([ask("mule", id="m")], tokenizer, 64)
    assert taught(task.examples[0], CONTEXT) == "mules" and report.widened == ("m",)
    # Another gold answer that is exact comes first.
    task, report = span_task([ask("mule", "two mules")], tokenizer, 64)
    assert taught(task.examples[0], CONTEXT) == "two mules" and report.widened == ()


def test_what_cannot_be_taught_is_left_out_by_name(tokenizer: Tokenizer) -> None:
    questions = [
        ask("a horse", id="moved", shift=1),
        ask("\u200b", context="a \u200b horse", id="nothing"),
        ask(" ", id="blank"),
        ask("Sacks of 茶 are carried by a horse", id="long"),
        ask("horse", id="good"),
    ]
    task, report = span_task(questions, tokenizer, 11, 3)
    assert report.dropped == {
        "moved": "'a horse' does not stand at 27",
        "nothing": "'\\u200b' has no token",
        "blank": "' ' has no token",
        "long": "'Sacks of 茶 are carried by a horse' fits no window whole",
    }
    assert report.questions == 5 and report.windows == len(task.examples)
    alone, _ = span_task(questions[-1:], tokenizer, 11, 3)
    assert [e.target for e in task.examples] == [e.target for e in alone.examples]
    # A second answer saves a question whose first is misplaced.
    both = ask("a horse", "two mules")
    moved = SquadQuestion("q", "who?", CONTEXT, (Gold("a horse", 3), both.answers[1]))
    task, report = span_task([moved], tokenizer, 64)
    assert taught(task.examples[0], CONTEXT) == "two mules" and not report.dropped


def test_a_question_too_long_is_named(tokenizer: Tokenizer) -> None:
    long = SquadQuestion("q9", "who " * 20, CONTEXT, (Gold("horse", 28),))
    with pytest.raises(InputError, match="among the questions q to q9: the first text of pair 1"):
        span_task([ask("horse"), long], tokenizer, 16)


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_the_real_development_set(step: int, shared_data: Path) -> None:
    tokenizer = Tokenizer.load(shared_data / "vocab" / "bert-base-uncased-vocab.txt")
    questions = list(read_squad(shared_data / "squad" / "dev-v1.1.json.zip"))
    assert [max(q.article for q in questions), questions[0].article] == [47, 0]
    questions = questions[::step]
    task, report = span_task(questions, tokenizer, 384, 128)
    assert (report.questions, report.dropped) == (10_570 // step, {})
    _check(questions, task.examples, report, tokenizer)
    for batch in TaskLoader(task, tokens=16_384, epochs=1):
        first, last = batch.targets.T
        starts = batch.packed.starts
        assert ((starts <= first) & (first <= last) & (last < starts + batch.packed.lengths)).all()


def _check(
    questions: list[SquadQuestion],
    examples: list[TaskExample],
    report: SpanReport,
    tokenizer: Tokenizer,
) -> None:
    """Every question is taught an answer that people gave, by its characters and its tokens."""
    rest, exact, answered = iter(examples), 0, 0
    windows = tokenizer.windows([(q.question, q.context) for q in questions], 384, 128)
    for question, parts in zip(questions, windows, strict=True):
        share = [next(rest) for _ in parts]
        golds = {gold.text.strip() for gold in question.answers}
        here = [example for example in share if example.target != NO_ANSWER]
        answered += len(here)
        exact += bool(here) and all(taught(item, question.context) in golds for item in here)
        for item in here[:1]:
            assert isinstance(item.target, Span)
            ids = item.sequences[0].ids[item.target.start : item.target.end + 1]
            taught_texts = {_spelled(tokenizer, tokenizer.encode([gold])[0].ids) for gold in golds}
            assert _spelled(tokenizer, ids) in taught_texts or question.id in report.widened
    assert next(rest, None) is None and answered == report.answered
    assert exact == len(questions) - len(report.widened)
    assert exact / len(questions) > 0.999


def _spelled(tokenizer: Tokenizer, ids: Any) -> str:
    """Without blanks and marks of pieces: `27` is a word in "27", but a piece of "€27"."""
    return tokenizer.decode(ids).replace(" ", "").replace("##", "")
