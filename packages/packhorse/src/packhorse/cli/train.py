"""`packhorse train`: train a model from a recipe, or estimate what the run would be like.

Every setting is a flag (`cli.settings`). A run that is asked to stop (Ctrl-C, SIGTERM) ends after
its step with a checkpoint and the exit code that shells use, 130 or 143; the same command resumes
it. A loss that is not finite ends with 3 (with --json the document has `error`, `exit_code`, `step`
and the last good `checkpoint`), a mistake of the user with 2.

With --nproc the command starts itself as several ranks and ends like the first of them that fails:
with 137 if one was killed. A rank that has lost another ends with 4. Ranks that the user's own
torchrun starts need no flags.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

from cyclopts import Parameter

from packhorse.cli.console import JsonFlag, emit, note, stage_progress, table
from packhorse.cli.settings import SWITCH, PrintConfig, flags_class, passed
from packhorse.errors import InputError
from packhorse.train import recipes
from packhorse.train.settings import PREFIX, TrainSettings, resolve

if TYPE_CHECKING:
    from packhorse.train.estimate import RunEstimate
    from packhorse.train.journal import RunStatus
    from packhorse.train.loop import RunOutcome
    from packhorse.train.ranks import RankGroup

    TrainFlags = TrainSettings
else:
    # These commands take no words without a flag, so a list takes all that follow: --clamp 1 3.
    TrainFlags = flags_class(TrainSettings, negatives=True, consume_multiple=True)

CORPUS = "corpus"  # in the folder of a run that has texts

ConfigFile = Annotated[
    Path | None,
    Parameter(
        help=f"A recipe by name ({', '.join(recipes.names())}), a TOML file of settings, "
        "or a preset of Graphcore's in JSON."
    ),
]
Processes = Annotated[int, Parameter(help="Processes that train together, one per device.")]
Timeout = Annotated[
    float, Parameter(help="Seconds that a process waits for the others before all end.")
]
DryRun = Annotated[bool, SWITCH, Parameter(help="Print batches, steps and hours, and exit.")]


def train(
    *,
    config: ConfigFile = None,
    resume: Annotated[
        str, Parameter(help="auto: from the last complete checkpoint; never; or a path.")
    ] = "auto",
    nproc: Processes = 1,
    timeout: Timeout = 600.0,
    dry_run: DryRun = False,
    print_config: PrintConfig = False,
    list_recipes: Annotated[
        bool, SWITCH, Parameter(name="--list", help="List the recipes and exit.")
    ] = False,
    flags: TrainFlags = TrainFlags(),  # noqa: B008 (frozen)
    json: JsonFlag = False,
) -> None:
    """Train packed BERT: from scratch, from a checkpoint, or for a task.

    Settings come from defaults, then the recipe, then the environment
    (PACKHORSE_TRAIN_…), then flags. The folder of the run, --out, gets
    checkpoints, log.jsonl and at the end model, which transformers loads.
    Ctrl-C or SIGTERM ends after the step with a checkpoint (exit code 130 or
    143); the same command resumes and arrives at the same weights. A finished
    run continues if steps or epochs are raised, and refuses other settings.

    Try:
      packhorse train --config mini --train corpus --out runs/mini
      packhorse train --config domain-bert --model minilm --texts docs.zst
      packhorse train --config sst2 --model minilm --seed 7
      packhorse train --config mini --train corpus --nproc 2
    """
    if list_recipes:
        return show_recipes(json)
    resolved = resolve(config, os.environ, passed(flags))
    settings = resolved.settings
    if settings.push:
        from packhorse.checkpoint.hub import check_repository

        check_repository(settings.push)
    for message in resolved.notes:
        note(message)
    if print_config:
        return show_settings(settings, json)
    out = Path(settings.out) if settings.out else Path("runs") / (config.stem if config else "run")
    if settings.texts:
        settings = _with_corpus(settings, out)
    if dry_run:
        return show_estimate(settings, out, nproc, json)
    if nproc != 1:
        words = ["train", "--resume", resume]
        return launch_ranks(nproc, timeout, words, replace(settings, out=str(out)), json)
    _run(settings, out, resume, timeout, json)


def _with_corpus(settings: TrainSettings, out: Path) -> TrainSettings:
    """The settings with a corpus in place of texts; it is built in OUT, or found there."""
    from packhorse.checkpoint.hub import resolve as find_model
    from packhorse.cli.data import build_progress
    from packhorse.data.corpus.building import BuildOptions, build
    from packhorse.data.packed.masking import Recipe
    from packhorse.train.preparing import ALIASES

    if settings.train or settings.task != "pretrain":
        raise InputError("texts are for pretraining, in place of train: leave train and task out")
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        raise InputError(
            "texts become a corpus once, not in every rank: build it with `packhorse data build`"
            " and pass --train, or use --nproc"
        )
    tokenizer = settings.tokenizer or settings.model
    if not tokenizer:
        raise InputError("texts are tokenized: set model to start from, or tokenizer")
    corpus = BuildOptions(
        sources=tuple(map(Path, settings.texts)),
        out=out / CORPUS,
        tokenizer=find_model(ALIASES.get(tokenizer, tokenizer)),
        recipe=Recipe(
            max_length=settings.max_length or 512,
            mask_probability=settings.mask_probability or 0.15,
            max_predictions=settings.max_predictions or None,
            whole_words=bool(settings.whole_words),
            next_sentence=bool(settings.next_sentence),
            seed=settings.seed,
        ),
        max_per_pack=None,
        eval_fraction=settings.eval_fraction,
    )
    try:
        with build_progress() as watch:
            built = build(corpus, watch, note)
    except InputError as error:
        message = str(error).replace("pass --overwrite", f"remove {corpus.out}")
        if "--documents" in message:
            message += "; that is a flag of `packhorse data build`, whose folder --train takes"
        raise InputError(message) from error
    counts = built.train.config["found"]
    note(
        f"{corpus.out}: {counts['documents']:,} documents, {counts['held_out']:,} of them held out,"
        f" {built.train.tokens:,} tokens to learn from"
    )
    return replace(settings, train=str(corpus.out), texts=())


def launch_ranks(
    nproc: int, timeout: float, words: list[str], settings: TrainSettings, json: bool
) -> None:
    """Start a command as ranks, which get their settings from a file only."""
    from packhorse.dist import check_timeout
    from packhorse.launcher import launch

    check_timeout(timeout)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        raise InputError("torchrun started this process as a rank already; leave out --nproc")
    with TemporaryDirectory() as folder:
        file = Path(folder) / "settings.toml"
        file.write_text(settings.toml(), "utf-8")
        command = [sys.executable, "-m", "packhorse", *words]
        command += ["--timeout", str(timeout), "--config", str(file)]
        if json:
            command.append("--json")
        # The file holds the environment's settings already; None removes a variable.
        removed = {name: None for name in os.environ if name.startswith(PREFIX)}
        code = launch(nproc, command, environ=removed, report=note)
    if code:
        raise SystemExit(code)


def show_recipes(json: bool) -> None:
    """Print the recipes of the package, with what each of them trains."""
    summaries = {name: recipes.summary(name) for name in recipes.names()}
    table("recipes: --config NAME", ["name", "what it trains"], list(summaries.items()))
    emit(summaries, json)


def show_settings(settings: TrainSettings, json: bool) -> None:
    """Print the settings as a file that --config reads."""
    print(settings.toml(), end="")
    emit(asdict(settings), json)


def show_estimate(settings: TrainSettings, out: Path, nproc: int, json: bool) -> None:
    """Print what a run would be like, as a table."""
    from packhorse.train.estimate import estimate

    run = estimate(settings, out, nproc)
    table(f"{out}: estimate", ["", "value"], _estimate_rows(run))
    emit({"out": str(out), **asdict(run)}, json)


def _estimate_rows(run: "RunEstimate") -> list[list[object]]:
    return [
        ["device", f"{run.devices} of {run.device}, {run.precision}"],
        ["global batch", f"{run.global_batch:,.4g} sequences"],
        ["micro batch", f"{run.micro_batch:,.4g} sequences, up to {run.micro_tokens:,} tokens"],
        ["accumulation", f"{run.accumulation:,}"],
        ["steps", f"{run.steps:,}"],
        ["sequences", f"{run.sequences:,} ({run.epochs:.3g} epochs)"],
        ["hours", f"{run.hours:.3g} ({run.rate})"],
    ]


def _run(settings: TrainSettings, out: Path, resume: str, timeout: float, json: bool) -> None:
    from packhorse.train.journal import Diverged
    from packhorse.train.ranks import joined

    with joined(settings.device, timeout) as ranks:
        try:
            outcome = _train(settings, out, resume, ranks)
        except Diverged as error:
            document = {
                "out": str(out),
                "error": str(error),
                "exit_code": error.exit_code,
                "step": error.step,
                "checkpoint": error.checkpoint and str(error.checkpoint),
                "settings": asdict(settings),
            }
            emit(document, json and ranks.rank == 0)
            raise
        if ranks.rank == 0:
            if outcome.model and Path(settings.train) == out / CORPUS:
                _write_card(settings, out, outcome)
            _show_outcome(outcome, out)
            if settings.push and outcome.model:
                from packhorse.checkpoint.hub import push

                note(f"pushing {outcome.model} to {settings.push}")
                note(f"pushed: {push(outcome.model, settings.push)}")
            document = {"out": str(out), **asdict(outcome), "settings": asdict(settings)}
            document["model"] = outcome.model and str(outcome.model)
            emit(document, json)
            sys.stdout.flush()
    if ranks.rank == 0 and outcome.signal:
        leave(outcome.signal, f"{out}: stopped after step {outcome.step:,}")


def _write_card(settings: TrainSettings, out: Path, outcome: "RunOutcome") -> None:
    from packhorse.data.packed.manifest import read_manifest
    from packhorse.train.card import write_card

    corpus = read_manifest(out / CORPUS / "train")
    write_card(out / "model", settings, corpus, out / "log.jsonl", outcome.best)


def _train(settings: TrainSettings, out: Path, resume: str, ranks: "RankGroup") -> "RunOutcome":
    from packhorse.device import describe, dtype_name
    from packhorse.train.job import assemble
    from packhorse.train.loop import stop_signals, train

    report = note if ranks.rank == 0 else lambda message: None
    job = assemble(settings, ranks.rank, ranks.world)
    kernel = type(job.model.bert.kernel).__name__.lower()
    details = [describe(job.place.device), dtype_name(job.place.dtype), f"{kernel} kernel"]
    if ranks.world > 1:
        details.append(f"{ranks.world} ranks")
    if job.compiled:
        details.append("compiled")
    report(f"{job.checkpoint.name}: {', '.join(details)}")
    for message in job.notes:
        report(message)
    facts = {"model": job.checkpoint.name, "device": str(job.place.device)}
    with stop_signals() as stop_signal, run_progress(ranks.rank, facts) as show:
        show("training", None)
        return train(
            job,
            out,
            resume=resume,
            watch=partial(show, "training"),
            stop_signal=stop_signal,
            report=report,
            ranks=ranks,
        )


@contextmanager
def run_progress(
    rank: int, facts: Mapping[str, Any] | None = None
) -> Iterator[Callable[[str, "RunStatus | None"], None]]:
    """Show how far runs are; yields a function of a run's name and status (None: it starts).

    Only rank 0 shows and publishes something. An evaluation gets a line of its own, which stays.
    """
    if rank != 0:
        yield lambda name, run_status: None
        return
    with stage_progress("train", facts=facts) as report:

        def show(name: str, run_status: "RunStatus | None") -> None:
            if run_status is None:
                report(name, 0, 0, figures={"does": f"{name}, first steps"})
            elif run_status.evaluation:
                note(_evaluation_line(run_status))
            else:
                report(
                    name,
                    run_status.step,
                    run_status.steps,
                    detail=_detail(run_status),
                    figures={
                        "does": f"{name}, loss {run_status.loss:.3f}",
                        "sequences_per_second": run_status.sequences_per_second,
                        "tokens_per_second": run_status.tokens_per_second,
                        "fill": run_status.fill,
                    },
                )

        yield show


def _detail(run_status: "RunStatus") -> str:
    """The figures of recent steps in one line."""
    parts = [f"loss {run_status.loss:.4f}"]
    if run_status.accuracy is not None:
        parts.append(f"accuracy {run_status.accuracy:.4f}")
    parts.append(f"{run_status.sequences_per_second:,.1f} seq/s")
    parts.append(f"{run_status.tokens_per_second:,.0f} tok/s")
    parts.append(f"{run_status.fill:.1%} full")
    if run_status.mfu is not None:
        parts.append(f"MFU {run_status.mfu:.1%}")
    return ", ".join(parts)


def _evaluation_line(run_status: "RunStatus") -> str:
    """The measures of an evaluation in one line."""
    measures = ", ".join(f"{name} {value:.6g}" for name, value in run_status.evaluation.items())
    return f"step {run_status.step:,}, {run_status.sequences:,} sequences: {measures}"


def _show_outcome(outcome: "RunOutcome", out: Path) -> None:
    if outcome.signal:
        return
    rows: list[list[object]] = [[name, value] for name, value in outcome.evaluation.items()]
    rows += [["steps", outcome.step], ["sequences learned from", outcome.sequences]]
    reached = ", target reached" if outcome.reached else ""
    table(
        f"{outcome.model or out}: finished in {outcome.seconds:.1f} s{reached}",
        ["measure", "value"],
        rows,
    )


def leave(signal_number: int, message: str) -> NoReturn:
    """End like a process that the signal ended, so that shells and schedulers know."""
    note(f"{message}; the same command resumes from there")
    if signal_number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + signal_number)
