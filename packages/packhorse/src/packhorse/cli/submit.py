"""`packhorse submit`: a recipe in, seeded runs and logs that MLPerf accepts out.

What is finished stays and what was interrupted goes on, whenever the same command is given again.
It ends with 0 when every run reached the target and every log is accepted, with 5 when not; stopped
by Ctrl-C or SIGTERM with 130 or 143, as `packhorse train` does. With --nproc all runs share the
ranks, which are started once.
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
from packhorse.cli.train import (
    DryRun,
    Flags,
    PrintConfig,
    launch_ranks,
    leave,
    look_ahead,
    show_settings,
)
from packhorse.errors import InputError
from packhorse.train.settings import Settings, resolve

if TYPE_CHECKING:
    from collections.abc import Callable

    from packhorse.train.ranks import Ranks
    from packhorse.train.submission import Interrupted, Plan, Result

PODS = Path("configs")
PLOT = "accuracy.png"
Division = Literal["closed", "open"]


def submit(
    *,
    config: Annotated[
        Path | None, Parameter(help="Settings in TOML, or a preset of Graphcore's in JSON.")
    ] = None,
    pod: Annotated[
        Literal[16, 64] | None,
        Parameter(help="Settings of Graphcore's POD: configs/podN-DIVISION.toml."),
    ] = None,
    submission_division: Annotated[
        Division | None, Parameter(help="As --division; with --pod, closed by default.")
    ] = None,
    runs: Annotated[int, Parameter(help="So many, each with the next seed.")] = 10,
    start_seed: Annotated[int | None, Parameter(help="Of the first; default the seed set.")] = None,
    org: Annotated[str, Parameter(help="Who submits.")] = "Packhorse",
    status: Annotated[
        Literal["onprem", "cloud", "preview", "research"],
        Parameter(help="What MLPerf may call the system."),
    ] = "onprem",
    nproc: Annotated[int, Parameter(help="Processes that train together, one a device.")] = 1,
    timeout: Annotated[
        float, Parameter(help="Seconds one of several waits for the others before all end.")
    ] = 600.0,
    dry_run: DryRun = False,
    print_config: PrintConfig = False,
    flags: Flags = Flags(),  # noqa: B008 (frozen)
    json: JsonFlag = False,
) -> None:
    """Run a recipe with seed after seed, and log it as MLPerf wants it.

    --out (default results) gets bert/result_0.txt …, each checked by MLPerf's own
    checker and by a stricter one; runs/run_0 … with what each run learned; and
    accuracy.png. Any setting of `packhorse train` is a flag here too. The same
    command goes on where it was stopped, and adds runs where more are asked for.
    It ends with 5 where a run missed the target or a log is refused.

    Try:
      packhorse submit --config configs/mini.toml --train corpus --runs 3
      packhorse submit --pod 16 --submission-division closed --start-seed 42
      packhorse submit --pod 16 --dry-run
    """
    given = {name: value for name, value in asdict(flags).items() if value is not None}
    if submission_division:
        given["division"] = submission_division
    if runs < 1:
        raise InputError(f"--runs is {runs}; there must be one at least")
    file = _recipe(config, pod, submission_division or "closed")
    settings = _completed(_settings(file, given))
    if print_config:
        return show_settings(settings, json)
    if dry_run:
        look_ahead(settings, Path(settings.out) / "runs" / "run_0", nproc, json)
        return note(f"and so each of {runs} runs")
    seed = settings.seed if start_seed is None else start_seed
    if nproc != 1:
        words = ["submit", "--runs", str(runs), "--start-seed", str(seed)]
        words += ["--org", org, "--status", status]
        return launch_ranks(nproc, timeout, words, settings, json)
    planned = partial(_plan, settings, runs, seed, {"org": org, "status": status})
    _carry_out(planned, settings.device, timeout, json)


def _carry_out(planned: "Callable[[int], Plan]", device: str, timeout: float, json: bool) -> None:
    """Alone, or as one of the ranks that were started together; `planned` is for so many."""
    from packhorse.train.ranks import joined

    with joined(device, timeout) as ranks:
        plan = planned(ranks.world)
        found = _results(plan, ranks)
        if ranks.rank == 0:
            if isinstance(found, list):
                _show(plan, found, json)
            else:
                told = {"out": str(plan.out), "signal": found.signal, "stopped": str(found)}
                emit({**told, "settings": asdict(plan.settings)}, json)
            sys.stdout.flush()
    if ranks.rank == 0:
        _leave(plan, found)


def _recipe(config: Path | None, pod: int | None, division: str) -> Path:
    if config is not None and pod is None:
        return config
    if config is not None or pod is None:
        raise InputError("name one recipe: --config FILE, or --pod 16 or 64")
    file = PODS / f"pod{pod}-{division}.toml"
    if not file.is_file():
        raise InputError(f"there is no {file} here; name it with --config")
    return file


def _settings(file: Path, given: dict[str, Any]) -> Settings:
    """Of a preset not where it was submitted from and on what: that is another system's."""
    settings, notes = resolve(file, os.environ, given)
    for each in notes:
        note(each)
    if file.suffix != ".json":
        return settings
    here = resolve(None, os.environ, given).settings
    return replace(settings, out=here.out, platform=here.platform)


def _completed(settings: Settings) -> Settings:
    from packhorse.train.submission import completed

    return completed(replace(settings, out=settings.out or "results"))


def _plan(settings: Settings, runs: int, seed: int, who: dict[str, Any], world: int) -> "Plan":
    from packhorse.device import choose_device, describe
    from packhorse.train.mlperf import Entry
    from packhorse.train.submission import Plan

    usual = f"{world} of {describe(choose_device(settings.device))}"
    entry = Entry(division=settings.division, platform=settings.platform or usual, **who)
    return Plan(Path(settings.out), settings, entry, runs, seed)


def _results(plan: "Plan", ranks: "Ranks") -> "list[Result] | Interrupted":
    from packhorse.train.display import watching
    from packhorse.train.signals import wishes
    from packhorse.train.submission import Interrupted, carry_out

    say = note if ranks.rank == 0 else lambda message: None
    if find_spec("matplotlib") is None:
        say(f"there will be no {PLOT}: pip install 'packhorse[plots]'")
    found = []
    try:
        with wishes() as wish, watching(say, None if ranks.rank == 0 else False) as watch:
            for result in carry_out(plan, watch=watch, wish=wish, say=say, ranks=ranks):
                found.append(result)
                say(f"run {result.run}: {_verdict(result)}")
    except Interrupted as stopped:
        return stopped
    return found


def _verdict(result: "Result") -> str:
    reached = "reached the target" if result.reached else "missed the target"
    problems = f"log refused: {'; '.join(result.problems)}" if result.problems else "log accepted"
    return f"{reached} in {result.seconds / 60:.2f} minutes, {problems}"


def _show(plan: "Plan", results: "list[Result]", json: bool) -> None:
    from packhorse.train.submission import score

    columns = ["run", "seed", "minutes", "paused", "sequences", "evaluations", "accuracy"]
    rows = [_row(result) for result in results]
    table(f"{plan.out}: {len(results)} runs", [*columns, "compiled", "status", "log"], rows)
    mean = score(results)
    counted = "without best and worst" if len(results) > 2 else "of all runs"
    told = "none, too many missed the target" if mean is None else f"{mean / 60:.4g} minutes"
    print(f"mean time {counted}: {told}")
    if find_spec("matplotlib") is not None:
        from packhorse.reports.plots import draw_accuracies

        draw_accuracies(plan.out / PLOT, results, plan.rules.target)
        note(f"wrote {plan.out / PLOT}")
    document = {"out": str(plan.out), "score_seconds": mean, "runs": [asdict(r) for r in results]}
    emit({**document, "entry": asdict(plan.entry), "settings": asdict(plan.settings)}, json)


def _leave(plan: "Plan", found: "list[Result] | Interrupted") -> None:
    """End as what happened says, so that shells and schedulers know."""
    from packhorse.train.submission import Refused

    if not isinstance(found, list):
        leave(found.signal, f"{plan.out}: {found}")
    bad = [str(result.run) for result in found if result.problems or not result.reached]
    if bad:
        raise Refused(f"{plan.out} cannot be submitted: see runs {', '.join(bad)}")


def _row(result: "Result") -> list[object]:
    accuracy = result.accuracies[-1][1] if result.accuracies else None
    return [
        *(result.run, result.seed, result.seconds / 60, result.paused / 60, result.sequences),
        *(len(result.accuracies), accuracy, result.compiled),
        *("success" if result.reached else "aborted", "refused" if result.problems else "accepted"),
    ]
