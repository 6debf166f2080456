"""The training loop, for every objective: steps, evaluations, checkpoints, resuming and the end.

    with stop_signals() as stop_signal:
        outcome = train(job, Path("runs/mini"), watch=show_status, stop_signal=stop_signal)

Figures stay on the device and are fetched every `log_every` steps, all at once; each step then gets
its line in the log. Whatever depends on sound weights (a checkpoint, an evaluation, the end)
fetches first, so a loss that is not finite is noticed before anything wrong is saved, with the step
and the rows it came from.

Resuming from a checkpoint equals never having stopped, to the bit: weights, optimizer, random
numbers, position in the data and in the log. An evaluation that was due when the run was stopped is
made first. (On CUDA the backward pass of FlashAttention adds in no fixed order, so two runs agree
to the bit only with a kernel that does, such as `reference`.)

A checkpoint is refused with another seed or other data, for which its position would mean nothing.
A finished run is refused other settings: nothing is left to train with them, and its files must go
on saying how its model was made. Everything else may change between two starts, with a note.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, final

import torch

from packhorse import checkpoint
from packhorse import device as devices
from packhorse.atomic import new_file
from packhorse.checkpoint.safetensors import read_tensors
from packhorse.errors import InputError, PackhorseError
from packhorse.train import checkpoints, cost, feed, journal, lora, optimizer_state
from packhorse.train.checkpoints import RunProgress, TrainingCheckpoint
from packhorse.train.job import TrainingJob
from packhorse.train.journal import (
    Journal,
    PendingStep,
    RunStatus,
    SpeedMeter,
    Watch,
    missing_log,
)
from packhorse.train.preparing import in_fp32
from packhorse.train.ranks import RankGroup
from packhorse.train.settings import TASK
from packhorse.train.step import set_rates, train_step

SETTINGS = "settings.toml"
MODEL = "model"  # the folder of the result
SPEEDS = ("sequences_per_second", "tokens_per_second", "fill", "mfu")
# Settings that change no figure, so they may differ between two starts without a note.
TRACKERS = ("tensorboard", "wandb")
LOCAL_SETTINGS = ("out", "device", "log_every", "save_every", "keep", "push", *TRACKERS)
SIGNALS = (signal.SIGINT, signal.SIGTERM)

StopSignal = Callable[[], int]  # the signal that asked to stop, or 0
Report = Callable[[str], None]  # is called with a note for the user


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """How a run ended."""

    step: int
    sequences: int
    tokens: int
    evaluation: dict[str, float]  # the last
    best: float | None  # best value of the measure
    reached: bool  # the target
    signal: int  # that stopped it; 0: it is finished
    model: Path | None  # folder of the result
    seconds: float  # in this process


@dataclass(frozen=True, slots=True)
class RunCounters:
    """What a run has counted so far; saved in its checkpoints."""

    sequences: int = 0
    tokens: int = 0
    log: int = 0  # bytes of the log
    evaluated: int = 0  # step of the last evaluation
    evaluated_sequences: int = 0  # and the sequences so far
    evaluation: dict[str, float] = field(default_factory=dict)
    best: float | None = None
    not_better: int = 0  # evaluations since the best one


@contextmanager
def stop_signals() -> Iterator[StopSignal]:
    """Turn Ctrl-C and SIGTERM into a request to stop after the current step, with a checkpoint.

    The function that is returned tells which signal came, 0 for none. A second signal ends the
    process at once. Python delivers signals to the main thread only; elsewhere none is caught.
    """
    received: list[int] = []

    def handle(number: int, frame: Any) -> None:
        if received:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        received.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield lambda: 0
        return
    handlers = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield lambda: received[0] if received else 0
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def train(
    job: TrainingJob,
    out: Path,
    *,
    resume: str = "auto",
    watch: Watch = lambda status: None,
    stop_signal: StopSignal = lambda: 0,
    report: Report = lambda note: None,
    ranks: RankGroup | None = None,
) -> RunOutcome:
    """Train to the end, or until `stop_signal` returns a signal; write everything to `out`.

    resume: "auto" resumes from the last complete checkpoint in `out`; "never" raises if there is
    one; a path names one, and if that belongs to another run, `out` must hold none. report: is
    called with notes for the user.
    """
    ranks = ranks or RankGroup()
    if resume not in ("auto", "never"):
        # Before a folder is created for the run.
        _refuse_missing(Path(resume))
    job = replace(job, optimizer=ranks.divide(job.model, job.optimizer))
    checkpoints.seed_rank(job.settings.seed, ranks.rank)
    with ExitStack() as stack:
        stack.enter_context(devices.current(job.place.device))
        ranks.on_rank_0(lambda: stack.enter_context(checkpoints.claim(out)))
        run = _TrainingRun(job, out, watch, stop_signal, ranks)
        try:
            for note in run.begin(_choose_checkpoint(out, resume, ranks)):
                report(note)
            return run.to_the_end()
        finally:
            run.journal.close()


@final
class _TrainingRun:
    """A run between two steps."""

    def __init__(
        self,
        job: TrainingJob,
        out: Path,
        watch: Watch,
        stop_signal: StopSignal,
        ranks: RankGroup,
    ) -> None:
        self.job = job
        self.out = out
        self.watch = watch
        self.stop_signal = stop_signal
        self.ranks = ranks
        self.step = 0
        self.cursor: dict[str, Any] | None = None
        self.counters = RunCounters()
        self.pending: list[PendingStep] = []
        self.saved: tuple[int, int] | None = None  # step, and step of its last evaluation
        self.last_checkpoint: Path | None = None
        self.has_trained = False  # a step at least, in this process
        self.start_time = time.perf_counter()
        self.meter = SpeedMeter()
        self.journal = Journal(None)

    def begin(self, saved: TrainingCheckpoint | None) -> list[str]:
        """Resume from a checkpoint, or start; returns notes for the user.

        A start that trains nothing leaves the run's files as they are: the settings are written
        again only before the first step that uses them (`_train_step`).
        """
        notes = [] if saved is None else self._restore(saved)
        is_new = not (self.out / SETTINGS).exists()
        if self._is_over() and not self._evaluation_is_due() and not is_new:
            return [*notes, f"finished at step {self.step:,}: nothing is left to train"]
        if saved is not None:
            notes.append(f"resuming after step {self.step:,}")
        if self.ranks.rank == 0:
            if missing := missing_log(self.out, self.counters.log):
                notes.append(missing)
            settings = self.job.settings
            self.journal = Journal(
                self.out,
                self.counters.log,
                tensorboard=settings.tensorboard,
                wandb=settings.wandb,
                settings=asdict(settings),
            )
            if is_new:
                self._write_settings()
        return notes

    def _write_settings(self) -> None:
        with new_file(self.out / SETTINGS) as file:
            file.write(self.job.settings.toml().encode())

    def _restore(self, saved: TrainingCheckpoint) -> list[str]:
        job = self.job
        ranks = self.ranks
        _refuse_another_seed(saved, job)
        _refuse_other_data(saved, job)
        self.step = saved.step
        self.cursor = saved.progress.cursor or None
        self.counters = RunCounters(**saved.progress.counters)
        if self._is_over():
            _refuse_other_settings(saved, job, self.out, ranks)
        if _is_foreign(saved.path, self.out):
            self.counters = replace(self.counters, log=0)  # its bytes are in that run's log
        set_rates(job, max(0, self.step - 1))  # as they were when the checkpoint was written
        saved = checkpoints.restore(
            saved, job.model, job.optimizer, rank=ranks.rank, world=ranks.world
        )
        self.saved = (self.step, self.counters.evaluated)
        self.last_checkpoint = saved.path
        return [*saved.notes, *changed_settings(saved, job)]

    def to_the_end(self) -> RunOutcome:
        """Step by step; whatever is due between two steps comes first."""
        steps = self.job.feed.steps(self.cursor)
        self.meter = SpeedMeter()
        while True:
            signalled = self._signalled()
            if not signalled and self._evaluation_is_due():
                self._evaluate()
            if signalled or self._is_over() or self._save_is_due():
                self._save()
            if signalled or self._is_over():
                return self._outcome(signalled)
            self._train_step(next(steps))

    def _train_step(self, step: feed.StepBatches) -> None:
        job = self.job
        if not self.has_trained and self.ranks.rank == 0:
            self._write_settings()
        self.has_trained = True
        set_rates(job, self.step)
        result = train_step(job, step, self.ranks)
        self.step += 1
        self.cursor = dict(step.after)
        self.counters = replace(
            self.counters,
            sequences=self.counters.sequences + result.sequences,
            tokens=self.counters.tokens + result.tokens,
        )
        self.meter.add(result.work, result.sequences, result.tokens)
        self.pending.append(
            PendingStep(
                number=self.step,
                rate=job.schedule.rate(self.step - 1),
                sequences=self.counters.sequences,
                tokens=self.counters.tokens,
                names=result.names,
                row=result.row,
                describe_data=job.feed.describe(step),
            )
        )
        if self.step % job.settings.log_every == 0:
            self._fetch()

    def _fetch(self) -> None:
        """Fetch the figures of all pending steps from the device, and log them."""
        if not self.pending:
            return
        pending = self.pending
        self.pending = []
        lines = []
        for step, row in zip(pending, journal.fetch(pending, self.ranks.add), strict=True):
            journal.refuse_nonfinite(step, row, self.last_checkpoint)
            lines.append(journal.log_line(step, row))
            self.journal.step(step.number, lines[-1])
        status = replace(self._status(), **journal.displayed_means(lines), **self._speeds())
        speeds = {name: getattr(status, name) for name in SPEEDS}
        speeds = {name: value for name, value in speeds.items() if value is not None}
        speeds["seconds"] = time.perf_counter() - self.start_time
        speeds["devices"] = self.ranks.world
        self.journal.speed(self.step, speeds)
        self.watch(status)
        self.meter = SpeedMeter()

    def _status(self) -> RunStatus:
        steps = max(self.job.schedule.steps, self.step)
        return RunStatus(self.step, steps, loss=math.nan, sequences=self.counters.sequences)

    def _speeds(self) -> dict[str, Any]:
        """Speeds since the last fetch; evaluations and checkpoints are not included."""
        meter = self.meter
        seconds = meter.seconds()
        operations = cost.operations(self.job.checkpoint.config, meter.work) / seconds
        peak = cost.peak(self.job.place.device)
        return {
            "sequences_per_second": meter.sequences / seconds,
            "tokens_per_second": meter.tokens / seconds,
            "fill": meter.work.fill,
            "mfu": operations / peak if peak else None,
        }

    def _is_over(self) -> bool:
        max_sequences = self.job.settings.max_sequences
        if 0 < max_sequences <= self.counters.sequences:
            return True
        if 0 < self.job.settings.patience <= self.counters.not_better:
            return True
        return 0 < self.job.schedule.limit <= self.step or self._has_reached_target()

    def _has_reached_target(self) -> bool:
        """Did the last evaluation reach the target? A resumed run may have a different target."""
        value = self.counters.evaluation.get(self.job.measure)
        target = self.job.settings.target
        return bool(target) and value is not None and not self.job.prefers(target, value)

    def _evaluation_is_due(self) -> bool:
        settings = self.job.settings
        counters = self.counters
        if self.job.feed.evaluate_on is None:
            return False
        if self.step == 0:
            return settings.eval_first and not counters.evaluation
        if counters.evaluated == self.step:
            return False
        if settings.eval_every and self.step % settings.eval_every == 0:
            return True
        interval = settings.eval_every_sequences
        if interval and counters.sequences // interval > counters.evaluated_sequences // interval:
            return True
        return self._is_over()

    def _evaluate(self) -> None:
        job = self.job
        counters = self.counters
        self._fetch()
        job.optimizer.zero_grad(set_to_none=True)  # the compiler refuses fp32 gradients of bf16
        measures = job.objective.evaluate(job.model, self._eval_batches(), self.ranks.gather)
        if job.measure not in measures:
            raise InputError(
                f"there is no measure {job.measure!r}; there are {', '.join(measures)}"
            )
        value = measures[job.measure]
        is_better = job.prefers(value, counters.best)
        self.counters = replace(
            counters,
            evaluated=self.step,
            evaluated_sequences=counters.sequences,
            evaluation=measures,
            best=value if is_better else counters.best,
            not_better=0 if is_better else counters.not_better + 1,
        )
        self.journal.evaluation(self.step, counters.sequences, measures)
        self.watch(replace(self._status(), evaluation=measures))
        if is_better:
            self._save()
        self.meter = SpeedMeter()

    def _eval_batches(self) -> Iterator[Any]:
        shape = self.job.feed.eval_shape if self.job.compiled else None
        for batch in self.job.feed.evaluate_on() if self.job.feed.evaluate_on else ():
            yield feed.to_device(batch, self.job.place.device, shape)

    def _save_is_due(self) -> bool:
        interval = self.job.settings.save_every
        return interval > 0 and self.step % interval == 0

    def _save(self) -> None:
        """Write a checkpoint of this moment, unless there is one or nothing was trained yet."""
        if not self.step or self.saved == (self.step, self.counters.evaluated):
            return
        self._fetch()
        job = self.job
        ranks = self.ranks
        self.counters = replace(self.counters, log=self.journal.settle())
        optimizer_state.consolidate(job.optimizer)
        rng = ranks.gather([checkpoints.capture_rng(job.place.device)])
        write = partial(
            checkpoints.save,
            self.out,
            job.checkpoint,
            job.optimizer,
            self._progress(),
            rng,
            keep=job.settings.keep,
            best=job.best,
        )
        self.last_checkpoint = Path(ranks.on_rank_0(lambda: str(write())))
        self.saved = (self.step, self.counters.evaluated)
        self.meter = SpeedMeter()

    def _progress(self) -> RunProgress:
        counters = self.counters
        return RunProgress(
            step=self.step,
            cursor=self.cursor or {},
            counters=asdict(counters),
            metrics=counters.evaluation if counters.evaluated == self.step else {},
            config=asdict(self.job.settings),
        )

    def _signalled(self) -> int:
        """The signal that asks to stop, whichever rank received it."""
        received = self.stop_signal()
        is_anywhere = int(self.ranks.add(torch.tensor([received])))
        return received or (int(signal.SIGTERM) if is_anywhere else 0)

    def _outcome(self, signalled: int) -> RunOutcome:
        return RunOutcome(
            step=self.step,
            sequences=self.counters.sequences,
            tokens=self.counters.tokens,
            evaluation=self.counters.evaluation,
            best=self.counters.best,
            reached=self._has_reached_target(),
            signal=signalled,
            model=None if signalled else self._write_result(),
            seconds=time.perf_counter() - self.start_time,
        )

    def _write_result(self) -> Path:
        """Write the trained model in fp32, and return its folder."""
        job = self.job
        ranks = self.ranks
        if job.settings.write == "best":
            best = ranks.on_rank_0(lambda: str(checkpoints.best_of(self.out, job.best) or ""))
            if best:
                checkpoints.restore(
                    best, job.model, job.optimizer, rank=ranks.rank, world=ranks.world
                )
        optimizer_state.consolidate(job.optimizer)
        return Path(ranks.on_rank_0(lambda: str(self._write_model())))

    def _write_model(self) -> Path:
        folder = self.out / MODEL
        if lora.is_adapted(self.job.model):
            return self._write_adapter(folder)
        result = in_fp32(self.job.checkpoint, self.job.optimizer)
        if _holds(folder, result):
            return folder
        return checkpoint.write(folder, result, overwrite=True)

    def _write_adapter(self, folder: Path) -> Path:
        """Write the adapter from its master weights, unless it is there."""
        masters, _ = optimizer_state.dismantle(self.job.optimizer, self.job.model)
        result = lora.tensors(self.job.model, masters)
        if (folder / lora.WEIGHTS).is_file():
            stored = read_tensors(folder, lora.WEIGHTS)
            if stored.keys() == result.keys() and all(stored[n].equal(result[n]) for n in result):
                return folder
        return lora.write(folder, self.job.checkpoint, masters, overwrite=True)


def _holds(folder: Path, result: checkpoint.Checkpoint) -> bool:
    """Does the folder hold this model to the bit, as when a finished run is started again?"""
    if not folder.is_dir():
        return False
    try:
        stored = checkpoint.load(folder, dtype=None, allow_nonfinite=True).model.state_dict()
    except PackhorseError:
        return False
    # A loaded folder may have more heads than were trained: all that its weights suffice for.
    return all(
        name in stored and stored[name].dtype == tensor.dtype and stored[name].equal(tensor)
        for name, tensor in result.model.state_dict().items()
    )


# Resuming


def _choose_checkpoint(out: Path, resume: str, ranks: RankGroup) -> TrainingCheckpoint | None:
    """The checkpoint to resume from, if any; rank 0 chooses for all."""
    local: list[TrainingCheckpoint] = []

    def find() -> str | None:
        saved = _find_checkpoint(out, resume)
        if saved is None:
            return None
        local.append(saved)
        return str(saved.path)

    path = ranks.on_rank_0(find)
    if local:
        return local[0]
    return checkpoints.read(Path(path)) if path else None


def _find_checkpoint(out: Path, resume: str) -> TrainingCheckpoint | None:
    if resume not in ("auto", "never"):
        return _named_checkpoint(Path(resume), out)
    saved = checkpoints.newest(out)
    if saved and resume == "never":
        raise InputError(
            f"{out} holds a run that has reached step {saved.step}; continue it with --resume "
            "auto, or name another folder"
        )
    return saved


def _named_checkpoint(path: Path, out: Path) -> TrainingCheckpoint:
    """The checkpoint that the user named; one of another run starts a new run in `out`."""
    has_run = bool(checkpoints.list_checkpoints(out)) or (out / MODEL).exists()
    if _is_foreign(path, out) and has_run:
        raise InputError(
            f"{out} holds another run than {path}, which would be lost; choose another --out, or "
            "continue the run that is there with --resume auto"
        )
    return checkpoints.read(path)


def _refuse_missing(path: Path) -> None:
    if not path.exists():
        siblings = [folder.name for _, folder in checkpoints.list_checkpoints(path.parent)]
        names = ", ".join(reversed(siblings)) or "no checkpoint"
        raise InputError(f"{path} does not exist; in {path.parent} there is {names}")


def _is_foreign(path: Path, out: Path) -> bool:
    """Does the checkpoint belong to a run in another folder?"""
    return path.resolve().parent != out.resolve()


def _refuse_another_seed(saved: TrainingCheckpoint, job: TrainingJob) -> None:
    """A position in the data means something else with another seed."""
    now = job.settings.seed
    then = saved.progress.config.get("seed", now)
    if then != now:
        raise InputError(
            f"the seed is {now}, but {saved.path} was written with {then}; use --seed {then} or "
            "another --out"
        )


def _refuse_other_data(saved: TrainingCheckpoint, job: TrainingJob) -> None:
    """A position in one dataset means nothing in another."""
    cursor = saved.progress.cursor
    settings = job.settings
    if not cursor or cursor.get("dataset", cursor.get("set")) in job.feed.data:
        return
    data_settings = [item.name for item in fields(settings) if item.metadata["group"] == TASK]
    changes = [
        note for note in changed_settings(saved, job) if note.partition(" ")[0] in data_settings
    ]
    reason = "; ".join(changes) or f"the content of {settings.train} has changed since"
    raise InputError(
        f"{saved.path} learned from other data ({reason}). Resume with that data, or start a new "
        f"run with its weights: --model {saved.path} and another --out"
    )


def _refuse_other_settings(
    saved: TrainingCheckpoint, job: TrainingJob, out: Path, ranks: RankGroup
) -> None:
    """The files of a finished run must go on saying how its model was made."""
    changes = changed_settings(saved, job)
    if changes and ranks.on_rank_0((out / MODEL).is_dir):
        raise InputError(
            f"{out} is finished, at step {saved.step}, and nothing is left to train with other "
            f"settings: {'; '.join(changes)}. Use the settings it had, raise what ends it (steps, "
            "epochs, max_sequences, target) to continue, or choose another --out"
        )


def changed_settings(saved: TrainingCheckpoint, job: TrainingJob) -> list[str]:
    """Notes about settings that differ from those of the checkpoint."""
    then = saved.progress.config
    # JSON has no tuples.
    now = {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(job.settings).items()}
    return [
        f"{name} is now {value!r}; it was {then[name]!r} when {saved.path.name} was written"
        for name, value in now.items()
        if name not in LOCAL_SETTINGS and name in then and then[name] != value
    ]
