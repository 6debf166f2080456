"""Layers of sentence-transformers that follow pooling: dense layers, norms, unit length.

Vectors come and leave in fp32 or wider, whatever the dtype of the weights. A dense layer has one of
torch's own activations with its default settings, which is what sentence-transformers builds from
the name of the class.

Shapes: S sequences.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F


class PReLU(nn.PReLU):
    """torch's PReLU for inputs that are wider than its weight."""

    def forward(self, input: Tensor) -> Tensor:
        """[S, width]."""
        return F.prelu(input, self.weight.to(input.dtype))


def _over_last_axis(module: Callable[..., nn.Module]) -> Callable[[], nn.Module]:
    """Without `dim` torch takes the last axis too, but warns each time."""
    return lambda: module(dim=-1)


# By the name of torch's class. RReLU is random only in training.
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "CELU": nn.CELU,
    "ELU": nn.ELU,
    "GELU": nn.GELU,
    "GLU": nn.GLU,
    "Hardshrink": nn.Hardshrink,
    "Hardsigmoid": nn.Hardsigmoid,
    "Hardswish": nn.Hardswish,
    "Hardtanh": nn.Hardtanh,
    "Identity": nn.Identity,
    "LeakyReLU": nn.LeakyReLU,
    "LogSigmoid": nn.LogSigmoid,
    "LogSoftmax": _over_last_axis(nn.LogSoftmax),
    "Mish": nn.Mish,
    "PReLU": PReLU,
    "RReLU": nn.RReLU,
    "ReLU": nn.ReLU,
    "ReLU6": nn.ReLU6,
    "SELU": nn.SELU,
    "SiLU": nn.SiLU,
    "Sigmoid": nn.Sigmoid,
    "Softmax": _over_last_axis(nn.Softmax),
    "Softmin": _over_last_axis(nn.Softmin),
    "Softplus": nn.Softplus,
    "Softshrink": nn.Softshrink,
    "Softsign": nn.Softsign,
    "Tanh": nn.Tanh,
    "Tanhshrink": nn.Tanhshrink,
}


def width_after(activation: str, outputs: int) -> int:
    """The width after an activation: GLU gates one half with the other, so it halves."""
    return outputs // 2 if activation == "GLU" else outputs


class Dense(nn.Module):
    """A projection with an activation; `residual` adds the input, projected if widths differ."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        bias: bool = True,
        activation: str = "Tanh",
        residual: bool = False,
    ) -> None:
        super().__init__()
        # Stored here because a layer prepared for inference (`freeze`) has no in_features.
        self.inputs = inputs
        self.outputs = outputs
        self.activation_name = activation
        self.linear = nn.Linear(inputs, outputs, bias=bias)
        self.activation = ACTIVATIONS[activation]()
        self.adds_input = residual
        resized = residual and inputs != outputs
        self.residual = nn.Linear(inputs, outputs, bias=False) if resized else None

    @property
    def width(self) -> int:
        """The width of the result."""
        return width_after(self.activation_name, self.outputs)

    def forward(self, x: Tensor) -> Tensor:
        """[S, inputs] to [S, width]."""
        narrow = x.to(self.linear.weight.dtype)
        out = self.activation(self.linear(narrow).to(x.dtype))
        if self.residual is not None:
            return out + self.residual(narrow).to(x.dtype)
        return out + x if self.adds_input else out


class VectorNorm(nn.Module):
    """A LayerNorm over a vector."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """[S, width]."""
        weight = self.norm.weight.to(x.dtype)
        bias = self.norm.bias.to(x.dtype)
        return F.layer_norm(x, self.norm.normalized_shape, weight, bias, self.norm.eps)


class UnitLength(nn.Module):
    """Scale vectors to length 1; a last one is part of `Embed`, where it can be turned off."""

    def forward(self, x: Tensor) -> Tensor:
        """[S, width]."""
        return F.normalize(x, dim=-1)
