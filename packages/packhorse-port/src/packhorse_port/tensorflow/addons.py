"""The layers of `ipu_tensorflow_addons`: Keras's own where they are the same, else ours.

LSTM, GRU and the embedding are Keras's with the SDK's defaults; arguments of the IPU's compiler are
logged. Group normalization takes strided groups of channels by default, which Keras's has not.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from packhorse_port.notices import log_once
from packhorse_port.tensorflow import operations, pipelining

COMPILER = ("partials_dtype", "options", "options_bwd", "serialization_factor", "implementation")


def _keras_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """Keras's arguments; those of the IPU's compiler are logged."""
    for name in COMPILER:
        if arguments.pop(name, None) is not None:
            log_once(f"layer.{name}", f"{name} has no effect: it is for the IPU's compiler")
    return arguments


class Embedding(keras.layers.Embedding):
    """Keras's embedding."""

    def __init__(self, input_dim: int, output_dim: int, **kwargs: Any) -> None:
        kwargs.pop("input_length", None)
        super().__init__(input_dim, output_dim, **_keras_arguments(kwargs))

    def call(self, inputs: Any, inputs_are_sorted: bool = False, training: Any = None) -> Any:
        return super().call(inputs)


class Dropout(keras.layers.Layer):
    """Dropout; with a pair of integers as seed it drops the same elements in each call."""

    def __init__(
        self, rate: float, noise_shape: Any = None, seed: Any = None, **kwargs: Any
    ) -> None:
        kwargs.pop("ref", None)
        super().__init__(**kwargs)
        self.rate = rate
        self.noise_shape = noise_shape
        self.seed = seed
        self.generator = keras.random.SeedGenerator() if seed is None else None

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        if not training or not self.rate:
            return tf.identity(inputs)
        if self.generator is not None:
            return keras.random.dropout(inputs, self.rate, self.noise_shape, self.generator)
        return operations.dropout(inputs, self.rate, self.noise_shape, self.seed)

    def compute_output_shape(self, input_shape: Any) -> Any:
        return input_shape

    def get_config(self) -> dict[str, Any]:
        own = {"rate": self.rate, "noise_shape": self.noise_shape, "seed": self.seed}
        return {**super().get_config(), **own}


class GroupNormalization(keras.layers.Layer):
    """Group normalization; strided groups unless `strided_channel_grouping` is False."""

    def __init__(
        self,
        groups: int = 2,
        channels_axis: int = -1,
        center: bool = True,
        scale: bool = True,
        epsilon: float = 1e-3,
        beta_initializer: Any = None,
        gamma_initializer: Any = None,
        strided_channel_grouping: bool = True,
        trainable: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(trainable=trainable, **kwargs)
        self.groups = groups
        self.channels_axis = channels_axis
        self.center = center
        self.scale = scale
        self.epsilon = epsilon
        self.beta_initializer = keras.initializers.get(beta_initializer or "zeros")
        self.gamma_initializer = keras.initializers.get(gamma_initializer or "ones")
        self.strided_channel_grouping = strided_channel_grouping

    def build(self, input_shape: Any) -> None:
        channels = input_shape[self.channels_axis]
        self.shape = [1] * len(input_shape)
        self.shape[self.channels_axis] = channels
        if self.scale:
            self.gamma = self.add_weight((channels,), self.gamma_initializer, name="gamma")
        if self.center:
            self.beta = self.add_weight((channels,), self.beta_initializer, name="beta")

    def call(self, inputs: Any, training: Any = None) -> Any:
        groups = self.groups or inputs.shape[self.channels_axis]
        outputs = operations.normalize_groups(
            inputs, groups, self.channels_axis, self.epsilon, self.strided_channel_grouping
        )
        if self.scale:
            outputs *= tf.reshape(self.gamma, self.shape)
        if self.center:
            outputs += tf.reshape(self.beta, self.shape)
        return outputs

    def get_config(self) -> dict[str, Any]:
        names = (
            "groups",
            "channels_axis",
            "center",
            "scale",
            "epsilon",
            "strided_channel_grouping",
        )
        return {**super().get_config(), **{name: getattr(self, name) for name in names}}


class InstanceNormalization(GroupNormalization):
    """A group for each channel."""

    def __init__(self, channels_axis: int = -1, **kwargs: Any) -> None:
        kwargs.pop("groups", None)
        super().__init__(0, channels_axis, **kwargs)


class LayerNormalization(keras.layers.LayerNormalization):
    """Keras's layer normalization."""


class LSTM(keras.layers.LSTM):
    """Keras's LSTM."""

    def __init__(self, units: int, *args: Any, **kwargs: Any) -> None:
        self.time_major = kwargs.pop("time_major", False)
        kwargs.pop("dropout_seed", None)
        super().__init__(units, *args, **_keras_arguments(kwargs))

    def call(
        self, sequences: Any, initial_state: Any = None, mask: Any = None, training: Any = False
    ) -> Any:
        return _recurrent(self, super().call, sequences, initial_state, mask, training)


class GRU(keras.layers.GRU):
    """Keras's GRU."""

    def __init__(self, units: int, *args: Any, **kwargs: Any) -> None:
        self.time_major = kwargs.pop("time_major", False)
        kwargs.pop("dropout_seed", None)
        super().__init__(units, *args, **_keras_arguments(kwargs))

    def call(
        self, sequences: Any, initial_state: Any = None, mask: Any = None, training: Any = False
    ) -> Any:
        return _recurrent(self, super().call, sequences, initial_state, mask, training)


def _recurrent(
    layer: Any, call: Any, sequences: Any, initial_state: Any, mask: Any, training: Any
) -> Any:
    """Keras's call, with time first if the layer is time-major."""
    if not layer.time_major:
        return call(sequences, initial_state=initial_state, mask=mask, training=training)
    turned = tf.transpose(sequences, [1, 0, 2])
    outputs = call(turned, initial_state=initial_state, mask=mask, training=training)
    if not layer.return_sequences:
        return outputs
    if layer.return_state:
        return [tf.transpose(outputs[0], [1, 0, 2]), *outputs[1:]]
    return tf.transpose(outputs, [1, 0, 2])


class SerialDense(keras.layers.Dense):
    """Keras's dense layer: its product is not split."""

    def __init__(
        self,
        units: int,
        serialization_factor: int,
        serialization_dimension: str,
        activation: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(units, activation, **kwargs)
        self.serialization_factor = serialization_factor
        self.serialization_dimension = serialization_dimension

    def get_config(self) -> dict[str, Any]:
        names = ("serialization_factor", "serialization_dimension")
        return {**super().get_config(), **{name: getattr(self, name) for name in names}}


class RecomputationCheckpoint(keras.layers.Layer):
    """Returns its input: nothing is recomputed."""

    def call(self, inputs: Any, **_: Any) -> Any:
        return pipelining.recomputation_checkpoint(inputs)


class AssumeEqualAcrossReplicas(keras.layers.Layer):
    """Returns its input."""

    def __init__(self, inplace: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.inplace = inplace

    def call(self, inputs: Any, **_: Any) -> Any:
        return operations.assume_equal_across_replicas(inputs, self.inplace)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "inplace": self.inplace}


LAYERS = {
    "Embedding": Embedding,
    "Dropout": Dropout,
    "GroupNormalization": GroupNormalization,
    "GroupNorm": GroupNormalization,
    "InstanceNormalization": InstanceNormalization,
    "InstanceNorm": InstanceNormalization,
    "LayerNormalization": LayerNormalization,
    "LayerNorm": LayerNormalization,
    "LSTM": LSTM,
    "PopnnLSTM": LSTM,
    "GRU": GRU,
    "PopnnGRU": GRU,
    "SerialDense": SerialDense,
    "RecomputationCheckpoint": RecomputationCheckpoint,
    "AssumeEqualAcrossReplicas": AssumeEqualAcrossReplicas,
}
