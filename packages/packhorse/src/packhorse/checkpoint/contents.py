"""What every reader returns: the tensors of a checkpoint under the names they have in its files."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from packhorse import wire


@dataclass(frozen=True)
class Contents:
    """A checkpoint as it is stored; `names` translates its tensors' names."""

    format: str  # a key of `sources.FORMATS`
    folder: Path  # where its configuration and its vocabulary are looked for
    files: tuple[Path, ...]  # that hold the tensors
    tensors: dict[str, Tensor]  # by foreign name, as stored: TensorFlow's kernels are [in, out]
    config: dict[str, Any] | None = None  # None: the format has none
    # Optimizer state by kind ("m", "v"), under the name of the weight it belongs to.
    slots: dict[str, dict[str, Tensor]] = field(default_factory=dict[str, dict[str, Tensor]])
    left_out: dict[str, int] = field(
        default_factory=dict[str, int]
    )  # slots not read, by the file's kinds
    step: int | None = None  # of training
    notes: tuple[str, ...] = ()  # for the user: what was dequantized, renamed or left out
    gelu: frozenset[str] = frozenset()  # forms in its graph, if there is one: "erf", "tanh"
    graph: Path | None = None  # the file that holds this graph
    max_positions: int | None = None  # where the graph is of one length and has no more of them


def checksum(tensor: Tensor) -> str:
    """The crc32c of a tensor's values in row-major order, little-endian: equal in every format."""
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return f"{wire.crc32c(data.data):08x}"
