"""Where a token stands, told to attention instead of to the embeddings.

Two ways beside BERT's table of positions. *Rotary* (Su et al. 2021, RoFormer): queries and keys are
turned by angles that grow with their position, so a score depends on the distance. *Distances*
(Raffel et al. 2020, T5; MPNet): each head learns what a distance adds to a score, exactly for near
ones, in ever wider buckets for far ones, and one number for all beyond. Angles and numbers are made
once for a batch; the table of angles is computed, never stored, so that there is nothing to load.

Shapes: T tokens, H heads, D head width, R the farthest distance with a bucket of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from packhorse.attention import Kernel

FARTHEST = 128  # R


@dataclass(frozen=True, slots=True)
class Turned:
    """A kernel's plan, and the angles of every token."""

    plan: Any
    cosines: Tensor  # [T, 1, 1, D/2]
    sines: Tensor


def turned(plan: Any, positions: Tensor, base: float, width: int) -> Turned:
    """The plan with the angles of `positions`, [T], for heads `width` wide."""
    halves = torch.arange(0, width, 2, dtype=torch.float32, device=positions.device)
    angles = positions.float()[:, None] * (1.0 / base ** (halves / width))  # [T, D/2]
    return Turned(plan, angles.cos()[:, None, None], angles.sin()[:, None, None])


@dataclass(frozen=True, slots=True)
class Turning:
    """A kernel that is handed queries and keys turned by their positions."""

    kernel: Kernel

    def __call__(self, qkv: Tensor, plan: Turned) -> Tensor:
        """[T, 3, H, D] to [T, H, D]."""
        turning, values = qkv.split((2, 1), 1)
        return self.kernel(torch.cat((_turn(turning, plan), values), 1), plan.plan)


def _turn(x: Tensor, by: Turned) -> Tensor:
    """In fp32 or wider: in half precision near positions would get the same angles."""
    wide = x if x.dtype == torch.float64 else x.float()
    left, right = wide.chunk(2, -1)
    both = (left * by.cosines - right * by.sines, right * by.cosines + left * by.sines)
    return torch.cat(both, -1).to(x.dtype)


class Distances(nn.Module):
    """What a key's distance from the query adds to a score, learned for each head."""

    def __init__(self, buckets: int, heads: int) -> None:
        super().__init__()
        self.table = nn.Embedding(buckets, heads)
        numbers = [bucket(distance, buckets) for distance in range(-FARTHEST, FARTHEST + 1)]
        self.runs = [(number, len(list(run))) for number, run in groupby(numbers)]

    def forward(self) -> Tensor:
        """[H, 2R+1], from a key R before the query to one R behind it."""
        # Rows repeated by number, not looked up: no index has to get to the device.
        rows = [self.table.weight[n].expand(count, -1) for n, count in self.runs]
        return torch.cat(rows).t()


def bucket(distance: int, buckets: int) -> int:
    """Of a key this far behind the query (before it where negative)."""
    half, away = buckets // 2, abs(distance)
    exact = half // 2
    if away >= exact:
        share = math.log(away / exact) / math.log(FARTHEST / exact)
        away = min(half - 1, exact + int(share * (half - exact)))
    return away + half * (distance > 0)
