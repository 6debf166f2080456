"""The torch model as a backend: `backend(packed, heads) -> tensors`, on its device, in its dtype.

On a CPU linear layers are frozen (prepared once for inference). The encoder's products may be int8
there, and float8 everywhere.

With `graphs` a batch is padded to a bucket and the layers are compiled for it (all layers
share the compiled code of one), and on CUDA the encoder is recorded as a graph: a bucket is
prepared once and then costs one launch. Heads with an output per sequence are recorded with it,
because to launch their few small kernels takes as long as the graph of a short text; the others run
outside, on the batch without padding. With `fixed`, batches have the shapes of `invariant`.

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
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from packhorse import device as devices
from packhorse import executable
from packhorse.device import float_dtype
from packhorse.errors import KernelError
from packhorse.model.float8_inference import Float8Layer, use_float8
from packhorse.model.freeze import can_freeze, freeze, widen
from packhorse.model.int8 import freeze_int8
from packhorse.model.model import Model
from packhorse.packing.batch import Packed, numbers_to, unflatten
from packhorse.runtime.batches import PER_TOKEN
from packhorse.runtime.invariant import FixedShapes

Graphs = bool | Literal["small"]
PATIENCE = 50  # batches of a bucket that run unprepared on a server that is never idle
LARGEST_SMALL = 16384  # tokens; larger batches compute for longer than they take to launch
SMALLEST_BUCKET = 64  # tokens
SMALLEST_RECORDED_BUCKET = 256  # tokens; a smaller batch takes no less time
# A bucket has a slot for a sequence per so many tokens: most batches of a size then share a bucket.
TOKENS_PER_SLOT = 64


class Bucket(NamedTuple):
    """A shape of batches; a batch of rows is one already, but for its number of sequences."""

    tokens: int
    sequences: int  # slots; those that a batch does not need are empty
    max_seqlen: int
    capacity: int = 0

    def flat(self, packed: Packed, device: torch.device) -> Tensor:
        """Fill a batch up to this bucket on its way to the device."""
        return packed.flat(device, self.tokens, self.sequences)


class Prepared(NamedTuple):
    """What is compiled or recorded once: a bucket, and the heads that run in it."""

    bucket: Bucket
    heads: tuple[str, ...]


class TorchBackend:
    """Runs a model in inference mode: frozen, compiled per bucket, or in fixed shapes."""

    def __init__(
        self,
        model: Model,
        device: torch.device,
        graphs: Graphs = False,
        fixed: int = 0,
        products: torch.dtype | None = None,
        kept: Collection[str] = (),
        scales: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """`products`: int8 or float8, of the encoder's linear layers but those `kept`; `scales`:
        of the inputs of float8 products, as `float8_inference.calibrate` returns them.
        """
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
        self._recorded = executable.CudaGraphs(self._run) if recorded else None
        self.smallest = SMALLEST_RECORDED_BUCKET if recorded else SMALLEST_BUCKET
        self.largest = math.inf if graphs is True else LARGEST_SMALL  # tokens of a batch
        with torch.inference_mode():
            model.bert.fold()
        if products == torch.int8:
            freeze_int8(self.model.bert.layers, kept)
        elif products is not None:
            floats = float_dtype(products, device)
            self.model.heads.to(floats)
            use_float8(self.model.bert, scales, kept, fuse=not fixed, dtype=floats)
        if device.type == "cpu":
            frozen = can_freeze(next(model.parameters()).dtype) and not self.graphs
            (freeze if frozen else widen)(self.model)
        self._compiles = graphs is True
        if self._compiles:
            executable.warn_if_uncompiled()
        # Buckets to prepare, with a batch of each; None: prepare one when it comes.
        self._later: dict[Prepared, Packed] | None = None
        self._held = False  # prepare nothing at all
        self._batches: Counter[Prepared] = Counter()  # of a bucket; from PATIENCE on it is prepared
        self.fixed = FixedShapes(self.model, device, fixed) if fixed else None

    @torch.inference_mode()
    def __call__(
        self, packed: Packed, heads: Sequence[str], at: Tensor | None = None
    ) -> list[Tensor]:
        """Return the output of each head; with `at`, per-token heads run on these tokens alone."""
        with devices.current(self.device):
            return self._outputs(packed, heads, at)

    def _outputs(self, packed: Packed, heads: Sequence[str], at: Tensor | None) -> list[Tensor]:
        if self.fixed is not None:
            return self.fixed(packed, heads, at)
        if self.graphs and len(packed.ids) <= self.largest and packed.key_lengths is None:
            return self._padded(packed, tuple(heads), at)
        on_device = packed.to(self.device)
        hidden = self.model.bert(on_device)  # [T, E]
        return self.model.apply_heads(hidden, on_device, heads, at)

    def _padded(self, packed: Packed, heads: tuple[str, ...], at: Tensor | None) -> list[Tensor]:
        """Run a batch in its bucket, whose padding is at the end."""
        bucket = _bucket(packed, self.smallest)
        flat = bucket.flat(packed, self.device)
        if packed.prompt_lengths is None and (inside := self._recorded_heads(heads)):
            outputs = self._in_bucket(Prepared(bucket, inside), packed, flat)
            return [output[: len(packed)] for output in outputs]
        (hidden,) = self._in_bucket(Prepared(bucket, ()), packed, flat)  # [T of the bucket, E]
        tokens = len(packed.ids)
        parts = unflatten(flat, bucket.tokens, bucket.sequences)
        on_device = replace(
            packed,
            ids=parts["ids"][:tokens],
            types=parts["types"][:tokens],
            positions=parts["positions"][:tokens],
            cu_seqlens=parts["cu_seqlens"][: len(packed.cu_seqlens)],
            prompt_lengths=numbers_to(packed.prompt_lengths, self.device),
        )
        return self.model.apply_heads(hidden[:tokens], on_device, heads, at)

    def _recorded_heads(self, heads: tuple[str, ...]) -> tuple[str, ...]:
        """Return the heads if they are recorded with the encoder; else none."""
        # A graph holds what its heads return, and a sparse vector is as wide as the vocabulary.
        outside = (*PER_TOKEN, "sparse")
        inside = self._recorded and not any(head in outside for head in heads)
        return heads if inside else ()

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

    def prepare_later(self, expected: Sequence[Packed], heads: tuple[str, ...] = ()) -> None:
        """From now on prepare buckets in `prepare_next`: those of batches that come, then those of
        `expected` batches with `heads`. Where it is never called, a bucket is prepared after many
        batches.
        """
        inside = self._recorded_heads(heads)
        self._later = {}
        for packed in reversed(expected):
            bucket = _bucket(packed, self.smallest)
            if bucket.tokens <= self.largest:
                self._later[Prepared(bucket, inside)] = packed
        self._held = False

    @torch.inference_mode()
    def prepare_next(self) -> bool:
        """Prepare a bucket that is not; return whether there was one."""
        if not self._later:
            return False
        prepared, packed = self._later.popitem()  # the newest
        self._batches[prepared] = PATIENCE
        with devices.current(self.device):
            self._in_bucket(prepared, packed, prepared.bucket.flat(packed, self.device))
        return True

    @cached_property
    def _layers(self) -> Sequence[Callable[..., Tensor]]:
        """The compiled layers; made by the first batch that needs them, because to import torch's
        compiler takes seconds, for which a server would not be ready.
        """
        layers = list(self.model.bert.layers)
        # A float8 layer has nothing left that a compiler could fuse.
        rest = [layer for layer in layers if not isinstance(layer, Float8Layer)]
        compiled = iter(executable.compiled(rest))
        return [layer if isinstance(layer, Float8Layer) else next(compiled) for layer in layers]

    def _in_bucket(self, prepared: Prepared, packed: Packed, flat: Tensor) -> list[Tensor]:
        """Run a batch in its bucket, `flat` on the device; return what `_run` does."""
        if self._held:
            return self._run(flat, prepared=prepared, unprepared=True)
        if self._later is not None:
            self._batches[prepared] += 1
            if self._batches[prepared] < PATIENCE:
                self._later[prepared] = packed
                return self._run(flat, prepared=prepared, unprepared=True)
            self._later.pop(prepared, None)
        return (self._recorded or self._run)(flat, prepared=prepared)

    def _run(self, flat: Tensor, *, prepared: Prepared, unprepared: bool = False) -> list[Tensor]:
        """Return the outputs of the heads, or without heads the hidden states.

        It takes one bare tensor, so that a recorded graph gets its input by one copy.
        """
        (tokens, sequences, max_seqlen, capacity), heads = prepared
        parts = unflatten(flat, tokens, sequences)
        places = tuple(range(sequences))
        packed = Packed(**parts, max_seqlen=max_seqlen, places=places, capacity=capacity)
        layers = None
        if self._compiles and not unprepared:
            executable.allow_every_bucket()
            layers = self._layers
        hidden = self.model.bert(packed, layers)
        return self.model.apply_heads(hidden, packed, heads) if heads else [hidden]


def _bucket(packed: Packed, smallest: int) -> Bucket:
    """The smallest bucket that holds a batch."""
    if packed.capacity:  # all batches of so many rows have as many sequences
        slots = max(4 * len(packed.ids) // packed.capacity, _power_of_2(len(packed)))
        return Bucket(len(packed.ids), slots, packed.capacity, packed.capacity)
    tokens = executable.round_up(len(packed.ids), smallest)
    dummies = -(-(tokens - len(packed.ids)) // packed.max_seqlen)
    slots = _power_of_2(max(len(packed) + dummies, tokens // TOKENS_PER_SLOT))
    return Bucket(tokens, slots, _power_of_2(packed.max_seqlen))


def _power_of_2(size: int) -> int:
    """The next power of two."""
    return 1 << (size - 1).bit_length()
