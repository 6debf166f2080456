"""Run a script unchanged, on small random data and for a few steps: `run_script.py SCRIPT ARGS …`.

Keras's data sets are replaced by random ones of the same shapes and types, because the internet may
not be there; `fit` trains one epoch of at most one execution. All else is the script's.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import packhorse_port.tensorflow as ported

TRAIN = 3200  # batches of 16 to 128, and hundreds
TEST = 3200
SEED = 0


def images(shape: tuple[int, ...], classes: int, column: bool) -> Any:
    """Training and test images with labels, as `load_data` returns them."""
    rng = np.random.default_rng(SEED)

    def part(count: int) -> tuple[np.ndarray, np.ndarray]:
        labels = rng.integers(0, classes, (count, 1) if column else count, dtype=np.uint8)
        return rng.integers(0, 256, (count, *shape), dtype=np.uint8), labels

    return part(TRAIN), part(TEST)


def reviews(num_words: int = 20000, **_: Any) -> Any:
    """Sequences of words and their labels."""
    rng = np.random.default_rng(SEED)

    def part(count: int) -> tuple[np.ndarray, np.ndarray]:
        texts = np.empty(count, dtype=object)
        for index in range(count):
            texts[index] = rng.integers(1, num_words, rng.integers(20, 120)).tolist()
        return texts, rng.integers(0, 2, count)

    return part(TRAIN), part(TEST)


def shortened(fit: Callable[..., Any]) -> Callable[..., Any]:
    """`Model.fit` for one epoch of one execution."""

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs["epochs"] = 1 + kwargs.get("initial_epoch", 0)
        if kwargs.get("steps_per_epoch"):
            kwargs["steps_per_epoch"] = min(kwargs["steps_per_epoch"], self.steps_per_execution)
        return fit(self, *args[:3], **kwargs)

    return run


def main(script: str, *arguments: str) -> None:
    ported.install()
    import keras
    import tensorflow as tf

    for package in (keras, tf.keras):
        data = package.datasets
        data.mnist.load_data = lambda *_, **__: images((28, 28), 10, False)
        data.fashion_mnist.load_data = lambda *_, **__: images((28, 28), 10, False)
        data.cifar10.load_data = lambda *_, **__: images((32, 32, 3), 10, True)
        data.imdb.load_data = reviews
    keras.Model.fit = shortened(keras.Model.fit)
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
