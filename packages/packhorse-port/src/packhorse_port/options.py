"""`Options`: how a model is run, by PopTorch's own names.

    opts = Options().deviceIterations(16).replicationFactor(2)
    opts.Training.gradientAccumulation(8)
    opts.device_iterations, opts.gradient_accumulation, opts.reduction    # what others read

Every method returns its group, so that calls chain. The names, defaults and groups are those of
PopTorch 3.3's documentation; what an IPU has and this machine has not is accepted and said once
(`settings.ignored`), anything else unknown is an error that names the nearest setting. `randomSeed`
seeds torch as PopTorch does, at the call. The executable cache is the last of: the variable
`TF_POPLAR_FLAGS` (its `--executable_cache_path`), `POPTORCH_CACHE_DIR`, `enableExecutableCaching`.
"""

from __future__ import annotations

import copy
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import torch

from packhorse.errors import InputError
from packhorse_port import groups
from packhorse_port.enums import ConnectionType, OutputMode, ReductionType, SyncPattern
from packhorse_port.notices import caller, place
from packhorse_port.settings import Settings, Use, ignored, member, whole

PARTS: dict[str, type[Settings]] = {
    "Training": groups.Training,
    "Precision": groups.Precision,
    "TensorLocations": groups.TensorLocations,
    "Distributed": groups.Distributed,
    "Jit": groups.Jit,
    "_Popart": groups.Popart,
}


# How steps are run, by the names of PACKHORSE_PORT_STEPS, as `compileStep` takes it.
COMPILE: dict[str, bool | str] = {"modules": False, "traced": "trace", "compiled": True}


class Options(Settings):
    """How a model is run. Fixed once a loader or model has taken it; `clone()` gives a free one."""

    DEFAULTS: ClassVar[dict[str, Any]] = {
        "device_iterations": 1,
        "replication_factor": 1,
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
        super().__init__(Use())
        self._values["cache_path"] = cache_from_environment(os.environ)
        self._values["compile_step"] = COMPILE[_choice("PACKHORSE_PORT_STEPS", *COMPILE)]
        shared = _choice("PACKHORSE_PORT_WEIGHTS", "apart", "shared") == "shared"
        self._values["share_weights"] = shared
        self.__dict__["_parts"] = {name: group(self._use) for name, group in PARTS.items()}

    # What others read

    @property
    def Training(self) -> groups.Training:
        return self._parts["Training"]

    @property
    def Precision(self) -> groups.Precision:
        return self._parts["Precision"]

    @property
    def TensorLocations(self) -> groups.TensorLocations:
        return self._parts["TensorLocations"]

    @property
    def Distributed(self) -> groups.Distributed:
        return self._parts["Distributed"]

    @property
    def Jit(self) -> groups.Jit:
        return self._parts["Jit"]

    @property
    def _Popart(self) -> groups.Popart:
        return self._parts["_Popart"]

    @property
    def gradient_accumulation(self) -> int:
        return self.Training.gradient_accumulation

    @property
    def reduction(self) -> ReductionType:
        """Mean or Sum: over the micro batches of a step and over the replicas alike."""
        return self.Training.accumulation_and_replication_reduction_type

    @property
    def output_every(self) -> int:
        """The n of `EveryN`; 1 for the other modes."""
        return self.output_return_period

    @property
    def batches_per_call(self) -> int:
        """Micro batches that one host call consumes: iterations × replicas × accumulation."""
        return self.device_iterations * self.replication_factor * self.gradient_accumulation

    @property
    def frozen(self) -> bool:
        return bool(self._use.by)

    # Fixing and copying

    def freeze(self, by: str) -> None:
        """`by` (a loader, a model) goes by these options from now on."""
        if not self._use.by:
            self._use.by, self._use.line = by, caller()

    def taken(self, by: str, training: bool) -> Options:
        """A model goes by these: they are fixed, and its own copy knows which outputs return."""
        copy = self.clone()
        if copy.defaultOutputMode():
            copy._values["output_mode"] = OutputMode.Final if training else OutputMode.All
        for options in (self, copy):
            options.freeze(by)
        return copy

    def clone(self) -> Options:
        """The same settings, free to change."""
        twin = Options()
        for mine, its in zip(self._groups(), twin._groups(), strict=True):
            its.__dict__["_values"] = copy.deepcopy(mine._values)
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> Options:
        return self.clone()

    def _groups(self) -> list[Settings]:
        return [self, *self._parts.values()]

    def toDict(self) -> dict[str, Any]:
        """Every setting of every group in one flat dictionary of plain values."""
        merged = super().toDict()
        for part in self._parts.values():
            merged |= part.toDict()
        return merged

    @classmethod
    def fromDict(cls, values: Mapping[str, Any]) -> Options:
        """The options that `toDict` described."""
        options = cls()
        for group in options._groups():
            group._restore(dict(values))
        return options

    def loadFromFile(self, filepath: str | os.PathLike[str]) -> Self:
        """Apply a file of settings, one a line as a script would write it, without `options.`."""
        from packhorse_port.optionfile import apply

        apply(self, Path(filepath))
        return self

    def __repr__(self) -> str:
        changed = self._changed()
        for name, part in self._parts.items():
            changed |= {f"{name}.{key}": value for key, value in part._changed().items()}
        return f"Options({', '.join(f'{name}={value!r}' for name, value in changed.items())})"

    # What has a meaning

    def deviceIterations(self, device_iterations: int) -> Self:
        """Steps within one host call."""
        count = whole("deviceIterations", device_iterations)
        return self._set("deviceIterations", device_iterations=count)

    def replicationFactor(self, replication_factor: int) -> Self:
        """Copies of the model that each take a share of every step."""
        count = whole("replicationFactor", replication_factor)
        return self._set("replicationFactor", replication_factor=count)

    def outputMode(self, output_mode: OutputMode, output_return_period: int | None = None) -> Self:
        """Which outputs of a host call come back; `EveryN` needs its n."""
        mode = member("outputMode", output_mode, OutputMode)
        every = 1
        if mode == OutputMode.EveryN:
            if output_return_period is None:
                raise InputError(
                    f"{place()}write outputMode(poptorch.OutputMode.EveryN, n): n is missing"
                )
            every = whole("output_return_period", output_return_period)
        return self._set("outputMode", output_mode=mode, output_return_period=every)

    def anchorMode(self, anchor_mode: OutputMode, anchor_return_period: int | None = None) -> Self:
        """What PopTorch 2 called `outputMode`."""
        return self.outputMode(anchor_mode, anchor_return_period)

    def defaultOutputMode(self) -> bool:
        return self.output_mode == OutputMode.Default

    def defaultAnchorMode(self) -> bool:
        return self.defaultOutputMode()

    def randomSeed(self, random_seed: int) -> Self:
        """Seed torch, now: a model draws from torch's own generator."""
        seed = whole("randomSeed", random_seed, least=0)
        self._set("randomSeed", random_seed=seed)
        torch.manual_seed(seed)
        return self

    def enableExecutableCaching(self, path: str | os.PathLike[str] | None) -> Self:
        """Where code compiled by `compileStep(True)` is kept; None: in Packhorse's own cache."""
        kept = None if path is None else os.path.expanduser(os.fspath(path))
        return self._set("enableExecutableCaching", cache_path=kept)

    def compileStep(self, enabled: bool | str = True) -> Self:
        """Not PopTorch's: compile steps (True), trace them ("trace"), or run Python (False).

        False is the default: forward is called for every micro batch. Traced, its operations are
        recorded at the first call and run without Python from then on, to the same bits; compiled,
        they go through torch's inductor, equal within rounding, and on CUDA through CUDA graphs.
        Either way what forward does in Python is frozen as it was at the first call: attributes,
        lists, choices by a value. PACKHORSE_PORT_STEPS (modules, traced, compiled) sets it for
        scripts that are run unchanged.
        """
        if enabled not in COMPILE.values():
            raise InputError(f"{place()}compileStep takes True, False or 'trace', not {enabled!r}")
        return self._set("compileStep", compile_step=enabled)

    @property
    def steps(self) -> str:
        """How steps are run: "modules", "traced" or "compiled"."""
        names = [name for name, value in COMPILE.items() if value == self.compile_step]
        return names[0] if names else "modules"

    def shareWeights(self, enabled: bool = True) -> Self:
        """Not PopTorch's: what the script changes in the module or optimizer acts at once.

        By default an executor has weights of its own, copied when PopTorch says so. On a CPU shared
        weights are the module's own tensors, so there is one set of them in memory.
        PACKHORSE_PORT_WEIGHTS=shared sets it for scripts that are run unchanged.
        """
        return self._set("shareWeights", share_weights=bool(enabled))

    def updatableNamedBuffers(self, buffers: list[str]) -> Self:
        """Which buffers `copyNamedBuffersToDevice` copies."""
        return self._set("updatableNamedBuffers", updatable_named_buffers=tuple(buffers))

    def enableSyntheticData(self, enabled: bool) -> Self:
        """Run on random data of the right shapes, made once, to measure without reading."""
        return self._set("enableSyntheticData", synthetic_data=bool(enabled))

    def connectionType(self, connection_type: ConnectionType) -> Self:
        """When the device is attached; `Never` compiles and does not run."""
        kind = member("connectionType", connection_type, ConnectionType)
        return self._set("connectionType", connection_type=kind)

    def useOfflineIpuTarget(self, ipu_version: int = 2) -> Self:
        """Compile only, as `connectionType(Never)`; the version of the IPU says nothing here."""
        return self.connectionType(ConnectionType.Never)

    def modelName(self, name: str) -> Self:
        return self._set("modelName", model_name=name)

    def setExecutionStrategy(self, strategy: Any) -> Self:
        """How blocks would be spread over devices; one device gives the same numbers."""
        return self._set("setExecutionStrategy", execution_strategy=strategy)

    def broadcastBuffers(self, broadcast_buffers: bool = True) -> Self:
        """Do replicas keep one set of buffers, or each its own?"""
        return self._set("broadcastBuffers", broadcast_buffers=bool(broadcast_buffers))

    # What has none

    @ignored("auto_round_num_ipus", False, groups.ONE_DEVICE)
    def autoRoundNumIPUs(self, auto_round_num_ipus: bool = True) -> Self: ...

    @ignored("use_model", False, "there is no simulated IPU; " + groups.ONE_DEVICE)
    def useIpuModel(self, use_model: bool) -> Self: ...

    @ignored("ipu_id", None, groups.ONE_DEVICE)
    def useIpuId(self, ipu_id: int) -> Self: ...

    @ignored("sync_pattern", SyncPattern.Full, "one device has nobody to wait for")
    def syncPattern(self, sync_pattern: SyncPattern) -> Self: ...

    @ignored("available_memory_proportion", {}, groups.NO_TILES)
    def setAvailableMemoryProportion(
        self, available_memory_proportion: dict[str, float]
    ) -> Self: ...

    @ignored("log_dir", ".", "no log files are written")
    def logDir(self, log_dir: str) -> Self: ...

    @ignored("profile_dir", None, "profile with torch.profiler")
    def enableProfiling(self, profile_dir: str | None = ".") -> Self: ...

    @ignored("log_cycle_count", False, "ask the model: cycleCount() answers with time")
    def logCycleCount(self, log_cycle_count: bool) -> Self: ...

    @ignored("compilation_progress_bar", None, "compiling shows no progress bar")
    def showCompilationProgressBar(self, show: bool = True) -> Self: ...

    @ignored("relax_optimizer_checks", None, "an optimizer's attributes are not compared")
    def relaxOptimizerAttributesChecks(self, relax: bool = True) -> Self: ...

    @ignored("stable_norm", False, "torch's norms are the stable ones")
    def enableStableNorm(self, enabled: bool) -> Self: ...

    @ignored("max_repeat_logs", 4, "each notice is said once")
    def maxRepeatLogs(self, max_lines: int | None) -> Self: ...

    @ignored("location_excludes", (), "no source locations are recorded")
    def appendToLocationExcludes(self, *excludes: str) -> Self: ...

    @ignored("location_excludes", (), "no source locations are recorded")
    def sourceLocationExcludes(self, excludes: list[str]) -> Self: ...

    @ignored("module_namescope", False, "operations have no name scope here")
    def disableModuleNamescope(self) -> Self: ...

    @ignored("anchored_tensors", None, "read the tensor with a forward hook of its module")
    def anchorTensor(
        self,
        short_name: str,
        long_name: str,
        output_mode: OutputMode | None = None,
        output_return_period: int | None = 1,
    ) -> Self: ...


def _choice(variable: str, *choices: str) -> str:
    """What a variable of the environment chooses; the first choice if it is not set."""
    value = os.environ.get(variable) or choices[0]
    if value not in choices:
        raise InputError(f"{variable} is {value!r}; set it to one of {', '.join(choices)}")
    return value


def cache_from_environment(environ: Mapping[str, str]) -> str | None:
    """The folder for executables that the environment names, for PopTorch or for TensorFlow."""
    path = environ.get("POPTORCH_CACHE_DIR", "")
    flags = iter(shlex.split(environ.get("TF_POPLAR_FLAGS", "")))
    for flag in flags:
        name, given, value = flag.partition("=")
        if name == "--executable_cache_path" and not path:
            path = value if given else next(flags, "")
    return os.path.expanduser(path) if path else None
