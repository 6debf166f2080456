"""Pipeline stages: which layer a script puts on which IPU.

    with PipelineStage(0):
        x = Dense(32)(inputs)

Here all layers run on one device, one after the other, with the numbers that a pipeline gives. The
stages still say how many IPUs a replica takes, and so how many replicas there are; and a script
that leaves a layer out, or takes more stages than IPUs, hears of it as it would have. Keras 3 has
no place for such marks, so layers carry their own, and the two methods that see every layer are
exchanged for as long as the scope lasts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from packhorse_port.tensorflow.refusal import refuse

MADE, CALLED = "_ipu_stage", "_ipu_stages"  # on a layer: where it was made; node -> stage


@dataclass
class LayerPipelineStageAssignment:
    """One call of a layer and the stage it belongs to, None where it has none yet."""

    layer: Any
    node_index: int = 0
    pipeline_stage: int | None = None

    @property
    def inbound_layers(self) -> list[Any]:
        """The layers whose outputs go into this call."""
        node = self.layer._inbound_nodes[self.node_index]
        return [parent.operation for parent in node.parent_nodes]


class PipelineStage:
    """A scope in which layers that are made or called belong to a stage."""

    def __init__(self, stage: int) -> None:
        if not isinstance(stage, int) or stage < 0:
            raise refuse(f"PipelineStage({stage!r}): stages are numbered 0, 1, 2, …")
        self.stage = stage

    def __enter__(self) -> PipelineStage:
        import keras
        import tensorflow as tf

        from packhorse_port.tensorflow.strategy import IPUStrategy

        strategy = tf.distribute.get_strategy()
        if not isinstance(strategy, IPUStrategy):
            raise refuse(
                f"PipelineStage({self.stage}) is outside of an IPUStrategy:"
                " build the model under `with strategy.scope():`"
            )
        if strategy.stage is not None:
            raise refuse(
                f"PipelineStage({self.stage}) stands within PipelineStage({strategy.stage});"
                " put one after the other"
            )
        self.strategy, self.layer = strategy, keras.layers.Layer
        self.before = self.layer.__init__, self.layer.__call__
        strategy.stage = self.stage
        self.layer.__init__, self.layer.__call__ = _marking(*self.before, self.stage)
        return self

    def __exit__(self, *_: object) -> None:
        self.layer.__init__, self.layer.__call__ = self.before
        self.strategy.stage = None


def _marking(
    make: Callable[..., None], call: Callable[..., Any], stage: int
) -> tuple[Callable[..., None], Callable[..., Any]]:
    def __init__(layer: Any, *args: Any, **kwargs: Any) -> None:
        make(layer, *args, **kwargs)
        object.__setattr__(layer, MADE, stage)

    def __call__(layer: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = call(layer, *args, **kwargs)
        calls = {**getattr(layer, CALLED, {}), max(len(layer._inbound_nodes) - 1, 0): stage}
        object.__setattr__(layer, CALLED, calls)
        return outputs

    return __init__, __call__


def _stage(layer: Any, node: int) -> int | None:
    return getattr(layer, CALLED, {}).get(node, getattr(layer, MADE, None))


def _calls(model: Any) -> Iterator[tuple[Any, int]]:
    """Each call of a layer, in the order in which they run."""
    import keras

    if isinstance(model, keras.Sequential) or not hasattr(model, "_nodes_by_depth"):
        yield from ((layer, 0) for layer in model.layers)
        return
    for depth in sorted(model._nodes_by_depth, reverse=True):
        for node in model._nodes_by_depth[depth]:
            layer = node.operation
            if isinstance(layer, keras.layers.Layer) and not node.is_input:
                yield layer, layer._inbound_nodes.index(node)


def assigned(model: Any) -> list[LayerPipelineStageAssignment]:
    """What the model's layers say of themselves."""
    return [
        LayerPipelineStageAssignment(layer, node, _stage(layer, node))
        for layer, node in _calls(model)
    ]


def listed(model: Any, given: Sequence[Any]) -> list[LayerPipelineStageAssignment]:
    """What a script assigns: a number for each layer, or assignments that it was given."""
    known = assigned(model)
    if len(given) != len(known):
        raise refuse(
            f"set_pipeline_stage_assignment got {len(given)} stages for {len(known)} layers"
            f" ({', '.join(each.layer.name for each in known)}): give one for each"
        )
    return [
        each
        if isinstance(each, LayerPipelineStageAssignment)
        else LayerPipelineStageAssignment(own.layer, own.node_index, each)
        for each, own in zip(given, known, strict=True)
    ]


def count(assignments: Sequence[LayerPipelineStageAssignment]) -> int:
    """How many stages there are; 0 for a model without any. All layers have one, or none has."""
    stages = {each.pipeline_stage for each in assignments}
    if stages <= {None}:
        return 0
    for each in assignments:
        if each.pipeline_stage is None:
            raise refuse(
                f"layer {each.layer.name} has no pipeline stage and others have:"
                " call it under a PipelineStage too"
            )
    missing = sorted(set(range(max(filter(None, stages), default=0))) - stages)
    if missing:
        raise refuse(f"no layer is in pipeline stage {missing[0]}: number them 0, 1, 2, …")
    return len(stages)
