"""`IPUEstimator` and `IPUPipelineEstimator`: a `model_fn` and its data, trained by our own loop.

    estimator = IPUEstimator(model_fn, config=RunConfig(IPURunConfig(iterations_per_loop=100)))
    estimator.train(input_fn, steps=1000)
    estimator.evaluate(input_fn, steps=100)     # {"accuracy": …, "loss": …, "global_step": 1000}

TensorFlow has dropped estimators, so this is no subclass of one. A `model_fn` builds its model anew
each time it is called, for training and again for evaluation, and an estimator carried the weights
over by name, in a checkpoint. Here variables are numbered in the order in which a `model_fn`
creates them, and the same number is the same variable in every call (`VariableStore`).

Training runs all that a `model_fn` builds; evaluation and prediction run only what their results
need, as a session did: a `model_fn` may build its optimizer in any mode. With replicas, each step
takes one batch for each, and `CrossReplicaOptimizer` averages their gradients.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from packhorse_port.notices import input_error, log_once
from packhorse_port.tensorflow import config as system
from packhorse_port.tensorflow import optimizers
from packhorse_port.tensorflow.extensions import GradientAccumulationReductionMethod
from packhorse_port.tensorflow.loops import to_list
from packhorse_port.tensorflow.pipelining import PipelineRun

Function = Callable[..., Any]


class ModeKeys:
    """What a `model_fn` is called for."""

    TRAIN = "train"
    EVAL = "eval"
    PREDICT = "infer"


class EstimatorSpec(NamedTuple):
    """What a `model_fn` returns."""

    mode: str
    predictions: Any = None
    loss: Any = None
    train_op: Any = None
    eval_metric_ops: Any = None
    export_outputs: Any = None
    training_chief_hooks: Any = None
    training_hooks: Any = None
    scaffold: Any = None
    evaluation_hooks: Any = None
    prediction_hooks: Any = None


class IPUEstimatorSpec(NamedTuple):
    """What a `model_fn` returns, with functions for the host."""

    mode: str
    predictions: Any = None
    loss: Any = None
    train_op: Any = None
    eval_metric_ops: Any = None
    eval_metrics: Any = None  # (function, tensors): its metrics
    host_call: Any = None  # (function, tensors): run in each training step
    training_hooks: Any = None
    evaluation_hooks: Any = None
    prediction_hooks: Any = None


class IPUPipelineEstimatorSpec:
    """The stages, the optimizer and the metrics of a pipelined model."""

    def __init__(
        self,
        mode: str,
        computational_stages: list[Function],
        gradient_accumulation_count: int | None = None,
        eval_metrics_fn: Function | None = None,
        optimizer_function: Function | None = None,
        device_mapping: Any = None,
        loss_accumulator_dtype: Any = None,
        training_hooks: Any = None,
        evaluation_hooks: Any = None,
        prediction_hooks: Any = None,
        reduction_method: Any = GradientAccumulationReductionMethod.SUM,
        **pipeline_op_kwargs: Any,
    ) -> None:
        required = {
            "gradient_accumulation_count": gradient_accumulation_count,
            "optimizer_function": optimizer_function or mode != ModeKeys.TRAIN,
            "eval_metrics_fn": eval_metrics_fn or mode != ModeKeys.EVAL,
        }
        for name, value in required.items():
            if not value:
                raise input_error(f"IPUPipelineEstimatorSpec needs {name} in the mode {mode!r}")
        self.mode = mode
        self.computational_stages = computational_stages
        self.gradient_accumulation_count = gradient_accumulation_count or 1
        self.eval_metrics_fn = eval_metrics_fn
        self.optimizer_function = optimizer_function
        self.reduction_method = GradientAccumulationReductionMethod.parse(reduction_method)
        self.training_hooks = training_hooks
        self.evaluation_hooks = evaluation_hooks
        self.prediction_hooks = prediction_hooks


class IPURunConfig(NamedTuple):
    """Replicas and steps of an estimator."""

    iterations_per_loop: int = 1
    ipu_options: Any = None
    num_replicas: int = 1
    num_shards: int = 1
    ordinal: int = 0
    prefetch_depth: int | None = None


class RunConfig:
    """An `IPURunConfig`, and settings of TensorFlow's own `RunConfig`."""

    def __init__(
        self,
        ipu_run_config: IPURunConfig | None = None,
        master: str | None = None,
        model_dir: str | None = None,
        tf_random_seed: int | None = None,
        log_step_count_steps: int | None = 100,
        **settings: Any,
    ) -> None:
        self.ipu_run_config = ipu_run_config or IPURunConfig()
        self.master = master or ""
        self.model_dir = model_dir
        self.tf_random_seed = tf_random_seed
        self.log_step_count_steps = log_step_count_steps
        for name, value in settings.items():
            setattr(self, name, value)


class VariableStore:
    """Variables by the order in which a `model_fn` creates them."""

    # What TensorFlow 1 knows of a graph's variables; graphs of functions share it.
    COLLECTIONS = (
        tf.compat.v1.GraphKeys.TRAINABLE_VARIABLES,
        tf.compat.v1.GraphKeys.GLOBAL_VARIABLES,
        tf.compat.v1.GraphKeys.LOCAL_VARIABLES,
        tf.compat.v1.GraphKeys.GLOBAL_STEP,
        ("__variable_store",),
        ("__varscope",),
    )

    def __init__(self) -> None:
        self.variables: list[Any] = []
        self.saved: list[np.ndarray] = []  # values of a checkpoint, for variables to come
        self.step = ResourceVariable(0, trainable=False, dtype=tf.int64, name="global_step")

    @contextmanager
    def scope(self, local: list[Any]) -> Iterator[None]:
        """Number the variables of one call of a `model_fn`; those of metrics go to `local`."""
        graph = tf.compat.v1.get_default_graph()
        references = {key: graph.get_collection_ref(key) for key in self.COLLECTIONS}
        before = {key: list(values) for key, values in references.items()}
        for values in references.values():
            values.clear()
        graph.add_to_collection(tf.compat.v1.GraphKeys.GLOBAL_STEP, self.step)
        numbers = iter(range(1 << 30))

        def creator(_: Any, **kwargs: Any) -> Any:
            if tf.compat.v1.GraphKeys.LOCAL_VARIABLES in (kwargs.get("collections") or ()):
                local.append(_create(kwargs))
                return local[-1]
            variable = self._variable(next(numbers), kwargs)
            if variable.trainable:
                graph.add_to_collection(tf.compat.v1.GraphKeys.TRAINABLE_VARIABLES, variable)
            return variable

        try:
            with tf.variable_creator_scope(creator):
                yield
        finally:
            for key, values in before.items():
                references[key][:] = values

    def _variable(self, number: int, kwargs: dict[str, Any]) -> Any:
        if number == len(self.variables):
            saved = self.saved[number] if number < len(self.saved) else None
            self.variables.append(_create(kwargs, saved))
        variable = self.variables[number]
        shape = kwargs.get("shape")
        if shape is not None and not variable.shape.is_compatible_with(shape):
            raise input_error(
                f"model_fn creates a variable of the shape {tuple(shape)} where it created one of"
                f" {tuple(variable.shape)} before: create the model in the same order in each mode"
            )
        return variable

    def save(self, folder: str) -> str:
        """Write a checkpoint; returns its path."""
        checkpoint = tf.train.Checkpoint(values=self.variables, step=self.step)
        return checkpoint.save(f"{folder}/model.ckpt")

    def load(self, path: str) -> None:
        """Read a checkpoint; variables that a `model_fn` is yet to create take its values."""
        reader = tf.train.load_checkpoint(path)
        suffix = ".ATTRIBUTES/VARIABLE_VALUE"
        names = {name for name in reader.get_variable_to_shape_map() if name.startswith("values/")}
        self.saved = [
            reader.get_tensor(f"values/{number}/{suffix}") for number in range(len(names))
        ]
        for variable, value in zip(self.variables, self.saved, strict=False):
            variable.assign(value)
        self.step.assign(reader.get_tensor(f"step/{suffix}"))


def _create(kwargs: dict[str, Any], saved: np.ndarray | None = None) -> Any:
    """A variable outside of the function that is traced."""
    names = ("trainable", "name", "dtype", "shape", "aggregation", "synchronization")
    with tf.init_scope():
        return ResourceVariable(
            kwargs["initial_value"] if saved is None else saved,
            **{name: kwargs[name] for name in names if kwargs.get(name) is not None},
        )


class IPUEstimator:
    """Trains and evaluates a `model_fn`."""

    def __init__(
        self,
        model_fn: Function,
        model_dir: str | None = None,
        config: RunConfig | None = None,
        params: dict[str, Any] | None = None,
        warm_start_from: str | None = None,
        train_batch_size: int | None = None,
        eval_batch_size: int | None = None,
        predict_batch_size: int | None = None,
    ) -> None:
        self._model_fn = model_fn
        self.config = config or RunConfig()
        self.params = dict(params or {})
        self.model_dir = str(model_dir or self.config.model_dir or tempfile.mkdtemp())
        self._batch_sizes = {
            ModeKeys.TRAIN: train_batch_size,
            ModeKeys.EVAL: eval_batch_size,
            ModeKeys.PREDICT: predict_batch_size,
        }
        self._replicas = self.config.ipu_run_config.num_replicas
        options = self.config.ipu_run_config.ipu_options
        if options is not None:
            system.configure_ipu_system(options)
        if self.config.tf_random_seed is not None:
            tf.random.set_seed(self.config.tf_random_seed)
        self._store = VariableStore()
        if path := warm_start_from or tf.train.latest_checkpoint(self.model_dir):
            self._store.load(path)

    # As a script calls it

    def train(
        self,
        input_fn: Function,
        hooks: Any = None,
        steps: int | None = None,
        max_steps: int | None = None,
        saving_listeners: Any = None,
    ) -> IPUEstimator:
        """Train for so many steps, or up to `max_steps`; writes a checkpoint at the end."""
        self._log_hooks(hooks)
        begin = int(self._store.step)
        if max_steps is not None:
            steps = max_steps - begin
        if steps is not None and steps <= 0:
            return self
        self._check_steps(steps)
        batches = self._batches(input_fn, ModeKeys.TRAIN)
        interval = self.config.log_step_count_steps
        step_function = self._training_function()
        for step in self._numbers(steps):
            loss = step_function(batches)
            if loss is None:
                break
            self._store.step.assign_add(1)
            if interval and (step + 1) % interval == 0:
                tf.get_logger().info("loss = %s, step = %s", float(loss), begin + step + 1)
        self._store.save(self.model_dir)
        return self

    def evaluate(
        self,
        input_fn: Function,
        steps: int | None = None,
        hooks: Any = None,
        checkpoint_path: str | None = None,
        name: str | None = None,
    ) -> dict[str, Any]:
        """The metrics and the mean loss over so many steps, of one batch for each replica."""
        self._log_hooks(hooks)
        self._check_steps(steps)
        if checkpoint_path:
            self._store.load(checkpoint_path)
        batches = self._batches(input_fn, ModeKeys.EVAL)
        losses: list[float] = []
        metrics: dict[str, Any] = {}
        function = None
        for _ in self._numbers(None if steps is None else steps * self._replicas):
            batch = next(batches, None)
            if batch is None:
                break
            function = function or self._pruned(batch, ModeKeys.EVAL)
            metrics = function(batch)
            losses.append(float(metrics.pop("loss")))
        if not losses:
            raise input_error("evaluate got no batch: input_fn returned an empty data set")
        values = {key: value.numpy() for key, value in metrics.items()}
        return {**values, "loss": float(np.mean(losses)), "global_step": int(self._store.step)}

    def predict(
        self,
        input_fn: Function,
        predict_keys: Any = None,
        hooks: Any = None,
        checkpoint_path: str | None = None,
        yield_single_examples: bool = True,
        num_predictions: int | None = None,
    ) -> Iterator[Any]:
        """The predictions, one sample or one batch at a time."""
        self._log_hooks(hooks)
        if checkpoint_path:
            self._store.load(checkpoint_path)
        function = None
        count = 0
        for batch in self._batches(input_fn, ModeKeys.PREDICT):
            function = function or self._pruned(batch, ModeKeys.PREDICT)
            outputs = tf.nest.map_structure(lambda tensor: tensor.numpy(), function(batch))
            if predict_keys and isinstance(outputs, dict):
                outputs = {key: outputs[key] for key in to_list(predict_keys)}
            if not yield_single_examples:
                yield outputs
                continue
            for row in range(len(tf.nest.flatten(outputs)[0])):
                if num_predictions is not None and count >= num_predictions:
                    return
                count += 1
                yield tf.nest.map_structure(lambda array, at=row: array[at], outputs)

    def latest_checkpoint(self) -> str | None:
        """The path of the newest checkpoint."""
        return tf.train.latest_checkpoint(self.model_dir)

    def get_variable_names(self) -> list[str]:
        """The names of all variables, in the order of their creation."""
        return [variable.name for variable in self._store.variables]

    def get_variable_value(self, name: str) -> np.ndarray:
        """The value of the first variable with a name."""
        for variable in self._store.variables:
            if variable.name in (name, f"{name}:0"):
                return variable.numpy()
        raise input_error(f"the model has no variable {name}; it has {self.get_variable_names()}")

    # Data

    def _batches(self, input_fn: Function, mode: str) -> Iterator[Any]:
        params = dict(self.params)
        if (size := self._batch_sizes[mode]) is not None:
            if size % self._replicas:
                raise input_error(f"{self._replicas} replicas do not divide a batch of {size}")
            params["batch_size"] = size // self._replicas
        data = _call(input_fn, mode=mode, params=params, config=self.config, input_context=None)
        if not isinstance(data, tf.data.Dataset):
            raise input_error(f"input_fn returned {type(data).__name__}: return a tf.data.Dataset")
        return iter(data)

    @staticmethod
    def _numbers(steps: int | None) -> Iterator[int]:
        return iter(range(1 << 62 if steps is None else steps))

    def _check_steps(self, steps: int | None) -> None:
        loop = self.config.ipu_run_config.iterations_per_loop
        if steps is not None and steps % loop:
            fits = max(steps - steps % loop, loop)
            raise input_error(
                f"steps={steps} is not a multiple of iterations_per_loop={loop}: take steps={fits}"
            )

    @staticmethod
    def _log_hooks(hooks: Any) -> None:
        if hooks:
            log_once("estimator.hooks", "hooks have no effect: there is no session")

    # The graph

    def _spec(self, element: Any, mode: str) -> Any:
        """Call the `model_fn` on the features and labels of an element."""
        features, labels = _features_and_labels(element)
        spec = _call(
            self._model_fn,
            features=features,
            labels=labels,
            mode=mode,
            params=self.params,
            config=self.config,
        )
        for name in ("training_hooks", "evaluation_hooks", "prediction_hooks"):
            self._log_hooks(getattr(spec, name, None))
        return spec

    def _training_function(self) -> Function:
        """A function that takes batches and makes one step; None if there are no more."""

        @tf.function(autograph=False)
        def step(element: Any) -> Any:
            with self._store.scope([]), optimizers.replicas_in_turn(self._replicas):
                spec = self._spec(element, ModeKeys.TRAIN)
                if spec.train_op is None:
                    raise input_error("model_fn returned no train_op for training")
                if host_call := getattr(spec, "host_call", None):
                    host_call[0](*host_call[1])
            return spec.loss

        def run(batches: Iterator[Any]) -> Any:
            elements = [next(batches, None) for _ in range(self._replicas)]
            if any(element is None for element in elements):
                return None
            return sum(step(element) for element in elements) / self._replicas

        return run

    def _outputs(self, element: Any, mode: str) -> Any:
        """The tensors that an evaluation or a prediction needs."""
        spec = self._spec(element, mode)
        if mode == ModeKeys.PREDICT:
            return spec.predictions
        metrics = dict(spec.eval_metric_ops or {})
        if call := getattr(spec, "eval_metrics", None):
            function, tensors = call
            metrics |= function(**tensors) if isinstance(tensors, dict) else function(*tensors)
        return {**_updates(metrics), "loss": spec.loss}

    def _pruned(self, example: Any, mode: str) -> Function:
        """A function of an element that computes its outputs and nothing else."""
        local: list[Any] = []
        inputs: list[Any] = []
        outputs: list[Any] = []

        def build(*flat: Any) -> Any:
            with self._store.scope(local):
                element = tf.nest.pack_sequence_as(example, flat)
                outputs.append(self._outputs(element, mode))
            inputs.extend(flat)
            return flat[0]

        flat = tf.nest.flatten(example)
        signature = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in flat]
        wrapped = tf.compat.v1.wrap_function(build, signature)
        # What no output needs is not run, as by a session that fetches them.
        pruned = wrapped.prune(inputs, tf.nest.flatten(outputs[0]))

        def run(element: Any) -> Any:
            values = to_list(pruned(*tf.nest.flatten(element)))
            return tf.nest.pack_sequence_as(outputs[0], values)

        run.variables = local  # pyright: ignore[reportFunctionMemberAccess] # kept alive
        return run


class IPUPipelineEstimator(IPUEstimator):
    """Trains and evaluates a `model_fn` that returns stages."""

    def _training_function(self) -> Function:
        function: Function | None = None

        def run(batches: Iterator[Any]) -> Any:
            nonlocal function
            function = function or self._pipeline_function()
            return function(batches)

        return run

    def _stages(self, mode: str) -> IPUPipelineEstimatorSpec:
        return _call(self._model_fn, mode=mode, params=self.params, config=self.config)

    def _pipeline_function(self) -> Function:
        """One batch at a time; gradients are applied after those of all replicas."""
        with self._store.scope([]):
            spec = self._stages(ModeKeys.TRAIN)
        self._log_hooks(spec.training_hooks)
        count = spec.gradient_accumulation_count
        loop = self.config.ipu_run_config.iterations_per_loop
        if loop % count:
            raise input_error(
                f"iterations_per_loop={loop} is not a multiple of"
                f" gradient_accumulation_count={count}: take {loop + count - loop % count}"
            )
        mean = spec.reduction_method is not GradientAccumulationReductionMethod.SUM
        run = PipelineRun(spec.computational_stages)
        divisor = self._replicas * (count if mean else 1)

        @tf.function(autograph=False)
        def step(element: Any, is_last: bool) -> Any:
            with self._store.scope([]):
                # Anew in each trace, so that all its variables are counted.
                traced = self._stages(ModeKeys.TRAIN)
                run.stages = traced.computational_stages
                run.optimizer_function = traced.optimizer_function
                _, operations = run.step(_as_arguments(element))
                if is_last:
                    with tf.control_dependencies(operations):
                        run.apply(1 / divisor)
            return run.output.loss if run.output else None

        seen = 0

        def one(batches: Iterator[Any]) -> Any:
            nonlocal seen
            losses = []
            for _ in range(self._replicas):
                element = next(batches, None)
                if element is None:
                    return None
                seen += 1
                losses.append(step(element, seen % (count * self._replicas) == 0))
            return sum(losses) / len(losses)

        return one

    def _outputs(self, element: Any, mode: str) -> Any:
        spec = self._stages(mode)
        self._log_hooks(spec.evaluation_hooks or spec.prediction_hooks)
        values: Any = _as_arguments(element)
        for stage in spec.computational_stages:
            values = stage(*to_list(values))
        if mode == ModeKeys.PREDICT:
            return values
        metrics = (spec.eval_metrics_fn or dict)(*to_list(values))
        if "loss" not in metrics:
            raise input_error('eval_metrics_fn returned no "loss"')
        return _updates(metrics)


def _features_and_labels(element: Any) -> tuple[Any, Any]:
    if isinstance(element, tuple) and len(element) == 2:
        return element
    if isinstance(element, dict) and element.keys() == {"features", "labels"}:
        return element["features"], element["labels"]
    return element, None


def _as_arguments(element: Any) -> list[Any]:
    return list(element) if isinstance(element, tuple) else [element]


def _call(function: Function, **available: Any) -> Any:
    """Call a function with those of the arguments that it has."""
    parameters = inspect.signature(function).parameters
    return function(**{name: value for name, value in available.items() if name in parameters})


def _updates(metrics: dict[str, Any]) -> dict[str, Any]:
    """A tensor for each metric: of a pair (value, update) the update, which returns the value."""
    return {
        name: value[1] if isinstance(value, tuple) else value for name, value in metrics.items()
    }


class IPULoggingTensorHook:
    """Logs tensors during training: no effect, because there is no session."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.arguments = args, kwargs

    def log(self, tensors: Any) -> Any:
        """An operation without effect."""
        log_once("IPULoggingTensorHook", "IPULoggingTensorHook has no effect: log the loss")
        return tf.no_op()


PROVIDES = {
    "ipu.ipu_estimator": (IPUEstimator, IPUEstimatorSpec),
    "ipu.ipu_pipeline_estimator": (IPUPipelineEstimator, IPUPipelineEstimatorSpec),
    "ipu.ipu_run_config": (IPURunConfig, RunConfig),
    "ipu.ipu_session_run_hooks": (IPULoggingTensorHook,),
}
