"""Small convolutions of a compiled step, by C made for their shape.

oneDNN takes a hundred to three hundred microseconds for a convolution that is a few million
operations: most of that it spends on getting ready. In the course's small CNN that is more than
half of a training step. So where a step is compiled, and its numbers need not be oneDNN's to the
bit, convolutions of little work without stride and padding are done by `convolve.c`. Anything else,
and a machine without a C compiler, keeps oneDNN's.

Shapes: N pictures, C and K channels in and out, H x W places in, P x Q out, R x S a window.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from packhorse.native import POINTER, Obstacle, function, warn_slow

SOURCE = Path(__file__).with_name("convolve.c")
MOST = 1 << 23  # multiplications: beyond, two threads and oneDNN are faster
WIDEST = 25  # places of a window, all of which are summed in registers
LANES = 16
aten = torch.ops.aten
# Of aten's own arguments behind picture, weight and bias: no transposition, no groups.
AS_IS = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)


def use(module: GraphModule) -> None:
    """Rewrite a recorded graph in place: what can be done here is."""
    for node in list(module.graph.nodes):
        if node.target is aten.convolution.default and _serves(node.args[:2], node.args[3:9]):
            node.target, node.args = torch.ops.packhorse.convolve.default, node.args[:3]
        elif node.target is aten.convolution_backward.default:
            _go_back(node)
    module.recompile()


def _go_back(node: Node) -> None:
    """Gradients of the picture, if it is asked for, of the weight and of the bias."""
    grad, x, weight, _, *how, mask = node.args
    pictures, weights, _ = cast("list[bool]", mask)
    if weights and _contiguous(grad) and _serves((x, weight), how):
        node.target = torch.ops.packhorse.convolve_backward.default
        node.args = (grad, x, weight, pictures)


def _serves(tensors: Sequence[Any], how: Sequence[Any]) -> bool:
    if list(how) != list(AS_IS) or not all(map(_contiguous, tensors)):
        return False
    seen = [node.meta["val"] for node in tensors]
    if seen[0].ndim != 4:
        return False
    (count, _, height, width), (channels, inner, rows, columns) = (each.shape for each in seen)
    work = count * (height - rows + 1) * (width - columns + 1) * channels * inner * rows * columns
    if work > MOST or rows * columns > WIDEST:
        return False
    try:
        _functions(_defines(*seen))
    except Obstacle as reason:
        warn_slow(reason)
        return False
    return True


def _contiguous(node: Any) -> bool:
    seen = node.meta.get("val")
    if not isinstance(seen, Tensor):
        return False
    return seen.device.type == "cpu" and seen.dtype == torch.float32 and seen.is_contiguous()


def _defines(x: Tensor, weight: Tensor) -> tuple[str, ...]:
    (n, c, h, w), (k, _, r, s) = x.shape, weight.shape
    sizes = {"N": n, "C": c, "H": h, "W": w, "K": k, "R": r, "S": s}
    return tuple(f"{name}={size}" for name, size in sizes.items())


@cache
def _functions(defines: tuple[str, ...]) -> tuple[Callable[..., None], ...]:
    """Forward, for weights and biases, and for pictures; `Obstacle` where there is no compiler."""
    takes = {"": 5, "_weights": 5, "_pictures": 4}
    return tuple(
        function(SOURCE, f"packhorse_convolve{name}", (POINTER,) * many, defines)
        for name, many in takes.items()
    )


def _scratch(vectors: int) -> Tensor:
    """Room for so many vectors; torch aligns it to 64 bytes, as they want it."""
    return torch.empty(vectors * LANES)


@torch.library.custom_op("packhorse::convolve", mutates_args=())
def convolve(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[N, C, H, W] by [K, C, R, S] to [N, K, P, Q]."""
    run, _, _ = _functions(_defines(x, weight))
    # A compiler may lay tensors out anew; C would read them astray.
    x, weight = x.contiguous(), weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    out, scratch = torch.empty(_out(x, weight)), _scratch(weight[0].numel())
    at = None if bias is None else bias.data_ptr()
    run(x.data_ptr(), weight.data_ptr(), at, out.data_ptr(), scratch.data_ptr())
    return out


@torch.library.custom_op("packhorse::convolve_backward", mutates_args=())
def convolve_backward(
    grad: Tensor, x: Tensor, weight: Tensor, pictures: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the picture (empty unless asked for), the weight and the bias."""
    _, weights, back = _functions(_defines(x, weight))
    grad, x, weight = grad.contiguous(), x.contiguous(), weight.contiguous()
    dw, db = torch.empty_like(weight), torch.empty(len(weight))
    room = max(grad[:, 0].numel(), weight[:, 0].numel() + x[0, 0].numel())
    scratch = _scratch(room)
    given = (each.data_ptr() for each in (grad, x, dw, db, scratch))
    weights(*given)
    dx = torch.empty_like(x) if pictures else torch.empty(0)
    if pictures:
        back(*(each.data_ptr() for each in (grad, weight, dx, scratch)))
    return dx, dw, db


@convolve.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(_out(x, weight))


@convolve_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, pictures: bool) -> tuple[Tensor, Tensor, Tensor]:
    dx = torch.empty_like(x) if pictures else x.new_empty(0)
    return dx, torch.empty_like(weight), x.new_empty(len(weight))


def _out(x: Tensor, weight: Tensor) -> tuple[int, ...]:
    (n, _, h, w), (k, _, r, s) = x.shape, weight.shape
    return n, k, h - r + 1, w - s + 1
