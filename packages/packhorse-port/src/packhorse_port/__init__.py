"""PopTorch's interface on a CPU or GPU: `import packhorse_port as poptorch`.

    opts = poptorch.Options().deviceIterations(20)
    loader = poptorch.DataLoader(opts, dataset, batch_size=16, shuffle=True)
    training = poptorch.trainingModel(model, options=opts, optimizer=optimizer)
    for data, labels in loader:
        output, loss = training(data, labels)

Names, arguments and semantics are those of PopTorch 3.3; `names` lists how each is handled. They
are imported on first use. A name that PopTorch has and this package lacks raises an error that says
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
    from packhorse_port.executor import PoplarExecutor as PoplarExecutor
    from packhorse_port.executor import inferenceModel as inferenceModel
    from packhorse_port.executor import load as load
    from packhorse_port.executor import trainingModel as trainingModel
    from packhorse_port.loader import AsynchronousDataAccessor as AsynchronousDataAccessor
    from packhorse_port.loader import DataLoader as DataLoader
    from packhorse_port.losses import identity_loss as identity_loss
    from packhorse_port.ops import BeginBlock as BeginBlock
    from packhorse_port.ops import Block as Block
    from packhorse_port.options import Options as Options

__version__ = "3.3.0"  # of PopTorch, whose interface this is

# The public names by the module that defines each; a module is imported when a name is first used.
_NAMES_BY_MODULE = {
    "executor": "PoplarExecutor inferenceModel load registerPostCompileHook registerPreCompileHook "
    "trainingModel",
    "options": "ConfigFileError Options",
    "loader": "AsynchronousDataAccessor DataLoader",
    "step": "ICustomArgParser registerCustomArgParser",
    "losses": "identity_loss isRunningOnIpu",
    "hardware": "Error RecoverableError UnrecoverableError ipuHardwareIsAvailable "
    "ipuHardwareVersion logger setLogLevel",
    "casting": "autocast",
    "custom_ops": "custom_op registerCustomOp",
    "point_clouds": "fps nearest",
    "ops": "Attribute BeginBlock Block BlockFunction CPU MultiConv NameScope "
    "ParallelPhasedExecution Phase PipelinedExecution SerialPhasedExecution ShardedExecution Stage "
    "addBlock cond ctc_beam_search_decoder dynamic_slice dynamic_update for_loop ipu_print_tensor "
    "module_repr nop "
    "recomputationCheckpoint removeBlocks serializedMatMul set_available_memory "
    "set_overlap_for_input set_overlap_for_output",
    "enums": "AnchorMode AutoStage CommGroupType ConnectionType DataLoaderMode "
    "HalfFloatCastingBehavior Liveness MatMulSerializationMode MeanReductionStrategy "
    "MultiConvPlanType OutputMode OverlapMode ReductionType SharingStrategy SyncPattern "
    "TensorLocationSettings VariableRetrievalMode",
}
_MODULE_OF = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names.split()}
_MODULES = (
    "autocasting",
    "enums",
    "ops",
    "optim",
    "options",
    "poptorch_core",
    "profiling",
    "testing",
)
__all__ = [*_MODULE_OF, *_MODULES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"packhorse_port.{name}")
    if name not in _MODULE_OF:
        from packhorse_port.names import FAILS, nearest
        from packhorse_port.notices import line_prefix

        hint = f": {FAILS[name]}" if name in FAILS else nearest(name, list(_MODULE_OF))
        # `from poptorch import name` replaces the message of an AttributeError by its own.
        kind = ImportError if _is_import_from(sys._getframe(1)) else AttributeError
        raise kind(f"{line_prefix()}poptorch.{name} is not provided here{hint}")
    return getattr(import_module(f"packhorse_port.{_MODULE_OF[name]}"), name)


def _is_import_from(frame: FrameType) -> bool:
    """Whether a frame currently executes `from … import`."""
    return frame.f_code.co_code[frame.f_lasti] == opmap["IMPORT_FROM"]


def __dir__() -> list[str]:
    return sorted(__all__)
