"""`trainingModel` and `inferenceModel`: a module whose call is a host call.

    training = trainingModel(model, options=opts, optimizer=optimizer)
    out, loss = training(data, labels)                    # many steps, one call
    training.save("model.poptorch")

An executor has PopTorch's methods, and the module's own attributes behind them. The weights are the
module's: nothing is copied on a CPU, and on a GPU the module's tensors themselves move there at the
first call and back at `detachFromDevice`, or by themselves when the module is called or its
`state_dict` asked for outside an executor. So all executors of a module, or of parts of it, see one
set of weights. Questions about latency and cycles are answered with the time the last call took.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from packhorse.errors import InputError
from packhorse.port import capture, placing, saved, telling
from packhorse.port.enums import ConnectionType
from packhorse.port.names import NAMES, nearest
from packhorse.port.notices import place, say_once
from packhorse.port.options import Options
from packhorse.port.replicas import Group, local_device
from packhorse.port.step import Setting, Step

RATE = 0.01  # of the optimizer that PopTorch takes where none is given
EVENTS = ("input", "input_complete", "output", "output_complete")


def trainingModel(
    model: nn.Module | PoplarExecutor,
    options: Options | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> PoplarExecutor:
    """Wrap a module whose forward returns a loss; without an optimizer, SGD with a rate of 0.01."""
    module = _module(model, "trainingModel")
    options = _options(options, "trainingModel")
    if optimizer is None:
        optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
        say_once("optimizer", f"no optimizer was given: SGD with lr={RATE}, as PopTorch takes")
    return PoplarExecutor(module, options, True, optimizer)


def inferenceModel(
    model: nn.Module | PoplarExecutor, options: Options | None = None
) -> PoplarExecutor:
    """Wrap a module to be run without gradients; `model.eval()` is the caller's to say."""
    module, options = _module(model, "inferenceModel"), _options(options, "inferenceModel")
    if options.gradient_accumulation != 1:
        raise InputError(
            f"{place()}inferenceModel has no gradients to accumulate, and its options say"
            f" gradientAccumulation({options.gradient_accumulation}); give it options of its own:"
            " poptorch.Options().deviceIterations(n)"
        )
    return PoplarExecutor(module, options, False)


def load(
    filename: str | PathLike[str], edit_opts_fn: Callable[[Options], Any] | None = None
) -> PoplarExecutor:
    """The executor that `save` or `compileAndExport` wrote, its module's class being imported."""
    found = saved.read(filename)
    options = Options.fromDict(found.about["options"])
    if edit_opts_fn is not None:
        edit_opts_fn(options)
    module = saved.rebuild(found)
    optimizer = saved.rebuild_optimizer(found, module)
    make = PoplarExecutor(module, options, found.about["training"], optimizer)
    make._restore(found)
    return make


class PoplarExecutor:
    """What `trainingModel` and `inferenceModel` return."""

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        training: bool,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        self._user_model, self._options, self._training = model, options, training
        options.freeze("trainingModel" if training else "inferenceModel")
        self._device = local_device()
        group = Group.of(options)
        self._step = Step(model, None, Setting.of(options, training), group)
        self._graphs = capture.Captured(self._step)
        self._attached = self._compiled = False
        self._tell, self._hush, self._rows = telling.SILENCE
        self._inputs: Any = None  # what was called last, as shapes; or the data itself, synthetic
        self._times = (0.0, 0.0, 0.0, 0.0)
        if optimizer is not None:
            self.setOptimizer(optimizer)

    # Running

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One host call; takes what the module's forward takes, for a combined batch."""
        if self._options.connection_type == ConnectionType.Never:
            raise InputError(
                f"{place()}connectionType(Never) compiles and does not run: call"
                " model.compile(inputs), or set connectionType(poptorch.ConnectionType.Always)"
            )
        begun = time.perf_counter()
        self._ready()
        args, kwargs = self._fed(args, kwargs)
        given = time.perf_counter()
        with placing.inside(self._user_model):
            outputs = self._graphs(args, kwargs)
        done = time.perf_counter()
        outputs = tree_map(self._returned, outputs)
        self._times = (begun, given, done, time.perf_counter())
        self._compiled = True
        self._tell(self._rows)
        return outputs

    def _ready(self) -> None:
        """On the device, with the others."""
        if not self._attached:
            self.attachToDevice()
        placing.move(self._user_model, self._step.optimizer, self._device)
        self._step.group.meet(self._user_model, self._device)

    def _fed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Inputs on the device; those of the first call where the data is synthetic."""
        if self._options.synthetic_data and self._inputs is not None:
            return self._inputs
        leaves, spec = tree_flatten((args, kwargs))
        leaves = [x.to(self._device) if isinstance(x, Tensor) else x for x in leaves]
        self._rows = telling.rows(leaves)
        self._step.group.first_ones(leaves)
        fed = tree_unflatten(leaves, spec)
        keep = fed if self._options.synthetic_data else saved.shapes(leaves, spec)
        self._inputs = keep if self._inputs is None or not self._options.synthetic_data else fed
        return fed

    def _returned(self, value: Any) -> Any:
        """On the host; and a plain loop's `loss.backward()` is told what to do."""
        if not isinstance(value, Tensor):
            return value
        value = value.to("cpu")
        if self._training and value.is_floating_point():
            value.backward = no_backward  # pyright: ignore[reportAttributeAccessIssue]
        return value

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Build the step for such inputs without running it; later calls begin at once."""
        self._ready()
        leaves, spec = tree_flatten((args, kwargs))
        leaves = [x.to(self._device) if isinstance(x, Tensor) else x for x in leaves]
        self._inputs = saved.shapes(leaves, spec)
        with placing.inside(self._user_model):
            self._step.warm(*tree_unflatten(leaves, spec))
        self._compiled = True

    # Optimizer, weights, random numbers

    def setOptimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Train with this one from now on; the same one, changed, needs no word but may have it."""
        if not self._training:
            raise InputError(f"{place()}setOptimizer belongs to a trainingModel; delete the line")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise InputError(
                f"{place()}the optimizer is a {type(optimizer).__name__}; write"
                " poptorch.optim.SGD(model.parameters(), lr=…) or one of torch.optim"
            )
        mine = {id(p) for p in self._user_model.parameters()}
        its = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not mine & its:
            raise InputError(
                f"{place()}the optimizer holds none of the model's parameters; build it with"
                " model.parameters() of the model that is wrapped"
            )
        self._step.optimizer = optimizer

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The module's."""
        return self._user_model.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Into the module."""
        return self._user_model.load_state_dict(state_dict, strict)

    @property
    def rng_state(self) -> list[Any]:
        """The seed and the generator's state."""
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
        """Have the module's tensors on the host; on a CPU they always are."""
        placing.move(self._user_model, self._step.optimizer, torch.device("cpu"))

    def copyWeightsToHostIfNeeded(self) -> bool:
        """The same; True if they were elsewhere."""
        away = any(p.device.type != "cpu" for p in self._user_model.parameters())
        self.copyWeightsToHost()
        return away

    def copyWeightsToDevice(self) -> None:
        """Have them on the device; buffers that replicas kept are the module's again."""
        self._step.group.own.clear()
        placing.move(self._user_model, self._step.optimizer, self._device)

    def copyNamedBuffersToDevice(self) -> None:
        self.copyWeightsToDevice()

    # Device

    def attachToDevice(self) -> None:
        """Take the device, for which nobody competes here; a monitor sees it from then on."""
        if not self._attached:
            about = {"model": type(self._user_model).__name__, "device": str(self._device)}
            does = "training" if self._training else "inference"
            self._tell, self._hush = telling.voice(self, does, about)
        self._attached = True

    def detachFromDevice(self) -> None:
        """Leave it; the weights are on the host."""
        self.copyWeightsToHost()
        self._hush()
        self._attached = False

    def isAttachedToDevice(self) -> bool:
        return self._attached

    def isCompiled(self) -> bool:
        """Was a step built or run?"""
        return self._compiled

    def destroy(self) -> None:
        """Forget what was built and leave the device."""
        self.detachFromDevice()
        self._step.tried.clear()
        self._graphs = capture.Captured(self._step)
        self._compiled = False

    # Files

    def save(
        self,
        filename: str | PathLike[str],
        export_model: bool = True,
        save_rng_state: bool = True,
    ) -> None:
        """Write safetensors with a JSON header: shapes and options, and with `export_model` the
        weights, the optimizer and the name of the module's class."""
        if not self._compiled:
            raise InputError(
                f"{place()}there is nothing to save yet: call the model, or"
                " model.compile(inputs), before this line"
            )
        state = self.rng_state if save_rng_state else None
        inputs = self._inputs
        if self._options.synthetic_data:
            inputs = saved.shapes(*tree_flatten(inputs))
        options = self._options.toDict()
        about = {"training": self._training, "options": options, "inputs": inputs}
        model = self._user_model if export_model else None
        saved.write(filename, about, state, model, self._step.optimizer)

    def compileAndExport(
        self, filename: str | PathLike[str], *args: Any, export_model: bool = True, **kwargs: Any
    ) -> None:
        """`compile`, then `save`."""
        self.compile(*args, **kwargs)
        self.save(filename, export_model)

    def loadExecutable(self, filename: str | PathLike[str]) -> None:
        """Build the step that was saved, for the same inputs; weights stay as they are."""
        found = saved.read(filename)
        saved.check(found, self._training, self._options.toDict())
        args, kwargs = saved.examples(found, self._device)
        self.compile(*args, **kwargs)

    def _restore(self, found: saved.Saved) -> None:
        args, kwargs = saved.examples(found, self._device)
        self.compile(*args, **kwargs)
        if "rng" in found.tensors:
            self.rng_state = [found.about["seed"], found.tensors["rng"]]

    # Times

    def compilationTime(self) -> float:
        """Seconds that building steps took."""
        return self._step.compiling

    def cycleCount(self) -> int:
        """Nanoseconds that the last call computed, one to a cycle."""
        if not self._times[2]:
            raise InputError(
                f"{place()}cycleCount() is that of the last call: call the model first"
            )
        return int((self._times[2] - self._times[1]) * 1e9)

    def getPerfCounters(self) -> dict[str, list[list[float]]]:
        """When inputs and outputs of the last call were asked for and complete."""
        times = zip(EVENTS, self._times, strict=True)
        return {name: [[at] if at else []] for name, at in times}

    def _between(self, begin: int, end: int) -> tuple[float, float, float]:
        """Least, most, mean: the same, for a call is timed as one."""
        seconds = self._times[end] - self._times[begin]
        return (seconds, seconds, seconds)

    def getLatency(self) -> tuple[float, float, float]:
        """Seconds of the last call."""
        return self._between(0, 3)

    def getHostIpuLatency(self) -> tuple[float, float, float]:
        """Seconds of handing it the inputs."""
        return self._between(0, 1)

    def getComputeLatency(self) -> tuple[float, float, float]:
        """Seconds of computing."""
        return self._between(1, 2)

    def getIpuHostLatency(self) -> tuple[float, float, float]:
        """Seconds of fetching the outputs."""
        return self._between(2, 3)

    # The module behind

    @property
    def model(self) -> nn.Module:
        return self._user_model

    @property
    def options(self) -> Options:
        return self._options

    def getTensorNames(self) -> list[str]:
        """Of weights and buffers."""
        return [*dict(self._user_model.named_parameters()), *dict(self._user_model.named_buffers())]

    def __getattr__(self, name: str) -> Any:
        model = self.__dict__.get("_user_model")
        if model is not None and hasattr(model, name):
            return getattr(model, name)
        if name.startswith("__"):
            raise AttributeError(name)
        known = NAMES.get(f"PoplarExecutor.{name}")
        mine = [each for each in dir(self) if not each.startswith("_")]
        hint = f": {known.meaning}" if known else nearest(name, mine)
        raise AttributeError(
            f"{place()}neither the executor nor {type(model).__name__} has {name!r}{hint}"
        )

    def __repr__(self) -> str:
        return repr(self._user_model)


def no_backward(*_: Any, **__: Any) -> None:
    """What a plain loop does by itself has been done."""
    raise InputError(
        f"{place()}delete the line with backward(): a trainingModel's call has done the backward"
        " pass and the optimizer's step (delete zero_grad() and step() too)"
    )


def _module(model: Any, what: str) -> nn.Module:
    if isinstance(model, PoplarExecutor):
        return model.model
    if not isinstance(model, nn.Module):
        raise InputError(
            f"{place()}{what} takes a torch.nn.Module, not a {type(model).__name__}; write"
            f" {what}(model, options=opts)"
        )
    return model


def _options(options: Any, what: str) -> Options:
    if options is not None and not isinstance(options, Options):
        raise InputError(
            f"{place()}the options of {what} are a {type(options).__name__}; write"
            f" {what}(model, options=poptorch.Options())"
        )
    return options if options is not None else Options()
