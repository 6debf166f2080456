"""A submission to MLPerf: the same recipe run with seed after seed, and what the logs say together.

    plan = Plan(Path("results"), settings, entry, runs=10, start_seed=42)
    for result in carry_out(plan): …

    results/bert/result_0.txt …        the logs
    results/runs/run_0 …               what each run left: log.jsonl, settings.toml, model
    results/submission.json            what is run; a folder holds one submission

A run is finished when its log says so, and is then never touched again; one that was interrupted
goes on from its last checkpoint, with the log cut back to what that knows. So the same command,
given again, goes on where it was stopped, and with more runs it adds those. Checkpoints of a
finished run go: ten runs of BERT-Large would keep a hundred gigabytes of them.

All runs share a process: what the first one compiled serves the others, and each log says how many
graphs were compiled for it. MLPerf's result is the mean time without the best and the worst run; a
run that missed the target counts as the worst there is.
"""

from __future__ import annotations

import gc
import json
import math
import shutil
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from packhorse import executable
from packhorse.atomic import lock, new_file
from packhorse.errors import InputError, PackhorseError
from packhorse.train import compliance, feed, folders, mlperf, state
from packhorse.train.compliance import Rules
from packhorse.train.display import Shown, Watch
from packhorse.train.figures import Diverged
from packhorse.train.job import MEASURES, Job, assemble
from packhorse.train.loop import Counters, Outcome, train
from packhorse.train.mlperf import Entry, Event, Log
from packhorse.train.presets import TARGET, evaluation_interval
from packhorse.train.ranks import Ranks
from packhorse.train.resuming import HERE
from packhorse.train.settings import Settings
from packhorse.train.warmup import warm

PLAN, LOCK = "submission.json", "lock"
DIVISIONS = ("closed", "open")
Say = Callable[[str], None]


class Refused(PackhorseError):
    """The runs are done, and not all of them can be submitted."""

    exit_code = 5


class Interrupted(PackhorseError):
    """A signal asked to stop; the run that was under way has a checkpoint."""

    def __init__(self, number: int, outcome: Outcome) -> None:
        super().__init__(f"run {number} was stopped behind step {outcome.step:,}")
        self.signal = outcome.signal


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be run; `settings` as `completed` gives them."""

    out: Path
    settings: Settings
    entry: Entry
    runs: int
    start_seed: int

    def log(self, number: int) -> Path:
        """Of a run, counted from 0."""
        return self.out / self.entry.benchmark / f"result_{number}.txt"

    def folder(self, number: int) -> Path:
        """What else the run leaves."""
        return self.out / "runs" / f"run_{number}"

    @property
    def rules(self) -> Rules:
        """What each log is held to."""
        if self.entry.division == "closed":
            return compliance.closed(mlperf.global_batch(self.settings))
        return Rules(self.settings.target, self.settings.eval_every_sequences)


@dataclass(frozen=True, slots=True)
class Result:
    """What the log of a finished run says."""

    run: int
    seed: int
    reached: bool
    seconds: float  # from run_start to run_stop, as MLPerf counts: pauses included
    paused: float  # seconds of these between a checkpoint and its being taken up again
    sequences: int
    accuracies: tuple[tuple[int, float], ...]  # sequences learned from, and what was measured
    compiled: int  # graphs, for this run
    problems: tuple[str, ...]  # none: the log is accepted


def completed(settings: Settings) -> Settings:
    """The settings with MLPerf's target and interval where the recipe has none, checked."""
    if settings.task != "pretrain":
        raise InputError(f"task is {settings.task!r}; MLPerf's BERT is submitted as pretrain")
    if settings.division not in DIVISIONS:
        raise InputError(f"division is {settings.division!r}; there are closed and open")
    if "loss" in settings.measure:
        raise InputError(f"measure is {settings.measure!r}; a submission's is an accuracy")
    batch = mlperf.global_batch(settings)
    filled: dict[str, Any] = {"measure": settings.measure or MEASURES["pretrain"][0]}
    if not settings.target:
        filled["target"] = TARGET
    if not (settings.eval_every or settings.eval_every_sequences):
        filled["eval_every_sequences"] = evaluation_interval(batch)
    settings = replace(settings, **filled)
    if wrong := list(_not_closed(settings, batch)) if settings.division == "closed" else []:
        raise InputError(f"division closed asks for {'; '.join(wrong)}. Or set division to open")
    return settings


def _not_closed(settings: Settings, batch: int) -> Iterator[str]:
    """What the closed division fixes and the settings have otherwise."""
    rules, held_out = compliance.closed(batch), feed.evaluation_dataset(settings)
    longest = feed.open_dataset(settings.train, "train").manifest.layout.capacity
    for name, due, found in (
        ("optimizer", "lamb", settings.optimizer),
        ("target", rules.target, settings.target),
        ("eval_every_sequences", rules.every, settings.eval_every_sequences),
        ("eval_every", 0, settings.eval_every),
        ("sequences to evaluate on", rules.samples, held_out.manifest.sequences if held_out else 0),
        ("tokens a sequence at most", compliance.LENGTH, longest),
    ):
        if due != found:
            yield f"{name} {due} (here {found})"


def carry_out(
    plan: Plan,
    *,
    watch: Watch = lambda shown: None,
    wish: Callable[[], int] = lambda: 0,
    say: Say = lambda note: None,
    ranks: Ranks | None = None,
) -> Generator[Result]:
    """Each run in turn, unless it is finished; its result once it is, checked, on rank 0."""
    compliance.needs_checker()
    ranks = ranks or Ranks()
    with ExitStack() as held:
        ranks.lead(lambda: held.enter_context(_held(plan)))
        for number in range(plan.runs):
            if not ranks.lead(partial(_is_finished, plan, number)):
                say(f"run {number} of {plan.runs}: seed {plan.start_seed + number}")
                _run(plan, number, watch, wish, say, ranks)
            results: list[Result] = []
            ranks.lead(partial(_conclude, plan, number, results))
            yield from results


def _is_finished(plan: Plan, number: int) -> bool:
    return Log(plan.log(number)).holds("run_stop")


def _conclude(plan: Plan, number: int, results: list[Result]) -> None:
    for _, path in folders.listed(plan.folder(number)):
        folders.discard(path)
    results.append(result(plan, number))


def result(plan: Plan, number: int) -> Result:
    """Of a finished run."""
    path = plan.log(number)
    return summary(number, mlperf.read(path), tuple(compliance.check(path, plan.rules)))


def summary(number: int, events: list[Event], problems: tuple[str, ...] = ()) -> Result:
    """What a whole log says; `problems` are what was found wrong with it."""
    last = {event.key: event for event in events}
    made = [event for event in events if event.key == "eval_accuracy"]
    return Result(
        run=number,
        seed=last["seed"].value,
        reached=last["run_stop"].metadata["status"] == "success",
        seconds=(last["run_stop"].time_ms - last["run_start"].time_ms) / 1000,
        paused=sum(event.value for event in events if event.key == mlperf.RESUMED),
        sequences=last["train_samples"].value,
        accuracies=tuple((event.metadata["epoch_num"], event.value) for event in made),
        compiled=last[mlperf.COMPILED].value,
        problems=problems,
    )


def score(results: list[Result]) -> float | None:
    """MLPerf's seconds: the mean without best and worst; None where too many missed the target.

    Of one or two runs the plain mean, which is no result that can be submitted.
    """
    times = sorted(each.seconds if each.reached else math.inf for each in results)
    counted = times[1:-1] if len(times) > 2 else times
    mean = sum(counted) / len(counted)
    return mean if math.isfinite(mean) else None


@contextmanager
def _held(plan: Plan) -> Iterator[None]:
    """The folder for this submission alone, and for no other before."""
    with folders.speaking(plan.out):
        plan.log(0).parent.mkdir(parents=True, exist_ok=True)
        file = (plan.out / LOCK).open("ab")
    with file:
        lock(file, plan.out)
        now, path = _fixed(plan), plan.out / PLAN
        then = _told(path)
        if then is None:
            with new_file(path) as draft:
                draft.write(json.dumps(now, indent=1).encode() + b"\n")
        elif other := [
            f"{name} {then.get(name)!r}, now {value!r}"
            for name, value in now.items()
            if then.get(name) != value
        ]:
            raise InputError(
                f"{plan.out} holds a submission with {'; '.join(other)}. Go on with what it had, "
                "or name another folder"
            )
        yield


def _fixed(plan: Plan) -> dict[str, Any]:
    """What must be the same when a submission goes on, in JSON's values."""
    settings = {
        name: value for name, value in asdict(plan.settings).items() if name not in (*HERE, "seed")
    }
    who = {"org": plan.entry.org, "status": plan.entry.status}
    fixed = {**settings, **who, "start_seed": plan.start_seed}
    return json.loads(json.dumps(fixed))


def _told(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text("utf-8")) if path.exists() else None
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}; move it away") from error


def _run(
    plan: Plan, number: int, watch: Watch, wish: Callable[[], int], say: Say, ranks: Ranks
) -> None:
    before, folder = executable.cache_misses(), plan.folder(number)
    log = Log(plan.log(number) if ranks.rank == 0 else None)
    job = _initialised(plan, number, log, say, ranks)
    seen = mlperf.observer(log, job.measure)

    def both(shown: Shown) -> None:
        seen(shown)
        watch(shown)

    try:
        outcome = train(job, folder, watch=both, wish=wish, say=say, ranks=ranks)
    except Diverged as error:
        say(f"run {number} missed the target: {error}")
        told = (False, _held_out(plan.settings), _learned_from(log))
    else:
        if outcome.signal:
            raise Interrupted(number, outcome)
        told = (outcome.reached, round(outcome.evaluation["sequences"]), outcome.sequences)
    mlperf.finish(log, *told, compiled=executable.cache_misses() - before)
    del job
    gc.collect()  # before the next model is made beside it


def _initialised(plan: Plan, number: int, log: Log, say: Say, ranks: Ranks) -> Job:
    """The job of a run that begins, or goes on, and what its log says of that."""
    found: list[state.Saved] = []
    ranks.lead(partial(_open, plan, number, log, found))
    settings = replace(plan.settings, seed=plan.start_seed + number, out=str(plan.folder(number)))
    job = assemble(settings, ranks.rank, ranks.world)
    warm(job)
    if found:
        known = Counters(**found[0].progress.counters)
        log.cut(known.sequences, known.evaluated_sequences)
        mlperf.resume(log, known.sequences, round(found[0].path.stat().st_mtime * 1000))
        return job
    for note in job.notes:
        say(note)
    mlperf.describe(log, job)
    mlperf.start(log, mlperf.forget_pages(settings))
    return job


def _open(plan: Plan, number: int, log: Log, found: list[state.Saved]) -> None:
    """Find what the run goes on from; else it begins, and what is left of another goes."""
    folder = plan.folder(number)
    saved = state.newest(folder) if log.holds("run_start") else None
    if saved is not None:
        found.append(saved)
        return
    log.lines.clear()
    shutil.rmtree(folder, ignore_errors=True)
    mlperf.begin(log, plan.entry)


def _held_out(settings: Settings) -> int:
    dataset = feed.evaluation_dataset(settings)
    return dataset.manifest.sequences if dataset else 0


def _learned_from(log: Log) -> int:
    """Sequences up to the last evaluation."""
    return max((event.metadata.get("epoch_num", 0) for event in log.events), default=0)
