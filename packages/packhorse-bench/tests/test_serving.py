"""What a comparison of servers is asked, and what it says; whole runs are in tests/cli."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from packhorse.errors import InputError
from packhorse.runtime.loading import load
from packhorse_bench import serving, serving_report
from packhorse_bench.serving_figures import Point, ServeRow, ServingComparison, ServingSetup
from packhorse_bench.serving_search import Effort

SETUP = ServingSetup("some/model")


def point(server: str, purpose: str, rate: float, p99: float, **more: object) -> Point:
    figures = {"seconds": 5.0, "asked": 100, "answered_per_second": rate, "tokens_per_second": 9.0}
    figures |= {"p50_ms": p99 / 4, "p90_ms": p99 / 2, "worst_ms": p99, "errors": ""}
    figures |= {"held": p99 <= 500, "generator_share": 0.1, "generator_late_ms": 1.0}
    return Point(server, purpose, rate, p99_ms=p99, **{**figures, **more})  # type: ignore[arg-type]


def comparison(*more: Point) -> ServingComparison:
    first_server, peer = "packhorse", "sentence-transformers"
    points = [
        point(server, "sweep", rate, 200)
        for server in (first_server, peer)
        for rate in (40.0, 72.0)
    ]
    points += [point(first_server, "sweep", 180.0, 300), point(peer, "sweep", 180.0, math.inf)]
    points += [point(first_server, "confirm", 200.0, 450), point(peer, "confirm", 80.0, 480)]
    rows = (
        ServeRow(first_server, 200.0, 2.5, 112.5, 450.0, 230.0, 9800.0, 0.91, 1.0, 0.1),
        ServeRow(peer, 80.0, 1.0, 120.0, 480.0, 90.0, 3900.0, 0.36, 1.0, 0.1),
        ServeRow("infinity", problem="it is not installed; `make peers` …"),
    )
    machine = (torch.device("cpu"), "fp32", 2, 300.0)
    return ServingComparison(rows, (*points, *more), (6, 40, 250), 11000.0, 10800.0, *machine)


def test_the_table_has_a_line_a_server_and_a_column_a_rate() -> None:
    shown = serving_report.table(SETUP, comparison())
    packhorse_cells, peer = ([cell.strip() for cell in row] for row in shown.rows)
    columns = [name.strip() for name in shown.columns]
    assert columns[1:3] == ["req/s within 500 ms", "x sentence-transformers"]
    assert columns[4:7] == ["at 40/s", "at 72/s", "at 180/s"]
    assert (
        packhorse_cells[:4] == ["packhorse", "200.0", "2.50", "112/450"]
        and packhorse_cells[6] == "75/300"
    )
    assert peer[6] == "fails" and peer[4] == "50/200" and "91%" in packhorse_cells


def test_what_was_measured_is_reported_in_words() -> None:
    facts = serving_report.describe(SETUP, comparison())
    assert "6 to 250" in facts["workload"] and "docstrings" in facts["workload"]
    assert facts["PackRunner.run"].startswith("11,000 tokens/s alone, 10,800 beside")


def test_remarks_tell_what_is_missing_and_what_failed() -> None:
    refused = point("packhorse", "search", 900.0, math.inf, errors="3 429")
    remarks = serving_report.remarks(SETUP, comparison(refused))
    assert remarks[0].startswith("infinity: it is not installed")
    assert any(line.startswith("packhorse: errors in 1 of 5 trials (3 429") for line in remarks)
    assert not any("bottleneck" in line for line in remarks)


@pytest.mark.parametrize("busy", [{"generator_share": 0.9}, {"generator_late_ms": 80.0}])
def test_a_generator_in_the_way_is_reported(busy: dict[str, float]) -> None:
    remarks = serving_report.remarks(SETUP, comparison(point("packhorse", "sweep", 10, 90, **busy)))
    assert remarks[-1].startswith("warning: the generator was the bottleneck")


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_plot(suffix: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"a.{suffix}"
    serving_report.draw(path, SETUP, comparison(), "a title")
    assert path.stat().st_size > 5000


def test_a_curve_joins_what_held_and_leaves_out_what_did_not() -> None:
    more = [point("packhorse", "search", 200.0, 350), point("packhorse", "search", 300.0, 900)]
    held, failed = serving_report._curve(comparison(*more).points, "packhorse")
    assert held == [(40, 200), (72, 200), (180, 300), (200, 400)] and failed == [300]


def test_texts_are_short_ones_in_an_order_of_the_seed(tiny_folder: Path) -> None:
    encoder = load(tiny_folder, device="cpu")
    texts = tuple(" ".join(["w1"] * count) for count in (1, 3, 4, 10, 100, 248, 249, 300))
    chosen, tokens = serving._texts(ServingSetup("", texts=texts), encoder)
    assert sorted(tokens) == [6, 12, 102, 250]  # with two special ones
    assert [len(text.split()) + 2 for text in chosen] == tokens
    again = serving._texts(ServingSetup("", texts=texts, seed=1, count=3), encoder)[1]
    assert len(again) == 3 and again != tokens[:3]
    with pytest.raises(InputError, match="no text has 6 to 250 tokens"):
        serving._texts(ServingSetup("", texts=("w1",)), encoder)


@pytest.mark.parametrize(
    ("setup", "part"),
    [
        (ServingSetup("m", count=0), "--count 0"),
        (ServingSetup("m", connections=0), "--connections 0"),
        (ServingSetup("m", limit_ms=0), "--limit-ms 0"),
        (ServingSetup("m", threads=-1), "--threads -1"),
        (ServingSetup("m", effort=Effort(long=math.inf)), "--long inf"),
        (ServingSetup("m", effort=Effort(repeats=0)), "--repeats 0"),
        (ServingSetup("m", peers=("keras",)), "unknown peer 'keras'"),
    ],
)
def test_mistakes_are_reported_before_anything_starts(setup: ServingSetup, part: str) -> None:
    with pytest.raises(InputError, match=part):
        serving.measure(setup)


def test_a_served_rate_held_in_every_trial() -> None:
    """A confirmed rate that a trial of the sweep broke falls to what nothing broke."""
    trials = [point("a", "sweep", rate, 200) for rate in (40.0, 72.0)]
    confirmed = [point("a", "confirm", 130.7, 400)] * 3
    assert serving.unbroken(130.7, [*trials, *confirmed]) == 130.7
    broken = point("a", "sweep", 120.0, math.inf)
    assert serving.unbroken(130.7, [*trials, *confirmed, broken]) == 72.0
    assert serving.unbroken(130.7, [*confirmed, broken]) == 0.0
    searched = point("a", "search", 100.0, math.inf)  # short trials only find the place
    assert serving.unbroken(130.7, [*trials, *confirmed, searched]) == 130.7
