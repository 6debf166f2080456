"""An executor's own state, separate from the module it wraps: weights, optimizer, mode, constants.

    weights = DeviceWeights(model, device, trained=True)
    weights.upload()                     # what copyWeightsToDevice does
    optimizer = DeviceOptimizer()
    optimizer.set(torch.optim.SGD(model.parameters(), lr=0.1), weights.counterparts)
    with weights.mounted(), mode.applied():
        model(inputs)                    # the module computes with the executor's tensors
    optimizer.device.step()              # updates the executor's tensors
    weights.stale = True                 # a step has changed them
    model.fc.weight                      # copied back to the module first

PopTorch's user guide (overview, "poptorch.PoplarExecutor") says when weights are copied. To the
device: at the first call, when a device is attached, by `copyWeightsToDevice` and by the executor's
`load_state_dict`; changes of the module in between have no effect. To the host: whenever the script
reads a weight or buffer of a module that is trained, and by `copyWeightsToHost`. So the tensors of
such a module get a class of ours, which copies before any operation of torch reads them. A training
loop that reads no weight copies none.

The script's optimizer holds the module's weights, and an executor trains its own copy of them. So
an executor steps a second optimizer of the same class over its own tensors. Its settings are those
that the script's had when it was set: a new learning rate acts through `setOptimizer` only ("You
must call setOptimizer to apply the new optimizer values"). The state (moments) is the same objects
in both, so that `optimizer.state_dict()` is complete at any time.

An executor keeps the mode that the model had when it was wrapped ("Model wrapping functions"):
`model.eval()` for a validation on the host, or for another executor, does not switch the dropout of
a training off.

A tensor that a module holds as a plain attribute, not as a buffer, has in every call the value that
it had when the model was compiled ("PyTorch buffers"): `self.i += 1` gives the same in each call.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from packhorse_port.notices import UsageError, line_prefix, log_once

Counterparts = Mapping[int, Tensor]  # the executor's tensor by the id() of the module's


class WeightSlot(NamedTuple):
    """A place in a module that holds a tensor, and the executor's tensor for it."""

    kind: str  # "Parameter" or "Buffer", as PopTorch's messages begin
    path: str  # as in the state dictionary
    holder: dict[str, Tensor | None]  # `_parameters` or `_buffers` of a module
    name: str
    host: Tensor  # what the slot held at the last copy to the device
    device: Tensor


_all_weights: WeakSet[DeviceWeights] = WeakSet()


class DeviceWeights:
    """An executor's weights and buffers; `stale` means that the module's are older."""

    def __init__(
        self, model: nn.Module, device: torch.device, trained: bool, shared: bool = False
    ) -> None:
        self.model = model
        self.device = device
        self.trained = trained
        self.shared = shared
        self.stale = False
        self.unwatched = False  # a tensor has a class of the script's: copy after every call
        self.outdated = False  # another executor has trained the module's tensors since
        self.counterparts: dict[int, Tensor] = {}  # by the id() of the module's tensor
        self._slots: list[WeightSlot] = []
        self._versions: list[int] = []  # of the module's tensors at the last copy
        _all_weights.add(self)

    # Copies

    def upload(self, only: set[str] | None = None) -> None:
        """Copy all tensors from the module, or those whose paths are in `only`."""
        if only is None:  # the module's values win over what was trained since the last copy
            self.stale = False
            self.outdated = False
        before = {slot.path: slot.device for slot in self._slots}
        copies: dict[int, Tensor] = {}  # by the host tensor's id(): tied weights stay tied
        slots = []
        for kind, path, holder, name in _tensor_slots(self.model):
            host = holder[name]
            if host is None or is_lazy(host):
                continue
            device = copies.get(id(host), before.get(path))
            if id(host) not in copies and (only is None or path in only or device is None):
                device = self._copy(host, device)
            if device is not None:
                copies[id(host)] = device
                slots.append(WeightSlot(kind, path, holder, name, host, device))
        self._slots = slots
        self.counterparts = copies
        if self.trained and not self.aliased:
            self._watch()
        self._remember_versions()

    def download(self) -> None:
        """Copy all tensors to the module."""
        self.stale = False
        # Our own tensor class would otherwise see these reads and start another download.
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            for slot in self._slots:
                host = slot.holder.get(slot.name)
                if host is None or host is slot.device:
                    continue
                if host.shape == slot.device.shape and host.dtype == slot.device.dtype:
                    host.data.copy_(slot.device.data)
                else:
                    host.data = slot.device.data.to("cpu", copy=True)
        self._remember_versions()
        for weights in _all_weights:
            shares = not weights.counterparts.keys().isdisjoint(self.counterparts)
            if weights is not self and shares:
                weights.outdated = True

    def download_if_stale(self) -> bool:
        """Copy to the module if its tensors are older; whether they were."""
        stale = self.stale
        if stale:
            self.download()
        return stale

    def follow_training(self) -> None:
        """Take the weights that other executors have trained since the last call."""
        hosts = [slot.holder.get(slot.name) for slot in self._slots]
        for source in {source for host in hosts for source in getattr(type(host), "sources", ())}:
            source.download_if_stale()
        if self.outdated:
            self.upload()

    def follow_host(self) -> None:
        """With shared weights: take what the script has changed in the module since."""
        if self.aliased:
            if any(slot.holder.get(slot.name) is not slot.device for slot in self._slots):
                self.upload()
            return
        changed = set()
        for slot, version in zip(self._slots, self._versions, strict=True):
            host = slot.holder.get(slot.name)
            if host is not slot.host or _version(slot.host) != version:
                changed.add(slot.path)
        if changed:
            self.upload(only=changed)

    def move(self, device: torch.device) -> None:
        """Move the executor's tensors to another device, to free memory on this one."""
        for slot in self._slots:
            if not self.aliased and slot.device.device != device:
                slot.device.data = slot.device.data.to(device)

    @property
    def aliased(self) -> bool:
        """Whether executor and module use the same tensors: shared weights on a CPU."""
        return self.shared and self.device.type == "cpu"

    def _copy(self, host: Tensor, device: Tensor | None) -> Tensor:
        """The executor's tensor with the values of the module's; the same object if possible."""
        if self.aliased:
            return host
        data = host.detach()
        if device is not None:
            fits = device.shape == data.shape and device.dtype == data.dtype
            with torch.no_grad():
                if fits and device.device == self.device:
                    device.data.copy_(data)
                else:
                    device.data = data.to(self.device, copy=True)
            device.requires_grad_(host.requires_grad)
            return device
        data = data.clone() if data.device == self.device else data.to(self.device)
        if isinstance(host, nn.Parameter):
            device = nn.Parameter(data, requires_grad=host.requires_grad)
            device.__dict__.update(vars(host))  # pyright: ignore[reportAttributeAccessIssue]
            return device
        return data

    def _remember_versions(self) -> None:
        if self.shared:
            self._versions = [_version(slot.host) for slot in self._slots]

    # The module with the executor's tensors

    @contextmanager
    def mounted(self) -> Iterator[None]:
        """Let the module hold the executor's tensors instead of its own, inside this context."""
        if self.aliased:
            yield
            return
        slots = [slot for slot in self._slots if slot.name in slot.holder]
        hosts = [slot.holder[slot.name] for slot in slots]
        for slot in slots:
            slot.holder[slot.name] = slot.device
        try:
            yield
            for slot in slots:
                _refuse_replaced(slot)
        finally:
            for slot, host in zip(slots, hosts, strict=True):
                slot.holder[slot.name] = host

    # The classes of the module's tensors

    def _watch(self) -> None:
        """Have newer values copied to the module's tensors before they are read."""
        classes: WatchedClasses = {}
        for slot in self._slots:
            host = slot.holder[slot.name]
            sources = getattr(type(host), "sources", ())
            if type(host) in (Tensor, nn.Parameter) or (sources and self not in sources):
                _set_class(host, (*sources, self), classes)
            elif not sources:
                self.unwatched = True

    def release(self) -> None:
        """Copy pending changes to the module and give its tensors their original classes."""
        self.download_if_stale()
        classes: WatchedClasses = {}
        for slot in self._slots:
            host = slot.holder.get(slot.name)
            sources = getattr(type(host), "sources", ())
            if self in sources:
                remaining = tuple(source for source in sources if source is not self)
                _set_class(host, remaining, classes)
        self._slots = []


def _tensor_slots(model: nn.Module) -> Iterator[tuple[str, str, dict[str, Tensor | None], str]]:
    """(kind, path, dictionary, name) of every weight and buffer; shared ones appear repeatedly."""
    for prefix, module in model.named_modules():
        holders: tuple[Any, Any] = (module._parameters, module._buffers)
        for kind, holder in zip(("Parameter", "Buffer"), holders, strict=True):
            for name in holder:
                yield kind, f"{prefix}.{name}" if prefix else name, holder, name


def _refuse_replaced(slot: WeightSlot) -> None:
    """Raise if forward has removed or reassigned the tensor; the messages are PopTorch's."""
    if slot.name not in slot.holder:
        raise UsageError(
            f"{line_prefix()}{slot.kind} {slot.path} is removed from the model when calling the"
            " forward method."
        )
    if slot.holder[slot.name] is not slot.device:
        raise UsageError(
            f"{line_prefix()}{slot.kind} {slot.path} is reassigned within the model when calling"
            " the forward method. This is not supported. Consider using"
            f" self.{slot.path}.copy_(src) to copy data from a source tensor, where src is the name"
            " of the source tensor."
        )


def _version(tensor: Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor._version


# What optimizers and summaries ask of a weight besides its values: answered without a copy.
METADATA_METHODS = (
    "numel",
    "nelement",
    "size",
    "dim",
    "stride",
    "is_floating_point",
    "is_complex",
)
METADATA_ATTRIBUTES = (
    "shape",
    "ndim",
    "dtype",
    "device",
    "layout",
    "is_sparse",
    "requires_grad",
    "grad",
    "is_leaf",
    "retains_grad",
)
METADATA = frozenset(
    [getattr(Tensor, name) for name in METADATA_METHODS]
    + [getattr(Tensor, name).__get__ for name in METADATA_ATTRIBUTES]
    + [getattr(Tensor, "grad").__set__]  # noqa: B009
)


class _Watched:
    """A module's tensor with newer values in executors: any operation copies them first."""

    sources: ClassVar[tuple[DeviceWeights, ...]] = ()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        for kind in types if func not in METADATA else ():
            for source in getattr(kind, "sources", ()):
                source.download_if_stale()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            memo[id(self)] = _as_torch_tensor(self).__deepcopy__(memo)
        return memo[id(self)]

    # A pickled file holds a plain tensor, and can be read where Packhorse is not installed.
    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        return _as_torch_tensor(self).__reduce_ex__(protocol)

    def __repr__(self: Any, **_: Any) -> str:
        return repr(_as_torch_tensor(self))


class WatchedParameter(_Watched, nn.Parameter):  # pyright: ignore[reportIncompatibleMethodOverride]
    """A parameter of a module that is trained."""


class WatchedBuffer(_Watched, Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
    """A buffer of a module that is trained."""


# The executors are an attribute of the class, so there is one subclass per set of executors.
WatchedClasses = dict[tuple[type, tuple[DeviceWeights, ...]], type]


def _set_class(tensor: Any, sources: tuple[DeviceWeights, ...], classes: WatchedClasses) -> None:
    """Watch the tensor for these executors; for none, restore torch's own class."""
    is_parameter = isinstance(tensor, nn.Parameter)
    if not sources:
        tensor.__class__ = nn.Parameter if is_parameter else Tensor
        return
    base = WatchedParameter if is_parameter else WatchedBuffer
    if (base, sources) not in classes:
        classes[base, sources] = type(base.__name__, (base,), {"sources": sources})
    tensor.__class__ = classes[base, sources]


def _as_torch_tensor(tensor: Tensor) -> Tensor:
    """The same values in a tensor of torch's own class."""
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(tensor.detach(), tensor.requires_grad)
    return tensor.detach()


# Attributes that the two optimizers do not share; `step` is one if a schedule has wrapped it.
SEPARATE_ATTRIBUTES = ("param_groups", "state", "step")


class DeviceOptimizer:
    """The script's optimizer (`host`) and the executor's (`device`); None until one is set."""

    def __init__(self) -> None:
        self.host: torch.optim.Optimizer | None = None
        self.device: Any = None
        self._parameters: list[list[Tensor]] = []  # of the host's groups, when it was set
        self._host_state: Any = None  # the host's state dictionary that the device's mirrors

    def set(self, optimizer: torch.optim.Optimizer, counterparts: Counterparts) -> None:
        """Step with this optimizer and the settings it has now."""
        before = self.device
        if optimizer is not self.host:
            self.host = optimizer
            # Not __init__: it would demand the script's arguments, and all attributes follow below.
            self.device = object.__new__(type(optimizer))
            self._take_state(optimizer, counterparts)
        for name, value in vars(optimizer).items():
            if name not in SEPARATE_ATTRIBUTES:
                self.device.__dict__[name] = value
        self._parameters = [list(group["params"]) for group in optimizer.param_groups]
        self.device.param_groups = [
            {name: _snapshot(value) for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]
        self._set_parameters(counterparts)
        # A new optimizer without state continues with the state on the device, as PopTorch's does.
        if type(before) is type(optimizer) and not self.device.state:
            self.device.state = before.state

    def refresh(self, counterparts: Counterparts) -> None:
        """Follow the executor's tensors if they were replaced; the settings stay."""
        if self.host is not None:
            self._set_parameters(counterparts)
            self._take_state(self.host, counterparts)

    def take_loaded_state(self, counterparts: Counterparts) -> None:
        """Continue with the state that `load_state_dict` has set on the script's optimizer."""
        if self.host is not None and self.host.state is not self._host_state:
            self._take_state(self.host, counterparts)

    def show_state(self, counterparts: Counterparts) -> None:
        """After a step: put new state into the script's optimizer, and tell schedules of it."""
        if self.host is None:
            return
        self.host._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]
        if len(self.host.state) == len(self.device.state):
            return
        for parameter in (p for group in self.host.param_groups for p in group["params"]):
            device = counterparts.get(id(parameter), parameter)
            if device in self.device.state:
                self.host.state[parameter] = self.device.state[device]

    def move(self, device: torch.device) -> None:
        """Move the state to a device."""
        for state in self.device.state.values() if self.device is not None else ():
            _move_state(state, device)

    def _set_parameters(self, counterparts: Counterparts) -> None:
        for group, parameters in zip(self.device.param_groups, self._parameters, strict=True):
            group["params"] = [counterparts.get(id(p), p) for p in parameters]

    def _take_state(self, optimizer: torch.optim.Optimizer, counterparts: Counterparts) -> None:
        """Continue with the state of the script's optimizer."""
        states: defaultdict[Tensor, Any] = defaultdict(dict)
        for parameter, state in optimizer.state.items():
            device = counterparts.get(id(parameter), parameter)
            _move_state(state, device.device)
            states[device] = state
        self.device.state = states
        self._host_state = optimizer.state


def _snapshot(value: Any) -> Any:
    """A setting that later changes do not reach: a learning rate may be a tensor."""
    return value.clone() if isinstance(value, Tensor) else value


def _move_state(state: dict[str, Any], device: torch.device) -> None:
    for name, value in state.items():
        if isinstance(value, Tensor) and name != "step":  # which torch keeps on the host
            state[name] = value.to(device)


# Modules that behave differently in train and eval mode.
MODE_DEPENDENT = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._NormBase)


class ExecutorMode:
    """Train or eval mode of each module, as one executor uses it.

    Recorded when the model is wrapped, with one exception for scripts that wrap first and call
    `train()` or `eval()` later, which PopTorch's compilation sees at the first call: a training
    model that was wrapped in eval mode and is in train mode by then trains, and vice versa.
    """

    def __init__(self, model: nn.Module, training: bool) -> None:
        self.model = model
        self.training = training
        self.record()

    def record(self) -> None:
        """Use the modes that the modules have now."""
        self._modes = [(module, module.training) for module in self.model.modules()]

    def settle(self) -> None:
        """Decide the modes at the first call."""
        _, mode_at_wrapping = self._modes[0]
        if mode_at_wrapping != self.training and self.model.training == self.training:
            self.record()
        in_train_mode = [module for module, mode in self._modes if mode]
        if not self.training and any(isinstance(m, MODE_DEPENDENT) for m in in_train_mode):
            log_once(
                "inference in train mode",
                "this inferenceModel runs in train mode, in which the model was wrapped; write"
                " model.eval() before inferenceModel(model)",
            )

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Put the modules in the executor's modes inside this context."""
        changed = [(module, mode) for module, mode in self._modes if module.training is not mode]
        for module, mode in changed:
            module.__dict__["training"] = mode
        try:
            yield
        finally:
            for module, mode in changed:
                module.__dict__["training"] = not mode


@dataclass
class Constant:
    """A tensor that is a plain attribute of a module, and the value it keeps."""

    module: nn.Module
    name: str
    value: Tensor  # a copy that nothing else refers to
    current: Tensor  # what the module holds
    version: int  # of `current` when it was set

    def restore(self) -> None:
        """Restore the value if it was changed or replaced, by the model or by the script."""
        attribute = self.module.__dict__.get(self.name)
        if attribute is self.current and self.current._version == self.version:
            return
        module_name = type(self.module).__name__
        log_once(
            f"constant {module_name}.{self.name}",
            f"{module_name}.{self.name} is a plain tensor, so every call begins with"
            " the value it had at the first, as in PopTorch; to keep its changes write"
            f' self.register_buffer("{self.name}", …)',
        )
        self.current = _clone_leaf(self.value)
        self.version = self.current._version
        self.module.__dict__[self.name] = self.current


class Constants:
    """All constants of a model, except those that a module's pre-hooks compute (`weight_norm`)."""

    def __init__(self, model: nn.Module) -> None:
        self._constants = [
            Constant(module, name, _clone_leaf(value), value, value._version)
            for module in model.modules()
            if not module._forward_pre_hooks
            for name, value in vars(module).items()
            if isinstance(value, Tensor) and value.is_leaf
        ]

    def restore(self) -> None:
        """Restore all that have changed; to be called before every micro batch."""
        for constant in self._constants:
            constant.restore()


def _clone_leaf(value: Tensor) -> Tensor:
    return value.detach().clone().requires_grad_(value.requires_grad)
