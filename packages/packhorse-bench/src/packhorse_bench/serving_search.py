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

LOWEST = 0.3  # of what a server does in a closed loop; its rate is looked for from there on
GROWTH = 1.3  # where it does more than that
GROWTHS = 8
STEPS_DOWN = (0.03, 0.06, 0.12, 0.24, 0.48)  # of a rate that long trials do not confirm


@dataclass(frozen=True)
class Effort:
    """How long to look."""

    rounds: int = 5  # of bisection
    short: float = 5.0  # seconds of a trial that searches
    long: float = 15.0  # and of one that confirms
    repeats: int = 3  # long ones at a rate, all of which must hold


@dataclass(frozen=True)
class RateTrial:
    """A rate for some seconds; what for, in a word."""

    rate: float
    seconds: float
    purpose: str


# Server, trial, number of the round; None where the server is there no more.
Run = Callable[[str, RateTrial, int], LoadReport | None]
Search = Generator[RateTrial, LoadReport, float]


def highest(capacity: float, limit: float, effort: Effort) -> Search:
    """Look for the highest rate with p99 within `limit` seconds; 0 where none is found.

    `capacity` is the server's rate in a closed loop.
    """
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


def _passes(rate: float, limit: float, effort: Effort) -> Generator[RateTrial, LoadReport, bool]:
    trial = RateTrial(rate, effort.short, "search")
    return (yield trial).holds(limit) or (yield trial).holds(limit)


def _confirmed(rate: float, limit: float, effort: Effort) -> Generator[RateTrial, LoadReport, bool]:
    """Does every repeat hold? Ends with the first that does not."""
    for _ in range(effort.repeats):
        if not (yield RateTrial(rate, effort.long, "confirm")).holds(limit):
            return False
    return True


def take_turns(searches: Mapping[str, Search], run: Run) -> dict[str, float]:
    """Advance all searches, a trial of each in every round; what each found."""
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
