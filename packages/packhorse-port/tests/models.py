"""Small models for the tests of executors, in a module so that a saved one finds its class."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Classifier(nn.Module):
    """A convolution, pooling, a norm and a drop-out: all that makes order and state matter."""

    def __init__(self, dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4) if norm else nn.GroupNorm(2, 4)
        self.pool = nn.MaxPool2d(2)
        self.drop = nn.Dropout(dropout)
        self.out = nn.Linear(36, 5)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x: Tensor, labels: Tensor | None = None):
        x = self.pool(torch.relu(self.norm(self.conv(x))))
        x = self.out(self.drop(x.flatten(1)))
        return x if labels is None else (x, self.loss(x, labels))


class Line(nn.Module):
    """x ↦ wx + b, its loss and its error."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 2)

    def forward(self, x: Tensor, y: Tensor | None = None):
        out = self.line(x)
        return out if y is None else (out, nn.functional.mse_loss(out, y))


def images(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Pictures and labels."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 5, (count,), generator=generator)
    return torch.randn(count, 1, 8, 8, generator=generator), labels


def points(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a `Line`."""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, count, 3, generator=generator)
    return x, y[:, :2].contiguous()
