"""One run, one table: the workload is PopRT's, the figures add up, what fails is a row."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

from packhorse.errors import InputError
from packhorse.reports import padded
from packhorse.reports import tables as report
from packhorse.runtime.runner import PackRunner
from packhorse_bench import lanes, modes, peers
from packhorse_bench import plots as bench_plots
from packhorse_bench import tables as bench_tables
from packhorse_bench.lanes import ModeLane, ModesStage, Pass
from packhorse_bench.modes import ModeRow, ModesSetup

SMALL = {"config": "tiny", "device": "cpu", "rows": 4, "capacity": 48, "requests": 40}
ONLINE = {"Original", *(mode.name for mode in lanes.MODES if mode.online)}


def small(**changes) -> ModesSetup:
    return ModesSetup(**(SMALL | {"repeats": 2, "peers": ()} | changes))


def test_the_workload_is_poprts() -> None:
    setup = ModesSetup()
    lengths = modes.draw_lengths(setup)
    assert (setup.rows, setup.capacity, len(lengths), setup.clients) == (16, 256, 1600, 56)
    assert lengths.sum() == 204_491 and (lengths.min(), lengths.max()) == (1, 256)
    np.random.seed(2023)  # the ambient generator, as the example does
    assert np.array_equal(lengths, np.random.normal(128, 128, 1600).astype(int).clip(1, 256))
    ids = modes.draw_ids(lengths, 30522, 2023)
    assert [len(x) for x in ids] == lengths.tolist()
    assert min(x.min() for x in ids) >= 0 and 30400 < max(x.max() for x in ids) < 30522


def test_other_workloads_fit_the_rows() -> None:
    lengths = modes.draw_lengths(ModesSetup(workload="squad", capacity=384, requests=500))
    assert lengths.max() <= 384 and 150 < lengths.mean() < 190
    assert modes.draw_lengths(ModesSetup(workload="squad", requests=500)).max() <= 256


def test_all_modes_in_one_run() -> None:
    progress = []
    comparison = modes.measure(small(), lambda *at: progress.append(at))
    assert [row.name for row in comparison.rows] == [mode.name for mode in lanes.MODES]
    assert progress == [(i, 21) for i in range(1, 22)]  # eight modes twice, five under load
    assert comparison.dtype == "fp32" and comparison.device.type == "cpu"
    original, real = comparison.rows[0], int(comparison.lengths.sum())
    assert original.best_ratio_to_padded == original.ratio_to_padded == 1
    assert original.fill == real / (10 * 4 * 48) and original.largest_difference == 0
    for row in comparison.rows:
        assert (row.problem is None and 0 < row.largest_difference < 1e-5) or row.kernel
        assert row.ratio_to_padded == pytest.approx(row.throughput / original.throughput)
        assert row.throughput <= row.best_throughput * (1 + 1e-9)
        assert original.fill <= row.fill <= 1
        online = row.packing_us is None
        assert online == row.name.startswith("Pack Online")
        assert (row.throughput_with_packing == row.throughput) == online
        assert row.throughput_with_packing <= row.throughput
        check_latencies(row)


def check_latencies(row: ModeRow) -> None:
    figures = asdict(row)
    names = [f"{loop}p{n}_ms" for loop in ("", "open_") for n in (50, 90, 99)]
    values = [figures[name] for name in names]
    if row.name not in ONLINE:
        assert {*values, row.open_rate, row.batch_ms} == {None}
        return
    assert sorted(values[:3]) == values[:3] and sorted(values[3:]) == values[3:]
    assert min(values) > 0 and figures["batch_ms"] > 0
    assert row.open_rate == pytest.approx(0.7 * row.throughput)


def test_a_rate_of_ones_own_and_no_load() -> None:
    rows = modes.measure(small(repeats=1, requests=12, rate=500.0)).rows
    assert {row.open_rate for row in rows} == {None, 500.0}
    rows = modes.measure(small(repeats=1, requests=12, load_repeats=0)).rows
    assert all(row.p50_ms is None and row.open_rate is None for row in rows)


@pytest.mark.parametrize("host", [True, False])
def test_the_host_alone_answers_with_zeros(tiny_folder: Path, host: bool) -> None:
    stage = ModesStage(tiny_folder, torch.device("cpu"), "fp32", 2, 16, 0.001, host=host)
    ragged, padded = (lanes.open_modes(stage, [lanes.MODES[i]])[0][0] for i in (-1, 0))
    for lane in (ragged, padded):
        answered = lane.run([np.ones(length, np.int32) for length in (3, 16, 9)])
        assert answered.vectors.shape[0] == 3 and answered.computed >= 28
        assert bool(answered.vectors.any()) != host
    facts = modes.describe(small(host=host), modes.measure(small(repeats=1, load_repeats=0)))
    assert facts["model"].endswith("zeros at once") == host


def lane(name: str, *passes: tuple[float, float | None, int], vectors=((0.0, 1.0),)) -> ModeLane:
    results = [Pass(np.array(vectors), s, tokens, packing) for s, packing, tokens in passes]
    return ModeLane(name, "native", lambda requests: results[0], passes=results)


def test_figures_are_those_of_the_rounds() -> None:
    lengths = np.array([30, 50, 20, 100])
    padded = lane("Original", (8.0, 1.0, 400), (4.0, 2.0, 400), (5.0, 3.0, 400))
    packed = lane("Packed", (2.0, None, 250), (4.0, None, 200), (3.0, None, 200))
    packed.passes[0].vectors[0, 1] = 0.75
    rows = [modes._row(lane_row, padded, ModesSetup(), lengths) for lane_row in (padded, packed)]
    assert asdict(rows[0]) == asdict(
        ModeRow("Original", "native", 0.8, 1.0, 1.0, 1.0, 4 / 8, 500_000.0, 0.5)
    )
    assert asdict(rows[1]) == asdict(
        ModeRow("Packed", "native", 4 / 3, 2.0, 5 / 3, 2.0, 4 / 3, None, 600 / 650, 0.25)
    )


def test_warming_up_leaves_no_trace(tiny_folder: Path) -> None:
    """With graphs all that will be measured runs once before, and a batch of every size."""
    stage = ModesStage(tiny_folder, torch.device("cpu"), "fp32", rows=2, capacity=16, timeout=0.001)
    (ragged,), _ = lanes.open_modes(stage, lanes.MODES[-1:])
    seen, runner = [], ragged.runner
    assert runner is not None

    def counted(requests: Sequence[np.ndarray]) -> Pass:
        seen.append(len(requests))
        return ragged.run(requests)

    def waited_for(count: int) -> PackRunner:
        seen.append("runner")
        return runner(count)

    requests = [np.ones(3, np.int32)] * 20
    lane = ModeLane("counted", "", counted, waited_for)
    modes._warm_up(lane, small(rows=2, requests=20), requests)
    assert seen == [8]  # four batches
    modes._warm_up(lane, small(rows=2, requests=20, graphs=True), requests)
    assert seen[1:] == [20, "runner"]
    assert not (lane.passes or lane.closed or lane.opened or lane.batch_ms)


@pytest.mark.slow
def test_a_packed_onnx_graph_is_a_lane_like_the_others() -> None:
    """In fp32 its vectors are ours; in another format it says why it is not there."""
    pytest.importorskip("onnxruntime")
    comparison = modes.measure(small(rows=2, requests=12, peers=("packed-onnx",)))
    row = comparison.rows[-1]
    assert (row.name, row.problem) == (lanes.PACKED_ONNX, None)
    assert row.largest_difference < 1e-5 and row.p99_ms is not None and 0 < row.fill <= 1
    in_bf16 = modes.measure(small(rows=2, requests=12, dtype="bf16", peers=("packed-onnx",)))
    assert "fp32 alone" in str(in_bf16.rows[-1].problem)


def test_what_a_peer_raises_is_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(setting: padded.PeerSetting, dtype: str) -> padded.PeerEngine:
        raise RuntimeError("the boiler burst\nat line 3")

    def unserved(setting: padded.PeerSetting, dtype: str) -> padded.PeerEngine:
        raise peers.Unserved(f"not in {dtype}")

    def missing(setting: padded.PeerSetting, dtype: str) -> padded.PeerEngine:
        raise ModuleNotFoundError("No module named 'x'", name="x")

    failing = {"a": explode, "b": unserved, "c": missing}
    monkeypatch.setattr(peers, "PEERS", failing)
    rows = modes.measure(small(repeats=1, load_repeats=0, requests=8, peers=("a", "b", "c"))).rows
    assert report.problems(rows) == [
        "Original (a): RuntimeError: the boiler burst",
        "Original (b): not in fp32",
        "Original (c): x is not installed; pip install 'packhorse[peers]'",
    ]
    assert len(bench_tables.modes_table(rows).rows) == len(lanes.MODES)


def test_padded_peers_stand_beside() -> None:
    pytest.importorskip("transformers")
    rows = modes.measure(small(repeats=1, load_repeats=0, peers=("transformers",))).rows
    peer, original = rows[-1], rows[0]
    assert peer.name == "Original (transformers)" and peer.problem is None
    assert peer.largest_difference < 1e-5 and peer.p99_ms is None
    assert original.fill <= peer.fill < 1  # no wider than the longest of a batch


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"rows": 0}, "--rows 0"),
        ({"requests": 0}, "--requests 0"),
        ({"repeats": 0}, "--repeats 0"),
        ({"capacity": 7}, "--capacity (7)"),
        ({"load_repeats": -1}, "--load-repeats"),
        ({"timeout": -0.1}, "--timeout"),
        ({"rate": 0.0}, "--rate is 0.0"),
        ({"rate": float("nan")}, "--rate"),
        ({"peers": ("keras",)}, "unknown peer 'keras'"),
        ({"dtype": "fp8"}, "unknown dtype"),
        ({"config": "huge"}, "unknown configuration"),
        ({"workload": "books"}, "unknown workload"),
        ({"capacity": 1024}, "512 positions"),
    ],
)
def test_a_wrong_question_is_an_error(changes: dict, part: str) -> None:
    with pytest.raises(InputError) as caught:
        modes.measure(small(**changes))
    assert part in str(caught.value)


ROWS = (
    ModeRow("Original", "native", 100.0, 90.0, 1, 1, 99.0, 10.0, 0.5, 0, 1, 2, 3, 4, 70, 5, 6, 7),
    ModeRow("Pack Offline Ragged", "native", 1234.5, 1200.0, 2.0, 1.9, 1230.0, 9.0, 1.0, 1e-7),
    ModeRow("Original (onnxruntime)", problem="no"),
)


def test_the_table_says_what_there_is() -> None:
    table = bench_tables.modes_table(ROWS)
    cells = [[cell.strip() for cell in row] for row in table.rows]
    assert len(cells) == 2 and all(len(row) == len(table.columns) for row in cells)
    assert cells[0][2:6] == ["100.0", "90.0", "1.00", "1.00"]
    assert cells[0][-4:] == ["1.0", "2.0/3.0/4.0", "70.0", "5.0/6.0/7.0"]
    assert cells[1] == [
        *("Pack Offline Ragged", "native", "1,234", "1,200", "2.00", "1.90", "1,230", "100.0%"),
        *("1.0e-07", "-", "-", "-", "-"),
    ]


def test_csv_has_every_figure(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    report.write_csv(path, ROWS)
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [set(line) for line in lines] == [set(asdict(ROWS[0]))] * 3
    assert (lines[0]["p99_ms"], lines[1]["p99_ms"]) == ("4", "")
    assert float(lines[1]["throughput"]) == 1234.5 and lines[2]["problem"] == "no"
    with pytest.raises(InputError, match="cannot write"):
        report.write_csv(tmp_path, ROWS)


@pytest.mark.parametrize("rows", [ROWS, ROWS[1:]])
def test_the_plot_shows_both(rows: tuple[ModeRow, ...], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib").rcParams["svg.fonttype"] = "none"
    path = tmp_path / "a.svg"
    bench_plots.draw_modes(path, rows, "a model")
    text = path.read_text("utf-8")
    assert "1,234  (2.00x)" in text
    assert ">Pack Offline Ragged<" in text and "onnxruntime" not in text
    assert ("closed loop" in text) == (rows is ROWS)
