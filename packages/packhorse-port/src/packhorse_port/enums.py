"""PopTorch's enumerations with its names and numbers, and `TensorLocationSettings`.

Scripts pass these around, compare them and sometimes print them, so members and values are those of
PopTorch 3.x (`AnchorMode` is `OutputMode` in 2.x). What a member does is documented where it is
used: output modes and reductions in `step`, loader modes in `loader`. Many have no effect on a CPU
or GPU; `options` logs that when one is set. Imports no torch, for `packhorse port --check`.
"""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import Any, Self

from packhorse_port.notices import UsageError


class OutputMode(IntEnum):
    """Which outputs of a host call are returned.

    `Final` the last, `EveryN` every nth, `All` all, `Sum` their sum; `Default` is `Final` for
    training and `All` for inference.
    """

    Final = 0
    EveryN = 1
    All = 2
    Sum = 3
    Default = 4


AnchorMode = OutputMode


class ReductionType(IntEnum):
    """How several values (losses, gradients) are reduced to one."""

    Sum = 0
    Mean = 1
    NoReduction = 2


class MeanReductionStrategy(IntEnum):
    """When a mean over micro batches divides: at each step, at the end, or partly at both."""

    Running = 0
    Post = 1
    PostAndLoss = 2


class DataLoaderMode(IntEnum):
    """Read on demand; read ahead in a thread; read ahead and rebatch across workers."""

    Sync = 0
    Async = 1
    AsyncRebatched = 2


class SharingStrategy(IntEnum):
    """How PopTorch's reading process passes tensors; no effect, a thread shares all memory."""

    SharedMemory = 0
    FileSystem = 1
    Fork = 2
    ForkServer = 3


class ConnectionType(IntEnum):
    """When the device is attached: immediately, at the first run, or never."""

    Always = 0
    OnDemand = 1
    Never = 2


class HalfFloatCastingBehavior(IntEnum):
    """The dtype of an operation between float16 and float32."""

    FloatDowncastToHalf = 0
    HalfUpcastToFloat = 1
    Default = 2


class SyncPattern(IntEnum):
    """Which devices wait for each other."""

    Full = 0
    SinglePipeline = 1
    ReplicaAndLadder = 2


class OverlapMode(Enum):
    """How far ahead inputs are copied while the device computes."""

    NoOverlap = "no_overlap"
    OverlapAccumulationLoop = "overlap_accumulation_loop"
    OverlapDeviceIterationLoop = "overlap_device_iteration_loop"


class AutoStage(IntEnum):
    """The stage of a block without one: its device's number, or the next number."""

    SameAsIpu = 0
    AutoIncrement = 1


class Liveness(IntEnum):
    """Where phased execution keeps activations between phases."""

    AlwaysLive = 0
    OffChipAfterFwd = 1
    OffChipAfterFwdNoOverlap = 2
    OffChipAfterEachPhase = 3


class MatMulSerializationMode(Enum):
    """The dimension along which a matrix product is split."""

    InputChannels = "input_channels"
    ReducingDim = "reducing_dim"
    OutputChannels = "output_channels"
    Disabled = "none"


class MultiConvPlanType(IntEnum):
    """Whether the convolutions of a `MultiConv` run side by side."""

    Parallel = 0
    Serial = 1


class CommGroupType(IntEnum):
    """Which replicas share one value of a variable."""

    All = 0
    Consecutive = 1
    Orthogonal = 2
    NoGrouping = 3


class VariableRetrievalMode(IntEnum):
    """Whose value of a variable is read back."""

    OnePerGroup = 0
    AllReplicas = 2


class TensorLocationSettings:
    """Where an IPU would store a kind of tensor: stored, compared, printed, without effect here."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def _with(self, name: str, value: Any, kind: type) -> Self:
        if not isinstance(value, kind):
            raise UsageError(f"{name} takes a {kind.__name__}, not {value!r}")
        self.settings[name] = value
        return self

    def minElementsForOffChip(self, min_elements: int) -> Self:
        return self._with("minElementsForOffChip", min_elements, int)

    def minElementsForReplicatedTensorSharding(self, min_elements: int) -> Self:
        return self._with("minElementsForReplicatedTensorSharding", min_elements, int)

    def useOnChipStorage(self, use: bool | None = True) -> Self:
        if use is None:
            self.settings.pop("onChip", None)
            return self
        return self._with("onChip", use, bool)

    def useReplicatedTensorSharding(self, use: bool = True) -> Self:
        return self._with("useReplicatedTensorSharding", use, bool)

    def useIOTilesToLoad(self, use: bool = True) -> Self:
        return self._with("useIOTilesToLoad", use, bool)

    def useIOTilesToStore(self, use: bool = True) -> Self:
        return self._with("useIOTilesToStore", use, bool)

    def toDict(self) -> dict[str, int]:
        """The settings as numbers by name, as in PopTorch."""
        return {name: int(value) for name, value in self.settings.items()}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorLocationSettings) and self.settings == other.settings

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __repr__(self) -> str:
        return f"TensorLocationSettings({self.settings})"
