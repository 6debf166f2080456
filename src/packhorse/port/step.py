"""One host call: many micro batches, many optimizer steps.

    step = Step(model, optimizer, Setting.of(options, training=True), group)
    outputs = step(args, kwargs)

A combined batch is cut in the order of PopART's data: device iteration, accumulation, replica. Each
iteration adds up the gradients of its micro batches, divided by their number where they are to be
averaged (each loss is scaled before its backward pass, as a plain loop does), then the optimizer
makes one step. One replica on a CPU in fp32 so gives the bits of the plain loop.

How a micro batch is run is decided as the calls come, for each shape of input. First as modules and
autograd. A second iteration whose micro batches are short, so that the host's work counts, is used
to check a trace (`trace`), and if that gave the same bits it stands in from then on. Where compiled
code is asked for, the trace goes through torch's inductor instead, within rounding (`compiling`).
On CUDA the whole host call is captured as one graph (`capture`). What is refused goes on as
modules.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from packhorse.errors import InputError
from packhorse.port.enums import OutputMode, ReductionType
from packhorse.port.losses import Untraceable, called, find
from packhorse.port.notices import LOGGER, place
from packhorse.port.options import Options
from packhorse.port.outputs import Outputs, resolve
from packhorse.port.replicas import Group
from packhorse.port.trace import Graph, Held, Shape, inputs_of, trace

SHORT = 0.02  # seconds of a micro batch below which the host's share is worth saving
GRAPHS = 32  # shapes kept
# Optimizers whose update of all weights together has the bits of one weight after the other.
TOGETHER = (
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop),
    *(torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.Adamax),
)
FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad)


@dataclass(frozen=True, slots=True)
class Setting:
    """What of the options a step goes by."""

    training: bool
    iterations: int
    accumulation: int
    replicas: int
    mode: OutputMode
    every: int
    mean: bool
    compiled: bool | None = None  # None: a trace of the same bits where it pays
    cache: str | None = None

    @classmethod
    def of(cls, options: Options, training: bool) -> Setting:
        asked = options.compile_step
        return cls(
            training,
            options.device_iterations,
            options.gradient_accumulation,
            options.replication_factor,
            resolve(options, training),
            options.output_every,
            options.reduction == ReductionType.Mean,
            True if asked is None and options.cache_path else asked,
            options.cache_path,
        )

    @property
    def batches(self) -> int:
        return self.iterations * self.accumulation * self.replicas


@dataclass
class Tried:
    """What is known of one shape: how often it ran, for how long, its graph if it has one."""

    iterations: int = 0
    seconds: float = 0.0
    graph: Graph | None = None
    checked: bool = False  # the graph gave the modules' numbers


class Foretold(NamedTuple):
    """What a graph made of a micro batch that the modules have yet to run."""

    values: list[Any]
    gradients: Sequence[Tensor | None]
    buffers: list[Tensor]
    random: Tensor


@dataclass
class Step:
    """Runs host calls of one model."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    setting: Setting
    group: Group
    tried: dict[Shape, Tried] = field(default_factory=dict)
    refused: str = ""  # why this model is run as modules, if it is
    compiling: float = 0.0  # seconds spent on traces and compilation
    flat: dict[int, list[Tensor]] = field(default_factory=dict)  # state by replica, of this call

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Outputs as the model gives them, of the batches that the output mode names."""
        leaves, spec = tree_flatten((args, kwargs))
        batches = cut(leaves, self.setting)
        tried = self._tried(batches[0], spec)
        kept = Outputs(self.setting.mode, self.setting.every, len(self.group.local))
        shape: Any = None
        self.flat.clear()
        per_iteration = self.setting.accumulation * self.setting.replicas
        with _together(self.optimizer, self.setting):
            for begin in range(0, len(batches), per_iteration):
                shape = self._iterate(batches[begin : begin + per_iteration], spec, tried, kept)
        if self.setting.training:
            self._clear()
        return tree_unflatten(self.group.outputs(kept.values(), self.setting), shape)

    def warm(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Shape:
        """Build what a call with such inputs needs, without a step; the shape it is for."""
        leaves, spec = tree_flatten((args, kwargs))
        first = cut(leaves, self.setting)[0]
        shape, tried = Shape.of(self.model, first, spec), self._tried(first, spec)
        wanted = self.setting.compiled is not False and not self.refused
        if tried.graph is None and wanted and _on_host(self.model):
            self._record(tried, first, spec)
        return shape

    def _tried(self, leaves: Sequence[Any], spec: TreeSpec) -> Tried:
        shape = Shape.of(self.model, leaves, spec)
        found = self.tried.pop(shape, None) or Tried()
        self.tried[shape] = found  # at the end: used last
        if len(self.tried) > GRAPHS:
            del self.tried[next(iter(self.tried))]
        return found

    # One iteration

    def _iterate(
        self, batches: Sequence[list[Any]], spec: TreeSpec, tried: Tried, kept: Outputs
    ) -> TreeSpec:
        """Micro batches, then one optimizer step; the structure of the outputs."""
        if tried.graph is None and self._worth_a_graph(tried):
            self._record(tried, batches[0], spec)
        graph = tried.graph if tried.checked else None
        if graph is not None:
            shape = self._replay(graph, batches, kept)
        else:
            shape = self._modules(batches, spec, tried, kept)
        if self.optimizer is not None:
            self.group.add_gradients(self.model)
            plain = graph is not None and isinstance(self.optimizer, TOGETHER)
            with graph.mode() if plain and graph is not None else nullcontext():
                self.optimizer.step()
        tried.iterations += 1
        return shape

    def _worth_a_graph(self, tried: Tried) -> bool:
        """Is this the iteration to check a graph on?"""
        if self.refused or self.setting.compiled is False or not _on_host(self.model):
            return False
        if self.setting.compiled:
            return True
        micro = self.setting.accumulation * len(self.group.local)
        return tried.iterations == 1 and tried.seconds / micro < SHORT

    def _modules(
        self, batches: Sequence[list[Any]], spec: TreeSpec, tried: Tried, kept: Outputs
    ) -> TreeSpec:
        """An iteration by the modules; its first micro batch checks a graph that is new."""
        begun = time.perf_counter()
        shape, graph = None, tried.graph
        self._clear()
        for replica, leaves in self.group.shares(batches):
            foretold = self._foretell(graph, leaves) if graph is not None else None
            values, shape = self._one(leaves, spec, replica)
            if foretold is not None:
                self._check(tried, foretold, values)
            graph = None
            kept.add(values)
        tried.seconds = time.perf_counter() - begun
        return shape  # pyright: ignore[reportReturnType]

    def _one(self, leaves: Sequence[Any], spec: TreeSpec, replica: int) -> tuple[list[Any], Any]:
        """One micro batch by the modules; gradients are added to the weights' own."""
        args, kwargs = tree_unflatten(leaves, spec)
        with called() as call, torch.set_grad_enabled(self.setting.training):
            buffers = self.group.buffers(self.model, replica)
            if buffers is None:
                outputs = self.model(*args, **kwargs)
            else:
                outputs = torch.func.functional_call(self.model, buffers, args, kwargs)
            values, shape = tree_flatten(outputs)
            if self.setting.training:
                loss = find(call, values, self.model)
                loss.backward(torch.full_like(loss, self._scale()))
        return [v.detach() if isinstance(v, Tensor) else v for v in values], shape

    def _scale(self) -> float:
        many = self.setting.accumulation * self.setting.replicas * self.group.apart
        return 1.0 / many if self.setting.mean else 1.0

    def _clear(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None

    # Graphs

    def _record(self, tried: Tried, leaves: Sequence[Any], spec: TreeSpec) -> None:
        """Make a graph, to be checked, if one can be made."""
        begun = time.perf_counter()
        try:
            tried.graph = self._graph(leaves, spec)
            tried.checked = self.setting.compiled is True
        except Untraceable as why:
            self._refuse(str(why))
        self.compiling += time.perf_counter() - begun

    def _graph(self, leaves: Sequence[Any], spec: TreeSpec) -> Graph:
        training, scale = self.setting.training, self._scale()
        if not self.setting.compiled:
            return trace(self.model, training, scale, leaves, spec)
        from packhorse.port.compiling import compile_graph

        reference = trace(self.model, training, scale, leaves, spec)
        graph = trace(self.model, training, scale, leaves, spec, simple=False)
        inputs = inputs_of(Held.by(self.model, training), _tensors(leaves))
        graph = compile_graph(graph, inputs, self.setting.cache)
        expected, found = self._foretell(reference, leaves), self._foretell(graph, leaves)
        if not _alike(expected, found, _close):
            raise Untraceable("compiled, it gives other numbers")
        return graph

    def _foretell(self, graph: Graph, leaves: Sequence[Any]) -> Foretold:
        """What the graph makes of a micro batch, on copies of what it would change."""
        held = Held.by(self.model, self.setting.training)
        held = held._replace(buffers={name: b.clone() for name, b in held.buffers.items()})
        before = torch.get_rng_state()
        with torch.no_grad():
            values, gradients = graph(inputs_of(held, _tensors(leaves)))
        after = torch.get_rng_state()
        torch.set_rng_state(before)
        return Foretold(values, gradients, list(held.buffers.values()), after)

    def _check(self, tried: Tried, foretold: Foretold, values: list[Any]) -> None:
        """Did the modules do what the graph did?"""
        held = Held.by(self.model, self.setting.training)
        gradients = [weight.grad for weight in held.weights.values()]
        buffers = list(held.buffers.values())
        done = Foretold(values, gradients, buffers, torch.get_rng_state())
        tried.checked = _alike(foretold, done, torch.equal)
        if not tried.checked:
            tried.graph = None
            self._refuse("its trace gives other numbers")

    def _replay(self, graph: Graph, batches: Sequence[list[Any]], kept: Outputs) -> TreeSpec:
        """An iteration by the graph."""
        total: list[Tensor | None] = []
        with graph.mode():
            for replica, leaves in self.group.shares(batches):
                values, gradients = graph([*self._state(replica), *_tensors(leaves)])
                kept.add(values)
                total = list(gradients) if not total else _sum(total, gradients)
        for weight, gradient in zip(self._weights, total, strict=False):
            weight.grad = gradient
        return graph.spec

    def _state(self, replica: int) -> list[Tensor]:
        """A replica's weights and buffers; looked up once a call, for it takes a while."""
        if replica not in self.flat:
            held = Held.by(self.model, self.setting.training)
            own = self.group.buffers(self.model, replica)
            held = held if own is None else held._replace(buffers=own)
            self._weights = list(held.weights.values())
            self.flat[replica] = inputs_of(held, ())
        return self.flat[replica]

    def _refuse(self, why: str) -> None:
        self.refused = why
        log = logging.getLogger(LOGGER)
        log.info("%s runs as modules: %s", type(self.model).__name__, why)


def _tensors(leaves: Sequence[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _on_host(model: nn.Module) -> bool:
    return all(parameter.device.type == "cpu" for parameter in model.parameters())


def cut(leaves: Sequence[Any], setting: Setting) -> list[list[Any]]:
    """The inputs of each micro batch, in the order of the data; what is no tensor goes to each."""
    count = setting.batches
    columns: list[Any] = []
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            columns.append([leaf] * count)
        elif count == 1:
            columns.append([leaf.detach()])
        else:
            columns.append(_rows(leaf, setting))
    return [list(row) for row in zip(*columns, strict=True)] if columns else [[]] * count


def _rows(leaf: Tensor, setting: Setting) -> Sequence[Tensor]:
    rows = leaf.shape[0] if leaf.dim() else 1
    if rows % setting.batches or not leaf.dim():
        factors = (
            f"deviceIterations {setting.iterations} x replicationFactor {setting.replicas} x "
            f"gradientAccumulation {setting.accumulation} = {setting.batches}"
        )
        size = max(1, rows // setting.batches)
        raise InputError(
            f"{place()}an input of shape {tuple(leaf.shape)} cannot be cut into"
            f" the {setting.batches} batches of a host call ({factors}). Read with"
            f" poptorch.DataLoader(opts, dataset, batch_size={size}, drop_last=True), or pass"
            f" {setting.batches * size} rows"
        )
    return leaf.detach().split(rows // setting.batches)


def _sum(total: list[Tensor | None], gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [
        b if a is None else a if b is None else a.add_(b)
        for a, b in zip(total, gradients, strict=True)
    ]


def _alike(one: Foretold, other: Foretold, same: Callable[[Tensor, Tensor], bool]) -> bool:
    """Values, gradients, buffers, and as many random numbers drawn."""
    pairs = [
        pair for a, b in zip(one[:3], other[:3], strict=True) for pair in zip(a, b, strict=True)
    ]
    return torch.equal(one.random, other.random) and all(
        same(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a is b or a == b
        for a, b in pairs
    )


def _close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-3, atol=1e-5)


@contextmanager
def _together(optimizer: torch.optim.Optimizer | None, setting: Setting) -> Iterator[None]:
    """Within it, the optimizer updates all weights at once, where that gives the same numbers."""
    kinds, way = (FUSED, "fused") if setting.compiled else (TOGETHER, "foreach")
    fits = setting.compiled is not False and optimizer is not None and isinstance(optimizer, kinds)
    groups = optimizer.param_groups if fits and optimizer is not None else []
    chosen = [group for group in groups if _undecided(group)]
    for group in chosen:
        group[way] = True
    try:
        yield
    finally:
        for group in chosen:
            group[way] = None


def _undecided(group: dict[str, Any]) -> bool:
    ways = ("foreach", "fused", "differentiable", "capturable")
    return "foreach" in group and not any(group.get(way) for way in ways)
