"""Batches of examples: targets follow their sequences, and no example is lost, doubled or moved."""

from __future__ import annotations

import json
import zlib
from collections import Counter
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from packhorse.data.tasks import targets
from packhorse.data.tasks.labeled import LabeledTexts, read_labeled
from packhorse.data.tasks.targets import (
    Span,
    TaskBatch,
    TaskExample,
    TaskLoader,
    TrainingTask,
    contrastive_task,
    labeled_task,
)
from packhorse.errors import InputError
from packhorse.tokens import Encoding, Tokenizer

WORDS = [*("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"), *(f"w{i}" for i in range(40))]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "vocab.txt"
    path.write_text("\n".join(WORDS))
    return Tokenizer.load(path)


def sequence(length: int, first: int = 7) -> Encoding:
    ids = np.full(length, first, np.int32)
    offsets, special = np.zeros((length, 2), np.int32), np.zeros(length, bool)
    return Encoding(ids, np.zeros(length, np.uint8), offsets, special, (slice(0, length),))


def numbered(count: int, seed: int = 0, longest: int = 9) -> TrainingTask:
    """Example i has i as every token and as its target."""
    lengths = np.random.default_rng(seed).integers(1, longest + 1, count)
    examples = [TaskExample((sequence(int(n), i),), i) for i, n in enumerate(lengths)]
    return TrainingTask(examples, "single_label", tuple(map(str, range(count))))


def parts(batch: TaskBatch) -> list[list[int]]:
    """The tokens of each of the caller's sequences."""
    return [ids.tolist() for ids in batch.packed.split(batch.packed.ids)]


def seen(loader: TaskLoader, count: int | None = None) -> list[tuple[int, ...]]:
    return [batch.numbers for batch in islice(loader, count)]


def test_labels_follow_their_sequences() -> None:
    task = numbered(50)
    for batch in TaskLoader(task, examples=8, epochs=1):
        assert parts(batch) == [task.examples[i].sequences[0].ids.tolist() for i in batch.numbers]
        assert batch.targets.tolist() == [ids[0] for ids in parts(batch)] == list(batch.numbers)
        assert batch.targets.dtype == torch.int64
        assert batch.tokens == len(batch.packed.ids) and batch.total == len(batch.numbers)


def test_every_kind_of_target() -> None:
    def targets(problem: Any, *values: Any, labels: int = 0, sequences: int = 1) -> torch.Tensor:
        examples = [TaskExample((sequence(4),) * sequences, item) for item in values]
        task = TrainingTask(examples, problem, tuple(map(str, range(labels))))
        (batch,) = TaskLoader(task, examples=len(values), shuffle=False, epochs=1)
        return batch.targets

    several = targets("multi_label", (0, 2), (), labels=3)
    assert several.tolist() == [[1, 0, 1], [0, 0, 0]] and several.dtype == torch.float32
    for problem in ("regression", "similarity"):
        scores = targets(problem, 0.5, 1)
        assert scores.tolist() == [0.5, 1.0] and scores.dtype == torch.float32
    spans = targets("span", Span(1, 3), Span(0, 0), Span(2, 2))
    assert spans.tolist() == [[1, 3], [4, 4], [10, 10]] and spans.dtype == torch.int64
    assert targets("contrastive", None, None, sequences=2).shape == (2, 0)


def test_ends_of_spans_are_tokens_of_the_flat_batch() -> None:
    def example(length: int, start: int, end: int) -> TaskExample:
        result = sequence(length)
        result.ids[[start, end]] = 1, 2
        return TaskExample((result,), Span(start, end))

    task = TrainingTask([example(n, n // 3, n - 1) for n in range(2, 30)], "span")
    for batch in TaskLoader(task, examples=5, epochs=1):
        starts, ends = batch.targets.T
        assert set(batch.packed.ids[starts].tolist()) == {1}
        assert set(batch.packed.ids[ends].tolist()) == {2}
        padded = batch.packed.pad(160, 99)  # filler comes behind: the same tokens
        assert torch.equal(padded.ids[ends], batch.packed.ids[ends])
    # The control: ends within the sequence would be other tokens in all places but the first.
    within = torch.tensor([task.examples[i].target for i in batch.numbers])
    assert set(batch.packed.ids[within[:, 1]].tolist()) != {2}


def test_a_pair_stays_together(tokenizer: Tokenizer) -> None:
    texts: list[Any] = [(f"w{i}", f"w{i} w{i + 1}") for i in range(30)]
    scored = LabeledTexts(texts, [i / 30 for i in range(30)], ("score",), "regression")
    task = labeled_task(scored, tokenizer, apart=True)
    assert task.problem == "similarity" and len(task.examples[0].sequences) == 2
    for rank in range(2):
        for batch in TaskLoader(task, examples=7, epochs=1, rank=rank, world=2):
            both = parts(batch)
            assert len(both) == 2 * len(batch.numbers)
            for i, number in enumerate(batch.numbers):
                assert [len(both[2 * i]), len(both[2 * i + 1])] == [3, 4]
                assert both[2 * i][1] == both[2 * i + 1][1] == 5 + number
                assert batch.targets[i] == torch.tensor(number / 30)
    alike = contrastive_task(texts, tokenizer)
    assert alike.problem == "contrastive" and len(alike.examples[0].sequences) == 2
    for wrong, message in (
        (replace(scored, problem="single_label"), "similarity is learned from scores"),
        (replace(scored, texts=["alone"] * 30), "text 0 is not a pair"),
    ):
        with pytest.raises(InputError, match=message):
            labeled_task(wrong, tokenizer, apart=True)


def test_a_pair_in_one_sequence(tokenizer: Tokenizer) -> None:
    task = labeled_task(
        LabeledTexts([("w1", "w2"), ("w3", "w4 w5")], [1, 0], ("a", "b"), "single_label"), tokenizer
    )
    (batch,) = TaskLoader(task, examples=2, shuffle=False, epochs=1)
    assert [tokenizer.decode(ids, skip_special=False) for ids in parts(batch)] == [
        "[CLS] w1 [SEP] w2 [SEP]",
        "[CLS] w3 [SEP] w4 w5 [SEP]",
    ]
    assert batch.packed.types.tolist() == [0, 0, 0, 1, 1, 0, 0, 0, 1, 1, 1]
    assert batch.targets.tolist() == [1, 0] and task.labels == ("a", "b")


def test_what_is_cut_is_counted(tokenizer: Tokenizer) -> None:
    texts: list[Any] = ["w1", "w1 w2 w3 w4", "w1 w2 w3"]
    task = labeled_task(LabeledTexts(texts, [0, 1, 0], ("a", "b"), "single_label"), tokenizer, 4)
    assert task.truncated == 2 and max(len(e.sequences[0].ids) for e in task.examples) == 4


def test_epochs_are_whole_and_differ() -> None:
    task = numbered(50)
    batches = seen(TaskLoader(task, examples=10, epochs=3))
    epochs = [sum(batches[i : i + 5], ()) for i in (0, 5, 10)]
    assert all(sorted(epoch) == [*range(50)] for epoch in epochs)
    assert len(set(epochs)) == 3 and epochs[0] != tuple(range(50))
    assert batches == seen(TaskLoader(task, examples=10), 15)
    assert batches != seen(TaskLoader(task, examples=10, seed=1), 15)
    straight = seen(TaskLoader(task, examples=10, epochs=1, shuffle=False))
    assert sum(straight, ()) == tuple(range(50))


def test_batches_are_full_and_the_last_is_what_is_left() -> None:
    task = numbered(23)
    sizes = [len(numbers) for numbers in seen(TaskLoader(task, examples=5, epochs=2))]
    assert sizes == [5] * 9 + [1]
    dropped = seen(TaskLoader(task, examples=5, epochs=2, drop_last=True))
    assert [len(numbers) for numbers in dropped] == [5] * 8
    for epoch in (dropped[:4], dropped[4:]):
        assert len(set(sum(epoch, ()))) == 20  # within an epoch none comes twice
    assert set(sum(dropped[:4], ())) != set(sum(dropped[4:], ()))  # nor is the same left out


@given(st.integers(1, 60), st.integers(9, 200), st.integers(0, 3))
def test_a_budget_of_tokens_is_kept_and_used(count: int, tokens: int, seed: int) -> None:
    batches = list(TaskLoader(numbered(count, seed), tokens=tokens, seed=seed, epochs=2))
    assert Counter(n for batch in batches for n in batch.numbers) == dict.fromkeys(range(count), 2)
    assert all(batch.tokens <= tokens for batch in batches)
    for batch, following in pairwise(batches):
        assert batch.tokens + len(parts(following)[0]) > tokens


@pytest.mark.parametrize("size", [{"examples": 12}, {"tokens": 60}])
@pytest.mark.parametrize(("world", "steps"), [(2, 1), (3, 2), (5, 1)])
def test_the_batch_does_not_depend_on_the_ranks(
    size: dict[str, int], world: int, steps: int
) -> None:
    task = numbered(40)
    alone = list(TaskLoader(task, **size, epochs=3))
    ranks = [
        list(TaskLoader(task, **size, epochs=3, rank=rank, world=world, parts=steps))
        for rank in range(world)
    ]
    assert {len(rank) for rank in ranks} == {steps * len(alone)}
    for number, batch in enumerate(alone):
        shares = [rank[i] for rank in ranks for i in range(number * steps, (number + 1) * steps)]
        assert sorted(n for share in shares for n in share.numbers) == sorted(batch.numbers)
        assert {share.total for share in shares} == {len(batch.numbers)}
        tokens = [share.tokens for share in shares]
        assert sum(tokens) == batch.tokens and max(tokens) - min(tokens) <= 9
        assert shares[-1].cursor == batch.cursor


def test_a_rank_without_examples_has_something_to_run(make_model) -> None:
    task = numbered(3)
    batches = [next(iter(TaskLoader(task, examples=3, rank=rank, world=4))) for rank in range(4)]
    empty = next(batch for batch in batches if not batch.numbers)
    assert empty.targets.shape == (0,) and empty.tokens == 0 and empty.total == 3
    model = make_model(torch.float32)
    hidden = model.bert(empty.packed)
    assert empty.packed.pick(model.heads["classify"](hidden, empty.packed)).shape == (0, 3)
    assert empty.packed.split(hidden) == []
    several = TrainingTask([TaskExample((sequence(2),), (0,))], "multi_label", ("a", "b"))
    spans = TrainingTask([TaskExample((sequence(2),), Span(0, 1))], "span")
    for second in (several, spans):
        shares = [
            next(iter(TaskLoader(second, examples=1, rank=rank, world=2))) for rank in range(2)
        ]
        assert sorted(tuple(share.targets.shape) for share in shares) == [(0, 2), (1, 2)]


@pytest.mark.parametrize("size", [{"examples": 7}, {"tokens": 40}])
def test_a_cursor_goes_on_exactly_at_any_batch(size: dict[str, int]) -> None:
    task = numbered(30)
    whole = list(TaskLoader(task, **size, epochs=3, seed=5))
    for finished, batch in enumerate(whole, 1):
        cursor = json.loads(json.dumps(batch.cursor))
        rest = list(TaskLoader(task, **size, epochs=3, seed=5, cursor=cursor))
        assert [b.numbers for b in rest] == [b.numbers for b in whole[finished:]]
        assert [b.cursor for b in rest] == [b.cursor for b in whole[finished:]]


def test_a_cursor_may_go_on_with_other_ranks_and_sizes() -> None:
    task = numbered(30)
    stream = sum(seen(TaskLoader(task, examples=1), 90), ())
    first = list(islice(TaskLoader(task, examples=6, rank=1, world=2, parts=2), 4))
    assert first[0].cursor["batch"] == 0  # a step begun is done again
    rest = seen(TaskLoader(task, examples=4, cursor=first[3].cursor), 3)
    assert sum(rest, ()) == stream[12:24]


def relabeled(task: TrainingTask) -> TrainingTask:
    """The same sequences, one with another target."""
    first = replace(task.examples[0], target=29)
    return replace(task, examples=[first, *task.examples[1:]])


def test_bad_cursors() -> None:
    task = numbered(30)
    cursor = next(iter(TaskLoader(task, examples=6, seed=3))).cursor
    for second, message in (
        (TaskLoader(task, examples=6, seed=3), None),
        ({"seed": 4}, "another seed .3, now 4"),
        ({"shuffle": False}, "another shuffle"),
        ({"task": numbered(30, seed=1)}, "another set"),
        ({"task": relabeled(task)}, "another set"),
        ({"cursor": {**cursor, "example": 30}}, "at example 30 of 30"),
        ({"cursor": {**cursor, "batch": -1}}, "not a cursor"),
        ({"cursor": {**cursor, "epoch": "1"}}, "not a cursor"),
        ({"cursor": {"epoch": 1}}, "not a cursor"),
    ):
        options: Any = {"task": task, "examples": 6, "seed": 3, "cursor": cursor}
        if message is None:
            TaskLoader(**options)  # the control: nothing is wrong with it
            continue
        with pytest.raises(InputError, match=message):
            TaskLoader(**options | second)


def test_a_fingerprint_is_of_the_content() -> None:
    """Of every token, type and target, where they stand and what they mean; not of lengths."""

    def made(rows: list[tuple[list[list[int]], Any]], problem: Any = "regression") -> str:
        examples = []
        for texts, target in rows:
            sequences = [replace(sequence(len(ids)), ids=np.int32(ids)) for ids in texts]
            examples.append(TaskExample(tuple(sequences), target))
        return TrainingTask(examples, problem, ("a", "b")).fingerprint

    rows: list[tuple[list[list[int]], Any]] = [([[7, 8], [9]], 0.5), ([[7, 7, 7]], 1.0)]
    others = {
        "the same": made([*rows]),
        "a token": made([([[7, 8], [6]], 0.5), rows[1]]),
        "a target": made([rows[0], ([[7, 7, 7]], 1.0000001)]),
        "the order": made(rows[::-1]),
        "a boundary": made([([[7], [8, 9]], 0.5), rows[1]]),
        "an example": made(rows[:1]),
        "the problem": made(rows, "similarity"),
    }
    assert others.pop("the same") == made(rows)
    assert made(rows) not in others.values() and len(set(others.values())) == len(others)
    types = TrainingTask(
        [TaskExample((replace(sequence(2), types=np.uint8([0, 1])),), 1)], "regression"
    )
    assert (
        types.fingerprint
        != TrainingTask([TaskExample((sequence(2),), 1)], "regression").fingerprint
    )
    task = numbered(30)
    assert replace(task, labels=task.labels[::-1]).fingerprint != task.fingerprint
    halves = TrainingTask(task.examples[:15] + task.examples[15:], task.problem, task.labels)
    assert halves.fingerprint == task.fingerprint


def test_examples_beyond_the_first_thousands_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "HASHED", 7)
    task = numbered(30)
    last = replace(task.examples[-1], target=3)
    assert replace(task, examples=[*task.examples[:-1], last]).fingerprint != task.fingerprint


def test_a_cursor_from_before_is_taken() -> None:
    """Version 0.1 told examples apart by a sum of their lengths."""
    task = numbered(30)
    cursor = next(iter(TaskLoader(task, examples=6, seed=3))).cursor
    old = f"{zlib.crc32(np.array([len(e.sequences[0].ids) for e in task.examples])):08x}"
    gone_on = next(iter(TaskLoader(task, examples=6, seed=3, cursor={**cursor, "set": old})))
    assert gone_on.cursor["set"] == task.fingerprint != old


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "in examples or in tokens"),
        ({"examples": 4, "tokens": 4}, "either in examples or in tokens"),
        ({"examples": 0}, "examples must be at least 1"),
        ({"tokens": 8}, r"example \d+ has 9 tokens, more than a batch of 8; raise tokens"),
        ({"tokens": 99, "drop_last": True}, "drop_last is for batches of a number"),
        ({"examples": 31, "drop_last": True}, "30 examples are not one batch"),
        ({"examples": 4, "rank": 2, "world": 2}, "no rank 2 of 2"),
        ({"examples": 4, "parts": 0}, "parts must be at least 1"),
        ({"examples": 4, "seed": -1}, "seed must be at least 0"),
        ({"examples": 4, "epochs": 0}, "epochs must be at least 1"),
        ({"examples": 4, "task": TrainingTask([], "regression")}, "0 examples are not one batch"),
        (
            {"examples": 1, "task": TrainingTask([TaskExample((sequence(0),), 1)], "span")},
            "without tokens",
        ),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        TaskLoader(**{"task": numbered(30)} | options)


def test_glue_from_file_to_batches(shared_data: Path) -> None:
    tokenizer = Tokenizer.load(shared_data / "vocab" / "bert-base-uncased-vocab.txt")
    glue = shared_data / "glue"
    for name, apart in (
        *(("SST-2-test.tsv", False), ("CoLA-dev.tsv", False)),
        *(("msr-para-val.tsv", False), ("stsb-en-dev.csv", True)),
    ):
        result = read_labeled(glue / name)
        task = labeled_task(result, tokenizer, 128, apart=apart)
        batches = list(TaskLoader(task, examples=32, epochs=1))
        fields = {n: t for b in batches for n, t in zip(b.numbers, b.targets.tolist(), strict=True)}
        assert [fields[i] for i in range(len(result.texts))] == pytest.approx(result.targets)
        text = result.texts[batches[3].numbers[5]]
        text = text[0] if isinstance(text, tuple) else text
        ids = parts(batches[3])[5 * (1 + apart)]
        want = tokenizer.encode([text])[0].ids[1:-1].tolist()
        assert ids[1 : 1 + len(want)] == want
