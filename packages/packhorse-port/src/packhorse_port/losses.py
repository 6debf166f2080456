"""Which of a model's values is the loss: the one it marks, else the one scalar it returns.

    return out, identity_loss(first + second, reduction="mean")

PopTorch looks for loss operations in the graph it compiled. Here a forward pass is just called, so
what it marks with `identity_loss` is noted down while it runs, and without a mark its outputs are
looked through. Several independent marks, or several scalars that could each be the loss, are an
error, as they are in PopTorch: adding them up silently would train something nobody wrote.
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

from packhorse.errors import InputError

REDUCTIONS = {"sum": "sum", "mean": "mean", "none": "none", 0: "sum", 1: "mean", 2: "none"}
ADVICE = (
    'mark the final one: loss = poptorch.identity_loss(first + second, reduction="mean") and return'
    " it"
)


class Untraceable(Exception):
    """Why a model's forward cannot be recorded; it is run as it is."""


@dataclass
class Call:
    """What a forward pass says of itself while an executor runs it."""

    recording: bool = False  # it is recorded, to be run as operations from then on
    losses: list[Tensor] = field(default_factory=list)


_call: ContextVar[Call | None] = ContextVar("packhorse_port.call", default=None)


@contextmanager
def called(recording: bool = False) -> Iterator[Call]:
    """Listen to a forward pass."""
    token = _call.set(Call(recording))
    try:
        yield _call.get()  # pyright: ignore[reportReturnType]
    finally:
        _call.reset(token)


def isRunningOnIpu() -> bool:
    """Is this within a model that an executor runs?"""
    return _call.get() is not None


def speak() -> None:
    """This forward pass has an effect besides its outputs, so it must be run as Python."""
    if (call := _call.get()) is not None and call.recording:
        raise Untraceable("its forward prints")


def identity_loss(x: Tensor, reduction: str | int = "none") -> Tensor:
    """Mark `x`, reduced as asked, as the loss; unreduced, its elements count one each."""
    if reduction not in REDUCTIONS:
        raise InputError(f"identity_loss: reduction is 'sum', 'mean' or 'none', not {reduction!r}")
    how = REDUCTIONS[reduction]
    loss = x if how == "none" else getattr(x, how)()
    if (call := _call.get()) is not None:
        call.losses.append(loss)
    return loss


def find(call: Call, leaves: Sequence[Any], model: nn.Module) -> Tensor:
    """The loss of a forward pass, among what it marked or returned."""
    marked = [loss for loss in call.losses if loss.requires_grad]
    if marked:
        return _last(marked, model)
    scalars = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.numel() == 1]
    scalars = [leaf for leaf in scalars if leaf.requires_grad and leaf.is_floating_point()]
    for likely in (_plain, _by_function):
        scalars = likely(scalars)
    if len(scalars) == 1:
        return scalars[0]
    if scalars:
        raise InputError(f"{_forward(model)} returns {len(scalars)} scalars; {ADVICE}")
    many = any(isinstance(leaf, Tensor) and leaf.dim() == 1 for leaf in leaves)
    unreduced = ' One number, that is: a loss with reduction="none" is none.' if many else ""
    raise InputError(
        f"Couldn't find a loss in graph: {_forward(model)} returns no loss. Let it end with"
        " `return out, self.loss(out, labels)`, or mark the loss:"
        f' poptorch.identity_loss(loss, reduction="mean").{unreduced}'
    )


def _last(marked: list[Tensor], model: nn.Module) -> Tensor:
    """The last mark, if the others lead to it."""
    last = marked[-1]
    inside = _ancestors(last) if len(marked) > 1 else set()
    if any(loss is not last and loss.grad_fn not in inside for loss in marked):
        raise InputError(f"{_forward(model)} marks several independent losses; {ADVICE}")
    return last


def _ancestors(loss: Tensor) -> set[Any]:
    seen, waiting = set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [each for each, _ in node.next_functions]
    return seen


def _plain(scalars: list[Tensor]) -> list[Tensor]:
    """Of several, those without dimensions: an output for a batch of one has some."""
    return [each for each in scalars if each.dim() == 0] or scalars


def _by_function(scalars: list[Tensor]) -> list[Tensor]:
    """Of several, those that a loss function of torch made."""
    if len(scalars) < 2:
        return scalars
    made = ("Loss", "CrossEntropy", "KlDiv")
    named = [each for each in scalars if any(name in type(each.grad_fn).__name__ for name in made)]
    return named or scalars


def _forward(model: nn.Module) -> str:
    """`Net.forward (train.py:12)`, as far as it can be told."""
    kind = type(model)
    try:
        path = Path(inspect.getsourcefile(kind.forward) or "").name
        line = inspect.getsourcelines(kind.forward)[1]
    except (OSError, TypeError):
        return f"{kind.__name__}.forward"
    return f"{kind.__name__}.forward ({path}:{line})"
