"""Which outputs a host call returns, and in which order: PopTorch's output modes.

    kept = Outputs(OutputMode.All, every=1, replicas=2, steps=4)
    for leaves in micro_batches: kept.add(leaves)
    values = kept.values()

Micro batches come in the order of the data: device iteration, accumulation, replica. `All` returns
each of them, `Final` the last of every replica, `Sum` the sum, `EveryN` each nth. What is returned
is laid end to end along the first dimension, so a host call gives for `All` as many rows as it was
given; a value without dimensions, a loss say, becomes a vector where there are several and stays as
it is where there is one. Values that are no tensors are those of the last micro batch. What is kept
is a copy: a model may return a buffer, a weight or its input, which later micro batches change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from packhorse.errors import InputError
from packhorse_port.enums import OutputMode
from packhorse_port.notices import place
from packhorse_port.options import Options


def resolve(options: Options, training: bool) -> OutputMode:
    """The mode that `Default` stands for; a period that does not fit is refused."""
    mode, every = options.output_mode, options.output_every
    if mode == OutputMode.Default:
        return OutputMode.Final if training else OutputMode.All
    steps = options.device_iterations * options.gradient_accumulation
    if mode == OutputMode.EveryN and steps % every:
        raise InputError(
            f"{place()}outputMode(poptorch.OutputMode.EveryN, {every}) does not divide the {steps}"
            f" batches of a host call (deviceIterations {options.device_iterations} x"
            f" gradientAccumulation {options.gradient_accumulation}); take an n that does"
        )
    return mode


class Outputs:
    """The leaves of outputs, kept as the mode says while the micro batches of one call run."""

    def __init__(self, mode: OutputMode, every: int, replicas: int, steps: int) -> None:
        self._mode = mode
        self._every = every
        self._replicas = replicas
        self._steps = steps  # micro batches of one replica
        self._kept: list[Sequence[Any]] = []
        self._count = 0

    def add(self, leaves: Sequence[Any]) -> None:
        """The outputs of the next micro batch."""
        step, replica = divmod(self._count, self._replicas)
        self._count += 1
        if self._mode == OutputMode.Sum and step > 0:
            self._kept[replica] = [*map(_plus, self._kept[replica], leaves)]
        elif self._mode == OutputMode.Sum or self._keeps(step):
            self._kept.append([*map(_copy, leaves)])

    def _keeps(self, step: int) -> bool:
        if self._mode == OutputMode.Final:
            return step == self._steps - 1
        return (step + 1) % self._every == 0

    def values(self) -> list[Any]:
        """One value a leaf."""
        return [_laid(column) for column in zip(*self._kept, strict=True)]


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _plus(total: Any, value: Any) -> Any:
    return total + value if isinstance(value, Tensor) else value


def _laid(column: tuple[Any, ...]) -> Any:
    """End to end."""
    last = column[-1]
    if len(column) == 1 or not isinstance(last, Tensor):
        return last
    return torch.cat(column) if last.dim() else torch.stack(column)
