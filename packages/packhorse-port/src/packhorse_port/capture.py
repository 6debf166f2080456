"""A whole host call as one CUDA graph: one launch, many steps.

The first calls of a shape run as they are, on a stream of their own, which warms up what torch sets
up lazily and creates the optimizer's moments. Then a call is captured, which launches nothing, and
from there on inputs are copied in and the graph is replayed. Its kernels are those of the plain
loop. A graph holds addresses and numbers, so its key holds them too: shapes, where weights and
moments lie, the modules' plain attributes, the optimizer's settings. A new learning rate is a new
capture; where nearly every call would need one (a schedule by the step), calls run as they are.

A capture is made where steps are to be compiled (`compileStep(True)`). Not captured: optimizers
that count steps in Python, several processes, models that change their inputs in place, and
whatever torch refuses.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from packhorse import executable
from packhorse_port.losses import Untraceable
from packhorse_port.notices import LOGGER
from packhorse_port.step import Step
from packhorse_port.trace import Shape, watched

WARM = 3  # calls before a capture
GRAPHS = 8  # kept; each holds the memory of a host call
ALONE = 4  # captures in a row that were of no use before it is given up
COUNTED = (torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adadelta, torch.optim.Adamax)


@dataclass
class Recording:
    """One captured call."""

    graph: Any  # torch.cuda.CUDAGraph
    inputs: list[Tensor]
    outputs: Any
    uses: int = 0


@dataclass
class Captured:
    """Runs a step's host calls, by a graph where there is one."""

    step: Step
    seen: dict[Hashable, int] = field(default_factory=dict)
    recorded: dict[Hashable, Recording] = field(default_factory=dict)
    useless: int = 0
    refused: str = ""

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        on_gpu = bool(tensors) and all(tensor.is_cuda for tensor in tensors)
        if not on_gpu or self.refused or not self._may():
            return self.step(args, kwargs)
        prepare(self.step.optimizer)
        key = self._key(Shape.of(self.step.model, leaves, spec))
        self.seen[key] = self.seen.get(key, 0) + 1
        if key not in self.recorded and self.seen[key] <= WARM:
            return self._aside(args, kwargs)
        try:
            recording = self.recorded.get(key) or self._record(key, leaves, spec)
        except (RuntimeError, Untraceable) as error:
            self.refused = str(error).partition("\n")[0]
            logging.getLogger(LOGGER).info("no CUDA graph: %s", self.refused)
            torch.cuda.synchronize()
            return self.step(args, kwargs)
        return self._replay(recording, tensors)

    def _may(self) -> bool:
        setting, optimizer = self.step.setting, self.step.optimizer
        alone = self.step.group.team.world == 1
        wanted = setting.steps == "compiled" and self.useless < ALONE
        return wanted and alone and (optimizer is None or counts_on_device(optimizer))

    def _key(self, shape: Shape) -> Hashable:
        model, optimizer = self.step.model, self.step.optimizer
        held = [*model.parameters(), *model.buffers()]
        settings: list[Any] = []
        for group in optimizer.param_groups if optimizer else ():
            settings += [(k, str(v)) for k, v in group.items() if k != "params"]
        for state in optimizer.state.values() if optimizer else ():
            held += [value for value in state.values() if isinstance(value, Tensor)]
        return (shape, id(optimizer), tuple(settings), tuple(x.data_ptr() for x in held))

    def _aside(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As it is, on another stream than the capture will know."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            outputs = self.step(args, kwargs)
        torch.cuda.current_stream().wait_stream(side)
        return outputs

    def _record(self, key: Hashable, leaves: list[Any], spec: Any) -> Recording:
        kept = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = tree_unflatten(kept, spec)
        graph = torch.cuda.CUDAGraph()
        with watched(self.step.model), executable.recording(graph):
            outputs = self.step(args, kwargs)
        inputs = [leaf for leaf in kept if isinstance(leaf, Tensor)]
        if any(tensor._version for tensor in inputs):
            raise Untraceable("its forward changes its inputs in place")
        last = next(reversed(self.recorded.values()), None)
        self.useless = self.useless + 1 if last is not None and last.uses < WARM else 0
        self.recorded[key] = Recording(graph, inputs, outputs)
        if len(self.recorded) > GRAPHS:
            del self.recorded[next(iter(self.recorded))]
        return self.recorded[key]

    def _replay(self, recording: Recording, tensors: list[Tensor]) -> Any:
        for kept, new in zip(recording.inputs, tensors, strict=True):
            kept.copy_(new, non_blocking=True)
        recording.graph.replay()
        recording.uses += 1
        return recording.outputs


def counts_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Does all of its step happen on the device? PopTorch's variants count in Python."""
    if getattr(optimizer, "bias_correction", True) is False:
        return False
    if getattr(optimizer, "use_tf_variant", False):
        return False
    return isinstance(optimizer, (torch.optim.SGD, *COUNTED))


def prepare(optimizer: torch.optim.Optimizer | None) -> None:
    """Have the steps counted on the device, from the first call on."""
    if not isinstance(optimizer, COUNTED):
        return
    for group in optimizer.param_groups:
        group["capturable"] = True
        for parameter in group["params"]:
            step = optimizer.state.get(parameter, {}).get("step")
            if isinstance(step, Tensor) and step.device != parameter.device:
                optimizer.state[parameter]["step"] = step.to(parameter.device)
