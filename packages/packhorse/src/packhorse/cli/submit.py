"""`packhorse submit`: run a recipe with several seeds and write logs that MLPerf accepts.

The same command, given again, keeps what is finished and resumes what was interrupted. It ends with
0 if every run reached the target and every log is accepted, with 5 if not; stopped by Ctrl-C or
SIGTERM with 130 or 143, like `packhorse train`. With --nproc all runs share the ranks, which are
started once.
"""

import os
import sys
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from packhorse.cli.console import JsonFlag, emit, note, table
from packhorse.cli.settings import PrintConfig, passed
from packhorse.cli.train import (
    ConfigFile,
    DryRun,
    Processes,
    Timeout,
    TrainFlags,
    launch_ranks,
    leave,
    run_progress,
    show_estimate,
    show_settings,
)
from packhorse.errors import InputError
from packhorse.train.settings import TrainSettings, resolve

if TYPE_CHECKING:
    from collections.abc import Callable

    from packhorse.train.journal import RunStatus
    from packhorse.train.ranks import RankGroup
    from packhorse.train.submission import RunResult, SubmissionInterrupted, SubmissionPlan

PLOT = "accuracy.png"
Division = Literal["closed", "open"]


def submit(
    *,
    config: ConfigFile = None,
    pod: Annotated[
        Literal[16, 64] | None,
        Parameter(help="The recipe podN-DIVISION: settings of Graphcore's POD."),
    ] = None,
    submission_division: Annotated[
        Division | None, Parameter(help="Same as --division; with --pod, closed by default.")
    ] = None,
    runs: Annotated[int, Parameter(help="Number of runs, each with the next seed.")] = 10,
    start_seed: Annotated[
        int | None, Parameter(help="Seed of the first run; default the seed setting.")
    ] = None,
    org: Annotated[str, Parameter(help="Name of the submitter.")] = "Packhorse",
    status: Annotated[
        Literal["onprem", "cloud", "preview", "research"],
        Parameter(help="MLPerf's status of the system."),
    ] = "onprem",
    nproc: Processes = 1,
    timeout: Timeout = 600.0,
    dry_run: DryRun = False,
    print_config: PrintConfig = False,
    flags: TrainFlags = TrainFlags(),  # noqa: B008 (frozen)
    json: JsonFlag = False,
) -> None:
    """Run a recipe with seed after seed, and log it as MLPerf requires.

    --out (default results) gets bert/result_0.txt …, each checked by MLPerf's own
    checker and by a stricter one; runs/run_0 … with the files of each run; and
    accuracy.png. Any setting of `packhorse train` is a flag here too. The same
    command continues where it was stopped, and adds runs if --runs is raised.
    It ends with 5 if a run missed the target or a log is refused.

    Try:
      packhorse submit --config mini --train corpus --runs 3
      packhorse submit --pod 16 --submission-division closed --start-seed 42
      packhorse submit --pod 16 --dry-run
    """
    overrides = passed(flags)
    if submission_division:
        overrides["division"] = submission_division
    if runs < 1:
        raise InputError(f"--runs is {runs}; it must be at least 1")
    file = _recipe(config, pod, submission_division or "closed")
    settings = _settings(file, overrides)
    if print_config:
        return show_settings(settings, json)
    if dry_run:
        show_estimate(settings, Path(settings.out) / "runs" / "run_0", nproc, json)
        return note(f"this is one of {runs} runs")
    seed = settings.seed if start_seed is None else start_seed
    if nproc != 1:
        words = ["submit", "--runs", str(runs), "--start-seed", str(seed)]
        words += ["--org", org, "--status", status]
        return launch_ranks(nproc, timeout, words, settings, json)
    make_plan = partial(_plan, settings, runs, seed, org, status)
    _carry_out(make_plan, settings.device, timeout, json)


def _carry_out(
    make_plan: "Callable[[int], SubmissionPlan]", device: str, timeout: float, json: bool
) -> None:
    """Run the plan, alone or as one of the ranks; `make_plan` takes the number of ranks."""
    from packhorse.train.ranks import joined

    with joined(device, timeout) as ranks:
        plan = make_plan(ranks.world)
        results = _results(plan, ranks)
        if ranks.rank == 0:
            if isinstance(results, list):
                _show(plan, results, json)
            else:
                document = {
                    "out": str(plan.out),
                    "signal": results.signal,
                    "stopped": str(results),
                    "settings": asdict(plan.settings),
                }
                emit(document, json)
            sys.stdout.flush()
    if ranks.rank == 0:
        _leave(plan, results)


def _recipe(config: Path | None, pod: int | None, division: str) -> Path:
    """The file of settings: --config, or the one of --pod."""
    if config is not None and pod is None:
        return config
    if config is not None or pod is None:
        raise InputError("name one recipe: --config NAME or FILE, or --pod 16 or 64")
    return Path(f"pod{pod}-{division}")


def _settings(file: Path, overrides: dict[str, Any]) -> TrainSettings:
    """The settings of a submission, with MLPerf's defaults.

    The folder and the platform in a preset are those of Graphcore's system, so they are ignored.
    """
    from packhorse.train.submission import with_mlperf_defaults

    resolved = resolve(file, os.environ, overrides)
    settings = resolved.settings
    for message in resolved.notes:
        note(message)
    if file.suffix == ".json":
        if resolved.sources.get("out") == str(file):
            settings = replace(settings, out="")
        if resolved.sources.get("platform") == str(file):
            settings = replace(settings, platform="")
    return with_mlperf_defaults(replace(settings, out=settings.out or "results"))


def _plan(
    settings: TrainSettings, runs: int, seed: int, org: str, status: str, world: int
) -> "SubmissionPlan":
    from packhorse.device import choose_device, describe
    from packhorse.train.mlperf import SubmissionEntry
    from packhorse.train.submission import SubmissionPlan

    entry = SubmissionEntry(
        org=org,
        division=settings.division,
        platform=settings.platform or f"{world} of {describe(choose_device(settings.device))}",
        status=status,
    )
    return SubmissionPlan(Path(settings.out), settings, entry, runs, seed)


def _results(
    plan: "SubmissionPlan", ranks: "RankGroup"
) -> "list[RunResult] | SubmissionInterrupted":
    """Run all runs of the plan; if a signal stops them, return the exception that says so."""
    from packhorse.train.loop import stop_signals
    from packhorse.train.submission import SubmissionInterrupted, carry_out

    report = note if ranks.rank == 0 else lambda message: None
    if find_spec("matplotlib") is None:
        report(f"there will be no {PLOT}: pip install 'packhorse[plots]'")
    results = []
    try:
        with (
            stop_signals() as stop_signal,
            run_progress(ranks.rank) as show,
        ):

            def watch(number: int, run_status: "RunStatus") -> None:
                show(f"run {number}", run_status)

            for result in carry_out(
                plan, watch=watch, stop_signal=stop_signal, report=report, ranks=ranks
            ):
                results.append(result)
                report(f"run {result.run}: {_verdict(result)}")
    except SubmissionInterrupted as interrupted:
        return interrupted
    return results


def _verdict(result: "RunResult") -> str:
    reached = "reached the target" if result.reached else "missed the target"
    problems = f"log refused: {'; '.join(result.problems)}" if result.problems else "log accepted"
    return f"{reached} in {result.seconds / 60:.2f} minutes, {problems}"


def _show(plan: "SubmissionPlan", results: "list[RunResult]", json: bool) -> None:
    from packhorse.train.submission import score

    columns = [
        "run",
        "seed",
        "minutes",
        "paused",
        "sequences",
        "evaluations",
        "accuracy",
        "compiled",
        "status",
        "log",
    ]
    table(f"{plan.out}: {len(results)} runs", columns, [_row(result) for result in results])
    mean = score(results)
    counted = "without best and worst" if len(results) > 2 else "of all runs"
    shown = "none, too many missed the target" if mean is None else f"{mean / 60:.4g} minutes"
    print(f"mean time {counted}: {shown}")
    if find_spec("matplotlib") is not None:
        from packhorse.reports.plots import draw_accuracies

        draw_accuracies(plan.out / PLOT, results, plan.rules.target)
        note(f"wrote {plan.out / PLOT}")
    document = {
        "out": str(plan.out),
        "score_seconds": mean,
        "runs": [asdict(result) for result in results],
        "entry": asdict(plan.entry),
        "settings": asdict(plan.settings),
    }
    emit(document, json)


def _leave(plan: "SubmissionPlan", results: "list[RunResult] | SubmissionInterrupted") -> None:
    """Exit with a code that tells shells and schedulers what happened."""
    from packhorse.train.submission import SubmissionRefused

    if not isinstance(results, list):
        leave(results.signal, f"{plan.out}: {results}")
    bad = [str(result.run) for result in results if result.problems or not result.reached]
    if bad:
        raise SubmissionRefused(f"{plan.out} cannot be submitted: see runs {', '.join(bad)}")


def _row(result: "RunResult") -> list[object]:
    return [
        result.run,
        result.seed,
        result.seconds / 60,
        result.paused / 60,
        result.sequences,
        len(result.accuracies),
        result.accuracies[-1][1] if result.accuracies else None,
        result.compiled,
        "success" if result.reached else "aborted",
        "refused" if result.problems else "accepted",
    ]
