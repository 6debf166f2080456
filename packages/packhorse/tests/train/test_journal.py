"""The log of a run: lines, places to go on from, and full disks."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from packhorse.errors import InputError
from packhorse.train.journal import Journal, last_speed


def steps(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "log.jsonl").read_text().splitlines()]


def test_what_lies_behind_the_place_is_cut_off(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.step(1, {"loss": 1.0})
    place = journal.settle()
    journal.step(2, {"loss": 2.0})
    journal.close()
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')  # a kill
    journal = Journal(tmp_path, place)
    assert steps(tmp_path) == [1]
    journal.step(2, {"loss": 2.5})
    assert journal.settle() == os.path.getsize(tmp_path / "log.jsonl")
    journal.close()
    assert steps(tmp_path) == [1, 2]


def test_a_log_that_is_gone_begins_anew(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 1000)
    journal.step(7, {"loss": 1.0})
    journal.close()
    assert steps(tmp_path) == [7]


def test_what_is_no_number_is_null(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.evaluation(3, 48, {"pearson": float("nan"), "loss": 0.1})
    journal.close()
    line = json.loads((tmp_path / "log.jsonl").read_text())
    assert line == {"step": 3, "sequences": 48, "evaluation": {"pearson": None, "loss": 0.1}}


def test_speed_is_kept_apart_and_found_again(tmp_path: Path) -> None:
    assert last_speed(tmp_path) is None
    journal = Journal(tmp_path)
    journal.speed(10, {"sequences_per_second": 3.0})
    journal.close()
    assert not (tmp_path / "log.jsonl").read_bytes()
    assert last_speed(tmp_path) == {"step": 10, "sequences_per_second": 3.0}
    (tmp_path / "speed.jsonl").write_text("{")
    assert last_speed(tmp_path) is None


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    journal = Journal(None, 5, tensorboard=True)
    journal.step(1, {"loss": 1.0})
    assert journal.settle() == 0
    journal.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_tensorboard_takes_steps_back(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    first, places = Journal(tmp_path, tensorboard=True), []
    for step in (1, 2, 3):
        first.step(step, {"loss": float(step)})
        places.append(first.settle())
    first.close()
    again = Journal(tmp_path, places[1], tensorboard=True)
    again.step(3, {"loss": 30.0})
    again.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(tmp_path / "tensorboard"))
    accumulator.Reload()
    values = [(event.step, event.value) for event in accumulator.Scalars("train/loss")]
    assert values == [(1, 1.0), (2, 2.0), (3, 30.0)]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_a_full_disk_is_reported(tmp_path: Path) -> None:
    (tmp_path / "speed.jsonl").symlink_to("/dev/full")
    journal = Journal(tmp_path)
    with pytest.raises(InputError, match="cannot be written: No space left"):
        journal.speed(1, {"fill": 1.0})
    journal.close()
