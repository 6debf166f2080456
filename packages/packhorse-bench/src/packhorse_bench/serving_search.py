"""The highest rate that a server holds, by bisection, with all servers taking turns.

A search is a generator: it yields the trial it wants next and is sent the report, so that a round
has one trial of every server, and whatever else the machine does falls on all of them alike. Short
trials find the place; one that fails is tried once more before it is believed, since a hiccup of
the machine would cost half of the range (failing trials end early and are cheap). In a short trial
a queue has little time to grow, so the place is a little too high: long trials step down from it,
by a little and then by more, until every one of them holds.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass

from packhorse_bench.serving_load import LoadReport

LOWEST = 0.3  # of a server's throughput in a closed loop: the lower end of the search
GROWTH = 1.3  # factor by which the upper end grows while the server holds it
GROWTHS = 8  # at most
STEPS_DOWN = (0.03, 0.06, 0.12, 0.24, 0.48)  # of a rate that long trials do not confirm


@dataclass(frozen=True)
class Effort:
    """How long to search."""

    rounds: int = 5  # of bisection
    short: float = 5.0  # seconds of a trial that searches
    long: float = 15.0  # and of one that confirms
    repeats: int = 3  # long ones at a rate, all of which must hold


@dataclass(frozen=True)
class RateTrial:
    """A rate to try for some seconds; `purpose` is "search", "confirm", "most" or "sweep"."""

    rate: float
    seconds: float
    purpose: str


# Runs a trial of a server in a round of this number; None if the server no longer answers.
Run = Callable[[str, RateTrial, int], LoadReport | None]
Search = Generator[RateTrial, LoadReport, float]


def highest(capacity: float, limit: float, effort: Effort) -> Search:
    """Search the highest rate with p99 within `limit` seconds; 0 if there is none.

    `capacity` is the server's rate in a closed loop.
    """
    # A closed loop is limited by its connections, so a server may hold more: grow first.
    low = LOWEST * capacity
    high = capacity
    for _ in range(GROWTHS):
        if not (yield from _passes(high, limit, effort)):
            break
        low = high
        high = GROWTH * high
    for _ in range(effort.rounds):
        rate = (low + high) / 2
        if (yield from _passes(rate, limit, effort)):
            low = rate
        else:
            high = rate
    for step in (*STEPS_DOWN, 1.0):
        if (yield from _confirmed(low, limit, effort)):
            return low
        low *= 1 - step
    return 0.0


# `(yield trial)` hands a trial to `take_turns` and receives its report.


def _passes(rate: float, limit: float, effort: Effort) -> Generator[RateTrial, LoadReport, bool]:
    """Whether a short trial holds, or its one repetition."""
    trial = RateTrial(rate, effort.short, "search")
    return (yield trial).holds(limit) or (yield trial).holds(limit)


def _confirmed(rate: float, limit: float, effort: Effort) -> Generator[RateTrial, LoadReport, bool]:
    """Whether every long trial holds; stops at the first that does not."""
    for _ in range(effort.repeats):
        if not (yield RateTrial(rate, effort.long, "confirm")).holds(limit):
            return False
    return True


def take_turns(searches: Mapping[str, Search], run: Run) -> dict[str, float]:
    """Advance all searches, one trial of each per round; returns the rate that each found."""
    confirmed: dict[str, float] = {}
    next_rates = {name: next(search) for name, search in searches.items()}
    turn = 0
    while next_rates:
        for name, trial in list(next_rates.items()):
            report = run(name, trial, turn)
            del next_rates[name]
            try:
                if report is not None:
                    next_rates[name] = searches[name].send(report)
            except StopIteration as end:
                confirmed[name] = end.value
        turn += 1
    return confirmed
