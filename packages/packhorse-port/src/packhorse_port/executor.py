"""PopTorch's models: `trainingModel` and `inferenceModel` wrap a module in a `PoplarExecutor`.

    training = trainingModel(model, options=opts, optimizer=optimizer)
    inference = inferenceModel(model.eval(), options=opts)
    out, loss = training(data, labels)                    # one host call: many steps
    training.save("model.poptorch")

An executor has PopTorch's methods and forwards other attributes to the module. It keeps its own
copy of weights, optimizer settings and train/eval mode (`device_state`) and copies them from and to
the module at the points that PopTorch's user guide names. With `Options().shareWeights()` changes
to the module take effect immediately. Latency and cycle queries return wall-clock times of the last
call.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.hooks import RemovableHandle

from packhorse import status
from packhorse.errors import PackhorseError
from packhorse_port import saved
from packhorse_port.anchors import AnchoredTensors, tensor_names
from packhorse_port.device_state import Constants, DeviceOptimizer, DeviceWeights, ExecutorMode
from packhorse_port.enums import ConnectionType
from packhorse_port.names import NAMES, nearest
from packhorse_port.notices import UsageError, line_prefix, log_once
from packhorse_port.ops import module_repr
from packhorse_port.options import Options
from packhorse_port.replicas import ReplicaGroup, local_device
from packhorse_port.step import CudaGraphRunner, Step, StepSettings

DEFAULT_LEARNING_RATE = 0.01  # of the SGD that PopTorch uses when no optimizer is passed
# An IPU has no 64-bit numbers, so that scripts get outputs of 32.
WIDE_DTYPES = {torch.int64: torch.int32, torch.float64: torch.float32}
EVENTS = ("input", "input_complete", "output", "output_complete")


class CallTimes:
    """PopTorch's latency queries, answered with the wall-clock times of the last call."""

    _times: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)  # one per event in EVENTS

    def cycleCount(self) -> int:
        """Compute time of the last call in nanoseconds; one nanosecond counts as one cycle."""
        if not self._times[2]:
            raise UsageError(
                f"{line_prefix()}cycleCount() is that of the last call: call the model first"
            )
        return int((self._times[2] - self._times[1]) * 1e9)

    def getPerfCounters(self) -> dict[str, list[list[float]]]:
        """When the inputs and outputs of the last call were requested and complete."""
        times = zip(EVENTS, self._times, strict=True)
        return {name: [[seconds] if seconds else []] for name, seconds in times}

    def _latency(self, begin: int, end: int) -> tuple[float, float, float]:
        """Minimum, maximum and mean; all equal, because a call is timed as a whole."""
        seconds = self._times[end] - self._times[begin]
        return (seconds, seconds, seconds)

    def getLatency(self) -> tuple[float, float, float]:
        """Seconds of the whole last call."""
        return self._latency(0, 3)

    def getHostIpuLatency(self) -> tuple[float, float, float]:
        """Seconds spent on copying the inputs to the device."""
        return self._latency(0, 1)

    def getComputeLatency(self) -> tuple[float, float, float]:
        """Seconds spent on computing."""
        return self._latency(1, 2)

    def getIpuHostLatency(self) -> tuple[float, float, float]:
        """Seconds spent on copying the outputs to the host."""
        return self._latency(2, 3)


# Which modules are wrapped by a trainingModel. PopTorch refuses a second one, which would train a
# second set of weights, and gives a wrapped module two methods of its executor.

WRAPPED_METHODS = ("destroy", "copyWeightsToHostIfNeeded")
_wrapped: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Any]] = weakref.WeakKeyDictionary()


class AlreadyWrapped(PackhorseError, RuntimeError):
    """A module was passed to a second trainingModel; PopTorch raises a RuntimeError."""


class ExecutorMethod:
    """A method of the executor on the module it wraps; does nothing once copied or outlived.

    It is an object and not a bound method, so that a pickle or deep copy of the module does not
    drag the executor along: `__reduce__` drops the reference.
    """

    def __init__(self, name: str = "", executor: weakref.ref[Any] | None = None) -> None:
        self.name = name
        self.executor = executor

    def __call__(self) -> Any:
        executor = self.executor() if self.executor else None
        return getattr(executor, self.name)() if executor else False

    def __reduce__(self) -> Any:
        return ExecutorMethod, (self.name,)


def refuse_wrapped(model: nn.Module) -> None:
    """Raise if a trainingModel wraps this module; the message is PopTorch's."""
    reference = _wrapped.get(model)
    if reference is not None and reference() is not None:
        raise AlreadyWrapped(
            f"{line_prefix()}Model has already been wrapped in 'poptorch.trainingModel'. Call"
            " model.destroy() on the model to unwrap before wrapping again."
        )


def wrap(model: nn.Module, executor: object) -> None:
    """Record that a trainingModel wraps this module."""
    reference = weakref.ref(executor)
    _wrapped[model] = reference
    for name in WRAPPED_METHODS:
        if not hasattr(model, name):
            model.__dict__[name] = ExecutorMethod(name, reference)


def unwrap(model: nn.Module) -> None:
    """Allow the module to be wrapped again."""
    _wrapped.pop(model, None)
    for name in WRAPPED_METHODS:
        if isinstance(model.__dict__.get(name), ExecutorMethod):
            del model.__dict__[name]


# Progress for `packhorse monitor`. A script may make thousands of calls per second, so a call only
# increments counters; they are published once per second (`packhorse.status`).

PUBLISH_SECONDS = 1.0
EXECUTOR_NUMBERS = itertools.count(1)

ReportCall = Callable[[int], None]
StopReporting = Callable[[], Any]


def report_nothing(samples: int) -> None:
    """Report of an executor that is not attached to a device."""


def stop_nothing() -> None:
    """Counterpart of `report_nothing`."""


def start_reporting(
    owner: object, activity: str, labels: Mapping[str, Any]
) -> tuple[ReportCall, StopReporting]:
    """Publish progress of `owner`: a function to call after each host call, and one to stop.

    Publishing also stops when `owner` is collected or the process ends.
    """
    stack = ExitStack()
    publish = stack.enter_context(status.publishing(f"port-{next(EXECUTOR_NUMBERS)}", labels))
    calls = samples = published_calls = 0
    published = time.monotonic()
    publish({"does": f"{activity}, first call", "calls": 0, "sequences": 0})

    def report(new_samples: int) -> None:
        nonlocal calls, samples, published_calls, published
        calls += 1
        samples += new_samples
        now = time.monotonic()
        if now - published < PUBLISH_SECONDS:
            return
        speed = (calls - published_calls) / (now - published)
        published_calls = calls
        published = now
        rates = {"calls_per_second": speed, "calls": calls, "sequences": samples}
        publish({"does": f"{activity}, {speed:,.3g} host calls/s", **rates})

    return report, weakref.finalize(owner, stack.close)


def count_samples(leaves: Sequence[Any]) -> int:
    """Samples of a call: the first dimension of its first tensor."""
    return next((len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()), 0)


# Hooks that PopTorch calls around the compilation of any model; here when it is first called.

_before_compiling: OrderedDict[int, Callable[[], Any]] = OrderedDict()
_after_compiling: OrderedDict[int, Callable[[], Any]] = OrderedDict()


def registerPreCompileHook(hook: Callable[[], Any]) -> RemovableHandle:
    """Call the hook before each model's first call; its handle has `remove()`."""
    return _register(_before_compiling, hook)


def registerPostCompileHook(hook: Callable[[], Any]) -> RemovableHandle:
    """Call the hook when a model's first call has set up its step; its handle has `remove()`."""
    return _register(_after_compiling, hook)


def _register(
    hooks: OrderedDict[int, Callable[[], Any]], hook: Callable[[], Any]
) -> RemovableHandle:
    if not callable(hook):
        raise UsageError(f"{line_prefix()}a hook must be callable, not {hook!r}")
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def _call_hooks(hooks: OrderedDict[int, Callable[[], Any]]) -> None:
    for hook in list(hooks.values()):
        hook()


class PoplarExecutor(CallTimes):
    """Runs a module as PopTorch does; `trainingModel` and `inferenceModel` return it."""

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        training: bool,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        self._user_model = model
        self._options = options.freeze_for_model(
            "trainingModel" if training else "inferenceModel", training
        )
        self._training = training
        self._device = local_device()
        settings = StepSettings.of(self._options, training)
        self._step = Step(model, None, settings, ReplicaGroup.of(self._options))
        self._runner = CudaGraphRunner(self._step)
        self._mode = ExecutorMode(model, training)
        self._weights = DeviceWeights(model, self._device, training, options.share_weights)
        self._optimizer = DeviceOptimizer()
        self._anchored = AnchoredTensors.of(self._options)
        self._attached = False
        self._compiled = False
        self._report: ReportCall = report_nothing
        self._stop_reporting: StopReporting = stop_nothing
        self._samples = 0  # of the last call
        self._shapes: Any = None  # of the last call: (saved.shapes, how inputs were nested)
        self._synthetic_inputs: Any = None  # with synthetic data, those of the first call
        if optimizer is not None:
            self.setOptimizer(optimizer)
        if training:
            wrap(model, self)
            # An executor that goes out of scope still copies the trained weights to the module.
            weakref.finalize(self, self._weights.release).atexit = False

    # Running

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one host call; takes what the module's forward takes, for a combined batch."""
        if self._options.connection_type == ConnectionType.Never:
            raise UsageError(
                f"{line_prefix()}connectionType(Never) compiles and does not run: call"
                " model.compile(inputs), or set connectionType(poptorch.ConnectionType.Always)"
            )
        started = time.perf_counter()
        self._prepare()
        transfers, (args, kwargs) = self._to_device(args, kwargs)
        inputs_ready = time.perf_counter()
        with self._weights.mounted(), self._mode.applied(), self._anchors_recorded():
            outputs = self._runner(args, kwargs)
        self._record_changes()
        computed = time.perf_counter()
        for device_tensor, host_tensor, version in transfers:
            # A model may change its inputs in place, and the script may rely on it.
            if device_tensor is not host_tensor and device_tensor._version != version:
                host_tensor.copy_(device_tensor)
        outputs = tree_map(self._to_host, outputs)
        self._times = (started, inputs_ready, computed, time.perf_counter())
        self._report(self._samples)
        return outputs

    def _prepare(self) -> None:
        """Attach to the device and bring weights, mode and optimizer up to date for a call."""
        first = not self._compiled
        if first:
            _call_hooks(_before_compiling)
            self._mode.settle()
            self._step.constants = Constants(self._user_model)
        self._compiled = True
        if not self._attached:
            self.attachToDevice()
        if self._options.share_weights:
            self._weights.follow_host()
            if self._optimizer.host is not None:
                self._optimizer.set(self._optimizer.host, self._weights.counterparts)
        if not self._training:
            self._weights.follow_training()
        self._optimizer.take_loaded_state(self._weights.counterparts)
        if first:
            _call_hooks(_after_compiling)

    def _anchors_recorded(self) -> AbstractContextManager[None]:
        if not self._options.anchored_tensors:
            return nullcontext()
        return self._anchored.recorded(self._user_model, self._optimizer.device)

    def _record_changes(self) -> None:
        """Note what a call has changed on the device."""
        if self._training:
            self._weights.stale = not self._weights.aliased
            self._optimizer.show_state(self._weights.counterparts)
        if self._weights.unwatched:
            self._weights.download()

    def _to_device(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """(device tensor, host tensor, version) per input tensor, and the inputs on the device."""
        if self._options.synthetic_data and self._synthetic_inputs is not None:
            return [], self._synthetic_inputs
        leaves, spec = tree_flatten((args, kwargs))
        moved = [x.to(self._device) if isinstance(x, Tensor) else x for x in leaves]
        if self._training and any(isinstance(x, Tensor) and x.requires_grad for x in leaves):
            log_once(
                "input requires_grad",
                "an input has requires_grad=True set and is detached: a model computes gradients of"
                " its weights, as in PopTorch, not of its inputs",
            )
        self._samples = count_samples(moved)
        self._step.group.share_inputs(moved)
        inputs = tree_unflatten(moved, spec)
        self._shapes = (saved.shapes(moved), spec)
        if self._options.synthetic_data:
            self._synthetic_inputs = inputs
        transfers = [
            (device_leaf, leaf, device_leaf._version)
            for device_leaf, leaf in zip(moved, leaves, strict=True)
            if isinstance(device_leaf, Tensor)
        ]
        return transfers, inputs

    def _to_host(self, value: Any) -> Any:
        """An output on the host, in 32 bits; its `backward()` explains itself to a plain loop."""
        if not isinstance(value, Tensor):
            return value
        value = value.to("cpu", WIDE_DTYPES.get(value.dtype))
        if self._training and value.is_floating_point():
            value.backward = no_backward  # pyright: ignore[reportAttributeAccessIssue]
        return value

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Build the step for such inputs without running it; later calls start immediately."""
        started = time.perf_counter()
        self._prepare()
        leaves, spec = tree_flatten((args, kwargs))
        leaves = [x.to(self._device) if isinstance(x, Tensor) else x for x in leaves]
        self._shapes = (saved.shapes(leaves), spec)
        with self._weights.mounted(), self._mode.applied():
            self._step.build(*tree_unflatten(leaves, spec))
        self._step.compile_seconds = max(self._step.compile_seconds, time.perf_counter() - started)

    # Mode

    def train(self, mode: bool = True) -> nn.Module:
        """Put the module in train mode, and the executor too if it has not been called yet."""
        self._user_model.train(mode)
        if not self._compiled:
            self._mode.record()
        return self._user_model

    def eval(self) -> nn.Module:
        """Put the module in eval mode, and the executor too if it has not been called yet."""
        return self.train(False)

    # Optimizer, weights, random numbers

    def setOptimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Train with this optimizer and its current settings, until the next setOptimizer."""
        if not self._training:
            raise UsageError(
                f"{line_prefix()}setOptimizer belongs to a trainingModel; delete the line"
            )
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(
                f"{line_prefix()}the optimizer is a {type(optimizer).__name__}; write"
                " poptorch.optim.SGD(model.parameters(), lr=…) or one of torch.optim"
            )
        model_ids = {id(p) for p in self._user_model.parameters()}
        optimizer_ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not model_ids & optimizer_ids:
            raise UsageError(
                f"{line_prefix()}the optimizer holds none of the model's parameters; build it with"
                " model.parameters() of the model that is wrapped"
            )
        self._optimizer.set(optimizer, self._weights.counterparts)
        self._step.optimizer = self._optimizer.device

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The module's state dictionary."""
        return self._user_model.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Load into the module, and copy to the device if attached."""
        result = self._user_model.load_state_dict(state_dict, strict)
        if self._attached:
            self.copyWeightsToDevice()
        return result

    @property
    def rng_state(self) -> list[Any]:
        """The seed and the state of the device's random number generator."""
        generator = self._generator()
        return [generator.initial_seed(), generator.get_state()]

    @rng_state.setter
    def rng_state(self, state: list[Any]) -> None:
        generator = self._generator()
        generator.manual_seed(int(state[0]))
        if len(state) > 1:
            generator.set_state(state[1])

    def _generator(self) -> torch.Generator:
        if self._device.type == "cuda":
            return torch.cuda.default_generators[self._device.index or 0]
        return torch.default_generator

    def copyWeightsToHost(self) -> None:
        """Copy weights and buffers to the module."""
        self._require_compiled()
        self._weights.download()

    def copyWeightsToHostIfNeeded(self) -> bool:
        """Copy weights and buffers to the module if a step has changed them; whether it had."""
        return self._weights.download_if_stale()

    def copyWeightsToDevice(self) -> None:
        """Copy weights and buffers from the module, over what was trained since the last copy."""
        self._require_compiled()
        self._step.group.replica_buffers.clear()
        self._weights.upload()

    def copyNamedBuffersToDevice(self) -> None:
        """Copy the buffers that `updatableNamedBuffers` names from the module."""
        self._require_compiled()
        names = self._options.updatable_named_buffers
        if not names:
            raise UsageError(
                f"{line_prefix()}copyNamedBuffersToDevice() copies the buffers that the options"
                " name, and they name none: set opts.updatableNamedBuffers([name, …])"
            )
        self._weights.upload(only=set(names))

    def _require_compiled(self) -> None:
        if not self._compiled:
            raise UsageError(
                f"{line_prefix()}Model has not been compiled or has been destroyed: call the model,"
                " or model.compile(inputs), before this line"
            )

    # Device

    def attachToDevice(self) -> None:
        """Copy weights and optimizer state to the device."""
        if self._attached:
            return
        self._require_compiled()
        labels = {"model": type(self._user_model).__name__, "device": str(self._device)}
        activity = "training" if self._training else "inference"
        self._report, self._stop_reporting = start_reporting(self, activity, labels)
        self._attached = True
        self.copyWeightsToDevice()
        tensors = {*dict(self._user_model.named_parameters())}
        tensors |= {*dict(self._user_model.named_buffers())}
        unknown = set(self._options.updatable_named_buffers) - tensors
        if unknown:
            raise UsageError(
                f"{line_prefix()}updatableNamedBuffers names {', '.join(sorted(unknown))}, which"
                " the model does not have"
            )
        self._optimizer.refresh(self._weights.counterparts)
        if self._step.group.connect(self._weights, self._device):
            self._weights.download()

    def detachFromDevice(self) -> None:
        """Copy weights and optimizer state to the host, and free the device's memory."""
        if self._training:
            self._weights.download_if_stale()
        host = torch.device("cpu")
        self._weights.move(host)
        self._optimizer.move(host)
        self._stop_reporting()
        self._attached = False

    def isAttachedToDevice(self) -> bool:
        """Whether the weights are on the device."""
        return self._attached

    def isCompiled(self) -> bool:
        """Whether a step was built or run."""
        return self._compiled

    def destroy(self) -> None:
        """Detach and discard what was built; the module can be wrapped again."""
        self.detachFromDevice()
        self._weights.release()
        unwrap(self._user_model)
        self._step.graphs.clear()
        self._runner = CudaGraphRunner(self._step)
        self._compiled = False

    # Files

    def save(
        self,
        filename: str | PathLike[str],
        export_model: bool = True,
        save_rng_state: bool = True,
    ) -> None:
        """Write safetensors with a JSON header: input shapes and options, and with `export_model`
        the weights, the optimizer and the name of the module's class."""
        if not self._compiled:
            raise UsageError(
                f"{line_prefix()}there is nothing to save yet: call the model, or"
                " model.compile(inputs), before this line"
            )
        rng_state = self.rng_state if save_rng_state else None
        inputs = saved.described(*self._shapes)
        options = self._options.toDict()
        header = {"training": self._training, "options": options, "inputs": inputs}
        model = self._user_model if export_model else None
        saved.write(filename, header, rng_state, model, self._optimizer.host)

    def compileAndExport(
        self, filename: str | PathLike[str], *args: Any, export_model: bool = True, **kwargs: Any
    ) -> None:
        """`compile`, then `save`."""
        self.compile(*args, **kwargs)
        self.save(filename, export_model)

    def loadExecutable(self, filename: str | PathLike[str]) -> None:
        """Build the saved step for the same inputs; the weights are not loaded."""
        executor_file = saved.read(filename)
        saved.check(executor_file, self._training, self._options.toDict())
        args, kwargs = saved.examples(executor_file, self._device)
        self.compile(*args, **kwargs)

    def _restore(self, executor_file: saved.SavedExecutor) -> None:
        args, kwargs = saved.examples(executor_file, self._device)
        self.compile(*args, **kwargs)
        if "rng" in executor_file.tensors:
            self.rng_state = [executor_file.header["seed"], executor_file.tensors["rng"]]

    def compilationTime(self) -> float:
        """Seconds spent on building steps."""
        return self._step.compile_seconds

    # The wrapped module

    @property
    def model(self) -> nn.Module:
        """The wrapped module."""
        return self._user_model

    @property
    def options(self) -> Options:
        """The executor's copy of the options, frozen."""
        return self._options

    def getTensorNames(self) -> list[str]:
        """Names of weights and buffers, and the other names that `anchorTensor` takes."""
        self._require_compiled()
        return tensor_names(self._user_model, self._training)

    def getAnchoredTensor(self, short_name: str) -> Tensor:
        """The value in the last call of a tensor that `Options.anchorTensor` named."""
        return self._anchored[short_name]

    def __getattr__(self, name: str) -> Any:
        model = self.__dict__.get("_user_model")
        if model is not None and hasattr(model, name):
            return getattr(model, name)
        if name.startswith("__"):
            raise AttributeError(name)
        entry = NAMES.get(f"PoplarExecutor.{name}")
        public = [attribute for attribute in dir(self) if not attribute.startswith("_")]
        hint = f": {entry.meaning}" if entry else nearest(name, public)
        raise AttributeError(
            f"{line_prefix()}neither the executor nor {type(model).__name__} has {name!r}{hint}"
        )

    def __repr__(self) -> str:
        return module_repr(self._user_model)


def no_backward(*_: Any, **__: Any) -> None:
    """`loss.backward()` on an executor's output: the backward pass has already run."""
    raise UsageError(
        f"{line_prefix()}delete the line with backward(): a trainingModel's call has done the"
        " backward pass and the optimizer's step (delete zero_grad() and step() too)"
    )


def trainingModel(
    model: nn.Module | PoplarExecutor,
    options: Options | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> PoplarExecutor:
    """Wrap a module whose forward returns a loss; the default optimizer is SGD with lr=0.01."""
    module = _require_module(model, "trainingModel")
    options = _require_options(options, "trainingModel")
    refuse_wrapped(module)
    if optimizer is None:
        optimizer = torch.optim.SGD(module.parameters(), lr=DEFAULT_LEARNING_RATE)
        log_once(
            "optimizer",
            f"no optimizer was given: SGD with lr={DEFAULT_LEARNING_RATE} is used, as in PopTorch",
        )
    return PoplarExecutor(module, options, True, optimizer)


def inferenceModel(
    model: nn.Module | PoplarExecutor, options: Options | None = None
) -> PoplarExecutor:
    """Wrap a module to run without gradients, in its current mode; call `model.eval()` first."""
    module = _require_module(model, "inferenceModel")
    options = _require_options(options, "inferenceModel")
    if options.gradient_accumulation != 1:
        raise UsageError(
            f"{line_prefix()}You must set poptorch.Options().Training.gradientAccumulation to 1 or"
            " leave it as its default value (1) when running a poptorch.inferenceModel(). Give it"
            " options of its own: poptorch.Options().deviceIterations(n)"
        )
    return PoplarExecutor(module, options, False)


def load(
    filename: str | PathLike[str], edit_opts_fn: Callable[[Options], Any] | None = None
) -> PoplarExecutor:
    """Open what `save` or `compileAndExport` wrote; the module's class must be imported."""
    executor_file = saved.read(filename)
    options = Options.fromDict(executor_file.header["options"])
    if edit_opts_fn is not None:
        edit_opts_fn(options)
    module = saved.rebuild(executor_file)
    optimizer = saved.rebuild_optimizer(executor_file, module)
    executor = PoplarExecutor(module, options, executor_file.header["training"], optimizer)
    executor._restore(executor_file)
    return executor


def _require_module(model: Any, function: str) -> nn.Module:
    if isinstance(model, PoplarExecutor):
        return model.model
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"{line_prefix()}{function} takes a torch.nn.Module, not a {type(model).__name__};"
            f" write {function}(model, options=opts)"
        )
    return model


def _require_options(options: Any, function: str) -> Options:
    if options is not None and not isinstance(options, Options):
        raise UsageError(
            f"{line_prefix()}the options of {function} are a {type(options).__name__}; write"
            f" {function}(model, options=poptorch.Options())"
        )
    return options if options is not None else Options()
