"""In which order rows are seen, and who sees which: functions of a seed and nothing else.

An epoch's order is a pseudo-random permutation that is computed where it is asked for: a Feistel
network over two digits, walked until it lands on a row that there is. A shuffled list of all rows
would cost 8 bytes a row in every process, a pass over them at each epoch's begin and again at each
resume; this costs some microseconds a batch and no memory, and begins anywhere at once. It is not
every permutation that can come up, but by no test here can it be told from a shuffle.

A global batch is divided among ranks only after it is drawn, so its rows are the same for any
number of them.

Follows Black and Rogaway 2002, Ciphers with Arbitrary Finite Domains (method 3 and cycle walking);
the rounds mix as `splitmix` does.
"""

from __future__ import annotations

import math

import numpy as np

from packhorse.data.splitmix import mixed

ROUNDS = 12


def permuted(places: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """The rows that stand at these places of the epoch's order of `size` rows."""
    high = math.isqrt(size - 1) + 1
    low = -(-size // high)
    keys = np.random.SeedSequence((seed, epoch)).generate_state(ROUNDS, np.uint64)
    rows = _crossed(np.asarray(places, np.uint64), high, low, keys)
    # Never long: at most one number in `high` of those that the two digits can write is no row.
    while len(outside := np.flatnonzero(rows >= size)):
        rows[outside] = _crossed(rows[outside], high, low, keys)
    return rows.astype(np.int64)


def by_count(tokens: np.ndarray, parts: int) -> list[np.ndarray]:
    """Divide a batch into runs of equally many rows, or one less: the indices of each part."""
    return np.array_split(np.arange(len(tokens)), parts)


def by_tokens(tokens: np.ndarray, parts: int) -> list[np.ndarray]:
    """Divide a batch into as many rows each, or one less, and about as many tokens.

    The heaviest rows go first, one to each part, the heavier to the part that has less so far.
    """
    heaviest = np.argsort(-tokens, kind="stable")
    owners = np.empty(len(tokens), np.int64)
    held = np.zeros(parts, np.int64)
    for begin in range(0, len(tokens), parts):
        dealt = heaviest[begin : begin + parts]
        lightest = np.argsort(held, kind="stable")[: len(dealt)]
        owners[dealt] = lightest
        held[lightest] += tokens[dealt]
    return [np.flatnonzero(owners == part) for part in range(parts)]


def _crossed(numbers: np.ndarray, high: int, low: int, keys: np.ndarray) -> np.ndarray:
    """A permutation of the numbers below high × low: each digit in turn is moved by the other."""
    left, right = np.divmod(numbers, np.uint64(low))
    for key in keys.reshape(-1, 2):
        left = (left + mixed(right ^ key[0]) % np.uint64(high)) % np.uint64(high)
        right = (right + mixed(left ^ key[1]) % np.uint64(low)) % np.uint64(low)
    return left * np.uint64(low) + right
