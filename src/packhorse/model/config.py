"""The numbers that shape a BERT; checkpoints of every format are read into this one value.

The families around BERT differ in a few places, and each is an axis here, not a class: where
positions begin (RoBERTa), whether there are types of tokens (DistilBERT has none), how wide the
embeddings are (ELECTRA), and what the heads activate.
"""

from __future__ import annotations

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
    dropout: float = 0.1  # of hidden states
    attention_dropout: float = 0.0  # of attention probabilities; not every kernel can
    # Rows of the table before the first position. RoBERTa numbers positions on from the padding
    # word's id, so this is that id + 1; `max_positions` are those that can be used.
    position_offset: int = 0
    embedding_size: int = 0  # 0 becomes the hidden size; where it differs, embeddings are projected
    mlm_activation: str = ""  # empty becomes that of the layers
    classify_activation: str = ""  # of the classifier's own pooler; empty: it shares the model's

    def __post_init__(self) -> None:
        if self.embedding_size == 0:
            object.__setattr__(self, "embedding_size", self.hidden_size)
        if not self.mlm_activation:
            object.__setattr__(self, "mlm_activation", self.activation)
        self._check_counts()
        if self.hidden_size % self.heads:
            raise CheckpointError(
                f"config: {self.heads} heads do not divide the hidden size {self.hidden_size}"
            )
        for name in (self.activation, self.mlm_activation, self.classify_activation or "tanh"):
            if name not in ACTIVATIONS:
                raise CheckpointError(
                    f"config: activation {name!r} is unknown; there are {', '.join(ACTIVATIONS)}"
                )
        if not 0 < self.norm_eps < 1:
            raise CheckpointError(f"config: layer-norm epsilon {self.norm_eps!r} is not in (0, 1)")
        for rate in (self.dropout, self.attention_dropout):
            if not 0 <= rate < 1:
                raise CheckpointError(f"config: dropout {rate!r} is not in [0, 1)")

    def _check_counts(self) -> None:
        for name, limit in _LIMITS.items():
            value, least = getattr(self, name), int(name not in _MAY_BE_ZERO)
            if type(value) is not int or not least <= value <= limit:
                raise CheckpointError(
                    f"config: {name} is {value!r}, not a count from {least} to {limit}"
                )

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
    "position_offset": 1_000_000,
    "embedding_size": 65_536,
}
_MAY_BE_ZERO = ("type_vocab_size", "position_offset")
