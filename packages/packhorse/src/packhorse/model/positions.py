"""Position information that goes into attention instead of into the embeddings.

Three alternatives to BERT's position table:

- *Rotary* (Su et al. 2021, RoFormer): queries and keys are rotated by angles that grow with their
  positions, so that a score depends on their distance. The angles are computed, never stored, so
  there is nothing to load.
- *Relative position bias* (Raffel et al. 2020, T5; MPNet): each head learns what a distance adds
  to a score; one number per distance up to a limit, then logarithmic buckets.
- *ALiBi* (Press et al. 2022; both directions in Jina's models): a score falls with the distance, by
  a slope that is fixed for each head. Nothing is learned, and no distance is the last.

All are computed once per batch. Rotary angles may be stretched, so that texts longer than those of
the training get angles that the model has seen ("NTK-aware", bloc97 2023): by a fixed factor, or by
the length of the text. That length is each sequence's own here; where a batch is padded, libraries
take the longest of the batch, and a text's result depends on its neighbors.

Shapes: T tokens, H heads, D head width, W the width of a head that is rotated, R the largest
distance with its own number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor, nn

from packhorse.attention.kernels import AttentionPlan, Kernel
from packhorse.model.config import BertConfig
from packhorse.packing.batch import Packed

MAX_DISTANCE = 128  # R


@dataclass(frozen=True, slots=True)
class RotaryPlan:
    """A kernel's plan, and the rotation of every token."""

    plan: AttentionPlan
    cosines: Tensor  # [T, 1, 1, W/2]
    sines: Tensor  # [T, 1, 1, W/2]


def rotary_plan(plan: AttentionPlan, packed: Packed, base: float, config: BertConfig) -> RotaryPlan:
    """Add the rotations of a batch's tokens to a kernel's plan."""
    width = config.rotated_width
    # RoFormer's θᵢ = base^(-2i/W); the pair i of the token at position m is rotated by m·θᵢ.
    device = packed.positions.device
    exponents = torch.arange(0, width, 2, dtype=torch.float32, device=device) / width  # [W/2]
    stretch = config.rotary_stretch
    frequencies = 1.0 / (base * stretch) ** exponents
    if stretch != 1:
        frequencies = frequencies / stretch ** (2 / width)
    if config.dynamic_stretch:
        # In float64 first: torch's loops round the last numbers of an array differently, and a
        # text's angles must not depend on where in the batch it lies.
        frequencies = ((base * _growth(packed, config)) ** -exponents.double()).float()  # [T, W/2]
    angles = packed.positions.float()[:, None] * frequencies
    return RotaryPlan(plan, angles.cos()[:, None, None], angles.sin()[:, None, None])


def _growth(packed: Packed, config: BertConfig) -> Tensor:
    """[T, 1] by how much the base grows with the length of each token's sequence."""
    lengths = packed.lengths.repeat_interleave(packed.lengths, output_size=len(packed.ids))
    factor = config.dynamic_stretch
    beyond = (lengths.double() / config.trained_positions).clamp(min=1)
    width = config.rotated_width
    return ((factor * beyond - (factor - 1)) ** (width / (width - 2)))[:, None]


@dataclass(frozen=True, slots=True)
class RotaryAttention:
    """A kernel whose queries and keys are rotated by their positions first."""

    kernel: Kernel
    interleaved: bool = False

    def __call__(self, qkv: Tensor, plan: RotaryPlan) -> Tensor:
        """[T, 3, H, D] to [T, H, D]."""
        queries_and_keys, values = qkv.split((2, 1), 1)
        width = 2 * plan.cosines.shape[-1]
        if width == qkv.shape[-1]:
            rotated = _rotate(queries_and_keys, plan, self.interleaved)
        else:
            turning, still = queries_and_keys.split((width, qkv.shape[-1] - width), -1)
            rotated = torch.cat((_rotate(turning, plan, self.interleaved), still), -1)
        return self.kernel(torch.cat((rotated, values), 1), plan.plan)


def _rotate(x: Tensor, plan: RotaryPlan, interleaved: bool) -> Tensor:
    """Rotate pairs (i, i + W/2), as GPT-NeoX and most encoders pair them, or (2i, 2i + 1).

    In fp32 or wider: in half precision nearby positions would get the same angles.
    """
    wide = x if x.dtype == torch.float64 else x.float()
    if interleaved:  # as RoFormer's paper has it; NeoBERT
        first, second = wide.unflatten(-1, (-1, 2)).unbind(-1)
    else:
        first, second = wide.chunk(2, -1)
    rotated = (
        first * plan.cosines - second * plan.sines,
        second * plan.cosines + first * plan.sines,
    )
    joined = torch.stack(rotated, -1).flatten(-2) if interleaved else torch.cat(rotated, -1)
    return joined.to(x.dtype)


def alibi_slopes(heads: int, device: torch.device) -> Tensor:
    """[H] in fp32: what one token of distance takes off a score, as ALiBi's authors set it.

    For n heads, a power of two, 2^(-8/n), 2^(-16/n) …; other heads get every other slope of 2n.
    Computed on the device, because a copy from the host could not be part of a CUDA graph.
    """
    power = 1 << (heads.bit_length() - 1)
    exponents = torch.arange(1, power + 1, dtype=torch.float64, device=device) / power
    if heads > power:
        odd = torch.arange(1, 2 * (heads - power), 2, dtype=torch.float64, device=device)
        exponents = torch.cat((exponents, odd / (2 * power)))
    return torch.exp2(-8 * exponents).float()


class RelativePositionBias(nn.Module):
    """What a key's distance from the query adds to a score, learned for each head."""

    def __init__(self, buckets: int, heads: int) -> None:
        super().__init__()
        self.table = nn.Embedding(buckets, heads)
        distances = range(-MAX_DISTANCE, MAX_DISTANCE + 1)
        numbers = [relative_position_bucket(distance, buckets) for distance in distances]
        self.runs = [(number, len(list(run))) for number, run in groupby(numbers)]

    def forward(self) -> Tensor:
        """[H, 2R+1], from a key R before the query to one R after it."""
        # Rows are repeated by constants instead of being looked up, so that no index tensor has
        # to be copied to the device.
        rows = [self.table.weight[number].expand(count, -1) for number, count in self.runs]
        return torch.cat(rows).t()


def relative_position_bucket(distance: int, buckets: int) -> int:
    """The bucket of a key `distance` tokens after the query (negative: before it), as in T5.

    Half of the buckets are for each direction. Of these, the first half is for exact distances and
    the other half for logarithmically growing ranges up to `MAX_DISTANCE`.
    """
    half = buckets // 2
    exact = half // 2
    away = abs(distance)
    if away >= exact:
        share = math.log(away / exact) / math.log(MAX_DISTANCE / exact)
        away = min(half - 1, exact + int(share * (half - exact)))
    return away + half if distance > 0 else away
