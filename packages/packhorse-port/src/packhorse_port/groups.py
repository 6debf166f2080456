"""The groups of `Options`: `Training`, `Precision`, `TensorLocations`, `Distributed` and the rest.

Two of `Training`'s settings and those of `Distributed` have a meaning here. The others are about an
IPU's memory, its arithmetic and its compiler: kept, and said once (`settings.ignored`).
"""

from __future__ import annotations

import os
from typing import Any, ClassVar, Self

import torch

from packhorse.errors import InputError
from packhorse_port.enums import (
    HalfFloatCastingBehavior,
    MeanReductionStrategy,
    ReductionType,
    TensorLocationSettings,
)
from packhorse_port.notices import place, say_once
from packhorse_port.settings import Settings, Use, ignored, member, whole

NO_TILES = "memory is not divided into tiles here"
NOT_SCALED = "no loss is scaled: in fp32 nothing vanishes, in half small gradients may"
ONE_DEVICE = "the model runs on the one device at hand"


class Training(Settings):
    """`Options.Training`."""

    DEFAULTS: ClassVar[dict[str, Any]] = {
        "gradient_accumulation": 1,
        "accumulation_and_replication_reduction_type": ReductionType.Mean,
    }

    def gradientAccumulation(self, gradient_accumulation: int) -> Self:
        """Micro batches whose gradients make one step."""
        count = whole("gradientAccumulation", gradient_accumulation)
        return self._set("gradientAccumulation", gradient_accumulation=count)

    def accumulationAndReplicationReductionType(self, reduction_type: ReductionType) -> Self:
        """Whether the gradients of micro batches and replicas are averaged or added up."""
        name = "accumulationAndReplicationReductionType"
        if member(name, reduction_type, ReductionType) == ReductionType.NoReduction:
            raise InputError(
                f"{place()}{name} takes poptorch.ReductionType.Mean or .Sum, not NoReduction"
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
    """`Options.Precision`: types follow PyTorch's own rules; `model.half()` has its effect."""

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
    """`Options.TensorLocations`: all tensors lie in the memory of the one device."""

    DEFAULTS: ClassVar[dict[str, Any]] = {}

    @ignored("num_io_tiles", None, NO_TILES)
    def numIOTiles(self, num_tiles: int) -> Self: ...

    @ignored("location_activation", None, "activations lie in the device's memory")
    def setActivationLocation(self, location: TensorLocationSettings) -> Self: ...

    @ignored("location_weight", None, "weights lie in the device's memory")
    def setWeightLocation(self, location: TensorLocationSettings) -> Self: ...

    @ignored("location_optimizer", None, "optimizer state lies in the device's memory")
    def setOptimizerLocation(self, location: TensorLocationSettings) -> Self: ...

    @ignored("location_accumulator", None, "gradients lie in the device's memory")
    def setAccumulatorLocation(self, location: TensorLocationSettings) -> Self: ...


class Distributed(Settings):
    """`Options.Distributed`: which of several processes this is; loaders divide the data by it."""

    DEFAULTS: ClassVar[dict[str, Any]] = {
        "num_distributed_processes": 1,
        "distributed_process_id": 0,
    }

    def __init__(self, use: Use) -> None:
        super().__init__(use)
        self.setEnvVarNames("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")

    @property
    def processId(self) -> int:
        return self.distributed_process_id

    @property
    def numProcesses(self) -> int:
        return self.num_distributed_processes

    def configureProcessId(self, process_id: int, num_processes: int) -> Self:
        """This is process `process_id` of `num_processes`."""
        count = whole("num_processes", num_processes)
        number = whole("process_id", process_id, least=0)
        if number >= count:
            raise InputError(f"{place()}process {number} of {count}: ids run from 0 to {count - 1}")
        values = {"num_distributed_processes": count, "distributed_process_id": number}
        return self._set("configureProcessId", **values)

    def setEnvVarNames(self, var_num_processes: str, var_process_id: str) -> Self:
        """Read both from the environment, where a launcher such as mpirun leaves them."""
        count, number = os.environ.get(var_num_processes, "1"), os.environ.get(var_process_id, "0")
        return self.configureProcessId(int(number), int(count))

    def disable(self) -> Self:
        return self.configureProcessId(0, 1)

    @ignored("ipuof_configs", None, ONE_DEVICE)
    def IPUoFConfigFiles(self, files: str | list[str]) -> Self: ...


class Jit(Settings):
    """`Options.Jit`."""

    DEFAULTS: ClassVar[dict[str, Any]] = {}

    @ignored("trace_model", True, "the module is called as it is, never traced to TorchScript")
    def traceModel(self, trace_model: bool) -> Self: ...


class Popart(Settings):
    """`Options._Popart`: options of the IPU's own compiler, hundreds; kept, each said once."""

    DEFAULTS: ClassVar[dict[str, Any]] = {"popart": {}}

    @property
    def options(self) -> dict[str, Any]:
        return self._values["popart"]

    def set(self, key: str, value: Any) -> Self:
        self._set("_Popart.set", popart={**self.options, key: value})
        say_once(
            f"_Popart.{key}", f"_Popart.set({key!r}, …) has no effect: there is no PopART here"
        )
        return self

    def setEngineOptions(self, engine_options: dict[str, str]) -> Self:
        return self.set("engineOptions", engine_options)

    def setPatterns(self, patterns: dict[str, bool], level: int = 2) -> Self:
        return self.set("patterns", patterns).set("patterns_level", level)
