"""Whether each module of a model trains or evaluates, while one executor runs it.

    mode = Mode(model, training=True)    # when the model is wrapped
    mode.settle()                        # at the first call
    with mode.held(): model(inputs)

An executor keeps the mode that the model had when it was wrapped (PopTorch's user guide, "Model
wrapping functions"): `model.eval()` for a validation on the host, or for another executor, does not
switch the dropout of a training off. There is one exception, for scripts that wrap first and say
`train()` or `eval()` later, which PopTorch's compilation sees at the first call: a training model
that was wrapped in eval mode and is in train mode by then trains, and an inference model likewise.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from packhorse_port.notices import say_once

RANDOM = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._NormBase)  # differ between modes


class Mode:
    """`training` of each module, as an executor sees it."""

    def __init__(self, model: nn.Module, training: bool) -> None:
        self.model = model
        self.training = training
        self.record()

    def record(self) -> None:
        """Take the modes that the modules have now."""
        self._modes = [(module, module.training) for module in self.model.modules()]

    def settle(self) -> None:
        """Before the first call."""
        _, at_wrapping = self._modes[0]
        if at_wrapping != self.training and self.model.training == self.training:
            self.record()
        training = [module for module, mode in self._modes if mode]
        if not self.training and any(isinstance(module, RANDOM) for module in training):
            say_once(
                "inference in train mode",
                "this inferenceModel runs in train mode, in which the model was wrapped; write"
                " model.eval() before inferenceModel(model)",
            )

    @contextmanager
    def held(self) -> Iterator[None]:
        """Within it, the modules have the executor's modes."""
        changed = [(module, mode) for module, mode in self._modes if module.training is not mode]
        for module, mode in changed:
            module.__dict__["training"] = mode
        try:
            yield
        finally:
            for module, mode in changed:
                module.__dict__["training"] = not mode
