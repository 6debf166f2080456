"""Settings and results of `serving`: what to measure of servers, and the figures."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from packhorse_bench.serving_load import LoadReport
from packhorse_bench.serving_search import Effort, RateTrial
from packhorse_bench.serving_servers import PEERS, Endpoint
from packhorse_bench.serving_texts import Shape

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class LoadSetup:
    """The loops of `serving_shapes`: which requests, by how many clients, and for how long."""

    shapes: tuple[Shape, ...] = ()
    open_loop: bool = False  # after the closed loop
    rate: float = 0.0  # requests per second of the open loop; 0: a share of the closed loop's
    lone: bool = False  # one short query, idle and beside load
    offline: bool = False  # also our library without a server, on the same token ids
    urls: tuple[tuple[str, Endpoint], ...] = ()  # running servers by name, none is started then
    generators: int = 0  # 0: a quarter of the cores
    connections: int = 0  # of all generators; 0: enough to keep the device busy
    fronts: int | None = None  # of our server; None: its default
    graphs: bool = False  # of our server and our library
    seconds: float = 5.0  # of a loop
    warm: float = 2.0  # before it


@dataclass(frozen=True)
class ServingSetup:
    """What to measure."""

    model: str
    config: str | None = None
    vocab: str | None = None
    heads: int | None = None
    texts: tuple[str, ...] = ()  # by default docstrings of the standard library
    count: int = 2048  # texts, drawn from these
    device: str | None = None
    dtype: str | None = None  # by default fp32 on a CPU, else bf16
    threads: int = 0  # 0: as many as cores
    peers: tuple[str, ...] = PEERS
    infinity: Path | None = None
    batch_size: int = 32  # of the peers
    limit_ms: float = 500.0
    connections: int = 256
    effort: Effort = field(default_factory=Effort)
    seed: int = 0
    load: LoadSetup = field(default_factory=LoadSetup)


@dataclass(frozen=True)
class Point:
    """One trial of one server."""

    server: str
    purpose: str  # most, search, confirm, sweep
    rate: float  # requests per second that were due; 0: a closed loop
    seconds: float
    asked: int  # requests sent
    answered_per_second: float
    tokens_per_second: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    worst_ms: float
    errors: str
    held: bool  # all were answered, and 99 of 100 within the limit
    generator_share: float  # of a core
    generator_late_ms: float

    @classmethod
    def of(cls, server: str, trial: RateTrial, report: LoadReport, limit: float) -> Point:
        """A trial and what came of it."""
        return cls(
            server=server,
            purpose=trial.purpose,
            rate=trial.rate,
            seconds=report.seconds,
            asked=report.asked,
            answered_per_second=report.rate,
            tokens_per_second=report.tokens_per_second,
            p50_ms=report.p50_ms,
            p90_ms=report.p90_ms,
            p99_ms=report.p99_ms,
            worst_ms=report.worst_ms,
            errors=", ".join(f"{count} {error}" for error, count in sorted(report.errors.items())),
            held=report.holds(limit),
            generator_share=report.share,
            generator_late_ms=report.late_ms,
        )


@dataclass(frozen=True)
class LoopRow:
    """One server under one loop: a trial, or the medians of several; or why there are none."""

    server: str
    shape: str = ""  # TOKENSxTEXTS of a request
    loop: str = ""  # closed, open, lone, offline
    load: float | None = None  # of the closed loop's rate: open and lone
    connections: int = 0
    requests_per_second: float = 0.0
    texts_per_second: float = 0.0
    tokens_per_second: float = 0.0
    p50_ms: float = 0.0
    p99_ms: float = 0.0
    errors: str = ""
    fill: float | None = None  # tokens of inputs / all tokens of the server's last batches
    tokens_per_batch: float | None = None
    gpu_busy: float | None = None
    server_cores: float | None = None
    generator_share: float = 0.0  # of its core, that the busiest generator took
    generator_late_ms: float = 0.0
    cosine_min: float | None = None
    problem: str | None = None

    @property
    def subject(self) -> str:
        """What the row is about."""
        return self.server


@dataclass(frozen=True)
class LoopComparison:
    """All servers under all loops."""

    rows: tuple[LoopRow, ...]  # medians
    trials: tuple[LoopRow, ...]
    device: torch.device
    dtype: str
    generators: int
    server_cores: int
    pinned: bool  # generators have cores of their own
    remarks: tuple[str, ...]
    seconds: float  # that all this took


@dataclass(frozen=True)
class ServeRow:
    """One server's figures; or why there are none."""

    server: str
    held_rate: float = 0.0  # requests per second, the highest within the limit
    over_peer: float | None = None  # times sentence-transformers'
    p50_ms: float | None = None  # at that rate, of the median trial
    p99_ms: float | None = None
    most_rate: float = 0.0  # answered a second in a closed loop, median
    tokens_per_second: float = 0.0  # at the same time
    of_runner: float = 0.0  # of what PackRunner.run does beside the same load
    cosine_min: float = 0.0
    generator_share: float = 0.0  # of a core, at the rate it holds
    problem: str | None = None

    @property
    def subject(self) -> str:
        """What the row is about."""
        return self.server


@dataclass(frozen=True)
class ServingComparison:
    """All servers, ours first, and what they were asked."""

    rows: tuple[ServeRow, ...]
    points: tuple[Point, ...]
    tokens: tuple[int, ...]  # of the texts
    runner_alone: float  # tokens per second of PackRunner.run
    runner_beside: float
    device: torch.device
    dtype: str
    threads: int
    seconds: float  # that all this took
