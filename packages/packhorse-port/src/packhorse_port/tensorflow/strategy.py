"""`IPUStrategy`: TensorFlow's strategy for one device, with the attributes of an IPU system.

It is `tf.distribute.OneDeviceStrategy` on the first GPU, or on the CPU if there is none. So a model
that is created and run in its scope computes the same as without it, to the bit. Replicas are not
replicas of `tf.distribute` (on an IPU they are not either): a step takes one batch per replica and
adds their gradients, see `training`. `run` runs one replica, whatever the number of IPUs.

A script compiles its functions for the IPU with `jit_compile`. XLA on a CPU compiles neither the
iterators nor the queues that such functions use, so there they are functions without XLA.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from packhorse_port.notices import log_once
from packhorse_port.tensorflow import config

JIT = ("jit_compile", "experimental_compile")


class IPUStrategy(tf.distribute.OneDeviceStrategy):
    """A strategy for the configured system, on the one device there is."""

    def __init__(
        self,
        ipu_device: str = "/device:IPU:0",
        cpu_device: str = "/device:CPU:0",
        enable_dataset_iterators: bool = True,
        enable_keras_extensions: bool = True,
    ) -> None:
        gpus = tf.config.list_physical_devices("GPU")
        super().__init__("/device:GPU:0" if gpus else cpu_device)
        self.enable_keras_extensions = enable_keras_extensions
        self.stage: int | None = None  # the pipeline stage whose scope is open

    @property
    def ipus(self) -> int:
        """How many IPUs the script has configured."""
        return config.ipus()

    @property
    def supports_loss_scaling(self) -> bool:
        return True

    def run(self, fn: Any, args: Any = (), kwargs: Any = None, options: Any = None) -> Any:
        """Call `fn` on the device, once: of a replicated system one replica is run."""
        if self.ipus > 1 and not _is_called_by_library(2):
            log_once(
                "replicas.run",
                f"strategy.run runs one replica: {self.ipus} IPUs may run several, each with its"
                " own batches; sums over replicas are those of one",
            )
        return super().run(fn, args, kwargs, options)


def strategy_of(model: Any) -> IPUStrategy | None:
    """The `IPUStrategy` that a model was created under, or None."""
    strategy = model.distribute_strategy
    if isinstance(strategy, IPUStrategy) and strategy.enable_keras_extensions:
        return strategy
    return None


def _is_called_by_library(depth: int) -> bool:
    """Whether Keras or TensorFlow called the function so many frames out, not the script."""
    module = sys._getframe(depth).f_globals.get("__name__", "")
    return module.partition(".")[0] in ("keras", "tensorflow")


def without_xla(original: Callable[..., Any]) -> Callable[..., Any]:
    """`tf.function` that compiles nothing with XLA, unless Keras or TensorFlow calls it."""

    @functools.wraps(original)
    def function(func: Any = None, *args: Any, **kwargs: Any) -> Any:
        by_library = _is_called_by_library(2)
        for name in JIT:
            if not by_library and kwargs.pop(name, None):
                text = f"{name}=True compiles for an IPU; here it is a tf.function without XLA"
                log_once(f"tf.function.{name}", text)
        return original(func, *args, **kwargs)

    return function
