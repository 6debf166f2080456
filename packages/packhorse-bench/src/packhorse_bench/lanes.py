"""The engines that `modes` measures (lanes): padded, packed offline, packed online, and peers.

A lane answers a list of requests (token ids) once, which is a `Pass`. Lanes that can serve requests
as they arrive also have a runner, for latencies. Tokens are counted where they enter the model, so
that those which fill up a compiled shape count as computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from packhorse import checkpoint, onnxpack
from packhorse.checkpoint import sentence
from packhorse.errors import InputError
from packhorse.model.heads import Embed
from packhorse.packing.batch import Packed
from packhorse.reports import padded
from packhorse.runtime.backend import TorchBackend
from packhorse.runtime.batches import LaunchedBatch, PackedShape
from packhorse.runtime.encoder import Backend, Encoder
from packhorse.runtime.loading import load
from packhorse.runtime.runner import PackRunner
from packhorse.tokens import Encoding
from packhorse_bench import peers

Ids = np.ndarray  # token ids of one request


class PackingMode(NamedTuple):
    """A way to lay requests into batches."""

    name: str
    layout: str  # "padded", or a mode of `runtime.batches`
    online: bool = False
    policy: str = "first_fit"


ORIGINAL = "Original"
PACKED_ONNX = "Pack Online AttentionMask(packed ONNX)"
MODES = (
    PackingMode(ORIGINAL, "padded"),
    PackingMode("Pack Offline Unpack Repack", "repack"),
    PackingMode("Pack Online Unpack Repack", "repack", online=True),
    PackingMode("Pack Offline AttentionMask", "mask", policy="next_fit"),
    PackingMode("Pack Online AttentionMask(first_fit)", "mask", online=True),
    PackingMode("Pack Online AttentionMask(next_fit)", "mask", online=True, policy="next_fit"),
    PackingMode("Pack Offline Ragged", "ragged"),
    PackingMode("Pack Online Ragged", "ragged", online=True),
)


@dataclass(frozen=True)
class ModesStage:
    """The model and batch shape that all lanes share."""

    folder: Path  # of the model, as transformers reads it
    device: torch.device
    dtype: str
    rows: int
    capacity: int
    timeout: float
    graphs: bool = False
    host: bool = False  # `Zeros` instead of the model


@dataclass(frozen=True)
class Pass:
    """The result of answering all requests once."""

    vectors: np.ndarray  # [n, E]
    seconds: float
    computed: int  # tokens
    packing: float | None = None  # seconds of laying out batches, if `seconds` excludes them


@dataclass(frozen=True)
class ModeLane:
    """A loaded mode or peer, and everything measured of it."""

    name: str
    kernel: str
    run: Callable[[Sequence[Ids]], Pass]
    runner: Callable[[int], PackRunner] | None = None  # for so many requests
    passes: list[Pass] = field(default_factory=list)
    closed: list[np.ndarray] = field(default_factory=list)  # latencies of each round
    opened: list[np.ndarray] = field(default_factory=list)
    batch_ms: list[float] = field(default_factory=list)


class Meter:
    """Wraps a backend and counts the tokens that it computes."""

    def __init__(self, backend: Backend, computed: Callable[[Packed], int]) -> None:
        self.backend = backend
        self.computed = computed
        self.tokens = 0

    def __call__(
        self, packed: Packed, heads: Sequence[str], at: Tensor | None = None
    ) -> Sequence[Tensor]:
        """Outputs of the backend."""
        self.tokens += self.computed(packed)
        return self.backend(packed, heads, at)


class Zeros:
    """Takes the place of a model whose results nobody needs: what remains is the host's time."""

    def __init__(self, width: int) -> None:
        self.vectors = torch.zeros(1, width)

    def __call__(
        self, packed: Packed, heads: Sequence[str], at: Tensor | None = None
    ) -> Sequence[Tensor]:
        """A vector of zeros for each sequence."""
        return [self.vectors.expand(len(packed), -1) for _ in heads]


class OnePerRow:
    """Wraps a backend so that each sequence of a batch gets a row of its own: online padding."""

    def __init__(self, meter: Meter, shape: PackedShape) -> None:
        self.meter = meter
        self.shape = shape

    def __call__(
        self, packed: Packed, heads: Sequence[str], at: Tensor | None = None
    ) -> Sequence[Tensor]:
        """Outputs per sequence, in the order of the batch."""
        parts = zip(packed.split(packed.ids), packed.split(packed.types), strict=True)
        (rows,) = one_per_row(self.shape, [SequenceRow(*part) for part in parts])
        return [rows.pick(values) for values in self.meter(rows, heads, at)]


class SequenceRow(NamedTuple):
    """A sequence cut from a batch."""

    ids: Tensor
    types: Tensor


class OpenedModel(NamedTuple):
    """A model, and what counts its tokens."""

    encoder: Encoder
    meter: Meter

    kernel: str  # as it is shown


def open_modes(
    stage: ModesStage, modes: Sequence[PackingMode] = MODES
) -> tuple[list[ModeLane], Encoder]:
    """A lane for each mode, and the encoder that they share."""
    opened = open_model(stage)
    return [_lane(mode, stage, opened) for mode in modes], opened.encoder


def open_model(stage: ModesStage) -> OpenedModel:
    """Load the model; its vectors are the normalized mean, because the peers' are."""
    encoder = load(stage.folder, device=stage.device, dtype=stage.dtype, graphs=stage.graphs)
    if not isinstance(encoder.backend, TorchBackend):
        raise InputError("only the torch backend is measured here")
    model = encoder.backend.model
    if stage.capacity > (positions := model.bert.config.max_positions):
        raise InputError(
            f"rows have {stage.capacity} tokens and {encoder.name} {positions} positions; "
            f"pass --capacity {positions} or less"
        )
    model.heads["embed"] = Embed(("mean",), normalize=True)
    backend = Zeros(encoder.width) if stage.host else encoder.backend
    meter = Meter(backend, encoder.backend.computed)
    kernel = f"{encoder.kernel} graphs" if stage.graphs else encoder.kernel
    return OpenedModel(_measured(encoder, meter, stage), meter, kernel)


def _measured(encoder: Encoder, meter: Meter, stage: ModesStage) -> Encoder:
    return replace(encoder, backend=meter, heads=("embed",), max_length=stage.capacity)


def _lane(mode: PackingMode, stage: ModesStage, opened: OpenedModel) -> ModeLane:
    encoder, meter, kernel = opened
    shape = PackedShape(
        mode.layout if mode.layout != "padded" else "mask",
        stage.rows,
        stage.capacity,
        policy=mode.policy,
    )
    if mode.layout == "padded":
        padding = replace(encoder, backend=OnePerRow(meter, shape))
        one_by_one = partial(open_runner, padding, stage, mode=None, max_sequences=stage.rows)
        run = partial(_offline, opened, partial(one_per_row, shape))
        return ModeLane(mode.name, kernel, run, one_by_one)
    if not mode.online:
        run = partial(_offline, opened, partial(packed_in_order, shape))
        return ModeLane(mode.name, kernel, run)
    runner = partial(open_runner, encoder, stage, mode=mode.layout, policy=mode.policy)
    return ModeLane(mode.name, kernel, partial(_online, runner, meter), runner)


def open_runner(encoder: Encoder, stage: ModesStage, requests: int, **options: Any) -> PackRunner:
    """A runner whose queue holds all requests, so that none is refused and missing."""
    return PackRunner(
        encoder,
        rows=stage.rows,
        capacity=stage.capacity,
        timeout=stage.timeout,
        max_waiting_requests=requests,
        max_waiting_tokens=requests * stage.capacity,
        publish=False,
        **options,
    )


def one_per_row(
    shape: PackedShape, sequences: Sequence[Encoding | SequenceRow]
) -> Iterator[Packed]:
    """Padded batches: always `rows` rows of `capacity` tokens, the last ones empty if need be."""
    for begin in range(0, len(sequences), shape.rows):
        chunk = sequences[begin : begin + shape.rows]
        laid = shape.lay(chunk, [[place] for place in range(len(chunk))])
        # As in any padded model, padding has positions. Without them it would all be one vector,
        # and a GPU multiplies equal numbers with less power, so faster.
        yield replace(laid, positions=torch.arange(shape.capacity).repeat(shape.rows))


def packed_in_order(shape: PackedShape, sequences: Sequence[Encoding]) -> Iterator[Packed]:
    """Packed batches, sequences in the order they came."""
    for indices, packs in shape.cut([len(s) for s in sequences]):
        yield shape.lay([sequences[i] for i in indices], packs)


def _offline(
    opened: OpenedModel,
    batches: Callable[[Sequence[Encoding]], Iterable[Packed]],
    requests: Sequence[Ids],
) -> Pass:
    encoder, meter, _ = opened
    before = meter.tokens
    start = time.perf_counter()
    laid = list(batches(encoder.tokenize(requests)))
    ready = time.perf_counter()
    flights = (encoder.launch(packed, ("embed",)) for packed in laid)
    vectors = [row for flight in _one_behind(flights) for (row,) in flight.rows()]
    end = time.perf_counter()
    return Pass(np.stack(vectors), end - ready, meter.tokens - before, packing=ready - start)


def _one_behind(flights: Iterator[LaunchedBatch]) -> Iterator[LaunchedBatch]:
    """Yield each batch after the next was launched, so that a GPU never waits for Python."""
    ahead = next(flights)
    for flight in flights:
        yield ahead
        ahead = flight
    yield ahead


def _online(runner_for: Callable[[int], PackRunner], meter: Meter, requests: Sequence[Ids]) -> Pass:
    with runner_for(len(requests)) as runner:
        before = meter.tokens
        start = time.perf_counter()
        vectors = runner.run(requests)
        seconds = time.perf_counter() - start
    return Pass(np.stack(vectors), seconds, meter.tokens - before)


def open_packed_onnx(stage: ModesStage, scratch: Path) -> ModeLane:
    """The model as an ONNX graph, rewritten for packed rows, on ONNX Runtime behind the runner."""
    if stage.dtype != "fp32":
        raise peers.Unserved("a packed ONNX graph is measured in fp32 alone")
    folder = checkpoint.write(scratch / "onnx", checkpoint.load(stage.folder), to="onnx")
    packed = folder / "packed.onnx"
    onnxpack.pack(folder / "model.onnx", packed, "mask", shape=(stage.rows, stage.capacity))
    encoder = load(packed, device=stage.device)
    vectors = {"embed": Embed(("mean",), normalize=True)}
    backend = onnxpack.load(packed, device=stage.device, heads=vectors)
    meter = Meter(backend, lambda batch: len(batch.ids))
    runner = partial(open_runner, _measured(encoder, meter, stage), stage, mode="mask")
    return ModeLane(PACKED_ONNX, "onnxruntime", partial(_online, runner, meter), runner)


def open_peer(name: str, stage: ModesStage, encoder: Encoder, scratch: Path) -> ModeLane:
    """Another library's model on padded batches; with graphs, transformers is compiled."""
    layout = sentence.read(stage.folder)
    home = layout.transformer if layout else stage.folder
    setting = padded.PeerSetting(home, stage.device, stage.rows, stage.capacity, scratch)
    compiled = stage.graphs and name == "transformers"
    engine = (peers.transformers_compiled if compiled else peers.PEERS[name])(setting, stage.dtype)
    return ModeLane(peer_name(name, stage), "", partial(_peer, engine, stage, encoder))


def peer_name(name: str, stage: ModesStage) -> str:
    """The peer's name in the table."""
    if stage.graphs and name == "transformers":
        return f"{ORIGINAL} ({name} compiled)"
    return f"{ORIGINAL} ({name})"


def _peer(
    engine: padded.PeerEngine, stage: ModesStage, encoder: Encoder, requests: Sequence[Ids]
) -> Pass:
    """Padded to the longest of each batch; where it is compiled, to `capacity`."""
    sequences = encoder.tokenize(requests)
    order = engine.orders[0]
    start = time.perf_counter()
    vectors = engine.run(sequences, order)
    seconds = time.perf_counter() - start
    width = stage.capacity if order == "fixed" else 0
    return Pass(vectors, seconds, padded_tokens(sequences, stage.rows, width))


def padded_tokens(sequences: Sequence[Encoding], rows: int, width: int = 0) -> int:
    """Tokens of batches of `rows`, each padded to its longest; or all of full size if `width`."""
    lengths = [len(sequence) for sequence in sequences]
    batches = [lengths[begin : begin + rows] for begin in range(0, len(lengths), rows)]
    return sum(rows * width if width else len(batch) * max(batch) for batch in batches)
