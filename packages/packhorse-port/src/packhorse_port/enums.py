"""PopTorch's enumerations, by its own names and numbers, and where it would store a tensor.

Scripts pass these around, compare them and now and then print them, so the members and their values
are those of PopTorch 3.x (`AnchorMode` is what 2.x called `OutputMode`). What a member *means* here
stands with whoever acts on it: output modes in `outputs`, reductions in `step`, loader modes in
`loader`. Many have no meaning on a CPU or GPU; `options` says so when one is set.
"""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import Any, Self

from packhorse.errors import InputError


class OutputMode(IntEnum):
    """Which of a host call's batches the outputs are returned for.

    `Final` the last, `EveryN` each nth, `All` every one, `Sum` their sum; `Default` is `Final` for
    training and `All` for inference.
    """

    Final = 0
    EveryN = 1
    All = 2
    Sum = 3
    Default = 4


AnchorMode = OutputMode


class ReductionType(IntEnum):
    """How several values, a loss or gradients, become one."""

    Sum = 0
    Mean = 1
    NoReduction = 2


class MeanReductionStrategy(IntEnum):
    """When a mean over micro batches divides: on the way, at the end, or half and half."""

    Running = 0
    Post = 1
    PostAndLoss = 2


class DataLoaderMode(IntEnum):
    """Read when asked; read ahead beside the caller; read ahead and rebatch across workers."""

    Sync = 0
    Async = 1
    AsyncRebatched = 2


class SharingStrategy(IntEnum):
    """How PopTorch's reading process hands tensors over; here a thread does, which shares all."""

    SharedMemory = 0
    FileSystem = 1
    Fork = 2
    ForkServer = 3


class ConnectionType(IntEnum):
    """When the device is attached: at once, when there is something to run, or never."""

    Always = 0
    OnDemand = 1
    Never = 2


class HalfFloatCastingBehavior(IntEnum):
    """The type of an operation between float16 and float32."""

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
    """The stage of a block that was given none: its device's number, or the next one."""

    SameAsIpu = 0
    AutoIncrement = 1


class Liveness(IntEnum):
    """Where phased execution leaves activations between phases."""

    AlwaysLive = 0
    OffChipAfterFwd = 1
    OffChipAfterFwdNoOverlap = 2
    OffChipAfterEachPhase = 3


class MatMulSerializationMode(Enum):
    """The dimension a matrix product is cut along."""

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
    """Where a kind of tensor would lie on an IPU: kept, compared, printed, without effect here."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def _with(self, name: str, value: Any, kind: type) -> Self:
        if not isinstance(value, kind):
            raise InputError(f"{name} takes a {kind.__name__}, not {value!r}")
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
        """As PopTorch writes them: numbers by name."""
        return {name: int(value) for name, value in self.settings.items()}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorLocationSettings) and self.settings == other.settings

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __repr__(self) -> str:
        return f"TensorLocationSettings({self.settings})"
