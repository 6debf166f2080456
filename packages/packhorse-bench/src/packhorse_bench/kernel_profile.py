"""Where the time of a batch goes on a GPU: its kernels with time, share, bytes and bound.

Names and times are those of torch's profiler over a few runs of the fullest batch of a workload.
The bytes of a kernel are the fewest that it must move, each input read and each output written
once; its bound is the longer of these bytes at the rate of a large copy and its arithmetic at the
rate of a large product, both measured in the same run. They are given where the layers are known:
for the matrix products of BERT's layers and for our kernels of float8 inference.

Shapes: T tokens, E hidden width, F feed-forward width.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import numpy as np
import torch

from packhorse.errors import InputError
from packhorse.model.config import BertConfig
from packhorse.model.float8_inference import Float8Layer
from packhorse.packing.batch import Packed
from packhorse.runtime import batches
from packhorse.runtime.backend import TorchBackend
from packhorse.runtime.encoder import Encoder
from packhorse.tokens import Encoding

RUNS = 3
PRODUCT = re.compile(r"gemm|nvjet|cutlass|xmma|cublas", re.IGNORECASE)
COPIED = 1 << 28  # bytes of the copy that measures the memory's rate
SIDE = 8192  # of the square product that measures the rate of arithmetic
SHOWN = 90  # characters of a kernel's name


class Launch(NamedTuple):
    """A kernel that ran, in the order of time."""

    name: str
    microseconds: float


class Work(NamedTuple):
    """What one launch must do at least."""

    role: str
    bytes: int
    operations: int = 0
    float8: bool = False


@dataclass(frozen=True)
class Ceilings:
    """What the device reaches, per second."""

    bytes: float
    bf16: float
    float8: float

    def bound(self, work: Work) -> float:
        """The least microseconds of a launch."""
        rate = self.float8 if work.float8 else self.bf16
        return 1e6 * max(work.bytes / self.bytes, work.operations / rate)


@dataclass(frozen=True)
class KernelRow:
    """A kernel in one batch; what is not known of it is None."""

    name: str
    role: str
    launches: float
    microseconds: float  # of one launch, the mean
    share: float  # of the time in kernels
    megabytes: float | None = None
    bound: float | None = None  # microseconds


@dataclass(frozen=True)
class KernelProfile:
    """The kernels of a batch, the longest first, and the time that they take together."""

    rows: list[KernelRow]
    milliseconds: float
    sequences: int
    tokens: int
    ceilings: Ceilings


def profile(encoder: Encoder, sequences: Sequence[Encoding]) -> KernelProfile:
    """Profile the fullest batch that an encoder on a CUDA device makes of the sequences."""
    backend = encoder.backend
    if not isinstance(backend, TorchBackend) or encoder.device.type != "cuda":
        raise InputError("--profile shows the kernels of a CUDA device; pass --device cuda")
    lengths = [len(sequence) for sequence in sequences]
    cut = list(batches.by_tokens(lengths, encoder.budget))
    fullest = max(cut, key=lambda batch: sum(lengths[i] for i in batch))
    packed = Packed.build([sequences[int(i)] for i in fullest])
    launches = _launches(lambda: backend(packed, ["embed"]))
    ceilings = _ceilings(encoder.device)
    bert = backend.model.bert
    fused = [layer for layer in bert.layers if isinstance(layer, Float8Layer)]
    own = _float8_work(bert.config, packed) if fused else {}
    one_kernel = bool(fused) and fused[0].one_kernel
    products = product_work(bert.config, backend.computed(packed), bool(fused), one_kernel)
    rows = summarize(launches, own, products, ceilings)
    total = sum(launch.microseconds for launch in launches) / RUNS / 1000
    return KernelProfile(rows, total, len(packed), len(packed.ids), ceilings)


def summarize(
    launches: Sequence[Launch],
    own: dict[str, Work],
    products: Sequence[Work],
    ceilings: Ceilings,
) -> list[KernelRow]:
    """Rows by kernel and role, the longest in all first; `launches` are of `RUNS` batches.

    own: by name. products: those of a layer in their order, which every layer repeats.
    """
    places = [i for i, launch in enumerate(launches) if PRODUCT.search(launch.name)]
    works: dict[int, Work] = {}
    if products and not len(places) % len(products):
        works = {place: products[i % len(products)] for i, place in enumerate(places)}
    groups: dict[tuple[str, Work | None], list[float]] = {}
    for place, launch in enumerate(launches):
        work = works.get(place) or own.get(launch.name)
        groups.setdefault((launch.name, work), []).append(launch.microseconds)
    total = sum(launch.microseconds for launch in launches)
    rows = [
        KernelRow(
            name=name[:SHOWN],
            role=work.role if work else "",
            launches=len(times) / RUNS,
            microseconds=sum(times) / len(times),
            share=sum(times) / total,
            megabytes=work.bytes / 1e6 if work else None,
            bound=ceilings.bound(work) if work else None,
        )
        for (name, work), times in groups.items()
    ]
    return sorted(rows, key=lambda row: -row.share)


def product_work(
    config: BertConfig, tokens: int, float8: bool, one_kernel: bool = False
) -> list[Work]:
    """The matrix products of a layer; in `one_kernel` the first of the feed-forward is ours."""
    width, wide = config.hidden_size, config.intermediate_size
    heads = config.heads * config.head_size
    size = 1 if float8 else 2  # bytes of a factor; results are bf16
    sizes = {"qkv": (width, 3 * heads), "out": (heads, width), "up": (width, wide)}
    sizes["down"] = (wide, width)
    if one_kernel:
        del sizes["up"]
    return [
        Work(
            f"product {name}",
            size * inputs * (tokens + outputs) + 2 * tokens * outputs,
            2 * tokens * inputs * outputs,
            float8,
        )
        for name, (inputs, outputs) in sizes.items()
    ]


def _float8_work(config: BertConfig, packed: Packed) -> dict[str, Work]:
    """What our kernels of float8 inference must do, by their names."""
    tokens, width, wide = len(packed.ids), config.hidden_size, config.intermediate_size
    heads = config.heads * config.head_size
    squares = int(np.square(packed.lengths.numpy().astype(np.int64)).sum())
    return {
        "_forward": Work("attention", 7 * tokens * heads, 4 * squares * heads),
        "_add_norm_cast": Work("sum, norm, cast", 7 * tokens * width),
        "_product": Work(
            "product up, activation, cast",
            tokens * (width + wide) + width * wide,
            2 * tokens * width * wide,
            True,
        ),
    }


def _launches(run: Callable[[], object]) -> list[Launch]:
    """The kernels of `RUNS` calls; the calls before prepare what is prepared once."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    for _ in range(RUNS):
        run()
    torch.cuda.synchronize()
    with record(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(RUNS):
            run()
        torch.cuda.synchronize()
    events = [
        event
        for event in recorded.events() or []
        if str(event.device_type) == "DeviceType.CUDA" and event.device_time > 0
    ]
    events.sort(key=lambda event: event.time_range.start)
    return [Launch(event.name, event.device_time) for event in events]


def _ceilings(device: torch.device) -> Ceilings:
    source = torch.randn(COPIED // 4, device=device)
    target = torch.empty_like(source)
    a = torch.randn(SIDE, SIDE, device=device).bfloat16()
    narrow = a.to(torch.float8_e4m3fn)
    one = torch.ones((), device=device)

    def multiply() -> object:
        return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
            narrow, narrow.t(), one, one, out_dtype=a.dtype, use_fast_accum=True
        )

    operations = 2 * SIDE**3
    return Ceilings(
        bytes=2 * COPIED / _seconds(lambda: target.copy_(source)),
        bf16=operations / _seconds(lambda: a @ a.t()),
        float8=operations / _seconds(multiply),
    )


def _seconds(run: Callable[[], object], rounds: int = 10) -> float:
    """The median time of a call on the device."""
    times: list[float] = []
    for _ in range(rounds + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return median(times[2:])
