"""Tensors that modules hold as plain attributes, not as buffers: constants of the model.

    constants = Constants(model)     # at the first call
    constants.restore()              # before every micro batch

PopTorch's user guide ("PyTorch buffers") says that such a tensor has, in every call, the value that
it had when the model was compiled: `self.i += 1` gives the same in each call. So a tensor that was
changed, by the model or by the script, is put back before it is used again, and the script is told
once to register it as a buffer. Modules with hooks before their forward (`weight_norm`) compute
such tensors themselves and are left alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from packhorse_port.notices import say_once


@dataclass
class Constant:
    """An attribute of a module, and the value it keeps."""

    module: nn.Module
    name: str
    value: Tensor  # a copy that nobody else has
    used: Tensor  # what the module holds
    version: int  # of `used` when it was put there

    def restore(self) -> None:
        """Put the value back if it was changed or replaced."""
        now = self.module.__dict__.get(self.name)
        if now is self.used and self.used._version == self.version:
            return
        say_once(
            f"constant {type(self.module).__name__}.{self.name}",
            f"{type(self.module).__name__}.{self.name} is a plain tensor, so every call begins with"
            " the value it had at the first, as in PopTorch; to keep its changes write"
            f' self.register_buffer("{self.name}", …)',
        )
        self.used = _copy(self.value)
        self.version = self.used._version
        self.module.__dict__[self.name] = self.used


class Constants:
    """All of a model's."""

    def __init__(self, model: nn.Module) -> None:
        self._constants = [
            Constant(module, name, _copy(value), value, value._version)
            for module in model.modules()
            if not module._forward_pre_hooks
            for name, value in vars(module).items()
            if isinstance(value, Tensor) and value.is_leaf
        ]

    def restore(self) -> None:
        for constant in self._constants:
            constant.restore()


def _copy(value: Tensor) -> Tensor:
    return value.detach().clone().requires_grad_(value.requires_grad)
