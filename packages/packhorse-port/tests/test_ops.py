"""Blocks, stages, strategies and operations: taken as written, same numbers."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import packhorse_port as poptorch
from packhorse.errors import InputError
from packhorse_port import notices

from .models import Line, points


@pytest.fixture(autouse=True)
def fresh() -> None:
    notices.reset()


class Divided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = poptorch.BeginBlock(nn.Linear(4, 2), "second", ipu_id=1)

    def forward(self, x, y):
        with poptorch.Block("first", ipu_id=0):
            x = torch.relu(self.first(x))
        poptorch.Block.start("loss", ipu_id=1)
        out = poptorch.recomputationCheckpoint(self.second(x))
        return out, nn.functional.mse_loss(poptorch.nop(out), y)


STRATEGIES = [
    poptorch.PipelinedExecution(poptorch.AutoStage.AutoIncrement),
    poptorch.PipelinedExecution(poptorch.Stage("first").ipu(0), poptorch.Stage("second").ipu(1)),
    poptorch.ShardedExecution("first", "second"),
    poptorch.SerialPhasedExecution([poptorch.Stage("first")], [poptorch.Stage("second")]),
    poptorch.ParallelPhasedExecution(poptorch.Phase("first").ipus(0), poptorch.Phase("second")),
]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_strategy_changes_no_number(strategy):
    torch.manual_seed(0)
    model = Divided()
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    data, targets = points(12)
    opts = poptorch.Options().deviceIterations(3).setExecutionStrategy(strategy)
    training = poptorch.trainingModel(model, opts, torch.optim.SGD(model.parameters(), lr=0.1))
    training(data, targets)
    for at in range(0, 12, 4):
        optimizer.zero_grad()
        nn.functional.mse_loss(plain(data[at : at + 4]), targets[at : at + 4]).backward()
        optimizer.step()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert list(model.state_dict()) == [
        "first.weight",
        "first.bias",
        "second.weight",
        "second.bias",
    ]
    assert [result.key for result in notices.logged()] == ["blocks", "recomputationCheckpoint"]


def test_stages_and_phases_can_be_asked_for():
    strategy = poptorch.PipelinedExecution(poptorch.Stage("a", "b").ipu(2), "c")
    assert strategy.stage("b").blocks == ("a", "b")
    with pytest.raises(InputError, match="no stage has the block 'd'"):
        strategy.stage("d")
    phased = poptorch.SerialPhasedExecution(["a"], poptorch.Phase("b", "c"))
    assert phased.phase(1).stage(1) is phased.stage("c")
    assert poptorch.removeBlocks(model := Line()) is model
    assert poptorch.BlockFunction("a", ipu_id=1)(len) is len
    with pytest.raises(InputError, match="use BlockFunction"):
        poptorch.BeginBlock(len)  # pyright: ignore[reportArgumentType]


def test_for_loop():
    x = torch.ones(2, requires_grad=True)
    (y,) = poptorch.for_loop(3, lambda x: x * 2, [x])
    y.sum().backward()
    assert torch.equal(y, torch.full((2,), 8.0)) and torch.equal(x.grad, y)  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match="must return as many as it takes"):
        poptorch.for_loop(1, lambda x: (x, x), [x])
    with pytest.raises(InputError, match="list of tensors"):
        poptorch.for_loop(1, lambda x: x, x)  # pyright: ignore[reportArgumentType]


def test_slices_at_a_tensor():
    x = torch.arange(12.0).reshape(3, 4)
    start = torch.tensor(1)
    assert torch.equal(poptorch.dynamic_slice(x, 1, start, 2), x[:, 1:3])
    changed = poptorch.dynamic_update(x, torch.zeros(3, 2), 1, start, 2)
    assert changed[:, 1:3].sum() == 0 and changed[0, 3] == 3 and x[0, 1] == 1


def test_a_decoder_adds_up_what_spells_the_same():
    probs = torch.tensor([[[0.4, 0.6]], [[0.6, 0.4]]]).log()  # blank, a
    scores, lengths, paths = poptorch.ctc_beam_search_decoder(probs, torch.tensor([2]), top_paths=2)
    # "a": a-, -a, aa; "" : --
    assert scores.exp().tolist()[0] == pytest.approx([0.36 + 0.16 + 0.24, 0.24])
    assert lengths.tolist() == [[1, 0]] and paths[0, 0, 0] == 1


def test_printing_shows_value_and_gradient(capfd):
    x = torch.ones(2, requires_grad=True)
    (poptorch.ipu_print_tensor(x, "x") * 3).sum().backward()
    result = capfd.readouterr().err
    assert "x: tensor([1., 1.]" in result and "Gradient___x: tensor([3., 3.])" in result


def test_what_only_arranges_gives_back_what_it_got():
    x = torch.ones(2, 2)
    assert poptorch.set_available_memory(x, 0.2) is x
    assert poptorch.set_overlap_for_input(x, poptorch.OverlapMode.NoOverlap) is x
    assert poptorch.CPU(torch.neg, "neg")(x).sum() == -4
    mode = poptorch.MatMulSerializationMode.OutputChannels
    assert torch.equal(poptorch.serializedMatMul(x, x, mode, 2), x @ x)
    with poptorch.NameScope("a"), poptorch.MultiConv().planType(None), poptorch.Attribute(a=1):
        pass


def test_there_is_no_ipu_and_logging_has_levels():
    assert not poptorch.ipuHardwareIsAvailable() and poptorch.ipuHardwareVersion() == 0
    logger = logging.getLogger("packhorse_port")
    before = logger.level
    poptorch.setLogLevel("ERR")
    assert logger.level == logging.ERROR
    poptorch.setLogLevel(logging.DEBUG)
    assert logger.level == logging.DEBUG
    logger.setLevel(before)
    with pytest.raises(InputError, match="TRACE, TRACE_ALL, DEBUG, INFO, WARN, ERR, OFF"):
        poptorch.setLogLevel("LOUD")
