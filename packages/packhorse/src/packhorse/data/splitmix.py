"""SplitMix64's mixing: numbers that look random, each a function of one number and nothing else.

What is drawn this way needs no generator whose state must be kept: the same key gives the same
number in any order, in any process and after any resume. All keys of an array are mixed at once.

Follows Steele, Lea and Flood 2014, Fast Splittable Pseudorandom Number Generators.
"""

from __future__ import annotations

import numpy as np

GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # the step from one key of a stream to the next
ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def mixed(numbers: np.ndarray) -> np.ndarray:
    """Each uint64 as another, and no two as the same."""
    for shift, factor in ROUNDS:
        numbers = (numbers ^ (numbers >> np.uint64(shift))) * np.uint64(factor)
    return numbers ^ (numbers >> np.uint64(31))
