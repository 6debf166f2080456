"""Logs as MLPerf wants them: accepted by its checker, in order, cut back to a checkpoint."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlperf_logging", reason="no mlperf-logging: pip install 'packhorse[train]'")

from packhorse.errors import InputError
from packhorse.train import mlperf
from packhorse.train.job import assemble
from packhorse.train.journal import RunStatus
from packhorse.train.mlperf import (
    TOKEN,
    LogEvent,
    LogRules,
    MlperfLog,
    SubmissionEntry,
    check,
    checker_problems,
    closed_rules,
    order_problems,
)

Make = Callable[..., Any]
BATCH, EVERY = 3072, 175_000
CLOSED = closed_rules(BATCH)


def written(path: Path, job: Any, accuracies: Iterable[float], reached: bool = True) -> MlperfLog:
    """The log of a run that was evaluated whenever it was due, without the run."""
    log = MlperfLog(path)
    mlperf.begin(log, SubmissionEntry("Packhorse", "closed", "two cores"))
    mlperf.describe(log, job)
    mlperf.start(log, cleared=True)
    watch, sequences = mlperf.observer(log, "mlm_accuracy"), 0
    for number, accuracy in enumerate(accuracies, 1):
        sequences = number * EVERY + 523
        watch(RunStatus(57 * number, 900, 1.5, sequences=sequences))
        evaluation = {"mlm_accuracy": accuracy, "loss": 1.7}
        watch(RunStatus(57 * number, 900, 1.5, sequences=sequences, evaluation=evaluation))
    mlperf.finish(log, reached, mlperf.CLOSED_SAMPLES, sequences, compiled=0)
    return log


@pytest.fixture
def job(settings: Make) -> Any:
    return assemble(settings(batch=BATCH, max_sequences=4_500_000, steps=0, seed=42))


def test_a_closed_log_at_the_target_is_accepted_and_one_below_it_refused(
    job: Any, tmp_path: Path
) -> None:
    good = written(tmp_path / "result_0.txt", job, (0.49, 0.6, 0.721))
    assert checker_problems(good.path) == [] and order_problems(good.events, CLOSED) == []
    low = written(tmp_path / "result_1.txt", job, (0.49, 0.6, 0.71))
    (checker_problem,) = checker_problems(low.path)
    assert "0.720" in checker_problem
    (order_problem,) = order_problems(low.events, CLOSED)
    assert "success at 0.71" in order_problem
    aborted = written(tmp_path / "result_2.txt", job, (0.49, 0.6, 0.71), reached=False)
    assert checker_problems(aborted.path) and order_problems(aborted.events, CLOSED) == []
    assert check(aborted.path, CLOSED) == checker_problems(aborted.path)


def test_every_key_in_its_order_with_what_the_run_is_like(job: Any, tmp_path: Path) -> None:
    events = written(tmp_path / "result_0.txt", job, (0.5, 0.73)).events
    keys = [event.key for event in events if not event.key.startswith(mlperf.OWN_PREFIX)]
    assert keys == [*mlperf.HEADER, *mlperf.BLOCK * 2, *mlperf.END]
    values = {event.key: event.value for event in events}
    assert (values["seed"], values["global_batch_size"], values["max_sequence_length"]) == (
        42,
        3072,
        48,
    )
    assert (values["opt_base_learning_rate"], values["opt_epsilon"]) == (0.01, 1e-6)
    assert (values["eval_samples"], values["train_samples"]) == (10_000, 350_523)
    assert values["opt_learning_rate_training_steps"] == job.schedule.steps
    stop = events[-1].metadata
    assert stop["status"] == "success" and stop["file"] == "packhorse/train/mlperf.py"
    line = json.loads((tmp_path / "result_0.txt").read_text().splitlines()[-1][len(TOKEN) :])
    assert line["event_type"] == "INTERVAL_END" and line["namespace"] == ""


def test_rows_are_reported_as_sequences(settings: Make, tmp_path: Path) -> None:
    rows = settings(batch=10, packing_keeps="batch", beta1=0.9, beta2=0.99)  # two sequences a row
    events = written(tmp_path / "log.txt", assemble(rows), (0.73,)).events
    values = {event.key: event.value for event in events}
    assert values["global_batch_size"] == 20
    assert values["opt_lamb_beta_1"] == pytest.approx(0.81)
    assert values["opt_lamb_beta_2"] == pytest.approx(0.9801)


@pytest.mark.parametrize(
    ("batch", "interval"), [(64, 150_000), (2048, 150_000), (3072, 175_000), (4608, 200_000)]
)
def test_the_interval_of_evaluations(batch: int, interval: int) -> None:
    assert closed_rules(batch) == LogRules(0.720, interval, 10_000)


def test_blocks_have_the_times_at_which_they_were(job: Any, tmp_path: Path) -> None:
    log = MlperfLog(tmp_path / "log.txt")
    mlperf.begin(log, SubmissionEntry("Packhorse", "open", "two cores"))
    mlperf.describe(log, job)
    mlperf.start(log, cleared=False)
    watch = mlperf.observer(log, "accuracy")
    for number in (1, 2):
        time.sleep(0.02)
        watch(RunStatus(number, 2, 1.0, sequences=100 * number))  # trained
        time.sleep(0.03)
        watch(RunStatus(number, 2, 1.0, sequences=100 * number, evaluation={"accuracy": 0.5}))
    run, *blocks = [e.time_ms for e in log.events if e.key in ("run_start", *mlperf.BLOCK)]
    assert blocks[0] == run and blocks[3] == blocks[2]
    for start, stop, evaluated in (blocks[:3], blocks[3:]):
        assert stop - start >= 19 and evaluated - stop >= 29
    mlperf.finish(log, True, 12, 200, compiled=0)
    assert log.events[-1].time_ms == blocks[-1]  # what comes behind it is not timed


def rewritten(events: list[LogEvent], key: str, number: int = -1, **changes: Any) -> list[LogEvent]:
    """The events with one of them changed; metadata is added to."""
    places = [place for place, event in enumerate(events) if event.key == key]
    old, changed = events[places[number]], list(events)
    metadata = {**old.metadata, **changes.pop("metadata", {})}
    value, time_ms = changes.get("value", old.value), changes.get("time_ms", old.time_ms)
    changed[places[number]] = LogEvent(old.key, value, time_ms, metadata)
    return changed


def without(events: list[LogEvent], key: str) -> list[LogEvent]:
    return [event for event in events if event.key != key]


def swapped(events: list[LogEvent], first_key: str, second_key: str) -> list[LogEvent]:
    names = [event.key for event in events]
    first, second, changed = names.index(first_key), names.index(second_key), list(events)
    changed[first], changed[second] = changed[second], changed[first]
    return changed


def at(sequences: int) -> dict[str, int]:
    return {"epoch_num": sequences}


BROKEN: dict[str, tuple[Callable[[list[LogEvent]], list[LogEvent]], str]] = {
    "no seed": (lambda e: without(e, "seed"), "max_sequence_length stands where seed is due"),
    "swapped": (lambda e: swapped(e, "init_stop", "run_start"), "run_start stands where init_stop"),
    "no block_stop": (lambda e: without(e, "block_stop"), "eval_accuracy stands where block_stop"),
    "no evaluation": (lambda e: without(e, "eval_accuracy"), "stands where eval_accuracy is due"),
    "no blocks": (
        lambda e: [event for event in e if event.key not in mlperf.BLOCK],
        "eval_samples stands where block_start is due",
    ),
    "unfinished": (lambda e: e[:-1], "the log ends before run_stop"),
    "more": (lambda e: [*e, e[-1]], "stands"),
    "backwards": (lambda e: rewritten(e, "block_stop", time_ms=1), "before block_start"),
    "uncounted": (
        lambda e: rewritten(e, "block_start", metadata={"first_epoch_num": 7}),
        "block_start counts [0, 1, 7], not from 0 up",
    ),
    "late": (
        lambda e: rewritten(e, "eval_accuracy", 0, metadata=at(2 * EVERY + 1)),
        "evaluation 1 is after 350001 sequences, not 175000",
    ),
    "early": (
        lambda e: rewritten(e, "eval_accuracy", 0, metadata=at(EVERY - 1)),
        "evaluation 1 is after 174999",
    ),
    "falling": (lambda e: rewritten(e, "eval_accuracy", 1, metadata=at(5)), "do not increase"),
    "all right": (lambda e: rewritten(e, "eval_accuracy", value=1.0), "not [1.0]"),
    "went on": (lambda e: rewritten(e, "eval_accuracy", 1, value=0.72), "and the run continued"),
    "few samples": (lambda e: rewritten(e, "eval_samples", value=9999), "on 9999 sequences"),
    "miscounted": (lambda e: rewritten(e, "train_samples", value=1), "train_samples is 1"),
    "modest": (
        lambda e: rewritten(e, "run_stop", metadata={"status": "aborted"}),
        "aborted at 0.721, target 0.72: success",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_out_of_order_is_named(name: str, job: Any, tmp_path: Path) -> None:
    events = written(tmp_path / "log.txt", job, (0.49, 0.6, 0.721)).events
    assert order_problems(events, CLOSED) == []
    change, complaint = BROKEN[name]
    assert any(complaint in problem for problem in order_problems(change(events), CLOSED))


def test_mlperfs_checker_lets_pass_what_ours_does_not(job: Any, tmp_path: Path) -> None:
    log = written(tmp_path / "log.txt", job, (0.49, 0.6, 0.721))
    block = next(n for n, line in enumerate(log.lines) if '"block_start"' in line)
    log.lines[block], log.lines[block + 1] = log.lines[block + 1], log.lines[block]
    log.settle()
    assert checker_problems(log.path) == [] and order_problems(log.events, CLOSED)


def test_what_a_checkpoint_does_not_know_is_taken_back(job: Any, tmp_path: Path) -> None:
    log = MlperfLog(tmp_path / "log.txt")
    mlperf.begin(log, SubmissionEntry("Packhorse", "open", "two cores"))
    mlperf.describe(log, job)
    mlperf.start(log, cleared=True)
    begun = list(log.lines)
    watch = mlperf.observer(log, "accuracy")
    for sequences in (100, 200):
        watch(RunStatus(1, 2, 1.0, sequences=sequences, evaluation={"accuracy": 0.5}))
        mlperf.resume(log, sequences + 50, mlperf.now() - 5000)
    again = MlperfLog(log.path)
    assert again.lines == log.lines and len(again.lines) == len(begun) + 8
    assert again.events[-1].key == mlperf.RESUMED and again.events[-1].value >= 5
    again.cut(sequences=251, evaluated=200)
    assert again.lines == log.lines
    again.cut(sequences=250, evaluated=200)  # the same checkpoint again: one pause, not two
    assert again.lines == log.lines[:-1]
    again.cut(sequences=151, evaluated=100)  # an older one
    assert again.lines == log.lines[: len(begun) + 4]
    again.cut(sequences=50, evaluated=0)
    assert again.lines == begun


def test_a_file_that_is_no_log_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "result_0.txt"
    path.write_text(f"{TOKEN}{{half a line\n")
    with pytest.raises(InputError, match="not a log of MLPerf"):
        MlperfLog(path)
    assert mlperf.read(tmp_path / "none.txt") == []
