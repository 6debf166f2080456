"""What `tensorflow.keras.ipu` adds to a model made under `IPUStrategy`: options and stages.

    model.set_pipelining_options(gradient_accumulation_steps_per_replica=8)

The names, arguments and defaults are the SDK's (3.3). Accumulation and the stages have an effect;
options of the IPU's memory and program are taken and said once; one that the SDK does not have is
an error that names the nearest.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from packhorse_port.names import nearest
from packhorse_port.notices import say_once
from packhorse_port.tensorflow import stages
from packhorse_port.tensorflow.refusal import refuse


class PipelineSchedule(Enum):
    """In which order the stages of a pipeline run; here always one after the other."""

    Grouped = 0
    Interleaved = 1
    Sequential = 2


class RecomputationMode(Enum):
    """What a pipeline computes again on its way back."""

    Auto = 0
    RecomputeThenBackpropagate = 1
    RecomputeAndBackpropagateInterleaved = 2


class GradientAccumulationReductionMethod(Enum):
    """What becomes of the gradients of several steps."""

    SUM = 0
    MEAN = 1
    RUNNING_MEAN = 2

    @classmethod
    def parse(cls, method: GradientAccumulationReductionMethod | str) -> Any:
        """The method itself, or by its name in any case."""
        if isinstance(method, cls):
            return method
        if isinstance(method, str) and method.upper() in cls.__members__:
            return cls[method.upper()]
        names = ", ".join(repr(name.lower()) for name in cls.__members__)
        raise refuse(f"gradient_accumulation_reduction_method is one of {names}, not {method!r}")


# Arguments of pipelining_ops.pipeline and of the accumulating optimizer, without effect here.
MEMORY = "there is one memory"
IGNORED = {
    "offload_weight_update_variables": MEMORY,
    "replicated_optimizer_state_sharding": MEMORY,
    "offload_activations": MEMORY,
    "offload_gradient_accumulation_buffers": MEMORY,
    "replicated_weight_sharding": MEMORY,
    "offload_weights": MEMORY,
    "recomputation_mode": "nothing is computed again",
    "continuous_weight_updates": "weights change after each accumulation",
    "forward_propagation_stages_poplar_options": "it is for the IPU's compiler",
    "backward_propagation_stages_poplar_options": "it is for the IPU's compiler",
    "weight_update_poplar_options": "it is for the IPU's compiler",
    "gradient_accumulation_dtype": "gradients are accumulated in their own type",
    "gradient_accumulation_for_captured_grads": "gradients are not captured",
    "accumulate_outfeed_dtype": "there is no outfeed",
    "dtype": "gradients are accumulated in their own type",
    "use_v2_gradient_accumulation_optimizer": "Keras's optimizer accumulates",
    "verify_usage": "Keras's optimizer accumulates",
    "name": "",
}
SET = ("gradient_accumulation_steps_per_replica", "gradient_accumulation_reduction_method")
PIPELINING = (*SET, "device_mapping", "accumulate_outfeed", "pipeline_schedule")


@dataclass
class Extension:
    """What a script has set for one model."""

    steps: int | None = None  # accumulated without a pipeline
    pipeline_steps: int | None = None  # and with one
    reduction: str = "sum"
    schedule: PipelineSchedule = PipelineSchedule.Grouped
    device_mapping: Sequence[int] = ()
    stages: list[stages.LayerPipelineStageAssignment] | None = None
    pipelining: bool = False
    built: tuple[int, int, str] | None = None  # replicas, steps, reduction of the train function


def extension(model: Any) -> Extension:
    """What was set for the model; kept beside Keras's own attributes, which it would track."""
    if "_ipu_extension" not in vars(model):
        object.__setattr__(model, "_ipu_extension", Extension())
    return vars(model)["_ipu_extension"]


def assignments(model: Any) -> list[stages.LayerPipelineStageAssignment]:
    """The stages of the model's layers: those that were set, else what the layers carry."""
    return extension(model).stages or stages.assigned(model)


def set_pipelining_options(
    self: Any,
    gradient_accumulation_steps_per_replica: int | None = None,
    device_mapping: Sequence[int] | None = None,
    accumulate_outfeed: bool | None = None,
    gradient_accumulation_reduction_method: Any = "sum",
    **pipelining_kwargs: Any,
) -> None:
    """How a pipelined model is trained."""
    known = _own(self, "set_pipelining_options")
    method = _reduction(gradient_accumulation_reduction_method, pipelining_kwargs)
    schedule = pipelining_kwargs.pop("pipeline_schedule", None) or known.schedule
    _take("set_pipelining_options", pipelining_kwargs, PIPELINING)
    if not isinstance(schedule, PipelineSchedule):
        names = ", ".join(f"PipelineSchedule.{each.name}" for each in PipelineSchedule)
        raise refuse(f"pipeline_schedule is one of {names}, not {schedule!r}")
    known.pipelining, known.schedule, known.reduction = True, schedule, method
    known.pipeline_steps = _steps(gradient_accumulation_steps_per_replica) or known.pipeline_steps
    known.device_mapping = device_mapping or known.device_mapping
    if accumulate_outfeed:
        say_once("accumulate_outfeed", "accumulate_outfeed has no effect: there is no outfeed")


def set_gradient_accumulation_options(
    self: Any,
    gradient_accumulation_steps_per_replica: int | None = None,
    gradient_accumulation_reduction_method: Any = "sum",
    **gradient_accumulation_optimizer_kwargs: Any,
) -> None:
    """Over how many steps gradients are accumulated, where there is no pipeline."""
    known = _own(self, "set_gradient_accumulation_options")
    kwargs = gradient_accumulation_optimizer_kwargs
    known.reduction = _reduction(gradient_accumulation_reduction_method, kwargs)
    _take("set_gradient_accumulation_options", kwargs, SET)
    known.steps = _steps(gradient_accumulation_steps_per_replica) or known.steps


def set_asynchronous_callbacks(self: Any, asynchronous: bool = False) -> None:
    """Whether callbacks hear of each step within an execution: here they do not."""
    _own(self, "set_asynchronous_callbacks")
    if asynchronous:
        text = "callbacks are called after each execution of steps_per_execution steps"
        say_once("set_asynchronous_callbacks", f"set_asynchronous_callbacks has no effect: {text}")


def set_infeed_queue_options(self: Any, **kwargs: Any) -> None:
    """How data is queued for the IPU."""
    _own(self, "set_infeed_queue_options")
    say_once("set_infeed_queue_options", "set_infeed_queue_options has no effect: no queue is run")


def set_outfeed_queue_options(self: Any, **kwargs: Any) -> None:
    """How results are queued on the IPU."""
    _own(self, "set_outfeed_queue_options")
    text = "set_outfeed_queue_options has no effect: no queue is run"
    say_once("set_outfeed_queue_options", text)


def get_pipeline_stage_assignment(self: Any) -> list[stages.LayerPipelineStageAssignment]:
    """The stage of each call of a layer, to be changed and set again."""
    _own(self, "get_pipeline_stage_assignment")
    return assignments(self)


def set_pipeline_stage_assignment(self: Any, pipeline_stage_assignment: Sequence[Any]) -> None:
    """Give each layer its stage: numbers, or what `get_pipeline_stage_assignment` gave."""
    known = _own(self, "set_pipeline_stage_assignment")
    given = stages.listed(self, pipeline_stage_assignment)
    stages.count(given)
    known.stages = given


def reset_pipeline_stage_assignment(self: Any) -> None:
    """Forget all stages that were set."""
    _own(self, "reset_pipeline_stage_assignment").stages = None


def print_pipeline_stage_assignment_summary(
    self: Any, line_length: int | None = None, print_fn: Callable[[str], Any] | None = None
) -> None:
    """A line for each layer and its stage."""
    _own(self, "print_pipeline_stage_assignment_summary")
    say = print_fn or (lambda line: sys.stdout.write(f"{line}\n"))
    say(f'Model: "{self.name}"')
    for each in assignments(self):
        say(f"{each.layer.name:<{(line_length or 60) - 10}} {each.pipeline_stage}")


def export_for_ipu_serving(self: Any, *args: Any, **kwargs: Any) -> None:
    """Not here: what is exported is an IPU's program."""
    raise refuse("export_for_ipu_serving writes an IPU's program: use model.export(folder)")


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


def _own(model: Any, method: str) -> Extension:
    from packhorse_port.tensorflow.strategy import strategy_of

    if strategy_of(model) is None:
        raise refuse(
            f"model.{method} is for models of an IPU: make the model under `with strategy.scope():`"
        )
    return extension(model)


def _steps(given: Any) -> int | None:
    if given is not None and (not isinstance(given, int) or given < 1):
        raise refuse(f"gradient_accumulation_steps_per_replica is 1 or more, not {given!r}")
    return given


def _reduction(method: Any, kwargs: dict[str, Any]) -> str:
    method = kwargs.pop("reduction_method", method)
    if kwargs.pop("experimental_normalize_gradients", False):
        method = "mean"
    parsed = GradientAccumulationReductionMethod.parse(method)
    return "sum" if parsed is GradientAccumulationReductionMethod.SUM else "mean"


def _take(method: str, given: dict[str, Any], known: Sequence[str]) -> None:
    for name, value in given.items():
        if name not in IGNORED:
            near = nearest(name, known) or nearest(name, IGNORED)
            raise refuse(f"{method} has no argument {name}{near}")
        if value is not None and IGNORED[name]:
            say_once(f"{method}.{name}", f"{name} has no effect: {IGNORED[name]}")
