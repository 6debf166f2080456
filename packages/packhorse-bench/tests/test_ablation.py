"""Ways to train: the same sequences in each, equal where it is right, different where it is not."""

from __future__ import annotations

import email
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from packhorse import attention
from packhorse.data.packed.loader import PretrainingBatch
from packhorse.errors import InputError
from packhorse.model.config import BertConfig
from packhorse.reports import docstrings
from packhorse.train.preparing import prepare
from packhorse.train.settings import TrainSettings
from packhorse_bench import ablation
from packhorse_bench.ablation import (
    MISTAKES,
    NO_MASK,
    NO_RESET,
    PACKED,
    UNPACKED,
    AblationSetup,
    WronglyPackedModel,
)

SMALL = AblationSetup(steps=3, rows=2, capacity=48, max_length=16, seeds=2, evaluate_every=2)
WAYS = (UNPACKED, PACKED, NO_MASK, NO_RESET)


@pytest.fixture(scope="module")
def short_text() -> Any:
    """Docstrings of one package: the library's own take seconds to find."""
    folder = Path(str(email.__file__)).parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(docstrings, "read", partial(docstrings.read, folder))
        yield


@pytest.fixture(scope="module")
def corpus(short_text: None) -> ablation.LetterCorpus:
    return ablation.read_corpus(SMALL)


@pytest.fixture(scope="module")
def result(short_text: None) -> ablation.AblationResult:
    return ablation.measure(SMALL)


def sequences(batch: PretrainingBatch) -> list[tuple[list[int], list[tuple[int, int]]]]:
    """Of each its tokens, and where which token is to be guessed, without an order."""
    packed, starts = batch.packed, batch.packed.starts.tolist()
    guessed: list[list[tuple[int, int]]] = [[] for _ in range(len(packed))]
    owners = torch.searchsorted(packed.cu_seqlens, batch.masked_at, right=True) - 1
    for owner, at, word in zip(owners, batch.masked_at, batch.masked_ids, strict=True):
        guessed[owner].append((int(at) - starts[owner], int(word)))
    ids = packed.split(packed.ids)
    return sorted(
        (tokens.tolist(), guessed[at]) for tokens, at in zip(ids, packed.places, strict=True)
    )


def test_every_way_learns_from_the_same(corpus: ablation.LetterCorpus) -> None:
    batches = [list(ablation.training_batches(way, 0, corpus, SMALL)) for way in WAYS]
    for unpacked, *others in zip(*batches, strict=True):
        assert unpacked.packed.capacity == 16 and len(unpacked.masked_at) > 5
        for packed in others:
            assert packed.packed.capacity == 48 and len(packed.packed.ids) == 2 * 48
            assert sequences(packed) == sequences(unpacked)
    other_seed = next(ablation.training_batches(PACKED, 1, corpus, SMALL))
    assert sequences(other_seed) != sequences(batches[1][0])


def test_a_second_pass_has_other_masks(corpus: ablation.LetterCorpus) -> None:
    rows = 10_000  # more than there are: each step is a pass
    first, second = ablation.training_batches(PACKED, 0, corpus, replace(SMALL, rows=rows, steps=2))
    assert first.sequences == second.sequences == len(corpus.train)
    assert not torch.equal(first.masked_at, second.masked_at)


def test_what_is_held_out_was_never_learned(corpus: ablation.LetterCorpus) -> None:
    (judged,) = corpus.held_out
    assert judged.packed.capacity == 16 and judged.sequences > 20
    restored = judged.packed.ids.clone()
    restored[judged.masked_at] = judged.masked_ids
    held = {tuple(sequence.tolist()) for sequence in judged.packed.split(restored)}
    assert len(held) == judged.sequences and held.isdisjoint(map(tuple, corpus.train))
    lengths = {len(sequence) for sequence in corpus.train}
    assert min(lengths) == ablation.SHORTEST and max(lengths) == 16


def test_the_mistakes_are_those_of_the_paper(corpus: ablation.LetterCorpus) -> None:
    batch = next(ablation.training_batches(PACKED, 0, corpus, SMALL)).packed
    joined = ablation.without_mask(batch)
    tails = [48 - sum(row) for row in rows_of(batch)]
    assert joined.lengths.tolist() == [n for tail in tails for n in (48 - tail, tail) if n]
    assert torch.equal(joined.positions, batch.positions)
    on = ablation.without_position_reset(batch)
    assert on.positions.tolist() == [*range(48), *range(48)]
    assert torch.equal(on.cu_seqlens, batch.cu_seqlens)


def rows_of(packed: Any) -> list[list[int]]:
    """The lengths of the real sequences of each row."""
    rows: list[list[int]] = [[] for _ in range(len(packed.ids) // packed.capacity)]
    for place in packed.places:
        begin, end = packed.cu_seqlens[place : place + 2].tolist()
        rows[begin // packed.capacity].append(end - begin)
    return rows


def gradient(way: str, corpus: ablation.LetterCorpus) -> Tensor:
    config = BertConfig(corpus.specials.vocab_size, 32, 2, 2, 64, max_positions=48)
    kernel = attention.kernel("mask")
    model = prepare(TrainSettings(dropout=0.0), config, ("mlm",), kernel)[0].model.double()
    seen = WronglyPackedModel(model, MISTAKES[way]) if way in MISTAKES else model
    ablation.OBJECTIVE.loss(seen, next(ablation.training_batches(way, 0, corpus, SMALL)))[
        0
    ].backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return torch.cat([gradients[name].flatten() for name in sorted(gradients)])


def test_gradients_tell_right_from_wrong(corpus: ablation.LetterCorpus) -> None:
    unpacked, packed, *wrong = (gradient(way, corpus) for way in WAYS)
    assert float((packed - unpacked).norm() / unpacked.norm()) < 1e-10
    assert all(float((gradient - unpacked).norm() / unpacked.norm()) > 1e-3 for gradient in wrong)


def test_runs_side_by_side(result: ablation.AblationResult) -> None:
    ran = [(run.way, run.seed) for run in result.runs]
    assert ran == [(UNPACKED, 0), (UNPACKED, 1), (PACKED, 0), (NO_MASK, 0), (NO_RESET, 0)]
    for run in result.runs:
        assert [step for step, _ in run.training] == [1, 2, 3]
        assert [step for step, _ in run.held_out] == [2, 3]
    assert max(map(abs, ablation.loss_gaps(result, result.run(PACKED)))) < 1e-5
    assert all(
        max(map(abs, ablation.loss_gaps(result, result.run(way)))) > 1e-5 for way in MISTAKES
    )
    first, second = (result.run(UNPACKED, seed).held_out for seed in (0, 1))
    gaps = [abs(a - b) for (_, a), (_, b) in zip(first, second, strict=True)]
    assert ablation.seed_spreads(result) == pytest.approx(gaps) and min(gaps) > 1e-5


def test_what_is_shown(result: ablation.AblationResult) -> None:
    shown = ablation.table(result)
    assert [row[0].strip() for row in shown.rows] == [run.way for run in result.runs]
    assert [row[-1].strip() for row in shown.rows[:2]] == ["-", "-"]
    facts = ablation.describe(SMALL, result)
    assert f"2 unpacked seeds are {ablation.seed_spreads(result)[-1]:.4f} apart" in facts["noise"]
    assert "2 rows of 48" in facts["batches"]
    for of in ("held_out", "training"):
        assert list(ablation.curves(result, of)) == list(WAYS)
    assert ablation.curves(result)[PACKED] == result.run(PACKED).held_out


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"steps": 0}, "at least 1"),
        ({"max_length": 49}, "from 8 to the 48 tokens of a row"),
        ({"max_length": 7}, "a sequence is 7 tokens"),
    ],
)
def test_refusals(wrong: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ablation.measure(replace(SMALL, **wrong))
