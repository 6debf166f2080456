"""The order in which rows are seen and their division among ranks, as functions of a seed alone.

SplitMix64 (`mixed`) turns keys into numbers that look random, each a function of one number and
nothing else. What is drawn this way needs no generator with a state to save: the same key gives the
same number in any order, in any process and after any resume. Masks are drawn with it as well.

An epoch's order is a pseudo-random permutation that is computed where it is needed: a Feistel
network over two digits, repeated until the result is a valid row (cycle walking). A shuffled list
of all rows would cost 8 bytes per row in every process, and a pass over all rows at the beginning
of each epoch and at each resume. This costs some microseconds per batch and no memory. Not every
permutation can occur, but no test here can tell the result from a shuffle.

A global batch is divided among ranks only after it is drawn, so its rows are the same for any
number of ranks.

Follows Steele, Lea and Flood 2014, Fast Splittable Pseudorandom Number Generators; Black and
Rogaway 2002, Ciphers with Arbitrary Finite Domains (method 3 and cycle walking).
"""

from __future__ import annotations

import math

import numpy as np

GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # the step from one key of a SplitMix64 stream to the next
MIXING = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))  # shift and factor
FEISTEL_ROUNDS = 12


def mixed(numbers: np.ndarray) -> np.ndarray:
    """SplitMix64's mixing function on uint64; no two numbers give the same result."""
    for shift, factor in MIXING:
        numbers = (numbers ^ (numbers >> np.uint64(shift))) * np.uint64(factor)
    return numbers ^ (numbers >> np.uint64(31))


def permuted(positions: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """The rows at these positions of the epoch's order of `size` rows."""
    high = math.isqrt(size - 1) + 1
    low = -(-size // high)
    keys = np.random.SeedSequence((seed, epoch)).generate_state(FEISTEL_ROUNDS, np.uint64)
    rows = _feistel(np.asarray(positions, np.uint64), high, low, keys)
    # Ends soon: high × low exceeds `size` by less than `high`, so few numbers are outside.
    while len(outside := np.flatnonzero(rows >= size)):
        rows[outside] = _feistel(rows[outside], high, low, keys)
    return rows.astype(np.int64)


def _feistel(numbers: np.ndarray, high: int, low: int, keys: np.ndarray) -> np.ndarray:
    """A permutation of the numbers below high × low: each digit in turn is shifted by the other."""
    upper, lower = np.divmod(numbers, np.uint64(low))
    for key in keys.reshape(-1, 2):
        upper = (upper + mixed(lower ^ key[0]) % np.uint64(high)) % np.uint64(high)
        lower = (lower + mixed(upper ^ key[1]) % np.uint64(low)) % np.uint64(low)
    return upper * np.uint64(low) + lower


def by_count(tokens: np.ndarray, parts: int) -> list[np.ndarray]:
    """Divide a batch into runs of rows, equally many or one less: the indices of each part."""
    return np.array_split(np.arange(len(tokens)), parts)


def by_tokens(tokens: np.ndarray, parts: int) -> list[np.ndarray]:
    """Divide a batch into parts of equally many rows (or one less) and about as many tokens.

    The heaviest rows go first, one to each part, the heavier to the part that has less so far.
    """
    heaviest = np.argsort(-tokens, kind="stable")
    part_of_row = np.empty(len(tokens), np.int64)
    load = np.zeros(parts, np.int64)
    for begin in range(0, len(tokens), parts):
        rows = heaviest[begin : begin + parts]
        lightest = np.argsort(load, kind="stable")[: len(rows)]
        part_of_row[rows] = lightest
        load[lightest] += tokens[rows]
    return [np.flatnonzero(part_of_row == part) for part in range(parts)]
