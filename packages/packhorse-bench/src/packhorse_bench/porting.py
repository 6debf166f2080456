"""The course's small CNN, trained by the plain PyTorch loop and by `packhorse_port`, side by side.

The plain loop is written as tutorials write it: a DataLoader that gives one batch, `zero_grad`,
forward, `backward`, `step`, `loss.item()`. The port has PopTorch's: a DataLoader that gives the
batches of many device iterations, and one call for all of them. Both begin from the same weights
and see the same pictures in the same order, so after the first round their weights are compared.
Pictures are random, of Fashion-MNIST's size: what they show does not change how long a step takes.
Ways take turns within a round, so that a busy machine is unfair to all of them alike.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import packhorse_port as poptorch
from packhorse.device import choose_device
from packhorse.errors import InputError
from packhorse.reports.tables import Table

RATE = 0.001
MOMENTUM = 0.9
PLAIN = "plain loop"


@dataclass(frozen=True, slots=True)
class PortSetup:
    """The settings of a measurement; `steps` are those of one round."""

    batch: int = 16
    iterations: int = 50
    steps: int = 200
    repeats: int = 5
    device: str | None = None
    compiled: bool = False
    seed: int = 0


@dataclass(frozen=True, slots=True)
class PortRow:
    """One way of training."""

    way: str
    images_per_second: float  # of the median round, as all figures but the best
    best_images_per_second: float
    step_us: float
    over_plain: float | None
    best_over_plain: float | None
    largest_difference: float | None  # of a weight, to the plain loop's after the first round
    problem: str | None = None

    @property
    def subject(self) -> str:
        return self.way


class Classifier(nn.Module):
    """The model of the tutorials, which computes its own loss as PopTorch requires."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 5, 3), nn.Conv2d(5, 12, 5)
        self.pool, self.relu = nn.MaxPool2d(2, 2), nn.ReLU()
        self.norm = nn.GroupNorm(3, 12)
        self.fc1, self.fc2 = nn.Linear(972, 100), nn.Linear(100, 10)
        self.log_softmax, self.loss = nn.LogSoftmax(dim=1), nn.NLLLoss()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        x = self.pool(self.relu(self.conv1(x)))
        x = self.norm(self.relu(self.conv2(x)))
        x = self.relu(self.fc1(torch.flatten(x, start_dim=1)))
        x = self.log_softmax(self.fc2(x))
        return (x, self.loss(x, labels)) if self.training else x


@dataclass
class PortWay:
    """A model, and a function that trains it for one round."""

    name: str
    model: nn.Module
    run: Callable[[], None]


def measure(
    setup: PortSetup, advance: Callable[[int, int], None] = lambda done, total: None
) -> list[PortRow]:
    """Time every way; `advance` is called with the rounds done and their total."""
    check(setup)
    device = choose_device(setup.device)
    ways = build(setup, device)
    total = setup.repeats + 1
    advance(0, total)
    differences = _first_round(setup, ways)
    seconds: dict[str, list[float]] = {way.name: [] for way in ways}
    for number in range(setup.repeats):
        advance(number + 1, total)
        for way in ways:
            seconds[way.name].append(_timed(way, setup, device))
    advance(total, total)
    return [_row(way.name, seconds, setup, differences[way.name]) for way in ways]


def check(setup: PortSetup) -> None:
    """Raise if the settings cannot be measured."""
    if min(setup.batch, setup.iterations, setup.steps, setup.repeats) < 1:
        raise InputError("--batch, --iterations, --steps and --repeats are at least 1")
    if setup.steps % setup.iterations:
        raise InputError(
            f"--steps {setup.steps} is no multiple of --iterations {setup.iterations}: a host call"
            " would be left half done"
        )


def build(setup: PortSetup, device: torch.device) -> list[PortWay]:
    """All ways to measure, the plain loop first, each with a copy of the same model."""
    generator = torch.Generator().manual_seed(setup.seed)
    count = setup.batch * setup.steps
    pictures = torch.randn(count, 1, 28, 28, generator=generator)
    data = TensorDataset(pictures, torch.randint(0, 10, (count,), generator=generator))
    torch.manual_seed(setup.seed)
    model = Classifier().train()
    ways = [_plain(copy.deepcopy(model), data, setup, device)]
    ways.append(_port("port", copy.deepcopy(model), data, setup, False))
    if device.type == "cpu":  # elsewhere nothing is traced
        ways.append(_port("port, traced", copy.deepcopy(model), data, setup, "trace"))
    if setup.compiled:
        ways.append(_port("port, compiled", copy.deepcopy(model), data, setup, True))
    return ways


def _optimizer(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)


def _plain(
    model: nn.Module, data: TensorDataset, setup: PortSetup, device: torch.device
) -> PortWay:
    model.to(device)
    optimizer = _optimizer(model)
    loader = torch.utils.data.DataLoader(data, batch_size=setup.batch, shuffle=True)

    def run() -> None:
        total = 0.0
        for pictures, labels in loader:
            optimizer.zero_grad()
            _, loss = model(pictures.to(device), labels.to(device))
            loss.backward()
            optimizer.step()
            total += loss.item()  # waits for the device at every step, as tutorials do

    return PortWay(PLAIN, model, run)


def _port(
    name: str, model: nn.Module, data: TensorDataset, setup: PortSetup, compiled: bool | str
) -> PortWay:
    options = poptorch.Options().deviceIterations(setup.iterations).compileStep(compiled)
    options.enableExecutableCaching(None)
    loader = poptorch.DataLoader(options, data, batch_size=setup.batch, shuffle=True)
    training = poptorch.trainingModel(model, options, _optimizer(model))

    def run() -> None:
        total = 0.0
        for pictures, labels in loader:
            _, loss = training(pictures, labels)
            total += loss.item()

    return PortWay(name, model, run)


def _first_round(setup: PortSetup, ways: Sequence[PortWay]) -> dict[str, float | None]:
    """Warm up; returns the largest difference of each way's weights to the plain loop's."""
    differences: dict[str, float | None] = {}
    for way in ways:
        torch.manual_seed(setup.seed)
        way.run()
        pairs = zip(way.model.parameters(), ways[0].model.parameters(), strict=True)
        gaps = [float((a.detach().cpu() - b.detach().cpu()).abs().max()) for a, b in pairs]
        differences[way.name] = max(gaps) if way is not ways[0] else None
    return differences


def _timed(way: PortWay, setup: PortSetup, device: torch.device) -> float:
    torch.manual_seed(setup.seed)  # the same order of pictures in every round
    started = time.perf_counter()
    way.run()
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - started


def _row(
    name: str, seconds: dict[str, list[float]], setup: PortSetup, difference: float | None
) -> PortRow:
    way_seconds = seconds[name]
    plain = seconds[PLAIN]
    images = setup.batch * setup.steps
    best = min(way_seconds)
    median = statistics.median(way_seconds)
    is_plain = name == PLAIN
    return PortRow(
        way=name,
        images_per_second=images / median,
        best_images_per_second=images / best,
        step_us=median / setup.steps * 1e6,
        over_plain=None if is_plain else statistics.median(plain) / median,
        best_over_plain=None if is_plain else min(plain) / best,
        largest_difference=difference,
    )


def table(rows: Sequence[PortRow]) -> Table:
    """One line per way."""
    columns = ("way", "images/s", "best", "us per step", "x plain", "best x", "max diff")
    return Table.of(
        columns,
        [
            (
                row.way,
                f"{row.images_per_second:,.0f}",
                f"{row.best_images_per_second:,.0f}",
                f"{row.step_us:,.0f}",
                _times(row.over_plain),
                _times(row.best_over_plain),
                "-" if row.largest_difference is None else f"{row.largest_difference:.1e}",
            )
            for row in rows
        ],
    )


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
