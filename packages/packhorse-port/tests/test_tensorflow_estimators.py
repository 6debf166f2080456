"""Estimators train as a loop by hand does, keep their weights, and evaluate without training."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import packhorse_port.tensorflow as room
from packhorse.errors import InputError
from packhorse_port import notices

RNG = np.random.default_rng(0)
X = RNG.normal(size=(48, 8)).astype(np.float32)
Y = (X.sum(1) > 0).astype(np.int32)


@pytest.fixture(scope="module")
def ipu(tf: ModuleType) -> ModuleType:
    room.install()
    from tensorflow.python import ipu  # pyright: ignore[reportAttributeAccessIssue]

    return ipu


@pytest.fixture(autouse=True)
def _fresh(ipu: ModuleType):
    notices.reset()
    ipu.config.reset_ipu_configuration()
    yield
    notices.reset()


def by_hand(tf: Any, batch: int, steps: int, rate: float, momentum: float = 0.9) -> Any:
    """The weights of two dense layers after `steps`, and their losses: plain TensorFlow."""
    model = network(tf)
    model(X[:1])
    velocity = [np.zeros(variable.shape, np.float32) for variable in model.trainable_variables]
    losses = []
    for step in range(steps):
        rows = slice(step * batch % 48, step * batch % 48 + batch)
        with tf.GradientTape() as tape:
            loss = mean_loss(tf, Y[rows], model(X[rows]))
        losses.append(float(loss))
        gradients = tape.gradient(loss, model.trainable_variables)
        for index, variable in enumerate(model.trainable_variables):
            velocity[index] = momentum * velocity[index] + gradients[index].numpy()
            variable.assign_sub(rate * velocity[index])
    return model, losses


def network(tf: Any) -> Any:
    layers = tf.keras.layers
    start = tf.keras.initializers.GlorotUniform
    return tf.keras.Sequential(
        [
            layers.Dense(16, activation="relu", kernel_initializer=start(seed=1)),
            layers.Dense(2, kernel_initializer=start(seed=2)),
        ]
    )


def mean_loss(tf: Any, labels: Any, logits: Any) -> Any:
    return tf.reduce_mean(
        tf.keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
    )


def dataset(tf: Any, batch: int = 8) -> Any:
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(batch, drop_remainder=True).repeat()


def run_config(ipu: Any, folder: Path, replicas: int = 1, loop: int = 3) -> Any:
    config = ipu.config.IPUConfig()
    config.auto_select_ipus = replicas
    settings = ipu.ipu_run_config.IPURunConfig(
        iterations_per_loop=loop, num_replicas=replicas, ipu_options=config
    )
    return ipu.ipu_run_config.RunConfig(settings, model_dir=str(folder))


def estimator(ipu: Any, tf: Any, folder: Path, replicas: int = 1) -> Any:
    """As scripts write it: the optimizer is built in every mode, metrics are TensorFlow 1's."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> Any:
        logits = network(tf)(features, training=mode == tf.estimator.ModeKeys.TRAIN)
        if mode == tf.estimator.ModeKeys.PREDICT:
            return tf.estimator.EstimatorSpec(mode, predictions={"class": tf.argmax(logits, 1)})
        loss = mean_loss(tf, labels, logits)
        optimizer = tf.compat.v1.train.MomentumOptimizer(params["rate"], 0.9)
        optimizer = ipu.optimizers.CrossReplicaOptimizer(optimizer)
        accuracy = tf.compat.v1.metrics.accuracy(labels, tf.argmax(logits, 1))
        return tf.estimator.EstimatorSpec(
            mode,
            loss=loss,
            train_op=optimizer.minimize(loss),
            eval_metric_ops={"accuracy": accuracy},
        )

    config = run_config(ipu, folder, replicas)
    return ipu.ipu_estimator.IPUEstimator(model_fn, config=config, params={"rate": 0.1})


@pytest.mark.parametrize("replicas", [1, 2])
def test_training_evaluating_and_going_on(ipu: Any, tf: Any, tmp_path: Path, replicas: int) -> None:
    """Two replicas of four samples are one of eight; weights and momentum outlive the process."""
    model, losses = by_hand(tf, 8, 12, 0.1)
    batch = 8 // replicas
    first = estimator(ipu, tf, tmp_path, replicas)
    first.train(lambda: dataset(tf, batch), steps=6)
    before = [variable.numpy() for variable in first._store.variables]
    result = first.evaluate(lambda: dataset(tf, batch), steps=6)
    after = [variable.numpy() for variable in first._store.variables]
    assert all(map(np.array_equal, before, after)), "evaluation does not train"
    halfway, _ = by_hand(tf, 8, 6, 0.1)
    logits = halfway(X).numpy()
    assert result["loss"] == pytest.approx(float(mean_loss(tf, Y, logits)), abs=1e-6)
    assert result["accuracy"] == pytest.approx((logits.argmax(1) == Y).mean(), abs=1e-6)
    assert result["global_step"] == 6

    second = estimator(ipu, tf, tmp_path, replicas)  # from the checkpoint
    data = dataset(tf, batch).skip(6 * replicas)
    second.train(lambda: data, max_steps=12)
    weights = [variable.numpy() for variable in second._store.variables]
    expected = [variable.numpy() for variable in model.trainable_variables]
    assert max(np.abs(a - b).max() for a, b in zip(weights, expected, strict=False)) < 1e-6
    assert len(weights) == 8, "four weights with their momentum"
    predictions = list(second.predict(lambda: dataset(tf).take(6)))
    assert [int(row["class"]) for row in predictions] == model(X).numpy().argmax(1).tolist()
    assert len(losses) == 12
    with pytest.raises(InputError, match="take steps=3"):
        second.train(lambda: data, steps=5)


@pytest.mark.parametrize("reduction", ["SUM", "MEAN"])
def test_a_pipelined_estimator(ipu: Any, tf: Any, tmp_path: Path, reduction: str) -> None:
    """Two batches of four, accumulated, are one of eight."""

    def model_fn(mode: str) -> Any:
        model = network(tf)

        def stage1(features: Any, labels: Any) -> Any:
            return model.layers[0](features), labels

        def stage2(hidden: Any, labels: Any) -> Any:
            logits = model.layers[1](hidden)
            return mean_loss(tf, labels, logits), tf.argmax(logits, 1), labels

        def optimizer(loss: Any, predictions: Any, labels: Any) -> Any:
            rate = 0.05 if reduction == "SUM" else 0.1
            inner = tf.compat.v1.train.MomentumOptimizer(rate, 0.9)
            return ipu.pipelining_ops.OptimizerFunctionOutput(inner, loss)

        def metrics(loss: Any, predictions: Any, labels: Any) -> Any:
            accuracy = tf.compat.v1.metrics.accuracy(labels, predictions)
            return {"loss": loss, "accuracy": accuracy}

        return ipu.ipu_pipeline_estimator.IPUPipelineEstimatorSpec(
            mode,
            computational_stages=[stage1, stage2],
            gradient_accumulation_count=2,
            optimizer_function=optimizer,
            eval_metrics_fn=metrics,
            reduction_method=reduction,
        )

    trained = ipu.ipu_pipeline_estimator.IPUPipelineEstimator(
        model_fn, config=run_config(ipu, tmp_path, loop=4)
    )
    trained.train(lambda: dataset(tf, 4), steps=24)
    model, _ = by_hand(tf, 8, 12, 0.1)
    logits = model(X).numpy()
    result = trained.evaluate(lambda: dataset(tf, 4), steps=12)
    assert result["loss"] == pytest.approx(float(mean_loss(tf, Y, logits)), abs=1e-6)
    assert result["accuracy"] == pytest.approx((logits.argmax(1) == Y).mean(), abs=1e-6)
    other = ipu.ipu_pipeline_estimator.IPUPipelineEstimator(
        model_fn, config=run_config(ipu, tmp_path / "new", loop=3)
    )
    with pytest.raises(InputError, match="take 4"):
        other.train(lambda: dataset(tf, 4), steps=3)
