"""Compare packing algorithms: each algorithm at each depth, on one histogram.

An algorithm that cannot solve a case (NNLSHP lists strategies, and at greater depths there are too
many) gets a row with the reason. Only the optimum proves a bound better than the trivial one; it
holds for every algorithm at that depth, so all rows of a depth are measured against it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from packhorse.errors import InputError
from packhorse.packing import histogram as packing
from packhorse.packing.optimum import EFFORT

ALGORITHMS = packing.ALGORITHMS
DEPTHS = (2, 3, 4, 8, 16, None)


@dataclass(frozen=True)
class PackingRow:
    """The figures of one plan, or the problem if there is no plan."""

    algorithm: str
    max_per_pack: int | None  # None: unlimited
    packs: int = 0
    efficiency: float = 0.0  # the share of all slots that hold a token
    factor: float = 0.0  # sequences per pack
    lower_bound: int = 0  # no plan has fewer packs
    gap: float = 0.0  # packs above the bound, as a share of it
    seconds: float = 0.0
    complete: bool = True  # False: the search for the optimum ran out of effort
    problem: str | None = None

    @property
    def subject(self) -> str:
        """Describe the case of the row."""
        return f"{self.algorithm}, {self.max_per_pack or 'unlimited'} per pack"


def compare(
    counts: np.ndarray,
    capacity: int,
    algorithms: Sequence[str] = ALGORITHMS,
    depths: Sequence[int | None] = DEPTHS,
    progress: Callable[[int, int], None] | None = None,
    effort: int = EFFORT,
) -> list[PackingRow]:
    """Return a row for each depth and algorithm."""
    counts = packing.fit_to_capacity(packing.checked_counts(counts), capacity)
    _check_cases(algorithms, depths)
    cases = list(product(depths, algorithms))
    rows = []
    for done, (depth, algorithm) in enumerate(cases, 1):
        rows.append(measure(counts, capacity, algorithm, depth, effort))
        if progress is not None:
            progress(done, len(cases))
    return _against_best_bound(rows)


def measure(
    counts: np.ndarray,
    capacity: int,
    algorithm: str,
    max_per_pack: int | None,
    effort: int = EFFORT,
) -> PackingRow:
    """Plan, and return the figures of the plan."""
    try:
        plan = packing.plan(counts, capacity, max_per_pack, algorithm, effort)
    except InputError as error:
        return PackingRow(algorithm, max_per_pack, problem=str(error))
    return PackingRow(
        algorithm=algorithm,
        max_per_pack=max_per_pack,
        packs=plan.pack_count,
        efficiency=plan.efficiency,
        factor=plan.factor,
        lower_bound=plan.lower_bound,
        gap=plan.pack_count / plan.lower_bound - 1,
        seconds=plan.seconds,
        complete=plan.complete,
    )


def unfinished(rows: Sequence[PackingRow], effort: int) -> list[str]:
    """Return a line for each plan whose search ran out of effort."""
    return [
        f"{row.subject}: stopped after {effort} linear programs, {row.packs - row.lower_bound:,}"
        f" packs ({row.gap:.2%}) above the lower bound; a higher --effort may come closer"
        for row in rows
        if not row.complete
    ]


def _check_cases(algorithms: Sequence[str], depths: Sequence[int | None]) -> None:
    """Raise an error for a mistyped case, instead of returning a table of failures."""
    for algorithm in algorithms:
        if algorithm not in ALGORITHMS:
            known = ", ".join(ALGORITHMS)
            raise InputError(f"unknown packing algorithm {algorithm!r}; known: {known}")
    for depth in depths:
        if depth is not None and depth < 1:
            raise InputError(f"a pack of at most {depth} sequences holds none; pass 1 or more")


def _against_best_bound(rows: Sequence[PackingRow]) -> list[PackingRow]:
    bounds: dict[int | None, int] = {}
    for row in rows:
        bounds[row.max_per_pack] = max(row.lower_bound, bounds.get(row.max_per_pack, 1))
    return [
        row
        if row.problem
        else replace(
            row,
            lower_bound=bounds[row.max_per_pack],
            gap=row.packs / bounds[row.max_per_pack] - 1,
        )
        for row in rows
    ]
