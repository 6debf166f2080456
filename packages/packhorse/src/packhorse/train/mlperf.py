"""MLPerf's log of a run: written through MLPerf's own library, and checked.

    log = MlperfLog(Path("results/bert/result_0.txt"))
    begin(log, entry); …; describe(log, job); start(log, cleared)     # then the clock runs
    outcome = train(job, folder, watch=observer(log, job.measure))
    finish(log, outcome.reached, …)
    problems = check(log.path, rules)

The loop knows nothing of MLPerf: this module observes its status and writes it as MLPerf's events.
The steps between two evaluations are a block. It is written when its evaluation is done, as three
events at once, each with the time at which it happened. So the log always ends after a complete
block, and a resumed run finds in it exactly what its checkpoint knows (`MlperfLog.cut`). Times are
never invented: an interrupted run shows for how long, and the clock kept running.

Initialization ends before a row of the data is read, though its manifest has been by then. The run
ends with the evaluation that reached the target; what is saved afterwards is not timed. Sequences
are counted, never rows. Follows MLPerf training 1.0 and its logging library 4.1; the order is that
of Graphcore's v1.0 logs.

MLPerf's checker looks for keys and values but hardly at their order: it accepts a log with shuffled
blocks, a clock that runs backwards or evaluations at arbitrary times. `order_problems` reads the
log once from top to bottom and names every departure. MLPerf's checker runs as a separate program,
which costs a fifth of a second per log; within this process it would configure logging for all of
it.
"""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, final

from packhorse.atomic import new_file
from packhorse.errors import InputError, MissingExtra
from packhorse.train import feed
from packhorse.train.job import TrainingJob
from packhorse.train.journal import RunStatus, Watch
from packhorse.train.presets import TARGET, evaluation_interval
from packhorse.train.settings import TrainSettings

TOKEN = ":::MLLOG "
SUBMISSION = ("org", "benchmark", "division", "status", "platform")
DESCRIPTION = (
    "seed",
    "max_sequence_length",
    "global_batch_size",
    "gradient_accumulation_steps",
    "opt_base_learning_rate",
    "opt_lamb_weight_decay_rate",
    "opt_lamb_beta_1",
    "opt_lamb_beta_2",
    "opt_learning_rate_warmup_steps",
    "num_warmup_steps",
    "start_warmup_step",
    "opt_learning_rate_training_steps",
    "opt_epsilon",
    "opt_lamb_learning_rate_decay_poly_power",
)
HEADER = (
    *(f"submission_{name}" for name in SUBMISSION),
    "init_start",
    *DESCRIPTION,
    "cache_clear",
    "init_stop",
    "run_start",
)
BLOCK = ("block_start", "block_stop", "eval_accuracy")
END = ("eval_samples", "train_samples", "run_stop")
# Events that MLPerf does not define; its checker ignores unknown keys.
OWN_PREFIX = "packhorse_"
RESUMED = f"{OWN_PREFIX}resumed"
COMPILED = f"{OWN_PREFIX}compiled_graphs"

RULESET = "1.0.0"
CLOSED_SAMPLES = 10_000  # sequences of an evaluation in the closed division
CLOSED_LENGTH = 512  # maximum tokens per sequence in the closed division


@dataclass(frozen=True, slots=True)
class SubmissionEntry:
    """Who submits, and on which system."""

    org: str
    division: str
    platform: str
    status: str = "onprem"
    benchmark: str = "bert"


@dataclass(frozen=True, slots=True)
class LogEvent:
    """A line of a log."""

    key: str
    value: Any
    time_ms: int
    metadata: dict[str, Any] = field(default_factory=dict)


def now() -> int:
    """The time in milliseconds, as the logs have it."""
    return int(time.time() * 1000)


def read(path: Path) -> list[LogEvent]:
    """The events in a file; none if there is no file."""
    return [_event(line) for line in _lines(path)]


def _lines(path: Path) -> list[str]:
    """The lines of a file that are events, all of them readable."""
    try:
        text = path.read_text("utf-8") if path.exists() else ""
        lines = [line for line in text.splitlines() if line.startswith(TOKEN)]
        for line in lines:
            _event(line)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is not a log of MLPerf: {error!r}; move it away") from error
    return lines


def _event(line: str) -> LogEvent:
    document = json.loads(line[len(TOKEN) :])
    return LogEvent(document["key"], document["value"], document["time_ms"], document["metadata"])


@final
class MlperfLog:
    """A log in its file: what it holds already, and what is added to it.

    The file is replaced as a whole by `settle`, so it is complete at every moment. Without a path,
    for ranks other than 0, nothing is written.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.lines = _lines(path) if path else []
        self._logger = _logger(self.lines)

    @property
    def events(self) -> list[LogEvent]:
        """What it holds."""
        return [_event(line) for line in self.lines]

    def holds(self, key: str) -> bool:
        """Is there such an event?"""
        return any(event.key == key for event in self.events)

    def add(self, key: str, value: Any = None, at: int | None = None, **metadata: Any) -> None:
        """Add an event, with the current time unless `at` is set."""
        kinds = {"start": self._logger.start, "stop": self._logger.end}
        write = kinds.get(key.rpartition("_")[2], self._logger.event)
        write(key, value, metadata=metadata, time_ms=at, stack_offset=2)

    def cut(self, sequences: int, evaluated: int) -> None:
        """Remove what a checkpoint does not know: blocks evaluated after `evaluated` sequences.

        sequences: how many the checkpoint has learned from. It may have been resumed before.
        """
        lines: list[str] = []
        for line, event in zip(self.lines, self.events, strict=True):
            count = event.metadata.get("epoch_num", 0)
            if event.key == "eval_accuracy" and count > evaluated:
                del lines[-2:]  # start and stop of its block
            elif event.key != RESUMED or count < sequences:
                lines.append(line)
        self.lines[:] = lines

    def settle(self) -> None:
        """Write it to disk."""
        if self.path is None:
            return
        with new_file(self.path) as file:
            file.write("".join(f"{line}\n" for line in self.lines).encode())


@final
class _ListHandler(logging.Handler):
    """Appends log records to a list; MLPerf's library itself would only print."""

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
    # Not from getLogger: a logger outside the hierarchy, which no other handler listens to.
    logger = logging.Logger("packhorse.mlperf", logging.INFO)
    logger.addHandler(_ListHandler(lines))
    package = Path(__file__).resolve().parents[2]
    return MLLogger(logger, root_dir=re.escape(str(package)))


def begin(log: MlperfLog, entry: SubmissionEntry) -> None:
    """Log who submits, and the begin of initialization."""
    for name in SUBMISSION:
        log.add(f"submission_{name}", getattr(entry, name))
    log.add("init_start")


def describe(log: MlperfLog, job: TrainingJob) -> None:
    """Log the hyperparameters of the run."""
    settings = job.settings
    schedule = job.schedule
    manifest = feed.open_dataset(settings.train, "train").manifest
    beta1, beta2 = schedule.betas(0)
    values = {
        "seed": settings.seed,
        "max_sequence_length": manifest.layout.capacity,
        "global_batch_size": global_batch(settings),
        "gradient_accumulation_steps": job.feed.parts,
        "opt_base_learning_rate": settings.learning_rate,
        "opt_lamb_weight_decay_rate": settings.weight_decay,
        "opt_lamb_beta_1": beta1,
        "opt_lamb_beta_2": beta2,
        "opt_learning_rate_warmup_steps": schedule.warmup,
        "num_warmup_steps": schedule.warmup,
        "start_warmup_step": 0,
        "opt_learning_rate_training_steps": schedule.total,
        "opt_epsilon": settings.epsilon,
        "opt_lamb_learning_rate_decay_poly_power": settings.power,
    }
    for key in DESCRIPTION:
        log.add(key, values[key])


def global_batch(settings: TrainSettings) -> int:
    """Sequences per step, also if the recipe counts rows."""
    if settings.packing_keeps == "betas":
        return settings.batch
    manifest = feed.open_dataset(settings.train, "train").manifest
    return round(settings.batch * manifest.sequences / manifest.rows)


def start(log: MlperfLog, cleared: bool) -> None:
    """Log the end of initialization and the start of the clock.

    cleared: no page of the data is in memory.
    """
    log.add("cache_clear", cleared)
    log.add("init_stop")
    log.add("run_start")
    log.settle()


def clear_page_cache(settings: TrainSettings) -> bool:
    """Have the system drop cached pages of the data, as far as any user may."""
    if not hasattr(os, "posix_fadvise"):
        return False
    datasets = [feed.open_dataset(settings.train, "train"), feed.evaluation_dataset(settings)]
    for dataset in datasets:
        for path in dataset.folder.iterdir() if dataset is not None else ():
            if path.is_file():
                with path.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return True


def resume(log: MlperfLog, sequences: int, saved_ms: int) -> None:
    """Log that the run continues after this many sequences, from what was saved at `saved_ms`."""
    log.add(RESUMED, round((now() - saved_ms) / 1000, 3), epoch_num=sequences)
    log.settle()


def observer(log: MlperfLog, measure: str) -> Watch:
    """A function that logs the loop's status as blocks; `measure` is the accuracy."""
    last_status = now()

    def watch(status: RunStatus) -> None:
        nonlocal last_status
        if status.evaluation:
            _add_block(log, status.sequences, status.evaluation[measure], last_status)
        # Before an evaluation the loop reports the last step of its block.
        last_status = now()

    return watch


def _add_block(log: MlperfLog, sequences: int, accuracy: float, trained_ms: int) -> None:
    starts = [event for event in log.events if event.key in ("run_start", "eval_accuracy")]
    number = len(starts) - 1
    log.add("block_start", at=starts[-1].time_ms, epoch_count=1, first_epoch_num=number)
    log.add("block_stop", at=trained_ms, first_epoch_num=number)
    log.add("eval_accuracy", accuracy, epoch_num=sequences)
    log.settle()


def finish(
    log: MlperfLog, reached: bool, eval_samples: int, train_samples: int, compiled: int
) -> None:
    """Log the end of the run, which is the time of its last evaluation."""
    times = {event.key: event.time_ms for event in log.events}
    end = times.get("eval_accuracy", now())
    log.add(COMPILED, compiled, at=end)
    log.add("eval_samples", eval_samples, at=end)
    log.add("train_samples", train_samples, at=end)
    status = "success" if reached else "aborted"
    log.add("run_stop", at=end, status=status, TTT=(end - times["run_start"]) / 1000)
    log.settle()


# Checking


@dataclass(frozen=True, slots=True)
class LogRules:
    """What the log of a run must show; for the closed division see `closed_rules`."""

    target: float
    interval: int = 0  # sequences between evaluations; 0: not checked
    samples: int = 0  # sequences of an evaluation; 0: any number


def closed_rules(global_batch: int) -> LogRules:
    """The rules of the closed division."""
    return LogRules(TARGET, evaluation_interval(global_batch), CLOSED_SAMPLES)


def require_checker() -> None:
    """Raise if MLPerf's checker is not installed."""
    if find_spec("mlperf_logging") is None:
        raise MissingExtra("mlperf-logging", "train")


def check(path: Path, rules: LogRules) -> list[str]:
    """All problems of a log that MLPerf's checker or ours finds."""
    return [*checker_problems(path), *order_problems(read(path), rules)]


def checker_problems(path: Path, ruleset: str = RULESET) -> list[str]:
    """The problems that MLPerf's own checker finds."""
    require_checker()
    options = ("--usage", "training", "--ruleset", ruleset, "--log_output", os.devnull)
    command = [sys.executable, "-m", "mlperf_logging.compliance_checker", *options, str(path)]
    # In a session of its own: Ctrl-C is for the submission, which stops after the check.
    process = subprocess.run(command, capture_output=True, text=True, start_new_session=True)
    if process.returncode == 0:
        return []
    lines = [line.strip() for line in process.stderr.splitlines() if not line.startswith("INFO")]
    return [f"MLPerf's checker: {' '.join(filter(None, lines)) or process.returncode}"]


def order_problems(events: Sequence[LogEvent], rules: LogRules) -> list[str]:
    """Every departure from the order of events, times and evaluations."""
    known = [event for event in events if not event.key.startswith(OWN_PREFIX)]
    keys = tuple(event.key for event in known)
    header = keys[: len(HEADER)]
    rest = keys[len(HEADER) :]
    if header != HEADER:
        return [_first_difference(header, HEADER)]
    expected = (*BLOCK * max(1, rest.count(BLOCK[0])), *END)
    if rest != expected:
        return [_first_difference(rest, expected)]
    return [
        *_time_problems(known),
        *_block_problems(known),
        *_evaluation_problems(known, rules),
        *_end_problems(known, rules),
    ]


def _first_difference(keys: Sequence[str], expected: Sequence[str]) -> str:
    for number, key in enumerate(expected):
        if number >= len(keys):
            return f"the log ends before {key}"
        if keys[number] != key:
            return f"{keys[number]} stands where {key} is due"
    return f"{keys[len(expected)]} stands after the end"


def _time_problems(events: Sequence[LogEvent]) -> Iterator[str]:
    for earlier, later in pairwise(events):
        if later.time_ms < earlier.time_ms:
            yield f"{later.key} is {earlier.time_ms - later.time_ms} ms before {earlier.key}"


def _block_problems(events: Sequence[LogEvent]) -> Iterator[str]:
    for key in BLOCK[:2]:
        numbers = [e.metadata.get("first_epoch_num") for e in events if e.key == key]
        if numbers != list(range(len(numbers))):
            yield f"{key} counts {numbers}, not from 0 up"


def _evaluation_problems(events: Sequence[LogEvent], rules: LogRules) -> Iterator[str]:
    """Evaluations at the wrong time; a run that misses the target ends with an extra one."""
    evaluations = [event for event in events if event.key == "eval_accuracy"]
    counts = [event.metadata.get("epoch_num", -1) for event in evaluations]
    if counts != sorted(set(counts)) or counts[0] <= 0:
        yield f"evaluations are after {counts} sequences, which do not increase"
    wrong = [event.value for event in evaluations if not 0 <= event.value < 1]
    if wrong:
        yield f"accuracies must be 0 or more and below 1, not {wrong}"
    reached = [n for n, event in enumerate(evaluations) if event.value >= rules.target]
    if reached and reached[0] < len(evaluations) - 1:
        yield f"the target was reached after {counts[reached[0]]} sequences, and the run continued"
    regular = counts if reached else counts[:-1]
    for number, count in enumerate(regular, 1):
        if rules.interval and count // rules.interval != number:
            due = number * rules.interval
            yield f"evaluation {number} is after {count} sequences, not {due}"


def _end_problems(events: Sequence[LogEvent], rules: LogRules) -> Iterator[str]:
    last = [event for event in events if event.key == "eval_accuracy"][-1]
    eval_samples, train_samples, stop = events[-3:]
    if rules.samples and eval_samples.value != rules.samples:
        yield f"evaluations are on {eval_samples.value} sequences, not on {rules.samples}"
    if train_samples.value != last.metadata.get("epoch_num"):
        yield (
            f"train_samples is {train_samples.value}, but the last evaluation is after "
            f"{last.metadata.get('epoch_num')} sequences"
        )
    expected = "success" if last.value >= rules.target else "aborted"
    status = stop.metadata.get("status")
    if status != expected:
        yield f"the run says {status} at {last.value}, target {rules.target}: {expected}"
