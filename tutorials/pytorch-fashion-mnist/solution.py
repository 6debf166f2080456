"""Fashion-MNIST in PyTorch, ported to an accelerator's SDK: every step of the README, done.

    packhorse port solution.py
    packhorse port solution.py --epochs 1

The regions between `# --- solution` and `# --- end` are what `exercise.py` leaves to you.
"""

import argparse

# --- solution 1
import poptorch

# --- end 1
import torch
import torchvision
from torch import nn

arguments = argparse.ArgumentParser()
arguments.add_argument("--epochs", type=int, default=5)
arguments.add_argument("--data", default="~/.torch/datasets", help="where the idx files lie")
args = arguments.parse_args()
torch.manual_seed(30)

# Pixels from 0 to 255 become numbers from -1 to 1.
transform = torchvision.transforms.Compose(
    [torchvision.transforms.ToTensor(), torchvision.transforms.Normalize((0.5,), (0.5,))]
)
train_set = torchvision.datasets.FashionMNIST(
    args.data, train=True, transform=transform, download=True
)
test_set = torchvision.datasets.FashionMNIST(
    args.data, train=False, transform=transform, download=True
)


class Classifier(nn.Module):
    """28 by 28 pixels in, the logarithms of ten probabilities out; in training the loss as well."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 5, 3),  # 26 by 26
            nn.ReLU(),
            nn.MaxPool2d(2),  # 13 by 13
            nn.Conv2d(5, 12, 5),  # 9 by 9, 12 channels: 972 numbers
            nn.ReLU(),
            nn.GroupNorm(3, 12),
            nn.Flatten(),
        )
        self.classes = nn.Sequential(
            nn.Linear(972, 100), nn.ReLU(), nn.Linear(100, 10), nn.LogSoftmax(dim=1)
        )
        self.measure = nn.NLLLoss()

    def forward(self, images, labels=None):
        scores = self.classes(self.features(images))
        # --- solution 2
        if self.training:
            return scores, self.measure(scores, labels)
        return scores
        # --- end 2


model = Classifier()

# --- solution 3
opts = poptorch.Options()
opts.deviceIterations(25)
opts.outputMode(poptorch.OutputMode.All)
# --- end 3

# --- solution 4
train_loader = poptorch.DataLoader(opts, train_set, batch_size=16, shuffle=True)
# --- end 4

# --- solution 5
optimizer = poptorch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
# --- end 5

# --- solution 6
model.train()
training = poptorch.trainingModel(model, options=opts, optimizer=optimizer)
# --- end 6

for epoch in range(args.epochs):
    total = 0.0
    for images, labels in train_loader:
        scores, losses = training(images, labels)
        total += losses.mean().item()
    print(f"epoch {epoch + 1}: loss {total / len(train_loader):.4f}", flush=True)

# --- solution 7
training.detachFromDevice()
torch.save(model.state_dict(), "classifier.pth")
# --- end 7

# --- solution 8
model.eval()
inference_opts = poptorch.Options()
inference = poptorch.inferenceModel(model, options=inference_opts)
# --- end 8

# --- solution 9
test_loader = poptorch.DataLoader(inference_opts, test_set, batch_size=40)
# --- end 9

right = seen = 0
for images, labels in test_loader:
    right += int((inference(images).argmax(dim=1) == labels).sum())
    seen += len(labels)

# --- solution 10
inference.detachFromDevice()
# --- end 10

print(f"accuracy: {100 * right / seen:.2f} % of {seen} images")
