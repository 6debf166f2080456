"""`popdist.tensorflow` and `ipu.distributed` in the one process that there is.

PopDist runs several processes of a script, each with its own replicas, and adds what they compute.
Scripts for TensorFlow are one instance here: sums, broadcasts and gathers over instances return
what they are given, and a script that was started as one of several is refused.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from packhorse.errors import InputError
from packhorse_port import popdist
from packhorse_port.notices import line_prefix
from packhorse_port.tensorflow.strategy import IPUStrategy


class PopDistStrategy(IPUStrategy):
    """`IPUStrategy` for several processes, of which there is one."""

    def __init__(
        self,
        ipu_device: str = "/device:IPU:0",
        add_ipu_cross_replica_reductions: bool = True,
        enable_dataset_iterators: bool = True,
        enable_keras_extensions: bool = True,
    ) -> None:
        _check_alone()
        super().__init__(
            ipu_device,
            enable_dataset_iterators=enable_dataset_iterators,
            enable_keras_extensions=enable_keras_extensions,
        )

    def update_ipu_config(self, config: Any) -> Any:
        """The configuration as it is: there is one process."""
        return config


def allgather(value: Any, tensor_name: str | None = None) -> Any:
    """[1, …]: the values of all instances."""
    return tf.expand_dims(value, 0)


def allreduce(value: Any, reduce_op: Any, tensor_name: str | None = None) -> Any:
    """The sum or mean over all instances."""
    return tf.identity(value)


def broadcast(value: Any, root_rank: int = 0, tensor_name: str | None = None) -> Any:
    """The value of instance 0."""
    return tf.identity(value)


def set_ipu_config(config: Any, ipus_per_replica: int = 1, configure_device: bool = True) -> None:
    """One replica on this many IPUs; `configure_device` uses it for the process."""
    _check_alone()
    config.auto_select_ipus = ipus_per_replica
    if configure_device:
        config.configure_ipu_system()


def _check_alone() -> None:
    if popdist.getNumInstances() > 1:
        raise InputError(
            f"{line_prefix()}several processes of a script for TensorFlow would not add their "
            "gradients here; start it alone, with all replicas in one process"
        )


PROVIDES = {
    "ipu.distributed": (allgather, allreduce, broadcast, PopDistStrategy),
    "ipu.distributed.popdist_strategy": (PopDistStrategy,),
    "popdist.tensorflow": (set_ipu_config,),
}
