"""Question answering from end to end: a model that knows the answers, and transformers' outputs.

There are no trained weights here. The oracle stands for them: a backend that puts its scores where
the gold answer is, so that whatever is then wrong is the fault of windows, offsets, spans or marks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import packhorse
from packhorse.data.tasks.squad import Gold, SquadQuestion, read_squad
from packhorse.errors import InputError
from packhorse.packing.batch import Packed
from packhorse.results import Answer
from packhorse.runtime.encoder import Encoder
from packhorse.runtime.evaluation.answering import SpanReply, ask, judge
from packhorse.tokens import Encoding

WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] the cat sat on a mat and saw one red hat . ? who what ##s"
WINDOWS: dict[str, Any] = {"max_length": 100, "stride": 36, "max_answer_tokens": 36}


@pytest.fixture(autouse=True)
def _one_thread(threads) -> None:
    threads(1)


@pytest.fixture(scope="module")
def minilm_encoder(minilm: Path) -> Encoder:
    return packhorse.load(minilm)


@dataclass
class Oracle:
    """Logits by the ids of a window; among noise, high ones where its answer begins and ends."""

    known: dict[bytes, np.ndarray]
    cut: int = 0  # windows that show one end of the answer and not the other

    def __call__(
        self, packed: Packed, heads: Sequence[str], at: Tensor | None = None
    ) -> list[Tensor]:
        assert tuple(heads) == ("span",)
        ids = packed.ids.numpy().astype(np.int32)
        pieces = np.split(ids, packed.cu_seqlens.numpy()[1:-1])
        return [torch.tensor(np.concatenate([self.known[piece.tobytes()] for piece in pieces]))]

    def learn(self, question: SquadQuestion, windows: Sequence[Encoding], rng: Any) -> None:
        shortest = sorted(question.answers, key=lambda gold: len(gold.text))
        golds = [(gold.start, gold.start + len(gold.text)) for gold in shortest]
        for window in windows:
            logits = rng.normal(size=(len(window), 2))
            logits[0] = 30.0 if question.impossible else 0.0
            starts, ends = (whole_context(window, side).tolist() for side in (0, 1))
            gold = next((g for g in golds if g[0] in starts and g[1] in ends), None)
            for side, places in enumerate((starts, ends)):
                if gold:
                    logits[places.index(gold[side]), side] = 20.0
                elif seen := [g[side] for g in golds if g[side] in places]:
                    logits[places.index(seen[0]), side] = 12.0  # only half is to be seen: tempting
                    self.cut += 1
            self.known[window.ids.tobytes()] = logits


def whole_context(window: Encoding, side: int) -> np.ndarray:
    """Where each token begins or ends; nowhere outside the context."""
    places = np.full(len(window), -1)
    places[window.spans[-1]] = window.offsets[window.spans[-1], side]
    return places


def knowing(encoder: Encoder, questions: Sequence[SquadQuestion], max_length: int, stride: int):
    """The encoder with an oracle for these questions in place of its model."""
    pairs = [(question.question, question.context) for question in questions]
    oracle, rng = Oracle({}), np.random.default_rng(0)
    groups = encoder.tokenizer.windows(pairs, max_length, stride)
    for question, windows in zip(questions, groups, strict=True):
        oracle.learn(question, windows, rng)
    knows = replace(encoder, backend=oracle, heads=("span",), capacity=0, max_length=512)
    return knows, oracle, groups


@dataclass(frozen=True)
class Tampered:
    """A tokenizer whose windows are changed on the way."""

    tokenizer: Any
    change: Callable[[list[Encoding]], list[Encoding]]

    def windows(self, *arguments: Any) -> list[list[Encoding]]:
        return [self.change(group) for group in self.tokenizer.windows(*arguments)]


def test_an_oracle_scores_100(shared_data: Path, minilm_encoder: Encoder) -> None:
    questions = list(read_squad(shared_data / "squad" / "dev-v1.1.json.zip"))[7::45]
    knows, oracle, groups = knowing(minilm_encoder, questions, 100, 36)
    assert len(questions) > 200 and max(map(len, groups)) > 3 and oracle.cut > 20
    seen: list[tuple[int, int]] = []
    replies = ask(knows, questions, **WINDOWS, progress=lambda *at: seen.append(at))
    report = judge(questions, replies, no_answer=0.0)
    assert report.score["all"].exact_match == report.score["all"].f1 == 100
    assert report.score["all"].questions == len(questions) and report.best == {}
    for question, reply in zip(questions, replies, strict=True):
        (span,) = reply.spans
        assert span.text == question.context[span.start : span.end]
        assert Gold(span.text, span.start) in question.answers
    assert seen[-1] == (len(questions), len(questions))

    def exact(change: Callable[[list[Encoding]], list[Encoding]]) -> float:
        changed: Any = Tampered(knows.tokenizer, change)
        replies = ask(replace(knows, tokenizer=changed), questions, **WINDOWS)
        return judge(questions, replies, None).score["all"].exact_match

    # The controls: offsets that are one off, a window that is lost, windows in the wrong place.
    assert exact(list) == 100
    assert (
        exact(lambda group: [replace(window, offsets=window.offsets + 1) for window in group]) < 50
    )
    assert exact(lambda group: group[:1]) < 90
    assert exact(lambda group: [replace(window, start=0) for window in group]) < 90


@pytest.mark.slow
def test_the_oracle_on_every_question(shared_data: Path, minilm_encoder: Encoder) -> None:
    """All but one answer of the development set ("four", of "fourth") are made of whole tokens."""
    all_questions = list(read_squad(shared_data / "squad" / "dev-v1.1.json.zip"))
    # Some are asked twice, with other answers: an oracle that sees only tokens cannot know which.
    questions = list(
        {("".join(q.question.lower().split()), q.context): q for q in all_questions}.values()
    )
    assert len(questions) > 10_500
    knows, _, _ = knowing(minilm_encoder, questions, 384, 128)
    replies = ask(knows, questions, max_length=384, stride=128, max_answer_tokens=40)
    score = judge(questions, replies, None).score["all"]
    assert round(score.exact_match * score.questions / 100) == len(questions) - 1


def test_questions_without_an_answer(minilm_encoder: Encoder) -> None:
    context = "The mule carries sacks to the market. " * 12
    can = SquadQuestion("can", "What is carried?", context, (Gold("sacks", 17),))
    cannot = SquadQuestion("cannot", "Who drinks tea?", context, (), impossible=True)
    knows, _, groups = knowing(minilm_encoder, [can, cannot], 64, 20)
    assert min(map(len, groups)) > 2
    replies = ask(knows, [can, cannot], max_length=64, stride=20, top_k=3)
    assert replies[0].null < -20 < 20 < replies[1].null and len(replies[0].spans) == 3
    report = judge([can, cannot], replies, no_answer=0.0, top_k=3)
    assert report.predictions == {"can": "sacks", "cannot": ""}
    assert {name: part.exact_match for name, part in report.score.items()} == {
        "all": 100,
        "has_answer": 100,
        "no_answer": 100,
    }
    always = judge([can, cannot], replies, no_answer=None)
    assert always.score["no_answer"].f1 == 0 and always.predictions["cannot"]
    for best in always.best.values():
        assert best.score == 100 and replies[0].null <= best.threshold < replies[1].null
    refusing = judge([can, cannot], replies, no_answer=-math.inf, top_k=2)
    assert refusing.score["all"].exact_match == 50 and refusing.within.exact_match == 100
    options: dict[str, Any] = {"max_length": 64, "stride": 20, "no_answer": 0.0}
    ((none,),) = knows.answer([(cannot.question, context)], **options)
    assert none.text == ""


def test_a_reply_without_spans_is_no_answer() -> None:
    assert SpanReply((), math.inf).texts() == [""]
    reply = SpanReply((Answer("x", 0, 1, 0.5),), 2.0)
    assert (reply.texts(), reply.texts(2.0), reply.texts(1.9)) == (["x"], ["x"], ["", "x"])


def test_a_question_that_does_not_fit_is_named(minilm_encoder: Encoder) -> None:
    long = SquadQuestion("long", "why " * 100, "because", (Gold("because", 0),))
    knows = replace(minilm_encoder, heads=("span",))
    with pytest.raises(InputError, match=r"among the questions long to long: .*no room"):
        ask(knows, [long], max_length=64)


# Against transformers ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def random_bert(tmp_path_factory: pytest.TempPathFactory):
    """A random model for questions, and its tokenizer, as transformers has them; its folder."""
    import transformers

    folder = tmp_path_factory.mktemp("random")
    config = transformers.BertConfig(
        vocab_size=len(WORDS.split()),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=64,
        initializer_range=0.5,
    )
    torch.manual_seed(0)
    model = transformers.BertForQuestionAnswering(config).eval()
    model.save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(WORDS.split()))
    return model, transformers.BertTokenizer(vocab=str(folder / "vocab.txt")), folder


def best_by_loops(
    random_bert, question: str, context: str, max_length: int, stride: int, longest: int
) -> tuple[dict[tuple[int, int], float], float]:
    """Every span's best logits over transformers' own windows, and the null score."""
    model, tokenizer, _ = random_bert
    windows = tokenizer(
        question,
        context,
        max_length=max_length,
        stride=stride,
        truncation="only_second",
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )
    worth: dict[tuple[int, int], float] = {}
    nulls = []
    for w in range(len(windows["input_ids"])):
        with torch.no_grad():
            out = model(
                torch.tensor([windows["input_ids"][w]]),
                token_type_ids=torch.tensor([windows["token_type_ids"][w]]),
            )
        starts, ends = out.start_logits[0].tolist(), out.end_logits[0].tolist()
        nulls.append(starts[0] + ends[0])
        inside = [i for i, text in enumerate(windows.sequence_ids(w)) if text == 1]
        for i in inside:
            for j in inside:
                if i <= j < i + longest:
                    place = windows["offset_mapping"][w][i][0], windows["offset_mapping"][w][j][1]
                    worth[place] = max(worth.get(place, -math.inf), starts[i] + ends[j])
    return worth, min(nulls)


@pytest.mark.parametrize(("max_length", "stride"), [(64, 0), (64, 16), (24, 9), (16, 3)])
def test_spans_scores_and_null_are_those_of_transformers(
    random_bert, max_length: int, stride: int
) -> None:
    encoder = packhorse.load(random_bert[2], dtype="fp32")
    rng = np.random.default_rng(max_length)
    contexts = [" ".join(rng.choice(WORDS.split()[5:18], n)) for n in (1, 7, 30, 90)]
    pairs = [("who saw one cat ?", context) for context in contexts]
    options: dict[str, Any] = {"max_length": max_length, "stride": stride, "max_answer_tokens": 6}
    answers = encoder.answer(pairs, top_k=20, no_answer=-math.inf, **options)
    for (question, context), (none, *spans) in zip(pairs, answers, strict=True):
        worth, null = best_by_loops(random_bert, question, context, max_length, stride, 6)
        order = sorted(worth, key=lambda place: -worth[place])[:19]
        assert [(a.start, a.end) for a in spans] == order
        assert all(a.text == context[a.start : a.end] for a in spans)
        total = sum(map(math.exp, [null, *worth.values()]))
        shares = [math.exp(worth[place]) / total for place in order]
        assert [a.score for a in spans] == pytest.approx(shares, rel=1e-3)
        assert none.score == pytest.approx(math.exp(null) / total, rel=1e-3)
        best = max(worth.values())
        for threshold, refused in [(null - best - 0.01, True), (null - best + 0.01, False)]:
            ((first,),) = encoder.answer([(question, context)], no_answer=threshold, **options)
            assert (first.text == "") == refused


def test_a_context_that_fits_is_one_window_whatever_the_stride(random_bert) -> None:
    encoder = packhorse.load(random_bert[2], dtype="fp32")
    pair = ("what ?", "the cat sat on a mat and saw one red hat .")
    expected = encoder.answer([pair], top_k=5)
    for stride in (0, 5, 20):
        assert encoder.answer([pair], top_k=5, stride=stride) == expected
    assert encoder.answer([pair], top_k=5, max_length=12, stride=3) != expected
