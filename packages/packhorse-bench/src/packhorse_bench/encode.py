"""Encoders side by side in one run: ours and the installed peers, on the same texts.

Every engine encodes the whole workload once to warm up and to show its vectors; then they are timed
in rounds, one pass each, so that whatever else the machine does falls on all of them alike. The
clock includes tokenizing, sorting, padding or packing, and the copy of the vectors to the host.
Where `Request.lengths` ask for random token ids, tokenizing is left out for all. Speeds are those
of the median round, with the slowest and the fastest beside it. Vectors are compared with our own
in fp32.

Ours sorts and packs all it is given ("sorted"); "arrival" cuts the sequences into batches of the
same token budget as they come, which is what a server can do. Peers get batches of one size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
import torch

from packhorse import device as devices
from packhorse.checkpoint import sentence
from packhorse.errors import InputError
from packhorse.model.heads import Embed
from packhorse.reports import subject
from packhorse.reports.padded import ORDERS, PeerEngine, PeerSetting, TextsOrTokens
from packhorse.runtime.backend import TorchBackend
from packhorse.runtime.encoder import Encoder
from packhorse.runtime.loading import load
from packhorse.tokens import Encoding
from packhorse_bench import peers, workloads

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class EncodeRequest:
    """What to measure, on `model` or, with random weights, on a geometry named by `config`.

    Either `texts` are encoded, or random token ids of these `lengths`.
    """

    model: str
    texts: tuple[str, ...] = ()
    lengths: np.ndarray | None = None
    config: str | None = None
    vocab: str | None = None
    heads: int | None = None
    dtypes: tuple[str, ...] = ("fp32",)
    device: str | None = None
    peers: tuple[str, ...] | None = None  # None: those that are installed
    batch_size: int = 32  # of the peers
    budget: int | None = None  # tokens a batch of ours; None: the device's default
    repeats: int = 5
    graphs: bool = False
    invariant: bool = False
    compile_peers: bool = False
    int8: bool = False
    seed: int = 0


@dataclass(frozen=True)
class EncodeRow:
    """One engine in one number format and order; or why there is no figure for it."""

    engine: str
    dtype: str
    order: str
    sequences_per_second: float = 0.0  # of the median round, as all figures below
    slowest: float = 0.0  # sequences a second of the slowest and of the fastest round
    fastest: float = 0.0
    tokens_per_second: float = 0.0  # real tokens
    over_sorted: float | None = None  # times transformers in the same dtype, sorted
    over_arrival: float | None = None
    cosine_min: float = 0.0  # to our fp32 vectors
    cosine_mean: float = 0.0
    problem: str | None = None

    @property
    def subject(self) -> str:
        """What the row is about, in words."""
        return " ".join(filter(None, (self.engine, self.dtype, self.order)))


@dataclass(frozen=True)
class Candidate:
    """An engine that is not open yet."""

    name: str
    dtype: str
    open: Callable[[], PeerEngine]


@dataclass(frozen=True)
class EncodeTrial:
    """An open engine in one order, the vectors of its first pass, the seconds of each round."""

    engine: PeerEngine
    order: str
    vectors: np.ndarray
    seconds: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class MeasuredEngine:
    """The rows of a run, and the lengths of what was encoded, in tokens."""

    rows: list[EncodeRow]
    lengths: np.ndarray

    @property
    def spread(self) -> str:
        """How many sequences of which lengths, in words."""
        lengths = self.lengths
        return (
            f"{len(lengths):,} sequences of {lengths.mean():.1f} tokens "
            f"({lengths.min()} to {lengths.max()})"
        )


def measure(request: EncodeRequest, progress: Progress | None = None) -> MeasuredEngine:
    """Open, warm up, time in rounds: a row for every engine and order, and for every failure."""
    _check(request)
    device = devices.choose_device(request.device)
    with TemporaryDirectory(prefix="packhorse-bench-", ignore_cleanup_errors=True) as scratch:
        folder = subject.folder(request, Path(scratch))
        work, lengths, exact = _reference(request, folder, device)
        setting = _setting(request, folder, device, int(lengths.max()), Path(scratch))
        candidates = _candidates(request, folder, setting)
        trials = []
        failures = []
        total = len(candidates) * (1 + 2 * request.repeats)  # until it is known what runs
        for done, candidate in enumerate(candidates, 1):
            _warm_up(candidate, work, trials, failures)
            _tell(progress, done, total)
        turns = trials * request.repeats
        total = len(candidates) + len(turns)
        for done, trial in enumerate(turns, len(candidates) + 1):
            trial.seconds.append(_timed(trial, work, device))
            _tell(progress, done, total)
    return MeasuredEngine([*_rows(trials, exact, lengths), *failures], lengths)


def packhorse_engine(
    folder: Path,
    dtype: str,
    device: torch.device,
    budget: int | None = None,
    way: str = "",
) -> PeerEngine:
    """Ours; its pooling is the mean, normalized, whatever the model says, as the peers' is.

    way: "graphs", "invariant" or neither.
    """
    graphs = way == "graphs"
    invariant = way == "invariant"
    options = {"device": device, "dtype": dtype, "budget": budget}
    encoder = load(folder, graphs=graphs, invariant=invariant, **options)
    _torch_backend(encoder.backend).model.heads["embed"] = Embed(("mean",), normalise=True)

    def run(work: TextsOrTokens, order: str) -> np.ndarray:
        sequences = _tokenized(encoder, work)
        chunks = [sequences] if order == "sorted" else as_they_come(sequences, encoder.budget)
        return np.stack([row for chunk in chunks for (row,) in encoder.run(chunk, "embed")])

    return PeerEngine(_name(way), dtype, ORDERS, run)


def _tokenized(encoder: Encoder, work: TextsOrTokens) -> list[Encoding]:
    encodings = [item for item in work if isinstance(item, Encoding)]
    return encodings or encoder.tokenize([item for item in work if isinstance(item, str)])


def _name(way: str) -> str:
    return f"packhorse {way}".strip()


def as_they_come(sequences: Iterable[Encoding], budget: int) -> Iterator[list[Encoding]]:
    """Batches of at most `budget` tokens, in the order of arrival."""
    batch: list[Encoding] = []
    used = 0
    for sequence in sequences:
        if batch and used + len(sequence) > budget:
            yield batch
            batch = []
            used = 0
        batch.append(sequence)
        used += len(sequence)
    if batch:
        yield batch


def _check(request: EncodeRequest) -> None:
    if not request.texts and request.lengths is None:
        raise InputError("there is nothing to encode; pass texts or lengths")
    for flag, value in (("--batch-size", request.batch_size), ("--repeats", request.repeats)):
        if value < 1:
            raise InputError(f"{flag} {value} measures nothing; pass 1 or more")
    for name in request.peers or ():
        if name not in peers.PEERS:
            raise InputError(f"unknown peer {name!r}; there are {', '.join(peers.PEERS)}")
    for dtype in request.dtypes:
        devices.parse_dtype(dtype)


def _setting(
    request: EncodeRequest, folder: Path, device: torch.device, longest: int, scratch: Path
) -> PeerSetting:
    layout = sentence.read(folder)
    home = layout.transformer if layout else folder
    return PeerSetting(home, device, request.batch_size, longest, scratch)


def _reference(
    request: EncodeRequest, folder: Path, device: torch.device
) -> tuple[TextsOrTokens, np.ndarray, np.ndarray]:
    """What is encoded, its lengths in tokens, and its vectors in fp32."""
    encoder = load(folder, device=device, dtype="fp32", budget=request.budget)
    _torch_backend(encoder.backend).model.heads["embed"] = Embed(("mean",), normalise=True)
    sequences = encoder.tokenize(request.texts) if request.texts else _random(request, encoder)
    lengths = np.array([len(sequence) for sequence in sequences])
    exact = np.stack([row for (row,) in encoder.run(sequences, "embed")])
    return request.texts or sequences, lengths, exact


def _random(request: EncodeRequest, encoder: Encoder) -> list[Encoding]:
    """Random token ids of the lengths asked for, which the model must have room for."""
    lengths = np.asarray(request.lengths)
    config = _torch_backend(encoder.backend).model.bert.config
    longest = int(lengths.max())
    if longest > config.max_positions:
        raise InputError(
            f"the workload has sequences of {longest} tokens, the model {config.max_positions} "
            f"positions; pass --max-length {config.max_positions}"
        )
    first, last = (end or 0 for end in (encoder.tokenizer.cls_id, encoder.tokenizer.sep_id))
    return workloads.sequences(lengths, config.vocab_size, ends=(first, last), seed=request.seed)


def _torch_backend(backend: object) -> TorchBackend:
    if not isinstance(backend, TorchBackend):
        raise InputError("only the torch backend is measured here")
    return backend


def _candidates(request: EncodeRequest, folder: Path, setting: PeerSetting) -> list[Candidate]:
    """All that is to be in the table, ours first in each dtype."""
    names = request.peers
    if names is None:
        names = tuple(name for name in peers.PEERS if find_spec(name.replace("-", "_")))
    ways = ["", *["graphs"] * request.graphs, *["invariant"] * request.invariant]
    candidates = []
    for dtype in request.dtypes:
        for way in ways:
            open_ours = partial(
                packhorse_engine, folder, dtype, setting.device, request.budget, way
            )
            candidates.append(Candidate(_name(way), dtype, open_ours))
        candidates.extend(
            Candidate(n, dtype, partial(peers.PEERS[n], setting, dtype)) for n in names
        )
        if request.compile_peers:
            compiled = partial(peers.transformers_compiled, setting, dtype)
            candidates.append(Candidate("transformers compiled", dtype, compiled))
    for name in [name for name in peers.INT8 if request.int8 and name in names]:
        candidates.append(Candidate(name, "int8", partial(peers.PEERS[name], setting, "int8")))
    return candidates


def _warm_up(
    candidate: Candidate,
    work: TextsOrTokens,
    trials: list[EncodeTrial],
    failures: list[EncodeRow],
) -> None:
    """Open and run once in each order. Whatever another's code raises is that engine's row."""
    order = ""
    try:
        engine = candidate.open()
        for order in engine.orders:
            trials.append(EncodeTrial(engine, order, engine.run(work, order)))
    except Exception as error:
        reason = _reason(error)
        failures.append(EncodeRow(candidate.name, candidate.dtype, order, problem=reason))


def _reason(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed; pip install 'packhorse[peers]'"
    lines = str(error).strip().splitlines() or [""]
    kind = "" if isinstance(error, peers.Unserved) else f"{type(error).__name__}: "
    return kind + lines[0][:200]


def _timed(trial: EncodeTrial, work: TextsOrTokens, device: torch.device) -> float:
    devices.synchronize(device)
    start = time.perf_counter()
    trial.engine.run(work, trial.order)
    devices.synchronize(device)
    return time.perf_counter() - start


def _tell(progress: Progress | None, done: int, total: int) -> None:
    if progress is not None:
        progress(done, total)


def _rows(trials: Sequence[EncodeTrial], exact: np.ndarray, lengths: np.ndarray) -> list[EncodeRow]:
    middle = {(t.engine.name, t.engine.dtype, t.order): median(t.seconds) for t in trials}
    rows = []
    for trial in trials:
        name = trial.engine.name
        dtype = trial.engine.dtype
        seconds = median(trial.seconds)
        over = [middle.get(("transformers", dtype, order)) for order in ("sorted", "arrival")]
        cosines = (trial.vectors * exact).sum(1)
        rows.append(
            EncodeRow(
                engine=name,
                dtype=dtype,
                order=trial.order,
                sequences_per_second=len(lengths) / seconds,
                slowest=len(lengths) / max(trial.seconds),
                fastest=len(lengths) / min(trial.seconds),
                tokens_per_second=int(lengths.sum()) / seconds,
                over_sorted=over[0] and over[0] / seconds,
                over_arrival=over[1] and over[1] / seconds,
                cosine_min=float(cosines.min()),
                cosine_mean=float(cosines.mean()),
            )
        )
    return rows
