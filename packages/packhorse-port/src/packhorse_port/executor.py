"""What `trainingModel` and `inferenceModel` return: a module whose call is a host call.

    training = trainingModel(model, options=opts, optimizer=optimizer)
    out, loss = training(data, labels)                    # many steps, one call
    training.save("model.poptorch")

An executor has PopTorch's methods, and the module's own attributes behind them. It computes with
weights of its own (`weights`), in a mode of its own (`modes`), and with the optimizer as it was set
(`twin`); they are copied from and to the module when PopTorch's user guide says so. With
`Options().shareWeights()` what the script changes acts at once. Questions about latency and cycles
are answered with the time the last call took.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from packhorse.errors import InputError
from packhorse_port import capture, saved, telling
from packhorse_port.constants import Constants
from packhorse_port.device_optimizer import DeviceOptimizer
from packhorse_port.enums import ConnectionType
from packhorse_port.modes import Mode
from packhorse_port.names import NAMES, nearest
from packhorse_port.notices import place
from packhorse_port.options import Options
from packhorse_port.replicas import Group, local_device
from packhorse_port.step import Setting, Step
from packhorse_port.timing import Timed
from packhorse_port.weights import DeviceWeights
from packhorse_port.wrapped import unwrap, wrap


class PoplarExecutor(Timed):
    """What `trainingModel` and `inferenceModel` return."""

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        training: bool,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        self._user_model = model
        self._options = options.taken("trainingModel" if training else "inferenceModel", training)
        self._training = training
        self._device = local_device()
        setting = Setting.of(self._options, training)
        self._step = Step(model, None, setting, Group.of(self._options))
        self._graphs = capture.Captured(self._step)
        self._mode = Mode(model, training)
        self._weights = DeviceWeights(model, self._device, training, options.share_weights)
        self._optimizer = DeviceOptimizer()
        self._attached = False
        self._compiled = False
        self._tell, self._hush, self._rows = telling.SILENCE
        self._inputs: Any = None  # what was called last, as shapes; or the data itself, synthetic
        if optimizer is not None:
            self.setOptimizer(optimizer)
        if training:
            wrap(model, self)
            # What was trained is not lost with an executor that a function forgets at its end.
            weakref.finalize(self, self._weights.release).atexit = False

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
        leaves, (args, kwargs) = self._fed(args, kwargs)
        given = time.perf_counter()
        with self._weights.mounted(), self._mode.held():
            outputs = self._graphs(args, kwargs)
        self._stepped()
        done = time.perf_counter()
        for mine, theirs, version in leaves:
            if mine is not theirs and mine._version != version:  # changed in place by the model
                theirs.copy_(mine)
        outputs = tree_map(self._returned, outputs)
        self._times = (begun, given, done, time.perf_counter())
        self._tell(self._rows)
        return outputs

    def _ready(self) -> None:
        """On the device, with its weights there and the settings that hold for this call."""
        if not self._compiled:
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

    def _stepped(self) -> None:
        """Note what a call has changed on the device."""
        if self._training:
            self._weights.stale = not self._weights.aliased
            self._optimizer.show_state(self._weights.counterparts)
        if self._weights.unwatched:
            self._weights.download()

    def _fed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Inputs on the device, and (input there, the script's own, version) of each tensor."""
        if self._options.synthetic_data and self._inputs is not None:
            return [], self._inputs
        leaves, spec = tree_flatten((args, kwargs))
        fed = [x.to(self._device) if isinstance(x, Tensor) else x for x in leaves]
        self._rows = telling.rows(fed)
        self._step.group.first_ones(fed)
        inputs = tree_unflatten(fed, spec)
        self._inputs = inputs if self._options.synthetic_data else saved.shapes(fed, spec)
        pairs = zip(fed, leaves, strict=True)
        return [(x, own, x._version) for x, own in pairs if isinstance(x, Tensor)], inputs

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
        begun = time.perf_counter()
        self._ready()
        leaves, spec = tree_flatten((args, kwargs))
        leaves = [x.to(self._device) if isinstance(x, Tensor) else x for x in leaves]
        self._inputs = saved.shapes(leaves, spec)
        with self._weights.mounted(), self._mode.held():
            self._step.warm(*tree_unflatten(leaves, spec))
        self._step.compiling = max(self._step.compiling, time.perf_counter() - begun)

    # Mode

    def train(self, mode: bool = True) -> nn.Module:
        """Put the module in train mode, and the executor if it has not been called yet."""
        self._user_model.train(mode)
        if not self._compiled:
            self._mode.record()
        return self._user_model

    def eval(self) -> nn.Module:
        """Put the module in eval mode, and the executor if it has not been called yet."""
        return self.train(False)

    # Optimizer, weights, random numbers

    def setOptimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Train with this one, and with the values it has now, until the next time."""
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
        self._optimizer.set(optimizer, self._weights.counterparts)
        self._step.optimizer = self._optimizer.device

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The module's."""
        return self._user_model.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Into the module, and to the device."""
        result = self._user_model.load_state_dict(state_dict, strict)
        if self._attached:
            self.copyWeightsToDevice()
        return result

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
        """Copy weights and buffers to the module."""
        self._insist_compiled()
        self._weights.download()

    def copyWeightsToHostIfNeeded(self) -> bool:
        """The same if a step has changed them since; whether it had."""
        return self._weights.download_if_stale()

    def copyWeightsToDevice(self) -> None:
        """Copy weights and buffers from the module, over what was trained since the last copy."""
        self._insist_compiled()
        self._step.group.own.clear()
        self._weights.upload()

    def copyNamedBuffersToDevice(self) -> None:
        """Copy from the module the buffers that `updatableNamedBuffers` names."""
        self._insist_compiled()
        names = self._options.updatable_named_buffers
        if not names:
            raise InputError(
                f"{place()}copyNamedBuffersToDevice() copies the buffers that the options name, and"
                " they name none: set opts.updatableNamedBuffers([name, …])"
            )
        self._weights.upload(only=set(names))

    def _insist_compiled(self) -> None:
        if not self._compiled:
            raise InputError(
                f"{place()}Model has not been compiled or has been destroyed: call the model, or"
                " model.compile(inputs), before this line"
            )

    # Device

    def attachToDevice(self) -> None:
        """Copy weights and moments to the device, for which nobody competes here."""
        if self._attached:
            return
        self._insist_compiled()
        about = {"model": type(self._user_model).__name__, "device": str(self._device)}
        does = "training" if self._training else "inference"
        self._tell, self._hush = telling.voice(self, does, about)
        self._attached = True
        self.copyWeightsToDevice()
        unknown = set(self._options.updatable_named_buffers) - {*self.getTensorNames()}
        if unknown:
            raise InputError(
                f"{place()}updatableNamedBuffers names {', '.join(sorted(unknown))}, which the"
                " model does not have"
            )
        self._optimizer.refresh(self._weights.counterparts)
        if self._step.group.meet(self._weights, self._device):
            self._weights.download()

    def detachFromDevice(self) -> None:
        """Copy weights and moments to the host, and leave the device."""
        if self._training:
            self._weights.download_if_stale()
        host = torch.device("cpu")
        self._weights.move(host)
        self._optimizer.move(host)
        self._hush()
        self._attached = False

    def isAttachedToDevice(self) -> bool:
        return self._attached

    def isCompiled(self) -> bool:
        """Was a step built or run?"""
        return self._compiled

    def destroy(self) -> None:
        """Leave the device and forget what was built; the module can be wrapped again."""
        self.detachFromDevice()
        self._weights.release()
        unwrap(self._user_model)
        self._step.graphs.clear()
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
        saved.write(filename, about, state, model, self._optimizer.host)

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

    def compilationTime(self) -> float:
        """Seconds that building steps took."""
        return self._step.compiling

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
