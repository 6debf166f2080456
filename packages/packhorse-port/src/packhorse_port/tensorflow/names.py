"""Every name of TensorFlow's IPU modules that scripts use, and what becomes of it here.

    NAMES["ipu.config.IPUConfig"]       # Name("emulated", "how many IPUs …")

`ipu` is `tensorflow.python.ipu`, `keras.ipu` is `tensorflow.keras.ipu`, `Model` a Keras model made
under `IPUStrategy`. The modules are made of this table (see `install`), and `packhorse port
--check` reads it; it needs no TensorFlow.
"""

from __future__ import annotations

from packhorse_port.names import Name
from packhorse_port.tensorflow.config import MEANT, TREE, WHY, _leaves

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
    "ipu.config.configure_ipu_system": "makes a configuration the process's",
    "ipu.config.reset_ipu_configuration": "forgets it",
    "ipu.config.get_ipu_config": "gives it",
    "ipu.config.running_on_ipu_model": "False",
    "ipu.utils": "some functions around the configuration",
    "ipu.utils.configure_ipu_system": "makes a configuration the process's",
    "ipu.utils.reset_ipu_configuration": "forgets it",
    "ipu.utils.get_ipu_config": "gives it",
    "ipu.utils.running_on_ipu_model": "False",
    "ipu.utils.get_num_of_ipus_in_device": "the number that was configured",
    "ipu.ipu_strategy": "the strategy",
    "ipu.ipu_strategy.IPUStrategy": "tf.distribute.OneDeviceStrategy, with replicas in a step",
    "ipu.ipu_strategy.IPUStrategyV1": "tf.distribute.OneDeviceStrategy, with replicas in a step",
    "ipu.ops": "some values",
    "ipu.ops.pipelining_ops": "some values",
    "ipu.ops.pipelining_ops.PipelineSchedule": "a value; stages run one after the other",
    "ipu.ops.pipelining_ops.RecomputationMode": "a value; nothing is computed again",
    "ipu.pipelining_ops": "ipu.ops.pipelining_ops",
    "ipu.pipelining_ops.PipelineSchedule": "a value; stages run one after the other",
    "ipu.pipelining_ops.RecomputationMode": "a value; nothing is computed again",
    "ipu.gradient_accumulation": "a value",
    "ipu.gradient_accumulation.GradientAccumulationReductionMethod": "sum or mean",
    "keras.ipu": "what an IPU adds to Keras",
    "keras.ipu.PipelineStage": "marks layers; they run one after the other",
    "keras.ipu.FunctionalLayerPipelineStageAssignment": "a layer and its stage",
    "keras.ipu.SequentialLayerPipelineStageAssignment": "a layer and its stage",
    "keras.ipu.ModelLayerPipelineStageAssignment": "a layer and its stage",
    "Model.set_pipelining_options": "accumulates gradients",
    "Model.set_gradient_accumulation_options": "accumulates gradients",
    "Model.set_pipeline_stage_assignment": "marks layers; they run one after the other",
    "Model.get_pipeline_stage_assignment": "the marks",
    "Model.reset_pipeline_stage_assignment": "forgets them",
    "Model.print_pipeline_stage_assignment_summary": "prints them",
}
IGNORED = {
    "Model.set_asynchronous_callbacks": "callbacks are called after each execution",
    "Model.set_infeed_queue_options": "no queue is run",
    "Model.set_outfeed_queue_options": "no queue is run",
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
    if path in MEANT:
        return Name("emulated", "how many IPUs" if "select" in path else "runs at once, or not")
    return Name("ignored", WHY.get(path.split(".")[0], "it is for the IPU's compiler"))


NAMES: dict[str, Name] = {
    **{name: Name("emulated", meaning) for name, meaning in EMULATED.items()},
    **{name: Name("ignored", meaning) for name, meaning in IGNORED.items()},
    **{name: Name("fails", meaning) for name, meaning in FAILS.items()},
    **{f"IPUConfig.{path}": _setting(path) for path, _ in _leaves(TREE)},
    "IPUConfig.configure_ipu_system": Name("emulated", "makes it the process's"),
    "IPUConfig.to_dict": Name("emulated", "every setting by its name"),
    "IPUConfig.from_dict": Name("emulated", "sets them"),
}
