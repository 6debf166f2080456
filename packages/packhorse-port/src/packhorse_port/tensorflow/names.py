"""Every name of TensorFlow's IPU modules that scripts use, and how it is handled here.

    NAMES["ipu.config.IPUConfig"]       # Name("emulated", "how many IPUs …")
    uses(tree, origins)                 # which of them a script uses, for `port --check`

`ipu` is `tensorflow.python.ipu`, `keras.ipu` is `tensorflow.keras.ipu`, `Model` is a Keras model
created under `IPUStrategy`. The modules are built from this table (see `install`), and `packhorse
port --check` reads it. Needs no TensorFlow.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

from packhorse_port.names import Name, nearest
from packhorse_port.syntax import NameOrigins, assignments, dotted
from packhorse_port.tensorflow import config, extensions
from packhorse_port.tensorflow.config import EFFECTIVE, NO_EFFECT, SETTINGS, setting_paths

EMULATED = {
    "ipu": "TensorFlow's modules for the IPU",
    "ipu.config": "settings of an IPU system",
    "ipu.config.IPUConfig": "how many IPUs; other settings are taken",
    "ipu.config.DeviceConnectionType": "ALWAYS and ON_DEMAND; the others run nothing",
    "ipu.config.SelectionOrder": "a value that a setting takes",
    "ipu.config.ExecutionProfileType": "a value that a setting takes",
    "ipu.config.MergeRemoteBuffersBehaviour": "a value that a setting takes",
    "ipu.config.SchedulingAlgorithm": "a value that a setting takes",
    "ipu.config.StochasticRoundingBehaviour": "a value that a setting takes",
    "ipu.config.configure_ipu_system": "sets the configuration of the process",
    "ipu.config.reset_ipu_configuration": "clears it",
    "ipu.config.get_ipu_config": "returns it",
    "ipu.config.running_on_ipu_model": "False",
    "ipu.utils": "functions for the configuration",
    "ipu.utils.configure_ipu_system": "sets the configuration of the process",
    "ipu.utils.reset_ipu_configuration": "clears it",
    "ipu.utils.get_ipu_config": "returns it",
    "ipu.utils.running_on_ipu_model": "False",
    "ipu.utils.get_num_of_ipus_in_device": "the number that was configured",
    "ipu.ipu_strategy": "the strategy",
    "ipu.ipu_strategy.IPUStrategy": "tf.distribute.OneDeviceStrategy, with replicas in a step",
    "ipu.ipu_strategy.IPUStrategyV1": "tf.distribute.OneDeviceStrategy, with replicas in a step",
    "ipu.ops": "some values",
    "ipu.ops.pipelining_ops": "some values",
    "ipu.ops.pipelining_ops.PipelineSchedule": "a value; stages run one after the other",
    "ipu.ops.pipelining_ops.RecomputationMode": "a value; nothing is recomputed",
    "ipu.pipelining_ops": "ipu.ops.pipelining_ops",
    "ipu.pipelining_ops.PipelineSchedule": "a value; stages run one after the other",
    "ipu.pipelining_ops.RecomputationMode": "a value; nothing is recomputed",
    "ipu.gradient_accumulation": "a value",
    "ipu.gradient_accumulation.GradientAccumulationReductionMethod": "sum or mean",
    "keras.ipu": "additions of the IPU to Keras",
    "keras.ipu.PipelineStage": "assigns layers to stages; they run one after the other",
    "keras.ipu.FunctionalLayerPipelineStageAssignment": "a layer and its stage",
    "keras.ipu.SequentialLayerPipelineStageAssignment": "a layer and its stage",
    "keras.ipu.ModelLayerPipelineStageAssignment": "a layer and its stage",
    "Model.set_pipelining_options": "accumulates gradients",
    "Model.set_gradient_accumulation_options": "accumulates gradients",
    "Model.set_pipeline_stage_assignment": "assigns layers to stages; they run one after the other",
    "Model.get_pipeline_stage_assignment": "the stages of layers",
    "Model.reset_pipeline_stage_assignment": "clears them",
    "Model.print_pipeline_stage_assignment_summary": "prints them",
}
IGNORED = {
    "Model.set_asynchronous_callbacks": "callbacks are called after each execution",
    "Model.set_infeed_queue_options": "there is no queue",
    "Model.set_outfeed_queue_options": "there is no queue",
}
FIT = "train with model.fit, or write the loop with tf.GradientTape"
FAILS = {
    "ipu.ipu_compiler": "use tf.function and strategy.run",
    "ipu.ipu_infeed_queue": f"iterate over the tf.data.Dataset; {FIT}",
    "ipu.ipu_outfeed_queue": f"return the results of the tf.function; {FIT}",
    "ipu.loops": "use a loop in a tf.function; model.compile has steps_per_execution",
    "ipu.scopes": "use strategy.scope(); there is one device",
    "ipu.sharding": "there is one device; delete the line",
    "ipu.autoshard": "there is one device; delete the line",
    "ipu.ipu_estimator": "use model.fit",
    "ipu.ipu_pipeline_estimator": "use model.fit",
    "ipu.ipu_run_config": "use model.fit",
    "ipu.ipu_session_run_hooks": "use callbacks of model.fit",
    "ipu.ipu_multi_worker_strategy": "use tf.distribute.MultiWorkerMirroredStrategy",
    "ipu.distributed": "use tf.distribute.MultiWorkerMirroredStrategy",
    "ipu.horovod": "use tf.distribute.MultiWorkerMirroredStrategy",
    "ipu.serving": "use model.export",
    "ipu.embedding_ops": "use keras.layers.Embedding",
    "ipu.normalization_ops": "use keras.layers.GroupNormalization or LayerNormalization",
    "ipu.nn_ops": "use tf.nn",
    "ipu.rand_ops": "use tf.random",
    "ipu.rnn_ops": "use keras.layers.LSTM or GRU",
    "ipu.custom_ops": "write the operation in TensorFlow",
    "ipu.cross_replica_ops": "replicas are summed by the step itself; delete the line",
    "ipu.functional_ops": "call the function",
    "ipu.outlined_function": "call the function",
    "ipu.internal_ops": "use tf.print",
    "ipu.dataset_benchmark": "time a loop over the data set",
    "ipu.optimizers": "use keras.optimizers",
    "ipu.keras": "write tensorflow.keras.ipu",
    "ipu.layers": "use keras.layers",
    "ipu.losses": "use keras.losses",
    "ipu.data": "use tf.data",
    "ipu.ops.pipelining_ops.pipeline": "use keras.ipu.PipelineStage and model.fit",
    "ipu.utils.create_ipu_config": "write ipu.config.IPUConfig()",
    "ipu.utils.auto_select_ipus": "write config.auto_select_ipus = n",
    "ipu.utils.select_ipus": "write config.select_ipus = n",
    "ipu.utils.move_variable_initialization_to_cpu": "delete the line",
    "keras.ipu.ALSOptimizer": "use keras.mixed_precision.LossScaleOptimizer",
    "keras.ipu.layers": "use keras.layers",
    "keras.ipu.optimizers": "use keras.optimizers",
    "keras.ipu.extensions": "the methods are on the model itself",
    "Model.export_for_ipu_serving": "use model.export",
}


def _setting(path: str) -> Name:
    if path in EFFECTIVE:
        return Name("emulated", "how many IPUs" if "select" in path else "runs at once, or not")
    return Name("ignored", NO_EFFECT.get(path.split(".")[0], "it is for the IPU's compiler"))


NAMES: dict[str, Name] = {
    **{name: Name("emulated", meaning) for name, meaning in EMULATED.items()},
    **{name: Name("ignored", meaning) for name, meaning in IGNORED.items()},
    **{name: Name("fails", meaning) for name, meaning in FAILS.items()},
    **{f"IPUConfig.{path}": _setting(path) for path in setting_paths(SETTINGS)},
    "IPUConfig.configure_ipu_system": Name("emulated", "sets it for the process"),
    "IPUConfig.to_dict": Name("emulated", "all settings by name"),
    "IPUConfig.from_dict": Name("emulated", "sets them"),
}


# Which of these names a script uses, read from its syntax tree

PREFIXES = {
    "tensorflow.python.ipu": "ipu",
    "tensorflow.keras.ipu": "keras.ipu",
    "keras.ipu": "keras.ipu",
}
METHODS = {name.partition(".")[2]: name for name in NAMES if name.startswith("Model.")}
ENUMS = {
    value.__name__: [member.name for member in value]
    for module in (config, extensions)
    for value in vars(module).values()
    if isinstance(value, type) and issubclass(value, Enum) and value is not Enum
}


class IpuUse(NamedTuple):
    """One name in one line, and how it is handled."""

    line: int
    name: str
    entry: Name


def short_name(path: str) -> str:
    """`ipu.config` for `tensorflow.python.ipu.config`; "" for modules that are not the IPU's."""
    for prefix, short in PREFIXES.items():
        if path == prefix or path.startswith(f"{prefix}."):
            return short + path.removeprefix(prefix)
    return ""


def lookup(name: str) -> Name:
    """The entry of a name in `NAMES`, or of the longest part of it that is there."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        prefix = ".".join(parts[:end])
        rest = parts[end:]
        if prefix in FAILS or (prefix in NAMES and not rest):
            return NAMES[prefix]
        if rest and parts[end - 1] in ENUMS:
            return _lookup_member(parts[end - 1], rest[0], NAMES.get(prefix))
        if prefix in NAMES and prefix.startswith("IPUConfig."):
            return NAMES[prefix]  # a method of the setting's value
    if any(known.startswith(f"{name}.") for known in NAMES):
        return Name("emulated", "a group of settings")
    return Name("fails", f"there is no such name{nearest(name, NAMES)}")


def _lookup_member(enum: str, name: str, entry: Name | None) -> Name:
    if name in ENUMS[enum] or name in ("parse", "from_bool"):
        return entry or Name("emulated", "a value")
    return Name("fails", f"{enum} has {', '.join(ENUMS[enum])}")


def uses(tree: ast.AST, origins: NameOrigins) -> Iterator[IpuUse]:
    """Every use, the longest name only: `ipu.config.IPUConfig` is one use, not three.

    A name is what an import bound, a setting of a variable that holds an `IPUConfig`, or a method
    that only an IPU's model has, whatever the variable is called.
    """
    config_variables = {
        name
        for name, value in assignments(tree)
        if isinstance(value, ast.Call)
        and short_name(origins.path(value.func)) == "ipu.config.IPUConfig"
    }
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Attribute) and (
            name := _used_name(node, origins, config_variables)
        ):
            yield IpuUse(getattr(node, "end_lineno", None) or node.lineno, name, lookup(name))
            while isinstance(node, ast.Attribute):
                node = node.value
        pending += ast.iter_child_nodes(node)


def _used_name(node: ast.Attribute, origins: NameOrigins, config_variables: set[str]) -> str:
    if name := short_name(origins.path(node)):
        return name
    if node.attr in METHODS:
        return METHODS[node.attr]
    path = dotted(node)
    for variable in config_variables:
        if path.startswith(f"{variable}."):
            return "IPUConfig." + path.removeprefix(f"{variable}.")
    return ""
