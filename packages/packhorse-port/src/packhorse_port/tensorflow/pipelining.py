"""`pipelining_ops.pipeline`: stages one after the other, with the results of a pipeline.

    pipeline([stage1, stage2], gradient_accumulation_count=8, repeat_count=2, inputs=[rate],
             infeed_queue=infeed, outfeed_queue=outfeed, optimizer_function=optimizer)

Each repetition runs the stages `gradient_accumulation_count` times, each time on the infeed's next
element. With an `optimizer_function` gradients are accumulated and applied once at its end: added
(the SDK's default), or averaged with MEAN or RUNNING_MEAN, which differ in rounding only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from packhorse_port.notices import input_error, log_once
from packhorse_port.tensorflow.extensions import (
    IGNORED,
    GradientAccumulationReductionMethod,
    PipelineSchedule,
    RecomputationMode,
)
from packhorse_port.tensorflow.loops import repeat, to_list
from packhorse_port.tensorflow.queues import IPUInfeedQueue, IPUOutfeedQueue, body_arguments

Function = Callable[..., Any]


class PipelineStageOptions:
    """Options of the IPU's compiler for a stage; no effect."""

    def __init__(
        self,
        convolution_options: dict[str, Any] | None = None,
        matmul_options: dict[str, Any] | None = None,
        slice_options: dict[str, Any] | None = None,
    ) -> None:
        options = {
            "convolution_options": convolution_options,
            "matmul_options": matmul_options,
            "slice_options": slice_options,
        }
        for name, value in options.items():
            if value is not None and not isinstance(value, dict):
                raise input_error(f"PipelineStageOptions: {name} is a dictionary, not {value!r}")
        self.options = {name: dict(value or {}) for name, value in options.items()}


class OptimizerFunctionOutput:
    """The optimizer of a pipeline and the loss that it minimizes."""

    def __init__(
        self,
        opt: Any,
        loss: Any,
        compute_gradients_args: Sequence[Any] = (),
        compute_gradients_kwargs: dict[str, Any] | None = None,
        apply_gradients_args: Sequence[Any] = (),
        apply_gradients_kwargs: dict[str, Any] | None = None,
        variables: Sequence[Any] = (),
        tape: Any = None,
        gradient_capture_context: Any = None,
        captured_gradient_outfeed: Any = None,
    ) -> None:
        if gradient_capture_context is not None or captured_gradient_outfeed is not None:
            raise input_error("captured gradients are not provided here: enqueue what you need")
        self.opt = opt
        self.loss = loss
        self.compute_gradients_args = tuple(compute_gradients_args)
        self.compute_gradients_kwargs = dict(compute_gradients_kwargs or {})
        self.apply_gradients_args = tuple(apply_gradients_args)
        self.apply_gradients_kwargs = dict(apply_gradients_kwargs or {})
        self.variables = list(variables)
        self.tape = tape


class Accumulator:
    """Sums of tensors over the iterations of a loop, in variables that begin at zero."""

    def __init__(self, tensors: Sequence[Any]) -> None:
        self.variables = [
            lifted_variable(lambda like=tensor: tf.zeros(like.shape, like.dtype), tensor.dtype)
            for tensor in tensors
        ]

    def add(self, tensors: Sequence[Any]) -> list[Any]:
        """Add one tensor to each sum; returns the operations."""
        return [
            variable.assign_add(tensor, read_value=False)
            for variable, tensor in zip(self.variables, tensors, strict=True)
        ]

    def read(self) -> list[Any]:
        return [variable.read_value() for variable in self.variables]

    def reset(self) -> list[Any]:
        return [
            variable.assign(tf.zeros_like(variable), read_value=False)
            for variable in self.variables
        ]


def lifted_variable(initial_value: Any, dtype: Any) -> Any:
    """A variable outside of all functions and loops that are being traced.

    `tf.function` traces a function twice if it creates variables, and forbids new ones the second
    time. So this one is not created by `tf.Variable`, which it watches; and the graph that uses it
    keeps it alive, as a function holds no reference to its variables.
    """
    graph = tf.compat.v1.get_default_graph()
    while getattr(graph.outer_graph, "outer_graph", None) is not None:
        graph = graph.outer_graph
    with tf.init_scope():
        variable = ResourceVariable(initial_value, trainable=False, dtype=dtype)
    graph.add_to_collection("lifted_variables", variable)
    return variable


class PipelineRun:
    """The stages of a pipeline, and what their trace finds out: loss, variables, sums."""

    def __init__(
        self,
        stages: Sequence[Function],
        optimizer_function: Function | None = None,
        infeed: IPUInfeedQueue | None = None,
        outfeed: IPUOutfeedQueue | None = None,
        outfeed_loss: bool = False,
        outfeed_mask: Sequence[bool] | None = None,
        accumulate_outfeed: bool = False,
    ) -> None:
        self.stages = stages
        self.optimizer_function = optimizer_function
        self.infeed = infeed
        self.outfeed = outfeed
        self.outfeed_loss = outfeed_loss
        self.outfeed_mask = outfeed_mask
        self.accumulate_outfeed = accumulate_outfeed
        self.output: OptimizerFunctionOutput | None = None
        self.variables: list[Any] = []
        self.gradients: Accumulator | None = None
        self.results: Accumulator | None = None
        self.structure: Any = None  # of the results

    def batch(self, inputs: Sequence[Any]) -> list[Any]:
        """All stages on one batch, its results to the outfeed; returns the operations to run."""
        args, kwargs = body_arguments(self.infeed._dequeue()) if self.infeed else ([], {})
        values, operations = self.step([*inputs, *args], **kwargs)
        if isinstance(values, tf.Operation):
            return [values, *operations]
        results = values if isinstance(values, dict | tf.Tensor) else to_list(values)
        if self.output is not None:
            results = self.chosen(to_list(values))
        return operations + self.enqueue(results)

    def step(self, args: Sequence[Any], **kwargs: Any) -> tuple[Any, list[Any]]:
        """(results of the last stage, operations that add the gradients to their sums)."""
        with tf.GradientTape() as tape:
            values: Any = self.stages[0](*args, **kwargs)
            for stage in self.stages[1:]:
                values = stage(*to_list(values))
            if self.optimizer_function is not None:
                outputs = [] if isinstance(values, tf.Operation) else to_list(values)
                self.output = self.optimizer_function(*outputs)
        return values, self.accumulate(tape)

    def chosen(self, outputs: list[Any]) -> Any:
        """What a training pipeline enqueues of the last stage's outputs."""
        if self.outfeed_loss and self.output is not None:
            return self.output.loss
        mask = self.outfeed_mask or [False for _ in outputs]
        if len(mask) != len(outputs):
            raise input_error(
                f"outfeed_mask has {len(mask)} elements for {len(outputs)} outputs of the last"
                " stage: give one for each"
            )
        return [output for output, hidden in zip(outputs, mask, strict=True) if not hidden]

    def enqueue(self, results: Any) -> list[Any]:
        flat = [tf.convert_to_tensor(tensor) for tensor in tf.nest.flatten(results)]
        if not flat:
            return []
        if self.outfeed is None:
            raise input_error(
                f"the last stage returns {len(flat)} tensors and there is no outfeed_queue:"
                " pass an IPUOutfeedQueue"
            )
        if not self.accumulate_outfeed:
            operation = self.outfeed.enqueue(results)
            return [] if operation is None else [operation]
        self.structure = results
        self.results = self.results or Accumulator(flat)
        return self.results.add(flat)

    def accumulate(self, tape: Any) -> list[Any]:
        """Add one batch's gradients to their sums."""
        output = self.output
        if output is None:
            return []
        if isinstance(output.opt, tf.compat.v1.train.Optimizer):
            keywords = dict(output.compute_gradients_kwargs)
            if not output.compute_gradients_args:
                keywords.setdefault("var_list", list(tape.watched_variables()))
            pairs = output.opt.compute_gradients(
                output.loss, *output.compute_gradients_args, **keywords
            )
        else:
            source = output.tape or tape
            variables = output.variables or list(source.watched_variables())
            pairs = list(zip(source.gradient(output.loss, variables), variables, strict=True))
        pairs = [(gradient, variable) for gradient, variable in pairs if gradient is not None]
        if not pairs:
            raise input_error("the pipeline's loss depends on no trainable variable")
        gradients = [tf.convert_to_tensor(gradient) for gradient, _ in pairs]
        self.variables = [variable for _, variable in pairs]
        self.gradients = self.gradients or Accumulator(gradients)
        return self.gradients.add(gradients)

    def update(self, count: Any, mean: bool) -> list[Any]:
        """Apply the accumulated gradients and enqueue the accumulated results."""
        operations = self.apply(1 / tf.cast(count, tf.float32) if mean else tf.constant(1.0))
        if self.results is not None and self.outfeed is not None:
            values = self.results.read()
            with tf.control_dependencies(values):
                operations += self.results.reset()
            structure = self.structure
            operations.append(self.outfeed.enqueue(tf.nest.pack_sequence_as(structure, values)))
        return operations

    def apply(self, scale: Any) -> list[Any]:
        """Apply the sums of the gradients times `scale`, and reset them."""
        if self.output is None or self.gradients is None:
            return []
        gradients = [tensor * tf.cast(scale, tensor.dtype) for tensor in self.gradients.read()]
        with tf.control_dependencies(gradients):
            operations = self.gradients.reset()
        applied = self.output.opt.apply_gradients(
            list(zip(gradients, self.variables, strict=True)),
            *self.output.apply_gradients_args,
            **self.output.apply_gradients_kwargs,
        )
        # Keras returns its counter.
        return [*operations, applied] if isinstance(applied, tf.Operation) else operations


def pipeline(
    computational_stages: Sequence[Function],
    gradient_accumulation_count: Any = None,
    gradient_accumulation_dtype: Any = None,
    gradient_accumulation_for_captured_grads: bool = True,
    repeat_count: Any = 1,
    batch_serialization_iterations: int = 1,
    inputs: Any = None,
    infeed_queue: IPUInfeedQueue | None = None,
    outfeed_queue: IPUOutfeedQueue | None = None,
    optimizer_function: Function | None = None,
    device_mapping: Sequence[int] | None = None,
    pipeline_schedule: PipelineSchedule | None = None,
    recomputation_mode: RecomputationMode | None = None,
    forward_propagation_stages_poplar_options: Any = None,
    backward_propagation_stages_poplar_options: Any = None,
    weight_update_poplar_options: Any = None,
    offload_weight_update_variables: bool | None = None,
    replicated_optimizer_state_sharding: bool = False,
    offload_activations: bool | None = None,
    offload_gradient_accumulation_buffers: bool | None = None,
    replicated_weight_sharding: bool | None = None,
    offload_weights: bool | None = None,
    continuous_weight_updates: bool = False,
    outfeed_loss: bool = False,
    accumulate_outfeed: bool = False,
    accumulate_outfeed_dtype: Any = None,
    outfeed_mask: Sequence[bool] | None = None,
    reduction_method: Any = GradientAccumulationReductionMethod.SUM,
    name: str | None = None,
) -> Any:
    """Run stages over batches; results go to the outfeed, the operation is returned."""
    ignored = {key: value for key, value in locals().items() if key in IGNORED and key != "name"}
    for key, value in ignored.items():
        is_default = value in (None, False) or key == "gradient_accumulation_for_captured_grads"
        if not is_default:
            log_once(f"pipeline.{key}", f"{key} has no effect: {IGNORED[key]}")
    if gradient_accumulation_count is None:
        raise input_error("pipeline: set gradient_accumulation_count")
    if device_mapping is not None and len(device_mapping) != len(computational_stages):
        raise input_error(
            f"device_mapping has {len(device_mapping)} elements for"
            f" {len(computational_stages)} stages: give an IPU for each"
        )
    if outfeed_loss and outfeed_mask:
        raise input_error("set one of outfeed_loss and outfeed_mask, not both")
    if optimizer_function is None and (outfeed_loss or outfeed_mask):
        raise input_error("outfeed_loss and outfeed_mask need an optimizer_function")
    if accumulate_outfeed and outfeed_queue is None:
        raise input_error("accumulate_outfeed needs an outfeed_queue")
    if tf.executing_eagerly():
        raise input_error("call pipeline in a tf.function, or in ipu_compiler.compile")
    method = GradientAccumulationReductionMethod.parse(reduction_method)
    mean = method is not GradientAccumulationReductionMethod.SUM
    run = PipelineRun(
        computational_stages,
        optimizer_function,
        infeed_queue,
        outfeed_queue,
        outfeed_loss,
        outfeed_mask,
        accumulate_outfeed,
    )
    values = to_list(inputs)
    count = gradient_accumulation_count

    def repetition() -> Any:
        batches = repeat(count, lambda: tf.group(*run.batch(values)))
        with tf.control_dependencies([batches]):
            return tf.group(*run.update(count, mean))

    return repeat(repeat_count, repetition)


def recomputation_checkpoint(tensors: Any, name: str | None = None) -> Any:
    """The tensors: nothing is recomputed, and so nothing needs to be kept for it."""
    return tf.nest.map_structure(tf.identity, tensors)


PROVIDES = {
    "ipu.ops.pipelining_ops": (
        PipelineSchedule,
        RecomputationMode,
        PipelineStageOptions,
        OptimizerFunctionOutput,
        pipeline,
        recomputation_checkpoint,
    ),
}
