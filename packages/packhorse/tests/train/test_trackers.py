"""Weights & Biases gets what the log has, read back by its own library; losing it stops nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("wandb", reason="no wandb: pip install 'packhorse[wandb]'")

# In a process of its own: the library starts another one, and threads that stay.
PROGRAM = """
import logging, os, sys, time
from pathlib import Path
from packhorse.errors import PackhorseError
from packhorse.train.journal import Journal

logging.basicConfig(format="%(levelname)s %(message)s")
folder, first, last, lose = Path(sys.argv[1]), *map(int, sys.argv[2:])
try:
    journal = Journal(folder, 1 << 30, wandb="horses", settings={"steps": last, "seed": 7})
except PackhorseError as error:
    sys.exit(str(error))
for step in range(first, last + 1):
    if step == lose:
        import psutil

        for child in psutil.Process().children(recursive=True):
            child.kill()
            child.wait(60)
    journal.step(step, {"loss": step / 8})
    journal.speed(step, {"tokens_per_second": 1000.0 * step})
journal.evaluation(last, 10, {"loss": 0.5})
journal.close()
"""


def track(
    folder: Path, first: int, last: int, lose: int = 0, **environment: str
) -> subprocess.CompletedProcess[str]:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, (folder, first, last, lose))],
        env=inherited | {"WANDB_MODE": "offline", "HOME": str(folder.parent)} | environment,
        capture_output=True,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=240,
    )


def read(file: Path) -> tuple[Any, list[dict[str, float]]]:
    """The run and its history as the library's own reader has them."""
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk import internal

    datastore = import_module(f"{internal.__name__}.datastore")
    store, run, history = datastore.DataStore(), None, []
    store.open_for_scan(str(file))
    while (data := store.scan_data()) is not None:
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "run":
            run = record.run
        if record.WhichOneof("record_type") == "history":
            items = {item.key or "/".join(item.nested_key): item for item in record.history.item}
            values = {name: json.loads(item.value_json) for name, item in items.items()}
            history.append({k: v for k, v in values.items() if k not in ("_timestamp", "_runtime")})
    store.close()
    return run, history


def test_a_run_has_its_figures_and_settings(tmp_path: Path) -> None:
    completed = track(tmp_path / "run", 1, 3)
    assert completed.returncode == 0, completed.stderr
    (file,) = tmp_path.rglob("*.wandb")
    run, history = read(file)
    assert (run.project, run.display_name) == ("horses", "run")
    settings = {update.key: update.value_json for update in run.config.update}
    assert settings["steps"] == "3" and settings["seed"] == "7"
    expected = [
        {"_step": step, "train/loss": step / 8, "speed/tokens_per_second": 1000 * step}
        for step in (1, 2, 3)
    ]
    expected[-1]["evaluation/loss"] = 0.5
    assert history == expected
    assert not list(tmp_path.rglob("*.patch")), "no copy of the user's source"
    again = track(tmp_path / "run", 4, 5)
    assert again.returncode == 0, again.stderr
    runs = [read(file) for file in sorted(tmp_path.rglob("*.wandb"), key=os.path.getmtime)]
    assert [run.run_id for run, _ in runs] == [run.run_id] * 2
    assert [line["_step"] for line in runs[1][1]] == [4, 5]


def test_without_a_login_it_says_what_to_do(tmp_path: Path) -> None:
    completed = track(tmp_path / "run", 1, 2, WANDB_MODE="online")
    assert completed.returncode == 1 and "Traceback" not in completed.stderr
    assert "log in with `wandb login`, or set WANDB_MODE=offline" in completed.stderr


@pytest.mark.slow
def test_a_tracker_that_is_lost_stops_nothing(tmp_path: Path) -> None:
    pytest.importorskip("psutil", reason="no psutil: pip install 'packhorse[monitor]'")
    completed = track(tmp_path / "run", 1, 200, lose=3)
    assert completed.returncode == 0, completed.stderr
    assert completed.stderr.count("WARNING Weights & Biases gets no more of this run") == 1
    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [*range(1, 201), 200]
