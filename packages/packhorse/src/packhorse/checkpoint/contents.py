"""What a reader finds in a checkpoint: tensors under the names they have there, and whence."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Contents:
    """A checkpoint as it lies on disk; `names` knows what its names mean."""

    format: str  # a key of `sources.FORMATS`
    folder: Path  # where its configuration and its vocabulary are looked for
    files: tuple[Path, ...]  # that hold the tensors
    tensors: dict[str, Tensor]  # by foreign name, as they are: TensorFlow's kernels are [in, out]
    config: dict[str, Any] | None = None  # None: the format has none of its own
    # Optimizer state by kind ("m", "v"), under the name of the weight it belongs to.
    slots: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)  # of it, by the file's own kinds
    step: int | None = None  # of training
    notes: tuple[str, ...] = ()  # what a user should know: dequantised, renamed, left out
    gelu: frozenset[str] = frozenset()  # what its graph computes, if it has one: "erf", "tanh"
    graph: Path | None = None  # the file in which that was seen
