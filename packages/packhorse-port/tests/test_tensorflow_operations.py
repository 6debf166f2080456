"""The SDK's operations, layers and optimizers beside their formulas in NumPy and Keras's own."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import packhorse_port.tensorflow as room
from packhorse.errors import InputError
from packhorse_port import notices

RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, 5, 6)).astype(np.float32)


@pytest.fixture(scope="module")
def ipu(tf: ModuleType) -> ModuleType:
    room.install()
    from tensorflow.python import ipu  # pyright: ignore[reportAttributeAccessIssue]

    return ipu


@pytest.fixture(autouse=True)
def _fresh(ipu: ModuleType):
    notices.reset()
    yield
    notices.reset()


def layers() -> Any:
    from ipu_tensorflow_addons.keras import layers  # pyright: ignore[reportMissingImports]

    return layers


def keras() -> Any:
    import keras

    return keras


def near(actual: Any, expected: Any) -> bool:
    return bool(np.abs(np.asarray(actual) - np.asarray(expected)).max() < 1e-6)


def test_functions(ipu: Any, tf: Any) -> None:
    tanh = np.tanh(math.sqrt(2 / math.pi) * (X + 0.044715 * X**3))
    assert near(ipu.nn_ops.gelu(X), 0.5 * X * (1 + tanh))
    erf = np.vectorize(math.erf)(X / math.sqrt(2))
    assert near(ipu.nn_ops.gelu(X, approximate=False), 0.5 * X * (1 + erf))
    assert not near(0.5 * X * (1 + erf), 0.5 * X * (1 + tanh)), "else nothing was shown"
    assert near(ipu.nn_ops.hard_sigmoid(X), np.clip(0.2 * X + 0.5, 0, 1))
    assert near(ipu.nn_ops.swish(X), X / (1 + np.exp(-X)))
    table = RNG.normal(size=(7, 3)).astype(np.float32)
    assert near(ipu.embedding_ops.embedding_lookup(table, [[1, 6]], 3), table[[[1, 6]]])
    product = ipu.math_ops.serialized_matmul(table, table, 7, "a_columns", transpose_b=True)
    assert near(product, table @ table.T)
    with pytest.raises(InputError, match="a_rows_b_columns"):
        ipu.math_ops.serialized_matmul(table, table, 7, "rows")
    assert ipu.cross_replica_ops.cross_replica_sum(tf.constant(3.0)) == 3.0
    assert ipu.outlined_function(lambda a, b: (a + b, 2))(1, 2)[0] == 3
    image = RNG.integers(0, 256, (2, 4, 4, 3), dtype=np.uint8)
    normal = ipu.image_ops.normalise_image(image.astype(np.float32), [1, 2, 3], [2, 2, 2], 0.5)
    assert normal.shape == (2, 4, 4, 4) and near(normal[..., 3], 0)
    assert near(normal[..., :3], (image * 0.5 - [1, 2, 3]) * 2)
    assert (
        ipu.image_ops.normalise_image(tf.constant(image), [1, 2, 3], [2, 2, 2]).dtype == tf.float16
    )


def test_an_embedding_s_gradient_is_a_whole_table(ipu: Any, tf: Any) -> None:
    table = tf.Variable(RNG.normal(size=(7, 3)).astype(np.float32))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(ipu.embedding_ops.embedding_lookup(table, [1, 1, 4]))
    gradient = tf.convert_to_tensor(tape.gradient(loss, table)).numpy()
    assert gradient.sum(1).tolist() == [0, 6, 0, 0, 3, 0, 0]


def groups_by_hand(x: np.ndarray, groups: int, strided: bool, epsilon: float) -> np.ndarray:
    """Normalize each group of channels of each sample: channel c is of group c % groups."""
    outputs = np.empty_like(x)
    channels = np.arange(x.shape[-1])
    group_of = channels % groups if strided else channels // (x.shape[-1] // groups)
    for group in range(groups):
        part = x[..., group_of == group]
        axes = tuple(range(1, x.ndim))
        mean, variance = part.mean(axes, keepdims=True), part.var(axes, keepdims=True)
        outputs[..., group_of == group] = (part - mean) / np.sqrt(variance + epsilon)
    return outputs


@pytest.mark.parametrize("strided", [True, False])
def test_groups_of_channels(ipu: Any, tf: Any, strided: bool) -> None:
    expected = groups_by_hand(X, 3, strided, 1e-3)
    layer = layers().GroupNormalization(3, strided_channel_grouping=strided)
    assert near(layer(X), expected)
    first = layers().GroupNormalization(3, channels_axis=1, strided_channel_grouping=strided)
    assert near(first(X.transpose(0, 2, 1)), expected.transpose(0, 2, 1))
    if not strided:
        assert near(expected, keras().layers.GroupNormalization(3, epsilon=1e-3)(X))
        assert not near(expected, groups_by_hand(X, 3, True, 1e-3))
    instance = layers().InstanceNormalization()(X)
    assert near(instance, groups_by_hand(X, 6, strided, 1e-3))


def test_normalization_with_variables_of_a_scope(ipu: Any, tf: Any) -> None:
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        whole = ipu.normalization_ops.layer_norm(tf.constant(X))
        again = ipu.normalization_ops.group_norm(tf.constant(X), groups=2)
        session.run(v1.global_variables_initializer())
        whole, again = session.run([whole, again])
        names = [variable.name for variable in v1.global_variables()]
    assert near(whole, groups_by_hand(X, 1, True, 1.53e-5))
    assert near(again, groups_by_hand(X, 2, True, 1.53e-5))
    assert names == [
        f"{kind}/{name}:0" for kind in ("LayerNorm", "GroupNorm") for name in ("gamma", "beta")
    ]


def test_layers(ipu: Any, tf: Any) -> None:
    dropout = layers().Dropout(0.5, seed=[1, 2])
    dropped = dropout(X, training=True)
    assert near(dropped, dropout(X, training=True)) and 0 < (dropped.numpy() == 0).mean() < 1
    assert near(dropout(X), X)
    keras().utils.set_random_seed(1)
    expected = keras().layers.LSTM(4, return_sequences=True, return_state=True)(X)
    keras().utils.set_random_seed(1)
    layer = layers().PopnnLSTM(
        4, return_sequences=True, return_state=True, time_major=True, partials_dtype=tf.float16
    )
    outputs, *states = layer(X.transpose(1, 0, 2))
    assert near(outputs, tf.transpose(expected[0], [1, 0, 2]))
    assert all(map(near, states, expected[1:]))
    assert [notice.key for notice in notices.logged()] == ["layer.partials_dtype"]
    assert layers().SerialDense(3, 2, "a_columns")(X).shape == (2, 5, 3)
    assert near(layers().RecomputationCheckpoint()(X), X)
    assert layers().Embedding(9, 4, serialization_factor=3)(np.array([[1, 2]])).shape == (1, 2, 4)


@pytest.mark.parametrize("debiasing", [True, False])
def test_adam_has_its_epsilon_outside_of_the_root(ipu: Any, tf: Any, debiasing: bool) -> None:
    """As in the paper's algorithm 1; Keras's own, with a large epsilon, differs."""
    from ipu_tensorflow_addons.keras import optimizers  # pyright: ignore[reportMissingImports]

    w, m, v = np.ones(4), np.zeros(4), np.zeros(4)
    variable = keras().Variable(np.ones(4, np.float32))
    optimizer = optimizers.AdamIpuOptimizer(
        0.1, epsilon=1.0, debiasing=debiasing, m_dtype=tf.float16
    )
    for step in range(1, 4):
        gradient = RNG.normal(size=4).astype(np.float32)
        optimizer.apply([tf.constant(gradient)], [variable])
        m = 0.9 * m + 0.1 * gradient
        v = 0.999 * v + 0.001 * gradient**2
        corrected = (m / (1 - 0.9**step), v / (1 - 0.999**step)) if debiasing else (m, v)
        w -= 0.1 * corrected[0] / (np.sqrt(corrected[1]) + 1.0)
    assert near(variable.numpy(), w)


def test_lamb_leaves_out_what_is_named(ipu: Any, tf: Any) -> None:
    from ipu_tensorflow_addons.keras import optimizers  # pyright: ignore[reportMissingImports]

    optimizer = optimizers.LAMBIpuOptimizer(
        0.1,
        weight_decay_rate=0.01,
        exclude_from_weight_decay=["bias"],
        exclude_from_layer_adaptation=["bias"],
    )
    variables = [
        keras().Variable(np.full(4, 2.0, np.float32), name=name) for name in ("kernel", "bias")
    ]
    weights = [np.full(4, 2.0), np.full(4, 2.0)]
    moments = [[np.zeros(4), np.zeros(4)] for _ in weights]
    for step in range(1, 4):
        gradient = RNG.normal(size=4).astype(np.float32)
        optimizer.apply([tf.constant(gradient)] * 2, variables)
        for index, w in enumerate(weights):
            m, v = moments[index]
            m[:] = 0.9 * m + 0.1 * gradient
            v[:] = 0.999 * v + 0.001 * gradient**2
            update = m / (1 - 0.9**step) / (np.sqrt(v / (1 - 0.999**step)) + 1e-6)
            ratio = 1.0
            if index == 0:
                update = update + 0.01 * w
                ratio = np.linalg.norm(w) / np.linalg.norm(update)
            w -= 0.1 * ratio * update
    # 1 - 0.999 in 32 bits is known to four digits.
    for variable, expected in zip(variables, weights, strict=True):
        assert np.abs(variable.numpy() - expected).max() < 1e-5


def test_scopes_and_settings_are_accepted_and_told(ipu: Any, tf: Any, capfd: Any) -> None:
    scopes = ipu.scopes
    with scopes.ipu_scope("/device:IPU:0"), scopes.ipu_shard(1), scopes.stochastic_rounding(True):
        ipu.utils.move_variable_initialization_to_cpu()
        value = ipu.internal_ops.print_tensor(tf.constant([1.5]), name="here")
    assert value.numpy().tolist() == [1.5] and "here: [1.5]" in capfd.readouterr().err
    numbers = []
    for _ in range(2):
        ipu.utils.reset_ipu_seed(7)
        numbers.append(float(tf.random.normal([])))
    assert numbers[0] == numbers[1]
    keys = [notice.key for notice in notices.logged()]
    assert keys == ["ipu_shard", "stochastic_rounding", "reset_ipu_seed"]


def test_popdist_is_one_process(ipu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import popdist  # pyright: ignore[reportMissingImports]
    import popdist.tensorflow  # pyright: ignore[reportMissingImports]
    from tensorflow.python.ipu.distributed import (  # pyright: ignore[reportMissingImports]
        popdist_strategy,
    )

    config = ipu.config.IPUConfig()
    popdist.init()
    popdist.tensorflow.set_ipu_config(config, ipus_per_replica=2)
    assert (popdist.getNumInstances(), popdist.getInstanceIndex()) == (1, 0)
    assert ipu.utils.get_num_of_ipus_in_device() == 2
    assert isinstance(popdist_strategy.PopDistStrategy(), ipu.ipu_strategy.IPUStrategy)
    ipu.config.reset_ipu_configuration()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="several processes"):
        popdist_strategy.PopDistStrategy()
    with pytest.raises(InputError, match="several processes"):
        popdist.tensorflow.set_ipu_config(config)
