"""A submission to MLPerf: one recipe run with seed after seed, and the score of its logs.

    plan = SubmissionPlan(Path("results"), settings, entry, runs=10, start_seed=42)
    for result in carry_out(plan): …

    results/bert/result_0.txt …        the logs
    results/runs/run_0 …               the files of each run: log.jsonl, settings.toml, model
    results/submission.json            the plan; a folder holds one submission

A run is finished when its log says so, and is never touched again. One that was interrupted resumes
from its last checkpoint, with its log cut back to what the checkpoint knows. So the same command,
given again, continues where it was stopped, and with more runs it adds those. The checkpoints of a
finished run are deleted: ten runs of BERT-Large would keep a hundred gigabytes of them.

All runs share a process: what the first one compiled serves the others, and each log says how many
graphs were compiled for it. MLPerf's result is the mean time without the best and the worst run; a
run that missed the target counts as the worst possible.
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
from packhorse.train import checkpoints, feed, mlperf
from packhorse.train.checkpoints import TrainingCheckpoint
from packhorse.train.estimate import synthetic_batch
from packhorse.train.job import MEASURES, TrainingJob, assemble
from packhorse.train.journal import Diverged, RunStatus, Watch
from packhorse.train.loop import LOCAL_SETTINGS, RunCounters, RunOutcome, train
from packhorse.train.mlperf import LogEvent, LogRules, MlperfLog, SubmissionEntry
from packhorse.train.presets import TARGET, evaluation_interval
from packhorse.train.ranks import RankGroup
from packhorse.train.settings import TrainSettings

PLAN = "submission.json"
LOCK = "lock"
DIVISIONS = ("closed", "open")
Report = Callable[[str], None]
WatchRun = Callable[[int, RunStatus], None]  # number of the run, and how far it is


class SubmissionRefused(PackhorseError):
    """The runs are finished, but not all of them can be submitted."""

    exit_code = 5


class SubmissionInterrupted(PackhorseError):
    """A signal asked to stop; the current run has a checkpoint."""

    def __init__(self, number: int, outcome: RunOutcome) -> None:
        super().__init__(f"run {number} was stopped after step {outcome.step:,}")
        self.signal = outcome.signal


@dataclass(frozen=True, slots=True)
class SubmissionPlan:
    """What is to be run; `settings` as `with_mlperf_defaults` returns them."""

    out: Path
    settings: TrainSettings
    entry: SubmissionEntry
    runs: int
    start_seed: int

    def log(self, number: int) -> Path:
        """The log of a run; the first run is 0."""
        return self.out / self.entry.benchmark / f"result_{number}.txt"

    def folder(self, number: int) -> Path:
        """The folder of a run."""
        return self.out / "runs" / f"run_{number}"

    @property
    def rules(self) -> LogRules:
        """What each log must show."""
        if self.entry.division == "closed":
            return mlperf.closed_rules(mlperf.global_batch(self.settings))
        return LogRules(self.settings.target, self.settings.eval_every_sequences)


@dataclass(frozen=True, slots=True)
class RunResult:
    """What the log of a finished run says."""

    run: int
    seed: int
    reached: bool
    seconds: float  # from run_start to run_stop, pauses included, as MLPerf counts
    paused: float  # seconds of these between a checkpoint and its resumption
    sequences: int
    accuracies: tuple[tuple[int, float], ...]  # sequences learned from, and the accuracy then
    compiled: int  # graphs, for this run
    problems: tuple[str, ...]  # none: the log is accepted


def with_mlperf_defaults(settings: TrainSettings) -> TrainSettings:
    """The settings with MLPerf's target and interval where the recipe has none, checked."""
    if settings.task != "pretrain":
        raise InputError(f"task is {settings.task!r}; MLPerf's BERT is submitted as pretrain")
    if settings.division not in DIVISIONS:
        raise InputError(f"division is {settings.division!r}; it can be closed or open")
    if "loss" in settings.measure:
        raise InputError(f"measure is {settings.measure!r}; a submission needs an accuracy")
    batch = mlperf.global_batch(settings)
    changes: dict[str, Any] = {"measure": settings.measure or MEASURES["pretrain"][0]}
    if not settings.target:
        changes["target"] = TARGET
    if not (settings.eval_every or settings.eval_every_sequences):
        changes["eval_every_sequences"] = evaluation_interval(batch)
    settings = replace(settings, **changes)
    if settings.division == "closed" and (problems := list(_not_closed(settings, batch))):
        raise InputError(f"division closed requires {'; '.join(problems)}. Or set division to open")
    return settings


def _not_closed(settings: TrainSettings, batch: int) -> Iterator[str]:
    """Values that differ from what the closed division prescribes."""
    rules = mlperf.closed_rules(batch)
    capacity = feed.open_dataset(settings.train, "train").manifest.layout.capacity
    for name, required, actual in (
        ("optimizer", "lamb", settings.optimizer),
        ("target", rules.target, settings.target),
        ("eval_every_sequences", rules.interval, settings.eval_every_sequences),
        ("eval_every", 0, settings.eval_every),
        ("evaluation sequences", rules.samples, _evaluation_sequences(settings)),
        ("maximum tokens per sequence", mlperf.CLOSED_LENGTH, capacity),
    ):
        if required != actual:
            yield f"{name} {required} (here {actual})"


def carry_out(
    plan: SubmissionPlan,
    *,
    watch: WatchRun = lambda number, status: None,
    stop_signal: Callable[[], int] = lambda: 0,
    report: Report = lambda note: None,
    ranks: RankGroup | None = None,
) -> Generator[RunResult]:
    """Each run in turn, unless it is finished; yields its checked result, on rank 0."""
    mlperf.require_checker()
    ranks = ranks or RankGroup()
    with ExitStack() as stack:
        ranks.on_rank_0(lambda: stack.enter_context(_claim(plan)))
        for number in range(plan.runs):
            if not ranks.on_rank_0(partial(_is_finished, plan, number)):
                report(f"run {number} of {plan.runs}: seed {plan.start_seed + number}")
                _run(plan, number, partial(watch, number), stop_signal, report, ranks)
            results: list[RunResult] = []  # stays empty on other ranks
            ranks.on_rank_0(partial(_conclude, plan, number, results))
            yield from results


def _is_finished(plan: SubmissionPlan, number: int) -> bool:
    return MlperfLog(plan.log(number)).holds("run_stop")


def _conclude(plan: SubmissionPlan, number: int, results: list[RunResult]) -> None:
    """Delete the checkpoints of a finished run, and add its result to `results`."""
    for _, path in checkpoints.list_checkpoints(plan.folder(number)):
        checkpoints.discard(path)
    results.append(result(plan, number))


def result(plan: SubmissionPlan, number: int) -> RunResult:
    """The result of a finished run, with its log checked."""
    path = plan.log(number)
    return summary(number, mlperf.read(path), tuple(mlperf.check(path, plan.rules)))


def summary(number: int, events: list[LogEvent], problems: tuple[str, ...] = ()) -> RunResult:
    """What a complete log says; `problems` are those of the log."""
    last = {event.key: event for event in events}
    evaluations = [event for event in events if event.key == "eval_accuracy"]
    return RunResult(
        run=number,
        seed=last["seed"].value,
        reached=last["run_stop"].metadata["status"] == "success",
        seconds=(last["run_stop"].time_ms - last["run_start"].time_ms) / 1000,
        paused=sum(event.value for event in events if event.key == mlperf.RESUMED),
        sequences=last["train_samples"].value,
        accuracies=tuple((event.metadata["epoch_num"], event.value) for event in evaluations),
        compiled=last[mlperf.COMPILED].value,
        problems=problems,
    )


def score(results: list[RunResult]) -> float | None:
    """MLPerf's seconds: the mean without best and worst; None if too many missed the target.

    For one or two runs it is the plain mean, which cannot be submitted.
    """
    times = sorted(result.seconds if result.reached else math.inf for result in results)
    counted = times[1:-1] if len(times) > 2 else times
    mean = sum(counted) / len(counted)
    return mean if math.isfinite(mean) else None


@contextmanager
def _claim(plan: SubmissionPlan) -> Iterator[None]:
    """Lock the folder for this submission, and refuse one that holds another."""
    with checkpoints.disk_errors(plan.out):
        plan.log(0).parent.mkdir(parents=True, exist_ok=True)
        file = (plan.out / LOCK).open("ab")
    with file:
        lock(file, plan.out)
        path = plan.out / PLAN
        now = _fixed(plan)
        then = _read_plan(path)
        if then is None:
            with new_file(path) as draft:
                draft.write(json.dumps(now, indent=1).encode() + b"\n")
        elif changes := [
            f"{name} {then.get(name)!r}, now {value!r}"
            for name, value in now.items()
            if then.get(name) != value
        ]:
            raise InputError(
                f"{plan.out} holds a submission with {'; '.join(changes)}. Continue with what it "
                "had, or name another folder"
            )
        yield


def _fixed(plan: SubmissionPlan) -> dict[str, Any]:
    """What must stay the same when a submission continues, as JSON values."""
    excluded = (*LOCAL_SETTINGS, "seed")
    settings = {
        name: value for name, value in asdict(plan.settings).items() if name not in excluded
    }
    fixed = {
        **settings,
        "org": plan.entry.org,
        "status": plan.entry.status,
        "start_seed": plan.start_seed,
    }
    return json.loads(json.dumps(fixed))


def _read_plan(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text("utf-8")) if path.exists() else None
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}; move it away") from error


def _run(
    plan: SubmissionPlan,
    number: int,
    watch: Watch,
    stop_signal: Callable[[], int],
    report: Report,
    ranks: RankGroup,
) -> None:
    compiled_before = executable.cache_misses()
    log = MlperfLog(plan.log(number) if ranks.rank == 0 else None)
    job = _initialize(plan, number, log, report, ranks)
    observe = mlperf.observer(log, job.measure)

    def watch_both(status: RunStatus) -> None:
        observe(status)
        watch(status)

    try:
        outcome = train(
            job,
            plan.folder(number),
            watch=watch_both,
            stop_signal=stop_signal,
            report=report,
            ranks=ranks,
        )
    except Diverged as error:
        report(f"run {number} missed the target: {error}")
        reached = False
        eval_samples = _evaluation_sequences(plan.settings)
        train_samples = _sequences_learned(log)
    else:
        if outcome.signal:
            raise SubmissionInterrupted(number, outcome)
        reached = outcome.reached
        eval_samples = round(outcome.evaluation["sequences"])
        train_samples = outcome.sequences
    compiled = executable.cache_misses() - compiled_before
    mlperf.finish(log, reached, eval_samples, train_samples, compiled)
    del job
    gc.collect()  # before the next model is made beside it


def _initialize(
    plan: SubmissionPlan, number: int, log: MlperfLog, report: Report, ranks: RankGroup
) -> TrainingJob:
    """The job of a run that starts or resumes, with the events of its log so far."""
    resumable: list[TrainingCheckpoint] = []
    ranks.on_rank_0(partial(_open, plan, number, log, resumable))
    settings = replace(plan.settings, seed=plan.start_seed + number, out=str(plan.folder(number)))
    job = assemble(settings, ranks.rank, ranks.world)
    compile_ahead(job)
    if resumable:
        counters = RunCounters(**resumable[0].progress.counters)
        log.cut(counters.sequences, counters.evaluated_sequences)
        saved_ms = round(resumable[0].path.stat().st_mtime * 1000)
        mlperf.resume(log, counters.sequences, saved_ms)
        return job
    for note in job.notes:
        report(note)
    mlperf.describe(log, job)
    mlperf.start(log, mlperf.clear_page_cache(settings))
    return job


def compile_ahead(job: TrainingJob) -> None:
    """Compile a step and an evaluation before the clock runs, on synthetic tokens.

    Compiled code belongs to shapes, so the batches have those of real ones: a full part of a step
    and a usual evaluation batch. No row of the data is read and nothing is learned: there is no
    optimizer step, gradients are dropped, and the loop seeds the random numbers anew. A shape that
    occurs once, such as the last evaluation batch, is compiled when it comes.
    """
    if not job.compiled:
        return
    device = job.place.device
    capacity = feed.open_dataset(job.settings.train, "train").manifest.layout.capacity
    shape = job.feed.shape
    batch = feed.to_device(synthetic_batch(shape.tokens, capacity), device, shape)
    loss, _ = job.objective.loss(job.model, batch)
    loss.backward()
    job.optimizer.zero_grad(set_to_none=True)
    if job.feed.evaluate_on is not None:
        tokens = _usual_tokens(job.feed.evaluate_on())
        batch = feed.to_device(synthetic_batch(tokens, capacity), device, job.feed.eval_shape)
        job.objective.evaluate(job.model, [batch])


def _usual_tokens(loader: Any) -> int:
    """The mean tokens of an evaluation batch, by the manifest."""
    manifest = loader.dataset.manifest
    rows = min(-(-loader.rows // loader.world), manifest.rows)
    return round(rows * manifest.tokens / manifest.rows)


def _open(
    plan: SubmissionPlan, number: int, log: MlperfLog, resumable: list[TrainingCheckpoint]
) -> None:
    """Find the checkpoint to resume from; without one, clear the folder and begin the log."""
    folder = plan.folder(number)
    saved = checkpoints.newest(folder) if log.holds("run_start") else None
    if saved is not None:
        resumable.append(saved)
        return
    log.lines.clear()
    shutil.rmtree(folder, ignore_errors=True)
    mlperf.begin(log, plan.entry)


def _evaluation_sequences(settings: TrainSettings) -> int:
    dataset = feed.evaluation_dataset(settings)
    return 0 if dataset is None else dataset.manifest.sequences


def _sequences_learned(log: MlperfLog) -> int:
    """The sequences up to the last evaluation."""
    return max((event.metadata.get("epoch_num", 0) for event in log.events), default=0)
