"""The optimizer that steps an executor's weights, with the settings of the script's own.

    optimizer = DeviceOptimizer()
    optimizer.set(torch.optim.SGD(model.parameters(), lr=0.1), weights.counterparts())
    optimizer.device.step()              # the executor's tensors
    optimizer.show_state(weights.counterparts())

The script's optimizer holds the module's weights; an executor trains its own copy of them. So an
executor steps a second optimizer of the same class over its own tensors. Its settings are those
that the script's had when it was set: a new learning rate acts through `setOptimizer` only, as
PopTorch's user guide says ("You must call setOptimizer to apply the new optimizer values"). The
moments are the same objects in both, so that `optimizer.state_dict()` has them at any time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

# What the two do not have in common; `step` is an attribute if a schedule has wrapped it.
APART = ("param_groups", "state", "step")
Counterparts = Mapping[int, Tensor]  # the executor's tensor by the identity of the module's


class DeviceOptimizer:
    """The script's optimizer (`host`) and the executor's (`device`); None until one is set."""

    def __init__(self) -> None:
        self.host: torch.optim.Optimizer | None = None
        self.device: Any = None
        self._parameters: list[list[Tensor]] = []  # of the host's groups, when it was set
        self._state: Any = None  # the host's dictionary of moments that the device's go with

    def set(self, optimizer: torch.optim.Optimizer, counterparts: Counterparts) -> None:
        """Step with this optimizer, as it is now."""
        before = self.device
        if optimizer is not self.host:
            self.host = optimizer
            self.device = object.__new__(type(optimizer))
            self._take_state(optimizer, counterparts)
        for name, value in vars(optimizer).items():
            if name not in APART:
                self.device.__dict__[name] = value
        self._parameters = [list(group["params"]) for group in optimizer.param_groups]
        self.device.param_groups = [
            {name: _fixed(value) for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]
        self._place(counterparts)
        # A new optimizer without moments goes on with those on the device, as PopTorch's does.
        if type(before) is type(optimizer) and not self.device.state:
            self.device.state = before.state

    def refresh(self, counterparts: Counterparts) -> None:
        """The executor's tensors may be others than before; the settings stay."""
        if self.host is not None:
            self._place(counterparts)
            self._take_state(self.host, counterparts)

    def take_loaded_state(self, counterparts: Counterparts) -> None:
        """Go on with moments that `load_state_dict` has given the script's optimizer since."""
        if self.host is not None and self.host.state is not self._state:
            self._take_state(self.host, counterparts)

    def show_state(self, counterparts: Counterparts) -> None:
        """After a step: the script's optimizer has the moments, and schedules know of the step."""
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
        """The moments to a device."""
        for state in self.device.state.values() if self.device is not None else ():
            _move(state, device)

    def _place(self, counterparts: Counterparts) -> None:
        """Step the executor's tensors."""
        for group, parameters in zip(self.device.param_groups, self._parameters, strict=True):
            group["params"] = [counterparts.get(id(p), p) for p in parameters]

    def _take_state(self, optimizer: torch.optim.Optimizer, counterparts: Counterparts) -> None:
        """Go on with the moments of the script's optimizer."""
        states: defaultdict[Tensor, Any] = defaultdict(dict)
        for parameter, state in optimizer.state.items():
            device = counterparts.get(id(parameter), parameter)
            _move(state, device.device)
            states[device] = state
        self.device.state = states
        self._state = optimizer.state


def _fixed(value: Any) -> Any:
    """A learning rate may be a tensor, which the script could change in place."""
    return value.clone() if isinstance(value, Tensor) else value


def _move(state: dict[str, Any], device: torch.device) -> None:
    for name, value in state.items():
        if isinstance(value, Tensor) and name != "step":  # which torch keeps on the host
            state[name] = value.to(device)
