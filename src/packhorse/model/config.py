"""The numbers that shape a BERT; checkpoints of every format are read into this one value."""

from __future__ import annotations

import math
from dataclasses import dataclass

from packhorse.errors import CheckpointError

ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu", "tanh")


@dataclass(frozen=True, slots=True)
class BertConfig:
    """Sizes and constants of one encoder; checked on construction."""

    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    intermediate_size: int
    activation: str = "gelu"
    max_positions: int = 512
    type_vocab_size: int = 2
    norm_eps: float = 1e-12
    dropout: float = 0.1

    def __post_init__(self) -> None:
        for name, limit in _LIMITS.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= limit:
                raise CheckpointError(f"config: {name} is {value!r}, not a count from 1 to {limit}")
        if self.hidden_size % self.heads:
            raise CheckpointError(
                f"config: {self.heads} heads do not divide the hidden size {self.hidden_size}"
            )
        if self.activation not in ACTIVATIONS:
            raise CheckpointError(
                f"config: activation {self.activation!r} is unknown; "
                f"there are {', '.join(ACTIVATIONS)}"
            )
        if not (math.isfinite(self.norm_eps) and 0 < self.norm_eps < 1):
            raise CheckpointError(f"config: layer-norm epsilon {self.norm_eps!r} is not in (0, 1)")
        if not 0 <= self.dropout < 1:
            raise CheckpointError(f"config: dropout {self.dropout!r} is not in [0, 1)")

    @property
    def head_size(self) -> int:
        """D, the width of one attention head."""
        return self.hidden_size // self.heads


# Far above any real BERT, far below what would exhaust a machine before the weights are looked at.
_LIMITS = {
    "vocab_size": 10_000_000,
    "hidden_size": 65_536,
    "layers": 1_000,
    "heads": 1_024,
    "intermediate_size": 1_000_000,
    "max_positions": 1_000_000,
    "type_vocab_size": 1_000,
}
