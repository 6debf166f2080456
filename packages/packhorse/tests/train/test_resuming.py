"""A run that is started again: what it refuses, what it goes on with, and what it leaves alone."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from packhorse import checkpoint
from packhorse.errors import InputError
from packhorse.train.job import assemble
from packhorse.train.loop import train
from packhorse.train.settings import TrainSettings

Make = Callable[..., Any]


def stopping_after(steps: int) -> Callable[[], int]:
    """A wish to stop that comes when so many steps are done in this process."""
    calls = count()
    return lambda: signal.SIGTERM if next(calls) >= steps else 0


def record(run: Path) -> dict[str, tuple[bytes, int]]:
    """Every file of a run and when it was written; only the lock may be opened anew."""
    return {
        str(path.relative_to(run)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(run.rglob("*"))
        if path.is_file() and path.name != "lock"
    }


@pytest.fixture
def finished(settings: Make, tmp_path: Path) -> Path:
    train(assemble(settings(steps=3, eval_every=2)), tmp_path / "run")
    return tmp_path / "run"


def test_a_finished_run_refuses_other_settings(settings: Make, finished: Path) -> None:
    before = record(finished)
    assert {"settings.toml", "log.jsonl", "model/model.safetensors"} <= before.keys()
    changed_settings = settings(steps=3, eval_every=2, learning_rate=0.5, weight_decay=0.25)
    with pytest.raises(InputError, match="is finished, at step 3, and nothing is left") as caught:
        train(assemble(changed_settings), finished)
    message = str(caught.value)
    assert "learning_rate is now 0.5; it was 0.01" in message
    assert "weight_decay is now 0.25; it was 0.01" in message
    assert "batch" not in message and "\n" not in message
    for shorter in ({"steps": 2}, {"steps": 0, "max_sequences": 20}):
        with pytest.raises(InputError, match=r"steps is now \d; it was 3"):
            train(assemble(settings(eval_every=2, **shorter)), finished)
    assert record(finished) == before


def test_a_finished_run_is_left_as_it_is(settings: Make, finished: Path) -> None:
    before, notes = record(finished), []
    same = settings(steps=3, eval_every=2, log_every=1, keep=5, tensorboard=True)
    outcome = train(assemble(same), finished, report=notes.append)  # these decide no figure
    assert (outcome.step, outcome.model) == (3, finished / "model")
    assert outcome.evaluation and notes == ["finished at step 3: nothing is left to train"]
    assert record(finished) == before


@pytest.mark.parametrize(
    "more", [{"steps": 5}, {"steps": 0, "epochs": 1.0}, {"steps": 0, "max_sequences": 80}], ids=str
)
def test_raising_what_ends_it_goes_on(
    settings: Make, finished: Path, more: dict[str, Any], tmp_path: Path
) -> None:
    """Told what changed, and to the weights of a run that was to be so long from the start."""
    longer = settings(eval_every=2, schedule="constant", learning_rate=0.02, **more)
    notes: list[str] = []
    assert train(assemble(longer), finished, report=notes.append).step == 5
    assert any("learning_rate is now 0.02; it was 0.01" in note for note in notes)
    assert 'schedule = "constant"' in (finished / "settings.toml").read_text()


def test_a_run_made_longer_is_the_run_that_was_so_long(settings: Make, tmp_path: Path) -> None:
    plain = {"eval_every": 2, "schedule": "constant"}
    train(assemble(settings(steps=3, **plain)), tmp_path / "run")
    train(assemble(settings(steps=5, **plain)), tmp_path / "run")
    train(assemble(settings(steps=3, **plain)), tmp_path / "whole", stop_signal=stopping_after(3))
    train(assemble(settings(steps=5, **plain)), tmp_path / "whole")
    weights = [
        (tmp_path / run / "model" / "model.safetensors").read_bytes() for run in ("run", "whole")
    ]
    assert weights[0] == weights[1]


def test_an_unfinished_run_goes_on_with_other_settings(settings: Make, tmp_path: Path) -> None:
    train(assemble(settings(steps=4)), tmp_path, stop_signal=stopping_after(2))
    notes: list[str] = []
    changed_settings = settings(steps=4, weight_decay=0.5)
    assert train(assemble(changed_settings), tmp_path, report=notes.append).step == 4
    assert any("weight_decay is now 0.5; it was 0.01" in note for note in notes)
    assert "weight_decay = 0.5" in (tmp_path / "settings.toml").read_text()


def test_a_start_that_learns_nothing_writes_no_settings(settings: Make, tmp_path: Path) -> None:
    """Stopped before its first step: what is there was learned with the settings before."""
    train(assemble(settings(steps=4)), tmp_path, stop_signal=stopping_after(2))
    before = record(tmp_path)
    changed_settings = settings(steps=4, weight_decay=0.5)
    assert train(assemble(changed_settings), tmp_path, stop_signal=stopping_after(0)).signal
    after = record(tmp_path)
    assert after["settings.toml"] == before["settings.toml"]
    assert {name: text for name, (text, _) in after.items()} == {
        name: text for name, (text, _) in before.items()
    }


def test_an_unfinished_run_can_be_ended_where_it_is(settings: Make, tmp_path: Path) -> None:
    train(assemble(settings(steps=4)), tmp_path, stop_signal=stopping_after(2))
    before = record(tmp_path)
    outcome = train(assemble(settings(steps=2)), tmp_path)
    assert (outcome.step, outcome.model) == (2, tmp_path / "model")
    assert record(tmp_path)["settings.toml"] == before["settings.toml"]


def test_a_result_that_a_kill_left_out_is_written(settings: Make, tmp_path: Path) -> None:
    """None yet, or that of the run before it was made longer; both with the settings it had."""
    short, long = settings(steps=2), settings(steps=3)
    train(assemble(short), tmp_path)
    old = (tmp_path / "model" / "model.safetensors").read_bytes()
    train(assemble(long), tmp_path)
    new = (tmp_path / "model" / "model.safetensors").read_bytes()
    assert old != new
    (tmp_path / "model" / "model.safetensors").write_bytes(old)
    train(assemble(long), tmp_path)
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == new
    shutil.rmtree(tmp_path / "model")
    train(assemble(replace(long, write="best")), tmp_path)  # nothing that it could belie
    assert checkpoint.load(tmp_path / "model").config.layers == 2


GOOD = ("good horse", "nice cart", "fine road", "good mule", "nice road", "fine horse")
BAD = ("bad horse", "ugly cart", "poor road", "bad mule", "ugly road", "poor horse")


def table(path: Path, good: Sequence[str] = GOOD, bad: Sequence[str] = BAD) -> Path:
    lines = [f"{text}\t{label}" for label, texts in ((1, good), (0, bad)) for text in texts]
    path.write_text("sentence\tlabel\n" + "\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize(
    "changed",
    [
        {"good": (BAD[0], *GOOD[1:]), "bad": (GOOD[0], *BAD[1:])},  # two labels exchanged
        {"good": ("good cart", *GOOD[1:])},  # another word
        {"good": (GOOD[1], GOOD[0], *GOOD[2:])},  # another order
    ],
    ids=["labels", "texts", "order"],
)
def test_task_data_that_changed_is_noticed(
    tiny: Path, tmp_path: Path, changed: dict[str, Any]
) -> None:
    """Every text keeps its length, so that nothing but the content tells."""
    options = {"task": "classify", "model": str(tiny), "batch": 4, "steps": 4, "device": "cpu"}
    data, run = table(tmp_path / "data.tsv"), tmp_path / "run"
    plain = TrainSettings(**options, train=str(data), compile="off")
    train(assemble(plain), run, stop_signal=stopping_after(2))
    before = record(run)
    table(data, **changed)
    with pytest.raises(InputError, match=r"step-00000002 learned from other data") as caught:
        train(assemble(plain), run)
    message = str(caught.value)
    assert f"the content of {data} has changed since" in message
    assert f"--model {run / 'step-00000002'} and another --out" in message
    assert record(run) == before
    moved = replace(plain, train=str(table(tmp_path / "elsewhere.tsv")))
    assert train(assemble(moved), run).step == 4  # the same content in another file
