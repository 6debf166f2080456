"""Masks against their definition: how many, where, and what stands there instead."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from packhorse.data.packed import masking
from packhorse.data.packed.masking import (
    Masks,
    Recipe,
    Specials,
    draw,
    draw_by_keys,
    keys_of,
    specials_of,
)
from packhorse.errors import InputError
from packhorse.tokens import Tokenizer
from packhorse_bench import list_examples

CLS, SEP, MASK, PAD, WORD = 1, 2, 3, 0, 10
CONTINUES = np.arange(100) >= 60
SPECIALS = Specials(CLS, SEP, MASK, PAD, vocab_size=100, continues=CONTINUES)
UNLIKELY, IMPOSSIBLE = 1e-3, 1e-9


def fits(observed, shares) -> float:
    """How likely counts as far from these shares are, if the shares are right."""
    shares = np.asarray(shares, float)
    return stats.chisquare(observed, np.sum(observed) * shares / shares.sum()).pvalue


def sequences(lengths, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of segments, of random tokens between special ones."""
    rng = np.random.default_rng(seed)
    lengths = np.asarray(lengths)
    ids = rng.integers(WORD, 100, lengths.sum()).astype(np.uint16)
    ends = np.cumsum(lengths)
    ids[ends - lengths], ids[ends - 1], ids[ends - lengths // 2 - 1] = CLS, SEP, SEP
    return ids, lengths


def split(masks: Masks) -> list[tuple[list[int], list[int]]]:
    """Places and tokens, sequence by sequence."""
    ends = np.cumsum(masks.counts.astype(int))[:-1]
    both = (np.split(masks.positions, ends), np.split(masks.ids, ends))
    return [(at.tolist(), ids.tolist()) for at, ids in zip(*both, strict=True)]


@pytest.mark.parametrize("most", [76, 20, None])
def test_how_many(rng: np.random.Generator, most: int | None) -> None:
    ids, lengths = sequences(np.arange(5, 601))
    _, masks = draw(ids, lengths, SPECIALS, Recipe(max_predictions=most), rng)
    definition = [min(most or 10**6, max(1, round(n * 0.15))) for n in range(5, 601)]
    assert masks.counts.tolist() == definition


def test_masks_tell_what_stood_where_and_nothing_else_changed(rng: np.random.Generator) -> None:
    ids, lengths = sequences(rng.integers(5, 513, 300))
    before = ids.copy()
    shown, masks = draw(ids, lengths, SPECIALS, Recipe(), rng)
    assert (ids == before).all() and shown.dtype == ids.dtype
    restored = shown.copy()
    starts = np.cumsum(lengths) - lengths
    for start, (at, tokens) in zip(starts, split(masks), strict=True):
        assert at == sorted(set(at))
        restored[start + np.array(at)] = tokens
    assert (restored == ids).all()
    assert not set(masks.ids.tolist()) & {CLS, SEP, PAD}


def test_eighty_ten_ten(rng: np.random.Generator) -> None:
    ids, lengths = sequences([200] * 3000)
    ids[ids >= WORD] = WORD
    shown, masks = draw(ids, lengths, SPECIALS, Recipe(), rng)
    location = np.repeat(np.arange(3000) * 200, masks.counts) + masks.positions
    tokens = shown[location]
    counts = [(tokens == MASK).sum(), (tokens == WORD).sum()]
    counts.append(len(tokens) - sum(counts))
    # One in a hundred random tokens is [MASK], one the token that stood there.
    assert fits(counts, [0.801, 0.101, 0.098]) > UNLIKELY
    assert fits(counts, [0.811, 0.101, 0.088]) < IMPOSSIBLE
    drawn = np.bincount(tokens, minlength=100)
    uniform = np.ones(98)
    others = np.delete(drawn, [MASK, WORD])
    assert fits(others, uniform) > UNLIKELY
    assert fits(others, uniform + (np.arange(98) < 8)) < IMPOSSIBLE


@pytest.mark.parametrize("whole_words", [False, True])
def test_every_set_of_places_is_as_likely(rng: np.random.Generator, whole_words: bool) -> None:
    ids, lengths = sequences([14] * 40_000)
    ids[ids >= WORD] = WORD
    free = np.flatnonzero(ids[:14] == WORD).tolist()
    _, masks = draw(ids, lengths, SPECIALS, Recipe(whole_words=whole_words), rng)
    result = Counter(tuple(pair) for pair in masks.positions.reshape(-1, 2).tolist())
    pairs = list(combinations(free, 2))
    counts = [result[pair] for pair in pairs]
    assert sum(counts) == 40_000
    assert fits(counts, np.ones(len(pairs))) > UNLIKELY
    assert fits(counts, [1.2 if a == free[0] else 1 for a, _ in pairs]) < IMPOSSIBLE


def words_of(ids: list[int]) -> list[list[int]]:
    """The places of each word."""
    words: list[list[int]] = []
    for place, id in enumerate(ids):
        if id in (CLS, SEP):
            words.append([])
        elif CONTINUES[id] and words and words[-1]:
            words[-1].append(place)
        else:
            words.append([place])
    return [word for word in words if word]


def test_whole_words_are_whole(rng: np.random.Generator) -> None:
    ids, lengths = sequences(rng.integers(5, 300, 500))
    recipe = Recipe(whole_words=True)
    _, masks = draw(ids, lengths, SPECIALS, recipe, rng)
    starts = np.cumsum(lengths) - lengths
    for start, length, (at, _) in zip(starts, lengths, split(masks), strict=True):
        words = words_of(ids[start : start + length].tolist())
        touched = [word for word in words if set(word) & set(at)]
        assert sorted(place for word in touched for place in word) == at
        remaining = max(1, round(length * 0.15)) - len(at)
        assert remaining >= 0
        untouched = [len(word) for word in words if word not in touched]
        assert not untouched or min(untouched) > remaining, "another word would have fitted"
    _, single = draw(ids, lengths, SPECIALS, replace(recipe, whole_words=False), rng)
    cut = 0
    for start, length, (at, _) in zip(starts, lengths, split(single), strict=True):
        words = words_of(ids[start : start + length].tolist())
        cut += any(0 < len(set(word) & set(at)) < len(word) for word in words)
    assert cut > 100  # the question can be answered with no


def test_whole_words_are_as_likely_as_in_the_reference(rng: np.random.Generator) -> None:
    """Which words are masked together, of words of unlike sizes that compete for three tokens."""
    sizes, tries = [1, 2, 1, 3, 1, 4, 2, 1], 6000
    text = [WORD if not place else 99 for size in sizes for place in range(size)]
    row = [CLS, *text, SEP, WORD, SEP]
    recipe = Recipe(whole_words=True)
    ids = np.tile(np.array(row, np.uint16), tries)
    _, masks = draw(ids, np.full(tries, len(row)), SPECIALS, recipe, rng)
    actual = Counter(tuple(at) for at, _ in split(masks))
    names = {CLS: "[CLS]", SEP: "[SEP]", WORD: "word", 99: "##s"}
    dice = random.Random(0)

    def reference(recipe: Recipe) -> Counter[tuple[int, ...]]:
        tokens = [[names[id] for id in row] for _ in range(tries)]
        return Counter(
            tuple(list_examples.mask(item, recipe, ["word"], dice)[0]) for item in tokens
        )

    assert alike(actual, reference(recipe)) > UNLIKELY
    assert alike(actual, reference(replace(recipe, mask_probability=0.2))) < IMPOSSIBLE


def test_the_only_words_that_fit_are_as_likely(rng: np.random.Generator) -> None:
    """One token is wanted and most words have two, so it often takes all words to find one."""
    row = [CLS, *[WORD, 99] * 30, *[WORD] * 5, SEP]
    ids = np.tile(np.array(row, np.uint16), 4000)
    recipe = Recipe(whole_words=True, mask_probability=0.01)
    _, masks = draw(ids, np.full(4000, len(row)), SPECIALS, recipe, rng)
    counts = np.bincount(masks.positions, minlength=len(row))[61:66]
    assert counts.sum() == 4000
    assert fits(counts, np.ones(5)) > UNLIKELY
    assert fits(counts, [1.4, 1, 1, 1, 1]) < IMPOSSIBLE


def test_a_word_ends_with_its_sequence(rng: np.random.Generator) -> None:
    """Even where no special token stands between two of them."""
    ids = np.array([WORD, WORD, 99, 99, 99, WORD], np.uint16)
    for lengths, counts in (([2, 4], [1, 1]), ([6], [1])):
        recipe = Recipe(whole_words=True)
        result = {
            tuple(masks.positions.tolist())
            for _ in range(50)
            for masks in [draw(ids, np.array(lengths), SPECIALS, recipe, rng)[1]]
            if masks.counts.tolist() == counts
        }
        assert result == ({(0, 3), (1, 3)} if len(lengths) == 2 else {(0,), (5,)})


def alike(element: Counter, second: Counter) -> float:
    """How likely it is that two counts of outcomes come from one distribution."""
    table = np.array([[counts[key] for key in element | second] for counts in (element, second)])
    common = table.sum(axis=0) >= 20
    rare = table[:, ~common].sum(axis=1, keepdims=True)
    table = np.hstack([table[:, common], rare]) if rare.any() else table
    return stats.chi2_contingency(table).pvalue


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6)), max_size=40), st.randoms())
def test_words_are_taken_in_order_while_they_fit(words, dice) -> None:
    owners = np.array(sorted(owner for owner, _ in words), int)
    sizes = np.array([size for _, size in words], int)
    requested = np.array([dice.randint(0, 12) for _ in range(4)])
    order = np.array(sorted(range(len(words)), key=lambda i: (owners[i], dice.random())), int)
    chosen = np.zeros(len(words), bool)
    remaining = masking._take(chosen, order, sizes, owners, requested)
    expected, budget = set(), requested.tolist()
    for word in order.tolist():
        if sizes[word] <= budget[owners[word]]:
            budget[owners[word]] -= sizes[word]
            expected.add(word)
    assert set(np.flatnonzero(chosen).tolist()) == expected
    assert remaining.tolist() == budget


@pytest.mark.parametrize("whole_words", [False, True])
def test_a_sequence_does_not_depend_on_its_neighbors(whole_words: bool) -> None:
    ids, lengths = sequences([5, 90, 33, 512, 7, 60])
    keys = keys_of(7, np.arange(6))
    recipe = Recipe(whole_words=whole_words)
    shown, masks = draw_by_keys(ids, lengths, SPECIALS, recipe, keys)
    ends, together = np.cumsum(lengths), split(masks)
    for i, (end, length) in enumerate(zip(ends, lengths, strict=True)):
        alone = ids[end - length : end], lengths[i : i + 1], SPECIALS, recipe
        masked, its = draw_by_keys(*alone, keys[i : i + 1])
        assert masked.tolist() == shown[end - length : end].tolist()
        assert split(its) == together[i : i + 1]
        if length > 50:
            second, _ = draw_by_keys(*alone, keys[i : i + 1] + np.uint64(1))
            assert second.tolist() != masked.tolist()


def test_seeds() -> None:
    ids, lengths = sequences([64] * 20)

    def drawn(seed: int) -> list[int]:
        rng = np.random.default_rng(seed)
        return draw(ids, lengths, SPECIALS, Recipe(), rng)[0].tolist()

    assert drawn(1) == drawn(1) != drawn(2)


def test_keys_are_as_good_as_random() -> None:
    keys = keys_of(5, np.arange(200)[:, None], np.arange(200)[None, :])
    assert keys.shape == (200, 200) and len(np.unique(keys)) == 40_000
    assert (keys != keys.T).any() and (keys != keys_of(6, *np.ogrid[:200, :200])).all()
    bits = np.unpackbits(keys.ravel().view(np.uint8))
    assert fits([bits.sum(), len(bits) - bits.sum()], [1, 1]) > UNLIKELY


@pytest.mark.parametrize("whole_words", [False, True])
def test_nothing_to_mask(rng: np.random.Generator, whole_words: bool) -> None:
    recipe = Recipe(whole_words=whole_words)
    ids = np.array([CLS, SEP, CLS, WORD, SEP, PAD, PAD], np.uint16)
    _, masks = draw(ids, np.array([2, 3, 0, 2]), SPECIALS, recipe, rng)
    assert masks.counts.tolist() == [0, 1, 0, 0]
    shown, masks = draw(ids[:2], np.array([2]), SPECIALS, recipe, rng)
    assert shown.tolist() == [CLS, SEP] and not len(masks.positions)
    shown, masks = draw(ids[:0], np.zeros(0, int), SPECIALS, recipe, rng)
    assert not len(shown) and not len(masks.counts)


def test_a_large_vocabulary(rng: np.random.Generator) -> None:
    wide = replace(SPECIALS, vocab_size=1 << 20, mask=70_000, continues=None)
    ids = np.full(100_000, 99_999, np.uint32)
    shown, masks = draw(ids, np.array([100_000]), wide, Recipe(max_predictions=None), rng)
    assert masks.counts.tolist() == [15_000] and masks.positions.dtype == np.uint32
    assert (shown == 70_000).sum() > 11_500 and shown.max() > 1 << 19


def test_mistakes(rng: np.random.Generator) -> None:
    ids, lengths = sequences([10, 20])
    with pytest.raises(InputError, match="add up to 10 tokens, but there are 30"):
        draw(ids, lengths[:1], SPECIALS, Recipe(), rng)
    with pytest.raises(InputError, match="## pieces"):
        unknown = replace(SPECIALS, continues=None)
        draw(ids, lengths, unknown, Recipe(whole_words=True), rng)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_length": 4},
        {"short_probability": 1.5},
        {"mask_probability": 0.0},
        {"mask_probability": 1.0},
        {"max_predictions": 0},
        {"duplicates": 0},
        {"seed": -1},
    ],
)
def test_a_recipe_that_cannot_be(wrong: dict) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        Recipe(**wrong)


def test_specials_of_a_tokenizer(tmp_path: Path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "walk", "##ing"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    result = specials_of(Tokenizer.load(tmp_path))
    assert result == Specials(cls=2, sep=3, mask=4, pad=0, vocab_size=7)
    assert result.continues is not None and result.continues.tolist() == [False] * 6 + [True]
    (tmp_path / "vocab.txt").write_text("\n".join(word for word in words if word != "[MASK]"))
    with pytest.raises(InputError, match=r"no \[MASK\]"):
        specials_of(Tokenizer.load(tmp_path))
