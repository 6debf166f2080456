"""Workloads of benchmarks: lengths from a mix or a histogram, and random sequences of them.

A mix is a distribution of lengths, seeded and shaped after what is known of a real collection, so
that a benchmark needs no data. Token ids are drawn at random: the speed of an encoder does not
depend on them, lengths come out exact, and tokenizing stays outside the clock. Lengths of a real
collection come as a histogram (`packhorse.reports.lengths`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from packhorse.errors import InputError

if TYPE_CHECKING:
    from packhorse.tokens import Encoding

LONGEST = {"wikipedia": 512, "squad": 384, "normal": 256}
ABOUT = {
    "wikipedia": "Wikipedia-like: 23 % fill the length, the rest is broad, the mean is half",
    "squad": "SQuAD-like: question and paragraph, log-normal, the mean is 45 % of the length",
    "normal": "N(1/2, 1/2) of the length, clipped: an even mix with peaks at both ends",
}
FIRST_WORD = 1000  # below this BERT's vocabulary holds special and unused tokens


def draw(mix: str, count: int, *, seed: int = 0, longest: int | None = None) -> np.ndarray:
    """Draw `count` lengths of a mix, at most `longest` (by default the mix's own maximum)."""
    if mix not in LONGEST:
        raise InputError(f"unknown workload {mix!r}; there are {', '.join(LONGEST)}")
    if count < 1:
        raise InputError(f"a workload of {count} sequences is none; ask for at least one")
    most = LONGEST[mix] if longest is None else longest
    if most < 8:
        raise InputError(f"a longest sequence of {most} tokens leaves no mix; ask for at least 8")
    shares = _SHAPES[mix](np.random.default_rng(seed), count)
    least = 8 if mix == "normal" else 5
    return np.clip(np.rint(shares * most), least, most).astype(np.int64)


def _wikipedia(rng: np.random.Generator, count: int) -> np.ndarray:
    # Long articles are cut into pieces of the full length; the rest are last pieces and short
    # articles.
    return np.where(rng.random(count) < 0.234, 1.0, rng.beta(0.84, 1.58, count))


def _squad(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.lognormal(np.log(0.417), 0.36, count)


def _normal(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.normal(0.5, 0.5, count)


_SHAPES = {"wikipedia": _wikipedia, "squad": _squad, "normal": _normal}


def sample(
    histogram: np.ndarray, count: int, *, seed: int = 0, longest: int | None = None
) -> np.ndarray:
    """Draw `count` lengths from a histogram (entry i counts length i + 1), cut to `longest`."""
    if count < 1:
        raise InputError(f"a workload of {count} sequences is none; ask for at least one")
    shares = histogram / histogram.sum()
    drawn = np.random.default_rng(seed).choice(np.arange(1, len(shares) + 1), count, p=shares)
    return drawn if longest is None else np.minimum(drawn, max(longest, 1))


def sequences(
    lengths: np.ndarray, vocab_size: int, *, ends: tuple[int, int] = (101, 102), seed: int = 0
) -> list[Encoding]:
    """Random sequences of these lengths, between the two special tokens `ends`."""
    from packhorse.tokens import Encoding

    rng = np.random.default_rng(seed)
    low = min(FIRST_WORD, vocab_size // 2)
    rows = []
    for length in lengths.tolist():
        ids = rng.integers(low, vocab_size, length).astype(np.int32)
        ids[-1] = ends[1]
        ids[0] = ends[0]  # second, so that a sequence of one token is [CLS]
        special = np.zeros(length, bool)
        special[[0, -1]] = True
        types = np.zeros(length, np.uint8)
        offsets = np.zeros((length, 2), np.int32)
        rows.append(Encoding(ids, types, offsets, special, (slice(1, length - 1),)))
    return rows
