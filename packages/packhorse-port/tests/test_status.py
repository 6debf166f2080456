"""What `packhorse monitor` sees of a script that runs."""

from __future__ import annotations

import gc
import time
from pathlib import Path

import pytest

import packhorse_port as poptorch
from packhorse import status
from packhorse_port import executor

from .models import Line, points


@pytest.fixture(autouse=True)
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACKHORSE_RUNTIME", str(tmp_path))


def test_a_running_executor_is_seen_until_it_leaves_the_device() -> None:
    model = poptorch.inferenceModel(Line())
    assert status.read() == []  # it has not run
    data, _ = points(4)
    model(data)
    (result,) = status.read()
    assert result.figures["model"] == "Line" and result.figures["device"]
    assert result.figures["does"].startswith("inference")
    model.detachFromDevice()
    assert status.read() == []
    model(data)
    assert len(status.read()) == 1
    del model
    gc.collect()
    assert status.read() == []


def test_calls_and_samples_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "PUBLISH_SECONDS", 0.1)
    monkeypatch.setattr(status, "PAUSE", 0.05)
    opts = poptorch.Options().deviceIterations(2)
    model = poptorch.inferenceModel(Line(), opts)
    data, _ = points(8)
    until, calls = time.monotonic() + 0.5, 0
    while time.monotonic() < until:
        model(data)
        calls += 1
    (result,) = status.read()
    assert 0 < result.figures["calls"] <= calls
    assert result.figures["sequences"] == 8 * result.figures["calls"]
    speeds = result.figures["calls_per_second"], result.figures["sequences_per_second"]
    assert 0 < speeds[0] < speeds[1]
    assert "host calls/s" in result.figures["does"]
    model.detachFromDevice()


def test_a_folder_that_cannot_be_written_stops_no_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PACKHORSE_RUNTIME", str(tmp_path / "file"))
    assert poptorch.inferenceModel(Line())(points(2)[0]).shape == (2, 2)
