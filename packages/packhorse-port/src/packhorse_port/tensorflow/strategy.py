"""`IPUStrategy`: TensorFlow's strategy for one device, with the attributes of an IPU system.

It is `tf.distribute.OneDeviceStrategy` on the first GPU, or on the CPU if there is none. So a model
that is created and run in its scope computes the same as without it, to the bit. Replicas are not
replicas of `tf.distribute` (on an IPU they are not either): a step takes one batch per replica and
adds their gradients, see `training`.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from packhorse_port.tensorflow import config


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


def strategy_of(model: Any) -> IPUStrategy | None:
    """The `IPUStrategy` that a model was created under, or None."""
    strategy = model.distribute_strategy
    if isinstance(strategy, IPUStrategy) and strategy.enable_keras_extensions:
        return strategy
    return None
