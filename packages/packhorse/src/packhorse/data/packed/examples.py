"""BERT's pretraining examples from documents: pairs of segments, or single segments.

    bulk = BulkTokenizer(tokenizer)
    sequences = make(tokenize(bulk, documents), Recipe(), specials_of(tokenizer), seed=(number,))

A pair is `[CLS] A [SEP] B [SEP]`. Sentences of a document are collected until a target length is
reached: as many tokens as fit into `max_length` or, for one document in ten, a random number from 2
to that. They are divided into A and B at random. Half the time, and whenever there is only one
sentence, B is replaced by sentences of another document, from a random one on; the replaced
sentences begin the next example. If the pair is too long, tokens are removed from the longer
segment, each from its front or its back. So the segments A, and those B that really follow, cover
each document in order, in each of its `duplicates` passes, and only tokens removed for length are
in no example.

Two rules are our own. If there is only one document, there is no other to take B from: B is always
what follows, and a single sentence is itself divided; a sentence of one token, which cannot be
divided, is left out. Without next-sentence prediction an example is `[CLS] A [SEP]` with as many
whole sentences as fit (RoBERTa's DOC-SENTENCES); a longer sentence continues in the next example,
so then no token is ever lost.

Every segment is a range of one flat array of tokens. Python therefore only decides where segments
begin and end, a few steps per example however long its sentences are; tokens are cut, laid out and
masked by numpy, all examples at once. The same seed gives the same examples in any process; a new
release of numpy may draw others.

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

# Begin and end of A in the tokens of all documents, those of B, and whether B is from elsewhere.
SegmentBounds = tuple[int, int, int, int, bool]
Dice = Callable[[], float]  # a random number from 0 up to 1


@dataclass(frozen=True, slots=True)
class TokenizedDocuments:
    """Documents of sentences of tokens, laid end to end; no sentence and no document is empty."""

    ids: np.ndarray  # [N]
    sentences: np.ndarray  # begin of each in `ids`, and the end
    documents: np.ndarray  # begin of each in `sentences`, and the end


@dataclass(frozen=True, slots=True)
class Sequences:
    """n examples laid end to end in T tokens."""

    ids: np.ndarray  # [T] uint16, or uint32 for a large vocabulary; with masks if `masked` is set
    lengths: np.ndarray  # [n] uint16, or uint32 where they may be longer
    first: np.ndarray  # [n] tokens of segment A, its [CLS] and [SEP] included
    random_next: np.ndarray  # [n] bool: segment B is from another document
    masked: Masks | None = None


def tokenize(bulk: BulkTokenizer, documents: Sequence[Sequence[str]]) -> TokenizedDocuments:
    """Tokenize documents of sentences; sentences and documents without tokens are left out."""
    return tokenize_each(bulk, documents)[0]


def tokenize_each(
    bulk: BulkTokenizer, documents: Sequence[Sequence[str]]
) -> tuple[TokenizedDocuments, np.ndarray]:
    """The same, and for each document whether it has tokens."""
    ids, bounds = bulk.encode(list(chain.from_iterable(documents)))
    not_empty = np.diff(bounds) > 0
    document_ends = np.cumsum([0, *map(len, documents)])
    document_bounds = np.concatenate([[0], np.cumsum(not_empty)])[document_ends]
    tokenized = TokenizedDocuments(
        ids=ids,
        sentences=bounds[np.concatenate([[True], not_empty])],
        documents=np.unique(document_bounds),
    )
    return tokenized, np.diff(document_bounds) > 0


def select(documents: TokenizedDocuments, chosen: np.ndarray) -> TokenizedDocuments:
    """The chosen documents, laid end to end; `chosen` has a truth value for each."""
    sentences = np.repeat(chosen, np.diff(documents.documents))
    tokens = np.repeat(sentences, np.diff(documents.sentences))
    return TokenizedDocuments(
        ids=documents.ids[tokens],
        sentences=_bounds(np.diff(documents.sentences)[sentences]),
        documents=_bounds(np.diff(documents.documents)[chosen]),
    )


def _bounds(sizes: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])


def make(
    documents: TokenizedDocuments, recipe: Recipe, specials: Specials, seed: tuple[int, ...]
) -> Sequences:
    """All examples of these documents, pass after pass; `seed` is added to the recipe's own."""
    # With the length, because numpy ignores zeros at the end.
    entropy = (recipe.seed, len(seed), *seed)
    passes = np.random.SeedSequence(entropy).spawn(recipe.duplicates + 1)
    sentence_bounds = documents.sentences.tolist()
    document_bounds = documents.documents.tolist()
    draw_segments = _pairs if recipe.next_sentence else _singles
    segments: list[SegmentBounds] = []
    for seeds in passes[1:]:
        dice = random.Random(int.from_bytes(seeds.generate_state(4).tobytes(), "little")).random
        segments += draw_segments(sentence_bounds, document_bounds, recipe, dice)
    rng = np.random.default_rng(passes[0])
    table = np.array(segments, np.int64).reshape(-1, 5)
    bounds = _cut(table[:, :4].T, recipe, rng)
    sequences = _lay_out(documents.ids, bounds, table[:, 4].astype(bool), recipe, specials)
    if not recipe.static_masks:
        return sequences
    ids, masks = draw(sequences.ids, sequences.lengths, specials, recipe, rng)
    return replace(sequences, ids=ids, masked=masks)


def _pairs(
    sentences: list[int], documents: list[int], recipe: Recipe, dice: Dice
) -> Iterator[SegmentBounds]:
    has_others = len(documents) > 2
    for number, (first, end) in enumerate(pairwise(documents)):
        target = _target(recipe.max_length - 3, recipe, dice)
        sentence = first
        while sentence < end:
            stop = bisect_left(sentences, sentences[sentence] + target, sentence + 1, end)
            split = sentence + 1 + int(dice() * (stop - sentence - 1))
            begin = sentences[sentence]
            middle = sentences[split]
            if has_others and (split == stop or dice() < RANDOM_NEXT):
                room = target - (middle - begin)
                b_begin, b_end = _elsewhere(sentences, documents, number, room, dice)
                yield begin, middle, b_begin, b_end, True
                sentence = split
                continue
            if split == stop:  # one sentence, which is divided itself
                middle = begin + 1 + int(dice() * (middle - begin - 1))
            if middle < sentences[stop]:
                yield begin, middle, middle, sentences[stop], False
            sentence = stop


def _elsewhere(
    sentences: list[int], documents: list[int], number: int, room: int, dice: Dice
) -> tuple[int, int]:
    """A segment of about `room` tokens from any document but this one."""
    document = int(dice() * (len(documents) - 2))
    if document >= number:
        document += 1
    begin, end = documents[document : document + 2]
    sentence = begin + int(dice() * (end - begin))
    stop = bisect_left(sentences, sentences[sentence] + room, sentence + 1, end)
    return sentences[sentence], sentences[stop]


def _singles(
    sentences: list[int], documents: list[int], recipe: Recipe, dice: Dice
) -> Iterator[SegmentBounds]:
    room = recipe.max_length - 2
    for first, end in pairwise(documents):
        target = _target(room, recipe, dice)
        sentence = first
        while sentence < end:
            begin = sentences[sentence]
            fitting = bisect_right(sentences, begin + target, sentence + 1, end + 1) - 1
            sentence = max(sentence + 1, fitting)
            for part in range(begin, sentences[sentence], room):
                stop = min(part + room, sentences[sentence])
                yield part, stop, stop, stop, False


def _target(room: int, recipe: Recipe, dice: Dice) -> int:
    """How many tokens the examples of a document should have."""
    if dice() >= recipe.short_probability:
        return room
    return SHORTEST_TARGET + int(dice() * (room - SHORTEST_TARGET + 1))


def _cut(segments: np.ndarray, recipe: Recipe, rng: np.random.Generator) -> np.ndarray:
    """[4, n] the bounds of the segments after truncation to `max_length`.

    Equivalent to removing tokens one by one from the longer segment (the second if they are equal),
    each from the front or the back by a coin toss.
    """
    room = recipe.max_length - (3 if recipe.next_sentence else 2)
    a_begin, a_end, b_begin, b_end = segments
    a_length = a_end - a_begin
    b_length = b_end - b_begin
    a_target = np.maximum(np.minimum(a_length, (room + 1) // 2), room - b_length)
    a_removed = np.maximum(a_length - a_target, 0)
    b_removed = np.maximum(b_length - np.maximum(room - a_length + a_removed, 0), 0)
    a_front, b_front = rng.binomial([a_removed, b_removed], 0.5)
    return np.stack(
        [
            a_begin + a_front,
            a_end - (a_removed - a_front),
            b_begin + b_front,
            b_end - (b_removed - b_front),
        ]
    )


def _lay_out(
    ids: np.ndarray,
    bounds: np.ndarray,
    random_next: np.ndarray,
    recipe: Recipe,
    specials: Specials,
) -> Sequences:
    """Gather special tokens and segments into sequences laid end to end."""
    a_begin, a_end, b_begin, b_end = bounds
    # The special tokens are appended to the tokens, so that one index reaches all of them.
    with_specials = np.append(ids, np.array([specials.cls, specials.sep], ids.dtype))
    cls = np.full(len(a_begin), len(ids))
    sep = np.full(len(a_begin), len(ids) + 1)
    ones = np.ones(len(a_begin), np.int64)
    last_sep = ones if recipe.next_sentence else 0 * ones
    starts = np.stack([cls, a_begin, sep, b_begin, sep], axis=1)
    sizes = np.stack([ones, a_end - a_begin, ones, b_end - b_begin, last_sep], axis=1)
    ends = np.cumsum(sizes)
    indices = np.repeat(starts.ravel() - (ends - sizes.ravel()), sizes.ravel())
    indices += np.arange(len(indices))
    return Sequences(
        ids=with_specials[indices],
        lengths=narrow(sizes.sum(axis=1), recipe.max_length),
        first=narrow(a_end - a_begin + 2, recipe.max_length),
        random_next=random_next,
    )
