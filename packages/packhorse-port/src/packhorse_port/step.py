"""One host call: many micro batches, many optimizer steps.

    step = Step(model, optimizer, StepSettings.of(options, training=True), group)
    outputs = step(args, kwargs)

A combined batch is split in the order of PopART's data: device iteration, accumulation, replica.
Each iteration sums the gradients of its micro batches, divided by their number if they are to be
averaged (each loss is scaled before its backward pass, as a plain loop does), then the optimizer
takes one step. So one replica on a CPU in fp32 gives the bits of the plain loop.

By default a micro batch runs as Python, through modules and autograd. The options
(`compileStep`) choose otherwise. Traced, it is a list of operations with the same bits; compiled,
the trace goes through torch's inductor and equals it within rounding (both in `trace`), and on CUDA
the whole host call is captured as one graph (`CudaGraphRunner`). Both repeat what the first call of
a shape did: anything else Python does is frozen. Before a graph is used, its results are compared
with the modules', on copies of all tensors; if they differ, or if the model does something a graph
cannot express, it runs as Python and a notice says so.

Below `Step`: `OutputCollector` (which outputs a call returns), `CudaGraphRunner`, and the parsers
by which scripts register input classes of their own.
"""

from __future__ import annotations

import abc
import logging
import time
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from packhorse import executable
from packhorse_port.casting import HALVES, MixedTypes
from packhorse_port.device_state import Constants
from packhorse_port.enums import CommGroupType, OutputMode, ReductionType
from packhorse_port.losses import Untraceable, find_loss, forward_call
from packhorse_port.notices import LOGGER, UsageError, line_prefix, log_once
from packhorse_port.options import Options
from packhorse_port.replicas import ReplicaGroup
from packhorse_port.trace import (
    MicroBatchGraph,
    ModelState,
    TraceKey,
    compile_graph,
    graph_inputs,
    trace,
    unchanged,
    verify,
)

MAX_GRAPHS = 32  # traces kept, one per shape
# Optimizers whose update of all weights at once has the bits of one weight after the other.
FOREACH_OPTIMIZERS = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
)
FUSED_OPTIMIZERS = (torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad)


@dataclass(frozen=True, slots=True)
class StepSettings:
    """The options that a step depends on."""

    training: bool
    iterations: int
    accumulation: int
    replicas: int
    input_groups: int  # different inputs of an iteration's replicas
    orthogonal: bool  # whether replicas n, n + input_groups … share an input, or neighbors
    mode: OutputMode
    output_period: int
    mean: bool
    steps: str = "modules"  # or "traced", "compiled"
    cache: str | None = None

    @classmethod
    def of(cls, options: Options, training: bool) -> StepSettings:
        return cls(
            training,
            options.device_iterations,
            options.gradient_accumulation,
            options.replication_factor,
            options.input_groups,
            options.input_cgt == CommGroupType.Orthogonal,
            resolve_output_mode(options, training),
            options.output_every,
            options.reduction == ReductionType.Mean,
            options.steps,
            options.cache_path,
        )

    @property
    def batches(self) -> int:
        """Micro batches of one host call."""
        return self.iterations * self.accumulation * self.replicas

    @property
    def input_batches(self) -> int:
        """Different inputs of one host call; replicas of a group share theirs."""
        return self.iterations * self.accumulation * self.input_groups

    def input_of(self, batch: int) -> int:
        """Which of the inputs a micro batch gets."""
        step, replica = divmod(batch, self.replicas)
        neighbors = self.replicas // self.input_groups
        group = replica % self.input_groups if self.orthogonal else replica // neighbors
        return step * self.input_groups + group


@dataclass
class Step:
    """Runs host calls of one model."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    settings: StepSettings
    group: ReplicaGroup
    constants: Constants | None = None  # set at the first call
    graphs: dict[TraceKey, MicroBatchGraph] = field(default_factory=dict)
    mixed: bool | None = None  # whether half and float meet in the model; None: not known yet
    refused: str = ""  # why this model has no graph, if one was requested
    compile_seconds: float = 0.0  # spent on tracing and compiling
    # Weights and buffers per replica, flat, valid during one host call.
    state_inputs: dict[int, list[Tensor]] = field(default_factory=dict)
    # The trained weights, in the order of a graph's gradients; set along with `state_inputs`.
    _weights: list[Tensor] = field(default_factory=list, init=False)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a host call; returns the outputs of the micro batches that the output mode names."""
        leaves, spec = tree_flatten((args, kwargs))
        batches = split_inputs(leaves, self.settings)
        graph = self.graph(batches[0], spec)
        replicas = len(self.group.local)
        steps = self.settings.iterations * self.settings.accumulation
        outputs = OutputCollector(self.settings.mode, self.settings.output_period, replicas, steps)
        output_spec: Any = None
        self.state_inputs.clear()
        self.group.initialize_buffers(self.model)
        per_iteration = self.settings.accumulation * self.settings.replicas
        with _whole_model_updates(self.optimizer, self.settings):
            for begin in range(0, len(batches), per_iteration):
                iteration = batches[begin : begin + per_iteration]
                output_spec = self._iterate(iteration, spec, graph, outputs)
        if self.settings.training:
            self._clear_gradients()
        return tree_unflatten(
            self.group.gather_outputs(outputs.values(), self.settings), output_spec
        )

    def build(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Trace and compile what a call with such inputs needs, without running a step."""
        leaves, spec = tree_flatten((args, kwargs))
        self.graph(split_inputs(leaves, self.settings)[0], spec)

    # One iteration

    def _iterate(
        self,
        batches: Sequence[list[Any]],
        spec: TreeSpec,
        graph: MicroBatchGraph | None,
        outputs: OutputCollector,
    ) -> TreeSpec:
        """Run micro batches, then one optimizer step; returns the structure of the outputs."""
        if graph is not None:
            output_spec = self._run_graph(graph, batches, outputs)
        else:
            output_spec = self._run_modules(batches, spec, outputs)
        if self.optimizer is not None:
            self.group.add_gradients(self.model)
            # Autograd records nothing of interest here, but a script's own optimizer may rely on
            # it, so only torch's run in the graph's mode.
            torch_optimizer = isinstance(self.optimizer, FOREACH_OPTIMIZERS)
            with graph.mode() if graph is not None and torch_optimizer else nullcontext():
                self.optimizer.step()
        return output_spec

    def _run_modules(
        self, batches: Sequence[list[Any]], spec: TreeSpec, outputs: OutputCollector
    ) -> TreeSpec:
        """Run an iteration through the modules."""
        output_spec = None
        self._clear_gradients()
        for replica, leaves in self.group.local_batches(batches):
            values, output_spec = self._run_micro_batch(leaves, spec, replica)
            outputs.add(values)
        return output_spec  # pyright: ignore[reportReturnType]

    def _run_micro_batch(
        self, leaves: Sequence[Any], spec: TreeSpec, replica: int
    ) -> tuple[list[Any], Any]:
        """Run one micro batch through the modules; gradients accumulate in `parameter.grad`."""
        args, kwargs = tree_unflatten(leaves, spec)
        if self.constants is not None:
            self.constants.restore()
        with (
            forward_call() as call,
            torch.set_grad_enabled(self.settings.training),
            self._casts(leaves) as casts,
        ):
            buffers = self.group.buffers(replica)
            if buffers is None:
                outputs = self.model(*args, **kwargs)
            else:
                outputs = torch.func.functional_call(self.model, buffers, args, kwargs)
            values, output_spec = tree_flatten(outputs)
            if self.settings.training:
                loss = find_loss(call, values, self.model)
                if loss is not None:
                    loss.backward(torch.full_like(loss, self._loss_scale()))
        if casts is not None:
            self.mixed = casts.needed
        detached = [v.detach() if isinstance(v, Tensor) else v for v in values]
        return detached, output_spec

    def _casts(self, leaves: Sequence[Any]) -> AbstractContextManager[MixedTypes | None]:
        """PopTorch's casts, at the first micro batch and if half and float meet in the model."""
        has_half = any(leaf.dtype in HALVES for leaf in _tensors(leaves))
        return MixedTypes() if self.mixed or has_half or self.mixed is None else nullcontext()

    def _loss_scale(self) -> float:
        count = self.settings.accumulation * self.settings.replicas * self.group.data_processes
        return 1.0 / count if self.settings.mean else 1.0

    def _clear_gradients(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None

    # Graphs

    def graph(self, leaves: Sequence[Any], spec: TreeSpec) -> MicroBatchGraph | None:
        """The graph for micro batches of this shape; None to run the modules."""
        on_host = all(parameter.device.type == "cpu" for parameter in self.model.parameters())
        if self.settings.steps == "modules" or self.refused or not on_host:
            return None
        key = TraceKey.of(self.model, leaves, spec)
        graph = self.graphs.pop(key, None) or self._trace(leaves, spec)
        if graph is not None:
            self.graphs[key] = graph  # last in the dictionary: most recently used
            if len(self.graphs) > MAX_GRAPHS:
                del self.graphs[next(iter(self.graphs))]
        return graph

    def _trace(self, leaves: Sequence[Any], spec: TreeSpec) -> MicroBatchGraph | None:
        """A verified graph; None, with a notice, if the model cannot be traced."""
        started = time.perf_counter()
        model_name = type(self.model).__name__
        training = self.settings.training
        compiled = self.settings.steps == "compiled"
        subject = (self.model, training, self._loss_scale(), leaves, spec)
        try:
            # Inductor does its own simplification, and knows nothing of ours.
            graph = trace(*subject, simplified=not compiled)
            if compiled:
                inputs = graph_inputs(ModelState.of(self.model, training), _tensors(leaves))
                graph = compile_graph(graph, inputs, self.settings.cache)
            verify(graph, *subject, exact=not compiled)
        except Untraceable as reason:
            self.refused = str(reason)
            log_once(
                f"steps {model_name}",
                f"{model_name} is not {self.settings.steps}: {reason}; it runs as Python",
            )
            return None
        finally:
            self.compile_seconds += time.perf_counter() - started
        log_once(
            f"steps {model_name}",
            f"{model_name} is {self.settings.steps}: what its forward does in Python (attributes,"
            " choices, lists) is that of the first call from now on",
        )
        return graph

    def _run_graph(
        self, graph: MicroBatchGraph, batches: Sequence[list[Any]], outputs: OutputCollector
    ) -> TreeSpec:
        """Run an iteration through the graph."""
        total: list[Tensor | None] = []
        with graph.mode():
            for replica, leaves in self.group.local_batches(batches):
                values, gradients = graph([*self._replica_state(replica), *_tensors(leaves)])
                outputs.add(values)
                total = list(gradients) if not total else _sum(total, gradients)
        # Without training there are weights but no gradients, so the lengths may differ.
        for weight, gradient in zip(self._weights, total, strict=False):
            weight.grad = gradient
        return graph.spec

    def _replica_state(self, replica: int) -> list[Tensor]:
        """A replica's weights and buffers; cached for a call, because the lookup is slow."""
        if replica not in self.state_inputs:
            state = ModelState.of(self.model, self.settings.training)
            buffers = self.group.buffers(replica)
            state = state if buffers is None else state._replace(buffers=buffers)
            self._weights = list(state.weights.values())
            self.state_inputs[replica] = graph_inputs(state, ())
        return self.state_inputs[replica]


def _tensors(leaves: Sequence[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def split_inputs(leaves: Sequence[Any], settings: StepSettings) -> list[list[Any]]:
    """The inputs of each micro batch, in data order; every batch gets all non-tensors."""
    count = settings.batches
    columns: list[Any] = []
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            columns.append([leaf for _ in range(count)])
        elif count == 1:
            columns.append([leaf.detach()])
        else:
            columns.append(_split_rows(leaf, settings))
    if not columns:
        return [[] for _ in range(count)]
    return [list(row) for row in zip(*columns, strict=True)]


def _split_rows(leaf: Tensor, settings: StepSettings) -> Sequence[Tensor]:
    rows = leaf.shape[0] if leaf.dim() else 1
    count = settings.input_batches
    if rows % count or not leaf.dim():
        replicas = f"replicationFactor {settings.replicas}"
        if settings.input_groups != settings.replicas:
            replicas = f"input groups of replicas {settings.input_groups}"
        factors = (
            f"deviceIterations {settings.iterations} x {replicas} x "
            f"gradientAccumulation {settings.accumulation} = {count}"
        )
        size = max(1, rows // count)
        raise UsageError(
            f"{line_prefix()}an input of shape {tuple(leaf.shape)} cannot be cut into"
            f" the {count} batches of a host call ({factors}). Read with"
            f" poptorch.DataLoader(opts, dataset, batch_size={size}, drop_last=True), or pass"
            f" {count * size} rows"
        )
    parts = leaf.detach().split(rows // count)
    return [parts[settings.input_of(batch)] for batch in range(settings.batches)]


def _sum(total: list[Tensor | None], gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [
        b if a is None else a if b is None else a.add_(b)
        for a, b in zip(total, gradients, strict=True)
    ]


@contextmanager
def _whole_model_updates(
    optimizer: torch.optim.Optimizer | None, settings: StepSettings
) -> Iterator[None]:
    """Make the optimizer update all weights at once if that gives the same results."""
    if settings.steps == "compiled":
        supported = FUSED_OPTIMIZERS
        flag = "fused"
    else:
        supported = FOREACH_OPTIMIZERS
        flag = "foreach"
    groups = optimizer.param_groups if isinstance(optimizer, supported) else []
    changed = [group for group in groups if _is_undecided(group)]
    for group in changed:
        group[flag] = True
    try:
        yield
    finally:
        for group in changed:
            group[flag] = None


def _is_undecided(group: dict[str, Any]) -> bool:
    """Whether the script left it to torch how this group of weights is updated."""
    flags = ("foreach", "fused", "differentiable", "capturable")
    return "foreach" in group and not any(group.get(flag) for flag in flags)


# Output modes: which outputs a host call returns, and in which order. Micro batches come in data
# order: device iteration, accumulation, replica. `All` returns each of them, `Final` the last of
# every replica, `Sum` the sum, `EveryN` every nth. They are concatenated along the first dimension,
# so with `All` a call returns as many rows as it got; values without dimensions, such as a loss,
# are stacked to a vector if there are several.


def resolve_output_mode(options: Options, training: bool) -> OutputMode:
    """The mode that `Default` means; raises if the period of `EveryN` does not fit."""
    mode = options.output_mode
    if mode == OutputMode.Default:
        return OutputMode.Final if training else OutputMode.All
    period = options.output_every
    steps = options.device_iterations * options.gradient_accumulation
    if mode == OutputMode.EveryN and steps % period:
        raise UsageError(
            f"{line_prefix()}outputMode(poptorch.OutputMode.EveryN, {period}) does not divide the"
            f" {steps} batches of a host call (deviceIterations {options.device_iterations} x"
            f" gradientAccumulation {options.gradient_accumulation}); take an n that does"
        )
    return mode


class OutputCollector:
    """Collects the outputs of the micro batches of one host call, as the output mode says."""

    def __init__(self, mode: OutputMode, period: int, replicas: int, steps: int) -> None:
        self._mode = mode
        self._period = period
        self._replicas = replicas
        self._steps = steps  # micro batches of one replica
        self._collected: list[Sequence[Any]] = []
        self._count = 0

    def add(self, leaves: Sequence[Any]) -> None:
        """Add the outputs of the next micro batch, in data order."""
        step, replica = divmod(self._count, self._replicas)
        self._count += 1
        if self._mode == OutputMode.Sum and step > 0:
            self._collected[replica] = [*map(_add, self._collected[replica], leaves)]
        elif self._mode == OutputMode.Sum or self._is_returned(step):
            # A copy: a model may return a buffer, a weight or an input, which later micro batches
            # change in place.
            self._collected.append([*map(_copy, leaves)])

    def _is_returned(self, step: int) -> bool:
        if self._mode == OutputMode.Final:
            return step == self._steps - 1
        return (step + 1) % self._period == 0

    def values(self) -> list[Any]:
        """One value per output; a non-tensor is that of the last micro batch."""
        return [_concatenate(column) for column in zip(*self._collected, strict=True)]


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _add(total: Any, value: Any) -> Any:
    return total + value if isinstance(value, Tensor) else value


def _concatenate(column: tuple[Any, ...]) -> Any:
    last = column[-1]
    if len(column) == 1 or not isinstance(last, Tensor):
        return last
    return torch.cat(column) if last.dim() else torch.stack(column)


# CUDA graphs: a whole host call in one launch, where steps are to be compiled.

WARMUP_CALLS = 3  # of a shape before it is captured
MAX_RECORDINGS = 8  # each holds the memory of a host call
MAX_UNUSED = 4  # captures in a row that were hardly replayed before capturing is given up
# Optimizers that can count their steps on the device (`capturable`).
CAPTURABLE = (torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adadelta, torch.optim.Adamax)


@dataclass
class CudaRecording:
    """One captured host call."""

    graph: Any  # torch.cuda.CUDAGraph
    inputs: list[Tensor]
    outputs: Any
    uses: int = 0


@dataclass
class CudaGraphRunner:
    """Runs a step's host calls, by a CUDA graph if there is one.

    The first calls of a shape run as they are, on a side stream, so that torch's lazy setup and the
    optimizer's state exist. Then one call is captured, which launches nothing, and from there on
    inputs are copied in and the graph is replayed. Its kernels are those of the plain loop.

    A graph holds addresses and numbers, so its key holds them too: shapes, addresses of weights and
    optimizer state, plain attributes of the modules, settings of the optimizer. A new learning rate
    therefore needs a new capture; if nearly every call would need one (a schedule per step), calls
    run as they are. Not captured: optimizers that count steps in Python, several processes, models
    that change their inputs in place, and whatever torch refuses.
    """

    step: Step
    calls: dict[Hashable, int] = field(default_factory=dict)  # per key
    recorded: dict[Hashable, CudaRecording] = field(default_factory=dict)
    unused: int = 0  # latest captures in a row that were replayed less than WARMUP_CALLS times
    refused: str = ""

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        tensors = _tensors(leaves)
        on_gpu = bool(tensors) and all(tensor.is_cuda for tensor in tensors)
        if not on_gpu or self.refused or not self._is_capturable():
            return self.step(args, kwargs)
        make_capturable(self.step.optimizer)
        key = self._key(TraceKey.of(self.step.model, leaves, spec))
        self.calls[key] = self.calls.get(key, 0) + 1
        if key not in self.recorded and self.calls[key] <= WARMUP_CALLS:
            return self._warm_up(args, kwargs)
        try:
            recording = self.recorded.get(key) or self._record(key, leaves, spec)
        except (RuntimeError, Untraceable) as error:
            self.refused = str(error).partition("\n")[0]
            logging.getLogger(LOGGER).info("no CUDA graph: %s", self.refused)
            torch.cuda.synchronize()
            return self.step(args, kwargs)
        return self._replay(recording, tensors)

    def _is_capturable(self) -> bool:
        optimizer = self.step.optimizer
        alone = self.step.group.team.world == 1
        requested = self.step.settings.steps == "compiled" and self.unused < MAX_UNUSED
        return requested and alone and (optimizer is None or counts_on_device(optimizer))

    def _key(self, shapes: TraceKey) -> Hashable:
        model = self.step.model
        optimizer = self.step.optimizer
        tensors = [*model.parameters(), *model.buffers()]
        settings: list[Any] = []
        for group in optimizer.param_groups if optimizer else ():
            settings += [(k, str(v)) for k, v in group.items() if k != "params"]
        for state in optimizer.state.values() if optimizer else ():
            tensors += [value for value in state.values() if isinstance(value, Tensor)]
        addresses = tuple(tensor.data_ptr() for tensor in tensors)
        return (shapes, id(optimizer), tuple(settings), addresses)

    def _warm_up(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the step on a side stream, as torch requires before a capture."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            outputs = self.step(args, kwargs)
        torch.cuda.current_stream().wait_stream(side)
        return outputs

    def _record(self, key: Hashable, leaves: list[Any], spec: Any) -> CudaRecording:
        copies = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = tree_unflatten(copies, spec)
        graph = torch.cuda.CUDAGraph()
        with unchanged(self.step.model), executable.recording(graph):
            outputs = self.step(args, kwargs)
        inputs = _tensors(copies)
        if any(tensor._version for tensor in inputs):  # 0 for a clone that nothing has changed
            raise Untraceable("its forward changes its inputs in place")
        last = next(reversed(self.recorded.values()), None)
        self.unused = self.unused + 1 if last is not None and last.uses < WARMUP_CALLS else 0
        self.recorded[key] = CudaRecording(graph, inputs, outputs)
        if len(self.recorded) > MAX_RECORDINGS:
            del self.recorded[next(iter(self.recorded))]
        return self.recorded[key]

    def _replay(self, recording: CudaRecording, tensors: list[Tensor]) -> Any:
        for destination, source in zip(recording.inputs, tensors, strict=True):
            destination.copy_(source, non_blocking=True)
        recording.graph.replay()
        recording.uses += 1
        return recording.outputs


def counts_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the whole step runs on the device; PopTorch's variants count steps in Python."""
    if getattr(optimizer, "bias_correction", True) is False:
        return False
    if getattr(optimizer, "use_tf_variant", False):
        return False
    return isinstance(optimizer, (torch.optim.SGD, *CAPTURABLE))


def make_capturable(optimizer: torch.optim.Optimizer | None) -> None:
    """Move the optimizer's step counters to the device, from the first call on."""
    if not isinstance(optimizer, CAPTURABLE):
        return
    for group in optimizer.param_groups:
        group["capturable"] = True
        for parameter in group["params"]:
            counter = optimizer.state.get(parameter, {}).get("step")
            if isinstance(counter, Tensor) and counter.device != parameter.device:
                optimizer.state[parameter]["step"] = counter.to(parameter.device)


# Inputs of a script's own class. Inputs are flattened by torch's pytrees, so a registered class
# becomes a pytree node.

_parsers: dict[type, ICustomArgParser] = {}


class ICustomArgParser(abc.ABC):
    """Abstract: flattens an object into tensors and rebuilds it."""

    @abc.abstractmethod
    def yieldTensors(self, struct: Any) -> Iterable[Tensor]:
        """Every tensor in the object, always in the same order."""

    @abc.abstractmethod
    def reconstruct(self, original_structure: Any, tensor_iterator: Iterator[Any]) -> Any:
        """A new object of the same kind, with the tensors that the iterator yields."""


def registerCustomArgParser(arg_data_type: type, arg_parser: ICustomArgParser | None) -> None:
    """Flatten inputs of this type with the parser; None unregisters the type."""
    if arg_parser is not None and not isinstance(arg_parser, ICustomArgParser):
        raise UsageError(f"{line_prefix()}arg_parser must inherit from ICustomArgParser")
    if arg_data_type in _parsers:
        del _parsers[arg_data_type]
        _pytree._deregister_pytree_node(arg_data_type)
    if arg_parser is None:
        return
    parser = arg_parser
    _parsers[arg_data_type] = parser
    _pytree.register_pytree_node(
        arg_data_type,
        lambda struct: (list(parser.yieldTensors(struct)), struct),
        lambda values, struct: parser.reconstruct(struct, iter(values)),
        serialized_type_name=f"{arg_data_type.__module__}.{arg_data_type.__qualname__}",
    )
