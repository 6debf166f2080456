"""Masked tokens: which are to be guessed, and what stands in their place.

Of a sequence of n tokens round(0.15 n) are drawn (at least one, at most `max_predictions`), never a
special one; 80 % of them become [MASK], 10 % any token of the vocabulary, 10 % stay. With whole
words, words are drawn (a piece and the ## pieces behind it) as long as they fit into what is left
of that number, so it may not be used up; each token of a word is then replaced on its own.

All sequences are drawn at once, yet each from random numbers of its own, so that its masks do not
depend on its neighbours. Instead of a shuffle of each sequence, which would be a sort of all
tokens, every token wanted is drawn with replacement, and again where it hit a special token or one
drawn before. The set that comes of it is uniform, at ten times the speed. Words are drawn alike;
the order in which they came decides which of them fit.

Follows Devlin et al. 2018 (section 3.1) and the data of MLPerf's BERT. A ## piece behind a special
token, where truncation cut a word, is a word of its own.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from packhorse.data.splitmix import GOLDEN, mixed
from packhorse.errors import InputError

if TYPE_CHECKING:
    from packhorse.tokens import Tokenizer

HIDDEN, CHANGED = 0.8, 0.1  # of the tokens drawn: become [MASK], become any token
CONTINUES = "##"
REPLACING, CHOOSING = 0, 1  # streams of random numbers; choosing takes one a round
SHORTEST = 5  # three special tokens, and a token for each segment


@dataclass(frozen=True, slots=True)
class Specials:
    """The special tokens of a vocabulary, and which of its tokens continue a word."""

    cls: int
    sep: int
    mask: int
    pad: int
    vocab_size: int
    continues: np.ndarray | None = field(default=None, compare=False)  # bool [V]; None: unknown


@dataclass(frozen=True, slots=True)
class Recipe:
    """How examples are made of documents, and tokens masked."""

    max_length: int = 512
    short_probability: float = 0.1  # that a document is cut into shorter sequences
    mask_probability: float = 0.15
    max_predictions: int | None = 76  # masks of a sequence; None: no bound
    whole_words: bool = False
    duplicates: int = 1  # how often each document is gone through, with other draws
    static_masks: bool = False  # stored with the examples, else drawn anew whenever they are read
    seed: int = 12345
    next_sentence: bool = True

    def __post_init__(self) -> None:
        if self.max_length < SHORTEST:
            raise InputError(f"max_length is {self.max_length}; a pair takes at least {SHORTEST}")
        if not 0 <= self.short_probability <= 1:
            raise InputError(f"short_probability is {self.short_probability}; use 0 to 1")
        if not 0 < self.mask_probability < 1:
            raise InputError(
                f"mask_probability is {self.mask_probability}; use one between 0 and 1"
            )
        if self.max_predictions is not None and self.max_predictions < 1:
            raise InputError(f"max_predictions is {self.max_predictions}; use 1 or more, or None")
        if self.duplicates < 1 or self.seed < 0:
            raise InputError(
                f"duplicates is {self.duplicates} and seed {self.seed}; at least 1 and 0 will do"
            )


@dataclass(frozen=True, slots=True)
class Masks:
    """M tokens to be guessed, in the order of their sequences and places."""

    positions: np.ndarray  # [M] within the sequence
    ids: np.ndarray  # [M] the tokens that stood there
    counts: np.ndarray  # [n] how many are in each sequence


def specials_of(tokenizer: Tokenizer) -> Specials:
    """What masking must know of a tokenizer."""
    ids = {name: getattr(tokenizer, f"{name}_id") for name in ("cls", "sep", "mask", "pad")}
    missing = [f"[{name.upper()}]" for name, id in ids.items() if id is None]
    if missing:
        raise InputError(
            f"this tokenizer has no {', '.join(missing)}: it cannot make examples for pretraining; "
            "use one that was made for BERT"
        )
    continues = np.zeros(tokenizer.vocab_size, bool)
    for id in range(tokenizer.vocab_size):
        with suppress(InputError):  # a number that was never given
            continues[id] = tokenizer.token(id).startswith(CONTINUES)
    return Specials(
        **ids,
        vocab_size=tokenizer.vocab_size,
        continues=continues if continues.any() else None,
    )


def draw(
    ids: np.ndarray,
    lengths: np.ndarray,
    specials: Specials,
    recipe: Recipe,
    rng: np.random.Generator,
) -> tuple[np.ndarray, Masks]:
    """Mask sequences laid end to end: their tokens as a model sees them, and what it must guess."""
    keys = rng.integers(1 << 64, size=len(lengths), dtype=np.uint64)
    return draw_by_keys(ids, lengths, specials, recipe, keys)


def draw_by_keys(
    ids: np.ndarray, lengths: np.ndarray, specials: Specials, recipe: Recipe, keys: np.ndarray
) -> tuple[np.ndarray, Masks]:
    """As `draw`; what is masked in a sequence depends on its own tokens and key alone."""
    bounds = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    if bounds[-1] != len(ids):
        raise InputError(f"the lengths add up to {bounds[-1]} tokens, but there are {len(ids)}")
    fixed = (ids == specials.cls) | (ids == specials.sep) | (ids == specials.pad)
    wanted = np.minimum(budgets(bounds, recipe), _free(fixed, bounds))
    if recipe.whole_words:
        chosen = _whole_words(ids, fixed, bounds, wanted, specials, keys)
    else:
        chosen = _tokens(fixed, bounds, wanted, keys)
    at = np.flatnonzero(chosen)
    counts = np.diff(np.searchsorted(at, bounds))
    original = ids[at]
    shown = ids.copy()
    shown[at] = _replaced(original, specials, _bits(keys, counts, REPLACING))
    longest = int(np.diff(bounds).max(initial=0))
    positions = at - np.repeat(bounds[:-1], counts)
    return shown, Masks(narrow(positions, longest), original, narrow(counts, longest))


def keys_of(*numbers: int | np.ndarray) -> np.ndarray:
    """A key for each combination of numbers (a seed, an epoch, a sequence), as good as random."""
    key = np.zeros(1, np.uint64)
    for number in numbers:
        key = mixed(key + GOLDEN + np.asarray(number).astype(np.uint64))
    return key


def budgets(bounds: np.ndarray, recipe: Recipe) -> np.ndarray:
    """How many tokens of each sequence are to be masked, if there are as many."""
    wanted = np.rint(np.diff(bounds) * recipe.mask_probability).astype(np.int64)
    return np.clip(wanted, 1, recipe.max_predictions)


def narrow(values: np.ndarray, most: int) -> np.ndarray:
    """The same numbers, none above `most`, as uint16 or else uint32."""
    return values.astype(np.uint16 if most <= 0xFFFF else np.uint32)


def _free(fixed: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """How many tokens of each sequence may be masked."""
    special = np.searchsorted(np.flatnonzero(fixed), bounds)
    return np.diff(bounds) - np.diff(special)


def _bits(keys: np.ndarray, counts: np.ndarray, stream: int) -> np.ndarray:
    """So many random numbers of 64 bits for each key, those of all keys end to end.

    A key and a stream make one run of SplitMix64 (Steele et al. 2014), which can be entered
    anywhere, so all of them are had at once.
    """
    owners = np.repeat(np.arange(len(keys)), counts)
    within = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
    begins = mixed(mixed(keys) + np.uint64(stream))
    return mixed(begins[owners] + GOLDEN * (within + 1).astype(np.uint64))


def _below(limits: np.ndarray | int, bits: np.ndarray) -> np.ndarray:
    """Random bits as whole numbers below a limit."""
    high = bits >> np.uint64(32)
    return (high * np.asarray(limits, np.uint64) >> np.uint64(32)).astype(np.int64)


def _any_of(bounds: np.ndarray, counts: np.ndarray, bits: np.ndarray) -> np.ndarray:
    """For each sequence so many of the things between its bounds, some perhaps twice."""
    return np.repeat(bounds[:-1], counts) + _below(np.repeat(np.diff(bounds), counts), bits)


def _tokens(
    fixed: np.ndarray, bounds: np.ndarray, wanted: np.ndarray, keys: np.ndarray
) -> np.ndarray:
    """[T] a uniform choice of as many tokens as wanted."""
    taken, lacking, stream = fixed.copy(), wanted, CHOOSING
    while lacking.any():
        at = _any_of(bounds, lacking, _bits(keys, lacking, stream))
        good = _once(at, len(fixed)) & ~taken[at]
        taken[at[good]] = True
        owners = np.repeat(np.arange(len(keys)), lacking)
        lacking = np.bincount(owners[~good], minlength=len(keys))
        stream += 1
    return taken & ~fixed


def _once(drawn: np.ndarray, things: int) -> np.ndarray:
    """Where each thing that was drawn stands for the only time; which time that is, is open."""
    number = np.arange(len(drawn), dtype=np.int32)
    claims = np.empty(things, np.int32)
    claims[drawn] = number
    return claims[drawn] == number


def _whole_words(
    ids: np.ndarray,
    fixed: np.ndarray,
    bounds: np.ndarray,
    wanted: np.ndarray,
    specials: Specials,
    keys: np.ndarray,
) -> np.ndarray:
    """[T] the tokens of random words, as many as fit."""
    if specials.continues is None:
        raise InputError("whole_words needs a vocabulary with ## pieces, which this one has not")
    begins = np.ones(len(ids) + 1, bool)
    begins[1:] = fixed
    begins[bounds] = True
    heads = np.flatnonzero((begins[:-1] | ~specials.continues[ids]) & ~fixed)
    if not len(heads):
        return np.zeros(len(ids), bool)
    sizes = np.add.reduceat(~fixed, heads, dtype=np.int64)
    chosen = _words(sizes, np.searchsorted(heads, bounds), wanted, keys)
    # Between two heads, whatever is not special belongs to the first.
    spans = np.diff(heads, prepend=0, append=len(ids))
    return np.repeat(np.concatenate([[False], chosen]), spans) & ~fixed


def _words(
    sizes: np.ndarray, bounds: np.ndarray, wanted: np.ndarray, keys: np.ndarray
) -> np.ndarray:
    """[words] those taken when each sequence goes through its words in random order.

    Nearly always the words that matter are among half as many again as tokens are wanted; only
    sequences that need more go through all their words.
    """
    owners = np.repeat(np.arange(len(wanted)), np.diff(bounds))
    enough = np.where(wanted, wanted * 3 // 2 + 4, 0)
    order = _any_of(bounds, enough, _bits(keys, enough, CHOOSING))
    order = order[_once(order, len(sizes))]
    chosen, unseen = np.zeros(len(sizes), bool), np.ones(len(sizes), bool)
    unseen[order] = False
    left = _take(chosen, order, sizes, owners, wanted)
    rest = np.flatnonzero(unseen & (sizes <= left[owners]))
    bits = _bits(keys, np.bincount(owners[rest], minlength=len(keys)), CHOOSING + 1)
    _take(chosen, rest[np.lexsort((bits, owners[rest]))], sizes, owners, left)
    return chosen


def _take(
    chosen: np.ndarray, order: np.ndarray, sizes: np.ndarray, owners: np.ndarray, wanted: np.ndarray
) -> np.ndarray:
    """Choose words in this order, each if its sequence still wants that many tokens.

    A round takes all up to the first word of a sequence that is too large. What is then left is
    less than that word, so few words fit, and few rounds are needed.
    """
    left = wanted.copy()
    while len(order := order[sizes[order] <= left[owners[order]]]):
        size, owner = sizes[order], owners[order]
        total = np.cumsum(size)
        first = np.concatenate([[True], owner[1:] != owner[:-1]])
        before = np.maximum.accumulate(np.where(first, total - size, 0))
        fits = total - before <= left[owner]
        chosen[order[fits]] = True
        np.subtract.at(left, owner[fits], size[fits])
        order = order[~fits]
    return left


def _replaced(original: np.ndarray, specials: Specials, bits: np.ndarray) -> np.ndarray:
    """What stands in the place of tokens that are to be guessed."""
    dice = (bits & np.uint64(0xFFFFFFFF)).astype(np.float64) / (1 << 32)
    shown = np.where(dice < HIDDEN, original.dtype.type(specials.mask), original)
    changed = np.flatnonzero(dice >= 1 - CHANGED)
    shown[changed] = _below(specials.vocab_size, bits[changed])
    return shown
