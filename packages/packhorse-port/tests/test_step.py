"""A host call against the plain loop it stands for."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import packhorse_port as poptorch
from packhorse_port.notices import UsageError

from .models import Classifier, Line, images, points

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "nesterov": lambda p: poptorch.optim.SGD(
        p, lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True
    ),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: poptorch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
    "lamb": lambda p: poptorch.optim.LAMB(p, lr=0.01),
}


def options(
    iterations=1, accumulation=1, replicas=1, mean=True, compiled=False
) -> poptorch.Options:
    opts = poptorch.Options().deviceIterations(iterations).replicationFactor(replicas)
    opts.Training.gradientAccumulation(accumulation)
    kind = poptorch.ReductionType.Mean if mean else poptorch.ReductionType.Sum
    opts.Training.accumulationAndReplicationReductionType(kind)
    return opts.compileStep(compiled)


def plain(model, optimizer, data, labels, batch, accumulation=1, mean=True) -> list[torch.Tensor]:
    """The loop as anyone writes it; the losses."""
    losses = []
    for begin in range(0, len(data), batch * accumulation):
        optimizer.zero_grad()
        for at in range(begin, begin + batch * accumulation, batch):
            _, loss = model(data[at : at + batch], labels[at : at + batch])
            losses.append(loss.detach())
            (loss / accumulation if mean else loss).backward()
        optimizer.step()
    return losses


def ported(model, optimizer, opts, data, labels, batch, calls) -> poptorch.PoplarExecutor:
    training = poptorch.trainingModel(model, opts, optimizer)
    size = batch * opts.batches_per_call
    for call in range(calls):
        at = slice(call * size, (call + 1) * size)
        training(data[at], labels[at])
    return training


def pair(make, seed=1):
    torch.manual_seed(seed)
    model = make()
    return model, copy.deepcopy(model)


def same(first: nn.Module, second: nn.Module) -> bool:
    pairs = zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@settings(max_examples=15, deadline=None)
@given(
    batch=st.integers(1, 5),
    iterations=st.integers(1, 4),
    accumulation=st.integers(1, 3),
    mean=st.booleans(),
    name=st.sampled_from(sorted(OPTIMIZERS)),
    dropout=st.sampled_from([0.0, 0.3]),
    norm=st.booleans(),
    compiled=st.sampled_from(["trace", False]),
)
def test_one_replica_gives_the_bits_of_the_plain_loop(
    batch, iterations, accumulation, mean, name, dropout, norm, compiled
):
    calls = 3
    data, labels = images(batch * iterations * accumulation * calls)
    actual, expected = pair(lambda: Classifier(dropout, norm))
    torch.manual_seed(7)
    plain(
        expected, OPTIMIZERS[name](expected.parameters()), data, labels, batch, accumulation, mean
    )
    drawn = torch.get_rng_state()
    torch.manual_seed(7)
    opts = options(iterations, accumulation, mean=mean, compiled=compiled)
    training = ported(
        actual, OPTIMIZERS[name](actual.parameters()), opts, data, labels, batch, calls
    )
    assert same(actual, expected)
    assert torch.equal(drawn, torch.get_rng_state())  # as many random numbers, too
    assert bool(training._step.graphs) == (compiled == "trace")  # and it was a trace if asked for


def test_the_comparison_can_fail():
    data, labels = images(12)
    actual, expected = pair(Classifier)
    plain(expected, OPTIMIZERS["sgd"](expected.parameters()), data, labels, 2)
    ported(actual, OPTIMIZERS["sgd"](actual.parameters()), options(2, 2), data, labels, 2, 1)
    assert not same(actual, expected)


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("mean", [True, False])
def test_replicas_are_accumulation_side_by_side(replicas, mean):
    data, labels = images(4 * replicas * 2 * 3)
    actual, expected = pair(Classifier)
    plain(expected, OPTIMIZERS["sgd"](expected.parameters()), data, labels, 4, replicas * 2, mean)
    opts = options(1, 2, replicas, mean)
    ported(actual, OPTIMIZERS["sgd"](actual.parameters()), opts, data, labels, 4, 3)
    for a, b in zip(actual.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-6)


def test_each_replica_has_statistics_of_its_own_and_the_module_the_first_ones():
    data, labels = images(4 * 2 * 4)
    actual, expected = pair(lambda: Classifier(norm=True))
    assert isinstance(actual, Classifier) and isinstance(expected, Classifier)
    ported(actual, OPTIMIZERS["sgd"](actual.parameters()), options(2, 1, 2), data, labels, 4, 2)
    first, second = expected, copy.deepcopy(expected)
    optimizer = OPTIMIZERS["sgd"](first.parameters())
    for step in range(4):
        optimizer.zero_grad()
        for model, at in ((first, step * 8), (second, step * 8 + 4)):
            model.load_state_dict(dict(first.named_parameters()), strict=False)
            (model(data[at : at + 4], labels[at : at + 4])[1] / 2).backward()
        for a, b in zip(first.parameters(), second.parameters(), strict=True):
            assert a.grad is not None and b.grad is not None
            a.grad, b.grad = a.grad + b.grad, None
        optimizer.step()
    assert actual.state_dict()["norm.num_batches_tracked"] == 4
    for a, b in zip(actual.state_dict().values(), first.state_dict().values(), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-6)


def test_a_learning_rate_that_changes_is_followed():
    data, labels = images(4 * 8)
    actual, expected = pair(Classifier)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (actual, expected)]
    schedules = [torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5) for o in optimizers]
    training = poptorch.trainingModel(actual, options(2, compiled="trace"), optimizers[0])
    for at in range(0, 32, 8):
        training(data[at : at + 8], labels[at : at + 8])
        schedules[0].step()
        training.setOptimizer(optimizers[0])
        plain(expected, optimizers[1], data[at : at + 8], labels[at : at + 8], 4)
        schedules[1].step()
    assert same(actual, expected) and training._step.graphs


def test_what_changes_in_the_model_is_seen():
    data, labels = images(40)
    actual, expected = pair(lambda: Classifier(0.5))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (actual, expected)]
    training = poptorch.trainingModel(actual, options(2), optimizers[0])
    states = [torch.get_rng_state()] * 2
    for at in range(0, 40, 8):
        rows = slice(at, at + 8)
        for number, model in enumerate((actual, expected)):
            torch.set_rng_state(states[number])
            if at == 16:
                model.drop.p = 0.0
            if at == 24:
                model.conv.weight.requires_grad_(False)
                if not number:
                    training.copyWeightsToDevice()
            if number:
                plain(model, optimizers[1], data[rows], labels[rows], 4)
            else:
                training(data[rows], labels[rows])
            states[number] = torch.get_rng_state()
    assert same(actual, expected)


class Counting(Line):
    calls = 0

    def forward(self, x, y=None):
        self.calls += 1
        return super().forward(x, y)


class Rolling(Line):
    def forward(self, x, y=None):
        return super().forward(x * (1 + random.random()), y)


class Asking(Line):
    def forward(self, x, y=None):
        return super().forward(-x if x.sum().item() < 0 else x, y)


class Printing(Line):
    def forward(self, x, y=None):
        return super().forward(poptorch.ipu_print_tensor(x, "x"), y)


@pytest.mark.parametrize("kind", [Counting, Rolling, Asking, Printing])
def test_what_a_trace_cannot_say_runs_as_modules(kind, capfd):
    data, labels = points(4 * 6)
    actual, expected = pair(kind)
    random.seed(3)
    plain(expected, torch.optim.SGD(expected.parameters(), lr=0.1), data, labels, 4)
    random.seed(3)
    optimizer = torch.optim.SGD(actual.parameters(), lr=0.1)
    training = ported(actual, optimizer, options(2, compiled="trace"), data, labels, 4, 3)
    assert same(actual, expected)
    assert training._step.refused and not training._step.graphs
    if kind is Counting:
        assert actual.calls == expected.calls
    assert capfd.readouterr().err.count("x: (") == (12 if kind is Printing else 0)


def test_hooks_run_as_modules():
    model, seen = Line(), []
    model.line.register_forward_hook(lambda *_: seen.append(1))
    opts = options(2, compiled="trace")
    ported(model, torch.optim.SGD(model.parameters(), lr=0.1), opts, *points(24), 4, 3)
    assert len(seen) == 6


def test_a_batch_that_cannot_be_cut_names_the_line_to_change():
    training = poptorch.trainingModel(Line(), options(2, 3))
    with pytest.raises(UsageError, match=r"test_step.py:\d+: .* = 6\)\. Read with poptorch.DataLo"):
        training(*points(10))


def test_the_gradients_are_nobodys_business_afterwards():
    model = Line()
    ported(model, torch.optim.SGD(model.parameters(), lr=0.1), options(), *points(4), 4, 1)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_weights_that_are_not_used_stay():
    class Half(Line):
        def __init__(self):
            super().__init__()
            self.spare = nn.Linear(2, 2)

    actual, expected = pair(Half)
    data, labels = points(24)
    plain(expected, torch.optim.AdamW(expected.parameters(), lr=0.1), data, labels, 4)
    optimizer = torch.optim.AdamW(actual.parameters(), lr=0.1)
    ported(actual, optimizer, options(2), data, labels, 4, 3)
    assert same(actual, expected)
