"""`packhorse bench serve`: our server, sentence-transformers behind FastAPI, and infinity-emb.

All serve the same model in the same dtype with the same number of threads on the same machine, one
short real text per request, and take turns under the load generator (`serving_load`), a process of
its own on that machine. Four things are measured:

- that they give the same results: the smallest cosine of their vectors with the encoder's own;
- the highest throughput, in a closed loop, compared with `PackRunner.run` on the same texts, which
  has no HTTP. That is timed twice: alone, and beside a process that takes as much of the processor
  as the generator did;
- the highest rate of random arrivals at which 99 of 100 requests are answered within the limit and
  none fails (`serving_search`);
- the latencies of all servers at a few rates in between.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from shutil import copytree, ignore_patterns
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
import torch

from packhorse import device as devices
from packhorse.checkpoint import sentence
from packhorse.data.corpus.workers import cores
from packhorse.errors import InputError
from packhorse.reports import docstrings, padded, subject
from packhorse.runtime.encoder import Encoder
from packhorse.runtime.loading import load
from packhorse.runtime.runner import PackRunner
from packhorse.tokens.tokenizer import NO_LIMIT
from packhorse_bench import peers
from packhorse_bench.peers import Unserved, failure_reason
from packhorse_bench.serving_figures import Point, ServeRow, ServingComparison, ServingSetup
from packhorse_bench.serving_load import Generator, LoadJob, LoadReport
from packhorse_bench.serving_search import RateTrial, highest, take_turns
from packhorse_bench.serving_servers import (
    MODEL,
    OURS,
    PATH,
    PEERS,
    PeerServer,
    ServerPlace,
    start,
    stopping,
)

SHORTEST = 6  # tokens of a text
LONGEST = 250
CHECKED = 8  # texts whose vectors are compared
SATURATING = 128  # connections of a closed loop: enough to keep any of the servers busy
TIMED = 1024  # texts of a timed `PackRunner.run`
# Beyond these the generator is the bottleneck: its share of a core, and how late it sends requests
# as a share of the limit.
BUSY_SHARE = 0.8
BUSY_LATE = 0.1
RATES = (0.5, 0.9)  # of the rate that the slowest server holds, and of the rate of each server
REFERENCE = PEERS[0]  # whose rate is 1 in the table

Progress = Callable[[int, int], None]  # seconds of load so far, and in total
ReportLine = Callable[[str], None]


@dataclass
class ServingStage:
    """The state of a run: its servers, and what has been measured so far."""

    setup: ServingSetup
    encoder: Encoder
    texts: list[str]
    tokens: list[int]
    generator: Generator
    progress: Progress
    servers: dict[str, PeerServer] = field(default_factory=dict)
    points: list[Point] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)
    cosines: dict[str, float] = field(default_factory=dict)
    done: float = 0.0  # seconds of load

    @property
    def limit(self) -> float:
        """The limit of latency in seconds."""
        return self.setup.limit_ms / 1e3

    def alive(self) -> list[str]:
        """Names of the servers that still answer."""
        return [name for name in self.servers if name not in self.problems]

    def fail(self, name: str, error: Exception) -> None:
        """Leave a server out from now on; the error becomes its row."""
        self.problems[name] = failure_reason(error)

    def of(self, name: str, *purposes: str) -> list[Point]:
        """The trials of a server for these purposes."""
        return [
            point for point in self.points if point.server == name and point.purpose in purposes
        ]


def measure(
    setup: ServingSetup, progress: Progress | None = None, report_line: ReportLine | None = None
) -> ServingComparison:
    """Start the servers, measure them in turns, stop them."""
    _check(setup)
    started = time.monotonic()
    report = report_line or (lambda line: None)
    device = devices.choose_device(setup.device)
    threads = setup.threads or cores()
    with TemporaryDirectory(prefix="packhorse-bench-", ignore_cleanup_errors=True) as scratch:
        folder = subject.folder(setup, Path(scratch))
        with _threads(threads):
            encoder = load(folder, device=device, dtype=setup.dtype)
            texts, tokens = _texts(setup, encoder)
            running: list[PeerServer] = []
            with stopping(running), Generator(texts, tokens, Path(scratch)) as generator:
                advance: Progress = progress or (lambda done, total: None)
                stage = ServingStage(setup, encoder, texts, tokens, generator, advance)
                dtype = devices.dtype_name(encoder.dtype)
                place = server_place(setup, folder, device, dtype, threads, Path(scratch))
                _start(stage, place, running, Path(scratch))
                report(f"serving: {', '.join(stage.alive()) or 'nobody'}")
                alone, during_load = _most(stage)
                held = _search(stage)
                for name, rate in held.items():
                    report(f"{name} holds {rate:.1f} requests per second")
                _sweep(stage, held)
    return ServingComparison(
        rows=_rows(stage, held, during_load),
        points=tuple(stage.points),
        tokens=tuple(tokens),
        runner_alone=alone,
        runner_beside=during_load,
        device=device,
        dtype=dtype,
        threads=threads,
        seconds=time.monotonic() - started,
    )


def _check(setup: ServingSetup) -> None:
    effort = setup.effort
    least = {
        "--count": (setup.count, 1),
        "--connections": (setup.connections, 1),
        "--batch-size": (setup.batch_size, 1),
        "--repeats": (effort.repeats, 1),
        "--rounds": (effort.rounds, 1),
        "--threads": (setup.threads, 0),
    }
    for flag, (value, lowest) in least.items():
        if value < lowest:
            raise InputError(f"{flag} {value} measures nothing; pass {lowest} or more")
    positive = {"--limit-ms": setup.limit_ms, "--short": effort.short, "--long": effort.long}
    for flag, value in positive.items():
        if not 0 < value < float("inf"):
            raise InputError(f"{flag} {value} measures nothing; pass more than 0")
    for name in setup.peers:
        if name not in PEERS:
            raise InputError(f"unknown peer {name!r}; there are {', '.join(PEERS)}")


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Give `PackRunner.run` in this process as many threads as every server has."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _texts(setup: ServingSetup, encoder: Encoder) -> tuple[list[str], list[int]]:
    """Short texts in random order, and their numbers of tokens with special tokens."""
    texts = setup.texts or [item.text for item in docstrings.read()]
    longest = min(LONGEST, encoder.max_length)
    counts = [len(item) for item in encoder.tokenizer.encode(list(texts), NO_LIMIT)]
    short = [place for place, count in enumerate(counts) if SHORTEST <= count <= longest]
    if not short:
        raise InputError(f"no text has {SHORTEST} to {longest} tokens; there is nothing to ask")
    order = np.random.default_rng(setup.seed).permutation(short)[: setup.count].tolist()
    return [texts[place] for place in order], [counts[place] for place in order]


def server_place(
    setup: ServingSetup,
    folder: Path,
    device: torch.device,
    dtype: str,
    threads: int,
    scratch: Path,
) -> ServerPlace:
    """What all servers of a run share, with the ONNX model that infinity runs on a CPU."""
    layout = sentence.read(folder)
    pooling = layout.pooling if layout else ("mean",)
    onnx = None
    if pooling in (("mean",), ("cls",)):  # what infinity's optimum engine knows
        onnx = _onnx_folder(setup, folder, device, dtype, scratch)
    return ServerPlace(
        folder=folder,
        device=str(device),
        dtype=dtype,
        threads=threads,
        batch_size=setup.batch_size,
        infinity=setup.infinity,
        onnx=onnx,
        pooling=pooling[0] if onnx else "mean",
    )


def _onnx_folder(
    setup: ServingSetup, folder: Path, device: torch.device, dtype: str, scratch: Path
) -> Path | None:
    """A copy of the model with its ONNX graph, for infinity on a CPU; None where torch runs it."""
    if "infinity" not in setup.peers or device.type != "cpu" or dtype != "fp32":
        return None
    layout = sentence.read(folder)
    home = layout.transformer if layout else folder
    copy = scratch / "onnx-model"
    copytree(home, copy, ignore=ignore_patterns("*.safetensors", "*.bin", "*.onnx"))
    try:
        peers.fused_onnx(padded.PeerSetting(home, device, 1, LONGEST, copy))
    except Exception:  # no ONNX here, or a model it does not know: torch's engine serves it
        return None
    (copy / "plain.onnx").unlink()  # what it was fused from
    return copy


def _start(
    stage: ServingStage, place: ServerPlace, running: list[PeerServer], scratch: Path
) -> None:
    """Start all servers at once, wait for each, and compare its vectors with the encoder's."""
    for name in (OURS, *stage.setup.peers):
        try:
            stage.servers[name] = start(name, place, scratch)
            running.append(stage.servers[name])
        except Unserved as error:
            stage.fail(name, error)
    sample = stage.texts[:CHECKED]
    exact = np.asarray(stage.encoder.embed(sample), np.float32)
    for name in stage.alive():
        try:
            stage.servers[name].wait()
            vectors = stage.servers[name].vectors(sample)
            norms = np.linalg.norm(vectors, axis=1) * np.linalg.norm(exact, axis=1)
            stage.cosines[name] = float(((vectors * exact).sum(1) / norms).min())
        except Unserved as error:
            stage.fail(name, error)


def _trial(stage: ServingStage, name: str, trial: RateTrial, turn: int) -> LoadReport | None:
    """Run one trial of a server; None if it no longer answers.

    First one request is sent and awaited: its answer shows that no work of the trial before is
    left, which would slow this one down.
    """
    closed = not trial.rate
    setup = stage.setup
    job = LoadJob(
        port=stage.servers[name].endpoint.port,
        rate=trial.rate,
        seconds=trial.seconds,
        path=PATH,
        model=MODEL,
        connections=min(SATURATING, setup.connections) if closed else setup.connections,
        timeout=30.0 if closed else 4 * stage.limit,
        limit=stage.limit,
        seed=setup.seed + turn,
    )
    try:
        stage.servers[name].vectors(stage.texts[:1])
    except Unserved as error:
        return stage.fail(name, error)
    report = stage.generator.run(job)
    stage.points.append(Point.of(name, trial, report, stage.limit))
    stage.done += min(trial.seconds, report.seconds)
    stage.progress(int(stage.done), int(max(_expected(stage), stage.done)))
    return report


def _expected(stage: ServingStage) -> float:
    """An estimate of the seconds of load in total, for the progress bar."""
    effort = stage.setup.effort
    count = len(stage.alive())
    searching = effort.short * (effort.repeats + 1.5 * effort.rounds + count + 1)
    return count * (searching + 1.5 * effort.long * effort.repeats)


def _most(stage: ServingStage) -> tuple[float, float]:
    """Run closed loops in turn; returns tokens per second of PackRunner.run alone and beside load.

    A server shares the machine with the generator, `PackRunner.run` does not. So it is timed beside
    a process that takes the generator's share of the processor, or the comparison would be unfair
    to the server.
    """
    alone = []
    during_load = []
    share = 0.0
    effort = stage.setup.effort
    with PackRunner(stage.encoder, publish=False) as runner:
        _timed(stage, runner)  # warm-up, not counted
        for turn in range(effort.repeats):
            for name in stage.alive():
                report = _trial(stage, name, RateTrial(0.0, effort.short, "most"), turn)
                if report is not None and name == OURS:
                    share = report.share
            alone.append(_timed(stage, runner))
            with stage.generator.burning(share):
                during_load.append(_timed(stage, runner))
    return median(alone), median(during_load)


def _timed(stage: ServingStage, runner: PackRunner) -> float:
    """Tokens per second of `PackRunner.run`, from text to vectors."""
    texts = stage.texts[:TIMED]
    tokens = sum(stage.tokens[:TIMED])
    started = time.perf_counter()
    runner.run(texts)
    return tokens / (time.perf_counter() - started)


def _search(stage: ServingStage) -> dict[str, float]:
    """The highest rate that each server holds; the search starts from its closed loop."""
    most = {name: stage.of(name, "most") for name in stage.alive()}
    searches = {
        name: highest(_median(points, "answered_per_second"), stage.limit, stage.setup.effort)
        for name, points in most.items()
        if any(point.answered_per_second for point in points)
    }
    return take_turns(searches, lambda name, trial, turn: _trial(stage, name, trial, turn))


def _sweep(stage: ServingStage, held: dict[str, float]) -> None:
    """Measure every server at the rates near every server's highest, so that rows compare."""
    for turn, rate in enumerate(sweep_rates(list(held.values()))):
        for name in stage.alive():
            _trial(stage, name, RateTrial(rate, stage.setup.effort.short, "sweep"), turn)


def sweep_rates(held: Sequence[float]) -> list[float]:
    """Half of what the slowest holds, and nine tenths of what each holds."""
    rates = sorted(rate for rate in held if rate > 0)
    sweep_rates = [RATES[0] * rate for rate in rates[:1]] + [RATES[1] * rate for rate in rates]
    return [float(f"{rate:.2g}") for rate in sweep_rates]


def _median(points: Sequence[Point], figure: str) -> float:
    return median(getattr(point, figure) for point in points)


def unbroken(confirmed: float, points: Sequence[Point]) -> float:
    """The highest rate that held in every trial: `confirmed`, or less if the sweep broke it."""
    trials = [point for point in points if point.purpose in ("confirm", "sweep")]
    broken = min((point.rate for point in trials if not point.held), default=math.inf)
    if confirmed < broken:
        return confirmed
    return max((point.rate for point in trials if point.rate < broken), default=0.0)


def _rows(
    stage: ServingStage, confirmed: dict[str, float], runner_tokens: float
) -> tuple[ServeRow, ...]:
    held = {
        name: unbroken(rate, [point for point in stage.points if point.server == name])
        for name, rate in confirmed.items()
    }
    names = (OURS, *stage.setup.peers)
    return tuple(_row(stage, name, held, runner_tokens) for name in names)


def _row(stage: ServingStage, name: str, held: dict[str, float], runner_tokens: float) -> ServeRow:
    most = stage.of(name, "most")
    if name in stage.problems or not most:
        return ServeRow(name, problem=stage.problems.get(name, "answered nothing"))
    rate = held.get(name, 0.0)
    peer = held.get(REFERENCE)
    trials = (*stage.of(name, "confirm"), *stage.of(name, "sweep"))
    final = [point for point in trials if point.rate == rate and point.held]
    tokens = _median(most, "tokens_per_second")
    return ServeRow(
        server=name,
        held_rate=rate,
        over_peer=rate / peer if peer else None,
        p50_ms=_median(final, "p50_ms") if final else None,
        p99_ms=_median(final, "p99_ms") if final else None,
        most_rate=_median(most, "answered_per_second"),
        tokens_per_second=tokens,
        of_runner=tokens / runner_tokens,
        cosine_min=stage.cosines[name],
        generator_share=_median(final or most, "generator_share"),
    )
