"""Documents into BERT's examples for pretraining: pairs of segments, or single ones.

    bulk = Bulk(tokenizer)
    sequences = make(tokenise(bulk, documents), Recipe(), specials_of(tokenizer), seed=(number,))

A pair is `[CLS] A [SEP] B [SEP]`. A document is gone through sentence by sentence until a target is
reached: what `max_length` has room for or, for one document in ten, a random number from 2 to that.
These sentences are cut in two at random. Half the time, and whenever there is only one, B is thrown
away for sentences of another document, from a random one on; A is followed by what was thrown away
in the next example. What is too long loses tokens from the longer segment, each from its front or
its back. So the segments A and those B that really follow tile each document in order, in each of
its `duplicates` passes, and only tokens lost to the limit are in no example.

Two rules of our own. Where the call has but one document, there is no other to take from: B is
always what follows, and a sentence that is alone is cut in two itself; one of a single token, which
cannot be, is left out. Without next-sentence prediction an example is `[CLS] A [SEP]` with
as many whole sentences as fit (RoBERTa's DOC-SENTENCES); a longer sentence goes on in the next
example, so then no token is ever lost.

Every segment is a stretch of one flat array of tokens. Plain Python therefore only decides where
segments begin and end, a few steps for an example however long its sentences are; tokens are cut,
laid out and masked by numpy, all examples at once. The same seed gives the same examples, whoever
else is at work; a new release of numpy may draw others.

Follows Devlin et al. 2018 (appendix A.2) and the data of MLPerf's BERT; Liu et al. 2019.
"""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise

import numpy as np

from packhorse.data.packed.masking import Masks, Recipe, Specials, draw, narrow
from packhorse.tokens.bulk import BulkTokenizer

RANDOM_NEXT = 0.5
SHORTEST_TARGET = 2

# Where A begins and ends in the tokens of all documents, where B does, and is B from elsewhere?
Span = tuple[int, int, int, int, bool]
Dice = Callable[[], float]  # each time another number from 0 up to 1


@dataclass(frozen=True, slots=True)
class Tokenised:
    """Documents of sentences of tokens, laid end to end; no sentence and no document is empty."""

    ids: np.ndarray  # [N]
    sentences: np.ndarray  # where each begins in `ids`, and the end
    documents: np.ndarray  # where each begins in `sentences`, and the end


@dataclass(frozen=True, slots=True)
class Sequences:
    """n examples laid end to end in T tokens."""

    ids: np.ndarray  # [T] uint16, or uint32 for a large vocabulary; masked if `masked` is there
    lengths: np.ndarray  # [n] uint16, or uint32 where they may be longer
    first: np.ndarray  # [n] tokens of segment A with its [CLS] and [SEP]
    random_next: np.ndarray  # [n] bool: segment B is from another document
    masked: Masks | None = None


def tokenise(bulk: BulkTokenizer, documents: Sequence[Sequence[str]]) -> Tokenised:
    """The tokens of documents given as sentences; what has none, of either, is left out."""
    ids, bounds = bulk.encode(list(chain.from_iterable(documents)))
    kept = np.diff(bounds) > 0
    last = np.cumsum([0, *map(len, documents)])
    documents_at = np.concatenate([[0], np.cumsum(kept)])[last]
    return Tokenised(
        ids=ids,
        sentences=bounds[np.concatenate([[True], kept])],
        documents=np.unique(documents_at),
    )


def make(
    tokenised: Tokenised, recipe: Recipe, specials: Specials, seed: tuple[int, ...]
) -> Sequences:
    """All examples of these documents, pass after pass; `seed` is on top of the recipe's own."""
    entropy = (recipe.seed, len(seed), *seed)  # the length: to numpy, zeros at the end are nothing
    passes = np.random.SeedSequence(entropy).spawn(recipe.duplicates + 1)
    sentences, documents = tokenised.sentences.tolist(), tokenised.documents.tolist()
    walk = _pairs if recipe.next_sentence else _singles
    spans: list[Span] = []
    for each in passes[1:]:
        dice = random.Random(int.from_bytes(each.generate_state(4).tobytes(), "little")).random
        spans += walk(sentences, documents, recipe, dice)
    rng = np.random.default_rng(passes[0])
    table = np.array(spans, np.int64).reshape(-1, 5)
    segments, random_next = table[:, :4].T, table[:, 4].astype(bool)
    made = _laid(tokenised.ids, _cut(segments, recipe, rng), random_next, recipe, specials)
    if not recipe.static_masks:
        return made
    ids, masks = draw(made.ids, made.lengths, specials, recipe, rng)
    return replace(made, ids=ids, masked=masks)


def _pairs(
    sentences: list[int], documents: list[int], recipe: Recipe, dice: Dice
) -> Iterator[Span]:
    others = len(documents) > 2
    for number, (at, end) in enumerate(pairwise(documents)):
        target = _target(recipe.max_length - 3, recipe, dice)
        while at < end:
            stop = bisect_left(sentences, sentences[at] + target, at + 1, end)
            split = at + 1 + int(dice() * (stop - at - 1))
            begin, middle = sentences[at], sentences[split]
            if others and (split == stop or dice() < RANDOM_NEXT):
                need = target - (middle - begin)
                yield begin, middle, *_elsewhere(sentences, documents, number, need, dice), True
                at = split
                continue
            if split == stop:
                middle = begin + 1 + int(dice() * (middle - begin - 1))
            if middle < sentences[stop]:
                yield begin, middle, middle, sentences[stop], False
            at = stop


def _elsewhere(
    sentences: list[int], documents: list[int], number: int, need: int, dice: Dice
) -> tuple[int, int]:
    """A segment of about that many tokens from any document but this one."""
    other = int(dice() * (len(documents) - 2))
    other += other >= number
    begin, end = documents[other : other + 2]
    at = begin + int(dice() * (end - begin))
    stop = bisect_left(sentences, sentences[at] + need, at + 1, end)
    return sentences[at], sentences[stop]


def _singles(
    sentences: list[int], documents: list[int], recipe: Recipe, dice: Dice
) -> Iterator[Span]:
    room = recipe.max_length - 2
    for at, end in pairwise(documents):
        target = _target(room, recipe, dice)
        while at < end:
            begin = sentences[at]
            at = max(at + 1, bisect_right(sentences, begin + target, at + 1, end + 1) - 1)
            for part in range(begin, sentences[at], room):
                stop = min(part + room, sentences[at])
                yield part, stop, stop, stop, False


def _target(room: int, recipe: Recipe, dice: Dice) -> int:
    """How many tokens a document's examples are to have."""
    if dice() >= recipe.short_probability:
        return room
    return SHORTEST_TARGET + int(dice() * (room - SHORTEST_TARGET + 1))


def _cut(segments: np.ndarray, recipe: Recipe, rng: np.random.Generator) -> np.ndarray:
    """[4, n] the same segments, cut to what there is room for.

    To take tokens from the longer segment one by one, from the second where they are equal, ends
    with as many in each as this says; each of them is from the front or the back by a coin.
    """
    room = recipe.max_length - (3 if recipe.next_sentence else 2)
    a_begin, a_end, b_begin, b_end = segments
    first, second = a_end - a_begin, b_end - b_begin
    kept = np.maximum(np.minimum(first, (room + 1) // 2), room - second)
    lost_first = np.maximum(first - kept, 0)
    lost_second = np.maximum(second - np.maximum(room - first + lost_first, 0), 0)
    front_first, front_second = rng.binomial([lost_first, lost_second], 0.5)
    return np.stack(
        [
            a_begin + front_first,
            a_end - (lost_first - front_first),
            b_begin + front_second,
            b_end - (lost_second - front_second),
        ]
    )


def _laid(
    ids: np.ndarray,
    segments: np.ndarray,
    random_next: np.ndarray,
    recipe: Recipe,
    specials: Specials,
) -> Sequences:
    """Special tokens and segments gathered into their places."""
    a_begin, a_end, b_begin, b_end = segments
    with_ends = np.append(ids, np.array([specials.cls, specials.sep], ids.dtype))
    cls, sep = (np.full(len(a_begin), len(ids) + i) for i in range(2))
    pair = int(recipe.next_sentence)
    one = np.ones(len(a_begin), np.int64)
    starts = np.stack([cls, a_begin, sep, b_begin, sep], axis=1)
    sizes = np.stack([one, a_end - a_begin, one, b_end - b_begin, one * pair], axis=1)
    ends = np.cumsum(sizes)
    places = np.repeat(starts.ravel() - (ends - sizes.ravel()), sizes.ravel())
    places += np.arange(len(places))
    return Sequences(
        ids=with_ends[places],
        lengths=narrow(sizes.sum(axis=1), recipe.max_length),
        first=narrow(a_end - a_begin + 2, recipe.max_length),
        random_next=random_next,
    )
