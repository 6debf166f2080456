"""Keras 3 as scripts for Keras 2 expect it: old spellings, and data sets from local files.

TensorFlow 2.6, which the SDK was based on, had Keras 2; TensorFlow now has Keras 3. What differs in
scripts of that time: `lr` and `decay` of optimizers, `workers` and similar arguments,
`fit_generator`, `Input(3)`, file names without an extension. Each wrapper changes the arguments,
logs that once, and calls Keras's own function; what Keras 3 still understands is left to it.

`keras.datasets.mnist` and `fashion_mnist` are downloaded by Keras. If their idx files are found
locally (see `torchvision.files`: PACKHORSE_DATASETS, packages of Debian and npm), or scikit-learn's
digits are to replace them, those are used and that is logged.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import keras

from packhorse_port.notices import log_once
from packhorse_port.torchvision import files

Method = Callable[..., Any]
QUEUE_ARGUMENTS = ("max_queue_size", "workers", "use_multiprocessing")
OLD_DATASETS = ("mnist", "fashion_mnist", "cifar10", "cifar100", "imdb", "reuters")
MODEL_EXTENSION = ".keras"
WEIGHTS_EXTENSION = ".weights.h5"
MODEL_EXTENSIONS = (".keras", ".h5", ".hdf5")


def install(packages: Iterable[Any]) -> None:
    """Wrap what no longer accepts the old spellings, in all packages that Keras has."""
    model = keras.Model
    optimizer = keras.optimizers.Optimizer
    for name in ("fit", "evaluate", "predict"):
        setattr(model, name, without_queue(getattr(model, name)))
        setattr(model, f"{name}_generator", _generator(name))
    optimizer.__init__ = accept_lr(optimizer.__init__)
    optimizer.lr = property(_get_lr, _set_lr)
    layer = keras.layers.InputLayer
    layer.__init__ = accept_int_shape(layer.__init__)
    model.save = add_extension_on_save(model.save, MODEL_EXTENSION)
    model.save_weights = add_extension_on_save(model.save_weights, WEIGHTS_EXTENSION)
    model.load_weights = add_extension_on_load(model.load_weights, WEIGHTS_EXTENSION)
    checkpoint = keras.callbacks.ModelCheckpoint
    checkpoint.__init__ = add_checkpoint_extension(checkpoint.__init__)
    load_model = add_model_extension(keras.saving.load_model)
    modules: list[Any] = [keras.saving, *(package.models for package in packages)]
    for module in modules:
        module.load_model = load_model


def install_old_modules() -> None:
    """`tensorflow.python.keras.datasets`, which TensorFlow no longer has."""
    old = "tensorflow.python.keras.datasets"
    if importlib.util.find_spec(old) is None:
        sys.modules[old] = keras.datasets
        for name in OLD_DATASETS:
            sys.modules[f"{old}.{name}"] = getattr(keras.datasets, name)


def without_queue(original: Method) -> Method:
    """`fit` and similar methods that drop the arguments of threads and queues."""

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        for name in QUEUE_ARGUMENTS:
            if name in kwargs:
                del kwargs[name]
                _log(name, f"{name} has no effect: Keras 3 takes it from a PyDataset")
        return original(self, *args, **kwargs)

    run.__name__ = original.__name__
    return run


def _generator(name: str) -> Method:
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        _log(f"{name}_generator", f"model.{name}_generator is model.{name}")
        return getattr(self, name)(*args, **kwargs)

    return run


def accept_lr(original: Method) -> Method:
    """An optimizer's `__init__` that accepts `lr` and `decay`."""

    def __init__(self: Any, learning_rate: Any = 0.001, *args: Any, **kwargs: Any) -> None:
        if "lr" in kwargs:
            learning_rate = kwargs.pop("lr")
            _log("lr", "lr of an optimizer is learning_rate")
        if decay := kwargs.pop("decay", None):
            learning_rate = keras.optimizers.schedules.InverseTimeDecay(learning_rate, 1, decay)
            _log("decay", f"decay={decay} of an optimizer is a schedule, InverseTimeDecay")
        original(self, learning_rate, *args, **kwargs)

    return __init__


def _get_lr(self: Any) -> Any:
    _log("lr", "lr of an optimizer is learning_rate")
    return self.learning_rate


def _set_lr(self: Any, value: Any) -> None:
    _log("lr", "lr of an optimizer is learning_rate")
    self.learning_rate = value


def accept_int_shape(original: Method) -> Method:
    """An input layer's `__init__` for which `Input(3)` means `Input((3,))`."""

    def __init__(self: Any, shape: Any = None, *args: Any, **kwargs: Any) -> None:
        if isinstance(shape, int):
            _log("Input", f"Input({shape}) is Input(({shape},))")
            shape = (shape,)
        original(self, shape, *args, **kwargs)

    return __init__


def add_extension_on_save(original: Method, extension: str) -> Method:
    """`save` and `save_weights` that add the extension that Keras 3 demands."""

    def save(self: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.pop("save_format", None):
            _log("save_format", "save_format has no effect: the file's ending says it")
        return original(self, _with_extension(filepath, extension), *args, **kwargs)

    return save


def add_extension_on_load(original: Method, extension: str) -> Method:
    """`load_weights` of a file that was saved with an added extension."""

    def load(self: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, _with_extension(filepath, extension), *args, **kwargs)

    return load


def add_checkpoint_extension(original: Method) -> Method:
    """`ModelCheckpoint.__init__` that adds the extension."""

    def __init__(self: Any, filepath: Any, *args: Any, **kwargs: Any) -> None:
        weights_only = kwargs.get("save_weights_only")
        extension = WEIGHTS_EXTENSION if weights_only else MODEL_EXTENSION
        original(self, _with_extension(filepath, extension), *args, **kwargs)

    return __init__


def add_model_extension(original: Method) -> Method:
    """`load_model` of a file that was saved with an added extension."""

    def load_model(filepath: Any, *args: Any, **kwargs: Any) -> Any:
        return original(_with_extension(filepath, MODEL_EXTENSION), *args, **kwargs)

    return load_model


def _with_extension(path: Any, extension: str) -> Any:
    known = MODEL_EXTENSIONS if extension == MODEL_EXTENSION else (extension,)
    if not isinstance(path, str | Path) or str(path).endswith(known):
        return path
    extended = str(path).rstrip("/") + extension
    _log(f"file{extension}", f"{path} is {extended}: Keras 3 tells a format by its ending")
    return extended


def _log(key: str, text: str) -> None:
    log_once(f"Keras 2: {key}", text)


# Data sets

DATASETS = {"mnist": "MNIST", "fashion_mnist": "FashionMNIST"}


def install_local_datasets(packages: Iterable[Any]) -> None:
    """Look for local files first, in all packages that Keras has."""
    for name, dataset in DATASETS.items():
        modules = [getattr(package.datasets, name) for package in packages]
        load_data = local_first(dataset, name, modules[0].load_data)
        for module in modules:
            module.load_data = load_data


def local_first(dataset: str, name: str, original: Method) -> Method:
    """`load_data` that reads local files if there are any, before it downloads."""

    def load_data(*args: Any, **kwargs: Any) -> Any:
        if os.environ.get(files.VARIABLE) == files.DIGITS:
            log_once(name, f"{dataset} is scikit-learn's digits, as {files.VARIABLE} asks")
            return files.digits(True), files.digits(False)
        root = Path(os.environ.get("KERAS_HOME") or Path.home() / ".keras") / "datasets"
        train = files.find_idx(root, dataset, True)
        test = files.find_idx(root, dataset, False)
        if (root / f"{name}.npz").exists() or train is None or test is None:
            return original(*args, **kwargs)
        log_once(name, f"{dataset} is read from {train[0].parent}")
        return tuple(map(files.read_idx, train)), tuple(map(files.read_idx, test))

    return load_data
