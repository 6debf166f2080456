"""PopTorch's own names, for the CPU or GPU at hand: `import packhorse_port as poptorch`.

    opts = poptorch.Options().deviceIterations(20)
    loader = poptorch.DataLoader(opts, dataset, batch_size=16, shuffle=True)
    training = poptorch.trainingModel(model, options=opts, optimizer=optimizer)
    for data, labels in loader:
        output, loss = training(data, labels)

The names, arguments and semantics are those of PopTorch 3.3; `names` says of each what becomes of
it. They are imported on first use. A name that PopTorch has and this has not is an error that says
what to write instead.
"""

import sys
from dis import opmap
from importlib import import_module
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from packhorse_port import enums as enums
    from packhorse_port import ops as ops
    from packhorse_port import optim as optim
    from packhorse_port import options as options
    from packhorse_port.blocks import BeginBlock as BeginBlock
    from packhorse_port.blocks import Block as Block
    from packhorse_port.executor import PoplarExecutor as PoplarExecutor
    from packhorse_port.loader import AsynchronousDataAccessor as AsynchronousDataAccessor
    from packhorse_port.loader import DataLoader as DataLoader
    from packhorse_port.losses import identity_loss as identity_loss
    from packhorse_port.options import Options as Options
    from packhorse_port.wrapping import inferenceModel as inferenceModel
    from packhorse_port.wrapping import load as load
    from packhorse_port.wrapping import trainingModel as trainingModel

__version__ = "3.3.0"  # of PopTorch, whose interface this is

_ROOMS = {
    "executor": "PoplarExecutor",
    "wrapping": "inferenceModel load trainingModel",
    "options": "Options",
    "loader": "AsynchronousDataAccessor DataLoader",
    "arguments": "ICustomArgParser registerCustomArgParser",
    "faults": "Error RecoverableError UnrecoverableError",
    "losses": "identity_loss isRunningOnIpu",
    "hardware": "ipuHardwareIsAvailable ipuHardwareVersion setLogLevel",
    "blocks": "BeginBlock Block BlockFunction ParallelPhasedExecution Phase PipelinedExecution "
    "SerialPhasedExecution ShardedExecution Stage addBlock removeBlocks",
    "ops": "Attribute CPU MultiConv NameScope ctc_beam_search_decoder dynamic_slice dynamic_update "
    "for_loop ipu_print_tensor nop recomputationCheckpoint serializedMatMul set_available_memory "
    "set_overlap_for_input set_overlap_for_output",
    "enums": "AnchorMode AutoStage CommGroupType ConnectionType DataLoaderMode "
    "HalfFloatCastingBehavior Liveness MatMulSerializationMode MeanReductionStrategy "
    "MultiConvPlanType OutputMode OverlapMode ReductionType SharingStrategy SyncPattern "
    "TensorLocationSettings VariableRetrievalMode",
}
_HOMES = {name: room for room, names in _ROOMS.items() for name in names.split()}
_MODULES = ("enums", "ops", "optim", "options")
__all__ = [*_HOMES, *_MODULES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"packhorse_port.{name}")
    if name not in _HOMES:
        from packhorse_port.names import FAILS, nearest
        from packhorse_port.notices import place

        hint = f": {FAILS[name]}" if name in FAILS else nearest(name, list(_HOMES))
        # Of an AttributeError, `from poptorch import name` would show nothing.
        kind = ImportError if _imports(sys._getframe(1)) else AttributeError
        raise kind(f"{place()}poptorch.{name} is not provided here{hint}")
    return getattr(import_module(f"packhorse_port.{_HOMES[name]}"), name)


def _imports(frame: FrameType) -> bool:
    """Is a frame at a `from … import`?"""
    return frame.f_code.co_code[frame.f_lasti] == opmap["IMPORT_FROM"]


def __dir__() -> list[str]:
    return sorted(__all__)
