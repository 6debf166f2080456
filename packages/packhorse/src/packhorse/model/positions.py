"""Position information that goes into attention instead of into the embeddings.

Two alternatives to BERT's position table:

- *Rotary* (Su et al. 2021, RoFormer): queries and keys are rotated by angles that grow with their
  positions, so that a score depends on their distance. The angles are computed, never stored, so
  there is nothing to load.
- *Relative position bias* (Raffel et al. 2020, T5; MPNet): each head learns what a distance adds
  to a score; one number per distance up to a limit, then logarithmic buckets.

Both are computed once per batch.

Shapes: T tokens, H heads, D head width, R the largest distance with its own number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor, nn

from packhorse.attention.kernels import AttentionPlan, Kernel

MAX_DISTANCE = 128  # R


@dataclass(frozen=True, slots=True)
class RotaryPlan:
    """A kernel's plan, and the rotation of every token."""

    plan: AttentionPlan
    cosines: Tensor  # [T, 1, 1, D/2]
    sines: Tensor  # [T, 1, 1, D/2]


def rotary_plan(plan: AttentionPlan, positions: Tensor, base: float, width: int) -> RotaryPlan:
    """Add the rotations for `positions`, [T], and heads of `width` to a kernel's plan."""
    # RoFormer's θᵢ = base^(-2i/D); the pair i of the token at position m is rotated by m·θᵢ.
    even = torch.arange(0, width, 2, dtype=torch.float32, device=positions.device)
    angles = positions.float()[:, None] * (1.0 / base ** (even / width))  # [T, D/2]
    return RotaryPlan(plan, angles.cos()[:, None, None], angles.sin()[:, None, None])


@dataclass(frozen=True, slots=True)
class RotaryAttention:
    """A kernel whose queries and keys are rotated by their positions first."""

    kernel: Kernel

    def __call__(self, qkv: Tensor, plan: RotaryPlan) -> Tensor:
        """[T, 3, H, D] to [T, H, D]."""
        queries_and_keys, values = qkv.split((2, 1), 1)
        rotated = _rotate(queries_and_keys, plan)
        return self.kernel(torch.cat((rotated, values), 1), plan.plan)


def _rotate(x: Tensor, plan: RotaryPlan) -> Tensor:
    """Rotate pairs (i, i + D/2), as GPT-NeoX and ModernBERT pair them (RoFormer: 2i, 2i + 1).

    In fp32 or wider: in half precision nearby positions would get the same angles.
    """
    wide = x if x.dtype == torch.float64 else x.float()
    first, second = wide.chunk(2, -1)
    rotated = (
        first * plan.cosines - second * plan.sines,
        second * plan.cosines + first * plan.sines,
    )
    return torch.cat(rotated, -1).to(x.dtype)


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
