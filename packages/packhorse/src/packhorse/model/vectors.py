"""What sentence-transformers puts between pooling and vectors: dense layers, norms, unit length.

Vectors arrive in fp32 or wider and leave so, whatever the weights are stored in. A dense layer has
one of torch's own activations, with the settings that it has when none are given: those that
sentence-transformers builds from the name of the class.

Shapes: S sequences.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F


class PReLU(nn.PReLU):
    """torch's, for numbers that are wider than its weight."""

    def forward(self, input: Tensor) -> Tensor:
        """[S, width]."""
        return F.prelu(input, self.weight.to(input.dtype))


def _over_numbers(kind: Callable[..., nn.Module]) -> Callable[[], nn.Module]:
    """Without a dimension torch takes that of the numbers, and warns each time."""
    return lambda: kind(dim=-1)


# By the name of torch's class; RReLU draws nothing at random but in training.
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
    "LogSoftmax": _over_numbers(nn.LogSoftmax),
    "Mish": nn.Mish,
    "PReLU": PReLU,
    "RReLU": nn.RReLU,
    "ReLU": nn.ReLU,
    "ReLU6": nn.ReLU6,
    "SELU": nn.SELU,
    "SiLU": nn.SiLU,
    "Sigmoid": nn.Sigmoid,
    "Softmax": _over_numbers(nn.Softmax),
    "Softmin": _over_numbers(nn.Softmin),
    "Softplus": nn.Softplus,
    "Softshrink": nn.Softshrink,
    "Softsign": nn.Softsign,
    "Tanh": nn.Tanh,
    "Tanhshrink": nn.Tanhshrink,
}


def width_after(activation: str, outputs: int) -> int:
    """Numbers that an activation leaves of so many: GLU gates one half with the other."""
    return outputs // 2 if activation == "GLU" else outputs


class Dense(nn.Module):
    """A projection with an activation; `residual` adds what came in, projected where it must be."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        bias: bool = True,
        activation: str = "Tanh",
        residual: bool = False,
    ) -> None:
        super().__init__()
        # Kept here: a layer that was prepared for inference no longer tells its sizes.
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
        """Numbers in a vector that leaves it."""
        return width_after(self.activation_name, self.outputs)

    def forward(self, x: Tensor) -> Tensor:
        """[S, inputs] to [S, width]."""
        narrow = x.to(self.linear.weight.dtype)
        out = self.activation(self.linear(narrow).to(x.dtype))
        if self.residual is not None:
            return out + self.residual(narrow).to(x.dtype)
        return out + x if self.adds_input else out


class VectorNorm(nn.Module):
    """A LayerNorm over the numbers of a vector."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """[S, width]."""
        weight, bias = self.norm.weight.to(x.dtype), self.norm.bias.to(x.dtype)
        return F.layer_norm(x, self.norm.normalized_shape, weight, bias, self.norm.eps)


class UnitLength(nn.Module):
    """Vectors one long; the last such of a model is `Embed`'s own, which can be left out."""

    def forward(self, x: Tensor) -> Tensor:
        """[S, width]."""
        return F.normalize(x, dim=-1)
