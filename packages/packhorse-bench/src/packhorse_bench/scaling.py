"""`packhorse bench scaling`: sequences per second over threads and streams, ours and the peers'.

A stream is a process bound to cores of its own, with a share of the list; an engine with `streams`
times `threads` uses so many cores. Ours also runs as one process that divides its batches between
groups of cores by itself (`runtime.cores`), and that is compared with independent processes of one
thread each: what those reach together is linear. All processes are opened first and then take
turns, round after round, so that other load on the machine affects all of them alike. A round lasts
from the first start to the last end among its streams. Inputs are random token ids, so that no
engine tokenizes.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
import torch

from packhorse.errors import InputError
from packhorse.processor import level
from packhorse.reports import subject
from packhorse.reports.padded import PeerEngine, PeerSetting
from packhorse.reports.tables import Table, rate
from packhorse.tokens import Encoding
from packhorse_bench import encode, peers

OURS = "packhorse"
TIMEOUT = 600  # seconds that a process may take to open its engine, or for a round


@dataclass(frozen=True)
class ScalingRequest:
    """What to measure; `model`, `config`, `vocab` and `heads` as in `EncodeRequest`."""

    lengths: np.ndarray
    model: str
    config: str | None = None
    vocab: str | None = None
    heads: int | None = None
    dtype: str = "fp32"
    cores: tuple[int, ...] = ()  # numbers of cores; empty: powers of two, and all
    peers: tuple[str, ...] | None = None  # None: those that are installed
    batch_size: int = 32  # of the peers
    order: str = "sorted"
    repeats: int = 5
    seed: int = 0


@dataclass
class ScalingRow:
    """The figures of one engine with so many streams and threads."""

    engine: str
    streams: int
    threads: int  # of each stream
    sequences_per_second: float = 0.0  # of the median round
    slowest: float = 0.0
    fastest: float = 0.0
    of_linear: float | None = None  # a share of independent processes of ours with one thread each
    limited: bool = True  # `encode.EncodeRow.limited`
    problem: str | None = None
    seconds: list[float] = field(default_factory=list[float], repr=False)

    @property
    def cores(self) -> int:
        """Cores that are used together."""
        return self.streams * self.threads

    @property
    def subject(self) -> str:
        """Engine, streams and threads in words, for messages about this row."""
        return f"{self.engine} {self.streams} x {self.threads}"


@dataclass(frozen=True)
class Stream:
    """What a process runs, on which cores."""

    engine: str
    dtype: str
    cores: tuple[int, ...]
    folder: Path
    scratch: Path
    batch_size: int
    order: str
    work: Sequence[Encoding]


def measure(
    request: ScalingRequest, progress: Callable[[int, int], None] | None = None
) -> list[ScalingRow]:
    """Open every engine in every division of the cores, time them in turns, return their rows."""
    usable = _usable_cores()
    counts = request.cores or _powers(len(usable))
    _check(request, counts, len(usable))
    rows = _rows(request, counts)
    total = len(rows) * (1 + request.repeats)
    finished = 0
    with TemporaryDirectory(prefix="packhorse-bench-") as scratch, ExitStack() as opened:
        folder = subject.folder(request, Path(scratch))
        work = encode.random_work(request.lengths, folder, request.seed)
        running: list[tuple[ScalingRow, list[Connection]]] = []
        for row in rows:
            try:
                streams = _streams(request, row, usable, work, folder, Path(scratch))
                running.append((row, _open(streams, opened)))
            except ChildProcessError as error:
                row.problem = str(error)
            finished += 1
            if progress:
                progress(finished, total)
        for row, connections in running * request.repeats:
            try:
                if row.problem is None:
                    row.seconds.append(_time_round(connections))
            except OSError as error:  # a process failed, or has ended
                row.problem = str(error)
            finished += 1
            if progress:
                progress(finished, total)
    _fill(rows, len(request.lengths))
    return rows


def table(rows: Sequence[ScalingRow]) -> Table:
    """Measured rows; those with a problem are for `problems`."""
    columns = ("engine", "streams", "threads", "seq/s", "slowest to fastest", "of linear")
    return Table.of(
        columns,
        [
            (
                row.engine if row.limited else f"{row.engine} (not limited)",
                "own" if row.engine == OURS and row.streams == 1 else str(row.streams),
                str(row.threads),
                rate(row.sequences_per_second),
                f"{rate(row.slowest)} to {rate(row.fastest)}",
                "-" if row.of_linear is None else f"{row.of_linear:.0%}",
            )
            for row in rows
            if row.problem is None
        ],
    )


def draw(path: Path, rows: Sequence[ScalingRow], title: str) -> None:
    """Plot a line per engine over cores: of each number of cores the fastest division."""
    from packhorse.reports import plots

    figure = plots.new_figure(8, 4.2)
    axes = figure.subplots()
    measured = [row for row in rows if row.problem is None]
    for engine in dict.fromkeys(row.engine for row in measured):
        best: dict[int, float] = {}
        for row in measured:
            if row.engine == engine:
                best[row.cores] = max(best.get(row.cores, 0.0), row.sequences_per_second)
        color = plots.OURS if engine == OURS else None
        axes.plot([*best], [*best.values()], "o-", label=engine, color=color)
    axes.set_xlabel("cores")
    axes.set_ylabel("sequences per second")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    plots.plain_axes(axes, title)
    plots.save_figure(figure, path)


def _rows(request: ScalingRequest, counts: Sequence[int]) -> list[ScalingRow]:
    """Ours as one process and as independent ones; each peer in all divisions of the cores."""
    names = request.peers
    if names is None:
        # sentence-transformers takes texts, not token ids.
        texts_only = "sentence-transformers"
        names = tuple(n for n in peers.PEERS if n != texts_only and find_spec(n))
    rows: list[ScalingRow] = []
    for cores in counts:
        rows.append(ScalingRow(OURS, 1, cores))
        if cores > 1:
            rows.append(ScalingRow(OURS, cores, 1))
        for name in names:
            divisions = [s for s in _powers(cores) if cores % s == 0]
            limited = level() is None or name not in peers.UNLIMITED
            rows += [ScalingRow(name, s, cores // s, limited=limited) for s in divisions]
    return rows


def _check(request: ScalingRequest, counts: Sequence[int], usable: int) -> None:
    if request.repeats < 1:
        raise InputError(f"--repeats {request.repeats} measures nothing; pass 1 or more")
    for cores in counts:
        if not 1 <= cores <= usable:
            raise InputError(f"--cores {cores}: this process may use 1 to {usable}")
    if len(request.lengths) < max(counts):
        raise InputError(f"--count {len(request.lengths)}: pass a sequence per core or more")
    for name in request.peers or ():
        if name not in peers.PEERS:
            raise InputError(f"unknown peer {name!r}; there are {', '.join(peers.PEERS)}")


def _usable_cores() -> list[int]:
    if not hasattr(os, "sched_getaffinity"):
        raise InputError("bench scaling binds processes to cores, which this system cannot")
    return sorted(os.sched_getaffinity(0))


def _powers(most: int) -> tuple[int, ...]:
    """Powers of two up to a number, and the number itself."""
    return tuple(sorted({*(1 << n for n in range(most.bit_length())), most}))


def _streams(
    request: ScalingRequest,
    row: ScalingRow,
    usable: list[int],
    work: Sequence[Encoding],
    folder: Path,
    scratch: Path,
) -> list[Stream]:
    return [
        Stream(
            engine=row.engine,
            dtype=request.dtype,
            cores=tuple(usable[number * row.threads : (number + 1) * row.threads]),
            folder=folder,
            scratch=scratch,
            batch_size=request.batch_size,
            order=request.order,
            work=work[number :: row.streams],
        )
        for number in range(row.streams)
    ]


def _open(streams: Sequence[Stream], opened: ExitStack) -> list[Connection]:
    """Start the processes and wait until each has run its share once.

    The first is waited for alone: it writes the exported model that the others read.
    """
    spawn = multiprocessing.get_context("spawn")
    connections: list[Connection] = []
    for number, stream in enumerate(streams):
        connection, child_connection = spawn.Pipe()
        process = spawn.Process(target=_run_stream, args=(stream, child_connection), daemon=True)
        process.start()
        # So that a wait for a process that has ended raises EOFError.
        child_connection.close()
        opened.callback(process.join, 10)
        opened.callback(process.terminate)
        opened.callback(connection.close)
        connections.append(connection)
        if number == 0:
            _receive(connection)
    for connection in connections[1:]:
        _receive(connection)
    return connections


def _receive(connection: Connection) -> tuple[float, float]:
    """The times that a process sends; raises if it failed, ended or does not answer."""
    try:
        if not connection.poll(TIMEOUT):
            raise ChildProcessError(f"no answer within {TIMEOUT} s")
        message = connection.recv()
    except EOFError:
        raise ChildProcessError("its process ended; is there enough memory?") from None
    if isinstance(message, str):
        raise ChildProcessError(message)
    return message


def _time_round(connections: Sequence[Connection]) -> float:
    for connection in connections:
        connection.send("go")
    times = [_receive(connection) for connection in connections]
    return max(end for _, end in times) - min(begin for begin, _ in times)


def _run_stream(stream: Stream, connection: Connection) -> None:
    """The process: open the engine, run once, then once for each message."""
    try:
        os.sched_setaffinity(0, stream.cores)  # before a library starts threads, which inherit it
        torch.set_num_threads(len(stream.cores))
        run = _engine(stream).run
        run(stream.work, stream.order)
        connection.send((0.0, 0.0))
        while True:
            connection.recv()
            begin = time.perf_counter()  # one clock for all processes of a machine
            run(stream.work, stream.order)
            connection.send((begin, time.perf_counter()))
    except (EOFError, KeyboardInterrupt):
        return
    except Exception as error:  # another library's code may raise anything
        connection.send(peers.failure_reason(error))


def _engine(stream: Stream) -> PeerEngine:
    cpu = torch.device("cpu")
    if stream.engine == OURS:
        return encode.packhorse_engine(stream.folder, stream.dtype, cpu)
    longest = max(map(len, stream.work))
    setting = PeerSetting(stream.folder, cpu, stream.batch_size, longest, stream.scratch)
    return peers.PEERS[stream.engine](setting, stream.dtype)


def _fill(rows: Sequence[ScalingRow], count: int) -> None:
    for row in rows:
        if row.problem is None:
            row.sequences_per_second = count / median(row.seconds)
            row.slowest = count / max(row.seconds)
            row.fastest = count / min(row.seconds)
    independent = {
        row.cores: row.sequences_per_second
        for row in rows
        if row.engine == OURS and row.threads == 1 and row.problem is None
    }
    for row in rows:
        if row.problem is None and (linear := independent.get(row.cores)):
            row.of_linear = row.sequences_per_second / linear
