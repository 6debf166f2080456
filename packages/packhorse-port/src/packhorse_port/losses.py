"""Which of a model's values is the loss: the one it marks, else the only scalar it returns.

    return out, identity_loss(first + second, reduction="mean")

PopTorch looks for loss operations in the graph it compiled. Here a forward pass is only called, so
its calls of `identity_loss` are recorded while it runs; without any, its outputs are searched.
Several independent marks, or several scalars that could each be the loss, are an error, as in
PopTorch: adding them silently would train something that nobody wrote.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from packhorse_port.notices import UsageError, log_once

REDUCTIONS = {"sum": "sum", "mean": "mean", "none": "none", 0: "sum", 1: "mean", 2: "none"}
ADVICE = (
    'mark the final one: loss = poptorch.identity_loss(first + second, reduction="mean") and return'
    " it"
)
LOSS_FUNCTIONS = ("Loss", "CrossEntropy", "KlDiv")  # in names of autograd nodes


class Untraceable(Exception):
    """Why a model's forward cannot be recorded; it then runs as Python."""


@dataclass
class ForwardCall:
    """What a forward pass reports while an executor runs it."""

    recording: bool = False  # the pass is traced, to be run as operations later
    losses: list[Tensor] = field(default_factory=list)


_call: ContextVar[ForwardCall | None] = ContextVar("packhorse_port.call", default=None)


@contextmanager
def forward_call(recording: bool = False) -> Iterator[ForwardCall]:
    """Collect what a forward pass inside this context reports."""
    call = ForwardCall(recording)
    token = _call.set(call)
    try:
        yield call
    finally:
        _call.reset(token)


def isRunningOnIpu() -> bool:
    """Whether this is called by a model that an executor runs."""
    return _call.get() is not None


def report_side_effect() -> None:
    """Refuse to trace the current forward pass: it has an effect besides its outputs."""
    if (call := _call.get()) is not None and call.recording:
        raise Untraceable("its forward prints")


def identity_loss(x: Tensor, reduction: str | int = "none") -> Tensor:
    """Mark `x`, reduced, as the loss; without a reduction, its elements are summed."""
    if reduction not in REDUCTIONS:
        raise UsageError(f"identity_loss: reduction is 'sum', 'mean' or 'none', not {reduction!r}")
    method = REDUCTIONS[reduction]
    loss = x if method == "none" else getattr(x, method)()
    if (call := _call.get()) is not None:
        call.losses.append(loss)
    return loss


def find_loss(call: ForwardCall, leaves: Sequence[Any], model: nn.Module) -> Tensor | None:
    """The loss of a forward pass, among what it marked or returned; None if nothing is trained."""
    marked = [loss for loss in call.losses if loss.requires_grad]
    if marked:
        return _final_mark(marked, model)
    scalars = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.numel() == 1]
    scalars = [leaf for leaf in scalars if leaf.requires_grad and leaf.is_floating_point()]
    for narrow in (_without_dimensions, _by_loss_function):
        scalars = narrow(scalars)
    if len(scalars) == 1:
        return scalars[0]
    if scalars:
        raise UsageError(f"{_describe_forward(model)} returns {len(scalars)} scalars; {ADVICE}")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return None
    if _without_gradient(call, leaves):
        log_once("untrained", f"{_describe_forward(model)}: its loss depends on no weight to train")
        return None
    has_vector = any(isinstance(leaf, Tensor) and leaf.dim() == 1 for leaf in leaves)
    unreduced = (
        ' The loss is one number; with reduction="none" it is a vector.' if has_vector else ""
    )
    raise UsageError(
        f"Couldn't find a loss in graph: {_describe_forward(model)} returns no loss. Let it end"
        " with `return out, self.loss(out, labels)`, or mark the loss:"
        f' poptorch.identity_loss(loss, reduction="mean").{unreduced}'
    )


def _without_gradient(call: ForwardCall, leaves: Sequence[Any]) -> bool:
    """Whether there is a loss that was computed from no weight."""
    numbers = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() == 0]
    return bool(call.losses) or sum(number.is_floating_point() for number in numbers) == 1


def _final_mark(marked: list[Tensor], model: nn.Module) -> Tensor:
    """The last marked loss, if it was computed from all others."""
    last = marked[-1]
    ancestors = _ancestors(last) if len(marked) > 1 else set()
    if any(loss is not last and loss.grad_fn not in ancestors for loss in marked):
        raise UsageError(f"{_describe_forward(model)} marks several independent losses; {ADVICE}")
    return last


def _ancestors(loss: Tensor) -> set[Any]:
    """Autograd nodes that a loss was computed from."""
    ancestors = set()
    pending = [loss.grad_fn]
    while pending:
        node = pending.pop()
        if node is not None and node not in ancestors:
            ancestors.add(node)
            pending += [parent for parent, _ in node.next_functions]
    return ancestors


def _without_dimensions(scalars: list[Tensor]) -> list[Tensor]:
    """Scalars without dimensions, if any: an output for a batch of one element has some."""
    return [scalar for scalar in scalars if scalar.dim() == 0] or scalars


def _by_loss_function(scalars: list[Tensor]) -> list[Tensor]:
    """Of several scalars, those that a loss function of torch computed, if any."""
    if len(scalars) < 2:
        return scalars
    losses = [
        scalar
        for scalar in scalars
        if any(name in type(scalar.grad_fn).__name__ for name in LOSS_FUNCTIONS)
    ]
    return losses or scalars


def _describe_forward(model: nn.Module) -> str:
    """`Net.forward (train.py:12)`; without the line if the source is not available."""
    kind = type(model)
    try:
        path = Path(inspect.getsourcefile(kind.forward) or "").name
        line = inspect.getsourcelines(kind.forward)[1]
    except (OSError, TypeError):
        return f"{kind.__name__}.forward"
    return f"{kind.__name__}.forward ({path}:{line})"
