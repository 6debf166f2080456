"""One micro batch as a list of aten operations: forward, and backward where a loss is trained.

    graph = trace(model, Shape.of(model, leaves, spec), scale=0.5)
    values, gradients = graph(weights, buffers, tensors)

PopTorch traces a model once and runs the trace; so may we. The operations are recorded by torch's
own `make_fx` on tensors without data, autograd's included, and are then run one after the other
below autograd: the same kernels in the same order on the same values, so the same bits, but without
the modules' Python and autograd's bookkeeping, which for a small model is most of the time.

What Python does besides is not in a trace. So a model is refused (`Untraceable`) where its forward
changes an attribute, a list or dictionary among them or a plain tensor, draws from Python's or
NumPy's generators, prints, asks a tensor for a value, or has hooks; and `verify` compares the first
run of a trace with the modules, bit for bit, random numbers and running statistics included, on
copies of all tensors. A trace belongs to a `Shape`: another one is traced anew.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import NoneType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from packhorse_port.losses import Untraceable, called, find
from packhorse_port.rewrite import simplify

PLAIN = (bool, int, float, str, NoneType, tuple, torch.dtype, torch.device)
REGISTERED = ("_parameters", "_buffers")  # where `functional_call` puts others for a while
HOOKS = (
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    *("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
)


class Held(NamedTuple):
    """A module's tensors, by name: what is trained, what is only read, what a step changes."""

    weights: Mapping[str, Tensor]
    frozen: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]

    @classmethod
    def by(cls, model: nn.Module, training: bool) -> Held:
        every = dict(model.named_parameters())
        weights = {name: p for name, p in every.items() if training and p.requires_grad}
        frozen = {name: p for name, p in every.items() if name not in weights}
        return cls(weights, frozen, dict(model.named_buffers()))


@dataclass(frozen=True, slots=True)
class Shape:
    """What a trace is good for; compared at each host call."""

    tensors: tuple[Any, ...]  # size, type and layout of each input
    others: tuple[Any, ...]  # inputs that are no tensors
    spec: TreeSpec
    model: tuple[Any, ...]

    @classmethod
    def of(cls, model: nn.Module, leaves: Sequence[Any], spec: TreeSpec) -> Shape:
        tensors = tuple(
            (x.shape, x.dtype, x.device, x.stride()) for x in leaves if isinstance(x, Tensor)
        )
        others = tuple((i, x) for i, x in enumerate(leaves) if not isinstance(x, Tensor))
        return cls(tensors, others, spec, _attributes(model))


def _attributes(model: nn.Module) -> tuple[Any, ...]:
    """The plain values that modules hold (a dropout's rate, `training`), and what is trained."""
    plain = (
        tuple(value for value in vars(module).values() if type(value) in PLAIN)
        for module in model.modules()
    )
    trained = tuple((p.requires_grad, p.dtype, p.device) for p in model.parameters())
    return (*plain, trained, torch.is_autocast_enabled("cpu"))


@dataclass(frozen=True, slots=True)
class Graph:
    """A recorded micro batch."""

    module: torch.fx.GraphModule  # takes and returns flat lists
    run: Callable[..., Sequence[Any]]
    outputs: int  # how many of what it returns are outputs; the rest are gradients
    spec: TreeSpec  # of the outputs
    constants: tuple[tuple[int, Any], ...]  # leaves of the outputs that are no tensors
    # Within it the graph is run: below autograd, which has nothing to add, or without gradients.
    mode: Callable[[], AbstractContextManager[Any]] = torch._C._AutoDispatchBelowAutograd

    def __call__(self, inputs: Sequence[Tensor]) -> tuple[list[Any], Sequence[Tensor | None]]:
        """Leaves of the outputs, and gradients of the weights."""
        values = self.run(*inputs)
        leaves = list(values[: self.outputs])
        for place, value in self.constants:
            leaves.insert(place, value)
        return leaves, values[self.outputs :]


def inputs_of(held: Held, tensors: Sequence[Tensor]) -> list[Tensor]:
    """What a graph is called with, in order."""
    state = (*held.weights.values(), *held.frozen.values(), *held.buffers.values())
    return [*(each.detach() for each in state), *tensors]


def trace(
    model: nn.Module,
    training: bool,
    scale: float,
    leaves: Sequence[Any],
    spec: TreeSpec,
    simple: bool = True,
) -> Graph:
    """Record one micro batch; simple: with the rewrites that leave every bit as it is."""
    from torch.fx.experimental.proxy_tensor import make_fx

    held = Held.by(model, training)
    _refuse_hooks(model)
    found: dict[str, Any] = {}

    def micro(*flat: Tensor) -> list[Any]:
        outputs, gradients, found["spec"], found["constants"] = micro_batch(
            model, training, scale, held, flat, leaves, spec
        )
        found["outputs"] = len(outputs)
        return [*outputs, *gradients]

    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    with watched(model):
        try:
            module = make_fx(micro, tracing_mode="fake", _allow_non_fake_inputs=True)(
                *inputs_of(held, tensors)
            )
        except Untraceable:
            raise
        except Exception as error:  # whatever a user's forward does with tensors without data
            raise Untraceable(f"{type(error).__name__}: {error}".partition("\n")[0]) from error
    if simple:
        simplify(module)
    return Graph(module, module.forward, found["outputs"], found["spec"], found["constants"])


def micro_batch(
    model: nn.Module,
    training: bool,
    scale: float,
    held: Held,
    flat: Sequence[Tensor],
    leaves: Sequence[Any],
    spec: TreeSpec,
) -> tuple[Any, ...]:
    """Forward and backward on stand-ins for the module's own tensors."""
    count = len(held.weights)
    weights = [each.detach().requires_grad_() for each in flat[:count]]
    names = [*held.weights, *held.frozen, *held.buffers]
    state = dict(zip(names, [*weights, *flat[count : len(names)]], strict=True))
    rest = iter(flat[len(names) :])
    filled = [next(rest) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    args, kwargs = tree_unflatten(filled, spec)
    with called(recording=True) as call, torch.set_grad_enabled(training):
        outputs = torch.func.functional_call(model, state, args, kwargs)
        values, shape = tree_flatten(outputs)
        gradients: Sequence[Any] = ()
        if training:
            loss = find(call, values, model)
            seed = torch.full_like(loss, scale)
            gradients = torch.autograd.grad(loss, weights, seed, allow_unused=True)
    tensors = [value.detach() for value in values if isinstance(value, Tensor)]
    constants = tuple((i, v) for i, v in enumerate(values) if not isinstance(v, Tensor))
    return tensors, gradients, shape, constants


def verify(
    graph: Graph,
    model: nn.Module,
    training: bool,
    scale: float,
    leaves: Sequence[Any],
    spec: TreeSpec,
    exact: bool,
) -> None:
    """Refuse a graph that does other than the modules: outputs, gradients, state, randomness."""
    held = Held.by(model, training)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def rehearse(run: Callable[[list[Tensor]], tuple[Any, ...]]) -> tuple[list[Any], Tensor]:
        copies = [tensor.clone() for tensor in inputs_of(held, tensors)]
        before = torch.get_rng_state()
        values, gradients, *_ = run(copies)
        drawn = torch.get_rng_state()
        torch.set_rng_state(before)
        numbers = [value for value in values if isinstance(value, Tensor)]
        return [*numbers, *gradients, *copies], drawn

    def by_graph(flat: list[Tensor]) -> tuple[Any, ...]:
        with torch.no_grad():
            return graph(flat)

    def by_modules(flat: list[Tensor]) -> tuple[Any, ...]:
        return micro_batch(model, training, scale, held, flat, leaves, spec)

    with watched(model):
        expected, drawn = rehearse(by_modules)
    found, drawn_by_graph = rehearse(by_graph)
    pairs = list(zip(expected, found, strict=True))
    if not torch.equal(drawn, drawn_by_graph) or not all(_same_numbers(*p, exact) for p in pairs):
        raise Untraceable("its graph gives other numbers than its modules")


def _same_numbers(expected: Tensor | None, found: Tensor | None, exact: bool) -> bool:
    if expected is None or found is None:
        return expected is found
    if exact or not expected.is_floating_point():
        return torch.equal(expected, found)
    return torch.allclose(expected, found, rtol=1e-3, atol=1e-5)


def _refuse_hooks(model: nn.Module) -> None:
    if any(vars(module).get(name) for module in model.modules() for name in HOOKS):
        raise Untraceable("a module has hooks")
    for parameter in model.parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise Untraceable("a parameter has hooks")


@contextmanager
def watched(model: nn.Module) -> Iterator[None]:
    """Within it, a model must leave nothing behind in Python; what it did is undone and refused."""
    before = [(module, dict(vars(module))) for module in model.modules()]
    contents = [_contents(values) for _, values in before]
    versions = [_versions(values) for _, values in before]
    drawn, numbers = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        changed = [_put_back(*state) for state in zip(before, contents, versions, strict=True)]
        drawn_outside = random.getstate() != drawn
        if drawn_outside or str(np.random.get_state()) != str(numbers):
            random.setstate(drawn)
            np.random.set_state(numbers)
            raise Untraceable("its forward draws random numbers outside torch")
        if any(changed):
            raise Untraceable("its forward sets attributes")


def _put_back(before: tuple[nn.Module, dict[str, Any]], contents: Any, versions: list[int]) -> bool:
    """A module's attributes as they were; whether they had changed."""
    module, values = before
    now = vars(module)
    changed = now.keys() != values.keys() or any(now[key] is not values[key] for key in now)
    if changed:
        now.clear()
        now.update(values)
    for container, kept in contents:
        if not _same(container, kept):
            changed = True
            container.clear()
            container.extend(kept) if isinstance(container, list) else container.update(kept)
    return changed or _versions(values) != versions


def _contents(values: dict[str, Any]) -> list[tuple[Any, Any]]:
    """The lists, sets and dictionaries among a module's attributes, each with a copy."""
    containers = [
        value
        for name, value in values.items()
        if isinstance(value, dict | list | set) and name not in REGISTERED
    ]
    return [(container, container.copy()) for container in containers]


def _same(one: Any, other: Any) -> bool:
    """Do two containers hold the same objects?"""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(one[key] is other[key] for key in one)
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


def _versions(values: dict[str, Any]) -> list[int]:
    """Counts of the changes in place of a module's plain tensors."""
    return [value._version for value in values.values() if isinstance(value, Tensor)]
