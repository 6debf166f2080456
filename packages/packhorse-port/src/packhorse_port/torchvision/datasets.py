"""torchvision's datasets that tutorials use: MNIST, FashionMNIST, CIFAR10, and FakeData.

The same items as torchvision's, in the same order: an image (Pillow's, or an array of bytes if
Pillow is not installed) and its class. `files` finds and reads the files. CIFAR-10 is read from its
binary version: the other one is a pickle, which can run code.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch.utils.data import Dataset

from packhorse.errors import InputError
from packhorse_port.notices import log_once
from packhorse_port.torchvision import files, missing_name
from packhorse_port.torchvision.transforms.functional import from_array, to_pil_image

Transform = Callable[[Any], Any] | None
Resources = Sequence[tuple[str, str]]  # (file name or URL, md5); scripts may set their own URLs


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    raise missing_name(f"datasets.{name}")


class IdxDataset(Dataset):
    """Abstract: a data set in four idx files, which a subclass names."""

    mirrors: ClassVar[Sequence[str]]
    resources: ClassVar[Resources]
    classes: ClassVar[Sequence[str]]

    def __init__(
        self,
        root: str | os.PathLike[str],
        train: bool = True,
        transform: Transform = None,
        target_transform: Transform = None,
        download: bool = False,
    ) -> None:
        self.root = os.path.expanduser(root)
        self.train = train
        self.transform = transform
        self.target_transform = target_transform
        images, labels = self._read(download)
        if len(images) != len(labels):
            raise InputError(f"{len(images)} images but {len(labels)} labels of {self.root}")
        self.data = torch.from_numpy(images.copy())
        self.targets = torch.from_numpy(labels.astype(np.int64))

    def _read(self, download: bool) -> tuple[np.ndarray, np.ndarray]:
        name = type(self).__name__
        root = Path(self.root)
        if os.environ.get(files.VARIABLE) == files.DIGITS:
            log_once(name, f"{name} is scikit-learn's digits, as {files.VARIABLE} asks")
            return files.digits(self.train)
        paths = files.find_idx(root, name, self.train)
        if paths is None and download:
            try:
                files.fetch(root / name / "raw", self.resources, self.mirrors)
            except InputError as error:
                raise files.missing_dataset(root, name, str(error)) from error
            paths = files.find_idx(root, name, self.train)
        if paths is None:
            raise files.missing_dataset(root, name)
        return files.read_idx(paths[0]), files.read_idx(paths[1])

    @property
    def raw_folder(self) -> str:
        return os.path.join(self.root, type(self).__name__, "raw")

    @property
    def class_to_idx(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.classes)}

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        image = from_array(self.data[index].numpy())
        return _transformed(image, int(self.targets[index]), self.transform, self.target_transform)


def _transformed(
    image: Any, target: int, transform: Transform, target_transform: Transform
) -> tuple[Any, Any]:
    image = transform(image) if transform else image
    return image, target_transform(target) if target_transform else target


class MNIST(IdxDataset):
    """Handwritten digits: 60,000 for training, 10,000 for testing, 28 by 28."""

    mirrors = (
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "http://yann.lecun.com/exdb/mnist/",
    )
    resources = (
        ("train-images-idx3-ubyte.gz", "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
        ("train-labels-idx1-ubyte.gz", "d53e105ee54ea40749a09fcbcd1e9432"),
        ("t10k-images-idx3-ubyte.gz", "9fb629c4189551a2d022fa330f9573f3"),
        ("t10k-labels-idx1-ubyte.gz", "ec29112dd5afa0611ce80d1b7f02629c"),
    )
    classes = tuple(
        f"{number} - {word}"
        for number, word in enumerate(
            ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
        )
    )


class FashionMNIST(IdxDataset):
    """Clothes, in MNIST's shape."""

    mirrors = ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",)
    resources = (
        ("train-images-idx3-ubyte.gz", "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
        ("train-labels-idx1-ubyte.gz", "25c81989df183df01b3e8a0aad5dffbe"),
        ("t10k-images-idx3-ubyte.gz", "bef4ecab320f06d8554ea6380940ec79"),
        ("t10k-labels-idx1-ubyte.gz", "bb300cfdad3c16e7a12a480ee83cd310"),
    )
    classes = (
        "T-shirt/top",
        "Trouser",
        "Pullover",
        "Dress",
        "Coat",
        "Sandal",
        "Shirt",
        "Sneaker",
        "Bag",
        "Ankle boot",
    )


class CIFAR10(Dataset):
    """Small color photographs of ten classes: 50,000 and 10,000, 32 by 32."""

    classes = (
        "airplane",
        "automobile",
        "bird",
        "cat",
        "deer",
        "dog",
        "frog",
        "horse",
        "ship",
        "truck",
    )

    def __init__(
        self,
        root: str | os.PathLike[str],
        train: bool = True,
        transform: Transform = None,
        target_transform: Transform = None,
        download: bool = False,
    ) -> None:
        self.root = os.path.expanduser(root)
        self.train = train
        self.transform = transform
        self.target_transform = target_transform
        names = [f"data_batch_{n}.bin" for n in range(1, 6)] if train else ["test_batch.bin"]
        records = np.concatenate([self._records(name) for name in names])
        self.targets = records[:, 0].astype(int).tolist()
        self.data = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)  # [N, H, W, C]

    def _records(self, name: str) -> np.ndarray:
        for folder in files.folders(Path(self.root), "cifar-10-batches-bin"):
            if (path := folder / name).exists():
                return np.fromfile(path, np.uint8).reshape(-1, 1 + 3 * 32 * 32)
        raise InputError(
            f"CIFAR10 was not found: {name} of its binary version (cifar-10-binary.tar.gz) is"
            f" looked for in {Path(self.root) / 'cifar-10-batches-bin'} and in {files.VARIABLE}"
        )

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        image = from_array(np.ascontiguousarray(self.data[index]))
        return _transformed(image, self.targets[index], self.transform, self.target_transform)


class FakeData(Dataset):
    """Random images and classes, the same for the same index."""

    def __init__(
        self,
        size: int = 1000,
        image_size: tuple[int, ...] = (3, 224, 224),
        num_classes: int = 10,
        transform: Transform = None,
        target_transform: Transform = None,
        random_offset: int = 0,
    ) -> None:
        self.size = size
        self.image_size = image_size
        self.num_classes = num_classes
        self.transform = transform
        self.target_transform = target_transform
        self.random_offset = random_offset

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        if not 0 <= index < self.size:
            raise IndexError(f"item {index} of {self.size}")
        generator = torch.Generator().manual_seed(index + self.random_offset)
        image = torch.randn(*self.image_size, generator=generator)
        target = int(torch.randint(0, self.num_classes, size=(1,), generator=generator))
        return _transformed(to_pil_image(image), target, self.transform, self.target_transform)
