"""Where the sequences of a transformers batch lie, found once a batch and shared by its layers.

A model of transformers hands its attention either boundaries (`cu_seq_lens_q`, the contract of its
padding-free batches) or a mask of the padded rows. Both become a `Layout`. It is kept on the very
tensor it was read from, because that tensor alone reaches every layer of a batch and is gone with
it; a boundary tensor that was written to since is read again. Reading costs one wait for the device
a batch: boundaries that do not fit the tokens would otherwise give wrong numbers in silence.

Shapes: T tokens, S sequences, B rows, L columns of a padded batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from packhorse.errors import InputError
from packhorse.packing.batch import Packed

NAME = "packhorse"  # of our attention in transformers
KEPT = "_packhorse_layout"
GIVEN = "cu_seq_lens_q"  # transformers' name for the boundaries


@dataclass(frozen=True, slots=True)
class Layout:
    """The sequences of one batch, and what kernels planned for them."""

    packed: Packed
    lengths: list[int]  # [S]
    tokens: Tensor | None = None  # [T] which slots of the padded batch hold tokens; None = flat
    plans: dict[Any, Any] = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        """Are the tokens of each sequence next to each other?"""
        if self.tokens is None:
            return True
        if "whole" not in self.plans:
            alone = self.packed.lengths > 0
            first, last = self.packed.starts[alone], self.packed.cu_seqlens[1:][alone] - 1
            apart = self.tokens[last] - self.tokens[first]
            self.plans["whole"] = bool((apart == last - first).all())
        return self.plans["whole"]

    @property
    def rows(self) -> Tensor:
        """[T] where each token lies in S rows as long as the longest sequence."""
        if "rows" not in self.plans:
            width, starts = self.packed.max_seqlen, self.packed.starts
            shift = torch.arange(len(self.lengths), device=starts.device) * width - starts
            tokens = self.packed.positions
            self.plans["rows"] = tokens + shift.repeat_interleave(
                self.packed.lengths, output_size=len(tokens)
            )
        return self.plans["rows"]


def of_boundaries(bounds: Tensor, tokens: int) -> Layout:
    """The layout of a flat batch of `tokens` tokens."""
    # Tensors made in inference mode do not count their changes, so nothing can be kept on them.
    version = None if bounds.is_inference() else bounds._version
    known, layout = getattr(bounds, KEPT, (None, None))
    if layout is None or known is None or known != version:
        layout = _read(bounds)
        setattr(bounds, KEPT, (version, layout))
    if (told := sum(layout.lengths)) != tokens:
        raise InputError(
            f"the boundaries tell of {told} tokens and the batch has {tokens}; pass {GIVEN} of the "
            "whole batch (torch's DataParallel cuts it: start one process a device instead)"
        )
    return layout


def was_used(bounds: Tensor) -> bool:
    """Has a layer attended within these boundaries?"""
    return hasattr(bounds, KEPT)


def of_rows(mask: Tensor) -> Layout:
    """The layout of padded rows, [B, L], where `mask` is true for tokens."""
    lengths = mask.sum(1)
    tokens = mask.flatten().nonzero().squeeze(1)
    bounds = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(torch.int32)
    return _layout(bounds, lengths.tolist(), tokens)


def keep(layout: Layout, mask: Tensor) -> Tensor:
    """The mask with its layout, under a name that no one else holds."""
    mask = mask.view_as(mask)
    setattr(mask, KEPT, (None, layout))
    return mask


def kept(mask: Tensor) -> Layout:
    """The layout of a mask; read anew where a copy to another device has lost it."""
    found = getattr(mask, KEPT, None)
    return of_rows(mask) if found is None else found[1]


def _read(bounds: Tensor) -> Layout:
    if bounds.ndim != 1 or bounds.is_floating_point():
        raise InputError(f"{GIVEN} must be one row of whole numbers, not {list(bounds.shape)}")
    ends = bounds.tolist()
    lengths = [b - a for a, b in pairwise(ends)]
    if not lengths or ends[0] or min(lengths) < 0:
        raise InputError(f"{GIVEN} must begin at 0, never fall and name at least one sequence")
    return _layout(bounds.to(torch.int32), lengths)


def _layout(bounds: Tensor, lengths: list[int], tokens: Tensor | None = None) -> Layout:
    # Kernels look at the boundaries only: one count stands in for ids, types and positions.
    count = torch.arange(sum(lengths), device=bounds.device)
    places = tuple(range(len(lengths)))
    packed = Packed(count, count, count, bounds, max(lengths, default=0), places)
    return Layout(packed, lengths, tokens)
