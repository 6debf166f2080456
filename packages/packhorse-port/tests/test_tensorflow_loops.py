"""Queues, loops, pipelines and optimizers compute what TensorFlow computes by hand."""

from __future__ import annotations

import threading
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import packhorse_port.tensorflow as room
from packhorse.errors import InputError
from packhorse_port import notices

RNG = np.random.default_rng(0)
X = RNG.normal(size=(48, 8)).astype(np.float32)
Y = (X @ RNG.normal(size=(8, 1))).astype(np.float32)


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


def dataset(tf: Any, batch: int = 8) -> Any:
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(batch, drop_remainder=True).repeat()


def by_hand(batch: int, steps: int, rate: float, scale: float = 1.0) -> tuple[list[float], Any]:
    """Losses and weights of gradient descent on (x w - y)², in NumPy."""
    w = np.zeros((8, 1))
    losses = []
    for step in range(steps):
        rows = slice(step * batch % 48, step * batch % 48 + batch)
        error = X[rows] @ w - Y[rows]
        losses.append(float((error**2).mean()))
        w -= rate * scale * 2 * X[rows].T @ error / batch
    return losses, w


def test_a_training_loop_with_queues(ipu: Any, tf: Any) -> None:
    """The SDK's form for TensorFlow 2: an iterator, a loop in a compiled function, an outfeed."""
    w = tf.Variable(tf.zeros((8, 1)))
    optimizer = tf.keras.optimizers.SGD(0.1)
    strategy = ipu.ipu_strategy.IPUStrategy()
    losses: list[float] = []

    @tf.function(experimental_compile=True)
    def training(iterator: Any, outfeed: Any, steps: Any) -> None:
        for _ in tf.range(steps):
            x, y = next(iterator)
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((x @ w - y) ** 2)
            optimizer.apply_gradients([(tape.gradient(loss, w), w)])
            outfeed.enqueue(loss)

    with strategy.scope():
        iterator = iter(dataset(tf))
        outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()
        for _ in range(3):
            strategy.run(training, args=[iterator, outfeed, 4])
            losses += [float(loss) for loss in outfeed]
    expected, weights = by_hand(8, 12, 0.1)
    assert losses == pytest.approx(expected, abs=1e-6)
    assert np.abs(w.numpy() - weights).max() < 1e-6
    assert outfeed.dequeue().shape == (0,)
    assert [notice.key for notice in notices.logged()] == ["tf.function.experimental_compile"]


@pytest.mark.parametrize("mode", ["ALL", "LAST"])
def test_outfeeds_return_structures(ipu: Any, tf: Any, mode: str) -> None:
    queues = ipu.ipu_outfeed_queue
    outfeed = queues.IPUOutfeedQueue(queues.IPUOutfeedMode[mode])
    counter = tf.Variable(0.0)

    @tf.function
    def count() -> None:
        for _ in tf.range(3):
            counter.assign_add(1)
            outfeed.enqueue({"n": counter.read_value(), "pair": (counter * 2.0, counter > 1)})

    assert outfeed.dequeue() == [] and not outfeed.enqueued
    count()
    result = outfeed.dequeue()
    values = [result["n"].numpy().tolist(), *(item.numpy().tolist() for item in result["pair"])]
    if mode == "ALL":
        assert values == [[1, 2, 3], [2.0, 4.0, 6.0], [False, True, True]]
    else:
        assert values == [3, 6.0, True]
        with pytest.raises(InputError, match="no last element"):
            outfeed.dequeue()


def test_an_outfeed_is_enqueued_once_and_read_by_threads(ipu: Any, tf: Any) -> None:
    outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()
    read: list[float] = []

    def reader() -> None:
        while len(read) < 50:
            read.extend(float(value) for value in outfeed)

    @tf.function
    def run() -> None:
        for n in tf.range(50):
            outfeed.enqueue(n)

    thread = threading.Thread(target=reader)
    thread.start()
    run()
    thread.join()
    assert read == list(range(50))

    @tf.function
    def twice() -> None:
        outfeed.enqueue(1)
        outfeed.enqueue(2)

    with pytest.raises(Exception, match="enqueued twice"):
        twice()


def test_loops_take_an_infeed(ipu: Any, tf: Any) -> None:
    """Values, then elements by position or by name; operations are run; a condition ends it."""
    loops = ipu.loops
    infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(dataset(tf))
    named = ipu.ipu_infeed_queue.IPUInfeedQueue(
        dataset(tf).map(lambda x, y: {"features": x, "labels": y})
    )
    assert infeed.number_of_tuple_elements == named.number_of_tuple_elements == 2
    total = tf.Variable(0.0)

    @tf.function
    def add() -> Any:
        def body(count: Any, x: Any, y: Any) -> Any:
            return count + 1, total.assign_add(tf.reduce_sum(x) + tf.reduce_sum(y)).op

        def by_name(largest: Any, labels: Any, features: Any) -> Any:
            return tf.maximum(largest, tf.reduce_max(features))

        steps = loops.repeat(6, body, [0], infeed)
        return steps, loops.repeat(6, by_name, [0.0], named)

    steps, largest = add()
    assert int(steps) == 6 and infeed.dequeued
    assert float(total) == pytest.approx(float(X.sum() + Y.sum()), rel=1e-5)
    assert float(largest) == X.max()
    assert [
        int(n) for n in loops.while_loop(lambda a, b: a < 5, lambda a, b: (a + 1, b * 2), [0, 1])
    ] == [5, 32]
    with pytest.raises(InputError, match="cannot be called with 1 inputs and 2 values"):
        loops.repeat(2, lambda count: count, [0], infeed)
    with pytest.raises(InputError, match=r"types \['float32'\] for \['int32'\]"):
        loops.repeat(2, lambda count: 1.5, [0])
    with pytest.raises(InputError, match="drop_remainder=True"):
        ipu.ipu_infeed_queue.IPUInfeedQueue(tf.data.Dataset.from_tensor_slices(X).batch(5))


def test_a_session_of_tensorflow_1(ipu: Any, tf: Any) -> None:
    """The SDK's form for TensorFlow 1: initializers, a compiled loop, an outfeed's operation."""
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(dataset(tf))
        outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()

        def body(x: Any, y: Any) -> Any:
            with v1.variable_scope("vs", use_resource=True, reuse=v1.AUTO_REUSE):
                w = v1.get_variable("w", [8, 1], initializer=v1.zeros_initializer())
            loss = tf.reduce_mean((x @ w - y) ** 2)
            train = v1.train.GradientDescentOptimizer(0.1).minimize(loss, var_list=[w])
            with tf.control_dependencies([train]):
                return outfeed.enqueue({"loss": loss})

        def net() -> Any:
            return ipu.loops.repeat(5, body, [], infeed)

        with ipu.scopes.ipu_scope("/device:IPU:0"):
            run = ipu.ipu_compiler.compile(net, inputs=[])
        losses = outfeed.dequeue()
        session.run(infeed.initializer)
        session.run(v1.global_variables_initializer())
        actual = []
        for _ in range(2):
            session.run(run)
            actual += session.run(losses)["loss"].tolist()
    assert actual == pytest.approx(by_hand(8, 10, 0.1)[0], abs=1e-6)


def test_compile_runs_functions(ipu: Any, tf: Any) -> None:
    compile = ipu.ipu_compiler.compile
    variable = tf.Variable(1.0)
    (result,) = compile(lambda a, b: a * b + variable, [2.0, tf.constant([1.0, 3.0])])
    assert result.numpy().tolist() == [3.0, 7.0]
    assert compile(lambda: variable.assign(5.0).op) is None and float(variable) == 5.0
    assert compile(lambda x: {"twice": x * 2}, [4])["twice"] == 8


@pytest.mark.parametrize("kind", ["v1", "keras"])
@pytest.mark.parametrize("reduction", ["SUM", "MEAN", "RUNNING_MEAN"])
def test_a_pipeline_accumulates(ipu: Any, tf: Any, reduction: str, kind: str) -> None:
    """Three repetitions of two batches of eight are three batches of sixteen."""
    ops = ipu.pipelining_ops
    w = tf.Variable(tf.zeros((8, 1)))
    infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(dataset(tf))
    outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()

    def stage1(rate: Any, x: Any, y: Any) -> Any:
        return rate, x @ w, y

    def stage2(rate: Any, outputs: Any, y: Any) -> Any:
        return rate, tf.reduce_mean((outputs - y) ** 2)

    keras_sgd = tf.keras.optimizers.SGD(0.1)

    def optimizer(rate: Any, loss: Any) -> Any:
        if kind == "keras":
            return ops.OptimizerFunctionOutput(keras_sgd, loss, variables=[w])
        return ops.OptimizerFunctionOutput(tf.compat.v1.train.GradientDescentOptimizer(rate), loss)

    @tf.function(jit_compile=True)
    def net(rate: Any) -> None:
        ops.pipeline(
            computational_stages=[stage1, stage2],
            gradient_accumulation_count=2,
            repeat_count=3,
            inputs=[rate],
            infeed_queue=infeed,
            outfeed_queue=outfeed,
            optimizer_function=optimizer,
            outfeed_mask=[True, False],
            reduction_method=ipu.gradient_accumulation.GradientAccumulationReductionMethod[
                reduction
            ],
            device_mapping=[0, 1],
            offload_activations=True,
            name="Pipeline",
        )

    net(tf.constant(0.1))
    (losses,) = outfeed.dequeue()
    expected, weights = by_hand(16, 3, 0.1, 2.0 if reduction == "SUM" else 1.0)
    pairs = losses.numpy().reshape(3, 2).mean(1)
    assert pairs == pytest.approx(expected, abs=1e-6)
    assert np.abs(w.numpy() - weights).max() < 1e-6
    assert "pipeline.offload_activations" in [notice.key for notice in notices.logged()]
    control = by_hand(8, 6, 0.1)[1]
    assert np.abs(w.numpy() - control).max() > 1e-3


def test_pipelines_outfeed_what_is_asked(ipu: Any, tf: Any) -> None:
    """Without an optimizer all outputs; accumulated, one sum for each repetition."""
    ops = ipu.ops.pipelining_ops
    infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(dataset(tf))

    def run(**options: Any) -> Any:
        outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()
        assert infeed.initializer is None  # it starts again

        @tf.function
        def net() -> None:
            stages = [
                lambda x, y: (x, tf.reduce_sum(y)),
                lambda x, total: (tf.reduce_sum(x), total),
            ]
            ops.pipeline(
                stages, 3, repeat_count=2, infeed_queue=infeed, outfeed_queue=outfeed, **options
            )

        net()
        return [values.numpy() for values in outfeed.dequeue()]

    x = X.reshape(6, -1).sum(1)
    y = Y.reshape(6, -1).sum(1)
    every, totals = run()
    assert np.allclose(every, x, atol=1e-5) and np.allclose(totals, y, atol=1e-5)
    every, totals = run(accumulate_outfeed=True)
    assert np.allclose(every, x.reshape(2, 3).sum(1), atol=1e-5)
    assert np.allclose(totals, y.reshape(2, 3).sum(1), atol=1e-5)
    # AutoGraph raises an error of its own, with the message of ours.
    with pytest.raises(Exception, match="give an IPU for each"):
        run(device_mapping=[0])
    with pytest.raises(Exception, match="need an optimizer_function"):
        run(outfeed_loss=True)


@pytest.mark.parametrize(
    "name", ["GradientAccumulationOptimizerV2", "GradientAccumulationOptimizer"]
)
def test_optimizers_accumulate(ipu: Any, tf: Any, name: str) -> None:
    """Every second call applies both gradients: with momentum too, whose slots exist before."""
    w = tf.Variable(tf.zeros((8, 1)))
    plain = tf.Variable(tf.zeros((8, 1)))
    inner = tf.compat.v1.train.MomentumOptimizer(0.05, 0.9)
    doubled = ipu.optimizers.MapGradientOptimizer(inner, lambda gradient, _: gradient * 2)
    optimizer = getattr(ipu.optimizers, name)(ipu.optimizers.CrossReplicaOptimizer(doubled), 2)
    reference = tf.compat.v1.train.MomentumOptimizer(0.05, 0.9)

    @tf.function
    def step(x: Any, y: Any) -> None:
        optimizer.minimize(tf.reduce_mean((x @ w - y) ** 2), var_list=[w])

    @tf.function
    def step_by_hand(x: Any, y: Any) -> None:
        loss = tf.reduce_mean((x @ plain - y) ** 2)
        reference.minimize(loss * 4, var_list=[plain])

    for begin in range(0, 48, 8):
        before = w.numpy()
        step(X[begin : begin + 8], Y[begin : begin + 8])
        assert np.array_equal(before, w.numpy()) == (begin % 16 == 0)
        if begin % 16:
            step_by_hand(X[begin - 8 : begin + 8], Y[begin - 8 : begin + 8])
    assert np.abs(w.numpy() - plain.numpy()).max() < 1e-6
