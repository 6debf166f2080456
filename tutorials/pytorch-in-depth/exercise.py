"""Two executors of one module, a schedule, accumulation, replicas and a pipeline.

    packhorse port exercise.py

The data are made here: points on two spirals. Replace each `raise`
by the lines that its TODO asks for; the README says what they do, `solution.py` what they are.
"""

# ruff: noqa: F821 (what is missing is the exercise)

import poptorch
import torch
from torch import nn

torch.manual_seed(7)


def spirals(count):
    """Points on two spirals, and which of the two each is on."""
    kinds = torch.randint(0, 2, (count,))
    turns = torch.rand(count) * 2 + 0.3
    angles = turns * 3 + kinds * torch.pi
    points = torch.stack([turns * angles.cos(), turns * angles.sin()], dim=1)
    return torch.utils.data.TensorDataset(points + 0.05 * torch.randn(count, 2), kinds)


train_set, test_set = spirals(1024), spirals(256)


class Net(nn.Module):
    """Two blocks, which a pipeline can separate; in training it returns the loss as well."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Dropout(0.1))
        self.second = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))

    def forward(self, points, kinds=None):
        scores = self.second(self.first(points))
        if self.training:
            return scores, nn.functional.cross_entropy(scores, kinds)
        return scores


model = Net()

# TODO 1: Wrap the two halves in blocks.
raise NotImplementedError("TODO 1: wrap the two halves in blocks")

# TODO 2: A pipeline, accumulation, replicas.
raise NotImplementedError("TODO 2: a pipeline, accumulation, replicas")

# TODO 3: The loader.
raise NotImplementedError("TODO 3: the loader")
print(f"{len(loader)} calls of {loader.combinedBatchSize} points in an epoch")

optimizer = poptorch.optim.AdamW(model.parameters(), lr=0.02)
# TODO 4: An executor for training and one for inference.
raise NotImplementedError("TODO 4: an executor for training and one for inference")


def accuracy():
    """The share of the test points that are told right."""
    points, kinds = test_set.tensors
    return float((inference(points).argmax(dim=1) == kinds).float().mean())


for _epoch in range(12):
    for points, kinds in loader:
        scores, loss = training(points, kinds)
    # TODO 5: Evaluate between two epochs.
    raise NotImplementedError("TODO 5: evaluate between two epochs")
    # TODO 6: A smaller learning rate, and set it.
    raise NotImplementedError("TODO 6: a smaller learning rate, and set it")
print(f"accuracy: {100 * reached:.1f} % of {len(test_set)} points")
