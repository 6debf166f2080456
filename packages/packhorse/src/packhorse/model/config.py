"""`BertConfig`: the sizes and options of an encoder; checkpoints of every format are read into it.

The families around BERT differ in a few places, and each is a field here, not a class: where
positions begin (RoBERTa), whether there are token types (DistilBERT has none), the width of the
embeddings (ELECTRA), the activation of the heads, relative position bias (MPNet), layers that share
their weights (ALBERT), scores of content against distance (DeBERTa); for ModernBERT rotary
positions, a gated feed-forward, norms that come first, layers with a local window, and products
without biases; stretched rotary angles (Nomic, GTE) and ALiBi (Jina); and for decoders causal
attention, grouped heads, RMS norms, and norms of queries and keys (Qwen3, Gemma 3).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from packhorse.errors import CheckpointError

ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu", "tanh")
# "late" pools what the dense layer and the activation make of each token, the others its state.
CLASSIFY_POOLINGS = ("cls", "mean", "late", "lasttoken")
NORMS = ("layer", "rms", "rms_offset")  # rms_offset: RMSNorm whose stored weight is 1 less (Gemma)


@dataclass(frozen=True, slots=True)
class BertConfig:
    """Sizes and options of one encoder; checked on construction."""

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
    attention_dropout: float = 0.0  # of attention probabilities; not every kernel supports it
    # Rows of the position table before the first position. RoBERTa counts positions from the
    # padding token's id, so this is that id + 1. `max_positions` counts the usable rows only.
    position_offset: int = 0
    embedding_size: int = 0  # 0 means the hidden size; if it differs, embeddings are projected
    always_project: bool = False  # embeddings of the hidden size are projected too
    # Numbers of the stored layers in the order in which they run; empty: each runs once. ALBERT
    # stores one layer and runs it twelve times.
    layer_order: tuple[int, ...] = ()
    mlm_activation: str = ""  # empty means that of the layers
    classify_activation: str = ""  # of the classifier's own pooler; empty: it shares the model's
    classify_pooling: str = "cls"
    head_norm: bool = False  # heads begin with a dense layer, an activation and a norm
    head_bias: bool = True  # of the dense layer that heads begin with
    decoder_bias: bool = True  # of the vocabulary scores
    attention_bias: bool = True
    mlp_bias: bool = True
    norm_bias: bool = True
    norm_first: bool = False  # norms before attention and feed-forward, and once at the end
    gated: bool = False  # half of the up-projection gates the other half (GLU, Shazeer 2020)
    gate_first: bool = False  # the second half is activated, not the first
    up_bias: bool = True  # whether the product before the activation has one, where mlp_bias is on
    rotary_base: float = 0.0  # base of the rotary angles; 0: a learned position table instead
    local_rotary_base: float = 0.0  # base in local layers; 0 means that of the other layers
    local_layers: tuple[int, ...] = ()  # numbers of the layers with a local window
    window: int = 0  # tokens that a local layer sees on either side
    distance_buckets: int = 0  # buckets of the relative position bias; 0: no such bias
    alibi: bool = False  # scores fall with the distance, by a fixed slope for each head
    rotary_width: int = 0  # leading numbers of a head that are rotated; 0: all of them
    rotary_interleaved: bool = False  # pairs (2i, 2i + 1) instead of (i, i + width / 2)
    rotary_stretch: float = 1.0  # angles for texts so many times as long as in training (NTK)
    # The same by the length of each text, where it exceeds the positions of the training.
    dynamic_stretch: float = 0.0  # 0: angles do not depend on the length
    trained_positions: int = 0
    kv_heads: int = 0  # heads of keys and values, each shared by several queries; 0: as many
    head_width: int = 0  # width of a head; 0: the hidden size divided by the heads
    qkv_by_head: bool = False  # rows of the joint product: q, k, v of each head, head after head
    causal: bool = False  # a token sees none that comes after it
    norm_kind: str = "layer"
    embed_norm: bool = True  # the embeddings are normalized
    scaled_words: bool = False  # the embeddings are multiplied by the root of their width
    branch_norms: bool = False  # of the results of attention and feed-forward too (norm_first)
    query_key_norm: bool = False  # each head of queries and keys is normalized
    mlm_dense: bool = True  # word scores begin with a dense layer, an activation and a norm
    classify_dense: bool = True  # and so does the classifier, else it is one product without bias
    absolute_positions: bool = True  # a learned position table, unless rotary or ALiBi
    # Disentangled attention (DeBERTa): "c2p", "p2c" or both; empty: none.
    disentangled: tuple[str, ...] = ()
    distance_span: int = 0  # vectors of distances on either side
    distance_reach: int = 0  # where logarithmic ranges of distances end; 0: a vector for each
    distance_norm: bool = False  # the vectors of distances are normalized
    share_distance_keys: bool = False  # they are projected as queries and keys are
    conv_width: int = 0  # tokens that a convolution beside the first layer sees; 0: none
    conv_activation: str = "tanh"

    def __post_init__(self) -> None:
        if self.embedding_size == 0:
            object.__setattr__(self, "embedding_size", self.hidden_size)
        if not self.mlm_activation:
            object.__setattr__(self, "mlm_activation", self.activation)
        self._check_counts()
        self._check_heads()
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
        self._check_order()
        self._check_disentangled()
        if self.classify_pooling not in CLASSIFY_POOLINGS:
            raise CheckpointError(
                f"config: classifier pooling {self.classify_pooling!r} is unknown; "
                f"there are {', '.join(CLASSIFY_POOLINGS)}"
            )
        if self.norm_kind not in NORMS:
            raise CheckpointError(
                f"config: norms of kind {self.norm_kind!r} are unknown; there are "
                f"{', '.join(NORMS)}"
            )
        if not (self.norm_first or (self.norm_bias and self.norm_kind == "layer")):
            raise CheckpointError(
                "config: norm_bias=False and RMS norms need norm_first=True; set one of them"
            )
        if self.branch_norms and not self.norm_first:
            raise CheckpointError("config: branch_norms needs norm_first=True; set both or none")

    def _check_heads(self) -> None:
        if self.hidden_size % self.heads and not self.head_width:
            raise CheckpointError(
                f"config: {self.heads} heads do not divide the hidden size {self.hidden_size}"
            )
        if self.qkv_by_head and self.key_heads != self.heads:
            raise CheckpointError("config: qkv_by_head and kv_heads do not go together; set one")
        if self.heads % self.key_heads:
            raise CheckpointError(
                f"config: {self.kv_heads} heads of keys and values do not divide {self.heads} heads"
            )

    def _check_positions(self) -> None:
        if self.local_rotary_base == 0:
            object.__setattr__(self, "local_rotary_base", self.rotary_base)
        for base in (self.rotary_base, self.local_rotary_base):
            if not (base == 0 or 1 < base < 1e12):
                raise CheckpointError(f"config: the rotary base {base!r} is not in (1, 1e12)")
        if bool(self.rotary_base) != bool(self.local_rotary_base):
            raise CheckpointError(
                "config: local layers have rotary positions and the others do not; set rotary_base"
            )
        if self.rotary_base and self.rotated_width % 2:
            raise CheckpointError(
                f"config: rotary positions need an even head size, and it is {self.rotated_width}"
            )
        if self.rotary_width > self.head_size:
            raise CheckpointError(
                f"config: {self.rotary_width} numbers of a head of {self.head_size} are rotated"
            )
        for factor in (self.rotary_stretch, self.dynamic_stretch or 1.0):
            if not 1 <= factor <= 1_000:
                raise CheckpointError(f"config: the rotary factor {factor!r} is not in [1, 1000]")
        if self.dynamic_stretch and not (self.trained_positions and self.rotated_width > 2):
            raise CheckpointError(
                "config: angles that depend on a text's length need trained_positions and heads "
                "wider than 2"
            )
        if self.alibi and (self.distance_buckets or self.rotary_base):
            raise CheckpointError("config: alibi goes with no other kind of positions; choose one")
        # Half of the buckets are for each direction, and half of those for exact distances.
        if self.distance_buckets not in (0, *range(4, 257, 4)):
            raise CheckpointError(
                f"config: distance_buckets is {self.distance_buckets}; "
                "it must be 0 or a multiple of 4 up to 256"
            )

    def _check_counts(self) -> None:
        for name, limit in _LIMITS.items():
            value = getattr(self, name)
            least = 0 if name in _MAY_BE_ZERO else 1
            if type(value) is not int or not least <= value <= limit:
                raise CheckpointError(
                    f"config: {name} is {value!r}, not a count from {least} to {limit}"
                )

    def _check_order(self) -> None:
        order = self.layer_order
        if order and (len(order) > _MOST_STEPS or set(order) != set(range(max(order) + 1))):
            raise CheckpointError(
                f"config: layer_order runs {len(order)} layers; it must name each stored layer "
                f"and at most {_MOST_STEPS} steps"
            )

    def _check_disentangled(self) -> None:
        kinds = self.disentangled
        if set(kinds) - {"c2p", "p2c"} or len(set(kinds)) != len(kinds):
            raise CheckpointError(f"config: disentangled is {kinds!r}; it holds c2p, p2c or both")
        if bool(kinds) != bool(self.distance_span):
            raise CheckpointError(
                f"config: disentangled attention {kinds!r} has distance_span {self.distance_span}"
            )
        if kinds and (self.rotary_base or self.distance_buckets or self.alibi):
            raise CheckpointError(
                "config: disentangled attention cannot be combined with rotary positions, ALiBi or "
                "a bias of distances; choose one"
            )
        if self.distance_reach and self.distance_reach - 1 <= self.distance_span // 2:
            raise CheckpointError(
                f"config: logarithmic distances end at {self.distance_reach}, within the "
                f"{self.distance_span // 2} that are exact"
            )
        if self.distance_reach and self.distance_span < 2:
            raise CheckpointError("config: logarithmic distances need a span of 2 or more")
        if self.conv_width and self.conv_width % 2 == 0:
            raise CheckpointError(f"config: conv_width {self.conv_width} is not odd")
        if self.conv_activation not in ACTIVATIONS:
            raise CheckpointError(
                f"config: activation {self.conv_activation!r} is unknown; "
                f"there are {', '.join(ACTIVATIONS)}"
            )

    @property
    def position_rows(self) -> int:
        """Rows of the learned table of positions; 0 if there is none."""
        learned = self.absolute_positions and not (self.rotary_base or self.alibi)
        return self.max_positions + self.position_offset if learned else 0

    @property
    def stored_layers(self) -> int:
        """How many layers have weights of their own."""
        return max(self.layer_order) + 1 if self.layer_order else self.layers

    @property
    def head_size(self) -> int:
        """D, the width of one attention head."""
        return self.head_width or self.hidden_size // self.heads

    @property
    def key_heads(self) -> int:
        """The heads of keys and values."""
        return self.kv_heads or self.heads

    @property
    def rotated_width(self) -> int:
        """W, how many numbers of a head are rotated."""
        return self.rotary_width or self.head_size

    @property
    def needs(self) -> dict[str, Any]:
        """What the model needs of an attention kernel, as keywords for `attention.pick`."""
        return {
            "head_size": self.head_size,
            "windows": bool(self.local_layers),
            "biases": bool(self.distance_buckets) or self.alibi,
            "causal": self.causal,
            "disentangled": bool(self.disentangled),
        }

    @property
    def classic(self) -> bool:
        """Does it have the original BERT's layers, as ONNX and TensorFlow files need it?"""
        return not (
            self.rotary_base
            or self.distance_buckets
            or self.norm_first
            or self.gated
            or self.local_layers
            or self.alibi
            or self.causal
            or self.head_width
            or self.key_heads != self.heads
            or self.query_key_norm
            or self.qkv_by_head
            or self.scaled_words
            or not (self.embed_norm and self.attention_bias and self.mlp_bias and self.mlm_dense)
            or self.layer_order
            or self.always_project
            or self.disentangled
            or not self.absolute_positions
            or self.conv_width
        )


# A config is read before the weights: these limits are far above any real BERT, and far below what
# would exhaust the memory of a machine while the model is built.
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
    "rotary_width": 65_536,
    "trained_positions": 1_000_000,
    "kv_heads": 1_024,
    "head_width": 65_536,
    "distance_span": 65_536,
    "distance_reach": 1_000_000,
    "conv_width": 99,
}
_MOST_STEPS = 10_000
_MAY_BE_ZERO = (
    "type_vocab_size",
    "position_offset",
    "window",
    "distance_buckets",
    "rotary_width",
    "trained_positions",
    "kv_heads",
    "head_width",
    "distance_span",
    "distance_reach",
    "conv_width",
)
