"""One host call: many micro batches, many optimizer steps.

    step = Step(model, optimizer, Setting.of(options, training=True), group)
    outputs = step(args, kwargs)

A combined batch is cut in the order of PopART's data: device iteration, accumulation, replica. Each
iteration adds up the gradients of its micro batches, divided by their number where they are to be
averaged (each loss is scaled before its backward pass, as a plain loop does), then the optimizer
makes one step. One replica on a CPU in fp32 so gives the bits of the plain loop.

A micro batch is run as Python, modules and autograd, unless the options say otherwise
(`compileStep`). Traced, it is a list of operations with the same bits (`trace`); compiled, the
trace goes through torch's inductor, within rounding (`compiling`), and on CUDA the whole host call
is captured as one graph (`capture`). Both know only what the first call of a shape did: what Python
does besides is frozen. Before a graph is used its numbers are compared with the modules', on copies
of everything; a model whose graph gives others, or which does what no graph can say, runs as Python
and the script is told.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from packhorse.errors import InputError
from packhorse_port.constants import Constants
from packhorse_port.enums import OutputMode, ReductionType
from packhorse_port.losses import Untraceable, called, find
from packhorse_port.notices import place, say_once
from packhorse_port.options import Options
from packhorse_port.outputs import Outputs, resolve
from packhorse_port.replicas import Group
from packhorse_port.trace import Graph, Held, Shape, inputs_of, trace, verify

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
    steps: str = "modules"  # or "traced", "compiled"
    cache: str | None = None

    @classmethod
    def of(cls, options: Options, training: bool) -> Setting:
        return cls(
            training,
            options.device_iterations,
            options.gradient_accumulation,
            options.replication_factor,
            resolve(options, training),
            options.output_every,
            options.reduction == ReductionType.Mean,
            options.steps,
            options.cache_path,
        )

    @property
    def batches(self) -> int:
        return self.iterations * self.accumulation * self.replicas


@dataclass
class Step:
    """Runs host calls of one model."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    setting: Setting
    group: Group
    constants: Constants | None = None  # known from the first call on
    graphs: dict[Shape, Graph] = field(default_factory=dict)
    refused: str = ""  # why this model has no graph, if one was asked for
    compiling: float = 0.0  # seconds spent on traces and compilation
    flat: dict[int, list[Tensor]] = field(default_factory=dict)  # state by replica, of this call

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Outputs as the model gives them, of the batches that the output mode names."""
        leaves, spec = tree_flatten((args, kwargs))
        batches = cut(leaves, self.setting)
        graph = self.graph(batches[0], spec)
        replicas = len(self.group.local)
        steps = self.setting.iterations * self.setting.accumulation
        kept = Outputs(self.setting.mode, self.setting.every, replicas, steps)
        shape: Any = None
        self.flat.clear()
        self.group.give_buffers(self.model)
        per_iteration = self.setting.accumulation * self.setting.replicas
        with _together(self.optimizer, self.setting):
            for begin in range(0, len(batches), per_iteration):
                shape = self._iterate(batches[begin : begin + per_iteration], spec, graph, kept)
        if self.setting.training:
            self._clear()
        return tree_unflatten(self.group.outputs(kept.values(), self.setting), shape)

    def warm(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Build what a call with such inputs needs, without a step."""
        leaves, spec = tree_flatten((args, kwargs))
        self.graph(cut(leaves, self.setting)[0], spec)

    # One iteration

    def _iterate(
        self, batches: Sequence[list[Any]], spec: TreeSpec, graph: Graph | None, kept: Outputs
    ) -> TreeSpec:
        """Micro batches, then one optimizer step; the structure of the outputs."""
        if graph is not None:
            shape = self._replay(graph, batches, kept)
        else:
            shape = self._modules(batches, spec, kept)
        if self.optimizer is not None:
            self.group.add_gradients(self.model)
            plain = graph is not None and isinstance(self.optimizer, TOGETHER)
            with graph.mode() if plain and graph is not None else nullcontext():
                self.optimizer.step()
        return shape

    def _modules(self, batches: Sequence[list[Any]], spec: TreeSpec, kept: Outputs) -> TreeSpec:
        """An iteration by the modules."""
        shape = None
        self._clear()
        for replica, leaves in self.group.shares(batches):
            values, shape = self._one(leaves, spec, replica)
            kept.add(values)
        return shape  # pyright: ignore[reportReturnType]

    def _one(self, leaves: Sequence[Any], spec: TreeSpec, replica: int) -> tuple[list[Any], Any]:
        """One micro batch by the modules; gradients are added to the weights' own."""
        args, kwargs = tree_unflatten(leaves, spec)
        if self.constants is not None:
            self.constants.restore()
        with called() as call, torch.set_grad_enabled(self.setting.training):
            buffers = self.group.buffers(replica)
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

    def graph(self, leaves: Sequence[Any], spec: TreeSpec) -> Graph | None:
        """What runs micro batches of this shape, where graphs are asked for and can be had."""
        on_host = all(parameter.device.type == "cpu" for parameter in self.model.parameters())
        if self.setting.steps == "modules" or self.refused or not on_host:
            return None
        shape = Shape.of(self.model, leaves, spec)
        graph = self.graphs.pop(shape, None) or self._record(leaves, spec)
        if graph is not None:
            self.graphs[shape] = graph  # at the end: used last
            if len(self.graphs) > GRAPHS:
                del self.graphs[next(iter(self.graphs))]
        return graph

    def _record(self, leaves: Sequence[Any], spec: TreeSpec) -> Graph | None:
        """A graph that gives the modules' numbers; None if there is none, which is told."""
        begun = time.perf_counter()
        kind = type(self.model).__name__
        compiled = self.setting.steps == "compiled"
        how = (self.model, self.setting.training, self._scale(), leaves, spec)
        try:
            graph = trace(*how, simple=not compiled)
            if compiled:
                graph = self._compiled(graph, leaves)
            verify(graph, *how, exact=not compiled)
        except Untraceable as why:
            self.refused = str(why)
            say_once(
                f"steps {kind}", f"{kind} is not {self.setting.steps}: {why}; it runs as Python"
            )
            return None
        finally:
            self.compiling += time.perf_counter() - begun
        say_once(
            f"steps {kind}",
            f"{kind} is {self.setting.steps}: what its forward does in Python (attributes, choices,"
            " lists) is that of the first call from now on",
        )
        return graph

    def _compiled(self, graph: Graph, leaves: Sequence[Any]) -> Graph:
        from packhorse_port.compiling import compile_graph

        inputs = inputs_of(Held.by(self.model, self.setting.training), _tensors(leaves))
        return compile_graph(graph, inputs, self.setting.cache)

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
            own = self.group.buffers(replica)
            held = held if own is None else held._replace(buffers=own)
            self._weights = list(held.weights.values())
            self.flat[replica] = inputs_of(held, ())
        return self.flat[replica]


def _tensors(leaves: Sequence[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


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


@contextmanager
def _together(optimizer: torch.optim.Optimizer | None, setting: Setting) -> Iterator[None]:
    """Within it, the optimizer updates all weights at once, where that gives the same numbers."""
    kinds, way = (FUSED, "fused") if setting.steps == "compiled" else (TOGETHER, "foreach")
    fits = optimizer is not None and isinstance(optimizer, kinds)
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
