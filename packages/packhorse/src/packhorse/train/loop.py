"""The one loop, for every objective: steps, evaluations, checkpoints, and how it ends.

    with wishes() as wish, watching(note) as watch:
        outcome = train(job, Path("runs/mini"), watch=watch, wish=wish)

Figures stay on the device and are fetched every `log_every` steps, all at once; each step then gets
its own line in the log. Whatever must be sure of the weights (a checkpoint, an evaluation, the end)
fetches first, so a loss that is no number is found before anything wrong is kept, with the step and
the rows it came from.

Going on from a checkpoint is the same as never having stopped, to the bit: weights, optimizer,
random numbers, place in the data, place in the log. An evaluation that was due when the run was
stopped is made up for first. (On CUDA FlashAttention's backward pass adds in no fixed order, so two
runs agree to the bit only with a kernel that does, such as `reference`.)
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, final

import torch

from packhorse import checkpoint
from packhorse.atomic import new_file
from packhorse.errors import InputError, PackhorseError
from packhorse.train import cost, feed, figures, randomness, resuming, state
from packhorse.train.display import Shown, Watch
from packhorse.train.figures import Clock, Waiting
from packhorse.train.job import Job
from packhorse.train.journal import Journal, missing_log
from packhorse.train.learning import learn, tune
from packhorse.train.preparing import in_full
from packhorse.train.ranks import Ranks

SETTINGS = "settings.toml"
SPEEDS = ("sequences_per_second", "tokens_per_second", "fill", "mfu")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended."""

    step: int
    sequences: int
    tokens: int
    evaluation: dict[str, float]  # the last
    best: float | None  # of the measure
    reached: bool  # the target
    signal: int  # that stopped it; 0: it is finished
    model: Path | None  # the folder of the result
    seconds: float  # of this process


@dataclass(frozen=True, slots=True)
class Counters:
    """What a run has counted so far; goes into its checkpoints."""

    sequences: int = 0
    tokens: int = 0
    log: int = 0  # bytes of it
    evaluated: int = 0  # at which step, last
    evaluated_sequences: int = 0
    evaluation: dict[str, float] = field(default_factory=dict)
    best: float | None = None


def train(
    job: Job,
    out: Path,
    *,
    resume: str = "auto",
    watch: Watch = lambda shown: None,
    wish: Callable[[], int] = lambda: 0,
    say: Callable[[str], None] = lambda note: None,
    ranks: Ranks | None = None,
) -> Outcome:
    """Train to the end, or until `wish` tells of a signal; `out` gets all that comes of it.

    resume: "auto" goes on from the last whole checkpoint in `out`, "never" insists that there is
    none, a path names one; if it is another run's, `out` must hold none. say: is told what a user
    should know.
    """
    ranks = ranks or Ranks()
    if resume not in ("auto", "never"):
        resuming.refuse_nowhere(Path(resume))
    job = replace(job, optimizer=ranks.divide(job.model, job.optimizer))
    randomness.begin(job.settings.seed, ranks.rank)
    with ExitStack() as held:
        ranks.lead(lambda: held.enter_context(state.claim(out)))
        run = _Run(job, out, watch, wish, ranks)
        try:
            for note in run.take_up(resuming.choose(out, resume, ranks)):
                say(note)
            return run.to_the_end()
        finally:
            run.journal.close()


@final
class _Run:
    """A run between two steps."""

    def __init__(
        self, job: Job, out: Path, watch: Watch, wish: Callable[[], int], ranks: Ranks
    ) -> None:
        self.job, self.out, self.watch, self.wish, self.ranks = job, out, watch, wish, ranks
        self.step, self.cursor, self.counters = 0, None, Counters()
        self.waiting: list[Waiting] = []
        self.saved: tuple[int, int] | None = None  # the step, and that of its last evaluation
        self.last: Path | None = None  # the checkpoint
        self.learned = False  # by this start, a step at least
        self.begun, self.clock = time.perf_counter(), Clock()
        self.journal = Journal(None)

    def take_up(self, found: state.Saved | None) -> list[str]:
        """Go on from a checkpoint, or begin; notes say what a user should know.

        A start that trains nothing leaves what the run wrote down as it is: the settings are
        written again only before the first step that is learned with them (`_learn`).
        """
        notes = [] if found is None else self._restore(found)
        begins = not (self.out / SETTINGS).exists()
        if self._is_over() and not self._evaluation_is_due() and not begins:
            return [*notes, f"finished at step {self.step:,}: nothing is left to train"]
        if found is not None:
            notes.append(f"going on behind step {self.step:,}")
        if self.ranks.rank == 0:
            if missing := missing_log(self.out, self.counters.log):
                notes.append(missing)
            self.journal = Journal(self.out, self.counters.log, self.job.settings.tensorboard)
            if begins:
                self._write_settings()
        return notes

    def _write_settings(self) -> None:
        with new_file(self.out / SETTINGS) as file:
            file.write(self.job.settings.toml().encode())

    def _restore(self, found: state.Saved) -> list[str]:
        job, ranks = self.job, self.ranks
        resuming.refuse_another_seed(found, job)
        resuming.refuse_other_data(found, job)
        self.step, self.cursor = found.step, found.progress.cursor or None
        self.counters = Counters(**found.progress.counters)
        if self._is_over():
            resuming.refuse_other_settings(found, job, self.out, ranks)
        if resuming.is_foreign(found.path, self.out):
            self.counters = replace(self.counters, log=0)  # its bytes are in that run's log
        tune(job, max(0, self.step - 1))  # as it was when this was written
        who = {"rank": ranks.rank, "world": ranks.world}
        found = state.restore(found, job.model, job.optimizer, **who)
        self.saved, self.last = (self.step, self.counters.evaluated), found.path
        return [*found.notes, *resuming.changes(found, job)]

    def to_the_end(self) -> Outcome:
        """Step by step; whatever is due between two steps comes first."""
        steps = self.job.feed.steps(self.cursor)
        self.clock = Clock()
        while True:
            signalled = self._signalled()
            if not signalled and self._evaluation_is_due():
                self._evaluate()
            if signalled or self._is_over() or self._save_is_due():
                self._save()
            if signalled or self._is_over():
                return self._outcome(signalled)
            self._learn(next(steps))

    def _learn(self, step: feed.Step) -> None:
        job, so_far = self.job, self.counters
        if not self.learned and self.ranks.rank == 0:
            self._write_settings()
        self.learned = True
        tune(job, self.step)
        done = learn(job, step, self.ranks)
        self.step, self.cursor = self.step + 1, dict(step.behind)
        sequences, tokens = so_far.sequences + done.sequences, so_far.tokens + done.tokens
        self.counters = replace(so_far, sequences=sequences, tokens=tokens)
        self.clock.add(done.work, done.sequences, done.tokens)
        rate, named = job.pace.rate(self.step - 1), job.feed.naming(step)
        told = (self.step, rate, sequences, tokens, done.names, done.row, named)
        self.waiting.append(Waiting(*told))
        if self.step % job.settings.log_every == 0:
            self._fetch()

    def _fetch(self) -> None:
        """Ask the device for the figures of all steps that wait, and write them down."""
        if not self.waiting:
            return
        waiting, self.waiting = self.waiting, []
        lines = []
        for each, row in zip(waiting, figures.fetch(waiting, self.ranks.add), strict=True):
            figures.refuse_nonfinite(each, row, self.last)
            lines.append(figures.line(each, row))
            self.journal.step(each.number, lines[-1])
        shown = replace(self._shown(), **figures.seen(lines), **self._speeds())
        told = {name: getattr(shown, name) for name in SPEEDS if getattr(shown, name) is not None}
        told |= {"seconds": time.perf_counter() - self.begun, "devices": self.ranks.world}
        self.journal.speed(self.step, told)
        self.watch(shown)
        self.clock = Clock()

    def _shown(self) -> Shown:
        steps = max(self.job.pace.steps, self.step)
        return Shown(self.step, steps, loss=math.nan, sequences=self.counters.sequences)

    def _speeds(self) -> dict[str, Any]:
        """Since the last look; evaluations and checkpoints are not in it."""
        clock, seconds = self.clock, self.clock.seconds()
        operations = cost.operations(self.job.checkpoint.config, clock.work) / seconds
        peak = cost.peak(self.job.place.device)
        return {
            "sequences_per_second": clock.sequences / seconds,
            "tokens_per_second": clock.tokens / seconds,
            "fill": clock.work.fill,
            "mfu": operations / peak if peak else None,
            "left": max(0, self.job.pace.steps - self.step) * seconds / max(1, clock.steps),
        }

    def _is_over(self) -> bool:
        most, limit = self.job.settings.max_sequences, self.job.pace.limit
        counted = 0 < most <= self.counters.sequences
        return counted or 0 < limit <= self.step or self._has_reached()

    def _has_reached(self) -> bool:
        """Did the last evaluation meet the target? A run that goes on may have another one."""
        value, target = self.counters.evaluation.get(self.job.measure), self.job.settings.target
        return bool(target) and value is not None and not self.job.prefers(target, value)

    def _evaluation_is_due(self) -> bool:
        settings, so_far = self.job.settings, self.counters
        if self.job.feed.evaluate_on is None or so_far.evaluated == self.step:
            return False
        by_step = settings.eval_every and self.step % settings.eval_every == 0
        every = settings.eval_every_sequences
        by_sequence = every and so_far.sequences // every > so_far.evaluated_sequences // every
        return bool(by_step or by_sequence or self._is_over())

    def _evaluate(self) -> None:
        job, so_far = self.job, self.counters
        self._fetch()
        job.optimizer.zero_grad(set_to_none=True)  # the compiler refuses fp32 gradients of bf16
        measures = job.objective.evaluate(job.model, self._held_out(), self.ranks.gather)
        if job.measure not in measures:
            raise InputError(
                f"there is no measure {job.measure!r}; there are {', '.join(measures)}"
            )
        value = measures[job.measure]
        better = job.prefers(value, so_far.best)
        self.counters = replace(
            so_far,
            evaluated=self.step,
            evaluated_sequences=so_far.sequences,
            evaluation=measures,
            best=value if better else so_far.best,
        )
        self.journal.evaluation(self.step, so_far.sequences, measures)
        self.watch(replace(self._shown(), evaluation=measures))
        if better:
            self._save()
        self.clock = Clock()

    def _held_out(self) -> Iterator[Any]:
        shape = self.job.feed.eval_shape if self.job.compiled else None
        for batch in self.job.feed.evaluate_on() if self.job.feed.evaluate_on else ():
            yield feed.placed(batch, self.job.place.device, shape)

    def _save_is_due(self) -> bool:
        every = self.job.settings.save_every
        return every > 0 and self.step % every == 0

    def _save(self) -> None:
        """A checkpoint of this moment, unless there is one or nothing was learned yet."""
        if not self.step or self.saved == (self.step, self.counters.evaluated):
            return
        self._fetch()
        job, ranks = self.job, self.ranks
        self.counters = replace(self.counters, log=self.journal.settle())
        state.consolidate(job.optimizer)
        rng = ranks.gather([state.capture(job.place.device)])
        write = partial(state.save, self.out, job.checkpoint, job.optimizer)
        write = partial(write, self._progress(), rng, keep=job.settings.keep, best=job.best)
        self.last = Path(ranks.lead(lambda: str(write())))
        self.saved = (self.step, self.counters.evaluated)
        self.clock = Clock()

    def _progress(self) -> state.Progress:
        so_far = self.counters
        return state.Progress(
            step=self.step,
            cursor=self.cursor or {},
            counters=asdict(so_far),
            metrics=so_far.evaluation if so_far.evaluated == self.step else {},
            config=asdict(self.job.settings),
        )

    def _signalled(self) -> int:
        """The signal that asks to stop, at whichever rank it came."""
        mine = self.wish()
        anywhere = int(self.ranks.add(torch.tensor([mine])))
        return mine or (int(signal.SIGTERM) if anywhere else 0)

    def _outcome(self, signalled: int) -> Outcome:
        so_far = self.counters
        model = None if signalled else self._write()
        return Outcome(
            *(self.step, so_far.sequences, so_far.tokens, so_far.evaluation),
            *(so_far.best, self._has_reached(), signalled, model),
            time.perf_counter() - self.begun,
        )

    def _write(self) -> Path:
        """The result, in fp32, for whoever uses models."""
        job, ranks = self.job, self.ranks
        if job.settings.write == "best":
            best = ranks.lead(lambda: str(state.best_of(self.out, job.best) or ""))
            if best:
                who = {"rank": ranks.rank, "world": ranks.world}
                state.restore(best, job.model, job.optimizer, **who)
        state.consolidate(job.optimizer)
        return Path(ranks.lead(lambda: str(self._written())))

    def _written(self) -> Path:
        result = in_full(self.job.checkpoint, self.job.optimizer)
        folder = self.out / resuming.MODEL
        return (
            folder if _holds(folder, result) else checkpoint.write(folder, result, overwrite=True)
        )


def _holds(folder: Path, result: checkpoint.Checkpoint) -> bool:
    """Is it there already, to the bit, as where a finished run is started again?"""
    if not folder.is_dir():
        return False
    try:
        there = checkpoint.load(folder, dtype=None, allow_nonfinite=True).model.state_dict()
    except PackhorseError:
        return False
    # Read back, a folder may have heads more: all that its weights are enough for.
    return all(
        name in there and there[name].dtype == tensor.dtype and there[name].equal(tensor)
        for name, tensor in result.model.state_dict().items()
    )
