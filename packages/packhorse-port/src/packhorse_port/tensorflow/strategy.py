"""`IPUStrategy`: one device of TensorFlow's own, with what a script asks of an IPU system.

It is `tf.distribute.OneDeviceStrategy` on the first GPU, or the CPU where there is none. So a model
made and run in its scope computes what it would compute without it, to the bit. Replicas are not
replicas of `tf.distribute` (nor are they on an IPU, where the strategy too has one): a step takes
one batch for each and adds their gradients, see `training`.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from packhorse_port.tensorflow import config


class IPUStrategy(tf.distribute.OneDeviceStrategy):
    """A strategy for the system that was configured, on the one device there is."""

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
        self.stage: int | None = None  # of the pipeline, where layers are now made and called

    @property
    def ipus(self) -> int:
        """How many IPUs the script has asked for."""
        return config.ipus()

    @property
    def supports_loss_scaling(self) -> bool:
        return True


def strategy_of(model: Any) -> IPUStrategy | None:
    """The IPU's strategy that a model was made under, if it was."""
    strategy = model.distribute_strategy
    ours = isinstance(strategy, IPUStrategy) and strategy.enable_keras_extensions
    return strategy if ours else None
