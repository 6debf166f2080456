"""Keras's `fit`, `evaluate` and `predict` as an IPU system runs them: replicas and accumulation.

A step of n replicas runs n batches, one forward and backward pass each, and adds the gradients;
every k steps (`gradient_accumulation_steps_per_replica`) the weights are updated once. As on an IPU
the gradients of replicas are always added, those of accumulation added ("sum", the SDK's default)
or averaged ("mean"). So with "mean" and one replica, k batches do what plain Keras does with one
batch k times as large; with "sum" the learning rate is k times as large as well.

With one replica and no accumulation nothing is replaced, and the results are Keras's to the bit.
Otherwise the model's own `train_step`, which a script may override, runs once per batch with an
optimizer that only collects the gradients. Accumulation is that of Keras 3's optimizers. Metrics
are over all replicas, while an IPU reports those of the last.

An IPU's program has fixed shapes and a fixed number of steps, so an incomplete batch, or steps that
do not fill an execution, are errors there and here, with the line to change. With n replicas n
consecutive batches form one step: they are joined before Keras sees them, and divided again in the
step. Batches left over are dropped and logged.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from packhorse_port.notices import input_error, log_once
from packhorse_port.tensorflow.extensions import (
    ModelExtension,
    PipelineSchedule,
    assignments,
    count_stages,
    extension,
)
from packhorse_port.tensorflow.strategy import IPUStrategy, strategy_of

Method = Callable[..., Any]
DEFAULT_BATCH_SIZE = 32  # Keras's


def count_replicas(model: Any, strategy: IPUStrategy) -> int:
    """How many replicas fit into the system: its IPUs divided by those of one replica."""
    stages = ipus_per_replica(model)
    needed = 1 << (stages - 1).bit_length()  # IPUs come in powers of two
    if needed > strategy.ipus:
        plural = "s" if strategy.ipus > 1 else ""
        raise input_error(
            f"the model has {stages} pipeline stages and the system {strategy.ipus} IPU{plural}:"
            f" set auto_select_ipus = {needed}"
        )
    return strategy.ipus // needed


def ipus_per_replica(model: Any) -> int:
    """How many IPUs one replica takes."""
    options = extension(model)
    if options.device_mapping:
        return max(options.device_mapping) + 1
    return max(count_stages(assignments(model)), 1)


def accumulation_steps(model: Any) -> int:
    """How many steps there are per update of the weights."""
    options = extension(model)
    if count_stages(assignments(model)):
        if options.pipeline_steps is None and options.schedule != PipelineSchedule.Sequential:
            raise input_error(
                "a pipelined model accumulates gradients: call"
                " model.set_pipelining_options(gradient_accumulation_steps_per_replica=…)"
            )
        return options.pipeline_steps or 1
    return options.steps or 1


def fit(original: Method) -> Method:
    """`Model.fit` for an IPU's models; for others the original."""

    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        strategy = strategy_of(self)
        if strategy is None or not self.compiled:
            return original(self, *args, **kwargs)
        arguments = hold_out(_bind(original, self, args, kwargs))
        _record_stages(self, arguments.get("x"))
        replicas = count_replicas(self, strategy)
        accumulation = accumulation_steps(self)
        data = _prepare(arguments, replicas, "steps_per_epoch")
        check_steps(data.total_steps, self.steps_per_execution, accumulation, "fit")
        arguments |= _validation(arguments, replicas) | _as_arguments(data, "steps_per_epoch")
        _set_accumulation(self.optimizer, accumulation)
        _rebuild_if_changed(self, (replicas, accumulation, extension(self).reduction))
        with strategy.scope(), callbacks_of_steps(self):
            return original(self, **arguments)

    return fit


def evaluate(original: Method) -> Method:
    """`Model.evaluate` for an IPU's models; for others the original."""

    def evaluate(self: Any, *args: Any, **kwargs: Any) -> Any:
        strategy = strategy_of(self)
        # `fit` validates with a data set that it has prepared already.
        if strategy is None or not self.compiled or "_use_cached_eval_dataset" in kwargs:
            return original(self, *args, **kwargs)
        return _run(original, self, strategy, args, kwargs)

    return evaluate


def predict(original: Method) -> Method:
    """`Model.predict` for an IPU's models; for others the original."""

    def predict(self: Any, *args: Any, **kwargs: Any) -> Any:
        strategy = strategy_of(self)
        if strategy is None:
            return original(self, *args, **kwargs)
        return _run(original, self, strategy, args, kwargs)

    return predict


def _run(original: Method, model: Any, strategy: IPUStrategy, args: Any, kwargs: Any) -> Any:
    arguments = _bind(original, model, args, kwargs)
    _record_stages(model, arguments.get("x"))
    data = _prepare(arguments, count_replicas(model, strategy), "steps")
    check_steps(data.total_steps, model.steps_per_execution, 1, original.__name__)
    accepted = inspect.signature(original).parameters
    prepared = _as_arguments(data, "steps")
    arguments |= {name: value for name, value in prepared.items() if name in accepted}
    with strategy.scope(), callbacks_of_steps(model):
        return original(model, **arguments)


@contextmanager
def callbacks_of_steps(model: Any) -> Iterator[None]:
    """Run steps one by one if callbacks are asynchronous: the same steps, a callback after each."""
    steps = getattr(model, "steps_per_execution", 1)
    if not extension(model).asynchronous or steps == 1:
        yield
        return
    _set_execution(model, 1)
    try:
        yield
    finally:
        _set_execution(model, steps)


def _set_execution(model: Any, steps: int) -> None:
    model.steps_per_execution = steps
    model.train_function = model.test_function = model.predict_function = None


def make_train_function(original: Method) -> Method:
    """`Model.make_train_function` with replicas and sums in the step, if there are any."""

    def make_train_function(self: Any, force: bool = False) -> Any:
        replicas, accumulation, reduction = extension(self).built or (1, 1, "mean")
        if strategy_of(self) is None or replicas * accumulation == 1:
            return original(self, force)
        if self.train_function is None or force:
            # Keras's optimizer averages what it accumulates; "sum" undoes that.
            scale = accumulation if reduction == "sum" else 1
            step = partial(replicated_step, self, self.train_step, replicas, scale)
            self.train_function = self._make_function(step)
        return self.train_function

    return make_train_function


def replicated_step(model: Any, step: Method, replicas: int, scale: int, data: Any) -> Any:
    """One step of all replicas on their joined batches: one update; returns the last logs."""
    optimizer = model.optimizer
    collector = GradientCollector(optimizer)
    object.__setattr__(model, "optimizer", collector)  # past Keras, which would track it
    try:
        logs = [step(batch) for batch in _divide(data, replicas)]
    finally:
        object.__setattr__(model, "optimizer", optimizer)
    optimizer.apply_gradients(
        (None if gradient is None else gradient * scale, variable)
        for gradient, variable in collector.total()
    )
    return logs[-1]


def _divide(data: Any, replicas: int) -> Iterable[Any]:
    """The joined batches, one per replica."""
    columns = [
        [None for _ in range(replicas)] if leaf is None else tf.split(leaf, replicas)
        for leaf in keras.tree.flatten(data)
    ]
    return [keras.tree.pack_sequence_as(data, list(batch)) for batch in zip(*columns, strict=True)]


class GradientCollector:
    """The optimizer that a step sees: it collects gradients and updates nothing."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.gradients: list[list[Any]] = []  # per replica
        self.variables: list[Any] = []

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]], **_: Any) -> None:
        gradients, variables = zip(*grads_and_vars, strict=True)
        self.apply(gradients, variables)

    def apply(self, grads: Iterable[Any], trainable_variables: Any = None) -> None:
        self.gradients.append(list(grads))
        self.variables = list(trainable_variables or self.optimizer._trainable_variables)

    def total(self) -> list[tuple[Any, Any]]:
        """(sum over the replicas, variable); sparse gradients are made dense."""
        sums = [
            None if column[0] is None else tf.add_n([tf.convert_to_tensor(g) for g in column])
            for column in zip(*self.gradients, strict=True)
        ]
        return list(zip(sums, self.variables, strict=True))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


def _bind(original: Method, model: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of a call by name."""
    bound = inspect.signature(original).bind(model, *args, **kwargs).arguments
    extra = bound.pop("kwargs", {})
    return {name: value for name, value in [*bound.items(), *extra.items()] if name != "self"}


def _prepare(arguments: dict[str, Any], replicas: int, steps_name: str) -> ReplicaData:
    return prepare_data(
        arguments.get("x"),
        arguments.get("y"),
        arguments.get("sample_weight"),
        arguments.get("batch_size"),
        arguments.get(steps_name),
        replicas,
    )


def _as_arguments(data: ReplicaData, steps_name: str) -> dict[str, Any]:
    return {
        "x": data.x,
        "y": data.y,
        "sample_weight": data.sample_weight,
        "batch_size": data.batch_size,
        steps_name: data.steps,
    }


def _validation(arguments: dict[str, Any], replicas: int) -> dict[str, Any]:
    """The validation data, joined in the same way."""
    validation = arguments.get("validation_data")
    if validation is None:
        return {}
    is_dataset = isinstance(validation, tf.data.Dataset)
    parts = (validation,) if is_dataset else tuple(validation)
    x, y, weight = (*parts, None, None)[:3]
    batch_size = arguments.get("validation_batch_size") or arguments.get("batch_size")
    steps = arguments.get("validation_steps")
    data = prepare_data(x, y, weight, batch_size, steps, replicas)
    arrays = (data.x, data.y, data.sample_weight)[: len(parts)]
    return {
        "validation_data": data.x if is_dataset else arrays,
        "validation_batch_size": data.batch_size,
        "validation_steps": data.steps,
    }


def _record_stages(model: Any, x: Any) -> None:
    """Call a model once if it calls its layers in `call`: only then their stages are known."""
    if model.built or isinstance(model, keras.Sequential) or not extension(model).pipelining:
        return
    if isinstance(x, tf.data.Dataset):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(x.element_spec)

    def zeros(leaf: Any) -> Any:
        return tf.zeros([1, *leaf.shape[1:]], leaf.dtype)

    with strategy_of(model).scope():  # pyright: ignore[reportOptionalMemberAccess]
        model(keras.tree.map_structure(zeros, x))


def _set_accumulation(optimizer: Any, steps: int) -> None:
    """Have Keras's optimizer update the weights once in so many steps."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if steps == (inner.gradient_accumulation_steps or 1):
        return
    if inner.built:
        raise input_error(
            f"gradients are to be accumulated over {steps} steps, and the optimizer has already"
            f" run over {inner.gradient_accumulation_steps or 1}: call model.compile again"
        )
    inner.gradient_accumulation_steps = steps if steps > 1 else None


def _rebuild_if_changed(model: Any, built: tuple[int, int, str]) -> None:
    """Discard the train function if it was built for other numbers."""
    options: ModelExtension = extension(model)
    if options.built != built:
        options.built = built
        model.train_function = None


# The data: complete batches, joined for the replicas


class ReplicaData(NamedTuple):
    """The data to pass to Keras: one of its batches is one batch per replica."""

    x: Any
    y: Any
    sample_weight: Any
    batch_size: int | None
    steps: int | None
    total_steps: int | None  # None if the length of the data is not known


def prepare_data(
    x: Any, y: Any, sample_weight: Any, batch_size: int | None, steps: int | None, replicas: int
) -> ReplicaData:
    """Check the data and join its batches for the replicas."""
    if isinstance(x, tf.data.Dataset):
        return _prepare_dataset(x, steps, replicas)
    if not _is_arrays(x):
        if replicas > 1:
            raise input_error(
                f"a {type(x).__name__} cannot be divided among {replicas} replicas:"
                " pass arrays or a tf.data.Dataset"
            )
        return ReplicaData(x, y, sample_weight, batch_size, steps, steps)
    size = batch_size or DEFAULT_BATCH_SIZE
    return _prepare_arrays(x, y, sample_weight, size, steps, replicas)


def _is_arrays(x: Any) -> bool:
    leaves = keras.tree.flatten(x)
    return bool(leaves) and all(getattr(leaf, "shape", ()) for leaf in leaves)


def count_samples(x: Any) -> int:
    """The number of samples in an array or a structure of arrays."""
    return int(keras.tree.flatten(x)[0].shape[0])


def slice_samples(x: Any, begin: int, end: int) -> Any:
    """Samples `begin` to `end` of an array or a structure of arrays; None stays None."""
    return keras.tree.map_structure(lambda array: None if array is None else array[begin:end], x)


def _prepare_arrays(
    x: Any, y: Any, weight: Any, batch: int, steps: int | None, replicas: int
) -> ReplicaData:
    samples = count_samples(x)
    if samples % batch:
        whole = samples - samples % batch
        advice = f"cut them: x = x[:{whole}], y = y[:{whole}]; or take" if whole else "take"
        raise input_error(
            f"{samples} samples do not fill batches of {batch}: {advice} another batch_size"
        )
    used = samples - samples % (batch * replicas)
    if not used:
        raise input_error(
            f"{samples} samples are fewer than a batch of {batch} for each of {replicas} replicas:"
            " take a smaller batch_size or a smaller auto_select_ipus"
        )
    if used < samples:
        _log_dropped((samples - used) // batch, replicas)
        x, y, weight = (slice_samples(array, 0, used) for array in (x, y, weight))
    replica_steps = _steps_per_replica(steps, replicas)
    total = replica_steps or used // (batch * replicas)
    return ReplicaData(x, y, weight, batch * replicas, replica_steps, total)


def _prepare_dataset(dataset: Any, steps: int | None, replicas: int) -> ReplicaData:
    for spec in keras.tree.flatten(dataset.element_spec):
        shape = getattr(spec, "shape", None)
        if shape is not None and shape.rank and shape[0] is None:
            raise input_error("the last batch may be short: use .batch(n, drop_remainder=True)")
    batches = int(dataset.cardinality())  # negative if infinite or unknown
    if replicas > 1:
        if batches > 0 and batches % replicas:
            _log_dropped(batches % replicas, replicas)
        dataset = dataset.batch(replicas, drop_remainder=True).map(_join_batches)
    replica_steps = _steps_per_replica(steps, replicas)
    total = replica_steps or (batches // replicas if batches > 0 else None)
    return ReplicaData(dataset, None, None, None, replica_steps, total)


def _join_batches(*element: Any) -> Any:
    def join(tensor: Any) -> Any:  # [replicas, batch, …] → [replicas * batch, …]
        return tf.reshape(tensor, [tensor.shape[0] * tensor.shape[1], *tensor.shape[2:]])

    joined = tf.nest.map_structure(join, element)
    return joined if len(joined) > 1 else joined[0]


def _steps_per_replica(steps: int | None, replicas: int) -> int | None:
    """Steps of one replica; a script counts those of all replicas."""
    if steps is None:
        return None
    if steps < replicas:
        raise input_error(f"{steps} steps are fewer than one for each of {replicas} replicas")
    return steps // replicas


def _log_dropped(batches: int, replicas: int) -> None:
    log_once(
        "replicas.dropped",
        f"{batches} batches cannot be divided evenly among {replicas} replicas and are dropped",
    )


def hold_out(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Turn `validation_split` into `validation_data`: the last samples, as Keras takes them."""
    x = arguments.get("x")
    share = arguments.get("validation_split") or 0
    if not share or arguments.get("validation_data") is not None or not _is_arrays(x):
        return dict(arguments)
    samples = count_samples(x)
    split = math.floor(samples * (1 - share))
    names = ("x", "y", "sample_weight")
    held_out = tuple(slice_samples(arguments.get(name), split, samples) for name in names)
    return {
        **arguments,
        **{name: slice_samples(arguments.get(name), 0, split) for name in names},
        "validation_split": 0.0,
        "validation_data": held_out if held_out[2] is not None else held_out[:2],
    }


def check_steps(
    total: int | None, steps_per_execution: int, accumulation: int, method: str
) -> None:
    """Raise unless executions fill the steps, and weight updates fill the executions."""
    execution = min(steps_per_execution, total or steps_per_execution)
    if total and total % execution:
        divisors = [n for n in range(1, execution + 1) if total % n == 0 and n % accumulation == 0]
        fits = max(divisors, default=0)
        raise input_error(
            f"{method} has {total} steps, which steps_per_execution={steps_per_execution} does not"
            f" divide: compile with steps_per_execution={fits or total}, or cut the data"
        )
    if execution % accumulation:
        fits = execution - execution % accumulation or accumulation
        raise input_error(
            f"gradient_accumulation_steps_per_replica={accumulation} does not divide"
            f" steps_per_execution={execution}: compile with steps_per_execution={fits}"
        )
