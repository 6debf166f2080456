"""The spellings of Keras 2 that old tutorials have, translated to Keras 3's and said once each.

TensorFlow 2.6, which the SDK was made of, had Keras 2; TensorFlow now brings Keras 3. What differs
in scripts of that time: `lr` and `decay` of optimizers, `workers` and its like, `fit_generator`,
`Input(3)`, names of files without an ending. Each wrapper changes the arguments and calls Keras's
own; what Keras 3 still understands is left to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import keras

from packhorse_port.notices import say_once

Method = Callable[..., Any]
QUEUE = ("max_queue_size", "workers", "use_multiprocessing")
MODEL, WEIGHTS = ".keras", ".weights.h5"
KNOWN = (".keras", ".h5", ".hdf5")


def install(packages: Iterable[Any]) -> None:
    """Exchange what of Keras knows the old spellings no more; Keras has several packages."""
    model, optimizer = keras.Model, keras.optimizers.Optimizer
    for name in ("fit", "evaluate", "predict"):
        setattr(model, name, without_queue(getattr(model, name)))
        setattr(model, f"{name}_generator", _generator(name))
    optimizer.__init__ = learning_rate(optimizer.__init__)
    optimizer.lr = property(_get_rate, _set_rate)
    layer = keras.layers.InputLayer
    layer.__init__ = shape(layer.__init__)
    model.save = to_file(model.save, MODEL)
    model.save_weights = to_file(model.save_weights, WEIGHTS)
    model.load_weights = from_file(model.load_weights, WEIGHTS)
    checkpoint = keras.callbacks.ModelCheckpoint
    checkpoint.__init__ = checkpoints(checkpoint.__init__)
    loading = load_model(keras.saving.load_model)
    rooms: list[Any] = [keras.saving, *(package.models for package in packages)]
    for room in rooms:
        room.load_model = loading


def without_queue(original: Method) -> Method:
    """`fit` and its like without the arguments about threads and queues."""

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        for name in QUEUE:
            if name in kwargs:
                del kwargs[name]
                _say(name, f"{name} has no effect: Keras 3 takes it from a PyDataset")
        return original(self, *args, **kwargs)

    run.__name__ = original.__name__
    return run


def _generator(name: str) -> Method:
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        _say(f"{name}_generator", f"model.{name}_generator is model.{name}")
        return getattr(self, name)(*args, **kwargs)

    return run


def learning_rate(original: Method) -> Method:
    """An optimizer's `__init__` that knows `lr` and `decay`."""

    def __init__(self: Any, learning_rate: Any = 0.001, *args: Any, **kwargs: Any) -> None:
        if "lr" in kwargs:
            learning_rate = kwargs.pop("lr")
            _say("lr", "lr of an optimizer is learning_rate")
        if decay := kwargs.pop("decay", None):
            learning_rate = keras.optimizers.schedules.InverseTimeDecay(learning_rate, 1, decay)
            _say("decay", f"decay={decay} of an optimizer is a schedule, InverseTimeDecay")
        original(self, learning_rate, *args, **kwargs)

    return __init__


def _get_rate(self: Any) -> Any:
    _say("lr", "lr of an optimizer is learning_rate")
    return self.learning_rate


def _set_rate(self: Any, value: Any) -> None:
    _say("lr", "lr of an optimizer is learning_rate")
    self.learning_rate = value


def shape(original: Method) -> Method:
    """`Input(3)`, which is `Input((3,))`."""

    def __init__(self: Any, shape: Any = None, *args: Any, **kwargs: Any) -> None:
        if isinstance(shape, int):
            _say("Input", f"Input({shape}) is Input(({shape},))")
            shape = (shape,)
        original(self, shape, *args, **kwargs)

    return __init__


def to_file(original: Method, ending: str) -> Method:
    """`save` and `save_weights` with a name that Keras 3 takes."""

    def save(self: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.pop("save_format", None):
            _say("save_format", "save_format has no effect: the file's ending says it")
        return original(self, _ended(filepath, ending), *args, **kwargs)

    return save


def from_file(original: Method, ending: str) -> Method:
    """`load_weights` of what was saved so."""

    def load(self: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, _ended(filepath, ending), *args, **kwargs)

    return load


def checkpoints(original: Method) -> Method:
    """`ModelCheckpoint`, likewise."""

    def __init__(self: Any, filepath: Any, *args: Any, **kwargs: Any) -> None:
        ending = WEIGHTS if kwargs.get("save_weights_only") else MODEL
        original(self, _ended(filepath, ending), *args, **kwargs)

    return __init__


def load_model(original: Method) -> Method:
    """`load_model` of what was saved so."""

    def load_model(filepath: Any, *args: Any, **kwargs: Any) -> Any:
        return original(_ended(filepath, MODEL), *args, **kwargs)

    return load_model


def _ended(path: Any, ending: str) -> Any:
    known = KNOWN if ending == MODEL else (ending,)
    if not isinstance(path, str | Path) or str(path).endswith(known):
        return path
    ended = str(path).rstrip("/") + ending
    _say(f"file{ending}", f"{path} is {ended}: Keras 3 tells a format by its ending")
    return ended


def _say(key: str, text: str) -> None:
    say_once(f"Keras 2: {key}", text)
