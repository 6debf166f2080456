"""`Options`: how a model is run, with PopTorch's own names.

    opts = Options().deviceIterations(16).replicationFactor(2)
    opts.Training.gradientAccumulation(8)
    opts.device_iterations, opts.gradient_accumulation, opts.reduction    # what other modules read
    opts.loadFromFile("options.cfg")

Every method returns its group, so that calls chain. Names, defaults and groups are those of
PopTorch 3.3's documentation. Settings that concern only an IPU are accepted and logged once
(`settings.ignored`); an unknown one is an error that names the nearest. `randomSeed` seeds torch
when it is called, as PopTorch does. The executable cache is the last of these that is set: the
variable `TF_POPLAR_FLAGS` (its `--executable_cache_path`), `POPTORCH_CACHE_DIR`,
`enableExecutableCaching`.
"""

from __future__ import annotations

import ast
import copy
import json
import os
import shlex
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar, Self

import torch

from packhorse.errors import PackhorseError
from packhorse_port import enums
from packhorse_port.enums import (
    CommGroupType,
    ConnectionType,
    HalfFloatCastingBehavior,
    MeanReductionStrategy,
    OutputMode,
    ReductionType,
    SyncPattern,
    TensorLocationSettings,
)
from packhorse_port.notices import UsageError, line_prefix, log_once, script_line
from packhorse_port.settings import OptionsUse, Settings, check_integer, check_member, ignored

# Why settings have no effect here
NO_TILES = "memory is not divided into tiles here"
NOT_SCALED = "no loss is scaled: in fp32 nothing vanishes, in half small gradients may"
ONE_DEVICE = "the model runs on the one device at hand"


class Training(Settings):
    """`Options.Training`: gradient accumulation and its reduction have an effect."""

    DEFAULTS: ClassVar[dict[str, Any]] = {
        "gradient_accumulation": 1,
        "accumulation_and_replication_reduction_type": ReductionType.Mean,
    }

    def gradientAccumulation(self, gradient_accumulation: int) -> Self:
        """Micro batches per optimizer step."""
        count = check_integer("gradientAccumulation", gradient_accumulation)
        return self._set("gradientAccumulation", gradient_accumulation=count)

    def accumulationAndReplicationReductionType(self, reduction_type: ReductionType) -> Self:
        """Whether the gradients of micro batches and replicas are averaged or summed."""
        name = "accumulationAndReplicationReductionType"
        if check_member(name, reduction_type, ReductionType) == ReductionType.NoReduction:
            raise UsageError(
                f"{line_prefix()}{name} takes poptorch.ReductionType.Mean or .Sum, not NoReduction"
            )
        return self._set(name, accumulation_and_replication_reduction_type=reduction_type)

    def accumulationReductionType(self, reduction_type: ReductionType) -> Self:
        """What PopTorch 2.0 called `accumulationAndReplicationReductionType`."""
        return self.accumulationAndReplicationReductionType(reduction_type)

    @ignored(
        "meanAccumulationAndReplicationReductionStrategy",
        MeanReductionStrategy.Post,
        "the mean is the same up to rounding",
    )
    def setMeanAccumulationAndReplicationReductionStrategy(
        self, mean_reduction_strategy: MeanReductionStrategy
    ) -> Self: ...

    @ignored("automatic_loss_scaling", False, NOT_SCALED)
    def setAutomaticLossScaling(self, enabled: bool) -> Self: ...

    @ignored("convolution_dithering", False, NO_TILES)
    def setConvolutionDithering(self, enabled: bool) -> Self: ...


class Precision(Settings):
    """`Options.Precision`: no effect; dtypes follow PyTorch's rules, `model.half()` included."""

    DEFAULTS: ClassVar[dict[str, Any]] = {}

    @ignored("autocast_enabled", True, "types follow PyTorch's rules; use torch.autocast")
    def autocastEnabled(self, autocast_enabled: bool) -> Self: ...

    @ignored("autocast_policy", None, "types follow PyTorch's rules; use torch.autocast")
    def autocastPolicy(self, autocast_policy: Any) -> Self: ...

    @ignored("half_float_casting", HalfFloatCastingBehavior.Default, "PyTorch's promotion is used")
    def halfFloatCasting(self, half_float_casting: HalfFloatCastingBehavior) -> Self: ...

    @ignored("running_statistics_always_float", True, "statistics have the module's own type")
    def runningStatisticsAlwaysFloat(self, value: bool) -> Self: ...

    @ignored("running_statistics_always_float", True, "statistics have the module's own type")
    def runningVarianceAlwaysFloat(self, value: bool) -> Self: ...

    @ignored("floating_point_exceptions", False, "use torch.autograd.set_detect_anomaly(True)")
    def enableFloatingPointExceptions(self, enabled: bool) -> Self: ...

    @ignored("stochastic_rounding", False, "values are rounded to the nearest")
    def enableStochasticRounding(self, enabled: bool) -> Self: ...

    @ignored("partials_type", torch.float32, "partial sums are kept as torch keeps them, in fp32")
    def setPartialsType(self, dtype: torch.dtype) -> Self: ...


class TensorLocations(Settings):
    """`Options.TensorLocations`: no effect; all tensors are in the memory of the one device."""

    DEFAULTS: ClassVar[dict[str, Any]] = {}

    @ignored("num_io_tiles", None, NO_TILES)
    def numIOTiles(self, num_tiles: int) -> Self: ...

    @ignored("location_activation", None, "activations are in the device's memory")
    def setActivationLocation(self, location: TensorLocationSettings) -> Self: ...

    @ignored("location_weight", None, "weights are in the device's memory")
    def setWeightLocation(self, location: TensorLocationSettings) -> Self: ...

    @ignored("location_optimizer", None, "optimizer state is in the device's memory")
    def setOptimizerLocation(self, location: TensorLocationSettings) -> Self: ...

    @ignored("location_accumulator", None, "gradients are in the device's memory")
    def setAccumulatorLocation(self, location: TensorLocationSettings) -> Self: ...


class Distributed(Settings):
    """`Options.Distributed`: which of several processes this is; loaders partition by it."""

    DEFAULTS: ClassVar[dict[str, Any]] = {
        "num_distributed_processes": 1,
        "distributed_process_id": 0,
    }

    def __init__(self, use: OptionsUse) -> None:
        super().__init__(use)
        self.setEnvVarNames("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")

    @property
    def processId(self) -> int:
        return self.distributed_process_id

    @property
    def numProcesses(self) -> int:
        return self.num_distributed_processes

    def configureProcessId(self, process_id: int, num_processes: int) -> Self:
        """Declare this to be process `process_id` of `num_processes`."""
        count = check_integer("num_processes", num_processes)
        number = check_integer("process_id", process_id, least=0)
        if number >= count:
            raise UsageError(
                f"{line_prefix()}process {number} of {count}: ids run from 0 to {count - 1}"
            )
        values = {"num_distributed_processes": count, "distributed_process_id": number}
        return self._set("configureProcessId", **values)

    def setEnvVarNames(self, var_num_processes: str, var_process_id: str) -> Self:
        """Read both from environment variables, which a launcher such as mpirun sets."""
        count = os.environ.get(var_num_processes, "1")
        number = os.environ.get(var_process_id, "0")
        return self.configureProcessId(int(number), int(count))

    def disable(self) -> Self:
        """Run as a single process."""
        return self.configureProcessId(0, 1)

    @ignored("ipuof_configs", None, ONE_DEVICE)
    def IPUoFConfigFiles(self, files: str | list[str]) -> Self: ...


class Jit(Settings):
    """`Options.Jit`: no effect."""

    DEFAULTS: ClassVar[dict[str, Any]] = {}

    @ignored("trace_model", True, "the module is called as it is, never traced to TorchScript")
    def traceModel(self, trace_model: bool) -> Self: ...


class Popart(Settings):
    """`Options._Popart`: hundreds of options of the IPU's compiler; stored, each logged once."""

    DEFAULTS: ClassVar[dict[str, Any]] = {"popart": {}}

    @property
    def options(self) -> dict[str, Any]:
        return self._values["popart"]

    def set(self, key: str, value: Any) -> Self:
        """Store an option; it has no effect."""
        self._set("_Popart.set", popart={**self.options, key: value})
        log_once(
            f"_Popart.{key}", f"_Popart.set({key!r}, …) has no effect: there is no PopART here"
        )
        return self

    def setEngineOptions(self, engine_options: dict[str, str]) -> Self:
        return self.set("engineOptions", engine_options)

    def setPatterns(self, patterns: dict[str, bool], level: int = 2) -> Self:
        return self.set("patterns", patterns).set("patterns_level", level)


GROUPS: dict[str, type[Settings]] = {
    "Training": Training,
    "Precision": Precision,
    "TensorLocations": TensorLocations,
    "Distributed": Distributed,
    "Jit": Jit,
    "_Popart": Popart,
}


# Values of PACKHORSE_PORT_STEPS, and the argument of `compileStep` that each stands for.
DEFAULT_OPTIONS = "POPTORCH_DEFAULT_OPTIONS"
STEP_MODES: dict[str, bool | str] = {"modules": False, "traced": "trace", "compiled": True}


class Options(Settings):
    """How a model is run. Frozen once a loader or model uses it; `clone()` returns a free copy."""

    DEFAULTS: ClassVar[dict[str, Any]] = {
        "device_iterations": 1,
        "replication_factor": 1,
        "input_group_size": 1,
        "input_cgt": CommGroupType.Consecutive,
        "anchored_tensors": {},
        "output_mode": OutputMode.Default,
        "output_return_period": 1,
        "connection_type": ConnectionType.Always,
        "random_seed": None,
        "synthetic_data": False,
        "cache_path": None,
        "model_name": None,
        "execution_strategy": None,
        "broadcast_buffers": True,
        "compile_step": False,
        "share_weights": False,
        "updatable_named_buffers": (),
    }

    def __init__(self) -> None:
        self._initialize()
        self.from_json(os.environ.get(DEFAULT_OPTIONS) or "{}")

    def _initialize(self) -> None:
        Settings.__init__(self, OptionsUse())
        self._values["cache_path"] = cache_from_environment(os.environ)
        self._values["compile_step"] = STEP_MODES[
            _environment_choice("PACKHORSE_PORT_STEPS", *STEP_MODES)
        ]
        weights = _environment_choice("PACKHORSE_PORT_WEIGHTS", "apart", "shared")
        self._values["share_weights"] = weights == "shared"
        # Not self._parts: `Settings.__setattr__` refuses assignments, so that scripts cannot set
        # what does not exist.
        self.__dict__["_parts"] = {name: group(self._use) for name, group in GROUPS.items()}

    # Read by other modules

    @property
    def Training(self) -> Training:
        return self._parts["Training"]

    @property
    def Precision(self) -> Precision:
        return self._parts["Precision"]

    @property
    def TensorLocations(self) -> TensorLocations:
        return self._parts["TensorLocations"]

    @property
    def Distributed(self) -> Distributed:
        return self._parts["Distributed"]

    @property
    def Jit(self) -> Jit:
        return self._parts["Jit"]

    @property
    def _Popart(self) -> Popart:
        return self._parts["_Popart"]

    @property
    def gradient_accumulation(self) -> int:
        return self.Training.gradient_accumulation

    @property
    def reduction(self) -> ReductionType:
        """Mean or Sum, over the micro batches of a step as well as over the replicas."""
        return self.Training.accumulation_and_replication_reduction_type

    @property
    def output_every(self) -> int:
        """The n of `EveryN`; 1 for the other modes."""
        return self.output_return_period

    @property
    def batches_per_call(self) -> int:
        """Micro batches that one host call consumes: iterations × input groups × accumulation."""
        return self.device_iterations * self.input_groups * self.gradient_accumulation

    @property
    def input_groups(self) -> int:
        """How many different inputs the replicas get."""
        if self.replication_factor % self.input_group_size:
            raise UsageError(
                f"{line_prefix()}inputReplicaGrouping({self.input_group_size}, …) does not divide"
                f" replicationFactor({self.replication_factor})"
            )
        return self.replication_factor // self.input_group_size

    @property
    def frozen(self) -> bool:
        """Whether a loader or model uses these options."""
        return bool(self._use.owner)

    # Freezing and copying

    def freeze(self, owner: str) -> None:
        """Refuse changes from now on: `owner` (a loader, a model) uses these options."""
        if not self._use.owner:
            self._use.owner = owner
            self._use.line = script_line()

    def freeze_for_model(self, owner: str, training: bool) -> Options:
        """Freeze these options for a model; returns its own copy, with the output mode resolved."""
        model_options = self.clone()
        if model_options.defaultOutputMode():
            mode = OutputMode.Final if training else OutputMode.All
            model_options._values["output_mode"] = mode
        for options in (self, model_options):
            options.freeze(owner)
        return model_options

    def clone(self) -> Options:
        """A copy with the same settings that is not frozen."""
        clone = Options.__new__(Options)
        clone._initialize()
        for source, target in zip(self._groups(), clone._groups(), strict=True):
            target.__dict__["_values"] = copy.deepcopy(source._values)
        return clone

    def __deepcopy__(self, memo: dict[int, Any]) -> Options:
        return self.clone()

    def _groups(self) -> list[Settings]:
        return [self, *self._parts.values()]

    def toDict(self) -> dict[str, Any]:
        """All settings of all groups in one flat dictionary of plain values."""
        merged = super().toDict()
        for part in self._parts.values():
            merged |= part.toDict()
        return merged

    @classmethod
    def fromDict(cls, values: Mapping[str, Any]) -> Options:
        """The options that `toDict` returned."""
        options = cls()
        for group in options._groups():
            group._restore(dict(values))
        return options

    def from_json(self, string: str) -> Self:
        """Apply settings by name: {"Training.gradientAccumulation": 4, "_Popart.set": ["key", 1]}.

        The variable POPTORCH_DEFAULT_OPTIONS has such settings for all options of a script.
        """
        try:
            for name, value in json.loads(string).items():
                method = _target(self, ast.parse(name, mode="eval").body)
                method(*map(_json_value, value if isinstance(value, list) else [value]))
        except (PackhorseError, SyntaxError, TypeError, ValueError) as error:
            raise ConfigFileError(
                f"{line_prefix()}{string!r} is no JSON of settings: {error}"
            ) from error
        return self

    def loadFromFile(self, filepath: str | os.PathLike[str]) -> Self:
        """Apply a file of settings, one per line as in a script, without `options.`."""
        apply_file(self, Path(filepath))
        return self

    def __repr__(self) -> str:
        changed = self._changed()
        for name, part in self._parts.items():
            changed |= {f"{name}.{key}": value for key, value in part._changed().items()}
        return f"Options({', '.join(f'{name}={value!r}' for name, value in changed.items())})"

    # Settings with an effect

    def deviceIterations(self, device_iterations: int) -> Self:
        """Steps within one host call."""
        count = check_integer("deviceIterations", device_iterations)
        return self._set("deviceIterations", device_iterations=count)

    def replicationFactor(self, replication_factor: int) -> Self:
        """Copies of the model that each process a share of every step."""
        count = check_integer("replicationFactor", replication_factor)
        return self._set("replicationFactor", replication_factor=count)

    def inputReplicaGrouping(self, input_group_size: int, input_group_type: CommGroupType) -> Self:
        """Give groups of replicas the same inputs: neighbors, or every nth (`Orthogonal`)."""
        name = "inputReplicaGrouping"
        size = check_integer(name, input_group_size)
        kind = check_member(name, input_group_type, CommGroupType)
        if kind == CommGroupType.All:
            raise UsageError(f"{line_prefix()}{name}: input_group_type cannot be All")
        if kind == CommGroupType.NoGrouping:
            size = 1
            kind = CommGroupType.Consecutive
        if self.replication_factor % size:
            raise UsageError(
                f"{line_prefix()}{name}: input_group_size {size} must be a factor of"
                f" replication_factor {self.replication_factor}, which is set before it"
            )
        return self._set(name, input_group_size=size, input_cgt=kind)

    def anchorTensor(
        self,
        short_name: str,
        long_name: str,
        output_mode: OutputMode | None = None,
        output_return_period: int | None = 1,
    ) -> Self:
        """Keep a tensor of the model for `getAnchoredTensor(short_name)`; see `anchors`."""
        period = output_return_period if output_mode == OutputMode.EveryN else 1
        anchor = (long_name, output_mode, check_integer("output_return_period", period))
        anchored = {**self.anchored_tensors, short_name: anchor}
        return self._set("anchorTensor", anchored_tensors=anchored)

    def outputMode(self, output_mode: OutputMode, output_return_period: int | None = None) -> Self:
        """Which outputs of a host call are returned; `EveryN` needs its n."""
        mode = check_member("outputMode", output_mode, OutputMode)
        period = 1
        if mode == OutputMode.EveryN:
            if output_return_period is None:
                raise UsageError(
                    f"{line_prefix()}write outputMode(poptorch.OutputMode.EveryN, n): n is missing"
                )
            period = check_integer("output_return_period", output_return_period)
        return self._set("outputMode", output_mode=mode, output_return_period=period)

    def anchorMode(self, anchor_mode: OutputMode, anchor_return_period: int | None = None) -> Self:
        """PopTorch 2's name of `outputMode`."""
        return self.outputMode(anchor_mode, anchor_return_period)

    def defaultOutputMode(self) -> bool:
        return self.output_mode == OutputMode.Default

    def defaultAnchorMode(self) -> bool:
        return self.defaultOutputMode()

    def randomSeed(self, random_seed: int) -> Self:
        """Seed torch immediately: a model draws from torch's own generator."""
        seed = check_integer("randomSeed", random_seed, least=0)
        self._set("randomSeed", random_seed=seed)
        torch.manual_seed(seed)
        return self

    def enableExecutableCaching(self, path: str | os.PathLike[str] | None) -> Self:
        """Where to cache code compiled by `compileStep(True)`; None for Packhorse's own cache."""
        folder = None if path is None else os.path.expanduser(os.fspath(path))
        return self._set("enableExecutableCaching", cache_path=folder)

    def compileStep(self, enabled: bool | str = True) -> Self:
        """Not in PopTorch: compile steps (True), trace them ("trace"), or run Python (False).

        By default (False), forward is called for every micro batch. Traced, its operations are
        recorded at the first call and run without Python from then on, with the same bits;
        compiled, they go through torch's inductor, equal within rounding, and on CUDA through CUDA
        graphs. Either way what forward does in Python is frozen at the first call: attributes,
        lists, branches on a value. PACKHORSE_PORT_STEPS (modules, traced, compiled) sets it for
        scripts that run unchanged.
        """
        if enabled not in STEP_MODES.values():
            raise UsageError(
                f"{line_prefix()}compileStep takes True, False or 'trace', not {enabled!r}"
            )
        return self._set("compileStep", compile_step=enabled)

    @property
    def steps(self) -> str:
        """How steps are run: "modules", "traced" or "compiled"."""
        names = [name for name, value in STEP_MODES.items() if value == self.compile_step]
        return names[0] if names else "modules"

    def shareWeights(self, enabled: bool = True) -> Self:
        """Not in PopTorch: changes of the module or optimizer take effect immediately.

        By default an executor has its own weights, copied when PopTorch copies them. On a CPU
        shared weights are the module's own tensors, so there is one set of them in memory.
        PACKHORSE_PORT_WEIGHTS=shared sets it for scripts that run unchanged.
        """
        return self._set("shareWeights", share_weights=bool(enabled))

    def updatableNamedBuffers(self, buffers: list[str]) -> Self:
        """Which buffers `copyNamedBuffersToDevice` copies."""
        return self._set("updatableNamedBuffers", updatable_named_buffers=tuple(buffers))

    def enableSyntheticData(self, enabled: bool) -> Self:
        """Reuse the data of the first call, to measure without reading."""
        return self._set("enableSyntheticData", synthetic_data=bool(enabled))

    def connectionType(self, connection_type: ConnectionType) -> Self:
        """When the device is attached; `Never` compiles and does not run."""
        kind = check_member("connectionType", connection_type, ConnectionType)
        return self._set("connectionType", connection_type=kind)

    def useOfflineIpuTarget(self, ipu_version: int = 2) -> Self:
        """Compile only, as `connectionType(Never)`; the IPU version has no effect."""
        return self.connectionType(ConnectionType.Never)

    def modelName(self, name: str) -> Self:
        """A name for the model; stored."""
        return self._set("modelName", model_name=name)

    def setExecutionStrategy(self, strategy: Any) -> Self:
        """How blocks are distributed over devices; one device gives the same results."""
        return self._set("setExecutionStrategy", execution_strategy=strategy)

    def broadcastBuffers(self, broadcast_buffers: bool = True) -> Self:
        """Whether replicas share one set of buffers."""
        return self._set("broadcastBuffers", broadcast_buffers=bool(broadcast_buffers))

    # Settings without effect

    @ignored("auto_round_num_ipus", False, ONE_DEVICE)
    def autoRoundNumIPUs(self, auto_round_num_ipus: bool = True) -> Self: ...

    @ignored("use_model", False, "there is no simulated IPU; " + ONE_DEVICE)
    def useIpuModel(self, use_model: bool) -> Self: ...

    @ignored("ipu_id", None, ONE_DEVICE)
    def useIpuId(self, ipu_id: int) -> Self: ...

    @ignored("sync_pattern", SyncPattern.Full, "one device waits for no other")
    def syncPattern(self, sync_pattern: SyncPattern) -> Self: ...

    @ignored("available_memory_proportion", {}, NO_TILES)
    def setAvailableMemoryProportion(
        self, available_memory_proportion: dict[str, float]
    ) -> Self: ...

    @ignored("log_dir", ".", "no log files are written")
    def logDir(self, log_dir: str) -> Self: ...

    @ignored("profile_dir", None, "profile with torch.profiler")
    def enableProfiling(self, profile_dir: str | None = ".") -> Self: ...

    @ignored("log_cycle_count", False, "ask the model: cycleCount() returns the time")
    def logCycleCount(self, log_cycle_count: bool) -> Self: ...

    @ignored("compilation_progress_bar", None, "compiling shows no progress bar")
    def showCompilationProgressBar(self, show: bool = True) -> Self: ...

    @ignored("relax_optimizer_checks", None, "an optimizer's attributes are not compared")
    def relaxOptimizerAttributesChecks(self, relax: bool = True) -> Self: ...

    @ignored("stable_norm", False, "torch's norms are the stable ones")
    def enableStableNorm(self, enabled: bool) -> Self: ...

    @ignored("max_repeat_logs", 4, "each notice is logged once")
    def maxRepeatLogs(self, max_lines: int | None) -> Self: ...

    @ignored("location_excludes", (), "no source locations are recorded")
    def appendToLocationExcludes(self, *excludes: str) -> Self: ...

    @ignored("location_excludes", (), "no source locations are recorded")
    def sourceLocationExcludes(self, excludes: list[str]) -> Self: ...

    @ignored("module_namescope", False, "operations have no name scope here")
    def disableModuleNamescope(self) -> Self: ...


def _environment_choice(variable: str, *choices: str) -> str:
    """The value of an environment variable; the first choice if it is not set."""
    value = os.environ.get(variable) or choices[0]
    if value not in choices:
        raise UsageError(f"{variable} is {value!r}; set it to one of {', '.join(choices)}")
    return value


def cache_from_environment(environ: Mapping[str, str]) -> str | None:
    """The executable cache that the environment names, for PopTorch or for TensorFlow."""
    path = environ.get("POPTORCH_CACHE_DIR", "")
    flags = iter(shlex.split(environ.get("TF_POPLAR_FLAGS", "")))
    for flag in flags:
        name, equals, value = flag.partition("=")
        if name == "--executable_cache_path" and not path:
            path = value if equals else next(flags, "")
    return os.path.expanduser(path) if path else None


# Settings from a file, one line each as a script writes them, without `options.`:
#
#     deviceIterations(10)
#     Training.gradientAccumulation(8)
#     outputMode(poptorch.OutputMode.EveryN, 5)
#
# PopTorch runs such a file as Python. Here every line is parsed, and only calls of settings with
# plain values pass (numbers, strings, lists, dictionaries, `poptorch`'s enumerations and execution
# strategies, `torch`'s dtypes and `TensorLocationSettings`), so that a file of settings cannot run
# code.


STRATEGIES = (
    "poptorch.PipelinedExecution",
    "poptorch.ShardedExecution",
    "poptorch.SerialPhasedExecution",
    "poptorch.ParallelPhasedExecution",
    "poptorch.Phase",
    "poptorch.Stage",
)


class ConfigFileError(PackhorseError):
    """A file of settings has a line that is not a setting."""


def apply_file(options: Settings, path: Path) -> None:
    """Apply every line of the file to `options`, in order; an error names the line."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except OSError as error:
        raise ConfigFileError(f"{line_prefix()}cannot read {path}: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        if (text := line.strip()) and not text.startswith("#"):
            try:
                _call(options, ast.parse(text, mode="eval").body)
            except (SyntaxError, PackhorseError, TypeError, ValueError) as error:
                reason = error.msg if isinstance(error, SyntaxError) else error
                raise ConfigFileError(f"{path.name}:{number}: {text!r}: {reason}") from error


def _call(options: Any, node: ast.AST) -> Any:
    """Evaluate `deviceIterations(1)` or a chain of such calls; returns what the last returned."""
    if not isinstance(node, ast.Call):
        raise ConfigFileError("a line is a call, as deviceIterations(10)")
    args = [_value(argument) for argument in node.args]
    kwargs = {word.arg: _value(word.value) for word in node.keywords if word.arg}
    return _target(options, node.func)(*args, **kwargs)


def _target(options: Any, node: ast.AST) -> Any:
    """The method that a call names: of `options`, of a group, or of what an earlier call returned.

    `Training.gradientAccumulation` is an attribute of the group; in `a(1).b(2)` the second method
    belongs to the value of the first call, so `_call` and `_target` call each other.
    """
    if isinstance(node, ast.Name):
        return getattr(options, _public(node.id))
    if isinstance(node, ast.Attribute):
        owner = node.value
        owner = _call(options, owner) if isinstance(owner, ast.Call) else _target(options, owner)
        return getattr(owner, _public(node.attr))
    raise ConfigFileError("a line is a call, as deviceIterations(10)")


def _public(name: str) -> str:
    """The name; raises if it is private, because `__class__` and its like lead to any code."""
    if name.startswith("_") and name != "_Popart":
        raise ConfigFileError(f"{name} is not a setting")
    return name


def _value(node: ast.AST) -> Any:
    """The value of an argument: a literal, a member of an enumeration, a dtype, a location."""
    if isinstance(node, ast.Attribute):
        return _named_value(ast.unparse(node))
    if isinstance(node, ast.Call) and ast.unparse(node.func) in STRATEGIES:
        from packhorse_port import ops

        kind = getattr(ops, ast.unparse(node.func).removeprefix("poptorch."))
        return kind(*map(_value, node.args))
    if isinstance(node, ast.Call) and "TensorLocationSettings" in ast.unparse(node.func):
        return _location(node)
    try:
        return ast.literal_eval(ast.unparse(node))
    except ValueError as error:
        raise ConfigFileError(f"{ast.unparse(node)} is not a plain value") from error


def _json_value(value: Any) -> Any:
    """A value of JSON; `OutputMode.All` is the member of the enumeration."""
    is_name = isinstance(value, str) and hasattr(enums, value.partition(".")[0])
    return _named_value(f"poptorch.{value}") if is_name and "." in value else value


def _named_value(name: str) -> Any:
    """The value of `poptorch.OutputMode.All` or `torch.half`."""
    first, *rest = name.split(".")
    if (
        first == "torch"
        and len(rest) == 1
        and isinstance(getattr(torch, rest[0], None), torch.dtype)
    ):
        return getattr(torch, rest[0])
    if first == "poptorch" and len(rest) == 2:
        kind = getattr(enums, rest[0], None)
        if isinstance(kind, type) and issubclass(kind, Enum) and rest[1] in kind.__members__:
            return kind[rest[1]]
    raise ConfigFileError(f"{name} is neither of poptorch's enumerations nor of torch's types")


def _location(node: ast.Call) -> Any:
    """The value of `poptorch.TensorLocationSettings().useOnChipStorage(False)` and such chains."""
    if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Call):
        method = getattr(_location(node.func.value), _public(node.func.attr))
        return method(*[ast.literal_eval(argument) for argument in node.args])
    return enums.TensorLocationSettings()
