"""Points in groups: `fps` and `nearest`, with the results of torch_cluster's.

chosen = fps(points, [0, 100, 250], ratio=0.5)       # indices into points
closest = nearest(points, centers, batch_x, batch_y)  # an index into centers for each point
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from packhorse_port.notices import UsageError, line_prefix


def fps(src: Tensor, ptr: list[int], ratio: float = 0.5, random_start: bool = False) -> Tensor:
    """Farthest-point sampling: indices of a share `ratio` of each group of points.

    ptr: where groups begin, and the end of the last. Each next point is the one that is farthest
    from those chosen so far (Qi et al. 2017, PointNet++).
    """
    if not isinstance(src, Tensor):
        raise UsageError(f"{line_prefix()}`fps` takes a tensor of points, not a {type(src)}")
    if not isinstance(ptr, list) or len(ptr) < 2:
        raise UsageError(f"{line_prefix()}`ptr` must be a list of at least 2 integers, not {ptr}")
    points = src.reshape(len(src), -1)  # [N, D]
    chosen: list[Tensor] = []
    for begin, end in pairwise(ptr):
        group = points[begin:end]
        if not len(group):
            continue
        last = torch.zeros((), dtype=torch.long, device=src.device)
        if random_start:
            last = torch.randint(len(group), (), device=src.device)
        distances = torch.full((len(group),), math.inf, dtype=src.dtype, device=src.device)
        for _ in range(math.ceil(len(group) * ratio)):
            chosen.append(begin + last)
            distances = torch.minimum(distances, (group - group[last]).square().sum(1))
            last = distances.argmax()
    return torch.stack(chosen) if chosen else src.new_empty(0, dtype=torch.long)


def nearest(
    x: Tensor,
    y: Tensor,
    batch_x: Sequence[int] | Tensor | None = None,
    batch_y: Sequence[int] | Tensor | None = None,
) -> Tensor:
    """For each point of `x` the index of the closest point of `y` in the same group.

    batch_x and batch_y: the group of each point, sorted.
    """
    for name, points in (("x", x), ("y", y)):
        if not isinstance(points, Tensor):
            raise UsageError(f"{line_prefix()}`nearest` takes a tensor `{name}`, not a {points!r}")
    group_x = _groups(batch_x, x)
    group_y = _groups(batch_y, y)
    distances = torch.cdist(x.reshape(len(x), -1).float(), y.reshape(len(y), -1).float())
    distances = distances.masked_fill(group_x[:, None] != group_y[None, :], math.inf)
    return distances.argmin(1)


def _groups(batch: Sequence[int] | Tensor | None, points: Tensor) -> Tensor:
    """The group of each point; one group if none are given."""
    if batch is None or not len(batch):
        return torch.zeros(len(points), dtype=torch.long, device=points.device)
    return torch.as_tensor(batch, dtype=torch.long, device=points.device)
