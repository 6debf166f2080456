"""Two executors of one module, a schedule, accumulation, replicas and a pipeline: the gaps filled.

    packhorse port solution.py

The data are made here: points on two spirals. The regions between `# --- solution` and
`# --- end` are what `exercise.py` leaves to you.
"""

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

# --- solution 1
model.first = poptorch.BeginBlock(model.first, "first", ipu_id=0)
model.second = poptorch.BeginBlock(model.second, "second", ipu_id=1)
# --- end 1

# --- solution 2
opts = poptorch.Options()
opts.setExecutionStrategy(poptorch.PipelinedExecution(poptorch.AutoStage.AutoIncrement))
opts.Training.gradientAccumulation(4)
opts.replicationFactor(2)
# --- end 2

# --- solution 3
loader = poptorch.DataLoader(opts, train_set, batch_size=8, shuffle=True)
# --- end 3
print(f"{len(loader)} calls of {loader.combinedBatchSize} points in an epoch")

optimizer = poptorch.optim.AdamW(model.parameters(), lr=0.02)
# --- solution 4
model.train()
training = poptorch.trainingModel(model, opts, optimizer)
model.eval()
inference = poptorch.inferenceModel(model)
# --- end 4


def accuracy():
    """The share of the test points that are told right."""
    points, kinds = test_set.tensors
    return float((inference(points).argmax(dim=1) == kinds).float().mean())


for _epoch in range(12):
    for points, kinds in loader:
        scores, loss = training(points, kinds)
    # --- solution 5
    training.detachFromDevice()
    reached = accuracy()
    inference.detachFromDevice()
    # --- end 5
    # --- solution 6
    for group in optimizer.param_groups:
        group["lr"] *= 0.85
    training.setOptimizer(optimizer)
    # --- end 6
print(f"accuracy: {100 * reached:.1f} % of {len(test_set)} points")
