"""Fashion-MNIST in plain PyTorch: where the port begins.

A small convolutional network learns to tell ten kinds of clothes apart. Nothing here knows of an
accelerator; `exercise.py` is this script on its way to one.
"""

import argparse

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
    """28 by 28 pixels in, the logarithms of ten probabilities out."""

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

    def forward(self, images):
        return self.classes(self.features(images))


model = Classifier()
measure = nn.NLLLoss()
train_loader = torch.utils.data.DataLoader(train_set, batch_size=16, shuffle=True, drop_last=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)

model.train()
for epoch in range(args.epochs):
    total = 0.0
    for images, labels in train_loader:
        optimizer.zero_grad()
        loss = measure(model(images), labels)
        loss.backward()
        optimizer.step()
        total += loss.item()
    print(f"epoch {epoch + 1}: loss {total / len(train_loader):.4f}", flush=True)

torch.save(model.state_dict(), "classifier.pth")

model.eval()
test_loader = torch.utils.data.DataLoader(test_set, batch_size=40, drop_last=True)

right = seen = 0
with torch.no_grad():
    for images, labels in test_loader:
        right += int((model(images).argmax(dim=1) == labels).sum())
        seen += len(labels)

print(f"accuracy: {100 * right / seen:.2f} % of {seen} images")
