"""Attention over packed sequences: the kernel protocol, the table of kernels, and their choice.

A kernel plans once per batch (`plan(packed)`), and every layer then calls it with that plan. A
kernel never looks across a boundary of `cu_seqlens`: that is the invariant of the whole package.
Each kernel declares what it supports; asking for more raises a `KernelError` that names a kernel
which would work. Kernels are imported on first use.

Shapes: T tokens, H heads, D head width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor

from packhorse.attention.disentangled import PositionTerms
from packhorse.attention.scope import FULL_SCOPE, AttentionScope
from packhorse.device import dtype_name
from packhorse.errors import KernelError
from packhorse.packing.batch import Packed

NO_DROPOUT = "it cannot drop attention probabilities out"
NO_WINDOW = "it does not support layers with a local window"
NO_BIAS = "it does not support scores that depend on distance (relative position bias, ALiBi)"
NO_CAUSAL = "it does not support causal attention"
NO_POSITIONS = "it does not support scores of content against distance (disentangled attention)"

# What `Kernel.plan` returns: everything that all layers need to know about a batch. Its type is
# the kernel's own (`GroupedPlan`, `NativePlan`, …); everyone else only hands it back to the kernel.
AttentionPlan = Any


@dataclass(frozen=True, slots=True)
class KernelSupport:
    """What a kernel supports; `None` means no restriction."""

    devices: frozenset[str] | None = None
    dtypes: frozenset[torch.dtype] | None = None
    backward: bool = True
    head_sizes: range | None = None
    rows: bool = False  # needs a batch in rows (`Packed.capacity` > 0)
    compiles: bool = False  # one compilation serves every batch of a bucket
    compiles_backward: bool = False  # and so does that of a training step's backward pass
    records: bool = False  # plans nothing on the host, so a CUDA graph can contain it
    dropout: bool = True  # can drop attention probabilities out
    # A program or call reads one sequence, in blocks from its start, as `invariant` needs it. Other
    # kernels put several sequences into one product, as wide as the longest of them.
    one_at_a_time: bool = False
    windows: bool = False  # supports `AttentionScope.window`
    biases: bool = False  # supports `AttentionScope.bias` and `slopes`
    causal: bool = False  # supports `AttentionScope.causal`
    disentangled: bool = False  # supports `AttentionScope.rows`, and is a `DisentangledKernel`
    obstacle: Callable[[torch.device], str | None] = lambda device: None  # what a machine lacks
    warn: Callable[[], None] = lambda: None  # warns about an obstacle that a user can remove

    def refusal(
        self,
        device: torch.device,
        dtype: torch.dtype,
        backward: bool = False,
        head_size: int | None = None,
        dropout: bool = False,
        windows: bool = False,
        biases: bool = False,
        causal: bool = False,
        disentangled: bool = False,
    ) -> str | None:
        """Why the kernel cannot run there, or None if it can."""
        scores = (windows, biases, causal, disentangled)
        needs = (device, dtype, backward, head_size, dropout, *scores)
        return self.mismatch(*needs) or self.obstacle(device)

    def mismatch(
        self,
        device: torch.device,
        dtype: torch.dtype,
        backward: bool = False,
        head_size: int | None = None,
        dropout: bool = False,
        windows: bool = False,
        biases: bool = False,
        causal: bool = False,
        disentangled: bool = False,
    ) -> str | None:
        """Why the kernel could not run there whatever was installed, or None."""
        if self.devices is not None and device.type not in self.devices:
            return f"it runs on {', '.join(sorted(self.devices))}, not on {device.type}"
        if self.dtypes is not None and dtype not in self.dtypes:
            names = ", ".join(sorted(map(dtype_name, self.dtypes)))
            return f"it runs in {names}, not in {dtype_name(dtype)}"
        if backward and not self.backward:
            return "it has no backward pass"
        if dropout and not self.dropout:
            return NO_DROPOUT
        if windows and not self.windows:
            return NO_WINDOW
        if biases and not self.biases:
            return NO_BIAS
        if causal and not self.causal:
            return NO_CAUSAL
        if disentangled and not self.disentangled:
            return NO_POSITIONS
        if self.head_sizes and head_size is not None and head_size not in self.head_sizes:
            widths = f"multiples of {self.head_sizes.step} up to {self.head_sizes[-1]}"
            return f"it serves heads of {widths} wide, not of {head_size}"
        return None


class Kernel(Protocol):
    """Attention that never looks across a boundary of `cu_seqlens`."""

    @property
    def serves(self) -> KernelSupport:
        """What the kernel supports."""
        ...

    def plan(
        self, packed: Packed, dropout: float = 0.0, scope: AttentionScope = FULL_SCOPE
    ) -> AttentionPlan:
        """Prepare what every layer of this scope needs for this batch.

        dropout: fraction of attention probabilities to drop, drawn anew in each layer.
        """

    def __call__(self, qkv: Tensor, plan: AttentionPlan) -> Tensor:
        """Queries, keys and values side by side, [T, 3, H, D], to [T, H, D]."""
        ...


class DisentangledKernel(Kernel, Protocol):
    """A kernel that also scores content against distance, if a layer passes the vectors."""

    def __call__(
        self, qkv: Tensor, plan: AttentionPlan, positions: PositionTerms | None = None
    ) -> Tensor:
        """[T, 3, H, D] to [T, H, D]; with `positions` if the plan's scope has rows."""
        ...


KERNELS = {
    "fused": "Fused",
    "varlen": "Varlen",
    "native": "Native",
    "bucketed": "Bucketed",
    "repack": "Repack",
    "mask": "Mask",
    "reference": "Reference",
}
"""The kernels by name, fastest first, with their classes; `pick` takes the first that can run."""


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """A kernel, and why it was chosen."""

    name: str
    kernel: Kernel
    reason: str


def kernel(name: str) -> Kernel:
    """The kernel called `name`, without checking that it can run here."""
    if name not in KERNELS:
        raise KernelError(f"unknown kernel {name!r}; there are {', '.join(KERNELS)}")
    return getattr(import_module(f"packhorse.attention.{name}"), KERNELS[name])()


def pick(
    device: torch.device,
    dtype: torch.dtype,
    *,
    name: str | None = None,
    backward: bool = False,
    head_size: int | None = None,
    dropout: bool = False,
    windows: bool = False,
    biases: bool = False,
    causal: bool = False,
    disentangled: bool = False,
) -> KernelChoice:
    """Choose the kernel called `name` or, without a name, the fastest that can run here.

    backward: for training; dropout: with dropout of attention probabilities. windows, biases,
    causal, disentangled: the model has layers with such an `AttentionScope` (`BertConfig.needs`
    tells). A kernel that needs rows is chosen only by name: a ragged batch has none.
    """
    scores = (windows, biases, causal, disentangled)
    needs = (device, dtype, backward, head_size, dropout, *scores)
    if name is not None and name != "auto":
        return _pick_by_name(name, *needs)
    rejected: list[str] = []
    for candidate in _by_speed(device, dtype, backward):
        instance = kernel(candidate)
        refusal = instance.serves.refusal(*needs)
        if refusal is None and not instance.serves.rows:
            reason = "; ".join([*rejected, f"{candidate} is the fastest that serves"])
            return KernelChoice(candidate, instance, reason)
        if instance.serves.mismatch(*needs) is None:
            instance.serves.warn()
        rejected.append(f"{candidate}: {refusal or 'it needs rows'}")
    raise KernelError(f"no kernel serves {device} in {dtype_name(dtype)}: {'; '.join(rejected)}")


def check_scope(name: str, scope: AttentionScope, serves: KernelSupport) -> None:
    """Raise if a kernel does not support this scope."""
    refusal = NO_WINDOW if scope.window is not None and not serves.windows else None
    if scope.biased and not serves.biases:
        refusal = NO_BIAS
    if scope.causal and not serves.causal:
        refusal = NO_CAUSAL
    if scope.rows is not None and not serves.disentangled:
        refusal = NO_POSITIONS
    if refusal:
        raise KernelError(f"kernel {name!r} cannot run this model: {refusal}; use 'bucketed'")


def _by_speed(device: torch.device, dtype: torch.dtype, backward: bool) -> list[str]:
    """Kernel names, fastest first.

    For training on a CPU in full precision, one plain call per sequence is the fastest: torch's
    fused kernel stores no scores for the backward pass, and nothing is gathered or scattered.
    """
    names = list(KERNELS)
    if backward and device.type == "cpu" and dtype in (torch.float32, torch.float64):
        names.remove("reference")
        names.insert(names.index("bucketed"), "reference")
    return names


def _pick_by_name(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    backward: bool,
    head_size: int | None,
    dropout: bool,
    windows: bool,
    biases: bool,
    causal: bool,
    disentangled: bool,
) -> KernelChoice:
    instance = kernel(name)
    scores = (windows, biases, causal, disentangled)
    refusal = instance.serves.refusal(device, dtype, backward, head_size, dropout, *scores)
    if refusal is None:
        return KernelChoice(name, instance, "asked for")
    alternative = pick(
        device,
        dtype,
        backward=backward,
        head_size=head_size,
        dropout=dropout,
        windows=windows,
        biases=biases,
        causal=causal,
        disentangled=disentangled,
    )
    raise KernelError(f"kernel {name!r} cannot run here: {refusal}; use {alternative.name!r}")
