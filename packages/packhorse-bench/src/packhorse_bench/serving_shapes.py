"""`packhorse bench serve --shape`: servers as busy as clients can make them, on a GPU or a CPU.

A request has a shape: so many texts of so many tokens. For each shape every server has a closed
loop, which measures its throughput, and if wanted an open loop at a share of that rate, which
measures its latency. A lone query, one short text from one client, is measured while the server is
idle and beside an open loop. A fast server answers more requests than one process can send, so
there are several load generators, on cores of their own where there are enough of them.

Servers take turns in each round, and a row has the medians of the rounds. Beside its speed a row
says what limited it: how full the batches and how busy the GPU, the server's cores and the busiest
generator were. Vectors of a sample are compared with those of the library in fp32 before anything
is measured; a server that gives others has no figures.

A run says what it is doing: when a server is ready, each loop as it begins and its figures as it
ends. A loop that takes longer than it should says what it waits for, and what the threads of our
server are doing.
"""

from __future__ import annotations

import http.client
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
import torch

from packhorse import device as devices
from packhorse.errors import InputError, RequestFailed
from packhorse.monitor import nvidia
from packhorse.reports import docstrings, random_model, subject
from packhorse.runtime.encoder import Encoder
from packhorse.runtime.loading import load
from packhorse_bench.peers import Unserved, failure_reason
from packhorse_bench.serving import Progress, ReportLine, server_place
from packhorse_bench.serving_figures import LoopComparison, LoopRow, ServingSetup
from packhorse_bench.serving_host import (
    CoreDivision,
    HostFigures,
    HostWatch,
    default_generators,
    divide_cores,
    on_cores,
    raise_file_limit,
    stacks,
)
from packhorse_bench.serving_load import (
    Generator,
    GeneratorTeam,
    LoadJob,
    LoadReport,
    RequestTexts,
)
from packhorse_bench.serving_servers import (
    OURS,
    PEERS,
    Endpoint,
    PeerServer,
    start,
    stopping,
    with_served_model,
)
from packhorse_bench.serving_texts import Shape, learn_vocabulary, requests

DEFAULT_SHAPES = (Shape(50, 1), Shape(50, 16), Shape(512, 16))
LONE = Shape(12, 1)  # a search query
OPEN_LOAD = 0.8  # of the closed loop's rate
LONE_LOADS = (0.5, 0.8)
CHECKED = 8  # texts whose vectors are compared
LEAST_COSINE = 0.999  # with the vectors in fp32: 16-bit numbers stay above, another model does not
# Tokens in flight in a closed loop: several batches, so that the next is complete when one ends.
TOKENS_IN_FLIGHT = {"cpu": 1 << 14}
TOKENS_IN_FLIGHT_GPU = 1 << 18
MAX_CONNECTIONS = 2048
OFFLINE_TOKENS = 1 << 20  # of a call of the library without a server
TIMEOUT = 60.0
LATE_SECONDS = 10.0  # beyond its time, until a loop says what it waits for; and from then on again
# Known servers that run in containers of their own: measured with --url, otherwise missing.
CONTAINERS = ("text-embeddings-inference", "vLLM")
MISSING = "missing; the serve guide has its container, --url measures it"


@dataclass(frozen=True)
class MeasuredServer:
    """A server that answers, started here or found at a URL."""

    name: str
    endpoint: Endpoint
    process: PeerServer | None  # None: at a URL
    cosine: float

    @property
    def pid(self) -> int | None:
        """Of its first process, if it was started here."""
        return None if self.process is None else self.process.process.pid

    def check_alive(self) -> None:
        """Raise `Unserved` if it no longer answers."""
        try:
            self.endpoint.vectors(["Is anybody there?"])
        except (OSError, http.client.HTTPException) as error:
            words = "" if self.process is None else f": {self.process.last_words()}"
            raise Unserved(f"stopped answering ({error}){words}") from error


@dataclass
class LoopTrials:
    """What was measured of one server under one loop, with a report per round."""

    server: MeasuredServer
    shape: Shape
    loop: str
    load: float | None
    connections: int
    reports: list[LoadReport] = field(default_factory=list)
    host: list[HostFigures] = field(default_factory=list)

    def row(self, rounds: slice = slice(None)) -> LoopRow:
        """The medians of some rounds; errors are those of all of them."""
        reports = self.reports[rounds]
        host = self.host[rounds]
        rate = median(report.rate for report in reports)
        errors: Counter[str] = Counter()
        for report in reports:
            errors.update(report.errors)
        return LoopRow(
            server=self.server.name,
            shape=str(self.shape),
            loop=self.loop,
            load=self.load,
            connections=self.connections,
            requests_per_second=rate,
            texts_per_second=rate * self.shape.texts,
            tokens_per_second=rate * self.shape.all_tokens,
            p50_ms=median(report.p50_ms for report in reports),
            p99_ms=median(report.p99_ms for report in reports),
            errors=", ".join(f"{count} {error}" for error, count in sorted(errors.items())),
            fill=_median(figures.fill for figures in host),
            tokens_per_batch=_median(figures.tokens_per_batch for figures in host),
            gpu_busy=_median(figures.gpu_busy for figures in host),
            server_cores=_median(figures.server_cores for figures in host),
            generator_share=max(report.share for report in reports),
            generator_late_ms=max(report.late_ms for report in reports),
            cosine_min=self.server.cosine,
        )


@dataclass
class LoopStage:
    """The state of a run: its servers and generators, and what has been measured so far."""

    setup: ServingSetup
    device: torch.device
    team: GeneratorTeam
    single: Generator  # asks the lone query
    places: dict[Shape, tuple[int, int]]  # the generators' requests of a shape: first, count
    servers: list[MeasuredServer]
    problems: dict[str, str]
    report_line: ReportLine
    trials: dict[tuple[str, Shape, str, float | None], LoopTrials] = field(default_factory=dict)

    def alive(self) -> list[MeasuredServer]:
        """The servers that still answer."""
        return [server for server in self.servers if server.name not in self.problems]

    def connections(self, shape: Shape) -> int:
        """Of the closed loop with this shape."""
        if self.setup.load.connections:
            return self.setup.load.connections
        return default_connections(shape, self.device)


class LateLoop:
    """Says what a loop waits for once it takes longer than it should: `GeneratorTeam.report`'s."""

    def __init__(self, stage: LoopStage, server: MeasuredServer, job: LoadJob) -> None:
        self.stage = stage
        self.server = server
        self.begun = time.monotonic()
        self.next_line = self.begun + job.warm + job.seconds + LATE_SECONDS
        self.has_stacks = server.process is None or server.name != OURS

    def __call__(self, status: str) -> None:
        """Take what a generator is doing, once a second."""
        now = time.monotonic()
        if now < self.next_line:
            return
        self.next_line = now + LATE_SECONDS
        line = f"{self.server.name}: this loop has taken {now - self.begun:.0f} s; a generator is "
        self.stage.report_line(line + status)
        if not self.has_stacks and self.server.process is not None:
            self.has_stacks = True
            for line in stacks(self.server.process):
                self.stage.report_line(line)


def default_connections(shape: Shape, device: torch.device) -> int:
    """Enough connections to keep a device busy with requests of this shape."""
    in_flight = TOKENS_IN_FLIGHT.get(device.type, TOKENS_IN_FLIGHT_GPU)
    return max(4, min(MAX_CONNECTIONS, in_flight // shape.all_tokens))


def measure(
    setup: ServingSetup, progress: Progress | None = None, report_line: ReportLine | None = None
) -> LoopComparison:
    """Start the servers, or find them at their URLs, and measure them in turns."""
    check(setup)
    started = time.monotonic()
    report = report_line or (lambda line: None)
    device = devices.choose_device(setup.device)
    dtype = setup.dtype or devices.dtype_name(devices.default_dtype(device))
    generators = setup.load.generators or default_generators()
    division = divide_cores(generators, more=1 if setup.load.lone else 0)
    raise_file_limit(2 * max(MAX_CONNECTIONS, setup.load.connections))
    with ExitStack() as stack:
        temporary = TemporaryDirectory(prefix="packhorse-bench-", ignore_cleanup_errors=True)
        scratch = Path(stack.enter_context(temporary))
        report("making the model and its texts")
        texts = setup.texts or tuple(item.text for item in docstrings.read())
        folder = _model_folder(setup, texts, scratch)
        running: list[PeerServer] = []
        stack.enter_context(stopping(running))
        problems: dict[str, str] = {}
        # Servers open their models while the texts are made here.
        starting = _start(setup, folder, device, dtype, division, running, problems, scratch)
        report(f"starting: {', '.join(server.name for server in starting) or 'nothing'}")
        encoder = load(folder, device="cpu", dtype="fp32")
        request_texts, tokens, places = _requests(setup, encoder, texts)
        sample = _sample(request_texts, places)
        servers = _check_servers(setup, starting, encoder, sample, problems, report)
        del encoder
        processes = [
            stack.enter_context(Generator(request_texts, tokens, scratch, core))
            for core in division.generators
        ]
        stage = LoopStage(
            setup=setup,
            device=device,
            team=GeneratorTeam(processes[:generators]),
            single=processes[-1],
            places=places,
            servers=servers,
            problems=problems,
            report_line=report,
        )
        report(f"serving: {', '.join(server.name for server in servers) or 'nobody'}")
        _run_rounds(stage, progress or (lambda done, total: None))
        offline: list[LoopRow] = []
        if setup.load.offline:
            with on_cores(division.servers):
                offline = _offline(setup, folder, device, dtype, request_texts, places)
    measured = (*(trials.row() for trials in stage.trials.values()), *offline)
    return LoopComparison(
        rows=(*measured, *_missing(setup, problems)),
        trials=tuple(
            trials.row(slice(place, place + 1))
            for trials in stage.trials.values()
            for place in range(len(trials.reports))
        ),
        device=device,
        dtype=dtype,
        generators=generators,
        server_cores=division.server_cores,
        pinned=division.servers is not None,
        remarks=tuple(_unknown_gpu(device)),
        seconds=time.monotonic() - started,
    )


def check(setup: ServingSetup) -> None:
    """Refuse what measures nothing before anything is started."""
    loops = setup.load
    positive = {
        "--short": loops.seconds,
        "--warm": loops.warm,
        "--repeats": setup.effort.repeats,
        "--count": setup.count,
        "--batch-size": setup.batch_size,
    }
    for flag, value in positive.items():
        if not 0 < value < math.inf:
            raise InputError(f"{flag} {value} measures nothing; pass more than 0")
    not_negative = {
        "--generators": loops.generators,
        "--connections": loops.connections,
        "--threads": setup.threads,
        "--rate": loops.rate,
    }
    for flag, value in not_negative.items():
        if value < 0:
            raise InputError(f"{flag} {value}: pass 0 for the default, or more")
    if not loops.shapes:
        raise InputError("there is no --shape; pass TOKENSxTEXTS, such as 50x16")
    for name in setup.peers:
        if name not in PEERS:
            raise InputError(f"unknown peer {name!r}; there are {', '.join(PEERS)}")


def _model_folder(setup: ServingSetup, texts: Sequence[str], scratch: Path) -> Path:
    """The folder of the model; random weights without --vocab get one learned from the texts."""
    if setup.config in random_model.CONFIGS and not setup.vocab:
        size = random_model.CONFIGS[setup.config].vocab_size
        vocab = learn_vocabulary(texts, size, scratch / "vocab.txt")
        setup = replace(setup, vocab=str(vocab))
    return subject.folder(setup, scratch)


def _requests(
    setup: ServingSetup, encoder: Encoder, texts: Sequence[str]
) -> tuple[list[RequestTexts], list[int], dict[Shape, tuple[int, int]]]:
    """All requests, their numbers of tokens, and where the requests of a shape are."""
    words = [word for text in texts for word in text.split()]
    request_texts: list[RequestTexts] = []
    tokens: list[int] = []
    places: dict[Shape, tuple[int, int]] = {}
    for shape in dict.fromkeys((*setup.load.shapes, LONE)):
        if shape.tokens > encoder.max_length:
            raise InputError(
                f"--shape {shape}: the model takes {encoder.max_length} tokens per text"
            )
        more = requests(shape, encoder.tokenizer, words, setup.count, setup.seed)
        places[shape] = (len(request_texts), len(more))
        request_texts += more
        tokens += [shape.all_tokens] * len(more)
    return request_texts, tokens, places


def _sample(
    request_texts: Sequence[RequestTexts], places: dict[Shape, tuple[int, int]]
) -> list[str]:
    """A few texts of every shape, `CHECKED` in all or a few more."""
    per_shape = math.ceil(CHECKED / len(places))
    sample: list[str] = []
    for first, count in places.values():
        chosen = request_texts[first : first + min(count, per_shape)]
        sample += [text if isinstance(text, str) else text[0] for text in chosen]
    return sample


def _start(
    setup: ServingSetup,
    folder: Path,
    device: torch.device,
    dtype: str,
    division: CoreDivision,
    running: list[PeerServer],
    problems: dict[str, str],
    scratch: Path,
) -> list[PeerServer]:
    """Start our server and the peers without waiting for them; none if there are URLs."""
    if setup.load.urls:
        return []
    threads = setup.threads or division.server_cores
    place = server_place(setup, folder, device, dtype, threads, scratch)
    place = replace(place, more=_server_flags(setup, device))
    for name in (OURS, *setup.peers):
        try:
            with on_cores(division.servers):
                running.append(start(name, place, scratch))
        except Unserved as error:
            problems[name] = failure_reason(error)
    return running


def _server_flags(setup: ServingSetup, device: torch.device) -> tuple[str, ...]:
    """Flags of our server: fronts, and limits that admit all requests of a closed loop.

    Limits are divided among fronts, and connections may come to them unevenly: hence four times.
    """
    in_flight = [
        (shape, setup.load.connections or default_connections(shape, device))
        for shape in setup.load.shapes
    ]
    connections = max(count for _, count in in_flight)
    texts = max(count * shape.texts for shape, count in in_flight)
    tokens = max(count * shape.all_tokens for shape, count in in_flight)
    limits = {
        "--max-concurrent-requests": max(512, 4 * connections),
        "--max-connections": max(2048, 4 * connections),
        "--max-queue-inputs": max(4096, 4 * texts),
        "--max-queue-tokens": max(1 << 20, 4 * tokens),
        "--max-batch-inputs": max(32, *(shape.texts for shape in setup.load.shapes)),
        "--max-buffered-bytes": max(256 << 20, 4 * 8 * tokens),  # about eight bytes per token
    }
    flags = [part for flag, value in limits.items() for part in (flag, str(value))]
    if setup.load.fronts is not None:
        flags += ["--fronts", str(setup.load.fronts)]
    if setup.load.graphs:
        flags.append("--graphs")
    return tuple(flags)


def _check_servers(
    setup: ServingSetup,
    started: Sequence[PeerServer],
    encoder: Encoder,
    sample: Sequence[str],
    problems: dict[str, str],
    report_line: ReportLine,
) -> list[MeasuredServer]:
    """The servers that answer with the encoder's vectors; the others become problems."""
    exact = np.asarray(encoder.embed(list(sample)), np.float32)
    candidates: list[tuple[str, Endpoint, PeerServer | None]] = [
        (process.name, process.endpoint, process) for process in started
    ]
    candidates += [(name, with_served_model(url), None) for name, url in setup.load.urls]
    servers = []
    for name, endpoint, process in candidates:
        try:
            if process is not None:
                process.wait(report_line)
            cosine = _smallest_cosine(endpoint.vectors(sample), exact)
        except (Unserved, OSError, http.client.HTTPException, ValueError, LookupError) as error:
            problems[name] = failure_reason(error)
            continue
        if cosine < LEAST_COSINE:
            problems[name] = (
                f"its vectors are not those of the model (smallest cosine {cosine:.4f}); "
                "serve the model that --model names, with the same pooling"
            )
            continue
        servers.append(MeasuredServer(name, endpoint, process, cosine))
    return servers


def _smallest_cosine(vectors: np.ndarray, exact: np.ndarray) -> float:
    """The smallest cosine of a server's vectors with the expected ones; -1 for other sizes."""
    if vectors.shape != exact.shape:
        return -1.0
    norms = np.linalg.norm(vectors, axis=1) * np.linalg.norm(exact, axis=1)
    return float(((vectors * exact).sum(1) / norms).min())


def _run_rounds(stage: LoopStage, progress: Progress) -> None:
    """Measure all loops, with every server in each round."""
    loops = stage.setup.load
    rounds = stage.setup.effort.repeats
    steps: list[Callable[[MeasuredServer, int], None]] = []
    for shape in loops.shapes:
        steps.append(lambda server, turn, shape=shape: _closed(stage, server, shape, turn))
        if loops.open_loop:
            steps.append(lambda server, turn, shape=shape: _open(stage, server, shape, turn))
    if loops.lone:
        for load in (0.0, *LONE_LOADS):
            steps.append(lambda server, turn, load=load: _lone(stage, server, load, turn))
    seconds = loops.warm + loops.seconds
    total = rounds * len(steps) * len(stage.servers) * seconds
    done = 0.0
    for turn in range(rounds):
        for step in steps:
            for server in stage.alive():
                try:
                    server.check_alive()
                    step(server, turn)
                except (Unserved, RequestFailed) as error:
                    stage.report_line(f"{server.name}: {error}")
                    stage.problems[server.name] = failure_reason(error)
                done += seconds
                progress(int(done), int(total))


def _job(stage: LoopStage, server: MeasuredServer, shape: Shape, turn: int) -> LoadJob:
    """A closed loop over requests of this shape."""
    first, count = stage.places[shape]
    return LoadJob(
        host=server.endpoint.host,
        port=server.endpoint.port,
        path=server.endpoint.path,
        model=server.endpoint.model,
        rate=0.0,
        seconds=stage.setup.load.seconds,
        warm=stage.setup.load.warm,
        connections=stage.connections(shape),
        timeout=TIMEOUT,
        seed=stage.setup.seed + turn,
        first=first,
        count=count,
        keep=True,
    )


def _watch(stage: LoopStage, server: MeasuredServer) -> HostWatch:
    local = server.process is not None or server.endpoint.host in ("127.0.0.1", "localhost", "::1")
    gpu = gpu_number(stage.device) if local else None
    loops = stage.setup.load
    return HostWatch(server.endpoint, server.pid, gpu, loops.warm, loops.seconds)


def _run_loop(
    stage: LoopStage,
    server: MeasuredServer,
    loop: tuple[Shape, str, float | None],
    job: LoadJob,
    generators: GeneratorTeam | Generator,
) -> LoadReport:
    """Run a job, and keep its figures unless nothing was answered."""
    shape, name, load = loop
    share = "" if load is None else f" at {load:.0%}"
    title = f"{server.name}, {shape}, {name}{share}, {job.connections} connections"
    stage.report_line(f"{title}: begins")
    with _watch(stage, server) as watch:
        report = generators.run(job, LateLoop(stage, server, job))
    if watch.is_stuck:
        stage.report_line(f"{title}: what the machine did is unknown, NVML or /proc do not answer")
    errors = ", ".join(f"{count} {error}" for error, count in report.errors.items())
    if not report.answered:
        raise Unserved(f"answered nothing in {title}: {errors or 'no answer within the loop'}")
    key = (server.name, shape, name, load)
    trials = stage.trials.setdefault(key, LoopTrials(server, shape, name, load, job.connections))
    trials.reports.append(report)
    trials.host.append(watch.figures())
    stage.report_line(
        f"{title}: {report.rate:,.1f} requests/s, {report.rate * shape.all_tokens:,.0f} tokens/s, "
        f"p50 {report.p50_ms:.1f} ms, p99 {report.p99_ms:.1f} ms, errors: {errors or 'none'}"
    )
    return report


def _closed(stage: LoopStage, server: MeasuredServer, shape: Shape, turn: int) -> None:
    job = _job(stage, server, shape, turn)
    _run_loop(stage, server, (shape, "closed", None), job, stage.team)


def _closed_rate(stage: LoopStage, server: MeasuredServer, shape: Shape) -> float:
    """Requests per second of the closed loops so far."""
    trials = stage.trials.get((server.name, shape, "closed", None))
    if trials is None:
        raise Unserved(f"has no closed loop of {shape}, whose rate others are a share of")
    return median(report.rate for report in trials.reports)


def _open(stage: LoopStage, server: MeasuredServer, shape: Shape, turn: int) -> None:
    """Random arrivals at the given rate, or at a share of what it answers in a closed loop."""
    set_rate = stage.setup.load.rate
    rate = set_rate or OPEN_LOAD * _closed_rate(stage, server, shape)
    job = replace(_job(stage, server, shape, turn), rate=rate)
    _run_loop(stage, server, (shape, "open", None if set_rate else OPEN_LOAD), job, stage.team)


def _lone(stage: LoopStage, server: MeasuredServer, load: float, turn: int) -> None:
    """One client with one short text at a time, beside an open loop of the first shape."""
    job = replace(_job(stage, server, LONE, turn), connections=1)
    if not load:
        _run_loop(stage, server, (LONE, "lone", load), job, stage.single)
        return
    shape = stage.setup.load.shapes[0]
    open_loop = _job(stage, server, shape, turn)
    # It ends after the client, so that none of the queries is answered by an idle server.
    open_loop = replace(
        open_loop, rate=load * _closed_rate(stage, server, shape), seconds=open_loop.seconds + 0.5
    )
    stage.team.start(open_loop)
    try:
        _run_loop(stage, server, (LONE, "lone", load), job, stage.single)
    finally:
        stage.team.report(LateLoop(stage, server, open_loop))


def _offline(
    setup: ServingSetup,
    folder: Path,
    device: torch.device,
    dtype: str,
    request_texts: Sequence[RequestTexts],
    places: dict[Shape, tuple[int, int]],
) -> list[LoopRow]:
    """Our library on the token ids of each shape's requests, without a server: its upper bound."""
    encoder = load(folder, device=device, dtype=dtype, graphs=setup.load.graphs)
    rows: list[LoopRow] = []
    for shape in setup.load.shapes:
        first, count = places[shape]
        texts: list[str] = []
        for request in request_texts[first : first + count]:
            texts += [request] if isinstance(request, str) else request
        jobs = encoder.prepare("embed", texts[: max(1, OFFLINE_TOKENS // shape.tokens)])
        sequences = [sequence for job in jobs for sequence in job.sequences]
        tokens = sum(map(len, sequences))
        encoder.run(sequences, *jobs[0].heads)  # warm
        speeds: list[float] = []
        for _ in range(setup.effort.repeats):
            done = 0
            started = time.monotonic()
            while time.monotonic() - started < setup.load.seconds:
                encoder.run(sequences, *jobs[0].heads)
                done += tokens
            speeds.append(done / (time.monotonic() - started))
        speed = median(speeds)
        rows.append(
            LoopRow(
                f"{OURS}, offline",
                shape=str(shape),
                loop="offline",
                requests_per_second=speed / shape.all_tokens,
                texts_per_second=speed / shape.tokens,
                tokens_per_second=speed,
            )
        )
    return rows


def gpu_number(device: torch.device) -> int | None:
    """The number that NVML has for this device; None for a CPU."""
    if device.type != "cuda":
        return None
    number = device.index or 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if number < len(visible) and visible[number].strip().isdecimal():
        return int(visible[number])
    return number


def _unknown_gpu(device: torch.device) -> list[str]:
    """Why it is not known how busy the GPU was; nothing if it is."""
    if gpu_number(device) is None:
        return []
    with nvidia.opened() as (library, notes):
        if library is not None:
            return []
    return [f"GPU busy is not known: {note}" for note in notes or ["NVML cannot be read"]]


def _missing(setup: ServingSetup, problems: dict[str, str]) -> list[LoopRow]:
    """Rows of the servers that could not be measured, and of the containers that nobody named."""
    order = (OURS, *setup.peers, *(name for name, _ in setup.load.urls))
    rows = [LoopRow(name, problem=problems[name]) for name in order if name in problems]
    named = {name.lower() for name, _ in setup.load.urls}
    rows += [LoopRow(name, problem=MISSING) for name in CONTAINERS if name.lower() not in named]
    return rows


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
