"""Every public name of PopTorch and how it is handled here: one table for checks and documents.

    NAMES["Options.deviceIterations"]      # Name("emulated", "steps within one host call")

Names are written as in a script: `optim.SGD` for the module's, `Options.…` and `PoplarExecutor.…`
for attributes of objects. The table is written out instead of collected from the modules, so that
`packhorse port --check` needs no torch; a test compares it with the modules.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Literal, NamedTuple

Kind = Literal["as is", "emulated", "ignored", "fails"]


class Name(NamedTuple):
    """How a name is handled, and why or how in a few words."""

    kind: Kind
    meaning: str


EMULATED = {
    "__version__": "of PopTorch, whose interface this is",
    "Options": "settings of a run",
    "DataLoader": "batches of batch_size times iterations, replicas and accumulation",
    "AsynchronousDataAccessor": "reads ahead in a thread",
    "trainingModel": "one call runs many micro batches with their optimizer steps",
    "inferenceModel": "one call runs many batches",
    "PoplarExecutor": "what trainingModel and inferenceModel return",
    "load": "opens what PoplarExecutor.save wrote: safetensors and JSON",
    "ICustomArgParser": "how inputs of your own class are flattened",
    "registerCustomArgParser": "the same, for a class",
    "logger": "the logger packhorse_port",
    "ConfigFileError": "a file of settings has a line that is not a setting",
    "custom_op": "computed by a stand-in that you register",
    "registerCustomOp": "Packhorse's own: registers a stand-in for a custom operation",
    "cond": "a Python `if`",
    "fps": "farthest-point sampling, in PyTorch",
    "nearest": "nearest neighbors, in PyTorch",
    "autocast": "torch.autocast to half",
    "autocasting": "the policy of autocast, kept",
    "profiling": "sections for torch.profiler",
    "testing": "comparison of nested outputs",
    "poptorch_core": "of the compiled part the errors that scripts catch",
    "registerPreCompileHook": "called before a model's first call",
    "registerPostCompileHook": "called when the first call has built the step",
    "Error": "base class of Packhorse's errors",
    "RecoverableError": "never raised: no IPU fails here",
    "UnrecoverableError": "never raised: no IPU fails here",
    "identity_loss": "reduces the loss and marks it",
    "optim": "optimizers based on torch.optim",
    "optim.Optimizer": "base class of these optimizers",
    "optim.SGD": "torch.optim.SGD",
    "optim.Adam": "torch.optim.Adam",
    "optim.AdamW": "torch.optim.AdamW",
    "optim.RMSprop": "torch.optim.RMSprop",
    "optim.LAMB": "packhorse's LAMB",
    "optim.VariableAttributes": "a value of an optimizer and whether it may change",
    "for_loop": "a Python loop",
    "ipu_print_tensor": "prints the tensor, and its gradient",
    "isRunningOnIpu": "True inside a model that is run by PoplarExecutor",
    "ipuHardwareIsAvailable": "False: there is no IPU",
    "ipuHardwareVersion": "there is no IPU",
    "setLogLevel": "the level of the logger packhorse_port",
    "serializedMatMul": "a matrix product, not split",
    "dynamic_slice": "a slice at an index that is a tensor",
    "dynamic_update": "replaces such a slice",
    "ctc_beam_search_decoder": "decodes with beams, in Python",
    "CPU": "calls the function directly",
    "enums": "the enumerations",
    "options": "Options and its groups",
    "ops": "the functions of poptorch itself",
    "Options.deviceIterations": "steps within one host call",
    "Options.replicationFactor": "shares of a step; run in turn, or one process each",
    "Options.inputReplicaGrouping": "which replicas get the same inputs",
    "Options.anchorTensor": "a gradient, an updated weight or a module's output to keep",
    "Options.outputMode": "which outputs of a call are returned",
    "Options.anchorMode": "outputMode under its old name",
    "Options.defaultOutputMode": "whether outputMode is the default",
    "Options.defaultAnchorMode": "whether outputMode is the default",
    "Options.randomSeed": "seeds torch immediately",
    "Options.enableExecutableCaching": "where code of compileStep(True) is cached",
    "Options.enableSyntheticData": "reuses the data of the first call",
    "Options.connectionType": "Never compiles and does not run",
    "Options.useOfflineIpuTarget": "compiles and does not run",
    "Options.modelName": "stored",
    "Options.compileStep": "Packhorse's own: steps compiled or traced, not as Python",
    "Options.shareWeights": "Packhorse's own: changes of the module take effect immediately",
    "Options.updatableNamedBuffers": "which buffers copyNamedBuffersToDevice copies",
    "Options.setExecutionStrategy": "one device; same numbers",
    "Options.broadcastBuffers": "whether replicas share buffers",
    "Options.clone": "a copy that is not frozen",
    "Options.toDict": "all settings as plain values",
    "Options.loadFromFile": "settings from a file, one per line",
    "Options.from_json": "settings from JSON, of which POPTORCH_DEFAULT_OPTIONS is some",
    "Options.exists": "whether there is such a setting",
    "Options.Training": "the group of training settings",
    "Options.Training.gradientAccumulation": "micro batches of one optimizer step",
    "Options.Training.accumulationAndReplicationReductionType": "mean or sum of gradients",
    "Options.Training.accumulationReductionType": "mean or sum of gradients, its old name",
    "Options.Distributed": "which of several processes this is",
    "Options.Distributed.configureProcessId": "this process's number; loaders partition by it",
    "Options.Distributed.setEnvVarNames": "the same, from the environment",
    "Options.Distributed.disable": "one process",
    "Options.Distributed.processId": "this process's number",
    "Options.Distributed.numProcesses": "the number of processes",
    "Options.Precision": "the group of number formats",
    "Options.TensorLocations": "the group of memory settings",
    "Options.Jit": "the group of tracing settings",
    "Options._Popart": "the group of compiler settings",
    "DataLoader.combinedBatchSize": "elements of one step",
    "DataLoader.options": "its options",
    "DataLoader.terminate": "ends the workers",
    "PoplarExecutor.compile": "builds the step for these shapes",
    "PoplarExecutor.compileAndExport": "the same, and saves it",
    "PoplarExecutor.save": "safetensors and JSON",
    "PoplarExecutor.loadExecutable": "what compileAndExport wrote",
    "PoplarExecutor.setOptimizer": "another optimizer, or its new settings",
    "PoplarExecutor.state_dict": "the model's",
    "PoplarExecutor.load_state_dict": "the model's",
    "PoplarExecutor.train": "the module's; the executor keeps the mode of its first call",
    "PoplarExecutor.eval": "the module's; the executor keeps the mode of its first call",
    "PoplarExecutor.rng_state": "the state of the generator",
    "PoplarExecutor.detachFromDevice": "weights are copied to the module",
    "PoplarExecutor.attachToDevice": "weights are copied from the module",
    "PoplarExecutor.isAttachedToDevice": "whether it may run",
    "PoplarExecutor.isCompiled": "whether a step was built",
    "PoplarExecutor.destroy": "weights are copied to the module, which may be wrapped again",
    "PoplarExecutor.copyWeightsToHost": "weights and buffers to the module",
    "PoplarExecutor.copyWeightsToHostIfNeeded": "the same, if a step has changed them",
    "PoplarExecutor.copyWeightsToDevice": "weights and buffers from the module",
    "PoplarExecutor.copyNamedBuffersToDevice": "the buffers that updatableNamedBuffers names",
    "PoplarExecutor.cycleCount": "the time of a call, in nanoseconds",
    "PoplarExecutor.compilationTime": "the time it took to build the step",
    "PoplarExecutor.getPerfCounters": "times of the last call",
    "PoplarExecutor.getLatency": "seconds of a call: minimum, maximum, mean",
    "PoplarExecutor.getComputeLatency": "seconds of computing",
    "PoplarExecutor.getHostIpuLatency": "seconds of copying in",
    "PoplarExecutor.getIpuHostLatency": "seconds of copying out",
    "PoplarExecutor.options": "its options",
    "PoplarExecutor.model": "the module",
    "PoplarExecutor.getTensorNames": "of weights, buffers, and what anchorTensor takes",
    "PoplarExecutor.getAnchoredTensor": "what anchorTensor kept in the last call",
}
IGNORED = {
    "Block": "one device runs every block; same numbers",
    "BeginBlock": "one device runs every block; same numbers",
    "BlockFunction": "one device runs every block; same numbers",
    "addBlock": "one device runs every block; same numbers",
    "removeBlocks": "there are no blocks to remove",
    "Stage": "one device runs every stage; same numbers",
    "Phase": "one device runs every phase; same numbers",
    "PipelinedExecution": "one device, stages in turn; same numbers",
    "ShardedExecution": "one device, blocks in turn; same numbers",
    "SerialPhasedExecution": "one device, phases in turn; same numbers",
    "ParallelPhasedExecution": "one device, phases in turn; same numbers",
    "recomputationCheckpoint": "activations are kept, not recomputed",
    "set_available_memory": "memory is not divided into tiles here",
    "set_overlap_for_input": "inputs are not copied tile by tile",
    "set_overlap_for_output": "outputs are not copied tile by tile",
    "MultiConv": "convolutions run one after the other",
    "NameScope": "operations have no name scope here",
    "Attribute": "operations have no attributes here",
    "module_repr": "a module as text, with its blocks",
    "nop": "the tensor itself",
    "TensorLocationSettings": "all tensors are in the memory of the one device",
    "Options.autoRoundNumIPUs": "one device runs the model",
    "Options.useIpuModel": "there is no simulated IPU",
    "Options.useIpuId": "one device runs the model",
    "Options.syncPattern": "one device waits for no other",
    "Options.setAvailableMemoryProportion": "memory is not divided into tiles here",
    "Options.logDir": "no log files are written",
    "Options.enableProfiling": "profile with torch.profiler",
    "Options.logCycleCount": "PoplarExecutor.cycleCount returns the time",
    "Options.showCompilationProgressBar": "compiling shows no progress bar",
    "Options.relaxOptimizerAttributesChecks": "an optimizer's attributes are not compared",
    "Options.enableStableNorm": "torch's norms are the stable ones",
    "Options.maxRepeatLogs": "each notice is logged once",
    "Options.appendToLocationExcludes": "no source locations are recorded",
    "Options.sourceLocationExcludes": "no source locations are recorded",
    "Options.disableModuleNamescope": "operations have no name scope here",
    "Options.Training.setMeanAccumulationAndReplicationReductionStrategy": "the mean is the same",
    "Options.Training.setAutomaticLossScaling": "no loss is scaled",
    "Options.Training.setConvolutionDithering": "memory is not divided into tiles here",
    "Options.Precision.autocastEnabled": "use torch.autocast",
    "Options.Precision.autocastPolicy": "use torch.autocast",
    "Options.Precision.halfFloatCasting": "PyTorch's promotion of types is used",
    "Options.Precision.runningStatisticsAlwaysFloat": "statistics have the module's own type",
    "Options.Precision.runningVarianceAlwaysFloat": "statistics have the module's own type",
    "Options.Precision.enableFloatingPointExceptions": "use torch.autograd.set_detect_anomaly",
    "Options.Precision.enableStochasticRounding": "values are rounded to the nearest",
    "Options.Precision.setPartialsType": "partial sums are kept as torch keeps them",
    "Options.TensorLocations.numIOTiles": "memory is not divided into tiles here",
    "Options.TensorLocations.setActivationLocation": "activations are in the device's memory",
    "Options.TensorLocations.setWeightLocation": "weights are in the device's memory",
    "Options.TensorLocations.setOptimizerLocation": "optimizer state is in the device's memory",
    "Options.TensorLocations.setAccumulatorLocation": "gradients are in the device's memory",
    "Options.Distributed.IPUoFConfigFiles": "one device runs the model",
    "Options.Jit.traceModel": "the module is called as it is",
    "Options._Popart.set": "there is no PopART here",
    "Options._Popart.setEngineOptions": "there is no PopART here",
    "Options._Popart.setPatterns": "there is no PopART here",
}
FAILS = {
    "eager": "models are called as they are; delete the line",
    "experimental": "write it with trainingModel or inferenceModel",
    "distributed": "use torch.distributed",
}

NAMES: dict[str, Name] = {
    **{name: Name("emulated", meaning) for name, meaning in EMULATED.items()},
    **{name: Name("ignored", meaning) for name, meaning in IGNORED.items()},
    **{name: Name("fails", meaning) for name, meaning in FAILS.items()},
}

# What a torch module has: on an executor these are the module's.
_OF_MODULES = """
T_destination add_module apply bfloat16 buffers call_super_init children compile cpu cuda double
dump_patches eval extra_repr float forward get_buffer get_extra_state get_parameter get_submodule
half ipu load_state_dict modules mtia named_buffers named_children named_modules named_parameters
parameters register_backward_hook register_buffer register_forward_hook register_forward_pre_hook
register_full_backward_hook register_full_backward_pre_hook register_load_state_dict_post_hook
register_load_state_dict_pre_hook register_module register_parameter
register_state_dict_post_hook register_state_dict_pre_hook requires_grad_ set_extra_state
set_submodule share_memory state_dict to to_empty train training type xpu zero_grad
"""
OF_MODULES = frozenset(_OF_MODULES.split())

CUSTOM_OPS = "PACKHORSE_PORT_OPS"  # files that register stand-ins for custom operations

# Modules beside poptorch that are provided where they are not installed; `script.SDK` has those
# that are not.
POPDIST = {
    "popdist": "the processes that poprun or torchrun starts",
    "popdist.poptorch": "options for them",
}
_POPART_ENUMS = {
    "AccumulateOuterFragmentSchedule": "Scheduler Serial OverlapCycleOptimized"
    " OverlapMemoryOptimized",
    "AnchorReturnTypeId": "Final EveryN All Sum",
    "BatchSerializationBatchSchedule": "Scheduler Isomorphic OverlapOnIo OverlapOnCompute",
    "Instrumentation": "Outer Inner",
    "MergeVarUpdateType": "Off All AutoLoose AutoTight",
    "RecomputationType": "NoRecompute Standard NormOnly Pipeline RecomputeAll",
    "ReductionType": "Sum Mean NoReduction",
    "ReplicatedTensorSharding": "Off On",
    "SubgraphCopyingStrategy": "OnEnterAndExit JustInTime",
    "SyntheticDataMode": "Off Zeros RandomNormal RandomUniform",
    "TensorStorage": "OffChip OnChip",
    "TileSet": "Compute IO",
    "VirtualGraphMode": "Off Manual Auto Pipeline ExecutionPhases",
}
POPART_ENUMS = {name: members.split() for name, members in _POPART_ENUMS.items()}
_HOROVOD = """
init shutdown is_initialized rank size local_rank local_size allreduce grouped_allreduce allgather
broadcast broadcast_parameters broadcast_object Average Sum
"""
COMPANIONS = {
    "popart": "the values that settings take; no graphs",
    **{f"popart.{name}": "values that settings take" for name in POPART_ENUMS},
    "examples_utils": "load_lib, which compiles nothing",
    "examples_utils.load_lib": "compiles nothing: operations have stand-ins",
    "horovod": "horovod.torch",
    "horovod.torch": "the processes of popdist, over torch.distributed",
    **{f"horovod.torch.{name}": "over torch.distributed" for name in _HOROVOD.split()},
}

# Modules that such scripts import, and the extra of packhorse that installs them.
EXTRAS = {
    "sklearn": "tutorials",
    "tqdm": "tutorials",
    "matplotlib": "plots",
    "tensorflow": "tensorflow",
    "keras": "tensorflow",
    "transformers": "hf",
    "datasets": "hf",
    "onnx": "onnx",
    "onnxruntime": "onnx",
    "pyarrow": "data",
    "tensorboard": "train",
    "psutil": "monitor",
}


# Packages on PyPI by their module. Of a module that is not here no package is named: on PyPI
# anyone may own that name.
_SAME_NAME = """
accelerate braceexpand deepspeed diffusers einops evaluate h5py imageio jsonlines librosa lightning
mpi4py nltk numba numpy ogb omegaconf pandas pycocotools pytest rdkit requests sacrebleu scipy
seaborn sentencepiece spektral tabulate tensorboardX tfrecord timm tokenizers torchaudio
torchmetrics torchvision tritonclient wandb webdataset yacs
"""
PACKAGES = {name: name for name in _SAME_NAME.split()} | {
    "PIL": "pillow",
    "cv2": "opencv-python",
    "skimage": "scikit-image",
    "yaml": "pyyaml",
    "pytorch_lightning": "pytorch-lightning",
    "tensorflow_addons": "tensorflow-addons",
    "tensorflow_datasets": "tensorflow-datasets",
    "tensorflow_probability": "tensorflow-probability",
    "torch_geometric": "torch-geometric",
}


def install_line(module: str) -> str:
    """How to install a missing module."""
    top = module.partition(".")[0]
    if top in EXTRAS:
        return f"pip install 'packhorse[{EXTRAS[top]}]'"
    if top in PACKAGES:
        return f"pip install {PACKAGES[top]}"
    return "install the package that has it, as the script's own notes say"


def nearest(name: str, known: Iterable[str] = NAMES) -> str:
    """`; the nearest is …` among known names, or an empty string if none is similar."""
    lower = {candidate.lower(): candidate for candidate in known}
    near = get_close_matches(name.lower(), lower, n=1, cutoff=0.6)
    return f"; the nearest is {lower[near[0]]}" if near else ""
