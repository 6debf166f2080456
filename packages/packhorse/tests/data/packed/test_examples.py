"""Examples against their definition, and against the reference in lists."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from packhorse.data.corpus import workers
from packhorse.data.packed import examples
from packhorse.data.packed.examples import Sequences, TokenizedDocuments, make, tokenize
from packhorse.data.packed.masking import Recipe, Specials
from packhorse.tokens import Tokenizer
from packhorse.tokens.bulk import BulkTokenizer
from packhorse_bench import list_examples

CLS, SEP, MASK, FIRST = 1, 2, 3, 10
SPECIALS = Specials(CLS, SEP, MASK, pad=0, vocab_size=1 << 30)
UNLIKELY, IMPOSSIBLE = 1e-3, 1e-9
Draw = Callable[[random.Random], int]


def corpus(documents: int, sentences: Draw, tokens: Draw, seed: int = 0) -> TokenizedDocuments:
    """Every token is another one, so that it is known wherever it turns up."""
    dice = random.Random(seed)
    counts = [sentences(dice) for _ in range(documents)]
    sizes = [tokens(dice) for _ in range(sum(counts))]
    return TokenizedDocuments(
        ids=np.arange(FIRST, FIRST + sum(sizes), dtype=np.uint32),
        sentences=np.cumsum([0, *sizes]),
        documents=np.cumsum([0, *counts]),
    )


def mixed(documents: int = 60) -> TokenizedDocuments:
    """Like articles: some are a single sentence, some sentences are longer than an example."""
    long = [700] + 20 * [0]
    return corpus(
        documents,
        lambda dice: dice.choice([1, 2, 5, 20, 80]),
        lambda dice: dice.randint(1, 60) + dice.choice(long),
    )


def fixed(count: int) -> Draw:
    return lambda _: count


def split_sequences(sequences: Sequences) -> list[np.ndarray]:
    return np.split(sequences.ids, np.cumsum(sequences.lengths.astype(int))[:-1])


def segments(sequences: Sequences) -> list[tuple[list[int], list[int], bool]]:
    """A, B and the label, after a look at the special tokens around them."""
    result = []
    for ids, first, label in zip(
        split_sequences(sequences), sequences.first, sequences.random_next, strict=True
    ):
        assert ids[0] == CLS and ids[first - 1] == SEP and ids[-1] == SEP
        assert (ids < FIRST).sum() == 3
        result.append((ids[1 : first - 1].tolist(), ids[first:-1].tolist(), bool(label)))
    return result


def document_of(sample: TokenizedDocuments, token: int) -> int:
    sentence = np.searchsorted(sample.sentences, token - FIRST, side="right") - 1
    return int(np.searchsorted(sample.documents, sentence, side="right") - 1)


def spans(
    sample: TokenizedDocuments, recipe: Recipe, seed: int = 0
) -> list[examples.SegmentBounds]:
    """Segments before they are cut to the limit."""
    walk = examples._pairs if recipe.next_sentence else examples._singles
    dice = random.Random(seed).random
    return list(walk(sample.sentences.tolist(), sample.documents.tolist(), recipe, dice))


def pvalue(successes: int, tries: int, share: float) -> float:
    return stats.binomtest(successes, tries, share).pvalue


@pytest.mark.parametrize("max_length", [5, 16, 128, 512])
@pytest.mark.parametrize("short", [0.0, 0.1, 1.0])
def test_segments_tile_each_document(max_length: int, short: float) -> None:
    sample = mixed()
    result = spans(sample, Recipe(max_length=max_length, short_probability=short))
    consecutive = [
        (begin, end)
        for a, b, c, d, elsewhere in result
        for begin, end in ([(a, b)] if elsewhere else [(a, b), (c, d)])
    ]
    assert consecutive[0][0] == 0 and consecutive[-1][1] == len(sample.ids)
    assert all(before[1] == after[0] for before, after in pairwise(consecutive))
    borders = set(sample.sentences.tolist())
    assert all(begin in borders and end in borders for begin, end in consecutive)
    ends = set(sample.sentences[sample.documents].tolist())
    assert ends <= {begin for begin, _ in consecutive} | {len(sample.ids)}


@pytest.mark.parametrize("max_length", [5, 64, 512])
def test_examples_keep_to_the_limit_and_cut_only_what_is_too_long(max_length: int) -> None:
    sample, recipe = mixed(), Recipe(max_length=max_length)
    sequences = make(sample, recipe, SPECIALS, (0,))
    result = segments(sequences)
    assert sequences.lengths.min() >= 5 and sequences.lengths.max() == max_length
    for first, second, elsewhere in result:
        for segment in (first, second):
            assert segment == list(range(segment[0], segment[-1] + 1))
            assert document_of(sample, segment[0]) == document_of(sample, segment[-1])
        same = document_of(sample, first[0]) == document_of(sample, second[0])
        assert elsewhere != same
        full = len(first) + len(second) == max_length - 3
        starts = {FIRST + at for at in sample.sentences.tolist()}
        whole = all(s[0] in starts and s[-1] + 1 in starts for s in (first, second))
        assert whole or full, "cut, though there was room"


def test_cutting_is_the_references() -> None:
    """As many tokens from each segment as when they go one by one, from both ends alike."""
    dice = random.Random(0)
    sizes = [(dice.randint(1, 90), dice.randint(1, 90)) for _ in range(3000)]
    sizes += [(a, b) for a in (29, 30, 31, 32) for b in (29, 30, 31, 32)]
    for max_length in (63, 64):
        inputs = np.array([(1000, 1000 + a, 5000, 5000 + b) for a, b in sizes]).T
        cut = examples._cut(inputs, Recipe(max_length=max_length), np.random.default_rng(0))
        front = back = 0
        for (a, b), (a0, a1, b0, b1) in zip(sizes, cut.T.tolist(), strict=True):
            first, second = list(range(a)), list(range(b))
            list_examples.truncate(first, second, max_length - 3, dice)
            assert (a1 - a0, b1 - b0) == (len(first), len(second))
            assert a0 >= 1000 and a1 <= 1000 + a and b0 >= 5000 and b1 <= 5000 + b
            front += a0 - 1000 + b0 - 5000
            back += 1000 + a - a1 + 5000 + b - b1
        assert pvalue(front, front + back, 0.5) > UNLIKELY
        assert pvalue(front, front + back, 0.53) < IMPOSSIBLE


def test_half_the_pairs_do_not_follow() -> None:
    sample = corpus(200, fixed(200), fixed(10))
    recipe = Recipe(max_length=128, short_probability=0)
    ends = set(sample.sentences[sample.documents].tolist())
    # Where A reaches its document's end it was a sentence alone, which nothing can follow.
    labels = [label for _, end, *_, label in spans(sample, recipe) if end not in ends]
    assert len(labels) > 4000
    assert pvalue(sum(labels), len(labels), 0.5) > UNLIKELY
    assert pvalue(sum(labels), len(labels), 0.55) < IMPOSSIBLE
    alone = spans(corpus(50, fixed(1), fixed(10)), recipe)
    assert len(alone) == 50 and all(label for *_, label in alone)


def test_what_does_not_follow_is_from_any_other_document_at_any_sentence() -> None:
    sample = corpus(12, fixed(30), fixed(20))
    recipe = Recipe(max_length=64, short_probability=0)
    took = np.zeros((12, 12), int)
    begins = np.zeros(30, int)
    for seed in range(150):
        for a, _, c, d, label in spans(sample, recipe, seed):
            if label:
                document, sentence = divmod(c // 20, 30)
                took[a // 600, document] += 1
                begins[sentence] += 1
                assert d - c >= 20 and d <= (document + 1) * 600
    assert not took.diagonal().any()
    others = took[~np.eye(12, dtype=bool)]
    assert stats.chisquare(others.reshape(12, 11), axis=1).pvalue.min() > UNLIKELY / 12
    assert stats.chisquare(begins).pvalue > UNLIKELY
    skewed = np.where(np.arange(30) < 3, 1.5, 1)
    assert stats.chisquare(begins, begins.sum() * skewed / skewed.sum()).pvalue < IMPOSSIBLE


def test_where_a_pair_is_split() -> None:
    sample = corpus(300, fixed(201), fixed(10))
    result = spans(sample, Recipe(max_length=103, short_probability=0))
    sizes = [(b - a) // 10 for a, b, _, d, label in result if not label and d - a == 100]
    counts = np.bincount(sizes, minlength=10)[1:]
    assert counts.sum() > 3000 and stats.chisquare(counts).pvalue > UNLIKELY


def test_one_document_in_ten_is_cut_shorter() -> None:
    """With sentences of one token, a document's first example is as long as its target."""
    sample = corpus(5000, fixed(150), fixed(1))
    sequences = make(sample, Recipe(max_length=103), SPECIALS, (0,))
    first = {}
    for (a, *_), length, label in zip(
        segments(sequences), sequences.lengths, sequences.random_next, strict=True
    ):
        first.setdefault(document_of(sample, a[0]), (int(length) - 3, bool(label)))
    assert len(first) == 5000
    # What is from elsewhere may end with its document; what follows never does that early.
    targets = np.array([length for length, label in first.values() if not label])
    short = targets[targets < 100]
    share = 0.1 * 98 / 99
    assert pvalue(len(short), len(targets), share) > UNLIKELY
    assert pvalue(len(short), len(targets), 0.2) < IMPOSSIBLE
    assert short.min() == 2
    counts = np.histogram(short, bins=7, range=(2, 100))[0]
    assert stats.chisquare(counts).pvalue > UNLIKELY


Shape = tuple[int, int, bool]  # tokens, tokens of the first segment, label


def firsts(result: list[tuple[int, Shape]], sample: TokenizedDocuments) -> np.ndarray:
    """Of each document the example that comes first, counted by shape; they are independent."""
    retained: dict[int, Shape] = {}
    for token, shape in sorted(result):
        retained.setdefault(document_of(sample, token), shape)
    assert len(retained) == len(sample.documents) - 1
    bins = [[0, 16, 32, 64, 96, 127, 200], [0, 16, 48, 200], [0, 0.5, 1]]
    return np.histogramdd(np.array(list(retained.values())), bins=bins)[0].ravel()


def by_reference(sample: TokenizedDocuments, recipe: Recipe) -> list[tuple[int, Shape]]:
    names = [[str(id) for id in ids] for ids in np.split(sample.ids, sample.sentences[1:-1])]
    documents = [names[a:b] for a, b in pairwise(sample.documents.tolist())]
    result = []
    for example in list_examples.make(documents, {"10": 0}, recipe, seed=1):
        for place, token in zip(example.masked_at, example.masked, strict=True):
            example.tokens[place] = token
        shape = len(example.tokens), example.types.count(0), example.random_next
        result.append((int(example.tokens[1]), shape))
    return result


def test_lengths_and_labels_are_the_references() -> None:
    sample = corpus(5000, lambda d: d.choice([1, 2, 5, 20]), lambda d: d.randint(1, 60))
    recipe = Recipe(max_length=128)

    def ours(recipe: Recipe) -> np.ndarray:
        sequences = make(sample, recipe, SPECIALS, (0,))
        shapes = zip(
            sequences.lengths.tolist(), sequences.first.tolist(), sequences.random_next, strict=True
        )
        begins = [first[0] for first, *_ in segments(sequences)]
        return firsts(list(zip(begins, shapes, strict=True)), sample)

    def alike(item: np.ndarray, another: np.ndarray) -> float:
        both = np.stack([item, another])[:, item + another > 20]
        return stats.chi2_contingency(both).pvalue

    expected = firsts(by_reference(sample, recipe), sample)
    assert alike(ours(recipe), expected) > UNLIKELY
    assert alike(ours(replace(recipe, short_probability=0.5)), expected) < IMPOSSIBLE


def test_single_segments_lose_nothing() -> None:
    sample, recipe = mixed(), Recipe(max_length=128, next_sentence=False, duplicates=2)
    sequences = make(sample, recipe, SPECIALS, (0,))
    assert (sequences.first == sequences.lengths).all() and not sequences.random_next.any()
    borders = {FIRST + at for at in sample.sentences.tolist()}
    tokens = []
    for ids in split_sequences(sequences):
        assert ids[0] == CLS and ids[-1] == SEP and len(ids) <= 128
        inside = ids[1:-1].tolist()
        assert document_of(sample, inside[0]) == document_of(sample, inside[-1])
        whole = inside[0] in borders and inside[-1] + 1 in borders
        assert whole or not borders & set(inside[1:]), "a sentence cut that would have fitted"
        tokens += inside
    assert tokens == 2 * sample.ids.tolist()
    long = spans(sample, replace(recipe, short_probability=0))
    grown = [
        after[1] - before[0]
        for before, after in pairwise(long)
        if before[0] + FIRST in borders
        and document_of(sample, before[0] + FIRST) == document_of(sample, after[0] + FIRST)
    ]
    assert min(grown) > 126, "two examples that would have fitted into one"


def test_a_lone_document_has_only_what_follows() -> None:
    sample = corpus(1, fixed(40), lambda dice: dice.choice([1, 3, 200]))
    sequences = make(sample, Recipe(max_length=64, duplicates=5), SPECIALS, (0,))
    assert not sequences.random_next.any() and sequences.first.min() >= 3
    for first, second, _ in segments(sequences):
        assert first and second and first[-1] < second[0]
    lost = make(corpus(1, fixed(1), fixed(1)), Recipe(), SPECIALS, (0,))
    assert not len(lost.lengths)
    pairs = segments(make(corpus(1, fixed(1), fixed(2)), Recipe(), SPECIALS, (0,)))
    assert pairs == [([FIRST], [FIRST + 1], False)]


def test_no_documents() -> None:
    for recipe in (Recipe(static_masks=True), Recipe(next_sentence=False)):
        sequences = make(corpus(0, fixed(1), fixed(1)), recipe, SPECIALS, (0,))
        assert (
            not len(sequences.ids) and not len(sequences.lengths) and not len(sequences.random_next)
        )


def test_each_pass_is_another() -> None:
    sample = corpus(20, fixed(30), fixed(3))
    recipe = Recipe(max_length=5000, duplicates=3)  # nothing is cut
    sequences = make(sample, recipe, SPECIALS, (3,))
    begins = [i for i, (a, *_) in enumerate(segments(sequences)) if a[0] == FIRST]
    assert len(begins) == 3 and begins[0] == 0
    passes = [ids.tolist() for ids in np.split(sequences.lengths, begins[1:])]
    assert passes[0] != passes[1] != passes[2] != passes[0]
    consecutive = [a if elsewhere else a + b for a, b, elsewhere in segments(sequences)]
    assert [token for tokens in consecutive for token in tokens] == 3 * sample.ids.tolist()


def same(item: Sequences, another: Sequences) -> bool:
    pairs = [(getattr(item, name), getattr(another, name)) for name in ("ids", "lengths", "first")]
    if item.masked and another.masked:
        pairs += [
            (item.masked.positions, another.masked.positions),
            (item.masked.ids, another.masked.ids),
        ]
    return all(np.array_equal(a, b) for a, b in pairs)


def test_seeds() -> None:
    sample, recipe = mixed(20), Recipe(static_masks=True)
    sequences = make(sample, recipe, SPECIALS, (1, 2))
    assert same(sequences, make(sample, recipe, SPECIALS, (1, 2)))
    for another in ((1, 3), (2, 1), (1,), (1, 2, 0)):
        assert not same(sequences, make(sample, recipe, SPECIALS, another))
    assert not same(sequences, make(sample, replace(recipe, seed=1), SPECIALS, (1, 2)))


def test_it_is_the_same_whoever_makes_it() -> None:
    items = [(mixed(10), Recipe(static_masks=True), SPECIALS, (chunk,)) for chunk in range(4)]
    with workers.local(1) as run:
        alone = list(run(make, items))
    with workers.local(2) as run:
        together = list(run(make, items))
    assert all(map(same, alone, together)) and not same(alone[0], alone[1])


def test_static_masks() -> None:
    sample = mixed(20)
    shown = make(sample, Recipe(static_masks=True), SPECIALS, (0,))
    plain = make(sample, Recipe(), SPECIALS, (0,))
    assert plain.masked is None and shown.masked is not None
    assert (shown.lengths == plain.lengths).all()
    counts = shown.masked.counts
    location = np.repeat(np.cumsum(plain.lengths.astype(int)) - plain.lengths, counts)
    location += shown.masked.positions
    assert (plain.ids[location] == shown.masked.ids).all()
    hidden = np.flatnonzero(shown.ids != plain.ids)
    assert set(hidden.tolist()) < set(location.tolist())
    assert 0.85 < len(hidden) / len(location) < 0.95


def test_types_are_narrow() -> None:
    sample = corpus(5, fixed(5), fixed(5))
    small = replace(sample, ids=sample.ids.astype(np.uint16))
    sequences = make(small, Recipe(static_masks=True), replace(SPECIALS, vocab_size=300), (0,))
    assert sequences.masked is not None
    kinds = (
        sequences.ids,
        sequences.lengths,
        sequences.first,
        sequences.masked.positions,
        sequences.masked.ids,
    )
    assert {array.dtype for array in kinds} == {np.dtype(np.uint16)}
    long = make(sample, Recipe(max_length=100_000), SPECIALS, (0,))
    assert long.lengths.dtype == np.uint32 and long.random_next.dtype == bool


def test_tokenize_leaves_out_what_is_empty(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "##b"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    bulk = BulkTokenizer(Tokenizer.load(tmp_path))
    result = tokenize(bulk, [["a b", "", "bb a"], [], ["  ", "\x01"], ["b", "a a"]])
    assert result.ids.tolist() == [5, 6, 6, 7, 5, 6, 5, 5]
    assert result.sentences.tolist() == [0, 2, 5, 6, 8]
    assert result.documents.tolist() == [0, 2, 4]
    for nothing in ([], [[]], [[""], []]):
        assert tokenize(bulk, nothing).documents.tolist() == [0]
