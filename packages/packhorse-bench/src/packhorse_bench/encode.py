"""`packhorse bench encode`: the speed of encoders, ours and other libraries', on the same texts.

Every engine encodes the whole workload once to warm up (and for its vectors); then they are timed
in rounds of one pass each, so that other load on the machine affects all of them alike. The clock
includes tokenizing, sorting, padding or packing, and the copy of the vectors to the host; with
`EncodeRequest.lengths` the input is random token ids, and no engine tokenizes. Speeds are those of
the median round, with the slowest and the fastest round beside it. Vectors are compared with our
own in fp32.

In the order "sorted", our engine sorts and packs the list, as `Encoder.embed` does; in "arrival" it
cuts it into batches of the same number of tokens in the order given, which is what a server can do.
Peers get batches with a fixed number of sequences.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
import torch

from packhorse import device as devices
from packhorse.checkpoint import sentence
from packhorse.errors import InputError
from packhorse.model.heads import Embed
from packhorse.processor import level
from packhorse.reports import random_model, subject
from packhorse.reports.padded import ORDERS, PeerEngine, PeerSetting, TextsOrTokens
from packhorse.runtime import bulk
from packhorse.runtime.backend import TorchBackend
from packhorse.runtime.encoder import Encoder
from packhorse.runtime.loading import load
from packhorse.tokens import Encoding, Tokenizer
from packhorse_bench import kernel_profile, peers, workloads
from packhorse_bench.kernel_profile import KernelProfile
from packhorse_bench.serving_texts import exact_texts, learn_vocabulary

Progress = Callable[[int, int], None]
DISTINCT = 16384  # passages, which then come again; no engine remembers texts


@dataclass(frozen=True)
class EncodeRequest:
    """What to measure, on `model` or, with random weights, on a geometry named by `config`.

    Either `texts` are encoded, or random token ids of these `lengths`.
    """

    model: str
    texts: tuple[str, ...] = ()
    tokens: int | None = None  # encode passages of `texts` of exactly so many tokens each
    count: int = 256  # how many of these; texts and lengths are as many as are given
    lengths: np.ndarray | None = None
    config: str | None = None
    vocab: str | None = None
    heads: int | None = None
    dtypes: tuple[str, ...] = ("fp32",)
    device: str | None = None
    peers: tuple[str, ...] | None = None  # None: those that are installed
    batch_size: int = 32  # of the peers
    budget: int | None = None  # tokens per batch of ours; None: the device's default
    repeats: int = 5
    graphs: bool = False
    invariant: bool = False
    compile_peers: bool = False
    int8: bool = False
    profile: bool = False  # also show the kernels of our last dtype on CUDA
    seed: int = 0


@dataclass(frozen=True)
class EncodeRow:
    """The figures of one engine, dtype and order; `problem` says why there are none."""

    engine: str
    dtype: str
    order: str
    sequences_per_second: float = 0.0  # of the median round, as all figures below
    slowest: float = 0.0  # sequences per second of the slowest and of the fastest round
    fastest: float = 0.0
    tokens_per_second: float = 0.0  # real tokens
    over_sorted: float | None = None  # speed divided by that of transformers, same dtype, sorted
    over_arrival: float | None = None  # the same, in the order of arrival
    cosine_min: float = 0.0  # to our fp32 vectors
    cosine_mean: float = 0.0
    limited: bool = True  # the library keeps to PACKHORSE_CPU, where that is set
    problem: str | None = None

    @property
    def subject(self) -> str:
        """Engine, dtype and order in words, for messages about this row."""
        return " ".join(filter(None, (self.engine, self.dtype, self.order)))


@dataclass(frozen=True)
class Candidate:
    """An engine to measure, not yet loaded: loading may fail, which becomes its row."""

    name: str
    dtype: str
    open: Callable[[], PeerEngine]


@dataclass(frozen=True)
class EncodeTrial:
    """A loaded engine in one order: the vectors of its warm-up, the seconds of each round."""

    engine: PeerEngine
    order: str
    vectors: np.ndarray
    seconds: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class EncodeComparison:
    """The rows of all engines, and the lengths in tokens of what they encoded."""

    rows: list[EncodeRow]
    lengths: np.ndarray
    kernels: KernelProfile | None = None

    @property
    def spread(self) -> str:
        """The number of sequences and their lengths, in words."""
        lengths = self.lengths
        return (
            f"{len(lengths):,} sequences of {lengths.mean():.1f} tokens "
            f"({lengths.min()} to {lengths.max()})"
        )


def measure(request: EncodeRequest, progress: Progress | None = None) -> EncodeComparison:
    """Load, warm up and time all engines; one row per engine and order, and per failure."""
    _check(request)
    device = devices.choose_device(request.device)
    with TemporaryDirectory(prefix="packhorse-bench-", ignore_cleanup_errors=True) as scratch:
        if request.tokens is not None:
            request = _with_passages(request, Path(scratch))
        folder = subject.folder(request, Path(scratch))
        work, lengths, expected = _reference(request, folder, device)
        setting = _peer_setting(request, folder, device, int(lengths.max()), Path(scratch))
        candidates = _candidates(request, folder, setting)
        trials = []
        failures = []
        # An estimate until all are loaded: most engines have two orders.
        total = len(candidates) * (1 + 2 * request.repeats)
        for done, candidate in enumerate(candidates, 1):
            _warm_up(candidate, work, trials, failures)
            _report_progress(progress, done, total)
        # Round after round, not engine after engine: a machine that slows down (other load, heat)
        # would otherwise be blamed on whichever engine ran then.
        turns = trials * request.repeats
        total = len(candidates) + len(turns)
        for done, trial in enumerate(turns, len(candidates) + 1):
            trial.seconds.append(_time_pass(trial, work, device))
            _report_progress(progress, done, total)
        kernels = _profile(request, folder, device, lengths) if request.profile else None
    return EncodeComparison([*_rows(trials, expected, lengths), *failures], lengths, kernels)


def _profile(
    request: EncodeRequest, folder: Path, device: torch.device, lengths: np.ndarray
) -> KernelProfile:
    """The kernels of a batch of such lengths, in the last dtype and as our last variant runs."""
    encoder = load(
        folder,
        device=device,
        dtype=request.dtypes[-1],
        budget=request.budget,
        graphs=request.graphs,
        invariant=request.invariant,
    )
    _torch_backend(encoder.backend).model.heads["embed"] = Embed(("mean",), normalize=True)
    work = replace(request, texts=(), lengths=lengths)
    return kernel_profile.profile(encoder, _random_sequences(work, encoder))


def packhorse_engine(
    folder: Path,
    dtype: str,
    device: torch.device,
    budget: int | None = None,
    variant: str = "",
) -> PeerEngine:
    """Our encoder as an engine; `variant` is "graphs", "invariant" or empty.

    Its pooling is the normalized mean, whatever the model's own is, because the peers' is too and
    vectors are compared.
    """
    graphs = variant == "graphs"
    invariant = variant == "invariant"
    options = {"device": device, "dtype": dtype, "budget": budget}
    encoder = load(folder, graphs=graphs, invariant=invariant, **options)
    _torch_backend(encoder.backend).model.heads["embed"] = Embed(("mean",), normalize=True)

    def run(work: TextsOrTokens, order: str) -> np.ndarray:
        texts = [item for item in work if isinstance(item, str)]
        if bulk.serves(encoder, texts, "truncate"):
            return bulk.embed(encoder, texts, by_length=order == "sorted")
        sequences = _tokenized(encoder, work)
        chunks = (
            [sequences]
            if order == "sorted"
            else batches_in_arrival_order(sequences, encoder.budget)
        )
        return np.stack([row for chunk in chunks for (row,) in encoder.run(chunk, "embed")])

    return PeerEngine(_engine_name(variant), dtype, ORDERS, run)


def _with_passages(request: EncodeRequest, scratch: Path) -> EncodeRequest:
    """Replace the texts by passages of an exact length; random weights learn a vocabulary first."""
    if request.config in random_model.CONFIGS and not request.vocab:
        size = random_model.CONFIGS[request.config].vocab_size
        vocab = learn_vocabulary(request.texts, size, scratch / "vocab.txt")
        request = replace(request, vocab=str(vocab))
    folder = subject.folder(request, scratch)
    tokenizer = Tokenizer.load(_tokenizer_folder(folder))
    words = [word for text in request.texts for word in text.split()]
    passages = exact_texts(
        request.tokens or 0, min(request.count, DISTINCT), tokenizer, words, request.seed
    )
    return replace(request, texts=tuple(islice(cycle(passages), request.count)))


def _tokenizer_folder(folder: Path) -> Path:
    layout = sentence.read(folder)
    return layout.transformer if layout else folder


def _tokenized(encoder: Encoder, work: TextsOrTokens) -> list[Encoding]:
    encodings = [item for item in work if isinstance(item, Encoding)]
    return encodings or encoder.tokenize([item for item in work if isinstance(item, str)])


def _engine_name(variant: str) -> str:
    return f"packhorse {variant}".strip()


def batches_in_arrival_order(
    sequences: Iterable[Encoding], budget: int
) -> Iterator[list[Encoding]]:
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
    if request.profile and devices.choose_device(request.device).type != "cuda":
        raise InputError("--profile shows the kernels of a CUDA device; pass --device cuda")
    if request.profile and request.graphs and request.invariant:
        raise InputError("--profile shows one of --graphs and --invariant; leave one out")


def _peer_setting(
    request: EncodeRequest, folder: Path, device: torch.device, longest: int, scratch: Path
) -> PeerSetting:
    home = _tokenizer_folder(folder)
    return PeerSetting(home, device, request.batch_size, longest, scratch)


def _reference(
    request: EncodeRequest, folder: Path, device: torch.device
) -> tuple[TextsOrTokens, np.ndarray, np.ndarray]:
    """The workload (texts or tokens), its lengths in tokens, and its vectors in fp32."""
    encoder = load(folder, device=device, dtype="fp32", budget=request.budget)
    if (request.tokens or 0) > encoder.max_length:
        raise InputError(
            f"--tokens {request.tokens}: the model takes {encoder.max_length} tokens per text"
        )
    _torch_backend(encoder.backend).model.heads["embed"] = Embed(("mean",), normalize=True)
    # Passages come again after so many: their vectors are compared once.
    texts = request.texts[:DISTINCT] if request.tokens else request.texts
    sequences = encoder.tokenize(texts) if texts else _random_sequences(request, encoder)
    lengths = np.array([len(sequence) for sequence in sequences])
    vectors = np.stack([row for (row,) in encoder.run(sequences, "embed")])
    work = request.texts or sequences
    return work, np.resize(lengths, len(work)), vectors


def best_peers(rows: Sequence[EncodeRow]) -> list[str]:
    """How many times faster ours is than the fastest peer, per number format and order.

    Peers that are not limited to the processor that is pretended do not count.
    """
    measured = [row for row in rows if row.problem is None]
    lines: list[str] = []
    for ours in measured:
        others = [
            row
            for row in measured
            if (row.dtype, row.order, row.limited) == (ours.dtype, ours.order, True)
            and not row.engine.startswith("packhorse")
        ]
        if ours.engine == "packhorse" and others:
            best = max(others, key=lambda row: row.sequences_per_second)
            ratio = ours.sequences_per_second / best.sequences_per_second
            lines.append(f"{ours.dtype}, {ours.order}: {ratio:.2f} times {best.engine}")
    return lines


def random_work(lengths: np.ndarray, folder: Path, seed: int) -> list[Encoding]:
    """Random token ids of such lengths for the model in a folder."""
    encoder = load(folder, device="cpu")
    request = EncodeRequest(model="", lengths=lengths, seed=seed)
    return _random_sequences(request, encoder)


def _random_sequences(request: EncodeRequest, encoder: Encoder) -> list[Encoding]:
    """Random token ids of the requested lengths; raises if the model has too few positions."""
    lengths = np.asarray(request.lengths)
    config = _torch_backend(encoder.backend).model.bert.config
    longest = int(lengths.max())
    if longest > config.max_positions:
        raise InputError(
            f"the workload has sequences of {longest} tokens, the model {config.max_positions} "
            f"positions; pass --max-length {config.max_positions}"
        )
    ends = (encoder.tokenizer.cls_id or 0, encoder.tokenizer.sep_id or 0)
    return workloads.sequences(lengths, config.vocab_size, ends=ends, seed=request.seed)


def _torch_backend(backend: object) -> TorchBackend:
    if not isinstance(backend, TorchBackend):
        raise InputError("only the torch backend is measured here")
    return backend


def _candidates(request: EncodeRequest, folder: Path, setting: PeerSetting) -> list[Candidate]:
    """Every engine to measure, ours first in each dtype; int8 last, and float8 of ours alone."""
    names = request.peers
    if names is None:
        names = tuple(name for name in peers.PEERS if find_spec(name.replace("-", "_")))
    variants = [""]
    if request.graphs:
        variants.append("graphs")
    if request.invariant:
        variants.append("invariant")
    candidates = []
    dtypes = [dtype for dtype in request.dtypes if dtype != "int8"]
    for dtype in dtypes:
        for variant in variants:
            open_ours = partial(
                packhorse_engine, folder, dtype, setting.device, request.budget, variant
            )
            candidates.append(Candidate(_engine_name(variant), dtype, open_ours))
        if dtype == "float8":
            continue
        candidates.extend(
            Candidate(n, dtype, partial(peers.PEERS[n], setting, dtype)) for n in names
        )
        if request.compile_peers:
            compiled = partial(peers.transformers_compiled, setting, dtype)
            candidates.append(Candidate("transformers compiled", dtype, compiled))
    if not request.int8 and "int8" not in request.dtypes:
        return candidates
    open_ours = partial(packhorse_engine, folder, "int8", setting.device, request.budget)
    candidates.append(Candidate(_engine_name(""), "int8", open_ours))
    for name in [name for name in peers.INT8 if name in names]:
        candidates.append(Candidate(name, "int8", partial(peers.PEERS[name], setting, "int8")))
    return candidates


def _warm_up(
    candidate: Candidate,
    work: TextsOrTokens,
    trials: list[EncodeTrial],
    failures: list[EncodeRow],
) -> None:
    """Load an engine and run it once in each order; any error becomes its row.

    The first pass compiles, allocates and fills caches, which no later pass does again.
    """
    order = ""
    try:
        engine = candidate.open()
        for order in engine.orders:
            trials.append(EncodeTrial(engine, order, engine.run(work, order)))
    except Exception as error:  # another library's code may raise anything
        reason = peers.failure_reason(error)
        failures.append(EncodeRow(candidate.name, candidate.dtype, order, problem=reason))


def _time_pass(trial: EncodeTrial, work: TextsOrTokens, device: torch.device) -> float:
    # A GPU runs behind Python: without waiting on both sides, the work of one pass would be
    # counted in the next.
    devices.synchronize(device)
    start = time.perf_counter()
    trial.engine.run(work, trial.order)
    devices.synchronize(device)
    return time.perf_counter() - start


def _report_progress(progress: Progress | None, done: int, total: int) -> None:
    if progress is not None:
        progress(done, total)


def _rows(
    trials: Sequence[EncodeTrial], expected: np.ndarray, lengths: np.ndarray
) -> list[EncodeRow]:
    """Figures of each trial, by its median round, which a few disturbed rounds do not move."""
    medians = {(t.engine.name, t.engine.dtype, t.order): median(t.seconds) for t in trials}
    rows = []
    for trial in trials:
        name = trial.engine.name
        dtype = trial.engine.dtype
        seconds = median(trial.seconds)
        hf_sorted = medians.get(("transformers", dtype, "sorted"))
        hf_arrival = medians.get(("transformers", dtype, "arrival"))
        # Vectors that a library normalized in bf16 do not have length 1.
        vectors = trial.vectors[: len(expected)]
        norms = np.linalg.norm(vectors, axis=1) * np.linalg.norm(expected, axis=1)
        cosines = (vectors * expected).sum(1) / norms
        rows.append(
            EncodeRow(
                engine=name,
                dtype=dtype,
                order=trial.order,
                sequences_per_second=len(lengths) / seconds,
                slowest=len(lengths) / max(trial.seconds),
                fastest=len(lengths) / min(trial.seconds),
                tokens_per_second=int(lengths.sum()) / seconds,
                over_sorted=hf_sorted and hf_sorted / seconds,
                over_arrival=hf_arrival and hf_arrival / seconds,
                cosine_min=float(cosines.min()),
                cosine_mean=float(cosines.mean()),
                limited=level() is None or name not in peers.UNLIMITED,
            )
        )
    return rows
