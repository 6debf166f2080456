"""`packhorse bench modes`: table, JSON, CSV, plot and note of one run, and its complaints."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

KEYS = {
    *("name", "kernel", "best_throughput", "throughput", "best_ratio_to_padded"),
    *("ratio_to_padded", "throughput_with_packing", "packing_us", "fill"),
    *("largest_difference", "batch_ms", "p50_ms", "p90_ms", "p99_ms"),
    *("open_rate", "open_p50_ms", "open_p90_ms", "open_p99_ms", "problem"),
}


def test_everything_in_one_run(cli, tiny, tmp_path: Path) -> None:
    note, plot, table = (tmp_path / name for name in ("note.md", "a.png", "a.csv"))
    result = cli(
        *("bench", "modes", "-m", tiny("embed"), "--device", "cpu", "--rows", 2, "--capacity", 32),
        *("--requests", 12, "--repeats", 1, "--peers", "none", "--workload", "squad"),
        *("--note", note, "--plot", plot, "--csv", table, "--json"),
    )
    assert result.code == 0, result.err
    document = result.document
    assert [set(mode) for mode in document["modes"]] == [KEYS] * 8
    by_name = {mode["name"]: mode for mode in document["modes"]}
    assert by_name["Original"]["ratio_to_padded"] == 1
    assert by_name["Pack Online Ragged"]["fill"] == 1
    assert by_name["Pack Online Ragged"]["p99_ms"] > 0
    assert by_name["Pack Offline Ragged"]["p99_ms"] is None
    assert max(mode["largest_difference"] for mode in document["modes"]) < 1e-5
    assert "squad: 12 requests" in document["workload"] and document["dtype"] == "fp32"
    assert "2 x 32 tokens" in document["batches"] and "7 clients" in document["batches"]
    assert "x padded" in result.err and "Pack Online AttentionMask(first_fit)" in result.err
    assert f"| {document['modes'][0]['name']} |" in note.read_text("utf-8")
    assert plot.read_bytes().startswith(b"\x89PNG")
    with table.open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["name"] for line in lines] == list(by_name) and set(lines[0]) == KEYS


@pytest.mark.slow
def test_random_weights_and_no_load(cli) -> None:
    result = cli(
        *("bench", "modes", "--config", "tiny", "--device", "cpu", "--dtype", "bf16", "--rows", 2),
        *("--capacity", 16, "--requests", 6, "--repeats", 1, "--load-repeats", 0),
        *("--peers", "onnxruntime", "--json"),
    )
    assert result.code == 0, result.err
    assert result.document["model"] == "random weights, tiny" and result.document["dtype"] == "bf16"
    *modes, peer = result.document["modes"]
    assert all(mode["p50_ms"] is None and mode["problem"] is None for mode in modes)
    assert peer["problem"] and "Original (onnxruntime)" in result.err


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--rows", "0"], "--rows 0"),
        (["--peers", "keras"], "unknown peer 'keras'"),
        (["--rate", "-1"], "--rate"),
        (["--dtype", "auto"], "auto"),
        (["--csv", "none/a.csv"], "no folder"),
        (["--plot", "a.txt"], "ends in"),
    ],
)
def test_mistakes_are_one_line(cli, arguments: list[str], part: str) -> None:
    result = cli("bench", "modes", "--config", "tiny", *arguments)
    assert result.code == 2 and part in result.err
    assert result.err.startswith("packhorse: ") and result.err.count("\n") == 1
