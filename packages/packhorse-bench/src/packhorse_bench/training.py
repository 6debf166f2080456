"""Training side by side in one run: packed steps, and transformers with the same weights.

Two tasks. Pretraining as MLPerf has it: masked words and next sentences at Wikipedia's lengths up
to 512, LAMB, dropout of hidden states. Fine-tuning: a label for each sequence at SST-2's lengths,
AdamW; padded means to 128 there. On a GPU all compute in bf16 beside fp32 weights, on a CPU in
fp32.

What is fair here. All lanes have the same weights, sequences, masks and labels, the same global
batch in sequences and the same optimizer (`training_lanes` says what else); `loss`, of the first
batch before anything was learned, without dropout, shows that they compute the same. A round is
some steps of each lane, and lanes take turns, round after round, so that whatever else the machine
does falls on all of them alike; the clock covers copies to the device, forward, backward, clipping
and the update. Every lane runs a round beforehand, in which what is compiled is compiled; on a GPU
each turn begins with a step that is not timed, in which memory goes from one lane to the next.

MFU counts the arithmetic of real tokens (`train.cost`), the same for all lanes: padding is no work,
nor are the words that transformers scores where none is to be guessed. Memory is a lane's own
weights and optimizer and the most that a round took on top, where the device can say.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch

from packhorse import device as devices
from packhorse.errors import InputError
from packhorse.model.config import BertConfig
from packhorse.reports import subject
from packhorse.reports.tables import Table
from packhorse.train import cost
from packhorse.train.job import TrainingJob
from packhorse_bench import modes, training_lanes
from packhorse_bench.peers import failure_reason
from packhorse_bench.training_lanes import PEERS, TrainingLane
from packhorse_bench.training_stage import TrainingSetup, TrainingStage, open_stage

Progress = Callable[[int, int], None]
PRECISIONS = {
    "fp32": "fp32",
    "bf16": "bf16 beside fp32 weights",
    "float8": "float8 products, else bf16, beside fp32 weights; others in bf16",
}
TASKS = {"pretrain": "pretraining", "classify": "fine-tuning"}
OPTIMIZERS = {"pretrain": "LAMB", "classify": "AdamW"}


@dataclass(frozen=True)
class TrainRow:
    """The figures of one way to train, None if unknown; `problem` says why there are none."""

    way: str
    attention: str = ""
    sequences_per_second: float = 0.0  # of the median round
    best_sequences_per_second: float = 0.0
    tokens_per_second: float = 0.0  # real ones, of the median round
    best_tokens_per_second: float = 0.0
    over_padded: float | None = None  # times transformers padded (compiled, if it is there)
    best_over_padded: float | None = None
    fill: float = 0.0  # real tokens of those computed
    operations_per_second: float = 0.0  # of the median round
    mfu: float | None = None
    memory: int | None = None  # bytes, at most
    step_ms: float = 0.0  # median
    update_ms: float = 0.0  # the optimizer alone, median
    loss: float = 0.0  # before the first step, without dropout
    warm_up_seconds: float = 0.0
    problem: str | None = None

    @property
    def subject(self) -> str:
        """What the row is about, in words."""
        return self.way


@dataclass(frozen=True)
class TrainingComparison:
    """The rows of all ways, ours first, and the data that they trained on."""

    rows: tuple[TrainRow, ...]
    config: BertConfig
    device: torch.device
    dtype: str
    sequences: float  # a step
    tokens: float  # a sequence
    steps: int
    micro_tokens: int
    longest: int


@dataclass(frozen=True)
class TrainingTrial:
    """A loaded lane, and the time and memory of its rounds."""

    lane: TrainingLane
    held: int  # bytes that it keeps between rounds
    warm_up: float  # seconds
    seconds: list[float] = field(default_factory=list)  # of a round
    updates: list[float] = field(default_factory=list)  # seconds of the optimizer alone
    peaks: list[int] = field(default_factory=list)  # bytes at most, of its own


def measure(setup: TrainingSetup, progress: Progress | None = None) -> TrainingComparison:
    """Load and warm up all lanes, then time them in rounds."""
    _check(setup)
    device = devices.choose_device(setup.device)
    names = _peers(setup, device)
    before = _allocated(device)
    advance: Progress = progress or (lambda done, total: None)
    openings = 1 + len(names)
    with TemporaryDirectory(prefix="packhorse-bench-", ignore_cleanup_errors=True) as scratch:
        stage = open_stage(setup, device, Path(scratch))
        trials = [_begin(partial(training_lanes.ours, stage), device, before)]
        failures = []
        for done, name in enumerate(names, 1):
            advance(done, openings * (1 + setup.repeats))  # until it is known what runs
            outcome = _attempt(name, stage, device)
            trials += [outcome] if isinstance(outcome, TrainingTrial) else []
            failures += [outcome] if isinstance(outcome, TrainRow) else []
    turns = trials * setup.repeats
    advance(openings, openings + len(turns))
    with modes.settled_heap():
        for done, trial in enumerate(turns, openings + 1):
            _turn(trial, device)
            advance(done, openings + len(turns))
    return _comparison((*_rows(trials, stage.job), *failures), stage)


def _attempt(name: str, stage: TrainingStage, device: torch.device) -> TrainingTrial | TrainRow:
    """Load and warm up a peer; any error becomes its row."""
    try:
        return _begin(partial(PEERS[name], stage), device, _allocated(device))
    except Exception as error:
        reason = failure_reason(error)
    # The error held on to what the peer had in memory; the next one may need it.
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return TrainRow(training_lanes.title(name, stage.longest), problem=reason)


def _peers(setup: TrainingSetup, device: torch.device) -> tuple[str, ...]:
    if setup.peers is not None:
        return setup.peers
    if device.type == "cuda":
        return ("padded-compiled", "grouped", "padding-free")
    return ("padded", "grouped")


def _begin(open: Callable[[], TrainingLane], device: torch.device, before: int) -> TrainingTrial:
    """Load a lane and run one round of it, in which everything is compiled and allocated."""
    start = time.perf_counter()
    lane = open()
    for step in lane.steps:
        lane.step(step)
    lane.optimizer.zero_grad(set_to_none=True)
    devices.synchronize(device)
    seconds = time.perf_counter() - start
    return TrainingTrial(lane, max(0, _allocated(device) - before), seconds)


def _turn(trial: TrainingTrial, device: torch.device) -> None:
    """Time one round, and one more update with the gradients that it left."""
    lane = trial.lane
    before = _allocated(device)
    if device.type == "cuda":
        # The lane before left its memory in torch's cache. Emptied, it must be allocated again,
        # which takes time: a step outside the clock does that.
        torch.cuda.empty_cache()
        lane.step(lane.steps[0])
        torch.cuda.reset_peak_memory_stats(device)
    trial.seconds.append(_timed(lambda: [lane.step(step) for step in lane.steps], device))
    if device.type == "cuda":
        most = torch.cuda.max_memory_allocated(device)
        trial.peaks.append(most - before + trial.held)
    trial.updates.append(_timed(lane.optimizer.step, device))
    lane.optimizer.zero_grad(set_to_none=True)


def _timed(run: Callable[[], object], device: torch.device) -> float:
    devices.synchronize(device)
    start = time.perf_counter()
    run()
    devices.synchronize(device)
    return time.perf_counter() - start


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _rows(trials: Sequence[TrainingTrial], job: TrainingJob) -> list[TrainRow]:
    rows = [_row(trial, job) for trial in trials]
    slow = _baseline(rows)
    return [
        replace(
            row,
            over_padded=slow and row.sequences_per_second / slow.sequences_per_second,
            best_over_padded=slow
            and row.best_sequences_per_second / slow.best_sequences_per_second,
        )
        for row in rows
    ]


def _baseline(rows: Sequence[TrainRow]) -> TrainRow | None:
    """transformers padded in full: compiled, if that was measured."""
    padded = [row for row in rows if row.way.startswith("transformers, padded to")]
    return max(padded, key=lambda row: "compiled" in row.way, default=None)


def _row(trial: TrainingTrial, job: TrainingJob) -> TrainRow:
    lane = trial.lane
    best = min(trial.seconds)
    middle = median(trial.seconds)
    operations = cost.operations(job.checkpoint.config, lane.work) / middle
    peak = cost.peak(job.place.device)
    return TrainRow(
        way=lane.name,
        attention=lane.attention,
        sequences_per_second=lane.sequences / middle,
        best_sequences_per_second=lane.sequences / best,
        tokens_per_second=lane.work.tokens / middle,
        best_tokens_per_second=lane.work.tokens / best,
        fill=lane.work.fill,
        operations_per_second=operations,
        mfu=operations / peak if peak else None,
        memory=max(trial.peaks, default=None),
        step_ms=1e3 * middle / len(lane.steps),
        update_ms=1e3 * median(trial.updates),
        loss=lane.loss,
        warm_up_seconds=trial.warm_up,
    )


def _comparison(rows: tuple[TrainRow, ...], stage: TrainingStage) -> TrainingComparison:
    job = stage.job
    return TrainingComparison(
        rows=rows,
        config=job.checkpoint.config,
        device=job.place.device,
        dtype="float8" if job.place.float8 else devices.dtype_name(job.place.dtype),
        sequences=job.feed.batch,
        tokens=job.feed.tokens,
        steps=len(stage.steps),
        micro_tokens=stage.micro_tokens,
        longest=stage.longest,
    )


def describe(setup: TrainingSetup, comparison: TrainingComparison) -> dict[str, str]:
    """What was measured, in words."""
    config = comparison.config
    kind = "Wikipedia" if setup.task == "pretrain" else "SST-2"
    lengths = f"lengths of {Path(setup.histogram).name}" if setup.histogram else f"like {kind}"
    size = f"{config.layers} layers, {config.hidden_size} wide"
    return {
        "model": f"{subject.name(setup)} ({size})",
        "dtype": PRECISIONS[comparison.dtype],
        "workload": f"{TASKS[setup.task]}, {lengths}: {comparison.tokens:.1f} of at most "
        f"{comparison.longest} tokens, seed {setup.seed}",
        "batches": f"{comparison.sequences:,.1f} sequences per step, up to "
        f"{comparison.micro_tokens:,} tokens at once; {comparison.steps} steps per round, "
        f"medians of {setup.repeats} rounds",
        "learning": f"{OPTIMIZERS[setup.task]}, dropout {setup.dropout:g}",
    }


def table(rows: Sequence[TrainRow]) -> Table:
    """Measured ways; those with a problem are for `report.problems`."""
    columns = (
        "way",
        "attention",
        "seq/s",
        "best",
        "real tok/s",
        "x padded",
        "best x",
        "fill",
        "TFLOP/s",
        "MFU",
        "GiB",
        "step ms",
        "update ms",
        "loss",
    )
    return Table.of(
        columns,
        [
            (
                row.way,
                row.attention,
                _rate(row.sequences_per_second),
                _rate(row.best_sequences_per_second),
                _rate(row.tokens_per_second),
                _or_dash(row.over_padded, ".2f"),
                _or_dash(row.best_over_padded, ".2f"),
                f"{row.fill:.1%}",
                f"{row.operations_per_second / 1e12:,.3g}",
                _or_dash(row.mfu, ".1%"),
                _or_dash(row.memory and row.memory / 2**30, ".1f"),
                f"{row.step_ms:,.1f}",
                f"{row.update_ms:,.1f}",
                f"{row.loss:.4f}",
            )
            for row in rows
            if row.problem is None
        ],
    )


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


def _check(setup: TrainingSetup) -> None:
    if setup.task not in TASKS:
        raise InputError(f"unknown task {setup.task!r}; there are {', '.join(TASKS)}")
    for flag, value in {
        "--repeats": setup.repeats,
        "--batch": setup.batch,
        "--steps": setup.steps,
    }.items():
        if value is not None and value < 1:
            raise InputError(f"{flag} {value} measures nothing; pass 1 or more")
    if (setup.max_length is not None and setup.max_length < 8) or setup.micro_tokens < 0:
        raise InputError(
            f"--max-length ({setup.max_length}) must be 8 or more, --micro-tokens "
            f"({setup.micro_tokens}) 0 or more"
        )
    for name in setup.peers or ():
        if name not in PEERS:
            raise InputError(f"unknown peer {name!r}; there are {', '.join(PEERS)}")
    if setup.dtype not in (None, *PRECISIONS):
        known = ", ".join(PRECISIONS)
        raise InputError(f"training in {setup.dtype!r} is not measured; choose one of {known}")
