"""Porting on CUDA: the plain loop's numbers, a host call as one graph, weights where they belong.

Skipped where there is no NVIDIA GPU.
"""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import packhorse_port as poptorch
from packhorse_port.step import WARMUP_CALLS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
BATCH, ITERATIONS, CALLS = 4, 5, WARMUP_CALLS + 4


@pytest.fixture(autouse=True)
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the device that nobody names is the GPU, as for a user who has one."""
    monkeypatch.delenv("PACKHORSE_DEVICE", raising=False)


@pytest.fixture(autouse=True)
def _same_kernels() -> Any:
    """Full fp32 and kernels that add up in one order, so that numbers can be compared."""
    matmul, cudnn = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, cudnn
    torch.backends.cudnn.deterministic = False


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        # No bias: the norm takes it away again, and Adam would follow the noise of its gradient.
        self.conv, self.norm = nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8)
        self.drop, self.out = nn.Dropout(dropout), nn.Linear(8 * 36, 5)

    def forward(self, x: Tensor, labels: Tensor | None = None):
        x = self.out(self.drop(torch.relu(self.norm(self.conv(x))).flatten(1)))
        return x if labels is None else (x, nn.functional.cross_entropy(x, labels))


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adam": lambda p: poptorch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "lamb": lambda p: poptorch.optim.LAMB(p, lr=0.01),
}


def data(rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 5, (rows,), generator=generator)
    return torch.randn(rows, 1, 8, 8, generator=generator), labels


def plain(model: nn.Module, optimizer: torch.optim.Optimizer, accumulation: int = 1) -> None:
    images, labels = (item.cuda() for item in data(BATCH * ITERATIONS * accumulation * CALLS))
    for begin in range(0, len(images), BATCH * accumulation):
        optimizer.zero_grad()
        for at in range(begin, begin + BATCH * accumulation, BATCH):
            _, loss = model(images[at : at + BATCH], labels[at : at + BATCH])
            (loss / accumulation).backward()
        optimizer.step()


def ported(model: nn.Module, optimizer: Any, accumulation: int = 1, compiled: bool = True):
    opts = poptorch.Options().deviceIterations(ITERATIONS).compileStep(compiled)
    opts.Training.gradientAccumulation(accumulation)
    training = poptorch.trainingModel(model, opts, optimizer)
    rows = BATCH * ITERATIONS * accumulation
    images, labels = data(rows * CALLS)
    for at in range(0, len(images), rows):
        training(images[at : at + rows], labels[at : at + rows])
    return training


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_captured_call_is_the_plain_loop(name, accumulation):
    torch.manual_seed(0)
    actual = Net()
    expected = copy.deepcopy(actual).cuda()
    plain(expected, OPTIMIZERS[name](expected.parameters()), accumulation)
    training = ported(actual, OPTIMIZERS[name](actual.parameters()), accumulation)
    recorded = training._runner.recorded
    assert bool(recorded) == (name != "lamb"), training._runner.refused
    # The first call makes the optimizer's moments, so those after it are counted anew.
    assert all(item.uses == CALLS - WARMUP_CALLS - 1 for item in recorded.values())
    training.detachFromDevice()
    for key, value in actual.state_dict().items():
        torch.testing.assert_close(value, expected.state_dict()[key].cpu(), rtol=1e-4, atol=1e-5)


def test_dropout_draws_anew_in_each_step():
    torch.manual_seed(0)
    opts = poptorch.Options().deviceIterations(4).outputMode(poptorch.OutputMode.All)
    inference = poptorch.inferenceModel(nn.Dropout(0.5), opts.compileStep())
    drawn = [inference(torch.ones(4, 64)) for _ in range(WARMUP_CALLS + 3)]
    assert len({tuple(row.tolist()) for call in drawn for row in call}) == 4 * len(drawn)


def test_a_new_learning_rate_is_followed():
    torch.manual_seed(0)
    model = nn.Linear(2, 1)

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            return self.model(x).mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = poptorch.trainingModel(Loss(), poptorch.Options().compileStep(), optimizer)
    for _ in range(WARMUP_CALLS + 2):
        training(torch.ones(2, 2))
    training.detachFromDevice()
    before = model.bias.detach().clone()
    optimizer.param_groups[0]["lr"] = 0.5
    training.setOptimizer(optimizer)
    training(torch.ones(2, 2))
    training.detachFromDevice()
    assert torch.allclose(before - model.bias, torch.tensor([0.5]))


def test_weights_are_on_both_sides():
    torch.manual_seed(0)
    model = Net()
    training = ported(model, OPTIMIZERS["adam"](model.parameters()))
    device = training._weights.counterparts[id(model.out.weight)]
    assert device.is_cuda and model.out.weight.device.type == "cpu"
    assert torch.equal(model.out.weight, device.cpu())  # copied because it was looked at
    images, labels = data(BATCH)
    assert model(images).device.type == "cpu"  # the script's own call, on the host
    out, loss = training(*(x.repeat(ITERATIONS, *[1] * (x.dim() - 1)) for x in (images, labels)))
    assert out.device.type == loss.device.type == "cpu"
    training.detachFromDevice()
    assert device.device.type == "cpu"  # there is room on the device again


def test_as_python_a_call_is_the_plain_loop_and_no_graph():
    torch.manual_seed(0)
    actual = Net()
    expected = copy.deepcopy(actual).cuda()
    plain(expected, OPTIMIZERS["adam"](expected.parameters()))
    training = ported(actual, OPTIMIZERS["adam"](actual.parameters()), compiled=False)
    assert not training._runner.recorded
    for key, value in actual.state_dict().items():
        torch.testing.assert_close(value, expected.state_dict()[key].cpu(), rtol=1e-4, atol=1e-5)


def test_a_change_of_the_input_reaches_the_script():
    class AddsOne(nn.Module):
        def forward(self, x: Tensor) -> None:
            x += 1

    for compiled in (False, True):
        x = torch.zeros(4)
        adding = poptorch.inferenceModel(AddsOne(), poptorch.Options().compileStep(compiled))
        for _ in range(WARMUP_CALLS + 3):
            adding(x)
        assert torch.equal(x, torch.full((4,), WARMUP_CALLS + 3.0))


def test_inference_is_the_modules():
    model = Net().eval()
    opts = poptorch.Options().deviceIterations(2).compileStep()
    inference = poptorch.inferenceModel(model, opts)
    images, _ = data(8)
    actual = [inference(images + call) for call in range(WARMUP_CALLS + 2)]
    inference.detachFromDevice()
    for call, single in enumerate(actual):
        expected = model(images + call).detach()
        torch.testing.assert_close(single, expected, rtol=1e-4, atol=1e-4)


class Looks(Net):
    """Reads a number in the middle, which no capture allows."""

    def forward(self, x: Tensor, labels: Tensor | None = None):
        out = super().forward(x, labels)
        (out if labels is None else out[0]).sum().item()
        return out


def test_a_capture_that_fails_leaves_dropout_and_stream_as_they_were():
    torch.manual_seed(0)
    stream = torch.cuda.current_stream()
    model = Looks(dropout=0.5)
    training = ported(model, torch.optim.SGD(model.parameters(), lr=0.01))
    assert training._runner.refused and not training._runner.recorded
    assert torch.cuda.current_stream() == stream
    torch.cuda.manual_seed(3)
    first = torch.rand(8, device="cuda")
    torch.cuda.manual_seed(3)
    assert torch.equal(torch.rand(8, device="cuda"), first)
    again = ported(second := Net(dropout=0.5), torch.optim.SGD(second.parameters(), lr=0.01))
    assert again._runner.recorded, again._runner.refused


class Collects(Net):
    """The collector, in the middle of a step."""

    def forward(self, x: Tensor, labels: Tensor | None = None):
        if gc.isenabled():
            gc.collect()
        return super().forward(x, labels)


def test_a_graph_that_ends_spoils_no_capture():
    def train() -> Any:
        model = Collects(dropout=0.5)
        return ported(model, torch.optim.SGD(model.parameters(), lr=0.01))

    for _ in range(3):
        training = train()
        assert training._runner.recorded, training._runner.refused
        training.itself = training  # ends when the collector runs: amid the next one's capture
        del training


def test_a_schedule_by_the_step_stops_the_captures():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = poptorch.trainingModel(model, poptorch.Options().compileStep(), optimizer)
    for call in range(40):
        optimizer.param_groups[0]["lr"] = 0.1 / (call + 1)
        training.setOptimizer(optimizer)
        training(*data(BATCH))
    assert len(training._runner.recorded) == 0  # no rate was seen often enough to be captured
