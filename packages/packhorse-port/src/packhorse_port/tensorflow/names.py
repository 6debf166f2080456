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
from packhorse_port.syntax import NameOrigins, assignments, dotted, statements
from packhorse_port.tensorflow import config, extensions
from packhorse_port.tensorflow.config import EFFECTIVE, NO_EFFECT, SETTINGS, setting_paths

ACCUMULATES = "applies the gradients of several calls at once, added or averaged"
OPTIMIZERS = {
    "IpuOptimizer": "passes everything on to another optimizer",
    "CrossReplicaOptimizer": "the optimizer in it: outside of fit one replica runs",
    "ShardedOptimizer": "the optimizer in it",
    "MapGradientOptimizer": "changes each gradient by a function",
    "GradientAccumulationOptimizer": ACCUMULATES,
    "GradientAccumulationOptimizerV2": ACCUMULATES,
    "CrossReplicaGradientAccumulationOptimizer": ACCUMULATES,
    "CrossReplicaGradientAccumulationOptimizerV2": ACCUMULATES,
}
OPTIMIZER_MODULES = {
    "ipu_optimizer": ("IpuOptimizer",),
    "cross_replica_optimizer": ("CrossReplicaOptimizer",),
    "sharded_optimizer": ("ShardedOptimizer",),
    "map_gradient_optimizer": ("MapGradientOptimizer",),
    "gradient_accumulation_optimizer": tuple(name for name in OPTIMIZERS if "Accum" in name),
}
STRIDED = "strided groups of channels by default, as the SDK has them"
LAYERS = {
    "Embedding": "keras.layers.Embedding",
    "Dropout": "dropout; with a seed the same elements in each call",
    "GroupNormalization": STRIDED,
    "GroupNorm": STRIDED,
    "InstanceNormalization": "a group for each channel",
    "InstanceNorm": "a group for each channel",
    "LayerNormalization": "keras.layers.LayerNormalization",
    "LayerNorm": "keras.layers.LayerNormalization",
    "LSTM": "keras.layers.LSTM",
    "PopnnLSTM": "keras.layers.LSTM",
    "GRU": "keras.layers.GRU",
    "PopnnGRU": "keras.layers.GRU",
    "SerialDense": "keras.layers.Dense, not split",
}
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
    "ipu.utils.IPUConfig": "ipu.config.IPUConfig",
    "ipu.utils.DeviceConnectionType": "ALWAYS and ON_DEMAND; the others run nothing",
    "ipu.utils.SelectionOrder": "a value that a setting takes",
    "ipu.utils.ExecutionProfileType": "a value that a setting takes",
    "ipu.utils.configure_ipu_system": "sets the configuration of the process",
    "ipu.utils.reset_ipu_configuration": "clears it",
    "ipu.utils.get_ipu_config": "returns it",
    "ipu.utils.running_on_ipu_model": "False",
    "ipu.utils.get_num_of_ipus_in_device": "the number that was configured",
    "ipu.ipu_strategy": "the strategy",
    "ipu.ipu_strategy.IPUStrategy": "tf.distribute.OneDeviceStrategy, with replicas in a step",
    "ipu.ipu_strategy.IPUStrategyV1": "tf.distribute.OneDeviceStrategy, with replicas in a step",
    "ipu.ops": "operations, by TensorFlow's own",
    "ipu.ops.pipelining_ops": "pipelines",
    "ipu.ops.pipelining_ops.PipelineSchedule": "a value; stages run one after the other",
    "ipu.ops.pipelining_ops.RecomputationMode": "a value; nothing is recomputed",
    "ipu.ops.pipelining_ops.pipeline": "stages one after the other, gradients accumulated",
    "ipu.ops.pipelining_ops.OptimizerFunctionOutput": "the optimizer and the loss of a pipeline",
    "ipu.ops.nn_ops": "tf.nn",
    "ipu.ops.nn_ops.gelu": "tf.nn.gelu, by tanh unless approximate=False",
    "ipu.ops.nn_ops.hard_sigmoid": "a line with the slope 0.2",
    "ipu.ops.nn_ops.swish": "x * sigmoid(x)",
    "ipu.ops.nn_ops.softmax": "tf.nn.softmax",
    "ipu.ops.nn_ops.ctc_loss_v2": "tf.nn.ctc_loss",
    "ipu.ops.nn_ops.ctc_loss_with_log_probs": "tf.nn.ctc_loss",
    "ipu.ops.math_ops": "products and sums",
    "ipu.ops.math_ops.serialized_matmul": "tf.matmul, not split",
    "ipu.ops.math_ops.segment_sum": "tf.math.unsorted_segment_sum",
    "ipu.ops.embedding_ops": "rows of tables",
    "ipu.ops.embedding_ops.embedding_lookup": "tf.gather",
    "ipu.ops.cross_replica_ops": "sums over replicas",
    "ipu.ops.cross_replica_ops.cross_replica_sum": "its input: outside of fit one replica runs",
    "ipu.ops.cross_replica_ops.cross_replica_mean": "its input: outside of fit one replica runs",
    "ipu.ops.replication_ops": "the number of a replica",
    "ipu.ops.replication_ops.replication_index": "0: outside of fit one replica runs",
    "ipu.ops.all_to_all_op": "gathers over replicas",
    "ipu.ops.all_to_all_op.all_gather": "[1, …]: outside of fit one replica runs",
    "ipu.ops.reduce_scatter_op": "shares of a sum over replicas",
    "ipu.ops.reduce_scatter_op.reduce_scatter": "its input: outside of fit one replica runs",
    "ipu.ops.functional_ops": "functions",
    "ipu.ops.functional_ops.outlined_function": "calls the function",
    "ipu.ops.control_flow_ops": "the order of operations",
    "ipu.ops.control_flow_ops.barrier": "tensors, none before all are there",
    "ipu.ops.internal_ops": "printing",
    "ipu.ops.internal_ops.print_tensor": "tf.print, of the gradient too",
    "ipu.ops.rand_ops": "random numbers",
    "ipu.ops.rand_ops.dropout": "tf.nn.dropout, or tf.nn.experimental.stateless_dropout",
    "ipu.ops.normalization_ops": "normalization over groups of channels",
    "ipu.ops.normalization_ops.group_norm": "strided groups by default, as the SDK has them",
    "ipu.ops.normalization_ops.layer_norm": "one group",
    "ipu.ops.normalization_ops.instance_norm": "a group for each channel",
    "ipu.ops.image_ops": "images",
    "ipu.ops.image_ops.normalise_image": "offsets and scales, and a fourth channel of zeros",
    "ipu.outlined_function": "calls the function",
    "ipu.utils.reset_ipu_seed": "seeds TensorFlow, whose numbers are not an IPU's",
    "ipu.ipu_infeed_queue": "the data of a loop",
    "ipu.ipu_infeed_queue.IPUInfeedQueue": "an iterator over the data set",
    "ipu.ipu_outfeed_queue": "the results of a loop",
    "ipu.ipu_outfeed_queue.IPUOutfeedQueue": "a list on the host",
    "ipu.ipu_outfeed_queue.ScopedIPUOutfeedQueue": "a list on the host",
    "ipu.ipu_outfeed_queue.IPUOutfeedMode": "all elements, or the last",
    "ipu.loops": "loops",
    "ipu.loops.repeat": "tf.while_loop, with the infeed's elements",
    "ipu.loops.while_loop": "tf.while_loop, with the infeed's elements",
    "ipu.ipu_compiler": "compilation",
    "ipu.ipu_compiler.compile": "calls the computation; at once it is a tf.function",
    "ipu.dataset_benchmark": "the speed of a data set",
    "ipu.dataset_benchmark.dataset_benchmark": "times a loop over it",
    "ipu.gradient_accumulation": "a value",
    "ipu.gradient_accumulation.GradientAccumulationReductionMethod": "sum or mean",
    "ipu.optimizers": "optimizers around another one",
    **{f"ipu.optimizers.{name}": meaning for name, meaning in OPTIMIZERS.items()},
    "ipu.optimizers.GradientAccumulationReductionMethod": "sum or mean",
    **{
        f"ipu.optimizers.{module}{name and '.'}{name}": OPTIMIZERS.get(name, "an optimizer")
        for module, names in OPTIMIZER_MODULES.items()
        for name in ("", *names)
    },
    "ipu.ipu_estimator": "an estimator by our own loop",
    "ipu.ipu_estimator.IPUEstimator": "our own loop: TensorFlow dropped estimators",
    "ipu.ipu_estimator.IPUEstimatorSpec": "what a model_fn returns",
    "ipu.ipu_pipeline_estimator": "an estimator by our own loop",
    "ipu.ipu_pipeline_estimator.IPUPipelineEstimator": "our own loop, stages one after the other",
    "ipu.ipu_pipeline_estimator.IPUPipelineEstimatorSpec": "what a model_fn returns",
    "ipu.ipu_run_config": "settings of an estimator",
    "ipu.ipu_run_config.IPURunConfig": "replicas, in turn; steps of a loop",
    "ipu.ipu_run_config.RunConfig": "model_dir, tf_random_seed, log_step_count_steps",
    "ipu.ipu_session_run_hooks": "hooks of a session",
    "ipu.distributed": "several processes, of which there is one",
    "ipu.distributed.allgather": "[1, …]: there is one process",
    "ipu.distributed.allreduce": "its input: there is one process",
    "ipu.distributed.broadcast": "its input: there is one process",
    "ipu.distributed.PopDistStrategy": "IPUStrategy",
    "ipu.distributed.popdist_strategy": "the strategy",
    "ipu.distributed.popdist_strategy.PopDistStrategy": "IPUStrategy",
    "popdist": "several processes, of which there is one",
    "popdist.init": "nothing to do",
    "popdist.isPopdistEnvSet": "whether a launcher started the process",
    "popdist.getNumInstances": "1",
    "popdist.getInstanceIndex": "0",
    "popdist.getNumTotalReplicas": "1",
    "popdist.getNumLocalReplicas": "1",
    "popdist.getNumIpusPerReplica": "what poprun was told, or 1",
    "popdist.getDeviceId": "0",
    "popdist.getReplicaIndexOffset": "0",
    "popdist.checkNumIpusPerReplica": "an error if poprun was told another number",
    "popdist.execute_on_instances": "calls the function in these processes",
    "popdist.finalizeDistributed": "nothing to do",
    "popdist.poptorch": "options for several processes",
    "popdist.poptorch.Options": "poptorch.Options, with this process's number",
    "popdist.tensorflow": "the configuration of one process",
    "popdist.tensorflow.set_ipu_config": "one replica",
    "ipu_tensorflow_addons": "layers and optimizers",
    "ipu_tensorflow_addons.keras": "layers and optimizers",
    "ipu_tensorflow_addons.keras.layers": "Keras's layers, with the SDK's arguments",
    **{f"ipu_tensorflow_addons.keras.layers.{name}": text for name, text in LAYERS.items()},
    "ipu_tensorflow_addons.keras.optimizers": "Keras's optimizers, with the SDK's arguments",
    "ipu_tensorflow_addons.keras.optimizers.IpuOptimizerBase": "keras.optimizers.Optimizer",
    "ipu_tensorflow_addons.keras.optimizers.SGDIpuOptimizer": "keras.optimizers.SGD",
    "ipu_tensorflow_addons.keras.optimizers.AdamIpuOptimizer": "Adam, with the SDK's epsilon",
    "ipu_tensorflow_addons.keras.optimizers.LAMBIpuOptimizer": "LAMB",
    "keras.ipu": "additions of the IPU to Keras",
    "keras.ipu.ALSOptimizer": "Keras's LossScaleOptimizer, which adapts to overflow",
    "keras.ipu.optimizers": "an optimizer",
    "keras.ipu.optimizers.ALSOptimizer": "Keras's LossScaleOptimizer, which adapts to overflow",
    "keras.ipu.PipelineStage": "assigns layers to stages; they run one after the other",
    "keras.ipu.FunctionalLayerPipelineStageAssignment": "a layer and its stage",
    "keras.ipu.SequentialLayerPipelineStageAssignment": "a layer and its stage",
    "keras.ipu.ModelLayerPipelineStageAssignment": "a layer and its stage",
    "Model.set_pipelining_options": "accumulates gradients",
    "Model.set_gradient_accumulation_options": "accumulates gradients",
    "Model.set_asynchronous_callbacks": "steps run one by one, a callback after each",
    "Model.set_pipeline_stage_assignment": "assigns layers to stages; they run one after the other",
    "Model.get_pipeline_stage_assignment": "the stages of layers",
    "Model.reset_pipeline_stage_assignment": "clears them",
    "Model.print_pipeline_stage_assignment_summary": "prints them",
}
ONE_DEVICE = "there is one device"
IGNORED = {
    "Model.set_infeed_queue_options": "fit reads the data set itself",
    "Model.set_outfeed_queue_options": "fit returns its results itself",
    "ipu.scopes": "where and how an IPU runs operations",
    "ipu.scopes.ipu_scope": ONE_DEVICE,
    "ipu.scopes.ipu_jit_scope": ONE_DEVICE,
    "ipu.scopes.ipu_shard": ONE_DEVICE,
    "ipu.scopes.outside_compilation_scope": ONE_DEVICE,
    "ipu.scopes.frontend_attribute": "it is for the IPU's compiler",
    "ipu.scopes.stochastic_rounding": "numbers are rounded to the nearest",
    "ipu.scopes.partials_type": "products are summed as this machine does",
    "ipu.sharding": ONE_DEVICE,
    "ipu.sharding.get_shard_from_colocation": ONE_DEVICE,
    "ipu.sharding.propagate_sharding": ONE_DEVICE,
    "ipu.ops.pipelining_ops.PipelineStageOptions": "it is for the IPU's compiler",
    "ipu.ops.pipelining_ops.recomputation_checkpoint": "nothing is recomputed",
    "ipu.ops.nn_ops.multi_conv": "convolutions run one after the other",
    "ipu.ops.cross_replica_ops.assume_equal_across_replicas": "it is for the IPU's compiler",
    "ipu.ops.internal_ops.remap": "there are no tiles",
    "ipu.ops.internal_ops.remap_deduce": "there are no tiles",
    "ipu.ipu_session_run_hooks.IPULoggingTensorHook": "there is no session",
    "ipu.utils.move_variable_initialization_to_cpu": "there is nothing to move",
    "ipu.utils.use_synthetic_data_for": "the script's own data are used",
    "ipu_tensorflow_addons.keras.layers.RecomputationCheckpoint": "nothing is recomputed",
    "ipu_tensorflow_addons.keras.layers.AssumeEqualAcrossReplicas": "it is for the IPU's compiler",
}
FAILS = {
    "ipu.autoshard": "there is one device; delete the line",
    "ipu.ipu_multi_worker_strategy": "use tf.distribute.MultiWorkerMirroredStrategy",
    "ipu.horovod": "use tf.distribute.MultiWorkerMirroredStrategy",
    "ipu.serving": "use model.export, or tf.saved_model.save",
    "ipu.vertex_edsl": "write the operation in TensorFlow",
    "ipu.keras": "write tensorflow.keras.ipu",
    "ipu.layers": "use keras.layers",
    "ipu.losses": "use keras.losses",
    "ipu.data": "use tf.data",
    "ipu.eager": "enqueue the gradients of tf.GradientTape",
    "ipu.ops.custom_ops": "an IPU's program cannot run; write the operation in TensorFlow",
    "ipu.ops.rnn_ops": "use keras.layers.LSTM or GRU",
    "ipu.ops.f8_ops": "there is no type of 8 bits here; leave it out",
    "ipu.ops.slicing_ops": "use tf.gather and tf.tensor_scatter_nd_update",
    "ipu.ops.statistics_ops": "use tf.histogram_fixed_width",
    "ipu.ops.within_replica_ops": "there is one device: use tf.add_n or tf.concat",
    "ipu.ops.application_compile_op": "an IPU's program cannot run; use tf.saved_model.save",
    "ipu.ops.embedded_runtime": "an IPU's program cannot run; load the model and call it",
    "ipu.ops.grad_util_ops": "enqueue the gradients of tf.GradientTape",
    "ipu.ops.embedding_ops.create_host_embedding": "use keras.layers.Embedding",
    "ipu.ops.nn_ops.sampled_softmax_loss": "use tf.nn.sampled_softmax_loss",
    "ipu.ops.nn_ops.nce_loss": "use tf.nn.nce_loss",
    "ipu.ops.nn_ops.ctc_beam_search_decoder": "use tf.nn.ctc_beam_search_decoder",
    "ipu.ops.nn_ops.ctc_beam_search_decoder_with_log_probs": "use tf.nn.ctc_beam_search_decoder",
    "ipu.ops.all_to_all_op.all_to_all": "outside of fit one replica runs; delete the line",
    "ipu.utils.create_ipu_config": "write ipu.config.IPUConfig()",
    "ipu.utils.auto_select_ipus": "write config.auto_select_ipus = n",
    "ipu.utils.select_ipus": "write config.select_ipus = n",
    "ipu.utils.export_dataset_to_file": "use dataset.save",
    "ipu.utils.export_inputs_to_file": "use tf.io.write_file",
    "ipu.dataset_benchmark.infeed_benchmark": "use ipu.dataset_benchmark.dataset_benchmark",
    "ipu_tensorflow_addons.keras.layers.EffectiveTransformer": "packhorse packs sequences itself",
    "ipu_tensorflow_addons.keras.layers.CTCLoss": "use tf.nn.ctc_loss",
    "ipu_tensorflow_addons.keras.layers.CTCInferenceLayer": "use tf.nn.ctc_beam_search_decoder",
    "ipu_tensorflow_addons.keras.layers.CTCPredictionsLayer": "use tf.nn.ctc_beam_search_decoder",
    "ipu_tensorflow_addons.layers": "use ipu_tensorflow_addons.keras.layers",
    "keras.ipu.layers": "use keras.layers",
    "keras.ipu.extensions": "the methods are on the model itself",
    "Model.export_for_ipu_serving": "use model.export",
}
# The SDK has these modules under a shorter name too.
SHORTER = {
    "ipu.ops.": "ipu.",
    **{f"ipu.optimizers.{module}": f"ipu.{module}" for module in OPTIMIZER_MODULES},
}


def shorter_name(name: str) -> str:
    """`ipu.nn_ops.gelu` of `ipu.ops.nn_ops.gelu`; "" if there is no shorter name."""
    for long, short in SHORTER.items():
        if name.startswith(long):
            return short + name.removeprefix(long)
    return ""


def _with_shorter_names(table: dict[str, str]) -> dict[str, str]:
    shorter = {shorter_name(name): meaning for name, meaning in table.items()}
    shorter.pop("", None)
    return shorter | table


EMULATED = _with_shorter_names(EMULATED)
IGNORED = _with_shorter_names(IGNORED)
FAILS = _with_shorter_names(FAILS)


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
    "ipu_tensorflow_addons": "ipu_tensorflow_addons",
    "popdist": "popdist",
}
RUN_NOTHING = ("NEVER", "PRE_COMPILE")
# Modules of Keras 2 that scripts import, and what to write instead
KERAS_2 = {
    "keras.optimizer_v2": "a module of Keras 2; write keras.optimizers",
    "keras.engine": "a module of Keras 2; write keras.layers or keras.models",
}
CONFIGS = ("ipu.config.IPUConfig", "ipu.utils.IPUConfig")
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
        if isinstance(value, ast.Call) and short_name(origins.path(value.func)) in CONFIGS
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


def refused_connections(tree: ast.AST) -> Iterator[IpuUse]:
    """Assignments of a connection that runs nothing, where the script always makes them."""
    for node, is_conditional in statements(tree):
        if is_conditional or not isinstance(node, ast.Assign):
            continue
        kind = dotted(node.value).rpartition(".")[2]
        if dotted(node.targets[0]).endswith(".device_connection.type") and kind in RUN_NOTHING:
            text = f"{kind} compiles for an IPU and runs nothing; set it to ON_DEMAND"
            yield IpuUse(node.lineno, "IPUConfig.device_connection.type", Name("fails", text))


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
