"""Fashion-MNIST in PyTorch, on its way to an accelerator's SDK: ten TODOs are yours.

    packhorse port exercise.py --epochs 1

Replace each `raise` by the lines that its TODO asks for, then run again: the next one tells itself.
The sections of the README have the same numbers. `solution.py` has the answers.
"""

# ruff: noqa: E402, F821, F841 (what is missing is the exercise)

import argparse

# TODO 1: Import PopTorch. (`packhorse port` provides it; plain `python` will not find it.)
raise NotImplementedError("TODO 1: import poptorch")
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
        # TODO 2: The loss is part of the model. In training return the scores and the loss of the
        # scores against the labels, otherwise the scores alone.
        raise NotImplementedError("TODO 2: let forward return the loss in training")


model = Classifier()

# TODO 3: Make the options `opts`: 25 steps in one call, and the outputs of all of them.
raise NotImplementedError("TODO 3: make the options")

# TODO 4: Make `train_loader` from the options and `train_set`: batches of 16, shuffled.
raise NotImplementedError("TODO 4: make the loader of the training data")

# TODO 5: Make `optimizer`, PopTorch's SGD: learning rate 0.001, momentum 0.9.
raise NotImplementedError("TODO 5: make the optimizer")

# TODO 6: Put the model into training mode and wrap it, with options and optimizer, as `training`.
raise NotImplementedError("TODO 6: wrap the model for training")

for epoch in range(args.epochs):
    total = 0.0
    for images, labels in train_loader:
        scores, losses = training(images, labels)
        total += losses.mean().item()
    print(f"epoch {epoch + 1}: loss {total / len(train_loader):.4f}", flush=True)

# TODO 7: Let go of the device, then save the model's weights as classifier.pth.
raise NotImplementedError("TODO 7: detach and save")

# TODO 8: Put the model into evaluation mode, make options of its own, `inference_opts`, one step a
# call, and wrap the model with them as `inference`.
raise NotImplementedError("TODO 8: wrap the model for inference")

# TODO 9: Make `test_loader` from those options and `test_set`: batches of 40.
raise NotImplementedError("TODO 9: make the loader of the test data")

right = seen = 0
for images, labels in test_loader:
    right += int((inference(images).argmax(dim=1) == labels).sum())
    seen += len(labels)

# TODO 10: Let go of the device.
raise NotImplementedError("TODO 10: detach")

print(f"accuracy: {100 * right / seen:.2f} % of {seen} images")
