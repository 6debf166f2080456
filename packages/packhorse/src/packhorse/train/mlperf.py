"""The log of a run as MLPerf reads it: events in its order, written through its own library.

    log = Log(Path("results/bert/result_0.txt"))
    begin(log, entry); …; describe(log, job); start(log, cleared)     # then the clock runs
    outcome = train(job, folder, watch=observer(log, job.measure))
    finish(log, outcome.reached, …)

A run that knows nothing of MLPerf is observed: the loop shows what it does, and this module puts it
in MLPerf's words. Between two evaluations lies a block; it is written when its evaluation is done,
three events at once, each with the time at which it happened. So the log always ends behind a whole
block, and a run that is taken up again finds in it exactly what its checkpoint knows (`Log.cut`).
Times are never made up: a run that was interrupted shows how long, and the clock ran on.

Initialisation ends before a row of the data is read; the data's table of contents has been by then.
The run ends with the evaluation that reached the target; what is saved afterwards is not timed.
Sequences are counted, never rows. Follows MLPerf training 1.0 and its logging library 4.1; the
order is that of Graphcore's v1.0 logs.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from packhorse.atomic import new_file
from packhorse.errors import InputError, MissingExtra
from packhorse.train import feed
from packhorse.train.display import Shown, Watch
from packhorse.train.job import Job
from packhorse.train.settings import Settings

TOKEN = ":::MLLOG "
SUBMISSION = ("org", "benchmark", "division", "status", "platform")
ABOUT = (
    *("seed", "max_sequence_length", "global_batch_size", "gradient_accumulation_steps"),
    *("opt_base_learning_rate", "opt_lamb_weight_decay_rate", "opt_lamb_beta_1"),
    *("opt_lamb_beta_2", "opt_learning_rate_warmup_steps", "num_warmup_steps"),
    *("start_warmup_step", "opt_learning_rate_training_steps", "opt_epsilon"),
    "opt_lamb_learning_rate_decay_poly_power",
)
HEADER = (
    *(f"submission_{name}" for name in SUBMISSION),
    *("init_start", *ABOUT, "cache_clear", "init_stop", "run_start"),
)
BLOCK = ("block_start", "block_stop", "eval_accuracy")
END = ("eval_samples", "train_samples", "run_stop")
# What MLPerf has no word for; its checker passes over keys that it does not know.
OWN = "packhorse_"
RESUMED, COMPILED = f"{OWN}resumed", f"{OWN}compiled_graphs"


@dataclass(frozen=True, slots=True)
class Entry:
    """Who submits, and on what."""

    org: str
    division: str
    platform: str
    status: str = "onprem"
    benchmark: str = "bert"


@dataclass(frozen=True, slots=True)
class Event:
    """A line of a log."""

    key: str
    value: Any
    time_ms: int
    metadata: dict[str, Any] = field(default_factory=dict)


def now() -> int:
    """Milliseconds, as the logs count them."""
    return int(time.time() * 1000)


def read(path: Path) -> list[Event]:
    """The events of a file; none where there is no file."""
    return [_event(line) for line in _lines(path)]


def _lines(path: Path) -> list[str]:
    """The lines of a file that are events, each of which can be read."""
    try:
        text = path.read_text("utf-8") if path.exists() else ""
        lines = [line for line in text.splitlines() if line.startswith(TOKEN)]
        for line in lines:
            _event(line)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is no log of MLPerf: {error!r}; move it away") from error
    return lines


def _event(line: str) -> Event:
    told = json.loads(line[len(TOKEN) :])
    return Event(told["key"], told["value"], told["time_ms"], told["metadata"])


@final
class Log:
    """A log in its file: what it holds already, and what is added to it.

    The file is written anew whenever it is settled, so that it is whole at every moment; `None`
    for a rank that writes nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.lines = _lines(path) if path else []
        self._logger = _logger(self.lines)

    @property
    def events(self) -> list[Event]:
        """What it holds."""
        return [_event(line) for line in self.lines]

    def holds(self, key: str) -> bool:
        """Is there such an event?"""
        return any(event.key == key for event in self.events)

    def add(self, key: str, value: Any = None, at: int | None = None, **metadata: Any) -> None:
        """An event, of this moment unless it was at another."""
        kinds = {"start": self._logger.start, "stop": self._logger.end}
        write = kinds.get(key.rpartition("_")[2], self._logger.event)
        write(key, value, metadata=metadata, time_ms=at, stack_offset=2)

    def cut(self, sequences: int, evaluated: int) -> None:
        """Take back what a checkpoint does not know: blocks evaluated behind `evaluated` sequences.

        sequences: those that the checkpoint has learned from. It may have been taken up before.
        """
        kept: list[str] = []
        for line, event in zip(self.lines, self.events, strict=True):
            behind = event.metadata.get("epoch_num", 0)
            if event.key == "eval_accuracy" and behind > evaluated:
                del kept[-2:]  # its block
            elif event.key != RESUMED or behind < sequences:
                kept.append(line)
        self.lines[:] = kept

    def settle(self) -> None:
        """Put it on the disk."""
        if self.path is None:
            return
        with new_file(self.path) as file:
            file.write("".join(f"{line}\n" for line in self.lines).encode())


@final
class _Kept(logging.Handler):
    """Hands what is logged on to a list; the library itself would only print."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())


def _logger(lines: list[str]) -> Any:
    try:
        from mlperf_logging.mllog.mllog import MLLogger
    except ImportError as error:
        raise MissingExtra("mlperf-logging", "train") from error
    plain = logging.Logger("packhorse.mlperf", logging.INFO)  # of our own: no other hears of it
    plain.addHandler(_Kept(lines))
    package = Path(__file__).resolve().parents[2]
    return MLLogger(plain, root_dir=re.escape(str(package)))


def begin(log: Log, entry: Entry) -> None:
    """Who submits; initialisation begins."""
    for name in SUBMISSION:
        log.add(f"submission_{name}", getattr(entry, name))
    log.add("init_start")


def describe(log: Log, job: Job) -> None:
    """What the run is like."""
    for key, value in _figures(job).items():
        log.add(key, value)


def _figures(job: Job) -> dict[str, Any]:
    settings, pace = job.settings, job.pace
    manifest = feed.open_dataset(settings.train, "train").manifest
    beta1, beta2 = pace.betas(0)
    values = (
        *(settings.seed, manifest.layout.capacity, global_batch(settings), job.feed.parts),
        *(settings.learning_rate, settings.weight_decay, beta1, beta2),
        *(pace.warmup, pace.warmup, 0, pace.total, settings.epsilon, settings.power),
    )
    return dict(zip(ABOUT, values, strict=True))


def global_batch(settings: Settings) -> int:
    """Sequences a step, also where the recipe counts rows."""
    if settings.packing_keeps == "betas":
        return settings.batch
    manifest = feed.open_dataset(settings.train, "train").manifest
    return round(settings.batch * manifest.sequences / manifest.rows)


def start(log: Log, cleared: bool) -> None:
    """Initialisation is over and the clock runs; cleared: no page of the data is in memory."""
    log.add("cache_clear", cleared)
    log.add("init_stop")
    log.add("run_start")
    log.settle()


def forget_pages(settings: Settings) -> bool:
    """Have the system drop what it keeps of the data in memory, as far as any user may."""
    if not hasattr(os, "posix_fadvise"):
        return False
    held_out = feed.evaluation_dataset(settings)
    datasets = [feed.open_dataset(settings.train, "train"), *([held_out] if held_out else [])]
    for path in _files(datasets):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return True


def _files(datasets: list[Any]) -> Iterator[Path]:
    return (path for data in datasets for path in data.folder.iterdir() if path.is_file())


def resume(log: Log, sequences: int, saved_ms: int) -> None:
    """The run goes on behind so many sequences, from what was saved then."""
    log.add(RESUMED, round((now() - saved_ms) / 1000, 3), epoch_num=sequences)
    log.settle()


def observer(log: Log, measure: str) -> Watch:
    """What the loop shows becomes blocks; `measure` is the accuracy."""
    looked = now()

    def watch(shown: Shown) -> None:
        nonlocal looked
        if shown.evaluation:
            _block(log, shown.sequences, shown.evaluation[measure], looked)
        looked = now()  # before an evaluation the loop looks at the last step of its block

    return watch


def _block(log: Log, sequences: int, accuracy: float, trained: int) -> None:
    events = log.events
    before = [event for event in events if event.key in ("run_start", "eval_accuracy")]
    number = len(before) - 1
    log.add("block_start", at=before[-1].time_ms, epoch_count=1, first_epoch_num=number)
    log.add("block_stop", at=trained, first_epoch_num=number)
    log.add("eval_accuracy", accuracy, epoch_num=sequences)
    log.settle()


def finish(log: Log, reached: bool, evaluated_on: int, learned_from: int, compiled: int) -> None:
    """The run is over, and was so with its last evaluation."""
    times = {event.key: event.time_ms for event in log.events}
    end = times.get("eval_accuracy", now())
    log.add(COMPILED, compiled, at=end)
    log.add("eval_samples", evaluated_on, at=end)
    log.add("train_samples", learned_from, at=end)
    status = "success" if reached else "aborted"
    log.add("run_stop", at=end, status=status, TTT=(end - times["run_start"]) / 1000)
    log.settle()
