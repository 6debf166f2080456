"""Rewrites of a recorded micro batch that change its time and not one of its bits.

Copies of no use go: `detach`, and a transpose of a transpose. Max pooling without overlap, which
torch computes value by value with a branch that no processor predicts, becomes the maximum of
strided views. Its indices, which the backward pass goes by, are those of the first of equal values,
as torch's are (NaN aside, which has no place of its own).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

aten = torch.ops.aten
POOL = aten.max_pool2d_with_indices.default


def simplify(module: GraphModule) -> None:
    """Rewrite a graph in place."""
    for node in list(module.graph.nodes):
        if node.target is aten.detach.default:
            _replace(node, node.args[0])
        elif node.target is aten.t.default and _is(node.args[0], aten.t.default):
            _replace(node, node.args[0].args[0])
        elif node.target is POOL:
            _pool(module, node)
    module.recompile()


def _is(node: Any, target: Any) -> bool:
    return isinstance(node, Node) and node.target is target


def _replace(node: Node, by: Any) -> None:
    node.replace_all_uses_with(by)
    node.graph.erase_node(node)


def _pool(module: GraphModule, node: Node) -> None:
    """Where windows are 2 x 2 and do not overlap."""
    x, kernel, *rest = node.args
    stride, padding, dilation, ceil = [*rest, *([], 0, 1, False)[len(rest) :]]
    plain = _pair(padding, 0) and _pair(dilation, 1) and not ceil and not node.kwargs
    if not (_pair(kernel, 2) and (not stride or _pair(stride, 2)) and plain):
        return
    seen = x.meta["val"]  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
    if seen.device.type != "cpu" or not seen.is_contiguous():
        return
    name = f"places_of_{node.name}"
    module.register_buffer(name, _first_places(*seen.shape[-2:]))
    with module.graph.inserting_before(node):
        places = module.graph.get_attr(name)
        both = module.graph.call_function(pool, (x, places))
    _replace(node, both)


def _pair(value: Any, wanted: int) -> bool:
    given = list(value) if isinstance(value, list | tuple) else [value]
    return given in ([wanted], [wanted, wanted])


def _first_places(height: int, width: int) -> Tensor:
    """Where the upper left of each window lies in its plane."""
    return torch.arange(0, height // 2 * 2, 2)[:, None] * width + torch.arange(0, width - 1, 2)


def pool(x: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of each 2 x 2 window, and where it is; `places` of `_first_places`."""
    width = x.shape[-1]
    whole = x[..., : x.shape[-2] // 2 * 2, : width // 2 * 2]
    upper, lower = whole[..., ::2, :], whole[..., 1::2, :]
    a, b, c, d = upper[..., ::2], upper[..., 1::2], lower[..., ::2], lower[..., 1::2]
    above, beneath = torch.maximum(a, b), torch.maximum(c, d)
    low = above < beneath
    right = torch.where(low, c < d, a < b)
    return torch.maximum(above, beneath), places.add(right).add_(low, alpha=width)
