"""Masking of spans: lengths as drawn, the budget kept, words whole, neighbors without effect."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from packhorse.data.packed.masking import Recipe, Specials, draw_by_keys, keys_of
from packhorse.errors import InputError

CLS, SEP, MASK, PAD, V = 1, 2, 3, 0, 4000
SPECIALS = Specials(CLS, SEP, MASK, PAD, V)
SPANS = Recipe(mask_probability=0.15, max_predictions=None, span_length=3.8)


def sequences(count: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Sequences of numbers that are no special token, [CLS] … [SEP] … [SEP]."""
    rng = np.random.default_rng(0)
    ids = rng.integers(10, V, (count, length))
    ids[:, 0] = CLS
    ids[:, [length // 2, length - 1]] = SEP
    return ids.ravel(), np.full(count, length)


def masked(recipe: Recipe, ids: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    """The masked positions of each sequence."""
    _, masks = draw_by_keys(ids, lengths, SPECIALS, recipe, keys_of(7, np.arange(len(lengths))))
    return np.split(masks.positions.astype(int), np.cumsum(masks.counts.astype(int))[:-1])


def runs(positions: np.ndarray) -> list[int]:
    """The lengths of runs of neighbors."""
    return [len(run) for run in np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1)]


def test_lengths_and_budget() -> None:
    ids, lengths = sequences(400, 202)
    spans = masked(SPANS, ids, lengths)
    tokens = masked(replace(SPANS, span_length=0.0), ids, lengths)
    budget = round(202 * 0.15)
    counts = np.array([len(s) for s in spans])
    assert counts.max() <= budget and counts.mean() > budget - 1
    assert all(not {0, 101, 201} & set(s.tolist()) for s in spans)
    mean = np.mean([n for s in spans for n in runs(s)])
    alone = np.mean([n for s in tokens for n in runs(s)])
    assert 3.0 < mean < 4.8 and alone < 1.5  # spans may touch, and are at most ten long
    where = np.bincount(np.concatenate(spans), minlength=202) / 400
    assert abs(where[5:95].mean() - 0.15) < 0.02 and where[5:195].max() < 0.3


def test_a_sequence_does_not_depend_on_its_neighbors() -> None:
    ids, lengths = sequences(20, 60)
    together = masked(SPANS, ids, lengths)
    key = keys_of(7, np.arange(20))
    for number in (0, 7, 19):
        part = ids[number * 60 : (number + 1) * 60]
        own = key[number : number + 1]
        _, masks = draw_by_keys(part, np.array([60]), SPECIALS, SPANS, own)
        assert masks.positions.tolist() == together[number].tolist()


def test_spans_begin_with_words() -> None:
    ids, lengths = sequences(200, 202)
    continues = np.zeros(V, bool)
    continues[::3] = True
    specials = replace(SPECIALS, continues=continues)
    keys = keys_of(7, np.arange(200))
    _, masks = draw_by_keys(ids, lengths, specials, SPANS, keys)
    positions = np.split(masks.positions.astype(int), np.cumsum(masks.counts.astype(int))[:-1])
    firsts = [
        ids[number * 202 + run[0]]
        for number, own in enumerate(positions)
        for run in np.split(own, np.flatnonzero(np.diff(own) != 1) + 1)
    ]
    assert continues[firsts].mean() < 0.08  # a third of all tokens; only spans of ten are cut
    plain, _ = draw_by_keys(ids, lengths, SPECIALS, SPANS, keys)
    assert (plain != ids).any()


def test_short_sequences_get_a_mask() -> None:
    ids, lengths = sequences(50, 7)
    assert all(len(s) == 1 for s in masked(SPANS, ids, lengths))


def test_what_is_refused() -> None:
    with pytest.raises(InputError, match="span_length is 11"):
        Recipe(span_length=11.0)
    with pytest.raises(InputError, match="two ways to mask"):
        Recipe(span_length=3.0, whole_words=True)
