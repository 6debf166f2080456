"""Scaling: processes on cores of their own take turns, and a failure is a row."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from packhorse.errors import InputError
from packhorse_bench import scaling
from packhorse_bench.encode import EncodeRow, best_peers
from packhorse_bench.scaling import ScalingRequest, ScalingRow

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="processes are not bound to cores here"
)


def request_for(**changes) -> ScalingRequest:
    defaults = {"lengths": np.full(8, 16), "model": "", "config": "tiny", "repeats": 2}
    return ScalingRequest(**(defaults | {"peers": (), "cores": (1,)} | changes))


def test_rows_of_ours_and_of_a_peer_that_fails() -> None:
    """OpenVINO has no fp16 here, whether it is installed or not."""
    progress = []
    request = request_for(peers=("openvino",), dtype="fp16")
    rows = scaling.measure(request, lambda *at: progress.append(at))
    assert [(row.engine, row.streams, row.threads) for row in rows] == [
        ("packhorse", 1, 1),
        ("openvino", 1, 1),
    ]
    ours, theirs = rows
    assert len(ours.seconds) == 2 and 0 < ours.slowest <= ours.sequences_per_second <= ours.fastest
    assert ours.of_linear == 1 and ours.problem is None
    assert theirs.problem and ("fp16" in theirs.problem or "not installed" in theirs.problem)
    assert progress[0] == (1, 6) and len(scaling.table(rows).rows) == 1


def test_a_process_that_fails_in_a_round_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> float:
        raise ChildProcessError("its process ended")

    monkeypatch.setattr(scaling, "_open", lambda streams, opened: [])
    monkeypatch.setattr(scaling, "_time_round", fail)
    (row,) = scaling.measure(request_for())
    assert row.problem == "its process ended"


def test_every_division_of_the_cores() -> None:
    request = request_for(peers=("transformers",))
    rows = scaling._rows(request, (1, 6))
    assert [(row.engine, row.streams, row.threads) for row in rows] == [
        ("packhorse", 1, 1),
        ("transformers", 1, 1),
        ("packhorse", 1, 6),
        ("packhorse", 6, 1),
        *[("transformers", streams, 6 // streams) for streams in (1, 2, 6)],
    ]
    streams = scaling._streams(request, rows[5], [3, 4, 5, 7, 8, 9], [*"abcde"], Path(), Path())
    assert [stream.cores for stream in streams] == [(3, 4, 5), (7, 8, 9)]
    assert [[*stream.work] for stream in streams] == [["a", "c", "e"], ["b", "d"]]


def test_of_linear_is_a_share_of_independent_processes() -> None:
    rows = [
        ScalingRow("packhorse", 1, 4, seconds=[2.0, 1.0, 4.0]),
        ScalingRow("packhorse", 4, 1, seconds=[1.0]),
        ScalingRow("x", 2, 2, problem="burst"),
    ]
    scaling._fill(rows, 100)
    assert (rows[0].sequences_per_second, rows[0].of_linear) == (50, 0.5)
    assert (rows[0].slowest, rows[0].fastest) == (25, 100)
    assert rows[2].of_linear is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"repeats": 0}, "--repeats 0"),
        ({"cores": (4096,)}, "--cores 4096: this process may use 1 to"),
        ({"lengths": np.array([], int)}, "--count 0"),
        ({"peers": ("keras",)}, "unknown peer 'keras'"),
    ],
)
def test_mistakes(changes: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        scaling.measure(request_for(**changes))


def test_the_best_peer_is_one_that_is_limited() -> None:
    rows = [
        EncodeRow("packhorse", "fp32", "sorted", 30.0),
        EncodeRow("transformers", "fp32", "sorted", 20.0),
        EncodeRow("onnxruntime", "fp32", "sorted", 60.0, limited=False),
        EncodeRow("openvino", "fp32", "sorted", problem="burst"),
        EncodeRow("transformers", "fp32", "arrival", 29.0),
    ]
    assert best_peers(rows) == ["fp32, sorted: 1.50 times transformers"]
    rows[2] = EncodeRow("onnxruntime", "fp32", "sorted", 60.0)
    assert best_peers(rows) == ["fp32, sorted: 0.50 times onnxruntime"]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names an x86 instruction set")
@pytest.mark.parametrize("command", ["encode", "scaling"])
def test_as_on_a_lesser_processor(command: str) -> None:
    words = [sys.executable, "-m", "packhorse", "bench", command, "--config", "tiny", "--json"]
    words += ["--cpu", "avx2", "--workload", "normal", "--max-length", "16", "--count", "4"]
    words += ["--repeats", "1", "--peers", "none"] + ["--cores", "1"] * (command == "scaling")
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert "avx2" in report["features"] and "avx512" not in report["features"]
    assert (
        report["rows"][0].keys()
        == asdict(
            (EncodeRow if command == "encode" else ScalingRow)("x", "", "")  # pyright: ignore
        ).keys()
    )
