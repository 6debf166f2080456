"""Keras's `fit`, `evaluate` and `predict` as an IPU system runs them: replicas and accumulation.

A step of n replicas is n batches, one forward and backward pass each, gradients added; every k
steps (`gradient_accumulation_steps_per_replica`) the weights are changed once. As on an IPU the
gradients of replicas are always added, those of accumulation added ("sum", the SDK's default) or
averaged ("mean"); so with "mean" and one replica, k batches do what plain Keras does with one batch
k times as large, and with "sum" what it does with a learning rate k times as large besides.

With one replica and no accumulation nothing is exchanged, and the numbers are Keras's to the bit.
Otherwise the model's own `train_step` runs once for each batch, with a stand-in for the optimizer
that keeps the gradients; so a script's own `train_step` is honoured too. Accumulation is that of
Keras 3's optimizers. Metrics are over all replicas, where an IPU tells those of the last.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from packhorse_port.tensorflow import options, stages
from packhorse_port.tensorflow.data import Feed, check_steps, feed, hold_out
from packhorse_port.tensorflow.options import Extension, extension
from packhorse_port.tensorflow.refusal import refuse
from packhorse_port.tensorflow.strategy import IPUStrategy, strategy_of

Method = Callable[..., Any]


def replicas(model: Any, strategy: IPUStrategy) -> int:
    """How often the model fits into the system: IPUs by the IPUs that its stages take."""
    found = shards(model)
    needed = 1 << (found - 1).bit_length()
    if needed > strategy.ipus:
        raise refuse(
            f"the model has {found} pipeline stages and the system {strategy.ipus} IPU"
            f"{'s' * (strategy.ipus > 1)}: set auto_select_ipus = {needed}"
        )
    return strategy.ipus // needed


def shards(model: Any) -> int:
    """How many IPUs one replica takes."""
    known = extension(model)
    if known.device_mapping:
        return max(known.device_mapping) + 1
    return max(stages.count(options.assignments(model)), 1)


def accumulation(model: Any) -> int:
    """How many steps make one update of the weights."""
    known = extension(model)
    if stages.count(options.assignments(model)):
        if known.pipeline_steps is None and known.schedule != options.PipelineSchedule.Sequential:
            raise refuse(
                "a pipelined model accumulates gradients: call"
                " model.set_pipelining_options(gradient_accumulation_steps_per_replica=…)"
            )
        return known.pipeline_steps or 1
    return known.steps or 1


def fit(original: Method) -> Method:
    """`Model.fit` for models of an IPU; for others the one it was."""

    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        strategy = strategy_of(self)
        if strategy is None or not self.compiled:
            return original(self, *args, **kwargs)
        given = hold_out(_given(original, self, args, kwargs))
        _see_stages(self, given.get("x"))
        number, every = replicas(self, strategy), accumulation(self)
        taken = _feed(given, number, "steps_per_epoch")
        check_steps(taken.known, self.steps_per_execution, every, "fit")
        given |= _validation(given, number) | _named(taken, "steps_per_epoch")
        _accumulate(self.optimizer, every)
        _renew(self, (number, every, extension(self).reduction))
        with strategy.scope():
            return original(self, **given)

    return fit


def evaluate(original: Method) -> Method:
    """`Model.evaluate`, likewise."""

    def evaluate(self: Any, *args: Any, **kwargs: Any) -> Any:
        strategy = strategy_of(self)
        if strategy is None or not self.compiled or "_use_cached_eval_dataset" in kwargs:
            return original(self, *args, **kwargs)
        return _run(original, self, strategy, args, kwargs)

    return evaluate


def predict(original: Method) -> Method:
    """`Model.predict`, likewise."""

    def predict(self: Any, *args: Any, **kwargs: Any) -> Any:
        strategy = strategy_of(self)
        if strategy is None:
            return original(self, *args, **kwargs)
        return _run(original, self, strategy, args, kwargs)

    return predict


def _run(original: Method, model: Any, strategy: IPUStrategy, args: Any, kwargs: Any) -> Any:
    given = _given(original, model, args, kwargs)
    _see_stages(model, given.get("x"))
    taken = _feed(given, replicas(model, strategy), "steps")
    check_steps(taken.known, model.steps_per_execution, 1, original.__name__)
    allowed = inspect.signature(original).parameters
    given |= {name: value for name, value in _named(taken, "steps").items() if name in allowed}
    with strategy.scope():
        return original(model, **given)


def make_train_function(original: Method) -> Method:
    """`Model.make_train_function`, with replicas and sums in the step where there are any."""

    def make_train_function(self: Any, force: bool = False) -> Any:
        number, every, reduction = extension(self).built or (1, 1, "mean")
        if strategy_of(self) is None or number * every == 1:
            return original(self, force)
        if self.train_function is None or force:
            scale = every if reduction == "sum" else 1
            step = partial(shared_step, self, self.train_step, number, scale)
            self.train_function = self._make_function(step)
        return self.train_function

    return make_train_function


def shared_step(model: Any, step: Method, number: int, scale: int, data: Any) -> Any:
    """One step of `number` replicas on their joined batches: logs of the last, one update."""
    optimizer, kept = model.optimizer, Kept(model.optimizer)
    object.__setattr__(model, "optimizer", kept)  # past Keras, which would track it
    try:
        logs = [step(batch) for batch in _divided(data, number)]
    finally:
        object.__setattr__(model, "optimizer", optimizer)
    optimizer.apply_gradients(
        (None if gradient is None else gradient * scale, variable)
        for gradient, variable in kept.total()
    )
    return logs[-1]


def _divided(data: Any, number: int) -> Iterable[Any]:
    whole = keras.tree.flatten(data)
    pieces = [[each] * number if each is None else tf.split(each, number) for each in whole]
    return [keras.tree.pack_sequence_as(data, list(batch)) for batch in zip(*pieces, strict=True)]


class Kept:
    """The optimizer that a step sees: it keeps gradients, and changes nothing."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.gradients: list[list[Any]] = []
        self.variables: list[Any] = []

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]], **_: Any) -> None:
        gradients, variables = zip(*grads_and_vars, strict=True)
        self.apply(gradients, variables)

    def apply(self, grads: Iterable[Any], trainable_variables: Any = None) -> None:
        self.gradients.append(list(grads))
        self.variables = list(trainable_variables or self.optimizer._trainable_variables)

    def total(self) -> list[tuple[Any, Any]]:
        """The sum over the replicas, by variable; sparse gradients are made dense."""
        sums = [
            None if each[0] is None else tf.add_n([tf.convert_to_tensor(one) for one in each])
            for each in zip(*self.gradients, strict=True)
        ]
        return list(zip(sums, self.variables, strict=True))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


def _given(original: Method, model: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    bound = inspect.signature(original).bind(model, *args, **kwargs).arguments
    extra = bound.pop("kwargs", {})
    return {name: value for name, value in [*bound.items(), *extra.items()] if name != "self"}


def _feed(given: dict[str, Any], number: int, steps: str) -> Feed:
    names = ("x", "y", "sample_weight", "batch_size", steps)
    x, y, weight, batch, count = (given.get(name) for name in names)
    return feed(x, y, weight, batch, count, number)


def _named(taken: Feed, steps: str) -> dict[str, Any]:
    return {
        "x": taken.x,
        "y": taken.y,
        "sample_weight": taken.sample_weight,
        "batch_size": taken.batch_size,
        steps: taken.steps,
    }


def _validation(given: dict[str, Any], number: int) -> dict[str, Any]:
    """The data to validate with, joined likewise; its steps fill executions where they can."""
    data = given.get("validation_data")
    if data is None:
        return {}
    parts = (data,) if isinstance(data, tf.data.Dataset) else tuple(data)
    x, y, weight = (*parts, None, None)[:3]
    batch = given.get("validation_batch_size") or given.get("batch_size")
    taken = feed(x, y, weight, batch, given.get("validation_steps"), number)
    arrays = (taken.x, taken.y, taken.sample_weight)[: len(parts)]
    return {
        "validation_data": taken.x if isinstance(data, tf.data.Dataset) else arrays,
        "validation_batch_size": taken.batch_size,
        "validation_steps": taken.steps,
    }


def _see_stages(model: Any, x: Any) -> None:
    """A model whose layers are called in its own `call` shows their stages once it has been."""
    if model.built or isinstance(model, keras.Sequential) or not extension(model).pipelining:
        return
    if isinstance(x, tf.data.Dataset):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(x.element_spec)
    with strategy_of(model).scope():  # pyright: ignore[reportOptionalMemberAccess]
        model(keras.tree.map_structure(lambda each: tf.zeros([1, *each.shape[1:]], each.dtype), x))


def _accumulate(optimizer: Any, every: int) -> None:
    """Have Keras's optimizer change the weights once in so many steps."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if every == (inner.gradient_accumulation_steps or 1):
        return
    if inner.built:
        raise refuse(
            f"gradients are to be accumulated over {every} steps, and the optimizer has already"
            f" run over {inner.gradient_accumulation_steps or 1}: call model.compile again"
        )
    inner.gradient_accumulation_steps = every if every > 1 else None


def _renew(model: Any, built: tuple[int, int, str]) -> None:
    known: Extension = extension(model)
    if known.built != built:
        known.built = built
        model.train_function = None
