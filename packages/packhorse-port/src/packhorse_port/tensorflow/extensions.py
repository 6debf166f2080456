"""What `tensorflow.keras.ipu` adds to a model created under `IPUStrategy`: options and stages.

    with PipelineStage(0):
        x = Dense(32)(inputs)
    model.set_pipelining_options(gradient_accumulation_steps_per_replica=8)

Names, arguments and defaults are the SDK's (3.3). Gradient accumulation and stages have an effect;
options of the IPU's memory and program are accepted and logged once; one that the SDK does not have
is an error that names the nearest.

Stages assign layers to IPUs. Here all layers run on one device, one after the other, with the
results of a pipeline. But the number of stages determines how many IPUs a replica takes, and so how
many replicas there are; and a layer without a stage, or more stages than IPUs, is an error as in
the SDK. Keras 3 has no place for stages, so they are stored on the layers, and the two methods that
see every layer are replaced while a scope is open. TensorFlow is imported when a scope opens.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from packhorse_port.names import nearest
from packhorse_port.notices import input_error, log_once


class PipelineSchedule(Enum):
    """In which order the stages of a pipeline run; here always sequentially."""

    Grouped = 0
    Interleaved = 1
    Sequential = 2


class RecomputationMode(Enum):
    """What a pipeline recomputes in the backward pass; here nothing."""

    Auto = 0
    RecomputeThenBackpropagate = 1
    RecomputeAndBackpropagateInterleaved = 2


class IPUOutfeedMode(Enum):
    """What an outfeed's `dequeue` returns: all elements, or the last one."""

    ALL = "all"
    LAST = "get_last"


class GradientAccumulationReductionMethod(Enum):
    """How the gradients of several steps are combined."""

    SUM = 0
    MEAN = 1
    RUNNING_MEAN = 2

    @classmethod
    def parse(cls, method: GradientAccumulationReductionMethod | str) -> Any:
        """A method by itself or by its name in any case."""
        if isinstance(method, cls):
            return method
        if isinstance(method, str) and method.upper() in cls.__members__:
            return cls[method.upper()]
        names = ", ".join(repr(name.lower()) for name in cls.__members__)
        raise input_error(
            f"gradient_accumulation_reduction_method is one of {names}, not {method!r}"
        )


# Attributes of a layer
CREATED_IN = "_ipu_stage"  # the stage it was created in
CALLED_IN = "_ipu_stages"  # the stages it was called in, by node index


@dataclass
class LayerPipelineStageAssignment:
    """One call of a layer and its stage, None if it has none yet."""

    layer: Any
    node_index: int = 0
    pipeline_stage: int | None = None

    @property
    def inbound_layers(self) -> list[Any]:
        """The layers whose outputs this call takes."""
        node = self.layer._inbound_nodes[self.node_index]
        return [parent.operation for parent in node.parent_nodes]


class PipelineStage:
    """A scope: layers created or called inside it belong to a stage."""

    def __init__(self, stage: int) -> None:
        if not isinstance(stage, int) or stage < 0:
            raise input_error(f"PipelineStage({stage!r}): stages are numbered 0, 1, 2, …")
        self.stage = stage

    def __enter__(self) -> PipelineStage:
        import keras
        import tensorflow as tf

        from packhorse_port.tensorflow.strategy import IPUStrategy

        strategy = tf.distribute.get_strategy()
        if not isinstance(strategy, IPUStrategy):
            raise input_error(
                f"PipelineStage({self.stage}) is outside of an IPUStrategy:"
                " build the model under `with strategy.scope():`"
            )
        if strategy.stage is not None:
            raise input_error(
                f"PipelineStage({self.stage}) stands within PipelineStage({strategy.stage});"
                " put one after the other"
            )
        self.strategy = strategy
        self.layer = keras.layers.Layer
        self.before = self.layer.__init__, self.layer.__call__
        strategy.stage = self.stage
        self.layer.__init__, self.layer.__call__ = _recording(*self.before, self.stage)
        return self

    def __exit__(self, *_: object) -> None:
        self.layer.__init__, self.layer.__call__ = self.before
        self.strategy.stage = None


def _recording(
    init: Callable[..., None], call: Callable[..., Any], stage: int
) -> tuple[Callable[..., None], Callable[..., Any]]:
    """`__init__` and `__call__` of a layer that record the stage."""

    def __init__(layer: Any, *args: Any, **kwargs: Any) -> None:
        init(layer, *args, **kwargs)
        object.__setattr__(layer, CREATED_IN, stage)  # past Keras, which would track it

    def __call__(layer: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = call(layer, *args, **kwargs)
        # A call appends a node; a layer called on values instead of symbols has none.
        node_index = max(len(layer._inbound_nodes) - 1, 0)
        stages = {**getattr(layer, CALLED_IN, {}), node_index: stage}
        object.__setattr__(layer, CALLED_IN, stages)
        return outputs

    return __init__, __call__


def _stage(layer: Any, node: int) -> int | None:
    return getattr(layer, CALLED_IN, {}).get(node, getattr(layer, CREATED_IN, None))


def _calls(model: Any) -> Iterator[tuple[Any, int]]:
    """(layer, node index) of each call of a layer, in the order in which they run."""
    import keras

    if isinstance(model, keras.Sequential) or not hasattr(model, "_nodes_by_depth"):
        yield from ((layer, 0) for layer in model.layers)
        return
    # Keras counts depth from the outputs, so the inputs are deepest.
    for depth in sorted(model._nodes_by_depth, reverse=True):
        for node in model._nodes_by_depth[depth]:
            layer = node.operation
            if isinstance(layer, keras.layers.Layer) and not node.is_input:
                yield layer, layer._inbound_nodes.index(node)


def recorded_assignments(model: Any) -> list[LayerPipelineStageAssignment]:
    """The stages that were recorded on the model's layers."""
    return [
        LayerPipelineStageAssignment(layer, node, _stage(layer, node))
        for layer, node in _calls(model)
    ]


def parse_assignments(model: Any, stages: Sequence[Any]) -> list[LayerPipelineStageAssignment]:
    """Assignments from what a script passes: a number per layer, or assignments."""
    known = recorded_assignments(model)
    if len(stages) != len(known):
        raise input_error(
            f"set_pipeline_stage_assignment got {len(stages)} stages for {len(known)} layers"
            f" ({', '.join(item.layer.name for item in known)}): give one for each"
        )
    return [
        stage
        if isinstance(stage, LayerPipelineStageAssignment)
        else LayerPipelineStageAssignment(item.layer, item.node_index, stage)
        for stage, item in zip(stages, known, strict=True)
    ]


def count_stages(assignments: Sequence[LayerPipelineStageAssignment]) -> int:
    """How many stages there are; raises unless all layers have one, or none has (0)."""
    stages = {item.pipeline_stage for item in assignments if item.pipeline_stage is not None}
    if not stages:
        return 0
    for item in assignments:
        if item.pipeline_stage is None:
            raise input_error(
                f"layer {item.layer.name} has no pipeline stage and others have:"
                " call it under a PipelineStage too"
            )
    missing = sorted(set(range(max(stages))) - stages)
    if missing:
        raise input_error(f"no layer is in pipeline stage {missing[0]}: number them 0, 1, 2, …")
    return len(stages)


# Arguments of pipelining_ops.pipeline and of the accumulating optimizer, without effect here, and
# the reason that is logged; an empty one is not logged.
MEMORY = "there is one memory"
IGNORED = {
    "offload_weight_update_variables": MEMORY,
    "replicated_optimizer_state_sharding": MEMORY,
    "offload_activations": MEMORY,
    "offload_gradient_accumulation_buffers": MEMORY,
    "replicated_weight_sharding": MEMORY,
    "offload_weights": MEMORY,
    "recomputation_mode": "nothing is recomputed",
    "continuous_weight_updates": "weights change after each accumulation",
    "forward_propagation_stages_poplar_options": "it is for the IPU's compiler",
    "backward_propagation_stages_poplar_options": "it is for the IPU's compiler",
    "weight_update_poplar_options": "it is for the IPU's compiler",
    "gradient_accumulation_dtype": "gradients are accumulated in their own type",
    "gradient_accumulation_for_captured_grads": "gradients are not captured",
    "accumulate_outfeed_dtype": "results are accumulated in their own type",
    "dtype": "gradients are accumulated in their own type",
    "use_v2_gradient_accumulation_optimizer": "Keras's optimizer accumulates",
    "verify_usage": "Keras's optimizer accumulates",
    "name": "",
}
# Arguments with an effect, from which an error about an unknown one names the nearest.
ACCUMULATION = ("gradient_accumulation_steps_per_replica", "gradient_accumulation_reduction_method")
PIPELINING = (*ACCUMULATION, "device_mapping", "accumulate_outfeed", "pipeline_schedule")


@dataclass
class ModelExtension:
    """The IPU options of one model."""

    steps: int | None = None  # per update of the weights, without a pipeline
    pipeline_steps: int | None = None  # the same with a pipeline
    reduction: str = "sum"
    schedule: PipelineSchedule = PipelineSchedule.Grouped
    device_mapping: Sequence[int] = ()
    stages: list[LayerPipelineStageAssignment] | None = None
    pipelining: bool = False
    asynchronous: bool = False  # callbacks are called after each step
    built: tuple[int, int, str] | None = None  # replicas, steps, reduction of the train function


def extension(model: Any) -> ModelExtension:
    """The IPU options of a model; stored past Keras's `__setattr__`, which would track them."""
    if "_ipu_extension" not in vars(model):
        object.__setattr__(model, "_ipu_extension", ModelExtension())
    return vars(model)["_ipu_extension"]


def assignments(model: Any) -> list[LayerPipelineStageAssignment]:
    """The stages of the model's layers: those that were set, else those recorded on them."""
    return extension(model).stages or recorded_assignments(model)


def set_pipelining_options(
    self: Any,
    gradient_accumulation_steps_per_replica: int | None = None,
    device_mapping: Sequence[int] | None = None,
    accumulate_outfeed: bool | None = None,
    gradient_accumulation_reduction_method: Any = "sum",
    **pipelining_kwargs: Any,
) -> None:
    """Set how a pipelined model is trained."""
    options = _require_ipu_model(self, "set_pipelining_options")
    method = _reduction(gradient_accumulation_reduction_method, pipelining_kwargs)
    schedule = pipelining_kwargs.pop("pipeline_schedule", None) or options.schedule
    _log_ignored("set_pipelining_options", pipelining_kwargs, PIPELINING)
    if not isinstance(schedule, PipelineSchedule):
        names = ", ".join(f"PipelineSchedule.{choice.name}" for choice in PipelineSchedule)
        raise input_error(f"pipeline_schedule is one of {names}, not {schedule!r}")
    steps = _check_steps(gradient_accumulation_steps_per_replica)
    options.pipelining = True
    options.schedule = schedule
    options.reduction = method
    options.pipeline_steps = steps or options.pipeline_steps
    options.device_mapping = device_mapping or options.device_mapping
    if accumulate_outfeed:
        log_once("accumulate_outfeed", "accumulate_outfeed has no effect: there is no outfeed")


def set_gradient_accumulation_options(
    self: Any,
    gradient_accumulation_steps_per_replica: int | None = None,
    gradient_accumulation_reduction_method: Any = "sum",
    **gradient_accumulation_optimizer_kwargs: Any,
) -> None:
    """Set over how many steps gradients are accumulated without a pipeline."""
    options = _require_ipu_model(self, "set_gradient_accumulation_options")
    kwargs = gradient_accumulation_optimizer_kwargs
    options.reduction = _reduction(gradient_accumulation_reduction_method, kwargs)
    _log_ignored("set_gradient_accumulation_options", kwargs, ACCUMULATION)
    options.steps = _check_steps(gradient_accumulation_steps_per_replica) or options.steps


def set_asynchronous_callbacks(self: Any, asynchronous: bool = False) -> None:
    """Whether callbacks are called after each step instead of each execution."""
    _require_ipu_model(self, "set_asynchronous_callbacks").asynchronous = bool(asynchronous)


def set_infeed_queue_options(self: Any, **kwargs: Any) -> None:
    """How data is queued for the IPU; no effect."""
    _require_ipu_model(self, "set_infeed_queue_options")
    log_once("set_infeed_queue_options", "set_infeed_queue_options has no effect: no queue is run")


def set_outfeed_queue_options(self: Any, **kwargs: Any) -> None:
    """How results are queued on the IPU; no effect."""
    _require_ipu_model(self, "set_outfeed_queue_options")
    text = "set_outfeed_queue_options has no effect: no queue is run"
    log_once("set_outfeed_queue_options", text)


def get_pipeline_stage_assignment(self: Any) -> list[LayerPipelineStageAssignment]:
    """The stage of each call of a layer, to be changed and set again."""
    _require_ipu_model(self, "get_pipeline_stage_assignment")
    return assignments(self)


def set_pipeline_stage_assignment(self: Any, pipeline_stage_assignment: Sequence[Any]) -> None:
    """Set the stage of each layer: numbers, or what `get_pipeline_stage_assignment` returned."""
    options = _require_ipu_model(self, "set_pipeline_stage_assignment")
    stages = parse_assignments(self, pipeline_stage_assignment)
    count_stages(stages)  # raises if they are not valid
    options.stages = stages


def reset_pipeline_stage_assignment(self: Any) -> None:
    """Clear all stages that were set."""
    _require_ipu_model(self, "reset_pipeline_stage_assignment").stages = None


def print_pipeline_stage_assignment_summary(
    self: Any, line_length: int | None = None, print_fn: Callable[[str], Any] | None = None
) -> None:
    """Print a line per layer with its stage."""
    _require_ipu_model(self, "print_pipeline_stage_assignment_summary")
    print_line = print_fn or (lambda line: sys.stdout.write(f"{line}\n"))
    print_line(f'Model: "{self.name}"')
    for item in assignments(self):
        print_line(f"{item.layer.name:<{(line_length or 60) - 10}} {item.pipeline_stage}")


def export_for_ipu_serving(self: Any, *args: Any, **kwargs: Any) -> None:
    """Not supported: it exports an IPU's program."""
    raise input_error("export_for_ipu_serving writes an IPU's program: use model.export(folder)")


METHODS = (
    set_pipelining_options,
    set_gradient_accumulation_options,
    set_asynchronous_callbacks,
    set_infeed_queue_options,
    set_outfeed_queue_options,
    get_pipeline_stage_assignment,
    set_pipeline_stage_assignment,
    reset_pipeline_stage_assignment,
    print_pipeline_stage_assignment_summary,
    export_for_ipu_serving,
)


def _require_ipu_model(model: Any, method: str) -> ModelExtension:
    """The IPU options of a model; raises if it was not created under an `IPUStrategy`."""
    from packhorse_port.tensorflow.strategy import strategy_of

    if strategy_of(model) is None:
        raise input_error(
            f"model.{method} is for models of an IPU: make the model under `with strategy.scope():`"
        )
    return extension(model)


def _check_steps(steps: Any) -> int | None:
    if steps is not None and (not isinstance(steps, int) or steps < 1):
        raise input_error(f"gradient_accumulation_steps_per_replica is 1 or more, not {steps!r}")
    return steps


def _reduction(method: Any, kwargs: dict[str, Any]) -> str:
    """Either "sum" or "mean"; takes older SDKs' names of the argument out of `kwargs`.

    A running mean differs from a mean in rounding only: it exists so that half precision does not
    overflow.
    """
    method = kwargs.pop("reduction_method", method)
    if kwargs.pop("experimental_normalize_gradients", False):
        method = "mean"
    parsed = GradientAccumulationReductionMethod.parse(method)
    return "sum" if parsed is GradientAccumulationReductionMethod.SUM else "mean"


def _log_ignored(method: str, arguments: dict[str, Any], known: Sequence[str]) -> None:
    """Log arguments without effect; raises for those that the SDK does not have."""
    for name, value in arguments.items():
        if name not in IGNORED:
            near = nearest(name, known) or nearest(name, IGNORED)
            raise input_error(f"{method} has no argument {name}{near}")
        if value is not None and IGNORED[name]:
            log_once(f"{method}.{name}", f"{name} has no effect: {IGNORED[name]}")
