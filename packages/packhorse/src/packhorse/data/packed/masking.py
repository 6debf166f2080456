"""Masked language modeling: which tokens are masked, and what replaces them.

Of a sequence of n tokens round(0.15 n) are drawn (at least one, at most `max_predictions`), never a
special token; 80 % of them become [MASK], 10 % a random token of the vocabulary, 10 % stay. With
whole words, words are drawn (a piece and the ## pieces after it) as long as they fit into the rest
of that budget, so it may not be used up; each token of a word is then replaced on its own.

With spans (Joshi et al., "SpanBERT", 2020), a sequence is first cut at random into spans, which end
at each word with the same probability, so that their lengths are geometric, and after ten tokens or
the whole budget at the latest; then spans are drawn as words are.

All sequences are drawn at once, yet each from random numbers of its own, so that its masks do not
depend on its neighbors. Shuffling each sequence would mean sorting all tokens. Instead tokens are
drawn with replacement, and drawn again where they hit a special token or one drawn before. The
resulting set is uniform, at ten times the speed. Words are drawn in the same way; the order in
which they were drawn decides which of them fit.

Follows Devlin et al. 2018 (section 3.1) and the data of MLPerf's BERT. A ## piece after a special
token, where truncation cut a word, is a word of its own.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from packhorse.data.order import GOLDEN, mixed
from packhorse.errors import InputError

if TYPE_CHECKING:
    from packhorse.tokens import Tokenizer

HIDDEN = 0.8  # share of the drawn tokens that becomes [MASK]
CHANGED = 0.1  # share that becomes a random token
CONTINUES = "##"
REPLACING = 0  # stream of random numbers
CHOOSING = 1  # first of the streams for choosing, which takes one per round
SPANNING = 1 << 32  # stream for cutting into spans
LONGEST_SPAN = 10  # tokens, as in SpanBERT
SHORTEST = 5  # three special tokens, and one token in each segment


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
    """How examples are made from documents, and how tokens are masked."""

    max_length: int = 512
    short_probability: float = 0.1  # that a document gives shorter sequences
    mask_probability: float = 0.15
    max_predictions: int | None = 76  # masks per sequence; None: no limit
    whole_words: bool = False
    duplicates: int = 1  # passes over each document, with different random numbers
    static_masks: bool = False  # stored with the examples; else drawn anew in each epoch
    seed: int = 12345
    next_sentence: bool = True
    span_length: float = 0.0  # mean words of a span; 0: no spans. Not stored with the data

    def __post_init__(self) -> None:
        if self.max_length < SHORTEST:
            raise InputError(f"max_length is {self.max_length}; it must be {SHORTEST} or more")
        if not 0 <= self.short_probability <= 1:
            raise InputError(f"short_probability is {self.short_probability}; use 0 to 1")
        if not 0 < self.mask_probability < 1:
            raise InputError(
                f"mask_probability is {self.mask_probability}; it must be between 0 and 1"
            )
        if self.max_predictions is not None and self.max_predictions < 1:
            raise InputError(f"max_predictions is {self.max_predictions}; use 1 or more, or None")
        if self.duplicates < 1:
            raise InputError(f"duplicates is {self.duplicates}; it must be 1 or more")
        if self.seed < 0:
            raise InputError(f"seed is {self.seed}; it must be 0 or more")
        if self.span_length and not 1 <= self.span_length <= LONGEST_SPAN:
            raise InputError(
                f"span_length is {self.span_length}; it must be 1 to {LONGEST_SPAN}, or 0 for none"
            )
        if self.span_length and self.whole_words:
            raise InputError("span_length and whole_words are two ways to mask; set one of them")


@dataclass(frozen=True, slots=True)
class Masks:
    """M masked tokens, in the order of sequences and positions."""

    positions: np.ndarray  # [M] within the sequence
    ids: np.ndarray  # [M] the original tokens
    counts: np.ndarray  # [n] number of masks in each sequence


def specials_of(tokenizer: Tokenizer) -> Specials:
    """The special tokens of a tokenizer, and which tokens continue a word."""
    ids = {name: getattr(tokenizer, f"{name}_id") for name in ("cls", "sep", "mask", "pad")}
    missing = [f"[{name.upper()}]" for name, id in ids.items() if id is None]
    if missing:
        raise InputError(
            f"this tokenizer has no {', '.join(missing)}: it cannot make examples for pretraining; "
            "use one that was made for BERT"
        )
    continues = np.zeros(tokenizer.vocab_size, bool)
    for id in range(tokenizer.vocab_size):
        with suppress(InputError):  # ids may have gaps
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
    """Mask sequences laid end to end; return the masked tokens of all, and the masks."""
    keys = rng.integers(1 << 64, size=len(lengths), dtype=np.uint64)
    return draw_by_keys(ids, lengths, specials, recipe, keys)


def draw_by_keys(
    ids: np.ndarray, lengths: np.ndarray, specials: Specials, recipe: Recipe, keys: np.ndarray
) -> tuple[np.ndarray, Masks]:
    """Like `draw`; the masks of a sequence depend only on its tokens and its key."""
    bounds = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    if bounds[-1] != len(ids):
        raise InputError(f"the lengths add up to {bounds[-1]} tokens, but there are {len(ids)}")
    fixed = (ids == specials.cls) | (ids == specials.sep) | (ids == specials.pad)
    budget = np.minimum(budgets(bounds, recipe), _maskable(fixed, bounds))
    if recipe.whole_words:
        chosen = _choose_words(ids, fixed, bounds, budget, specials, keys)
    elif recipe.span_length:
        chosen = _choose_spans(ids, fixed, bounds, budget, specials, recipe.span_length, keys)
    else:
        chosen = _choose_tokens(fixed, bounds, budget, keys)
    indices = np.flatnonzero(chosen)
    counts = np.diff(np.searchsorted(indices, bounds))
    original = ids[indices]
    masked_ids = ids.copy()
    masked_ids[indices] = _replaced(original, specials, _bits(keys, counts, REPLACING))
    longest = int(np.diff(bounds).max(initial=0))
    positions = indices - np.repeat(bounds[:-1], counts)
    return masked_ids, Masks(narrow(positions, longest), original, narrow(counts, longest))


def keys_of(*numbers: int | np.ndarray) -> np.ndarray:
    """A pseudo-random key for each combination of numbers (seed, epoch, sequence …)."""
    key = np.zeros(1, np.uint64)
    for number in numbers:
        key = mixed(key + GOLDEN + np.asarray(number).astype(np.uint64))
    return key


def budgets(bounds: np.ndarray, recipe: Recipe) -> np.ndarray:
    """How many tokens of each sequence to mask, if it has that many."""
    budget = np.rint(np.diff(bounds) * recipe.mask_probability).astype(np.int64)
    return np.clip(budget, 1, recipe.max_predictions)


def narrow(values: np.ndarray, largest: int) -> np.ndarray:
    """Convert numbers up to `largest` to uint16 if they fit, else to uint32."""
    return values.astype(np.uint16 if largest <= 0xFFFF else np.uint32)


def _maskable(fixed: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """How many tokens of each sequence may be masked."""
    special = np.searchsorted(np.flatnonzero(fixed), bounds)
    return np.diff(bounds) - np.diff(special)


def _bits(keys: np.ndarray, counts: np.ndarray, stream: int) -> np.ndarray:
    """`counts` random numbers of 64 bits for each key, those of all keys end to end.

    A key and a stream make one sequence of SplitMix64 (Steele et al. 2014), any element of which
    can be computed directly, so all of them are computed at once.
    """
    owners = np.repeat(np.arange(len(keys)), counts)
    within = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
    begins = mixed(mixed(keys) + np.uint64(stream))
    return mixed(begins[owners] + GOLDEN * (within + 1).astype(np.uint64))


def _below(limits: np.ndarray | int, bits: np.ndarray) -> np.ndarray:
    """Turn random bits into whole numbers below a limit."""
    high = bits >> np.uint64(32)
    return (high * np.asarray(limits, np.uint64) >> np.uint64(32)).astype(np.int64)


def _any_of(bounds: np.ndarray, counts: np.ndarray, bits: np.ndarray) -> np.ndarray:
    """Draw `counts` indices between the bounds of each sequence, with replacement."""
    return np.repeat(bounds[:-1], counts) + _below(np.repeat(np.diff(bounds), counts), bits)


def _choose_tokens(
    fixed: np.ndarray, bounds: np.ndarray, budget: np.ndarray, keys: np.ndarray
) -> np.ndarray:
    """[T] a uniform choice of `budget` tokens in each sequence."""
    taken = fixed.copy()
    missing = budget
    stream = CHOOSING
    while missing.any():
        drawn = _any_of(bounds, missing, _bits(keys, missing, stream))
        new = _once(drawn, len(fixed)) & ~taken[drawn]
        taken[drawn[new]] = True
        owners = np.repeat(np.arange(len(keys)), missing)
        missing = np.bincount(owners[~new], minlength=len(keys))
        stream += 1
    return taken & ~fixed


def _once(drawn: np.ndarray, size: int) -> np.ndarray:
    """Mark one occurrence of each index below `size` that was drawn; which one, is undefined."""
    number = np.arange(len(drawn), dtype=np.int32)
    claims = np.empty(size, np.int32)
    claims[drawn] = number
    return claims[drawn] == number


def _choose_words(
    ids: np.ndarray,
    fixed: np.ndarray,
    bounds: np.ndarray,
    budget: np.ndarray,
    specials: Specials,
    keys: np.ndarray,
) -> np.ndarray:
    """[T] the tokens of random words, as many words as fit into the budget."""
    if specials.continues is None:
        raise InputError("whole_words needs a vocabulary with ## pieces; this one has none")
    # A word begins at the start of a sequence, after a special token, or with no ## piece.
    begins = _after_special(fixed, bounds) | ~specials.continues[ids]
    return _choose_units(begins, fixed, bounds, budget, keys)


def _choose_spans(
    ids: np.ndarray,
    fixed: np.ndarray,
    bounds: np.ndarray,
    budget: np.ndarray,
    specials: Specials,
    mean: float,
    keys: np.ndarray,
) -> np.ndarray:
    """[T] the tokens of random spans, as many spans as fit into the budget."""
    lengths = np.diff(bounds)
    ends = _bits(keys, lengths, SPANNING) < np.uint64(min(2**64 - 1, int(2.0**64 / mean)))
    if specials.continues is not None:
        ends &= ~specials.continues[ids]  # between words
    begins = _after_special(fixed, bounds) | ends
    index = np.arange(len(ids))
    within = index - np.maximum.accumulate(np.where(begins, index, 0))
    longest = np.repeat(np.minimum(LONGEST_SPAN, np.maximum(budget, 1)), lengths)
    begins |= within % longest == 0
    return _choose_units(begins, fixed, bounds, budget, keys)


def _after_special(fixed: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """[T] is it the first token of a sequence, or after a special token?"""
    forced = np.ones(len(fixed) + 1, bool)
    forced[1:] = fixed
    forced[bounds] = True
    return forced[:-1]


def _choose_units(
    begins: np.ndarray,
    fixed: np.ndarray,
    bounds: np.ndarray,
    budget: np.ndarray,
    keys: np.ndarray,
) -> np.ndarray:
    """[T] the tokens of random units, words or spans, by where units begin."""
    heads = np.flatnonzero(begins & ~fixed)
    if not len(heads):
        return np.zeros(len(fixed), bool)
    sizes = np.add.reduceat(~fixed, heads, dtype=np.int64)
    chosen = _fill_budget(sizes, np.searchsorted(heads, bounds), budget, keys)
    # Between two heads, every token that is not special belongs to the first.
    spans = np.diff(heads, prepend=0, append=len(fixed))
    return np.repeat(np.concatenate([[False], chosen]), spans) & ~fixed


def _fill_budget(
    sizes: np.ndarray, bounds: np.ndarray, budget: np.ndarray, keys: np.ndarray
) -> np.ndarray:
    """[words] which words are chosen if each sequence tries its words in random order.

    Half as many words again as the budget nearly always suffice; only sequences that need more
    try all their words.
    """
    owners = np.repeat(np.arange(len(budget)), np.diff(bounds))
    enough = np.where(budget, budget * 3 // 2 + 4, 0)
    order = _any_of(bounds, enough, _bits(keys, enough, CHOOSING))
    order = order[_once(order, len(sizes))]
    chosen = np.zeros(len(sizes), bool)
    untried = np.ones(len(sizes), bool)
    untried[order] = False
    remaining = _take(chosen, order, sizes, owners, budget)
    rest = np.flatnonzero(untried & (sizes <= remaining[owners]))
    bits = _bits(keys, np.bincount(owners[rest], minlength=len(keys)), CHOOSING + 1)
    _take(chosen, rest[np.lexsort((bits, owners[rest]))], sizes, owners, remaining)
    return chosen


def _take(
    chosen: np.ndarray, order: np.ndarray, sizes: np.ndarray, owners: np.ndarray, budget: np.ndarray
) -> np.ndarray:
    """Choose words in this order, each if it fits into what remains of its sequence's budget.

    A round takes all words of a sequence up to the first that is too large. The remaining budget is
    then smaller than that word, so few words fit, and few rounds are needed.
    """
    remaining = budget.copy()
    while len(order := order[sizes[order] <= remaining[owners[order]]]):
        size = sizes[order]
        owner = owners[order]
        total = np.cumsum(size)
        first = np.concatenate([[True], owner[1:] != owner[:-1]])
        before = np.maximum.accumulate(np.where(first, total - size, 0))
        fits = total - before <= remaining[owner]
        chosen[order[fits]] = True
        np.subtract.at(remaining, owner[fits], size[fits])
        order = order[~fits]
    return remaining


def _replaced(original: np.ndarray, specials: Specials, bits: np.ndarray) -> np.ndarray:
    """The tokens that replace the masked ones."""
    # The low half of the bits decides what happens, the high half which token it becomes.
    dice = (bits & np.uint64(0xFFFFFFFF)).astype(np.float64) / (1 << 32)
    replaced = np.where(dice < HIDDEN, original.dtype.type(specials.mask), original)
    changed = np.flatnonzero(dice >= 1 - CHANGED)
    replaced[changed] = _below(specials.vocab_size, bits[changed])
    return replaced
