"""The numbers that shape a BERT; checkpoints of every format are read into this one value.

The families around BERT differ in a few places, and each is an axis here, not a class: where
positions begin (RoBERTa), whether there are types of tokens (DistilBERT has none), how wide the
embeddings are (ELECTRA), what the heads activate; what a distance adds to a score (MPNet); and with
ModernBERT rotary positions, gates in the feed-forward, norms that come first, layers that see a
window only, and products without biases.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from packhorse.errors import CheckpointError

ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu", "tanh")
CLASSIFY_POOLINGS = ("cls", "mean")


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
    classify_pooling: str = "cls"
    head_norm: bool = False  # heads on tokens and sequences: dense, activation and norm before
    head_bias: bool = True  # of the dense layer that heads begin with
    decoder_bias: bool = True  # of the word scores
    attention_bias: bool = True
    mlp_bias: bool = True
    norm_bias: bool = True
    norm_first: bool = False  # before attention and feed-forward, and once more at the end
    gated: bool = False  # half of the widened numbers gate the other (Shazeer 2020, GLU variants)
    rotary_base: float = 0.0  # of angles that grow with positions; 0: a table of them is learned
    local_rotary_base: float = 0.0  # of local layers; 0 becomes that of the others
    local_layers: tuple[int, ...] = ()  # numbers of those that see a window only
    window: int = 0  # tokens that these see to either side
    distance_buckets: int = 0  # of distances that add a learned number to scores; 0: none do

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
        self._check_positions()
        if self.classify_pooling not in CLASSIFY_POOLINGS:
            raise CheckpointError(
                f"config: classifier pooling {self.classify_pooling!r} is unknown; "
                f"there are {', '.join(CLASSIFY_POOLINGS)}"
            )
        if not (self.norm_first or self.norm_bias):
            raise CheckpointError("config: norms that come last have a bias; set norm_bias")

    def _check_positions(self) -> None:
        if self.local_rotary_base == 0:
            object.__setattr__(self, "local_rotary_base", self.rotary_base)
        for base in (self.rotary_base, self.local_rotary_base):
            if not (base == 0 or 1 < base < 1e12):
                raise CheckpointError(f"config: the rotary base {base!r} is not in (1, 1e12)")
        if bool(self.rotary_base) != bool(self.local_rotary_base):
            raise CheckpointError("config: positions turn in local layers alone")
        if self.rotary_base and self.head_size % 2:
            raise CheckpointError(f"config: heads {self.head_size} wide cannot turn: that is odd")
        if self.distance_buckets not in (0, *range(4, 257, 4)):
            raise CheckpointError(
                f"config: {self.distance_buckets} buckets of distances are no multiple of 4 to 256"
            )

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

    @property
    def needs(self) -> dict[str, Any]:
        """What the model asks of an attention kernel, as `attention.pick` takes it."""
        return {
            "head_size": self.head_size,
            "windows": bool(self.local_layers),
            "biases": bool(self.distance_buckets),
        }

    @property
    def classic(self) -> bool:
        """Are its layers BERT's own? They are all that ONNX and TensorFlow files are written of."""
        rotary_or_distances = self.rotary_base or self.distance_buckets
        return not (rotary_or_distances or self.norm_first or self.gated or self.local_layers)


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
    "window": 1_000_000,
    "distance_buckets": 256,
}
_MAY_BE_ZERO = ("type_vocab_size", "position_offset", "window", "distance_buckets")
