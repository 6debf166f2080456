"""Keras under `IPUStrategy` computes what plain Keras computes; wrong use names its line."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import packhorse_port.tensorflow as room
from packhorse.errors import InputError, MissingExtra
from packhorse_port import notices
from packhorse_port.tensorflow.names import EMULATED, FAILS

X = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
Y = np.arange(64) % 3


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


def keras() -> Any:
    import keras

    return keras


def strategy(ipu: Any, ipus: int = 1) -> Any:
    config = ipu.config.IPUConfig()
    config.auto_select_ipus = ipus
    config.configure_ipu_system()
    return ipu.ipu_strategy.IPUStrategy()


def network(stages: int = 0, dropout: float = 0.0) -> Any:
    """Two layers, in so many stages of a pipeline (0: no pipeline)."""
    layers = keras().layers
    inputs = keras().Input((8,))
    with keras().ipu.PipelineStage(0) if stages else contextlib.nullcontext():
        x = layers.Dropout(dropout)(layers.Dense(16, activation="relu")(inputs))
    with keras().ipu.PipelineStage(stages - 1) if stages else contextlib.nullcontext():
        x = layers.Dense(3)(x)
    return keras().Model(inputs, x)


def ready(model: Any, rate: float = 0.1, execution: int = 1, momentum: float = 0.0) -> Any:
    loss = keras().losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras().optimizers.SGD(rate, momentum=momentum)
    model.compile(optimizer, loss, metrics=["accuracy"], steps_per_execution=execution)
    return model


def weights(model: Any) -> list[np.ndarray]:
    return [np.array(item) for item in model.get_weights()]


def plain(batch: int, rate: float = 0.1, **fit: Any) -> tuple[list[np.ndarray], Any]:
    """What Keras alone comes to."""
    keras().utils.set_random_seed(1)
    model = ready(network(dropout=fit.pop("dropout", 0.0)), rate, fit.pop("execution", 1))
    history = model.fit(X, Y, batch_size=batch, epochs=2, verbose=0, **fit)
    return weights(model), history.history


def far(first: list[np.ndarray], second: list[np.ndarray]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("execution", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_one_ipu_is_keras_to_the_bit(ipu: Any, tf: Any, execution: int) -> None:
    """Shuffled, with dropout, validated; then evaluated and predicted."""
    settings = {"dropout": 0.5, "execution": execution, "validation_data": (X[:32], Y[:32])}
    expected, history = plain(8, **settings)
    keras().utils.set_random_seed(1)
    with strategy(ipu).scope():
        model = ready(network(dropout=0.5), execution=execution)
        assert isinstance(model.distribute_strategy, tf.distribute.Strategy)
        assert model.distribute_strategy.num_replicas_in_sync == 1
        completed = model.fit(X, Y, 8, 2, verbose=0, validation_data=(X[:32], Y[:32]))
        assert far(weights(model), expected) == 0.0 and completed.history == history
        loss, accuracy = model.evaluate(X, Y, batch_size=8, verbose=0)
    outputs = model.predict(X, batch_size=8, verbose=0)
    # The same batches: a product of more rows may be summed in another order.
    alone = network(dropout=0.5)
    alone.set_weights(expected)
    assert np.array_equal(outputs, alone.predict(X, batch_size=8, verbose=0))
    assert accuracy == pytest.approx((outputs.argmax(1) == Y).mean())
    assert not notices.logged() and loss > 0


def test_a_pipeline_accumulates(ipu: Any) -> None:
    """Four batches of eight are one of thirty-two: averaged; or summed, at four times the rate."""
    expected, _ = plain(32, shuffle=False)
    actual = []
    for reduction, rate in (("mean", 0.1), (None, 0.025)):
        keras().utils.set_random_seed(1)
        with strategy(ipu, 2).scope():
            model = network(stages=2)
            arguments = {"gradient_accumulation_reduction_method": reduction} if reduction else {}
            model.set_pipelining_options(
                gradient_accumulation_steps_per_replica=4,
                pipeline_schedule=ipu.ops.pipelining_ops.PipelineSchedule.Interleaved,
                **arguments,
            )
            ready(model, rate, execution=8)
            model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
            actual.append(far(weights(model), expected))
    assert max(actual) < 1e-5
    control, _ = plain(8, shuffle=False)
    assert far(control, expected) > 1e-3, "else nothing was shown"


def test_replicas_add_their_gradients(ipu: Any, tf: Any) -> None:
    """Two replicas of two steps: 32 samples an update, and the sum over replicas, as on an IPU."""
    expected, history = plain(32, rate=0.2, shuffle=False)
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8, drop_remainder=True)
    for x, y, batch in ((X, Y, 8), (data, None, None)):
        keras().utils.set_random_seed(1)
        with strategy(ipu, 2).scope():
            model = network()
            model.set_gradient_accumulation_options(2, "mean")
            ready(model, execution=4)
            completed = model.fit(x, y, batch_size=batch, epochs=2, shuffle=False, verbose=0)
        assert far(weights(model), expected) < 1e-5
        assert completed.params["steps"] == 4, "a step is a batch for each replica"
        assert completed.history["accuracy"][0] == history["accuracy"][0], "no sample is left out"
    assert np.allclose(model.predict(X, batch_size=8, verbose=0), model(X), atol=1e-6)
    assert model.evaluate(data, verbose=0, return_dict=True)["loss"] > 0


def test_each_replica_has_its_own_batch(ipu: Any) -> None:
    """Batch normalization takes the statistics of eight samples, not of sixteen."""
    seen = []
    with strategy(ipu, 2).scope():
        inputs = keras().Input((8,))
        outputs = keras().layers.BatchNormalization(momentum=0.0)(inputs)
        model = keras().Model(inputs, keras().layers.Dense(3)(outputs))
        ready(model, rate=0.0)
        model.fit(X[:16], Y[:16], batch_size=8, shuffle=False, verbose=0)
        seen = weights(model)
    assert np.allclose(seen[2], X[8:16].mean(0), atol=1e-6), "the last replica's mean"


def test_a_script_s_own_train_step_is_replicated(ipu: Any, tf: Any) -> None:
    class Own(keras().Model):
        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(y=y, y_pred=self(x, training=True))
            module_own = self.trainable_variables
            self.optimizer.apply_gradients(
                zip(tape.gradient(loss, module_own), module_own, strict=True)
            )
            return {"loss": loss}

    expected, _ = plain(16, rate=0.2, shuffle=False)
    keras().utils.set_random_seed(1)
    with strategy(ipu, 2).scope():
        whole = network()
        model = ready(Own(whole.inputs, whole.outputs))
        model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    assert far(weights(model), expected) < 1e-5


def test_strategy_runs_functions(ipu: Any, tf: Any) -> None:
    under = strategy(ipu)
    with under.scope():
        variable = tf.Variable(2.0)

    @tf.function
    def double(x: Any) -> Any:
        return variable.assign(variable * x)

    assert float(under.run(double, args=[3.0])) == 6.0


def test_stages_can_be_listed_and_set(ipu: Any, capsys: pytest.CaptureFixture) -> None:
    layers = keras().layers
    with strategy(ipu, 2).scope():
        model = network(stages=2)
        actual = model.get_pipeline_stage_assignment()
        assert [item.pipeline_stage for item in actual] == [0, 0, 1]
        assert actual[2].inbound_layers == [actual[1].layer]
        model.print_pipeline_stage_assignment_summary()
        assert capsys.readouterr().out.splitlines()[-1].endswith(" 1")
        single = keras().Sequential([layers.Input((8,)), layers.Dense(4), layers.Dense(3)])
        single.set_pipeline_stage_assignment([0, 1])
        with pytest.raises(InputError, match="3 stages for 2 layers"):
            single.set_pipeline_stage_assignment([0, 1, 1])
        with pytest.raises(InputError, match="no layer is in pipeline stage 0"):
            single.set_pipeline_stage_assignment([1, 2])
        with keras().ipu.PipelineStage(1):
            stored = layers.Dense(3)
    assert layers.Dense(3)._inbound_nodes == [] and "_ipu_stage" not in vars(layers.Dense(3))
    assert vars(stored)["_ipu_stage"] == 1, "made in a stage, called outside of one"


def test_stages_of_a_class_s_own_call(ipu: Any) -> None:
    class Own(keras().Model):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = keras().layers.Dense(16), keras().layers.Dense(3)

        def call(self, x: Any) -> Any:
            with keras().ipu.PipelineStage(0):
                x = self.first(x)
            with keras().ipu.PipelineStage(1):
                return self.second(x)

    with strategy(ipu).scope():
        model = Own()
        model.set_pipelining_options(gradient_accumulation_steps_per_replica=2)
        with pytest.raises(InputError, match="2 pipeline stages and the system 1 IPU"):
            ready(model, execution=2).fit(X, Y, batch_size=8, verbose=0)


class Ways:
    """A script that gets it wrong, in each way there is."""

    def batch(self, ipu: Any) -> Any:
        ready(network()).fit(X[:60], Y[:60], batch_size=8, verbose=0)

    def evaluated(self, ipu: Any) -> Any:
        ready(network()).evaluate(X[:60], Y[:60], batch_size=8, verbose=0)

    def short(self, ipu: Any) -> Any:
        import tensorflow as tf

        data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
        ready(network()).fit(data, verbose=0)

    def devices(self, ipu: Any) -> Any:
        model = network(stages=2)
        model.set_pipelining_options(gradient_accumulation_steps_per_replica=2)
        ready(model, execution=2).fit(X, Y, batch_size=8, verbose=0)

    def execution(self, ipu: Any) -> Any:
        ready(network(), execution=3).fit(X, Y, batch_size=8, verbose=0)

    def accumulated(self, ipu: Any) -> Any:
        model = network()
        model.set_gradient_accumulation_options(gradient_accumulation_steps_per_replica=8)
        ready(model, execution=4).fit(X, Y, batch_size=8, verbose=0)

    def unset(self, ipu: Any) -> Any:
        ready(network(stages=1)).fit(X, Y, batch_size=8, verbose=0)

    def nested(self, ipu: Any) -> Any:
        with keras().ipu.PipelineStage(0), keras().ipu.PipelineStage(1):
            pass

    def left_out(self, ipu: Any) -> Any:
        with keras().ipu.PipelineStage(0):
            model = keras().Sequential([keras().Input((8,)), keras().layers.Dense(3)])
        model.add(keras().layers.Dense(3))
        ready(model).fit(X, Y, batch_size=8, verbose=0)

    def argument(self, ipu: Any) -> Any:
        network().set_pipelining_options(gradient_accumulation_steps=8)

    def late(self, ipu: Any) -> Any:
        model = ready(network(), execution=4)
        model.optimizer.build(model.trainable_variables)
        model.set_gradient_accumulation_options(gradient_accumulation_steps_per_replica=4)
        model.fit(X, Y, batch_size=8, verbose=0)

    def absent(self, ipu: Any) -> Any:
        ipu.embedded_runtime.embedded_runtime_start(None)

    def old(self, ipu: Any) -> Any:
        ipu.utils.create_ipu_config()

    def served(self, ipu: Any) -> Any:
        network().export_for_ipu_serving("folder")


WRONG = {
    "batch": "60 samples do not fill batches of 8: cut them: x = x[:56]",
    "evaluated": "another batch_size",
    "short": ".batch(n, drop_remainder=True)",
    "devices": "2 pipeline stages and the system 1 IPU: set auto_select_ipus = 2",
    "execution": "compile with steps_per_execution=2",
    "accumulated": "compile with steps_per_execution=8",
    "unset": "model.set_pipelining_options(gradient_accumulation_steps_per_replica=",
    "nested": "PipelineStage(1) stands within PipelineStage(0)",
    "left_out": "call it under a PipelineStage too",
    "argument": "the nearest is gradient_accumulation_steps_per_replica",
    "late": "call model.compile again",
    "absent": "an IPU's program cannot run; load the model and call it",
    "old": "write ipu.config.IPUConfig()",
    "served": "use model.export(folder)",
}


@pytest.mark.parametrize("way", WRONG)
def test_wrong_use_says_the_line_to_change(ipu: Any, way: str) -> None:
    with strategy(ipu).scope(), pytest.raises(InputError) as raised:
        getattr(Ways(), way)(ipu)
    assert WRONG[way] in str(raised.value)
    assert str(raised.value).startswith("test_tensorflow.py:")


def test_outside_of_the_strategy_it_is_keras(ipu: Any) -> None:
    model = ready(network())
    model.fit(X[:60], Y[:60], batch_size=8, verbose=0)
    with pytest.raises(InputError, match="make the model under `with"):
        model.set_pipelining_options(gradient_accumulation_steps_per_replica=2)
    with pytest.raises(InputError, match="outside of an IPUStrategy"):
        network(stages=1)


def test_too_few_samples_for_the_replicas_and_some_left_over(ipu: Any) -> None:
    with strategy(ipu, 4).scope():
        model = ready(network())
        with pytest.raises(InputError, match="for each of 4 replicas"):
            model.predict(X[:16], batch_size=8, verbose=0)
        assert len(model.predict(X[:40], batch_size=8, verbose=0)) == 32
    assert [item.key for item in notices.logged()] == ["replicas.dropped"]


def test_every_name_of_the_table_is_there_or_says_why(ipu: Any) -> None:
    homes = {"ipu": ipu, "keras": keras(), "Model": keras().Model}
    homes |= {name: sys.modules[name] for name in ("popdist", "ipu_tensorflow_addons")}
    for name in [*EMULATED, *FAILS]:
        first, *rest = name.split(".")
        value = homes[first]
        for item in rest:
            value = getattr(value, item)
        if name in FAILS and first != "Model":
            with pytest.raises(InputError) as raised:
                value.anything() if isinstance(value, ModuleType) else value()
            assert FAILS[name] in str(raised.value)
    with pytest.raises(AttributeError, match=r"the nearest is ipu\.config\.IPUConfig"):
        _ = ipu.config.IpuConfig
    from tensorflow.python.ipu.ipu_strategy import (  # pyright: ignore[reportMissingImports]
        IPUStrategyV1,
    )

    assert IPUStrategyV1 is ipu.ipu_strategy.IPUStrategy


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras loading
def test_keras_2_is_translated_and_said_once(ipu: Any, tmp_path: Path) -> None:
    optimizer = tf_keras().optimizers.SGD(lr=0.5, decay=1.0)
    optimizer.iterations.assign(1)
    assert float(optimizer.learning_rate) == 0.25, "0.5 / (1 + decay * 1)"
    assert float(tf_keras().optimizers.Adam(lr=0.5).lr) == 0.5
    model = tf_keras().Sequential([tf_keras().Input(8), tf_keras().layers.Dense(3)])
    ready(model).fit(X, Y, batch_size=32, verbose=0, workers=4, use_multiprocessing=True)
    model.fit_generator((pair for pair in [(X, Y)]), steps_per_epoch=1, shuffle=False)
    model.save(str(tmp_path / "model"), save_format="tf")
    loaded = tf_keras().models.load_model(str(tmp_path / "model"))
    assert far(weights(loaded), weights(model)) == 0.0
    model.save_weights(tmp_path / "weights")
    loaded.load_weights(str(tmp_path / "weights"))
    tf_keras().callbacks.ModelCheckpoint(str(tmp_path / "at"), save_weights_only=True)
    assert {item.key.removeprefix("Keras 2: ") for item in notices.logged()} == {
        *("lr", "decay", "Input", "workers", "use_multiprocessing", "fit_generator"),
        *("file.keras", "file.weights.h5", "save_format"),
    }


def tf_keras() -> Any:
    """Keras as old scripts import it."""
    from tensorflow import keras

    return keras


def test_xla_keeps_what_it_compiles_where_the_flags_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "executables"
    monkeypatch.setenv("TF_XLA_FLAGS", "--tf_xla_auto_jit=0")
    monkeypatch.setenv("TF_POPLAR_FLAGS", f"--use_ipu_model --executable_cache_path={folder}")
    room._set_xla_cache()
    requested = os.environ["TF_XLA_FLAGS"].split()
    assert requested[:2] == [
        "--tf_xla_auto_jit=0",
        f"--tf_xla_persistent_cache_directory={folder}/xla",
    ]
    monkeypatch.setenv("TF_XLA_FLAGS", "")
    folder.chmod(0o777)
    with pytest.raises(InputError, match="can be written by others"):
        room._set_xla_cache()
    assert os.environ["TF_XLA_FLAGS"] == ""


def test_without_tensorflow_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "tensorflow.python.ipu")
    monkeypatch.setitem(sys.modules, "tensorflow.python", None)
    with pytest.raises(MissingExtra, match=r"packhorse\[tensorflow\]"):
        room.install()
    monkeypatch.setattr(room, "LAST_PYTHON", (3, 10))
    with pytest.raises(InputError, match=r"up to Python 3\.10 only; this is .* with Python 3\.10"):
        room.install()


def test_asynchronous_callbacks_are_called_after_each_step(ipu: Any) -> None:
    """With the same weights as after whole executions, accumulated gradients and all."""
    calls: dict[bool, list[int]] = {False: [], True: []}
    results = []
    for asynchronous, steps in calls.items():
        keras().utils.set_random_seed(1)
        with strategy(ipu).scope():
            model = network()
            model.set_gradient_accumulation_options(gradient_accumulation_steps_per_replica=2)
            model.set_asynchronous_callbacks(asynchronous=asynchronous)
            ready(model, execution=4)
            record = keras().callbacks.LambdaCallback(
                on_train_batch_end=lambda batch, logs, steps=steps: steps.append(batch)
            )
            model.fit(X, Y, batch_size=8, shuffle=False, verbose=0, callbacks=[record])
            assert model.steps_per_execution == 4
        results.append(weights(model))
    assert calls == {False: [3, 7], True: list(range(8))}
    assert far(*results) == 0.0
    assert not notices.logged()
