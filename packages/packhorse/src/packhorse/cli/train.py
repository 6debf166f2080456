"""`packhorse train`: a recipe in, a trained model out; and what it would be like, before.

Every setting is a flag, made from `Settings` itself, so that the two cannot differ. A run that is
asked to stop (Ctrl-C, SIGTERM) ends behind its step with a checkpoint and the exit code that shells
use, 130 or 143; the same command goes on. A loss that is no number ends with 3 (with --json its
document has `error`, `exit_code`, `step` and the last good `checkpoint`), a mistake with 2.
With --nproc the command starts itself as so many ranks and ends as the first of them that fails:
with 137 where one was killed. A rank that has lost another ends with 4. Ranks that the user's own
torchrun starts have to be told nothing.
"""

import os
import signal
import sys
from contextlib import contextmanager
from dataclasses import asdict, field, fields, make_dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, get_args, get_origin

from cyclopts import Group, Parameter

from packhorse import status
from packhorse.cli.console import JsonFlag, emit, note, table
from packhorse.errors import InputError
from packhorse.train.settings import KINDS, PREFIX, Settings, resolve

if TYPE_CHECKING:
    from collections.abc import Iterator

    from packhorse.train.display import Shown, Watch
    from packhorse.train.loop import Outcome
    from packhorse.train.outlook import Outlook
    from packhorse.train.ranks import Ranks

SWITCH = Parameter(negative="", show_default=False)
DryRun = Annotated[bool, SWITCH, Parameter(help="Show batches, steps, hours; stop.")]
PrintConfig = Annotated[bool, SWITCH, Parameter(help="Show the settings; stop.")]
GROUPS = list(dict.fromkeys(each.metadata["group"] for each in fields(Settings)))


def _flag(name: str, group: str, help: str) -> Any:
    kind = KINDS[name]
    kind = list[get_args(kind)[0]] if get_origin(kind) is tuple else kind
    place = Group(group, sort_key=1 + GROUPS.index(group))
    # No command here takes words without a flag, so a list takes all that follow: --clamp 1 3.
    shown = Parameter(
        group=place, help=help, show_default=False, negative_iterable=(), consume_multiple=True
    )
    return Annotated[kind | None, shown]


if TYPE_CHECKING:
    Flags = Settings
else:
    # A twin of Settings whose fields are None unless given: a default must not hide a file's word.
    Flags = Parameter(name="*")(
        make_dataclass(
            "Flags",
            [(f.name, _flag(f.name, **f.metadata), field(default=None)) for f in fields(Settings)],
            namespace={"__module__": __name__},  # cyclopts takes what is of the library for plain
            frozen=True,
            kw_only=True,
        )
    )


def train(
    *,
    config: Annotated[
        Path | None, Parameter(help="Settings in TOML, or a preset of Graphcore's in JSON.")
    ] = None,
    resume: Annotated[
        str, Parameter(help="auto: go on from the last whole checkpoint; never; or a path.")
    ] = "auto",
    nproc: Annotated[int, Parameter(help="Processes that train together, one a device.")] = 1,
    timeout: Annotated[
        float, Parameter(help="Seconds one of several waits for the others before all end.")
    ] = 600.0,
    dry_run: DryRun = False,
    print_config: PrintConfig = False,
    flags: Flags = Flags(),  # noqa: B008 (frozen)
    json: JsonFlag = False,
) -> None:
    """Train packed BERT: from nothing, from a checkpoint, or for a task.

    Settings come from defaults, then the file, then the environment
    (PACKHORSE_TRAIN_…), then flags. The folder of the run, --out, gets
    checkpoints, log.jsonl and at the end model, which transformers loads.
    Ctrl-C or SIGTERM ends behind the step with a checkpoint (exit code 130 or
    143); the same command goes on and comes to the same weights. A finished run
    goes on where steps or epochs are raised, and refuses other settings.

    Try:
      packhorse train --config configs/mini.toml --train corpus --out runs/mini
      packhorse train --config configs/sst2.toml --model minilm --seed 7
      packhorse train --config configs/mini.toml --train corpus --nproc 2
    """
    given = {name: value for name, value in asdict(flags).items() if value is not None}
    settings, notes = resolve(config, os.environ, given)
    for each in notes:
        note(each)
    if print_config:
        return show_settings(settings, json)
    out = Path(settings.out) if settings.out else Path("runs") / (config.stem if config else "run")
    if dry_run:
        return look_ahead(settings, out, nproc, json)
    if nproc != 1:
        words = ["train", "--resume", resume]
        return launch_ranks(nproc, timeout, words, replace(settings, out=str(out)), json)
    _run(settings, out, resume, timeout, json)


def launch_ranks(
    nproc: int, timeout: float, words: list[str], settings: Settings, json: bool
) -> None:
    """Start a command as ranks; settings are theirs by a file alone."""
    from packhorse.dist import check_timeout
    from packhorse.launcher import launch

    check_timeout(timeout)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        raise InputError("torchrun started this process as a rank already; leave out --nproc")
    with TemporaryDirectory() as folder:
        file = Path(folder) / "settings.toml"
        file.write_text(settings.toml(), "utf-8")
        words = [*words, "--timeout", str(timeout), "--config", str(file)]
        command = [sys.executable, "-m", "packhorse", *words]
        taken = {name: None for name in os.environ if name.startswith(PREFIX)}
        code = launch(nproc, command + ["--json"] * json, environ=taken, report=note)
    if code:
        raise SystemExit(code)


def show_settings(settings: Settings, json: bool) -> None:
    """As a file that --config takes."""
    print(settings.toml(), end="")
    emit(asdict(settings), json)


def look_ahead(settings: Settings, out: Path, nproc: int, json: bool) -> None:
    """What a run will be like, as a table."""
    from packhorse.train.outlook import outlook

    found = outlook(settings, out, nproc)
    table(f"{out}: what it would be", ["", "value"], _ahead(found))
    emit({"out": str(out), **asdict(found)}, json)


def _ahead(found: "Outlook") -> list[list[object]]:
    return [
        ["device", f"{found.devices} of {found.device}, {found.precision}"],
        ["global batch", f"{found.global_batch:,.4g} sequences"],
        ["micro batch", f"{found.micro_batch:,.4g} sequences, up to {found.micro_tokens:,} tokens"],
        ["accumulation", f"{found.accumulation:,}"],
        ["steps", f"{found.steps:,}"],
        ["sequences", f"{found.sequences:,} ({found.epochs:.3g} epochs)"],
        ["hours", f"{found.hours:.3g} ({found.rate})"],
    ]


def _run(settings: Settings, out: Path, resume: str, timeout: float, json: bool) -> None:
    from packhorse.train.figures import Diverged
    from packhorse.train.ranks import joined

    with joined(settings.device, timeout) as ranks:
        try:
            outcome = _trained(settings, out, resume, ranks)
        except Diverged as error:
            told = {"error": str(error), "exit_code": error.exit_code, "step": error.step}
            told["checkpoint"] = error.checkpoint and str(error.checkpoint)
            emit({"out": str(out), **told, "settings": asdict(settings)}, json and ranks.rank == 0)
            raise
        if ranks.rank == 0:
            _report(outcome, out)
            told = {**asdict(outcome), "model": outcome.model and str(outcome.model)}
            emit({"out": str(out), **told, "settings": asdict(settings)}, json)
            sys.stdout.flush()
    if ranks.rank == 0:
        _leave(outcome, out)


def _trained(settings: Settings, out: Path, resume: str, ranks: "Ranks") -> "Outcome":
    from packhorse.device import describe, dtype_name
    from packhorse.train.display import watching
    from packhorse.train.job import assemble
    from packhorse.train.loop import train
    from packhorse.train.signals import wishes

    say = note if ranks.rank == 0 else lambda message: None
    job = assemble(settings, ranks.rank, ranks.world)
    kernel = type(job.model.bert.kernel).__name__.lower()
    how = [describe(job.place.device), dtype_name(job.place.dtype), f"{kernel} kernel"]
    how += [f"{ranks.world} ranks"] * (ranks.world > 1) + ["compiled"] * job.compiled
    for each in (f"{job.checkpoint.name}: {', '.join(how)}", *job.notes):
        say(each)
    about = {"model": job.checkpoint.name, "device": str(job.place.device)}
    with (
        wishes() as wish,
        watching(say, None if ranks.rank == 0 else False) as watch,
        _published(about if ranks.rank == 0 else None) as publish,
    ):

        def both(shown: "Shown") -> None:
            watch(shown)
            publish(shown)

        return train(job, out, resume=resume, watch=both, wish=wish, say=say, ranks=ranks)


@contextmanager
def _published(about: dict[str, Any] | None) -> "Iterator[Watch]":
    """Something to be shown figures, which `packhorse monitor` then sees; None: it sees nothing."""
    if about is None:
        yield lambda shown: None
        return
    with status.publishing("train", about) as say:
        say({"does": "training, first steps"})
        yield lambda shown: None if shown.evaluation else say(_word(shown))


def _word(shown: "Shown") -> dict[str, Any]:
    return {
        "does": f"training, loss {shown.loss:.3f}",
        "done": shown.step,
        "total": shown.steps,
        "sequences_per_second": shown.sequences_per_second,
        "tokens_per_second": shown.tokens_per_second,
        "fill": shown.fill,
    }


def _report(outcome: "Outcome", out: Path) -> None:
    if outcome.signal:
        return
    rows = [[name, value] for name, value in outcome.evaluation.items()]
    rows += [["steps", outcome.step], ["sequences learned from", outcome.sequences]]
    reached = ", target reached" if outcome.reached else ""
    table(
        f"{outcome.model or out}: done in {outcome.seconds:.1f} s{reached}",
        ["measure", "value"],
        rows,
    )


def _leave(outcome: "Outcome", out: Path) -> None:
    if outcome.signal:
        leave(outcome.signal, f"{out}: stopped behind step {outcome.step:,}")


def leave(signalled: int, where: str) -> NoReturn:
    """End as a process that the signal ended, so that shells and schedulers know."""
    note(f"{where}; the same command goes on from there")
    if signalled == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + signalled)
