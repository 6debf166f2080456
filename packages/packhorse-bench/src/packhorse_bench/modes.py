"""The same requests padded, packed offline and packed online, side by side in one run.

The modes and their names are those of PopRT's packed BERT example: one sequence a row (`Original`),
and two ways to pack, each offline (all requests are there beforehand) and
online (they come one by one, through `PackRunner`). Ours, ragged, is beside them. So is its
workload: 1,600 requests of random token ids, lengths N(128, 128) cut to 1..256, batches of 16 rows
of 256 tokens. All modes share weights and number format and answer with the same vector (the mean
of the last states, normalized), so `largest_difference` to `Original` shows that they agree.

What is fair here. All lanes run one model with the fastest kernel there is; a mode is the layout of
its batches, which decides what the linear layers pay for. `Original` has rows × capacity tokens:
every linear layer pays for every place of padding. Its padding attends to itself, which is
cheaper than the full square of scores that a padded model computes, so ratios to it err on the low
side. Offline modes are timed as PopRT's are, without laying out their batches; that is
`packing_us`, and `throughput_with_packing` has it in. Online modes are timed from the first token
ids handed in to the last vector. PopRT's modes keep its rules (offline next-fit; a batch closes at
the first request that does not fit), ours those of `PackRunner`. A packed ONNX graph runs behind
the same runner, in fp32, as users of `packhorse onnx pack` have it. Other libraries are timed with
their padding, to the longest of each batch. Lanes take turns, round after round, so that whatever
else the machine does falls on all of them alike; speeds are those of the median round.

How long someone waits is measured where someone does: with `clients`, on the online modes and on
`Original` behind the same runner, at most a sequence a row. The open loop comes at a given rate, or
at 70 % of what the mode can do.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
import torch

from packhorse import device as devices
from packhorse.errors import InputError
from packhorse.reports import subject
from packhorse.runtime.encoder import Encoder
from packhorse_bench import clients, lanes, peers, workloads
from packhorse_bench.lanes import Ids, ModeLane, ModesStage

Progress = Callable[[int, int], None]
OTHERS = ("transformers", "onnxruntime", "packed-onnx")
CLIENTS_A_ROW = 3.5  # of the closed loop: more than fit into one batch, so batches fill up
SHARE = 0.7  # of a mode's throughput, the rate of its open loop: busy, but queues stay bounded
WARM_BATCHES = 4  # that a lane runs before it is timed


@dataclass(frozen=True)
class ModesSetup:
    """What to measure, on `model` or, with random weights, on a geometry named by `config`."""

    model: str = ""
    config: str | None = None
    vocab: str | None = None
    heads: int | None = None
    dtype: str | None = None
    device: str | None = None
    rows: int = 16
    capacity: int = 256
    requests: int = 1600
    workload: str = "normal"
    seed: int = 2023
    timeout: float = 0.015  # as in PopRT's own comparison
    graphs: bool = False
    host: bool = False  # instead of the model's results, zeros at once
    repeats: int = 3
    load_repeats: int = 1  # rounds of both loops; 0: no latencies
    rate: float | None = (
        None  # requests per second of the open loop; None: a share of the best_throughput
    )
    peers: tuple[str, ...] | None = None  # None: those of OTHERS that are installed

    @property
    def clients(self) -> int:
        """Of the closed loop."""
        return int(CLIENTS_A_ROW * self.rows)


@dataclass(frozen=True)
class ModeRow:
    """One mode's figures, None where there are none; or why there is no figure at all."""

    name: str
    kernel: str = ""
    throughput: float = 0.0  # requests per second in the median round; offline without packing
    best_throughput: float = 0.0
    ratio_to_padded: float = 0.0  # times Original, median to median
    best_ratio_to_padded: float = 0.0
    throughput_with_packing: float = 0.0  # in the median round
    packing_us: float | None = None  # a request, where it is timed apart
    fill: float = 0.0  # requests' tokens / computed tokens
    largest_difference: float = 0.0  # of a vector's number to Original's
    batch_ms: float | None = None  # median, in the closed loop
    p50_ms: float | None = None  # in the closed loop
    p90_ms: float | None = None
    p99_ms: float | None = None
    open_rate: float | None = None  # requests per second
    open_p50_ms: float | None = None
    open_p90_ms: float | None = None
    open_p99_ms: float | None = None
    problem: str | None = None

    @property
    def subject(self) -> str:
        """What the row is about, in words."""
        return self.name


@dataclass(frozen=True)
class ModesComparison:
    """The rows of all modes, then of the peers; and the lengths of the requests."""

    rows: tuple[ModeRow, ...]
    lengths: np.ndarray
    device: torch.device
    dtype: str


def measure(setup: ModesSetup, progress: Progress | None = None) -> ModesComparison:
    """Load and warm up all lanes, time them in rounds, then measure latencies in rounds."""
    _check(setup)
    device = devices.choose_device(setup.device)
    lengths = draw_lengths(setup)
    with TemporaryDirectory(prefix="packhorse-bench-", ignore_cleanup_errors=True) as scratch:
        stage = _stage(setup, device, Path(scratch))
        mode_lanes, encoder = lanes.open_modes(stage)
        requests = draw_ids(lengths, encoder.tokenizer.vocab_size, setup.seed)
        for lane in mode_lanes:
            _warm_up(lane, setup, requests)
        others = []
        failures = []
        for name in _peers(setup):
            try:
                peer = _open_other(name, stage, encoder, Path(scratch))
                _warm_up(peer, setup, requests)
                others.append(peer)
            except Exception as error:  # another library's code may raise anything
                failures.append(ModeRow(_title(name, stage), problem=peers.failure_reason(error)))
        with settled_heap():
            _take_turns([*mode_lanes, *others], setup, requests, progress)
    rows = [_row(lane, mode_lanes[0], setup, lengths) for lane in (*mode_lanes, *others)]
    return ModesComparison((*rows, *failures), lengths, device, stage.dtype)


def describe(setup: ModesSetup, comparison: ModesComparison) -> dict[str, str]:
    """What was measured, in words."""
    lengths = comparison.lengths
    loops = f"; {setup.clients} clients, or random arrivals" if setup.load_repeats else ""
    return {
        "model": subject.name(setup) + (", not run: zeros at once" if setup.host else ""),
        "dtype": comparison.dtype,
        "workload": f"{setup.workload}: {len(lengths):,} requests of {lengths.mean():.1f} tokens "
        f"({lengths.min()} to {lengths.max()}), seed {setup.seed}",
        "batches": f"{setup.rows} x {setup.capacity} tokens, timeout {1e3 * setup.timeout:g} ms; "
        f"medians of {setup.repeats} rounds{loops}",
    }


def draw_lengths(setup: ModesSetup) -> np.ndarray:
    """Tokens of each request; of the mix "normal", as PopRT's example draws them."""
    if setup.workload != "normal":
        longest = setup.capacity
        return workloads.draw(setup.workload, setup.requests, seed=setup.seed, longest=longest)
    half = setup.capacity / 2
    drawn = np.random.RandomState(setup.seed).normal(half, half, setup.requests)
    return np.clip(drawn.astype(int), 1, setup.capacity)


def draw_ids(lengths: np.ndarray, vocabulary: int, seed: int) -> list[Ids]:
    """Token ids of these lengths, any of the vocabulary."""
    rng = np.random.RandomState(seed)
    return [rng.randint(0, vocabulary, length, dtype=np.int32) for length in lengths]


def _stage(setup: ModesSetup, device: torch.device, scratch: Path) -> ModesStage:
    dtype = devices.dtype_name(devices.default_dtype(device))
    return ModesStage(
        folder=subject.folder(setup, scratch),
        device=device,
        dtype=setup.dtype or dtype,
        rows=setup.rows,
        capacity=setup.capacity,
        timeout=setup.timeout,
        graphs=setup.graphs,
        host=setup.host,
    )


def _peers(setup: ModesSetup) -> tuple[str, ...]:
    if setup.peers is not None:
        return setup.peers
    return tuple(name for name in OTHERS if find_spec(name.replace("packed-onnx", "onnxruntime")))


def _open_other(name: str, stage: ModesStage, encoder: Encoder, scratch: Path) -> ModeLane:
    if name == "packed-onnx":
        return lanes.open_packed_onnx(stage, scratch)
    return lanes.open_peer(name, stage, encoder, scratch)


def _title(name: str, stage: ModesStage) -> str:
    return lanes.PACKED_ONNX if name == "packed-onnx" else lanes.peer_name(name, stage)


def _warm_up(lane: ModeLane, setup: ModesSetup, requests: Sequence[Ids]) -> None:
    """Run a few batches; with graphs all requests, because every new shape is compiled once."""
    lane.run(requests if setup.graphs else requests[: WARM_BATCHES * setup.rows])
    if setup.graphs and lane.runner:
        with lane.runner(len(requests)) as runner:
            runner.warm()


@contextmanager
def settled_heap() -> Iterator[None]:
    """Exclude all objects that exist now from garbage collection inside this context.

    A compiler leaves millions of objects behind, and each collection that visits them costs 0.3
    seconds, in the middle of whatever is being timed.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _take_turns(
    lanes: Sequence[ModeLane],
    setup: ModesSetup,
    requests: Sequence[Ids],
    progress: Progress | None,
) -> None:
    """Run all lanes in each round: first for throughput, then for latency under load.

    Interleaved, so that other load on the machine affects all lanes alike. Latencies come last
    because the rate of an open loop depends on the throughput.
    """
    turns = [partial(_time, lane, requests) for _, lane in product(range(setup.repeats), lanes)]
    turns += [
        partial(_load, lane, setup, requests, setup.seed + number)
        for number, lane in product(range(setup.load_repeats), lanes)
        if lane.runner
    ]
    for done, turn in enumerate(turns, 1):
        turn()
        if progress is not None:
            progress(done, len(turns))


def _time(lane: ModeLane, requests: Sequence[Ids]) -> None:
    lane.passes.append(lane.run(requests))


def _load(lane: ModeLane, setup: ModesSetup, requests: Sequence[Ids], seed: int) -> None:
    if lane.runner is None:
        return
    with lane.runner(len(requests)) as runner:
        lane.closed.append(clients.closed_loop(runner.submit, requests, setup.clients))
        lane.batch_ms.append(runner.stats().compute_ms)
    with lane.runner(len(requests)) as runner:
        rate = _rate(lane, setup)
        lane.opened.append(clients.open_loop(runner.submit, requests, rate, seed))


def _rate(lane: ModeLane, setup: ModesSetup) -> float:
    """Requests per second of the open loop."""
    _, seconds = _best_and_median(lane)
    return setup.rate or SHARE * setup.requests / seconds


def _row(lane: ModeLane, original: ModeLane, setup: ModesSetup, lengths: np.ndarray) -> ModeRow:
    count = len(lengths)
    passes = lane.passes
    (best, middle), (padded_best, padded_middle) = map(_best_and_median, (lane, original))
    packing = [one_pass.packing for one_pass in passes if one_pass.packing is not None]
    row = ModeRow(
        name=lane.name,
        kernel=lane.kernel,
        throughput=count / middle,
        best_throughput=count / best,
        ratio_to_padded=padded_middle / middle,
        best_ratio_to_padded=padded_best / best,
        throughput_with_packing=count
        / median(one_pass.seconds + (one_pass.packing or 0) for one_pass in passes),
        packing_us=1e6 * median(packing) / count if packing else None,
        fill=int(lengths.sum()) * len(passes) / sum(one_pass.computed for one_pass in passes),
        largest_difference=_largest_difference(passes[0].vectors, original.passes[0].vectors),
    )
    return _with_latencies(row, lane, setup) if lane.closed else row


def _with_latencies(row: ModeRow, lane: ModeLane, setup: ModesSetup) -> ModeRow:
    p50, p90, p99 = clients.percentiles(lane.closed)
    open_p50, open_p90, open_p99 = clients.percentiles(lane.opened)
    return replace(
        row,
        batch_ms=median(lane.batch_ms),
        p50_ms=p50,
        p90_ms=p90,
        p99_ms=p99,
        open_rate=_rate(lane, setup),
        open_p50_ms=open_p50,
        open_p90_ms=open_p90,
        open_p99_ms=open_p99,
    )


def _best_and_median(lane: ModeLane) -> tuple[float, float]:
    """Seconds of the best and of the median pass.

    The median is robust against rounds that other load disturbed; the best shows what is possible.
    """
    seconds = [one_pass.seconds for one_pass in lane.passes]
    return min(seconds), median(seconds)


def _largest_difference(vectors: np.ndarray, others: np.ndarray) -> float:
    return float(np.abs(vectors - others).max())


def _check(setup: ModesSetup) -> None:
    least = {"--rows": setup.rows, "--requests": setup.requests, "--repeats": setup.repeats}
    for flag, value in least.items():
        if value < 1:
            raise InputError(f"{flag} {value} measures nothing; pass 1 or more")
    if setup.capacity < 8 or setup.load_repeats < 0 or setup.timeout < 0:
        raise InputError(
            f"--capacity ({setup.capacity}) must be 8 or more, --load-repeats "
            f"({setup.load_repeats}) and --timeout ({setup.timeout}) 0 or more"
        )
    if setup.rate is not None and not 0 < setup.rate < float("inf"):
        raise InputError(f"--rate is {setup.rate} requests per second; it must be above 0")
    for name in setup.peers or ():
        if name not in (known := (*peers.PEERS, "packed-onnx")):
            raise InputError(f"unknown peer {name!r}; there are {', '.join(known)}")
    if setup.dtype is not None:
        devices.parse_dtype(setup.dtype)
