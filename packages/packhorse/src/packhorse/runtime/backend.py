"""The torch model as a backend: `backend(packed, heads) -> tensors`, on its device, in its dtype.

On a CPU linear layers are frozen (prepared once for inference). With `graphs` a batch is padded to
a bucket and the layers are compiled for it (all layers share the compiled code of one), and on CUDA
the encoder is recorded as a graph: a bucket is prepared once and then costs one launch. Heads run
outside the graph, on the batch without padding: they are small. With `fixed`, batches have the
shapes of `invariant`.

To launch the kernels of a batch takes 4 to 8 ms on CUDA, whatever its size; a small batch computes
for less. `graphs="small"` therefore records such batches and compiles nothing: a bucket then takes
50 ms to prepare instead of seconds, and larger batches run as without graphs.

A bucket is prepared when its first batch comes, or after `prepare_later`, when `prepare_next` is
called: until then its batches run unprepared, so that nobody waits for a compiler, except after
many of them, because a server may never be idle.

Shapes: T tokens, S sequences, E hidden width.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from packhorse import executable
from packhorse.errors import KernelError
from packhorse.model.freeze import can_freeze, freeze, widen
from packhorse.model.model import Model
from packhorse.packing.batch import Packed
from packhorse.runtime.invariant import FixedShapes

Graphs = bool | Literal["small"]
PATIENCE = 50  # batches of a bucket that run unprepared on a server that is never idle
LARGEST_SMALL = 16384  # tokens; larger batches compute for longer than they take to launch
SMALLEST_BUCKET = 64  # tokens
SMALLEST_RECORDED_BUCKET = 256  # tokens; a smaller batch takes no less time
# A bucket has a slot for a sequence per so many tokens: most batches of a size then share a bucket.
TOKENS_PER_SLOT = 64


class TorchBackend:
    """Runs a model in inference mode: frozen, compiled per bucket, or in fixed shapes."""

    def __init__(
        self, model: Model, device: torch.device, graphs: Graphs = False, fixed: int = 0
    ) -> None:
        self.model = model.eval().to(device)
        self.device = device
        serves = model.bert.kernel.serves
        if graphs is True and not serves.compiles:
            name = type(model.bert.kernel).__name__.lower()
            raise KernelError(
                f"kernel {name!r} makes a new plan for each batch, so graphs cannot be compiled "
                "with it; leave out graphs, or use another kernel"
            )
        recorded = bool(graphs) and serves.records and device.type == "cuda"
        self.graphs = graphs is True or recorded
        self._recorded = executable.CudaGraphs(self._hidden) if recorded else None
        self.smallest = SMALLEST_RECORDED_BUCKET if recorded else SMALLEST_BUCKET
        self.largest = math.inf if graphs is True else LARGEST_SMALL  # tokens of a batch
        if device.type == "cpu":
            frozen = can_freeze(next(model.parameters()).dtype) and not self.graphs
            (freeze if frozen else widen)(self.model)
        self._compiles = graphs is True
        if self._compiles:
            executable.warn_if_uncompiled()
        self._later: dict[Hashable, Packed] | None = None  # None: prepare a bucket when it comes
        self._held = False  # prepare nothing at all
        self._batches: Counter[Hashable] = Counter()  # of a bucket; from PATIENCE on it is prepared
        self.fixed = FixedShapes(self.model, device, fixed) if fixed else None

    @torch.inference_mode()
    def __call__(
        self, packed: Packed, heads: Sequence[str], at: Tensor | None = None
    ) -> list[Tensor]:
        """Return the output of each head; with `at`, per-token heads run on these tokens alone."""
        if self.fixed is not None:
            return self.fixed(packed, heads, at)
        if self.graphs and len(packed.ids) <= self.largest:
            bucket = _bucket(packed, self.smallest).to(self.device)
            # The padding is at the end.
            hidden = self._in_bucket(bucket)[: len(packed.ids)]  # [T, E]
            on_device = _unpadded(bucket, packed)
        else:
            on_device = packed.to(self.device)
            hidden = self.model.bert(on_device)  # [T, E]
        return self.model.apply_heads(hidden, on_device, heads, at)

    def computed(self, packed: Packed) -> int:
        """Return the tokens that are computed for a batch, the padding of its bucket included."""
        if self.fixed is not None:
            return self.fixed.computed(packed)
        tokens = len(packed.ids)
        padded = self.graphs and tokens <= self.largest and not packed.capacity
        return executable.round_up(tokens, self.smallest) if padded else tokens

    def hold(self) -> None:
        """Run every batch unprepared until `prepare_later`: nothing is compiled or recorded."""
        self._held = True

    def prepare_later(self, expected: Sequence[Packed]) -> None:
        """From now on prepare buckets in `prepare_next`: those of batches that come, then those of
        `expected` batches. Where it is never called, a bucket is prepared after many batches.
        """
        buckets = [_bucket(packed, self.smallest) for packed in expected]
        small_enough = [bucket for bucket in buckets if len(bucket.ids) <= self.largest]
        self._later = {_key(bucket): bucket for bucket in reversed(small_enough)}
        self._held = False

    @torch.inference_mode()
    def prepare_next(self) -> bool:
        """Prepare a bucket that is not; return whether there was one."""
        if not self._later:
            return False
        key, bucket = self._later.popitem()  # the newest
        self._batches[key] = PATIENCE
        self._in_bucket(bucket.to(self.device))
        return True

    @cached_property
    def _layers(self) -> Sequence[Callable[..., Tensor]]:
        """The compiled layers; made by the first batch that needs them, because to import torch's
        compiler takes seconds, for which a server would not be ready.
        """
        return executable.compiled(self.model.bert.layers)

    def _in_bucket(self, bucket: Packed) -> Tensor:
        tensors = bucket.ids, bucket.types, bucket.positions, bucket.cu_seqlens
        constants: dict[str, Any] = {"max_seqlen": bucket.max_seqlen, "capacity": bucket.capacity}
        if self._held:
            return self._hidden(*tensors, **constants, unprepared=True)
        if self._later is not None:
            key = _key(bucket)
            self._batches[key] += 1
            if self._batches[key] < PATIENCE:
                self._later[key] = bucket
                return self._hidden(*tensors, **constants, unprepared=True)
            self._later.pop(key, None)
        return (self._recorded or self._hidden)(*tensors, **constants)

    def _hidden(
        self,
        ids: Tensor,
        types: Tensor,
        positions: Tensor,
        cu_seqlens: Tensor,
        *,
        max_seqlen: int,
        capacity: int,
        unprepared: bool = False,
    ) -> Tensor:
        """Run the encoder on bare tensors, which is what a recorded graph takes."""
        packed = Packed(ids, types, positions, cu_seqlens, max_seqlen, (), capacity)
        if unprepared or not self._compiles:
            return self.model.bert(packed)
        executable.allow_every_bucket()
        return self.model.bert(packed, self._layers)


def _key(bucket: Packed) -> Hashable:
    return len(bucket.ids), len(bucket.cu_seqlens), bucket.max_seqlen, bucket.capacity


def _bucket(packed: Packed, smallest: int) -> Packed:
    """Pad a batch to the smallest bucket that holds it; a batch of rows is one already."""
    if packed.capacity:
        return _same_slots(packed)
    tokens = executable.round_up(len(packed.ids), smallest)
    dummies = -(-(tokens - len(packed.ids)) // packed.max_seqlen)
    needed = max(len(packed) + dummies, tokens // TOKENS_PER_SLOT)
    longest = 1 << (packed.max_seqlen - 1).bit_length()
    return replace(packed.pad(tokens, 1 << (needed - 1).bit_length()), max_seqlen=longest)


def _unpadded(bucket: Packed, packed: Packed) -> Packed:
    """Return the batch without padding, as views of its bucket, which is on the device."""
    tokens = len(packed.ids)
    prompts = bucket.prompt_lengths
    return replace(
        packed,
        ids=bucket.ids[:tokens],
        types=bucket.types[:tokens],
        positions=bucket.positions[:tokens],
        cu_seqlens=bucket.cu_seqlens[: len(packed.cu_seqlens)],
        prompt_lengths=None if prompts is None else prompts[: len(packed)],
    )


def _same_slots(packed: Packed) -> Packed:
    """Add empty sequences to a batch of rows, so that all such batches have as many sequences."""
    rows = len(packed.ids) // packed.capacity
    slots = max(4 * rows, 1 << (len(packed) - 1).bit_length())
    spare = packed.cu_seqlens[-1:].expand(slots - len(packed))
    bounds = torch.cat([packed.cu_seqlens, spare])
    return replace(packed, cu_seqlens=bounds, max_seqlen=packed.capacity)
