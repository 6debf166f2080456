"""Where a module's tensors are: on the device while executors run it, on the host for the rest.

PopTorch keeps the user's module on the host and copies weights back whenever they are looked at.
Here the tensors themselves move, so that an optimizer built before the move still holds them, and
move back when the module is called, or its `state_dict` is asked for, outside an executor: scripts
do both between epochs. A parameter that is read directly (`model.fc.weight`) shows where it is. On
a CPU nothing moves and nothing is hooked.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

HOST = torch.device("cpu")
_hooked: WeakSet[nn.Module] = WeakSet()
_inside: ContextVar[bool] = ContextVar("packhorse.port.inside", default=False)


@contextmanager
def inside(model: nn.Module) -> Iterator[None]:
    """Within it, it is an executor that calls the module."""
    token = _inside.set(True)
    try:
        yield
    finally:
        _inside.reset(token)


def move(model: nn.Module, optimizer: torch.optim.Optimizer | None, device: torch.device) -> None:
    """The module's tensors and the optimizer's moments to a device, each object staying itself."""
    if all(tensor.device.type == device.type for tensor in _tensors(model)):
        return
    if device.type != "cpu":
        _hook(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(device)
        parameter.grad = None
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
    for parameter, state in (optimizer.state if optimizer else {}).items():
        for name, value in state.items():
            if isinstance(value, Tensor) and name != "step":  # which torch keeps on the host
                state[name] = value.to(parameter.device)


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _hook(model: nn.Module) -> None:
    if model in _hooked:
        return
    _hooked.add(model)
    model.register_forward_pre_hook(_called)
    model.register_state_dict_post_hook(_asked)


def _called(model: nn.Module, args: Any) -> None:
    """By the script itself, which has its data on the host."""
    if not _inside.get() and all(x.device == HOST for x in args if isinstance(x, Tensor)):
        move(model, None, HOST)


def _asked(model: nn.Module, state: dict[str, Any], prefix: str, local: Any) -> None:
    for name, value in state.items():
        if isinstance(value, Tensor) and name.startswith(prefix):
            state[name] = value.to(HOST)
