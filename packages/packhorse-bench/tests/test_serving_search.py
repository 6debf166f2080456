"""The search for the highest rate, on servers that are made up and known."""

from __future__ import annotations

import pytest

from packhorse_bench.serving import sweep_rates
from packhorse_bench.serving_load import LoadReport
from packhorse_bench.serving_search import Effort, RateTrial, highest, take_turns

LIMIT = 0.5


def report(p99_ms: float, **more: object) -> LoadReport:
    figures = {"p50_ms": 1, "p90_ms": 1, "p99_ms": p99_ms, "worst_ms": p99_ms}
    counts = {"asked": 9, "answered": 9, "seconds": 1, "tokens": 9, "share": 0.1, "late_ms": 0}
    return LoadReport(**{**figures, **counts, **more})  # type: ignore[arg-type]


class FakeServer:
    """A server that holds any rate up to `holds`, in short trials a little more."""

    def __init__(self, holds: float, generous: float = 1.0, hiccups: tuple[int, ...] = ()) -> None:
        self.holds, self.generous, self.hiccups = holds, generous, hiccups
        self.trials: list[RateTrial] = []

    def __call__(self, name: str, trial: RateTrial, turn: int) -> LoadReport:
        self.trials.append(trial)
        most = self.holds * (self.generous if trial.purpose == "search" else 1)
        fails = trial.rate > most or len(self.trials) in self.hiccups
        return report(900 if fails else 100)

    def search_rate(self, capacity: float, effort: Effort = Effort()) -> float:  # noqa: B008
        return take_turns({"it": highest(capacity, LIMIT, effort)}, self)["it"]


@pytest.mark.parametrize("capacity", [20.0, 70.0, 100.0, 150.0, 280.0])
def test_finds_the_rate_from_below(capacity: float) -> None:
    rate = FakeServer(90).search_rate(capacity, Effort(rounds=7))
    assert 0.95 * 90 <= rate <= 90


def test_long_trials_correct_what_short_ones_promised() -> None:
    server = FakeServer(90, generous=1.15)
    rate = server.search_rate(100)
    assert 0.9 * 90 <= rate <= 90
    assert [t.purpose for t in server.trials][-3:] == ["confirm"] * 3
    assert all(t.seconds == Effort().long for t in server.trials if t.purpose == "confirm")


def test_one_hiccup_does_not_cost_half_of_the_range() -> None:
    usual = FakeServer(90).search_rate(100)
    for number in range(1, 14):
        assert FakeServer(90, hiccups=(number,)).search_rate(100) == pytest.approx(usual, rel=0.06)
    # Control: two in a row are believed.
    assert FakeServer(90, hiccups=(3, 4)).search_rate(100) < 0.8 * usual


def test_the_rate_is_0_if_no_trial_holds() -> None:
    assert FakeServer(0).search_rate(100) == 0.0


def test_errors_and_cut_trials_do_not_hold() -> None:
    assert report(100).holds(LIMIT)
    assert not report(100, errors={"429": 1}).holds(LIMIT)
    assert not report(100, cut=True).holds(LIMIT)
    assert not report(501).holds(LIMIT)


def test_servers_take_turns_and_one_that_is_gone_leaves() -> None:
    order: list[tuple[str, int]] = []

    def run(name: str, trial: RateTrial, turn: int) -> LoadReport | None:
        order.append((name, turn))
        return None if name == "b" and turn == 2 else report(100 if trial.rate < 80 else 900)

    effort = Effort(rounds=2, repeats=1)
    rates = take_turns({name: highest(100, LIMIT, effort) for name in "abc"}, run)
    assert order[:9] == [(name, turn) for turn in range(3) for name in "abc"]
    assert order[9:11] == [("a", 3), ("c", 3)] and set(rates) == {"a", "c"}


def test_rates_of_the_sweep() -> None:
    assert sweep_rates([200.0, 80.0]) == [40, 72, 180]
    assert sweep_rates([0.0, 80.0]) == [40, 72] and sweep_rates([]) == []
