"""Blocks, stages, strategies and operations: taken as written, same numbers."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn

import packhorse_port as poptorch
from packhorse_port import notices
from packhorse_port.notices import UsageError

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
    with pytest.raises(UsageError, match="no stage has the block 'd'"):
        strategy.stage("d")
    phased = poptorch.SerialPhasedExecution(["a"], poptorch.Phase("b", "c"), poptorch.Stage("d"))
    assert phased.phase(1).stage(0) is phased.stage("b") is phased.stage("c")
    assert phased.phase(2).stage(0) is phased.stage("d")
    assert poptorch.removeBlocks(model := Line()) is model
    assert poptorch.BlockFunction("a", ipu_id=1)(len) is len
    assert poptorch.BeginBlock(len, "b")([1, 2]) == 2
    with pytest.raises(UsageError, match="Module or a function"):
        poptorch.BeginBlock(3)


def test_a_slice_that_cannot_be_taken_is_refused():
    x = torch.ones(4)
    with pytest.raises(poptorch.Error, match="start and end of a slice must be different"):
        poptorch.dynamic_slice(x, 0, torch.tensor(1), 0)
    with pytest.raises(poptorch.Error, match="end less than the start"):
        poptorch.dynamic_update(x, x, 0, torch.tensor(1), -2)
    with pytest.raises(poptorch.Error, match=r"same dimensionality. \(1\) vs \(2\)"):
        poptorch.dynamic_update(x, x[None], 0, torch.tensor(1), 1)
    with pytest.raises(poptorch.Error, match=r"same dtype. \(torch.float32 vs torch.float16\)"):
        poptorch.dynamic_update(x, x.half(), 0, torch.tensor(1), 1)


def test_blocks_are_shown_and_removed():
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
    assert poptorch.module_repr(model) == repr(model)
    poptorch.BeginBlock(model[1], "end", ipu_id=2)
    assert "(1): BeginBlock(user_id=end, ipu_id=2) ReLU()" in poptorch.module_repr(model)
    assert poptorch.module_repr(copy.deepcopy(model)) == poptorch.module_repr(model)
    with pytest.raises(poptorch.Error, match="already been assigned to a block"):
        poptorch.BeginBlock(model[1], "again")
    assert poptorch.module_repr(poptorch.removeBlocks(model)) == repr(model)


def test_for_loop():
    x = torch.ones(2, requires_grad=True)
    (y,) = poptorch.for_loop(3, lambda x: x * 2, [x])
    y.sum().backward()
    assert torch.equal(y, torch.full((2,), 8.0)) and torch.equal(x.grad, y)  # pyright: ignore[reportArgumentType]
    with pytest.raises(UsageError, match="must return as many as it takes"):
        poptorch.for_loop(1, lambda x: (x, x), [x])
    with pytest.raises(UsageError, match="list of tensors"):
        poptorch.for_loop(1, lambda x: x, x)  # pyright: ignore[reportArgumentType]


def test_a_body_changes_copies():
    x = torch.ones(2)
    assert torch.equal(poptorch.for_loop(3, lambda x: x.add_(1), [x])[0], torch.full((2,), 4.0))
    (y,) = poptorch.cond(x.sum() > 1, lambda a: a.mul_(5), [x], lambda: x, [])
    assert torch.equal(y, torch.full((2,), 5.0)) and torch.equal(x, torch.ones(2))
    (z,) = poptorch.cond(x.sum() > 9, lambda a: a, [x], lambda: x - 1, [])
    assert torch.equal(z, torch.zeros(2))
    with pytest.raises(ValueError, match=r"at index 1 is not torch\.tensor"):
        poptorch.cond(x, lambda: x, [], lambda: x, [x, 5])  # pyright: ignore[reportArgumentType]


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
    assert result == "x: (1.000, 1.000)\nGradient___x: (3.000, 3.000)\n"


def test_printing_is_laid_out_as_poplar_lays_it_out(capfd):
    x = torch.arange(10.0).reshape(2, 5) / 3
    poptorch.ipu_print_tensor(x, "x", True, 5, 1, 80, 3, "fixed", ";", "[", "]")
    poptorch.ipu_print_tensor(x[:1, :2] * 1000, "y", max_line_width=6, float_format="scientific")
    poptorch.ipu_print_tensor(torch.tensor([3, 4]), open_bracket="{", close_bracket="}")
    assert capfd.readouterr().err == (
        "x: [\n [0.00;...;1.33]\n [1.67;...;3.00]\n]\n"
        "y: (\n (0.000e+00,\n   3.333e+02)\n)\ntensor: {3, 4}\n"
    )


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
    with pytest.raises(UsageError, match="DEBUG, ERR, INFO, OFF, TRACE and WARN"):
        poptorch.setLogLevel("LOUD")
    with pytest.raises(UsageError, match="Invalid log level integer: 5"):
        poptorch.setLogLevel(5)
