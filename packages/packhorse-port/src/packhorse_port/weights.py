"""The weights and buffers of one executor, apart from those of the module it wraps.

    weights = DeviceWeights(model, device, trained=True)
    weights.upload()                     # what copyWeightsToDevice does
    with weights.mounted():
        model(inputs)                    # the module computes with the executor's tensors
    weights.stale = True                 # a step has changed them
    model.fc.weight                      # copied back to the module first

PopTorch's user guide (overview, "poptorch.PoplarExecutor") says when weights are copied. To the
device: at the first call, when a device is attached, by `copyWeightsToDevice` and by the executor's
`load_state_dict`; what is changed in the module in between has no effect. To the host: whenever the
script looks at a weight or buffer of a module that is trained, and by `copyWeightsToHost`. So the
tensors of such a module get a class of ours, which copies before any operation of torch reads them.
A training loop that looks at no weight copies none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from packhorse.errors import InputError
from packhorse_port.notices import place


class Slot(NamedTuple):
    """Where a module keeps a tensor, and the executor's own for it."""

    kind: str  # "Parameter" or "Buffer", as PopTorch's messages begin
    path: str  # as in the state dictionary
    holder: dict[str, Tensor | None]  # `_parameters` or `_buffers` of a module
    name: str
    host: Tensor  # what stood there at the last copy to the device
    device: Tensor


_all: WeakSet[DeviceWeights] = WeakSet()


class DeviceWeights:
    """An executor's tensors; `stale` says that the module's are older."""

    def __init__(
        self, model: nn.Module, device: torch.device, trained: bool, shared: bool = False
    ) -> None:
        self.model = model
        self.device = device
        self.trained = trained
        self.shared = shared
        self.stale = False
        self.unwatched = False  # a tensor has a class of the script's own: copy after every call
        self.behind = False  # another executor has trained the module's tensors since
        self.counterparts: dict[int, Tensor] = {}  # by the identity of the module's tensor
        self._slots: list[Slot] = []
        self._versions: list[int] = []  # of the module's tensors, when they were copied last
        _all.add(self)

    # Copies

    def upload(self, only: set[str] | None = None) -> None:
        """Copy from the module; `only` names the tensors if not all are meant."""
        if only is None:  # the module's values count, whatever was trained since the last copy
            self.stale = False
            self.behind = False
        before = {slot.path: slot.device for slot in self._slots}
        copies: dict[int, Tensor] = {}  # tied weights stay tied
        slots = []
        for kind, path, holder, name in _places(self.model):
            host = holder[name]
            if host is None or is_lazy(host):
                continue
            device = copies.get(id(host), before.get(path))
            if id(host) not in copies and (only is None or path in only or device is None):
                device = self._copied(host, device)
            if device is not None:
                copies[id(host)] = device
                slots.append(Slot(kind, path, holder, name, host, device))
        self._slots = slots
        self.counterparts = copies
        if self.trained and not self.aliased:
            self._watch()
        self._remember()

    def download(self) -> None:
        """Copy to the module."""
        self.stale = False
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            for slot in self._slots:
                host = slot.holder.get(slot.name)
                if host is None or host is slot.device:
                    continue
                if host.shape == slot.device.shape and host.dtype == slot.device.dtype:
                    host.data.copy_(slot.device.data)
                else:
                    host.data = slot.device.data.to("cpu", copy=True)
        self._remember()
        for other in _all:
            if other is not self and not other.counterparts.keys().isdisjoint(self.counterparts):
                other.behind = True

    def download_if_stale(self) -> bool:
        """Copy to the module what it has not seen; whether there was something."""
        stale = self.stale
        if stale:
            self.download()
        return stale

    def follow_training(self) -> None:
        """Take the weights that other executors have trained since the last call."""
        hosts = [slot.holder.get(slot.name) for slot in self._slots]
        for source in {source for host in hosts for source in getattr(type(host), "sources", ())}:
            source.download_if_stale()
        if self.behind:
            self.upload()

    def follow_host(self) -> None:
        """Shared weights: take what the script has changed in the module since the last copy."""
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
        """The executor's tensors elsewhere, so that a device that is left has room."""
        for slot in self._slots:
            if not self.aliased and slot.device.device != device:
                slot.device.data = slot.device.data.to(device)

    @property
    def aliased(self) -> bool:
        """Is the module's tensor the executor's own? Where they are shared in one memory."""
        return self.shared and self.device.type == "cpu"

    def _copied(self, host: Tensor, device: Tensor | None) -> Tensor:
        """The executor's tensor with the values of the module's; the same object if it can be."""
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

    def _remember(self) -> None:
        if self.shared:
            self._versions = [_version(slot.host) for slot in self._slots]

    # The module with the executor's tensors

    @contextmanager
    def mounted(self) -> Iterator[None]:
        """Within it, the module holds the executor's tensors instead of its own."""
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
        """Have the module's tensors copied before they are read."""
        classes: Classes = {}
        for slot in self._slots:
            host = slot.holder[slot.name]
            sources = getattr(type(host), "sources", ())
            if type(host) in (Tensor, nn.Parameter) or (sources and self not in sources):
                _set_class(host, (*sources, self), classes)
            elif not sources:
                self.unwatched = True

    def release(self) -> None:
        """Copy what is left to be copied, and leave the module as it was."""
        self.download_if_stale()
        classes: Classes = {}
        for slot in self._slots:
            host = slot.holder.get(slot.name)
            sources = getattr(type(host), "sources", ())
            if self in sources:
                others = tuple(source for source in sources if source is not self)
                _set_class(host, others, classes)
        self._slots = []


def _places(model: nn.Module) -> Iterator[tuple[str, str, dict[str, Tensor | None], str]]:
    """Kind, path, dictionary and name of every weight and buffer, shared ones each time."""
    for prefix, module in model.named_modules():
        holders: tuple[Any, Any] = (module._parameters, module._buffers)
        for kind, holder in zip(("Parameter", "Buffer"), holders, strict=True):
            for name in holder:
                yield kind, f"{prefix}.{name}" if prefix else name, holder, name


def _refuse_replaced(slot: Slot) -> None:
    """The words are PopTorch's."""
    if slot.name not in slot.holder:
        raise InputError(
            f"{place()}{slot.kind} {slot.path} is removed from the model when calling the forward"
            " method."
        )
    if slot.holder[slot.name] is not slot.device:
        raise InputError(
            f"{place()}{slot.kind} {slot.path} is reassigned within the model when calling the"
            " forward method. This is not supported. Consider using"
            f" self.{slot.path}.copy_(src) to copy data from a source tensor, where src is the name"
            " of the source tensor."
        )


def _version(tensor: Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor._version


# What optimizers and summaries ask of a weight that is not its values.
METHODS = ("numel", "nelement", "size", "dim", "stride", "is_floating_point", "is_complex")
ATTRIBUTES = ("shape", "ndim", "dtype", "device", "layout", "is_sparse", "requires_grad", "grad")
ATTRIBUTES += ("is_leaf", "retains_grad")
METADATA = frozenset(
    [getattr(Tensor, name) for name in METHODS]
    + [getattr(Tensor, name).__get__ for name in ATTRIBUTES]
    + [getattr(Tensor, "grad").__set__]  # noqa: B009
)


class _Watched:
    """A module's tensor whose newer values are in executors: any operation copies them first."""

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
            memo[id(self)] = _plain(self).__deepcopy__(memo)
        return memo[id(self)]

    # A copy or a file holds the tensor alone, and can be read where Packhorse is not installed.
    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        return _plain(self).__reduce_ex__(protocol)

    def __repr__(self: Any, **_: Any) -> str:
        return repr(_plain(self))


class WatchedParameter(_Watched, nn.Parameter):  # pyright: ignore[reportIncompatibleMethodOverride]
    """Of a module that is trained."""


class WatchedBuffer(_Watched, Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
    """Of a module that is trained."""


Classes = dict[tuple[type, tuple[DeviceWeights, ...]], type]


def _set_class(tensor: Any, sources: tuple[DeviceWeights, ...], classes: Classes) -> None:
    """Watched for these executors; as torch made it, for none."""
    parameter = isinstance(tensor, nn.Parameter)
    if not sources:
        tensor.__class__ = nn.Parameter if parameter else Tensor
        return
    base = WatchedParameter if parameter else WatchedBuffer
    if (base, sources) not in classes:
        classes[base, sources] = type(base.__name__, (base,), {"sources": sources})
    tensor.__class__ = classes[base, sources]


def _plain(tensor: Tensor) -> Tensor:
    """The same values in a tensor of torch's own class."""
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(tensor.detach(), tensor.requires_grad)
    return tensor.detach()
