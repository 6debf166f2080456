"""Linear layers prepared for CPU inference: weights laid out once as oneDNN wants them, GELU fused.

torch reorders a weight on every call of a linear layer; done once it saves a tenth of each product,
and oneDNN applies the activation while the result is still in a register. The operators are torch's
own, those its compiler emits, but not public: where one is missing, layers stay as they are. A
frozen model has no weights to train or save.

Shapes: T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from packhorse.model.bert import Up

# Our activation names as oneDNN's post-operations: (operation, its algorithm).
FUSED = {"gelu": ("gelu", "none"), "gelu_tanh": ("gelu", "tanh"), "relu": ("relu", "")}
SERVED = (torch.float32, torch.bfloat16)


class FrozenLinear(nn.Module):
    """A linear layer (and activation) over a weight in oneDNN's own layout."""

    def __init__(self, linear: nn.Linear, activation: str | None = None) -> None:
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())
        self.bias = None if linear.bias is None else linear.bias.detach()
        self.post, self.algorithm = FUSED[activation] if activation else ("none", "")

    def forward(self, x: Tensor) -> Tensor:
        """[T, in] to [T, out]."""
        return torch.ops.mkldnn._linear_pointwise(
            x, self.weight, self.bias, self.post, [], self.algorithm
        )


def can_freeze(dtype: torch.dtype) -> bool:
    """Does this build of torch have what `freeze` needs?"""
    present = all(
        hasattr(torch.ops.mkldnn, name) for name in ("_reorder_linear_weight", "_linear_pointwise")
    )
    return present and torch.backends.mkldnn.is_available() and dtype in SERVED


def freeze(module: nn.Module) -> None:
    """Replace the linear layers below `module` in place, for inference on a CPU."""
    for name, child in module.named_children():
        if isinstance(child, Up) and child.activation in FUSED:
            setattr(module, name, FrozenLinear(child.dense, child.activation))
        elif isinstance(child, nn.Linear):
            setattr(module, name, FrozenLinear(child))
        else:
            freeze(child)
