"""The SDK's operations (`ipu.ops`) by TensorFlow's own: the same results, without their layout.

    ipu.nn_ops.gelu(x)                                  # tf.nn.gelu(x, approximate=True)
    ipu.math_ops.serialized_matmul(a, b, 4, "a_columns")        # tf.matmul(a, b)

What a serialized product, a recomputation or an outlined function saves is an IPU's memory. Outside
of Keras's `fit` one replica runs, so sums, means and gathers over replicas return their input.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from packhorse_port.notices import input_error, log_once

Function = Callable[..., Any]


# nn_ops


def gelu(x: Any, approximate: bool = True, name: str | None = None) -> Any:
    """GELU, by tanh unless `approximate` is False."""
    return tf.nn.gelu(x, approximate=approximate, name=name)


def hard_sigmoid(x: Any, name: str | None = None) -> Any:
    """A line from 0 to 1 with the slope 0.2, as Keras 2 and the IPU have it; Keras 3 has 1/6."""
    return tf.clip_by_value(0.2 * tf.convert_to_tensor(x) + 0.5, 0.0, 1.0, name=name)


def swish(x: Any, name: str | None = None) -> Any:
    """x times its sigmoid."""
    x = tf.convert_to_tensor(x, name=name)
    return x * tf.sigmoid(x)


def softmax(x: Any, stable: bool = False, name: str | None = None) -> Any:
    """A softmax over the last axis; it is always the stable one."""
    return tf.nn.softmax(x, name=name)


def multi_conv(func: Function | None = None, options: Any = None) -> Any:
    """Decorate a function with several convolutions, which run one after the other."""
    return func if func is not None else lambda decorated: decorated


def ctc_loss_v2(
    labels: Any,
    logits: Any,
    label_length: Any,
    logit_length: Any,
    blank_index: Any,
    out_dtype: Any = None,
    name: str | None = None,
) -> Any:
    """The CTC loss of time-major logits."""
    loss = tf.nn.ctc_loss(
        tf.cast(labels, tf.int32),
        tf.cast(logits, tf.float32),
        tf.cast(label_length, tf.int32),
        tf.cast(logit_length, tf.int32),
        logits_time_major=True,
        blank_index=int(blank_index),
        name=name,
    )
    return tf.cast(loss, out_dtype or logits.dtype)


def ctc_loss_with_log_probs(
    labels: Any,
    data: Any,
    label_length: Any,
    data_length: Any,
    blank_index: Any,
    out_dtype: Any = None,
    name: str | None = None,
) -> Any:
    """The CTC loss of time-major log probabilities, which a softmax returns unchanged."""
    return ctc_loss_v2(labels, data, label_length, data_length, blank_index, out_dtype, name)


# math_ops


def serialized_matmul(
    a: Any,
    b: Any,
    serialization_factor: int,
    serialization_dimension: str,
    transpose_a: bool = False,
    transpose_b: bool = False,
    name: str | None = None,
) -> Any:
    """A matrix product, not split."""
    dimensions = ("a_columns", "a_rows_b_columns", "b_rows")
    if serialization_dimension not in dimensions:
        raise input_error(
            f"serialization_dimension is one of {', '.join(dimensions)},"
            f" not {serialization_dimension!r}"
        )
    return tf.matmul(a, b, transpose_a=transpose_a, transpose_b=transpose_b, name=name)


def segment_sum(data: Any, segment_ids: Any, num_segments: Any, name: str | None = None) -> Any:
    """Sums of the rows with the same id."""
    return tf.math.unsorted_segment_sum(data, segment_ids, num_segments, name=name)


# embedding_ops


def embedding_lookup(
    params: Any,
    ids: Any,
    serialization_factor: int = 1,
    indices_are_sorted: bool = False,
    name: str | None = None,
) -> Any:
    """Rows of a table; as on an IPU, the gradient is a whole table."""
    return tf.gather(tf.convert_to_tensor(params), ids, name=name)


# cross_replica_ops, replication_ops and what gathers over replicas


def cross_replica_sum(
    x: Any, replica_group_size: int | None = None, name: str | None = None
) -> Any:
    """The sum over the replicas, of which there is one."""
    return tf.identity(x, name=name)


def cross_replica_mean(
    x: Any, replica_group_size: int | None = None, name: str | None = None
) -> Any:
    """The mean over the replicas, of which there is one."""
    return tf.identity(x, name=name)


def assume_equal_across_replicas(tensors: Any, inplace: bool = False) -> Any:
    """The tensors themselves."""
    return tensors


def replication_index(name: str | None = None) -> Any:
    """The number of this replica: 0."""
    return tf.constant(0, name=name)


def all_gather(x: Any, replication_factor: int, name: str | None = None) -> Any:
    """[1, …]: the tensors of all replicas."""
    return tf.expand_dims(x, 0, name=name)


def reduce_scatter(
    x: Any, replication_factor: int, op: str = "COLLECTIVE_OP_ADD", name: str | None = None
) -> Any:
    """A replica's share of the sum over all: all of it."""
    return tf.identity(x, name=name)


# functional_ops, internal_ops and control_flow_ops


def outlined_function(
    func: Function | None = None,
    unique_sharding: bool = False,
    keep_input_layouts: bool | None = None,
    name: str | None = None,
) -> Any:
    """Decorate a function, which is then called; outputs become tensors."""

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def call(*args: Any) -> Any:
            outputs = function(*args)
            return tf.nest.map_structure(
                lambda value: None if value is None else tf.convert_to_tensor(value), outputs
            )

        return call

    return decorate if func is None else decorate(func)


def barrier(
    tensors: Any, insert_barrier_for_gradients: bool = False, name: str | None = None
) -> Any:
    """The tensors, none of them before all are computed."""
    flat = tf.nest.flatten(tensors)
    with tf.control_dependencies([tensor for tensor in flat if not tf.executing_eagerly()]):
        return tf.nest.pack_sequence_as(tensors, [tf.identity(tensor) for tensor in flat])


def remap(x: Any, name: str | None = None) -> Any:
    """The tensor itself: there are no tiles."""
    return tf.identity(x, name=name)


def remap_deduce(x: Any, name: str | None = None) -> Any:
    """The tensor itself: there are no tiles."""
    return tf.identity(x, name=name)


def print_tensor(input: Any, name: str = "") -> Any:
    """Print a tensor and return it, and print its gradient."""

    @tf.custom_gradient
    def shown(x: Any) -> Any:
        def gradient(upstream: Any) -> Any:
            with tf.control_dependencies([_print(f"{name}_gradient", upstream)]):
                return tf.identity(upstream)

        with tf.control_dependencies([_print(name, x)]):
            return tf.identity(x), gradient

    return shown(tf.convert_to_tensor(input))


def _print(name: str, tensor: Any) -> Any:
    operation = tf.print(f"{name}:", tensor, summarize=-1)
    return operation if operation is not None else tf.no_op()


# rand_ops


def dropout(
    x: Any,
    rate: float = 0.5,
    noise_shape: Any = None,
    seed: Any = None,
    name: str | None = None,
    **_: Any,
) -> Any:
    """Dropout; `seed` is a pair of integers, and the same pair drops the same elements."""
    if not 0 <= rate < 1:
        raise input_error(f"dropout's rate is at least 0 and below 1, not {rate}")
    if seed is None:
        return tf.nn.dropout(x, rate=rate, noise_shape=noise_shape, name=name)
    return tf.nn.experimental.stateless_dropout(
        x, rate=rate, seed=seed, noise_shape=noise_shape, name=name
    )


# normalization_ops


def normalize_groups(inputs: Any, groups: int, axis: int, epsilon: float, strided: bool) -> Any:
    """Groups of channels with mean 0 and variance 1.

    Strided, a group takes each so manieth channel: 0, 2, 4, … and 1, 3, 5, … of two groups.
    """
    rank = len(inputs.shape)
    axis %= rank
    channels = inputs.shape[axis]
    if axis not in (1, rank - 1) or channels % groups:
        raise input_error(
            f"{groups} groups of the {channels} channels of axis {axis}: the axis is 1 or the"
            " last, and the groups divide the channels"
        )
    # [batch, …, channels] → [batch, positions, members, groups]
    moved = tf.transpose(inputs, [n for n in range(rank) if n != axis] + [axis])
    split = [channels // groups, groups] if strided else [groups, channels // groups]
    grouped = tf.reshape(moved, [tf.shape(moved)[0], -1, *split])
    over = [1, 2] if strided else [1, 3]
    mean, variance = tf.nn.moments(grouped, over, keepdims=True)
    normal = tf.reshape((grouped - mean) * tf.math.rsqrt(variance + epsilon), tf.shape(moved))
    order = list(range(rank - 1))
    order.insert(axis, rank - 1)
    outputs = tf.transpose(normal, order)
    outputs.set_shape(inputs.shape)
    return outputs


def group_norm(
    inputs: Any,
    groups: int = 2,
    channels_axis: int = -1,
    center: bool = True,
    scale: bool = True,
    epsilon: float = 1.53e-5,
    param_initializers: dict[str, Any] | None = None,
    reuse: Any = None,
    variables_collections: Any = None,
    training: bool = True,
    trainable: bool = True,
    scope: Any = None,
    strided_channel_grouping: bool = True,
    norm_type: str = "GroupNorm",
) -> Any:
    """Group normalization with variables `beta` and `gamma` of the variable scope."""
    inputs = tf.convert_to_tensor(inputs)
    outputs = normalize_groups(inputs, groups, channels_axis, epsilon, strided_channel_grouping)
    shape = [1] * len(inputs.shape)
    shape[channels_axis] = inputs.shape[channels_axis]
    initializers = {
        "gamma": tf.compat.v1.ones_initializer(),
        "beta": tf.compat.v1.zeros_initializer(),
        **(param_initializers or {}),
    }

    def parameter(name: str) -> Any:
        variable = tf.compat.v1.get_variable(
            name,
            [inputs.shape[channels_axis]],
            inputs.dtype,
            initializer=initializers[name],
            trainable=trainable,
        )
        return tf.reshape(variable, shape)

    with tf.compat.v1.variable_scope(scope, norm_type, [inputs], reuse=reuse):
        if scale:
            outputs *= parameter("gamma")
        if center:
            outputs += parameter("beta")
    return outputs


def layer_norm(inputs: Any, channels_axis: int = -1, **kwargs: Any) -> Any:
    """Group normalization with one group."""
    return group_norm(inputs, 1, channels_axis, norm_type="LayerNorm", **kwargs)


def instance_norm(inputs: Any, channels_axis: int = -1, **kwargs: Any) -> Any:
    """Group normalization with a group for each channel."""
    channels = inputs.shape[channels_axis]
    return group_norm(inputs, channels, channels_axis, norm_type="InstanceNorm", **kwargs)


# image_ops


def normalise_image(
    image: Any, channel_offsets: Any, channel_scales: Any, scale: float = 1, name: str | None = None
) -> Any:
    """(image * scale - offsets) * scales, and a fourth channel of zeros."""
    kind = tf.float16 if image.dtype == tf.uint8 else image.dtype
    if kind not in (tf.float16, tf.float32):
        raise input_error(
            f"normalise_image takes uint8, float16 or float32, not {image.dtype.name}"
        )
    offsets = tf.cast(channel_offsets, kind)
    normal = (tf.cast(image, kind) * tf.cast(scale, kind) - offsets) * tf.cast(channel_scales, kind)
    return tf.pad(normal, [[0, 0]] * (len(image.shape) - 1) + [[0, 1]], name=name)


# utils and dataset_benchmark


def move_variable_initialization_to_cpu(graph: Any = None) -> None:
    """Nothing to do: variables are initialized on the CPU, or on the device that holds them."""


def reset_ipu_seed(
    seed: int,
    device: str = "/device:IPU:0",
    cpu_device: str = "cpu",
    experimental_identical_replicas: bool = False,
) -> None:
    """Seed TensorFlow's generators; the numbers are TensorFlow's, not an IPU's."""
    log_once("reset_ipu_seed", "reset_ipu_seed seeds TensorFlow: its numbers are not an IPU's")
    tf.random.set_seed(seed)


def use_synthetic_data_for(synthetic_data_category: Any) -> None:
    """Not done: the script's own data are used."""
    text = "use_synthetic_data_for has no effect: the script's own data are used"
    log_once("use_synthetic_data_for", text)


def dataset_benchmark(
    dataset: Any,
    number_of_epochs: int,
    elements_per_epochs: int,
    print_stats: bool = True,
    apply_debug_options: bool = True,
    do_memcpy: bool = True,
) -> str:
    """Time a loop over a data set; JSON with the figures of each epoch."""
    iterator = iter(dataset)
    epochs = []
    for _ in range(number_of_epochs):
        begin = time.perf_counter()
        size = 0
        for _ in range(elements_per_epochs):
            element = tf.nest.flatten(next(iterator))
            size += sum(tensor.numpy().nbytes for tensor in element)
        seconds = time.perf_counter() - begin
        epochs.append(
            {
                "elements_processed": elements_per_epochs,
                "total_bytes_processed": size,
                "time_elapsed": seconds,
                "elements_per_second": elements_per_epochs / seconds,
                "bandwidth": size / seconds / 1e9,
            }
        )
        if print_stats:
            tf.print(epochs[-1])
    return json.dumps({"epochs": epochs})


PROVIDES = {
    "ipu.ops.nn_ops": (
        gelu,
        hard_sigmoid,
        swish,
        softmax,
        multi_conv,
        ctc_loss_v2,
        ctc_loss_with_log_probs,
    ),
    "ipu.ops.math_ops": (serialized_matmul, segment_sum),
    "ipu.ops.embedding_ops": (embedding_lookup,),
    "ipu.ops.cross_replica_ops": (
        cross_replica_sum,
        cross_replica_mean,
        assume_equal_across_replicas,
    ),
    "ipu.ops.replication_ops": (replication_index,),
    "ipu.ops.all_to_all_op": (all_gather,),
    "ipu.ops.reduce_scatter_op": (reduce_scatter,),
    "ipu.ops.functional_ops": (outlined_function,),
    "ipu.ops.control_flow_ops": (barrier,),
    "ipu.ops.internal_ops": (remap, remap_deduce, print_tensor),
    "ipu.ops.rand_ops": (dropout,),
    "ipu.ops.normalization_ops": (group_norm, layer_norm, instance_norm),
    "ipu.ops.image_ops": (normalise_image,),
    "ipu.utils": (
        move_variable_initialization_to_cpu,
        reset_ipu_seed,
        use_synthetic_data_for,
    ),
    "ipu.dataset_benchmark": (dataset_benchmark,),
}
