"""What a host call returns, by PopTorch's output modes."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import pytest
import torch
from torch import nn

import packhorse_port as poptorch
from packhorse_port import OutputMode
from packhorse_port.notices import UsageError


class Rows(nn.Module):
    """Every kind of value a forward may return, without weights to train."""

    def forward(self, x):
        return x * 2, x.sum()


class Learning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return x * 1, (x * self.w).mean()


def call(mode: OutputMode, period=1, iterations=4, accumulation=1, replicas=1, training=False):
    opts = poptorch.Options().deviceIterations(iterations).replicationFactor(replicas)
    opts.outputMode(mode, period)
    opts.Training.gradientAccumulation(accumulation)
    x = torch.arange(2.0 * iterations * accumulation * replicas)
    if not training:
        return x, poptorch.inferenceModel(Rows(), opts)(x)
    model = Learning()
    return x, poptorch.trainingModel(model, opts, torch.optim.SGD(model.parameters(), lr=0.1))(x)


@pytest.mark.parametrize("replicas", [1, 2])
def test_inference(replicas):
    x, (rows, sums) = call(OutputMode.All, replicas=replicas)
    assert torch.equal(rows, x * 2)
    assert torch.equal(sums, x.reshape(-1, 2).sum(1))
    x, (rows, sums) = call(OutputMode.Final, replicas=replicas)
    assert torch.equal(rows, x[-2 * replicas :] * 2)
    assert sums.shape == (() if replicas == 1 else (2,))
    x, (rows, sums) = call(OutputMode.EveryN, 2, replicas=replicas)
    steps = x.reshape(4, replicas, 2)
    assert torch.equal(rows, steps[1::2].flatten() * 2)
    x, (rows, sums) = call(OutputMode.Sum, replicas=replicas)
    assert torch.equal(rows, steps.sum(0).flatten() * 2)
    assert torch.equal(sums.flatten(), steps.sum((0, 2)))


def test_default_is_all_for_inference_and_final_for_training():
    x, (rows, _) = call(OutputMode.Default)
    assert len(rows) == len(x)
    x, (rows, loss) = call(OutputMode.Default, training=True, accumulation=2)
    assert torch.equal(rows, x[-2:]) and loss.shape == ()


def test_training_returns_accumulated_batches_too():
    x, (rows, losses) = call(OutputMode.All, training=True, iterations=2, accumulation=3)
    assert torch.equal(rows, x) and losses.shape == (6,)
    x, (rows, losses) = call(OutputMode.EveryN, 3, training=True, iterations=2, accumulation=3)
    assert torch.equal(rows, x.reshape(6, 2)[2::3].flatten()) and losses.shape == (2,)
    assert losses[0] == 0 and losses[1] < 0  # the weight moved in between


def test_a_period_that_does_not_divide_is_refused():
    with pytest.raises(UsageError, match=r"EveryN, 3\) does not divide the 4 batches"):
        call(OutputMode.EveryN, 3)


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@pytest.mark.parametrize(
    "make",
    [
        lambda x: {"a": x, "b": [x + 1, (x + 2, None)], "name": "text"},
        lambda x: OrderedDict(b=x, a=x.sum()),
        lambda x: Pair(x, x + 1),
        lambda x: [x, x > 2],
        lambda x: x,
    ],
)
def test_structures_come_back_as_they_are(make):
    class Made(nn.Module):
        def forward(self, x):
            return make(x)

    opts = poptorch.Options().deviceIterations(2)
    x = torch.arange(4.0)
    executor = poptorch.inferenceModel(Made(), opts)
    executor(x)  # as modules and as a check; then as a trace
    actual, want = executor(x), make(x)
    assert type(actual) is type(want)
    if isinstance(want, dict):
        assert list(actual) == list(want)
        assert torch.equal(actual["b"] if "name" not in want else actual["a"], x)
        assert actual.get("name") == want.get("name")
    elif not isinstance(want, torch.Tensor):
        assert all(torch.equal(a, b) for a, b in zip(actual, want, strict=True))
    else:
        assert torch.equal(actual, want)
