"""Attention over packed sequences: the protocol, the table of kernels, and the choice.

A kernel plans once for each batch (`plan(packed)`) and is then called by every layer with that
plan. It never looks across a boundary of `cu_seqlens`: that is the invariant of the whole house.
Each kernel declares where it serves; asking outside that is a `KernelError` that says what would
do. Kernels are imported when asked for.

Shapes: T tokens, H heads, D head width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor

from packhorse.attention.reach import FULL, Reach
from packhorse.device import dtype_name
from packhorse.errors import KernelError
from packhorse.packing.batch import Packed

NO_DROPOUT = "it cannot drop attention probabilities out"
NO_WINDOW = "it does not know layers that see a window only"
NO_BIAS = "it does not know scores that depend on distance"


@dataclass(frozen=True, slots=True)
class Support:
    """Where a kernel serves; `None` means everywhere."""

    devices: frozenset[str] | None = None
    dtypes: frozenset[torch.dtype] | None = None
    backward: bool = True
    head_sizes: range | None = None
    rows: bool = False  # needs a batch laid in rows (`Packed.capacity` > 0)
    compiles: bool = False  # one compilation serves every batch of a bucket
    compiles_backward: bool = False  # and the backward pass of a training step
    records: bool = False  # plans nothing on the host, so a CUDA graph can hold it
    dropout: bool = True  # can drop attention probabilities out
    windows: bool = False  # knows `Reach.window`
    biases: bool = False  # knows `Reach.bias`
    obstacle: Callable[[torch.device], str | None] = lambda device: None  # what a machine lacks
    tell: Callable[[], None] = lambda: None  # warns of an obstacle that a user can remove

    def refusal(
        self,
        device: torch.device,
        dtype: torch.dtype,
        backward: bool = False,
        head_size: int | None = None,
        dropout: bool = False,
        windows: bool = False,
        biases: bool = False,
    ) -> str | None:
        """Why the kernel cannot run there, or None."""
        needs = device, dtype, backward, head_size, dropout, windows, biases
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
    ) -> str | None:
        """Why the kernel would not run there whatever was installed, or None."""
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
        if self.head_sizes and head_size is not None and head_size not in self.head_sizes:
            widths = f"multiples of {self.head_sizes.step} up to {self.head_sizes[-1]}"
            return f"it serves heads of {widths} wide, not of {head_size}"
        return None


class Kernel(Protocol):
    """Attention that never looks across a boundary of `cu_seqlens`."""

    @property
    def serves(self) -> Support: ...

    def plan(self, packed: Packed, dropout: float = 0.0, reach: Reach = FULL) -> Any:
        """What every layer of this reach needs to know of this batch.

        dropout: the share of attention probabilities to drop, drawn anew in each layer.
        """

    def __call__(self, qkv: Tensor, plan: Any) -> Tensor:
        """Queries, keys and values side by side, [T, 3, H, D], to [T, H, D]."""
        ...


# Fastest first: `pick` takes the first that serves (for training see `_by_speed`).
KERNELS = {
    "fused": "Fused",
    "varlen": "Varlen",
    "native": "Native",
    "bucketed": "Bucketed",
    "repack": "Repack",
    "mask": "Mask",
    "reference": "Reference",
}


@dataclass(frozen=True, slots=True)
class Choice:
    """A kernel, and why it and not another."""

    name: str
    kernel: Kernel
    why: str


def kernel(name: str) -> Kernel:
    """The kernel called `name`, unchecked."""
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
) -> Choice:
    """The kernel asked for, checked; without a name the fastest that serves this device and dtype.

    backward: it is to train, `dropout`: and to drop attention probabilities out. windows, biases:
    the model has layers with such a `Reach`; `BertConfig.needs` says so. Kernels that need rows are
    taken only when named: for a ragged batch they have no layout.
    """
    needs = device, dtype, backward, head_size, dropout, windows, biases
    if name is not None and name != "auto":
        return _asked_for(name, *needs)
    passed_over = []
    for candidate in _by_speed(device, dtype, backward):
        found = kernel(candidate)
        refusal = found.serves.refusal(*needs)
        if refusal is None and not found.serves.rows:
            why = "; ".join([*passed_over, f"{candidate} is the fastest that serves"])
            return Choice(candidate, found, why)
        if found.serves.mismatch(*needs) is None:
            found.serves.tell()
        passed_over.append(f"{candidate}: {refusal or 'it needs rows'}")
    raise KernelError(f"no kernel serves {device} in {dtype_name(dtype)}: {'; '.join(passed_over)}")


def refuse(name: str, reach: Reach, serves: Support) -> None:
    """Raise where a kernel is handed a reach that it does not know."""
    unknown = NO_WINDOW if reach.window is not None and not serves.windows else None
    if reach.bias is not None and not serves.biases:
        unknown = NO_BIAS
    if unknown:
        raise KernelError(f"kernel {name!r} cannot run this model: {unknown}; use 'bucketed'")


def _by_speed(device: torch.device, dtype: torch.dtype, backward: bool) -> list[str]:
    """Training on a CPU, and not in half precision, a plain call a sequence is the fastest.

    torch's fused kernel keeps no scores for the way back, and nothing is gathered or laid back.
    """
    names = list(KERNELS)
    if backward and device.type == "cpu" and dtype in (torch.float32, torch.float64):
        names.remove("reference")
        names.insert(names.index("bucketed"), "reference")
    return names


def _asked_for(name: str, device: torch.device, dtype: torch.dtype, *needs: Any) -> Choice:
    found = kernel(name)
    refusal = found.serves.refusal(device, dtype, *needs)
    if refusal is None:
        return Choice(name, found, "asked for")
    names = ("backward", "head_size", "dropout", "windows", "biases")
    instead = pick(device, dtype, **dict(zip(names, needs, strict=True))).name
    raise KernelError(f"kernel {name!r} cannot run here: {refusal}; use {instead!r}")
