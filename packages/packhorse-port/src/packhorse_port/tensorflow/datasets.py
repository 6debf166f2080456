"""`keras.datasets.mnist` and `fashion_mnist` from files that are already here.

Keras downloads them. Where `packhorse port` finds the idx files of these collections (see
`torchvision.files`: PACKHORSE_DATASETS, Debian's and npm's packages), or is told to take
scikit-learn's digits, those are given and it is said; otherwise Keras does what it does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from packhorse_port.notices import say_once
from packhorse_port.torchvision import files

COLLECTIONS = {"mnist": "MNIST", "fashion_mnist": "FashionMNIST"}


def install(packages: Iterable[Any]) -> None:
    """Look for files first, by whichever of Keras's packages a script goes."""
    for name, collection in COLLECTIONS.items():
        modules = [getattr(package.datasets, name) for package in packages]
        found = local(collection, name, modules[0].load_data)
        for module in modules:
            module.load_data = found


def local(collection: str, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """`load_data` of a collection, with local files before the network."""

    def load_data(*args: Any, **kwargs: Any) -> Any:
        if os.environ.get(files.PLACES) == files.DIGITS:
            say_once(name, f"{collection} is scikit-learn's digits, as {files.PLACES} asks")
            return files.digits(True), files.digits(False)
        root = Path(os.environ.get("KERAS_HOME") or Path.home() / ".keras") / "datasets"
        found = [files.find_idx(root, collection, train) for train in (True, False)]
        if (root / f"{name}.npz").exists() or not all(found):
            return original(*args, **kwargs)
        say_once(name, f"{collection} is read from {found[0][0].parent}")  # pyright: ignore[reportOptionalSubscript]
        return tuple(tuple(map(files.read_idx, pair)) for pair in found if pair)

    return load_data
