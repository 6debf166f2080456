"""Tensors inside a model that a script reads after a call: `anchorTensor`, `getAnchoredTensor`.

    opts.anchorTensor("gradient", "Gradient___fc2.bias")
    opts.anchorTensor("weight", "UpdatedVar___fc2.weight", poptorch.OutputMode.All)
    opts.anchorTensor("hidden", "fc1")                       # what the module fc1 returns
    training = poptorch.trainingModel(model, opts, optimizer)
    training(data, labels)
    training.getAnchoredTensor("gradient")

PopART names the tensors of the graph it compiled. Of these names two kinds exist here, which the
user guide shows: `Gradient___` and `UpdatedVar___` with the path of a weight. Besides, the path of
a module (`fc1`, or `fc1/…` as PopART continues it) is what the module returns. Micro batches and
weight updates are collected over a call by hooks; the output mode says which are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from packhorse_port.enums import OutputMode
from packhorse_port.notices import UsageError, line_prefix
from packhorse_port.options import Options

GRADIENT = "Gradient___"
UPDATED = "UpdatedVar___"
Record = Callable[[Tensor], None]


class Anchor(NamedTuple):
    """A tensor to keep: its name in the graph, and which of its values in a call."""

    tensor: str
    mode: OutputMode
    period: int  # of EveryN


class AnchoredTensors:
    """The values of an executor's anchored tensors in its last call."""

    def __init__(self, anchors: Mapping[str, Anchor]) -> None:
        self._anchors = anchors
        self._values: dict[str, list[Tensor]] = {}

    @classmethod
    def of(cls, options: Options) -> AnchoredTensors:
        """The anchors of a model's options; one without a mode has that of the outputs."""
        return cls(
            {
                name: Anchor(tensor, options.output_mode, options.output_every)
                if mode is None
                else Anchor(tensor, OutputMode(mode), period)
                for name, (tensor, mode, period) in options.anchored_tensors.items()
            }
        )

    def __getitem__(self, name: str) -> Tensor:
        values = self._values.get(name)
        if not values:
            anchored = ", ".join(self._anchors) or "none"
            raise UsageError(
                f"{line_prefix()}No tensor with name {name} found. Anchored are: {anchored}"
                " (Options.anchorTensor); values are there after the first call"
            )
        anchor = self._anchors[name]
        if anchor.mode == OutputMode.Final:
            return values[-1]
        if anchor.mode == OutputMode.Sum:
            return torch.stack(values).sum(0)
        period = anchor.period if anchor.mode == OutputMode.EveryN else 1
        chosen = values[period - 1 :: period]
        return torch.stack(chosen) if len(chosen) > 1 else chosen[0]

    @contextmanager
    def recorded(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
        """Record what a call of the model inside this context computes."""
        self._values = {name: [] for name in self._anchors}
        with ExitStack() as hooks:
            for name, anchor in self._anchors.items():
                handle = _hook(anchor.tensor, model, optimizer, self._values[name])
                hooks.callback(handle.remove)
            yield


def tensor_names(model: nn.Module, training: bool) -> list[str]:
    """Every name that `anchorTensor` takes here, after those of weights and buffers."""
    weights = [name for name, _ in model.named_parameters()]
    names = [*weights, *(name for name, _ in model.named_buffers())]
    names += [path for path, _ in model.named_modules() if path]
    prefixes = (GRADIENT, UPDATED) if training else ()
    return names + [prefix + name for prefix in prefixes for name in weights]


def _hook(
    tensor: str, model: nn.Module, optimizer: torch.optim.Optimizer | None, values: list[Tensor]
) -> Any:
    """A hook's handle that appends the values of a tensor."""
    weights = dict(model.named_parameters())
    trained = {name: weight for name, weight in weights.items() if weight.requires_grad}
    modules = dict(model.named_modules())
    if tensor.startswith(GRADIENT) and tensor.removeprefix(GRADIENT) in trained:
        weight = trained[tensor.removeprefix(GRADIENT)]
        return weight.register_hook(lambda gradient: values.append(_kept(gradient)))
    if tensor.startswith(UPDATED) and tensor.removeprefix(UPDATED) in weights and optimizer:
        weight = weights[tensor.removeprefix(UPDATED)]
        return optimizer.register_step_post_hook(lambda *_: values.append(_kept(weight)))
    path = tensor.partition("/")[0]
    if path and path in modules:

        def record(module: nn.Module, args: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple | list) else output
            values.append(_kept(first))

        return modules[path].register_forward_hook(record)
    raise UsageError(
        f"{line_prefix()}anchorTensor: there is no tensor {tensor!r}; take {GRADIENT}WEIGHT,"
        f" {UPDATED}WEIGHT or the path of a module (getTensorNames() lists them)"
    )


def _kept(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
