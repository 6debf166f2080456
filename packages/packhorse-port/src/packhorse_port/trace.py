"""One micro batch as a list of aten operations: forward, and backward if a loss is trained.

    graph = trace(model, training, scale, leaves, spec)
    values, gradients = graph(graph_inputs(ModelState.of(model, training), tensors))

PopTorch traces a model once and runs the trace; this is the same. torch's own `make_fx` records the
operations on tensors without data, autograd's included. They then run one after the other below
autograd: the same kernels in the same order on the same values, so the same bits, but without the
modules' Python and autograd's bookkeeping, which is most of the time of a small model.

A trace does not contain what else Python does. So a model is refused (`Untraceable`) if its forward
changes an attribute (including lists, dictionaries and plain tensors), draws from Python's or
NumPy's generators, prints, asks a tensor for a value, or has hooks. `verify` compares the first run
of a trace with the modules, bit for bit, including random numbers and running statistics, on copies
of all tensors. A trace is valid for one `TraceKey`; other inputs are traced anew.

`compile_graph` sends a trace through torch's inductor. Random numbers are left to torch's kernels,
so that dropout draws the same, but sums are taken in another order: results equal those of the
modules within rounding, no longer to the bit.
"""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from types import NoneType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from packhorse import executable
from packhorse.cache import keep_compiled_code_private
from packhorse_port.losses import Untraceable, find_loss, forward_call

PLAIN_TYPES = (bool, int, float, str, NoneType, tuple, torch.dtype, torch.device)
REGISTERED = ("_parameters", "_buffers")  # which `functional_call` replaces temporarily
HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


class ModelState(NamedTuple):
    """A module's tensors by name: trained weights, frozen weights, buffers."""

    weights: Mapping[str, Tensor]
    frozen: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]

    @classmethod
    def of(cls, model: nn.Module, training: bool) -> ModelState:
        parameters = dict(model.named_parameters())
        weights = {name: p for name, p in parameters.items() if training and p.requires_grad}
        frozen = {name: p for name, p in parameters.items() if name not in weights}
        return cls(weights, frozen, dict(model.named_buffers()))


@dataclass(frozen=True, slots=True)
class TraceKey:
    """What a trace depends on; compared at each host call."""

    tensors: tuple[Any, ...]  # size, dtype, device and strides of each tensor input
    constants: tuple[Any, ...]  # inputs that are not tensors, with their positions
    spec: TreeSpec
    model: tuple[Any, ...]

    @classmethod
    def of(cls, model: nn.Module, leaves: Sequence[Any], spec: TreeSpec) -> TraceKey:
        tensors = tuple(
            (x.shape, x.dtype, x.device, x.stride()) for x in leaves if isinstance(x, Tensor)
        )
        constants = tuple((i, x) for i, x in enumerate(leaves) if not isinstance(x, Tensor))
        return cls(tensors, constants, spec, _attributes(model))


def _attributes(model: nn.Module) -> tuple[Any, ...]:
    """Plain attributes of the modules (a dropout's rate, `training`), and what is trained."""
    attributes = (
        tuple(value for value in vars(module).values() if type(value) in PLAIN_TYPES)
        for module in model.modules()
    )
    trained = tuple((p.requires_grad, p.dtype, p.device) for p in model.parameters())
    return (*attributes, trained, torch.is_autocast_enabled("cpu"))


@dataclass(frozen=True, slots=True)
class MicroBatchGraph:
    """A recorded micro batch."""

    module: GraphModule  # takes and returns flat lists
    run: Callable[..., Sequence[Any]]
    outputs: int  # how many of the returned values are outputs; the rest are gradients
    spec: TreeSpec  # of the outputs
    constants: tuple[tuple[int, Any], ...]  # outputs that are not tensors, with their positions
    # The graph runs inside it: below autograd, which has nothing to add, or without gradients.
    mode: Callable[[], AbstractContextManager[Any]] = torch._C._AutoDispatchBelowAutograd

    def __call__(self, inputs: Sequence[Tensor]) -> tuple[list[Any], Sequence[Tensor | None]]:
        """Flat outputs, and gradients of the weights."""
        values = self.run(*inputs)
        leaves = list(values[: self.outputs])
        for position, value in self.constants:
            leaves.insert(position, value)
        return leaves, values[self.outputs :]


def graph_inputs(state: ModelState, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The inputs of a graph in order: the model's state, then the tensors of the batch."""
    state_tensors = (*state.weights.values(), *state.frozen.values(), *state.buffers.values())
    return [*(tensor.detach() for tensor in state_tensors), *tensors]


def trace(
    model: nn.Module,
    training: bool,
    scale: float,
    leaves: Sequence[Any],
    spec: TreeSpec,
    simplified: bool = True,
) -> MicroBatchGraph:
    """Record one micro batch; `simplified` applies rewrites that keep every bit.

    `leaves` and `spec` are the model's (args, kwargs) as torch's pytrees flatten them. The gradient
    of the loss starts from `scale` (1 / number of micro batches if gradients are averaged).
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    state = ModelState.of(model, training)
    _refuse_hooks(model)
    structure: dict[str, Any] = {}  # of the outputs; known once the micro batch has run

    def run(*flat: Tensor) -> list[Any]:
        outputs, gradients, structure["spec"], structure["constants"] = micro_batch(
            model, training, scale, state, flat, leaves, spec
        )
        structure["outputs"] = len(outputs)
        return [*outputs, *gradients]

    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    with unchanged(model):
        try:
            # Real tensors are allowed because a model may hold some as plain attributes, which are
            # neither parameters nor buffers; they become constants of the graph.
            module = make_fx(run, tracing_mode="fake", _allow_non_fake_inputs=True)(
                *graph_inputs(state, tensors)
            )
        except Untraceable:
            raise
        except Exception as error:  # anything that a user's forward does with fake tensors
            raise Untraceable(f"{type(error).__name__}: {error}".partition("\n")[0]) from error
    if simplified:
        simplify(module)
    return MicroBatchGraph(
        module, module.forward, structure["outputs"], structure["spec"], structure["constants"]
    )


def micro_batch(
    model: nn.Module,
    training: bool,
    scale: float,
    state: ModelState,
    flat: Sequence[Tensor],
    leaves: Sequence[Any],
    spec: TreeSpec,
) -> tuple[Any, ...]:
    """Forward and backward on `flat` (see `graph_inputs`) in place of the module's own tensors.

    Returns output tensors, gradients, structure of the outputs, and outputs that are not tensors.
    """
    count = len(state.weights)
    weights = [tensor.detach().requires_grad_() for tensor in flat[:count]]
    names = [*state.weights, *state.frozen, *state.buffers]
    tensors_by_name = dict(zip(names, [*weights, *flat[count : len(names)]], strict=True))
    batch = iter(flat[len(names) :])
    inputs = [next(batch) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    args, kwargs = tree_unflatten(inputs, spec)
    with forward_call(recording=True) as call, torch.set_grad_enabled(training):
        outputs = torch.func.functional_call(model, tensors_by_name, args, kwargs)
        values, output_spec = tree_flatten(outputs)
        gradients: Sequence[Any] = ()
        if training:
            loss = find_loss(call, values, model)
            if loss is None:
                raise Untraceable("it has no weights to train")
            seed = torch.full_like(loss, scale)
            gradients = torch.autograd.grad(loss, weights, seed, allow_unused=True)
    tensors = [value.detach() for value in values if isinstance(value, Tensor)]
    constants = tuple((i, v) for i, v in enumerate(values) if not isinstance(v, Tensor))
    return tensors, gradients, output_spec, constants


def verify(
    graph: MicroBatchGraph,
    model: nn.Module,
    training: bool,
    scale: float,
    leaves: Sequence[Any],
    spec: TreeSpec,
    exact: bool,
) -> None:
    """Raise `Untraceable` unless graph and modules agree: outputs, gradients, state, randomness."""
    state = ModelState.of(model, training)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def rehearse(run: Callable[[list[Tensor]], tuple[Any, ...]]) -> tuple[list[Any], Tensor]:
        """Results on copies of all inputs, and the generator's state afterwards; it is reset."""
        copies = [tensor.clone() for tensor in graph_inputs(state, tensors)]
        rng_before = torch.get_rng_state()
        values, gradients, *_ = run(copies)
        rng_after = torch.get_rng_state()
        torch.set_rng_state(rng_before)
        numbers = [value for value in values if isinstance(value, Tensor)]
        return [*numbers, *gradients, *copies], rng_after

    def run_graph(flat: list[Tensor]) -> tuple[Any, ...]:
        with torch.no_grad():
            return graph(flat)

    def run_modules(flat: list[Tensor]) -> tuple[Any, ...]:
        return micro_batch(model, training, scale, state, flat, leaves, spec)

    with unchanged(model):
        expected, expected_rng = rehearse(run_modules)
    actual, actual_rng = rehearse(run_graph)
    pairs = list(zip(expected, actual, strict=True))
    same_rng = torch.equal(expected_rng, actual_rng)
    if not same_rng or not all(_same_numbers(*pair, exact) for pair in pairs):
        raise Untraceable("its graph gives other numbers than its modules")


def _same_numbers(expected: Tensor | None, actual: Tensor | None, exact: bool) -> bool:
    if expected is None or actual is None:
        return expected is actual
    if exact or not expected.is_floating_point():
        return torch.equal(expected, actual)
    return torch.allclose(expected, actual, rtol=1e-3, atol=1e-5)


def _refuse_hooks(model: nn.Module) -> None:
    if any(vars(module).get(name) for module in model.modules() for name in HOOKS):
        raise Untraceable("a module has hooks")
    for parameter in model.parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise Untraceable("a parameter has hooks")


# What a forward pass leaves behind in Python


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Undo and refuse (`Untraceable`) what the model changes in Python inside this context."""
    before = [(module, dict(vars(module))) for module in model.modules()]
    containers = [_copy_containers(attributes) for _, attributes in before]
    versions = [_tensor_versions(attributes) for _, attributes in before]
    python_rng = random.getstate()
    numpy_rng = np.random.get_state()
    try:
        yield
    finally:
        # What is raised here replaces an error of the body, which remains as its context.
        changed = [_restore(*state) for state in zip(before, containers, versions, strict=True)]
        python_drawn = random.getstate() != python_rng
        # As text, because the states are tuples with arrays, which `!=` compares value by value.
        if python_drawn or str(np.random.get_state()) != str(numpy_rng):
            random.setstate(python_rng)
            np.random.set_state(numpy_rng)
            raise Untraceable("its forward draws random numbers outside torch")
        if any(changed):
            raise Untraceable("its forward sets attributes")


def _restore(
    before: tuple[nn.Module, dict[str, Any]],
    containers: list[tuple[Any, Any]],
    versions: list[int],
) -> bool:
    """Restore a module's attributes; whether they had changed."""
    module, attributes = before
    now = vars(module)
    changed = now.keys() != attributes.keys() or any(now[key] is not attributes[key] for key in now)
    if changed:
        now.clear()
        now.update(attributes)
    for container, copy in containers:
        if not _same_contents(container, copy):
            changed = True
            container.clear()
            container.extend(copy) if isinstance(container, list) else container.update(copy)
    return changed or _tensor_versions(attributes) != versions


def _copy_containers(attributes: dict[str, Any]) -> list[tuple[Any, Any]]:
    """The lists, sets and dictionaries among a module's attributes, each with a copy."""
    containers = [
        value
        for name, value in attributes.items()
        if isinstance(value, dict | list | set) and name not in REGISTERED
    ]
    return [(container, container.copy()) for container in containers]


def _same_contents(first: Any, second: Any) -> bool:
    """Whether two containers hold the same objects."""
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(first[key] is second[key] for key in first)
    return len(first) == len(second) and all(a is b for a, b in zip(first, second, strict=True))


def _tensor_versions(attributes: dict[str, Any]) -> list[int]:
    """Counts of in-place changes of a module's plain tensors."""
    return [value._version for value in attributes.values() if isinstance(value, Tensor)]


# Rewrites of a trace that save time and keep every bit

aten = torch.ops.aten
MAX_POOL = aten.max_pool2d_with_indices.default


def simplify(module: GraphModule) -> None:
    """Rewrite a graph in place: drop useless copies, replace 2 x 2 max pooling."""
    for node in list(module.graph.nodes):
        if node.target is aten.detach.default:  # a graph runs below autograd: nothing to detach
            _replace(node, node.args[0])
        elif node.target is aten.t.default and _calls(node.args[0], aten.t.default):
            _replace(node, node.args[0].args[0])
        elif node.target is MAX_POOL:
            _replace_max_pool(module, node)
    module.recompile()


def _calls(node: Any, target: Any) -> bool:
    return isinstance(node, Node) and node.target is target


def _replace(node: Node, replacement: Any) -> None:
    node.replace_all_uses_with(replacement)
    node.graph.erase_node(node)


def _replace_max_pool(module: GraphModule, node: Node) -> None:
    """Replace the pooling of 2 x 2 windows that do not overlap, on a CPU.

    torch computes it value by value, with a branch that no processor predicts; the maximum of
    strided views is several times faster.
    """
    x, kernel, *rest = node.args
    stride, padding, dilation, ceil_mode = [*rest, *([], 0, 1, False)[len(rest) :]]
    plain = _both_are(padding, 0) and _both_are(dilation, 1) and not ceil_mode and not node.kwargs
    if not (_both_are(kernel, 2) and (not stride or _both_are(stride, 2)) and plain):
        return
    value = x.meta["val"]  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
    if value.device.type != "cpu" or not value.is_contiguous():
        return
    name = f"corners_of_{node.name}"
    module.register_buffer(name, _window_corners(*value.shape[-2:]))
    with module.graph.inserting_before(node):
        corners = module.graph.get_attr(name)
        pooled = module.graph.call_function(max_pool, (x, corners))
    _replace(node, pooled)


def _both_are(value: Any, expected: int) -> bool:
    """Whether an argument for height and width is `expected`, as a number, a list or a pair."""
    values = list(value) if isinstance(value, list | tuple) else [value]
    return values in ([expected], [expected, expected])


def _window_corners(height: int, width: int) -> Tensor:
    """Index of the upper left value of each 2 x 2 window in its plane."""
    return torch.arange(0, height // 2 * 2, 2)[:, None] * width + torch.arange(0, width - 1, 2)


def max_pool(x: Tensor, corners: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of each 2 x 2 window and its index; `corners` are those of `_window_corners`.

    The indices, which the backward pass uses, are those of the first of equal values, as torch's
    are (except for NaN, whose index is unspecified).
    """
    width = x.shape[-1]
    whole = x[..., : x.shape[-2] // 2 * 2, : width // 2 * 2]
    upper = whole[..., ::2, :]
    lower = whole[..., 1::2, :]
    a, b = upper[..., ::2], upper[..., 1::2]
    c, d = lower[..., ::2], lower[..., 1::2]
    upper_max = torch.maximum(a, b)
    lower_max = torch.maximum(c, d)
    in_lower = upper_max < lower_max
    in_right = torch.where(in_lower, c < d, a < b)
    indices = corners.add(in_right).add_(in_lower, alpha=width)
    return torch.maximum(upper_max, lower_max), indices


# Compiling a trace

INDUCTOR_SETTINGS = {"fallback_random": True}
CACHE_VARIABLES = ("PACKHORSE_CACHE", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def compile_graph(
    graph: MicroBatchGraph, inputs: Sequence[Tensor], folder: str | None
) -> MicroBatchGraph:
    """The graph compiled for these inputs; raises `Untraceable` if it cannot be.

    `folder` is that of `enableExecutableCaching` or `POPTORCH_CACHE_DIR`; None means the folder of
    `packhorse.executable`. Compiled code is loaded from there only, and only if no other user can
    write to it.
    """
    if reason := executable.why_uncompiled():
        raise Untraceable(reason)
    from torch._inductor import config

    run = torch.compile(graph.module, dynamic=False, fullgraph=True)
    copies = [tensor.clone() for tensor in inputs]
    rng_state = torch.get_rng_state()
    with (
        _cache_folder(folder),
        warnings.catch_warnings(),
        config.patch(INDUCTOR_SETTINGS),
        torch.no_grad(),
    ):
        warnings.simplefilter("ignore")
        try:
            run(*copies)  # the first run compiles
        except Exception as error:  # the compiler fails in many ways, none of them the user's fault
            raise Untraceable(f"{type(error).__name__}: {error}".partition("\n")[0]) from error
        finally:
            torch.set_rng_state(rng_state)
    return replace(graph, run=run, mode=torch.no_grad)


@contextmanager
def _cache_folder(folder: str | None) -> Iterator[None]:
    """Read and write compiled code in this folder, inside this context."""
    before = {name: os.environ.get(name) for name in CACHE_VARIABLES}
    if folder:
        os.environ["PACKHORSE_CACHE"] = folder
    keep_compiled_code_private()
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
