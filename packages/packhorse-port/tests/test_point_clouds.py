"""Farthest points and nearest neighbors, beside their definitions."""

from __future__ import annotations

import math

import pytest
import torch

import packhorse_port as poptorch


def farthest(points, count, start=0):
    """The definition: the next point has the greatest distance from all chosen so far."""
    chosen = [start]
    while len(chosen) < count:
        distances = [min(math.dist(p, points[c]) for c in chosen) for p in points]
        chosen.append(distances.index(max(distances)))
    return chosen


@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.7, 1.0])
def test_fps_takes_the_farthest_points_of_each_group(ratio):
    torch.manual_seed(0)
    points = torch.randn(17, 3)
    ptr = [0, 5, 5, 17]
    expected = farthest(points[:5].tolist(), math.ceil(5 * ratio))
    expected += [5 + i for i in farthest(points[5:].tolist(), math.ceil(12 * ratio))]
    assert poptorch.fps(points, ptr, ratio).tolist() == expected
    torch.manual_seed(1)
    first, *rest = poptorch.fps(points[:5], [0, 5], ratio, random_start=True).tolist()
    assert [first, *rest] == farthest(points[:5].tolist(), math.ceil(5 * ratio), first)


def test_nearest_stays_in_its_group():
    torch.manual_seed(0)
    x = torch.randn(9, 2)
    y = torch.randn(5, 2)
    batch_x = [0] * 4 + [1] * 5
    batch_y = [0, 0, 1, 1, 1]
    for groups_x, groups_y in ((None, None), (batch_x, batch_y), (torch.tensor(batch_x), batch_y)):
        expected = []
        for i, point in enumerate(x.tolist()):
            own = [j for j in range(5) if groups_x is None or batch_x[i] == batch_y[j]]
            expected.append(min(own, key=lambda j: math.dist(point, y[j].tolist())))
        assert poptorch.nearest(x, y, groups_x, groups_y).tolist() == expected


def test_what_is_no_points_is_refused():
    with pytest.raises(poptorch.Error, match="`fps` takes a tensor"):
        poptorch.fps([1], [0, 1])  # pyright: ignore[reportArgumentType]
    with pytest.raises(poptorch.Error, match="`ptr` must be"):
        poptorch.fps(torch.ones(2, 2), [0])
    with pytest.raises(poptorch.Error, match="`nearest` takes a tensor `y`"):
        poptorch.nearest(torch.ones(2, 2), 3)  # pyright: ignore[reportArgumentType]
