"""The tables: what each family of models calls its configuration keys, tensors, heads and classes.

A template maps one of our modules to the foreign module that holds its weight and bias; `{}` is the
number of a layer, unless a layer has a template of its own; a tuple of three modules is
concatenated row by row (queries, keys and values are one matrix here). There is one model class for
all families: where families differ in more than names, they differ in fields of `BertConfig`, and
`defaults` and `settings` give a family's values. To add a family, fill in a `Family`.

BERT (Devlin et al. 2018), RoBERTa (Liu et al. 2019) with XLM-RoBERTa and CamemBERT, DistilBERT
(Sanh et al. 2019), ALBERT (Lan et al. 2020), ELECTRA (Clark et al. 2020), MPNet (Song et al. 2020),
DeBERTa v2 and v3 (He et al. 2021), ModernBERT (Warner et al. 2024), NomicBERT (Nussbaum et al.
2024), GTE (Zhang et al. 2024), EuroBERT (Boizard et al. 2025), and the decoders Qwen3 and Gemma 3
(2025); names as transformers writes them today. Families whose models on the hub bring code along
are read by the names and keys of that code, which is never run; docs/models.md says which public
file each layout was taken from.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from packhorse.errors import CheckpointError
from packhorse.json_types import is_list, is_object
from packhorse.model.config import BertConfig

Entry = str | tuple[str, ...]  # one foreign module, or several to concatenate
Table = Mapping[str, Entry]  # our module → foreign modules


@dataclass(frozen=True)
class Family:
    """The tables of one `model_type`."""

    prefix: str  # of the encoder's tensors; files of an encoder without heads leave it off
    config: dict[str, str]  # field of BertConfig → key of the configuration
    tensors: Table
    heads: dict[str, Table]
    architectures: dict[str, tuple[str, ...]]  # class of transformers → the heads it must have
    harmless: re.Pattern[str]  # tensors that may be present, are not used and change no result
    # Fields of BertConfig that differ from BERT's and that no key of the configuration gives.
    defaults: dict[str, Any] = field(default_factory=dict[str, Any])
    second_bias: str | None = None  # another name for the bias of the word scores
    after_padding: bool = False  # positions are numbered from `pad_token_id` + 1
    padding: int | None = None  # the padding id, where the family's code ignores the configured one
    # Fields of BertConfig that follow from several keys, or from none.
    settings: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda raw: {}
    # Heads share the names of their tensors, so that only the class tells them apart.
    heads_by_class: bool = False
    aliases: dict[str, str] = field(default_factory=dict[str, str])  # key → its other name
    other_prefixes: tuple[str, ...] = ()  # under which files of this family have the encoder too
    positions: str = "absolute"  # the one value of `position_embedding_type` that runs
    # Keys that are written beside those of `config`, from a configuration.
    exports: Callable[[BertConfig], dict[str, Any]] = lambda config: {}
    tied: bool = True  # words are scored by their own embeddings, if no key says so
    # Older beginnings of names and those of today; what the configuration says of such a file.
    renamed: dict[str, str] = field(default_factory=dict[str, str])
    if_renamed: dict[str, Any] = field(default_factory=dict[str, Any])
    # Fields of this class that follow from the configuration.
    variant: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda raw: {}


SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "activation": "hidden_act",
    "max_positions": "max_position_embeddings",
    "type_vocab_size": "type_vocab_size",
    "norm_eps": "layer_norm_eps",
    "dropout": "hidden_dropout_prob",
}
SPAN: dict[str, Table] = {"span": {"heads.span.dense": "qa_outputs"}}
TOKENS: dict[str, Table] = {"tokens": {"heads.tokens.dense": "classifier"}}
# RoBERTa and MPNet.
LM_HEAD: dict[str, Table] = {
    "mlm": {
        "heads.mlm.dense": "lm_head.dense",
        "heads.mlm.norm": "lm_head.layer_norm",
        "heads.mlm.decoder": "lm_head.decoder",
    }
}
# RoBERTa, ELECTRA and MPNet: a classifier with its own pooler.
OWN_POOLER: dict[str, Table] = {
    "classify": {
        "heads.classify.pooler.dense": "classifier.dense",
        "heads.classify.dense": "classifier.out_proj",
    }
}


def _classes(name: str, **more: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Classes by their heads; a model is written as the first class whose heads it has."""
    return {
        f"{name}ForSequenceClassification": ("classify",),
        f"{name}ForTokenClassification": ("tokens",),
        f"{name}ForQuestionAnswering": ("span",),
        **{f"{name}{ending}": heads for ending, heads in more.items()},
        f"{name}ForMaskedLM": ("mlm",),
        f"{name}Model": (),
    }


def _encoder(prefix: str) -> dict[str, Entry]:
    """BERT's names, which most families kept."""
    layer = f"{prefix}encoder.layer.{{}}."
    return {
        "bert.embed.words": f"{prefix}embeddings.word_embeddings",
        "bert.embed.positions": f"{prefix}embeddings.position_embeddings",
        "bert.embed.types": f"{prefix}embeddings.token_type_embeddings",
        "bert.embed.norm": f"{prefix}embeddings.LayerNorm",
        "bert.layers.{}.attention.qkv": (
            f"{layer}attention.self.query",
            f"{layer}attention.self.key",
            f"{layer}attention.self.value",
        ),
        "bert.layers.{}.attention.out": f"{layer}attention.output.dense",
        "bert.layers.{}.attention_norm": f"{layer}attention.output.LayerNorm",
        "bert.layers.{}.up.dense": f"{layer}intermediate.dense",
        "bert.layers.{}.down": f"{layer}output.dense",
        "bert.layers.{}.norm": f"{layer}output.LayerNorm",
    }


BERT = Family(
    prefix="bert.",
    config=SIZES,
    tensors=_encoder("bert."),
    heads={
        "pooled": {"heads.pooled.dense": "bert.pooler.dense"},
        "mlm": {
            "heads.mlm.dense": "cls.predictions.transform.dense",
            "heads.mlm.norm": "cls.predictions.transform.LayerNorm",
            "heads.mlm.decoder": "cls.predictions.decoder",
        },
        "nsp": {
            "heads.nsp.pooler.dense": "bert.pooler.dense",
            "heads.nsp.dense": "cls.seq_relationship",
        },
        **SPAN,
        "classify": {
            "heads.classify.pooler.dense": "bert.pooler.dense",
            "heads.classify.dense": "classifier",
        },
        **TOKENS,
    },
    architectures=_classes(
        "Bert", ForPreTraining=("mlm", "nsp"), ForNextSentencePrediction=("nsp",)
    ),
    # Leftovers of a pretraining head come after the encoder, so they change no other result.
    harmless=re.compile(r"bert\.embeddings\.position_ids|cls\..*"),
    second_bias="cls.predictions.bias",
)


def _roberta(name: str) -> Family:
    """RoBERTa, and families that differ from it only in the names of their classes."""
    return Family(
        prefix="roberta.",
        config=SIZES,
        tensors=_encoder("roberta."),
        heads={
            "pooled": {"heads.pooled.dense": "roberta.pooler.dense"},
            **LM_HEAD,
            **SPAN,
            **OWN_POOLER,
            **TOKENS,
        },
        architectures=_classes(name),
        harmless=re.compile(r"roberta\.embeddings\.position_ids|lm_head\..*"),
        defaults={"mlm_activation": "gelu", "classify_activation": "tanh"},
        second_bias="lm_head.bias",
        after_padding=True,
    )


DISTILBERT = Family(
    prefix="distilbert.",
    config={
        "vocab_size": "vocab_size",
        "hidden_size": "dim",
        "layers": "n_layers",
        "heads": "n_heads",
        "intermediate_size": "hidden_dim",
        "activation": "activation",
        "max_positions": "max_position_embeddings",
        "dropout": "dropout",
    },
    tensors={
        "bert.embed.words": "distilbert.embeddings.word_embeddings",
        "bert.embed.positions": "distilbert.embeddings.position_embeddings",
        "bert.embed.norm": "distilbert.embeddings.LayerNorm",
        "bert.layers.{}.attention.qkv": (
            "distilbert.transformer.layer.{}.attention.q_lin",
            "distilbert.transformer.layer.{}.attention.k_lin",
            "distilbert.transformer.layer.{}.attention.v_lin",
        ),
        "bert.layers.{}.attention.out": "distilbert.transformer.layer.{}.attention.out_lin",
        "bert.layers.{}.attention_norm": "distilbert.transformer.layer.{}.sa_layer_norm",
        "bert.layers.{}.up.dense": "distilbert.transformer.layer.{}.ffn.lin1",
        "bert.layers.{}.down": "distilbert.transformer.layer.{}.ffn.lin2",
        "bert.layers.{}.norm": "distilbert.transformer.layer.{}.output_layer_norm",
    },
    heads={
        "mlm": {
            "heads.mlm.dense": "vocab_transform",
            "heads.mlm.norm": "vocab_layer_norm",
            "heads.mlm.decoder": "vocab_projector",
        },
        **SPAN,
        "classify": {
            "heads.classify.pooler.dense": "pre_classifier",
            "heads.classify.dense": "classifier",
        },
        **TOKENS,
    },
    architectures=_classes("DistilBert"),
    harmless=re.compile(
        r"distilbert\.embeddings\.position_ids|vocab_(transform|layer_norm|projector)\..*"
    ),
    defaults={"type_vocab_size": 0, "classify_activation": "relu"},
)

ELECTRA = Family(
    prefix="electra.",
    config={**SIZES, "embedding_size": "embedding_size"},
    tensors={**_encoder("electra."), "bert.embed.project": "electra.embeddings_project"},
    heads={
        "replaced": {
            "heads.replaced.dense": "discriminator_predictions.dense",
            "heads.replaced.score": "discriminator_predictions.dense_prediction",
        },
        "mlm": {
            "heads.mlm.dense": "generator_predictions.dense",
            "heads.mlm.norm": "generator_predictions.LayerNorm",
            "heads.mlm.decoder": "generator_lm_head",
        },
        **SPAN,
        **OWN_POOLER,
        **TOKENS,
    },
    architectures=_classes("Electra", ForPreTraining=("replaced",)),
    harmless=re.compile(
        # A checkpoint of pretraining holds both models: the discriminator and the generator.
        r"electra\.embeddings\.position_ids|discriminator_predictions\..*"
        r"|generator(_predictions|_lm_head)?\..*"
    ),
    defaults={"embedding_size": 128, "mlm_activation": "gelu", "classify_activation": "gelu"},
)


ALBERT_LAYER = "albert.encoder.albert_layer_groups.{}.albert_layers.{}."


def _albert_layer(number: str, module: str) -> dict[str, Entry]:
    """The names of one stored layer; `module` is the foreign name of that layer."""
    ours = f"bert.layers.{number}."
    return {
        f"{ours}attention.qkv": (
            f"{module}attention.query",
            f"{module}attention.key",
            f"{module}attention.value",
        ),
        f"{ours}attention.out": f"{module}attention.dense",
        f"{ours}attention_norm": f"{module}attention.LayerNorm",
        f"{ours}up.dense": f"{module}ffn",
        f"{ours}down": f"{module}ffn_output",
        f"{ours}norm": f"{module}full_layer_layer_norm",
    }


ALBERT_TENSORS: dict[str, Entry] = {
    "bert.embed.words": "albert.embeddings.word_embeddings",
    "bert.embed.positions": "albert.embeddings.position_embeddings",
    "bert.embed.types": "albert.embeddings.token_type_embeddings",
    "bert.embed.norm": "albert.embeddings.LayerNorm",
    "bert.embed.project": "albert.encoder.embedding_hidden_mapping_in",
}


def _albert_groups(raw: Mapping[str, Any]) -> tuple[int, int]:
    """Groups of stored layers, and the layers of a group, which run one after the other."""
    return _count(raw, "num_hidden_groups", 1, 1000), _count(raw, "inner_group_num", 1, 100)


def _albert_settings(raw: Mapping[str, Any]) -> dict[str, Any]:
    """ALBERT's layers: each step runs a whole group, and consecutive steps share one."""
    layers = _count(raw, "num_hidden_layers", 12, 1000)
    groups, inner = _albert_groups(raw)
    if groups > layers:
        raise CheckpointError(
            f"config: num_hidden_groups {groups} is more than num_hidden_layers {layers}"
        )
    # Divided in this order, rounding included, as transformers does.
    steps = [int(step / (layers / groups)) for step in range(layers)]
    order = tuple(group * inner + number for group in steps for number in range(inner))
    return {"layer_order": order}


def _albert_variant(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A template per stored layer where a group holds several: two numbers are one of ours."""
    groups, inner = _albert_groups(raw)
    if inner == 1:
        return {}
    tensors = dict(ALBERT_TENSORS)
    for number in range(groups * inner):
        tensors |= _albert_layer(str(number), ALBERT_LAYER.format(*divmod(number, inner)))
    return {"tensors": tensors}


ALBERT = Family(
    prefix="albert.",
    config={**SIZES, "embedding_size": "embedding_size"},
    tensors={**ALBERT_TENSORS, **_albert_layer("{}", ALBERT_LAYER.format("{}", 0))},
    heads={
        "pooled": {"heads.pooled.dense": "albert.pooler"},
        "mlm": {
            "heads.mlm.dense": "predictions.dense",
            "heads.mlm.norm": "predictions.LayerNorm",
            "heads.mlm.decoder": "predictions.decoder",
        },
        **SPAN,
        "classify": {
            "heads.classify.pooler.dense": "albert.pooler",
            "heads.classify.dense": "classifier",
        },
        **TOKENS,
    },
    # The classifier of sentence order is no head here, for it answers another question than BERT's
    # of the next sentence.
    architectures=_classes("Albert", ForMaskedLM=("mlm",), ForPreTraining=("mlm",)),
    harmless=re.compile(
        r"albert\.embeddings\.position_ids|predictions\..*|sop_classifier\.classifier\..*"
    ),
    defaults={
        "activation": "gelu_new",
        "embedding_size": 128,
        "dropout": 0.0,
        "always_project": True,
    },
    second_bias="predictions.bias",
    settings=_albert_settings,
    variant=_albert_variant,
)


def _mpnet_settings(raw: Mapping[str, Any]) -> dict[str, Any]:
    """MPNet's relative position bias: its code uses 32 buckets whatever the configuration says."""
    buckets = raw.get("relative_attention_num_buckets", 32)
    if buckets != 32:
        raise CheckpointError(
            f"config: relative_attention_num_buckets {buckets!r} is not supported, only 32"
        )
    return {"distance_buckets": 32}


MPNET = Family(
    prefix="mpnet.",
    config={name: key for name, key in SIZES.items() if name != "type_vocab_size"},
    tensors={
        "bert.embed.words": "mpnet.embeddings.word_embeddings",
        "bert.embed.positions": "mpnet.embeddings.position_embeddings",
        "bert.embed.norm": "mpnet.embeddings.LayerNorm",
        "bert.distances.table": "mpnet.encoder.relative_attention_bias",
        "bert.layers.{}.attention.qkv": (
            "mpnet.encoder.layer.{}.attention.attn.q",
            "mpnet.encoder.layer.{}.attention.attn.k",
            "mpnet.encoder.layer.{}.attention.attn.v",
        ),
        "bert.layers.{}.attention.out": "mpnet.encoder.layer.{}.attention.attn.o",
        "bert.layers.{}.attention_norm": "mpnet.encoder.layer.{}.attention.LayerNorm",
        "bert.layers.{}.up.dense": "mpnet.encoder.layer.{}.intermediate.dense",
        "bert.layers.{}.down": "mpnet.encoder.layer.{}.output.dense",
        "bert.layers.{}.norm": "mpnet.encoder.layer.{}.output.LayerNorm",
    },
    heads={
        "pooled": {"heads.pooled.dense": "mpnet.pooler.dense"},
        **LM_HEAD,
        **SPAN,
        **OWN_POOLER,
        **TOKENS,
    },
    architectures=_classes("MPNet"),
    harmless=re.compile(r"mpnet\.embeddings\.position_ids|lm_head\..*"),
    defaults={"type_vocab_size": 0, "mlm_activation": "gelu", "classify_activation": "tanh"},
    second_bias="lm_head.bias",
    after_padding=True,
    padding=1,
    settings=_mpnet_settings,
)


DEBERTA_SELF = "deberta.encoder.layer.{}.attention.self."


def _deberta_settings(raw: Mapping[str, Any]) -> dict[str, Any]:
    """DeBERTa's fields of BertConfig: which distances have a vector, and what it meets.

    What would change results and is not understood is refused, by name.
    """
    positions = _count(raw, "max_position_embeddings", 512, 1_000_000)
    reach = _whole(raw, "max_relative_positions", -1)
    reach = reach if reach > 0 else positions
    buckets = _whole(raw, "position_buckets", -1)
    norms = raw.get("norm_rel_ebd", "none")
    if not isinstance(norms, str) or set(_parts(norms)) - {"none", "layer_norm"}:
        raise CheckpointError(f"config: norm_rel_ebd {norms!r} is unknown; there is layer_norm")
    hidden = _count(raw, "hidden_size", 1536, 1_000_000)
    only: dict[str, Any] = {
        "relative_attention": True,
        "embedding_size": hidden,
        "pooler_hidden_size": hidden,
        "attention_head_size": hidden // _count(raw, "num_attention_heads", 24, 1_000_000),
        "conv_groups": 1,
    }
    for key, value in only.items():
        default = False if key == "relative_attention" else value
        if raw.get(key, default) != value:
            raise CheckpointError(
                f"config: {key} {raw.get(key, default)!r} is not supported, only {value!r}"
            )
    return {
        "disentangled": _score_types(raw),
        "distance_span": buckets if buckets > 0 else reach,
        "distance_reach": reach if buckets > 0 else 0,
        "distance_norm": "layer_norm" in _parts(norms),
        "share_distance_keys": _flag(raw, "share_att_key", False),
        "absolute_positions": _flag(raw, "position_biased_input", True),
        "conv_width": max(0, _whole(raw, "conv_kernel_size", 0)),
        "conv_activation": _named_activation(raw, "conv_act", "tanh"),
        "classify_activation": _named_activation(raw, "pooler_hidden_act", "gelu"),
    }


def _score_types(raw: Mapping[str, Any]) -> tuple[str, ...]:
    """Which products with distances are added: "c2p" (content to position), "p2c" or both."""
    kinds: Any = raw.get("pos_att_type")
    kinds = _parts(kinds) if isinstance(kinds, str) else kinds
    known = ("c2p", "p2c")
    if not is_list(kinds) or not kinds or any(kind not in known for kind in kinds):
        raise CheckpointError(
            f"config: pos_att_type {raw.get('pos_att_type')!r} is not supported, only c2p, p2c "
            f"or both"
        )
    return tuple(kind for kind in known if kind in kinds)


def _parts(joined: str) -> list[str]:
    return [part.strip() for part in joined.lower().split("|")]


def _whole(raw: Mapping[str, Any], key: str, default: int) -> int:
    value = raw.get(key, default)
    if type(value) is not int:
        raise CheckpointError(f"config: {key} {value!r} is not a whole number")
    return value


def _named_activation(raw: Mapping[str, Any], key: str, default: str) -> str:
    name = raw.get(key, default)
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise CheckpointError(
            f"config: {key} {name!r} is unknown; there are {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


DEBERTA = Family(
    prefix="deberta.",
    config=SIZES,
    tensors={
        **_encoder("deberta."),
        "bert.layers.{}.attention.qkv": (
            f"{DEBERTA_SELF}query_proj",
            f"{DEBERTA_SELF}key_proj",
            f"{DEBERTA_SELF}value_proj",
        ),
        "bert.layers.{}.attention.distance_keys": f"{DEBERTA_SELF}pos_key_proj",
        "bert.layers.{}.attention.distance_queries": f"{DEBERTA_SELF}pos_query_proj",
        "bert.relative.table": "deberta.encoder.rel_embeddings",
        "bert.relative.norm": "deberta.encoder.LayerNorm",
        "bert.convolution.conv": "deberta.encoder.conv.conv",
        "bert.convolution.norm": "deberta.encoder.conv.LayerNorm",
    },
    heads={
        "mlm": {
            "heads.mlm.dense": "cls.predictions.transform.dense",
            "heads.mlm.norm": "cls.predictions.transform.LayerNorm",
            "heads.mlm.decoder": "cls.predictions.decoder",
        },
        **SPAN,
        "classify": {
            "heads.classify.pooler.dense": "pooler.dense",
            "heads.classify.dense": "classifier",
        },
        **TOKENS,
    },
    architectures=_classes("DebertaV2"),
    harmless=re.compile(
        # `mask_predictions` is the discriminator of v3's pretraining, which no class has.
        r"deberta\.embeddings\.position_(ids|embeddings\.weight)|cls\..*|mask_predictions\..*"
    ),
    defaults={"type_vocab_size": 0, "norm_eps": 1e-7},
    second_bias="cls.predictions.bias",
    # Microsoft's files, and transformers with legacy=False: the same layers, always tied.
    renamed={
        "lm_predictions.lm_head.dense.": "cls.predictions.transform.dense.",
        "lm_predictions.lm_head.LayerNorm.": "cls.predictions.transform.LayerNorm.",
        "lm_predictions.lm_head.bias": "cls.predictions.bias",
    },
    if_renamed={"legacy": True, "tie_word_embeddings": True},
    settings=_deberta_settings,
)


LAYER_TYPES = {"full_attention": False, "sliding_attention": True}  # kind → is it local?
# Kind of layer → key of the rotary base in transformers 4, and its default.
RopeKeys = Mapping[str, tuple[str, float]]
MODERN_ROPE: RopeKeys = {
    "full_attention": ("global_rope_theta", 160_000.0),
    "sliding_attention": ("local_rope_theta", 10_000.0),
}
GEMMA_ROPE: RopeKeys = {
    "full_attention": ("rope_theta", 1_000_000.0),
    "sliding_attention": ("rope_local_base_freq", 10_000.0),
}
ROPE_KEYS = {"rope_type", "type", "rope_theta"}  # of rope_parameters; others would change angles
BIASES = {  # field of BertConfig → key, default
    "attention_bias": ("attention_bias", False),
    "mlp_bias": ("mlp_bias", False),
    "norm_bias": ("norm_bias", False),
    "head_bias": ("classifier_bias", False),
    "decoder_bias": ("decoder_bias", True),
}


def _modernbert_settings(raw: Mapping[str, Any]) -> dict[str, Any]:
    """ModernBERT's fields of BertConfig that have no key of their own.

    Its configurations name the local layers and the rotary bases in two ways: by
    `global_attn_every_n_layers` and `global_rope_theta`, as its files on the hub do, or by
    `layer_types` and `rope_parameters`, as transformers 5 writes them. Where both are present the
    newer one counts, as in transformers. A setting that would change results and is not
    understood is refused, by name.
    """
    local = _local_layers(raw)
    bases = {kind: _rotary_base(raw, kind, MODERN_ROPE) for kind in LAYER_TYPES}
    return {
        **{name: _flag(raw, key, default) for name, (key, default) in BIASES.items()},
        "local_layers": local,
        "window": _count(raw, "local_attention", 128, 2_000_000) // 2 if local else 0,
        "rotary_base": bases["full_attention"],
        "local_rotary_base": bases["sliding_attention"],
        "classify_pooling": raw.get("classifier_pooling", "cls"),
    }


def _local_layers(raw: Mapping[str, Any]) -> tuple[int, ...]:
    layers = _count(raw, "num_hidden_layers", 0, 1000)
    kinds: Any = raw.get("layer_types")
    if kinds is None:
        interval = _count(raw, "global_attn_every_n_layers", 3, 1000)
        return tuple(number for number in range(layers) if number % interval)
    if not is_list(kinds) or len(kinds) != layers:
        raise CheckpointError(f"config: layer_types does not name the kind of {layers} layers")
    for kind in kinds:
        if not isinstance(kind, str) or kind not in LAYER_TYPES:
            raise CheckpointError(
                f"config: layer_types {kind!r} is unknown; there are {', '.join(LAYER_TYPES)}"
            )
    return tuple(number for number, kind in enumerate(kinds) if LAYER_TYPES[kind])


def _rotary_base(raw: Mapping[str, Any], kind: str, keys: RopeKeys) -> float:
    """The base of the rotary angles of one kind of layer; scaled angles are refused."""
    tables: Any = raw.get("rope_parameters") or {}
    table: Any = (tables.get(kind) if is_object(tables) else tables) or {}
    scaled = raw.get("rope_scaling") or not is_object(table) or set(table) - ROPE_KEYS
    if scaled or {table.get("rope_type"), table.get("type")} - {None, "default"}:
        setting = raw.get("rope_scaling") or table
        raise CheckpointError(f"config: rotary positions of {setting!r} are not supported")
    key, default = keys[kind]
    base = table.get("rope_theta", raw.get(key, default))
    if type(base) not in (int, float) or not 1 < base < 1e12:
        raise CheckpointError(f"config: {key} {base!r} is not in (1, 1e12)")
    return float(base)


def _count(raw: Mapping[str, Any], key: str, default: int, largest: int) -> int:
    value = raw.get(key, default)
    if type(value) is not int or not 1 <= value <= largest:
        raise CheckpointError(f"config: {key} is {value!r}, not a count from 1 to {largest}")
    return value


def _flag(raw: Mapping[str, Any], key: str, default: bool) -> bool:
    value = raw.get(key, default)
    if type(value) is not bool:
        raise CheckpointError(f"config: {key} {value!r} is neither true nor false")
    return value


def _modern_head(head: str, part: str) -> dict[str, Table]:
    """All heads but the word scores share these names, whatever their task."""
    return {
        head: {
            f"heads.{head}.{part}.dense": "head.dense",
            f"heads.{head}.{part}.norm": "head.norm",
            f"heads.{head}.dense": "classifier",
        }
    }


MODERNBERT = Family(
    prefix="model.",
    config={
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "layers": "num_hidden_layers",
        "heads": "num_attention_heads",
        "intermediate_size": "intermediate_size",
        "activation": "hidden_activation",
        "mlm_activation": "classifier_activation",
        "max_positions": "max_position_embeddings",
        "norm_eps": "norm_eps",
    },
    tensors={
        "bert.embed.words": "model.embeddings.tok_embeddings",
        "bert.embed.norm": "model.embeddings.norm",
        "bert.layers.{}.attention_norm": "model.layers.{}.attn_norm",
        "bert.layers.{}.attention.qkv": "model.layers.{}.attn.Wqkv",
        "bert.layers.{}.attention.out": "model.layers.{}.attn.Wo",
        "bert.layers.{}.norm": "model.layers.{}.mlp_norm",
        "bert.layers.{}.up.dense": "model.layers.{}.mlp.Wi",
        "bert.layers.{}.down": "model.layers.{}.mlp.Wo",
        "bert.norm": "model.final_norm",
    },
    heads={
        "mlm": {
            "heads.mlm.dense": "head.dense",
            "heads.mlm.norm": "head.norm",
            "heads.mlm.decoder": "decoder",
        },
        **_modern_head("span", "transform"),
        **_modern_head("classify", "pooler"),
        **_modern_head("tokens", "transform"),
    },
    architectures=_classes("ModernBert"),
    harmless=re.compile(r"(head|decoder)\..*"),
    defaults={
        "type_vocab_size": 0,
        "max_positions": 8192,
        "norm_eps": 1e-5,
        "dropout": 0.0,
        "mlm_activation": "gelu",
        "norm_first": True,
        "gated": True,
        "head_norm": True,
    },
    settings=_modernbert_settings,
    heads_by_class=True,
)

ROPE_TABLE = "rope_parameters"  # how transformers 5 writes the angles; older files have rope_theta


def _rope_table(raw: Mapping[str, Any]) -> dict[str, Any]:
    """What a configuration says about rotary angles, in transformers' newest spelling."""
    table: Any = raw.get(ROPE_TABLE) or {}
    scaling: Any = raw.get("rope_scaling") or {}
    if not is_object(table) or not is_object(scaling):
        raise CheckpointError(f"config: rotary positions of {table or scaling!r} are not supported")
    kinds = [entry.get("rope_type", entry.get("type")) for entry in (table, scaling)]
    kind = next((kind for kind in kinds if kind is not None), "default")
    base = {"rope_theta": raw["rope_theta"]} if "rope_theta" in raw else {}
    return {**base, **scaling, **table, "rope_type": kind}


def _rope_number(table: Mapping[str, Any], key: str, default: float) -> float:
    value = table.get(key, default)
    if type(value) not in (int, float) or not value > 0:
        raise CheckpointError(
            f"config: {key} {value!r} of the rotary positions is not a number above 0"
        )
    return float(value)


def _check_rope(table: Mapping[str, Any], *allowed: str) -> None:
    """Raise for a kind of angles, or a number that shapes them, beyond those in `allowed`."""
    known = {"rope_type", "type", "rope_theta"} | {
        "factor" for kind in allowed if kind != "default"
    }
    spare = {key for key, value in table.items() if key not in known and value is not None}
    if table["rope_type"] not in allowed or spare:
        raise CheckpointError(f"config: rotary positions of {dict(table)!r} are not supported")


def _only(raw: Mapping[str, Any], **values: Any) -> None:
    """Raise if a key has a value other than the one that runs here; absent keys and null do."""
    for key, value in values.items():
        if raw.get(key, value) not in (value, None):
            raise CheckpointError(f"config: {key} {raw[key]!r} is not supported, only {value!r}")


def _size(raw: Mapping[str, Any], key: str, default: int) -> int:
    """A count of a family whose code takes null for the default."""
    return default if raw.get(key) is None else _count(raw, key, default, 10_000_000)


def _nomic_settings(raw: Mapping[str, Any]) -> dict[str, Any]:
    """NomicBERT's fields, by the keys of its own code and by those of transformers.

    Its own code takes GPT-2's keys and those of flash-attention's BERT; such a file is recognized
    by one of them, and then follows the defaults of that code.
    """
    _only(
        raw,
        prenorm=False,
        parallel_block=False,
        use_rms_norm=False,
        causal=False,
        rotary_emb_scale_base=None,
        num_experts=0,
    )
    table = _rope_table(raw)
    _check_rope(table, "default", "dynamic")
    own_code = "rotary_emb_fraction" in raw or "n_embd" in raw
    settings: dict[str, Any] = {
        "attention_bias": _flag(raw, "qkv_proj_bias", own_code),
        "mlp_bias": _flag(raw, "mlp_fc2_bias", own_code),
        "up_bias": _flag(raw, "mlp_fc1_bias", own_code),
        "rotary_base": _rope_number(table, "rope_theta", 1000.0),
        "rotary_interleaved": _flag(raw, "rotary_emb_interleaved", False),
        "max_positions": _size(raw, "max_position_embeddings", 2048),
    }
    factor: Any = table.get("factor", 0.0) if table["rope_type"] == "dynamic" else 0.0
    trained = settings["max_positions"]
    if own_code:
        settings |= _nomic_own_settings(raw)
        if "rope_theta" not in table:
            settings["rotary_base"] = _rope_number(raw, "rotary_emb_base", 10_000.0)
        factor = raw.get("rotary_scaling_factor") or factor
        trained = _size(raw, "max_trained_positions", 2048)
    if factor:
        settings["dynamic_stretch"] = _rope_number({"factor": factor}, "factor", 1.0)
        settings["trained_positions"] = trained
    return settings


def _nomic_own_settings(raw: Mapping[str, Any]) -> dict[str, Any]:
    _only(raw, activation_function="swiglu", rotary_emb_fraction=1.0)
    between = raw.get("intermediate_size")
    if "n_inner" in raw:  # that code rounds it up
        between = -(-_size(raw, "n_inner", 4 * _size(raw, "n_embd", 768)) // 256) * 256
    positions = _size(raw, "n_positions", 0)
    return {
        "activation": "silu",
        "intermediate_size": between,
        "head_bias": _flag(raw, "mlp_fc1_bias", True),
        "decoder_bias": _flag(raw, "mlp_fc1_bias", True),
        **({"max_positions": positions} if positions else {}),
    }


def _rope_exports(config: BertConfig) -> dict[str, Any]:
    table: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rotary_base}
    if config.rotary_stretch != 1:
        return {}  # as the file has it: transformers has no such angles
    if config.dynamic_stretch:
        table |= {"rope_type": "dynamic", "factor": config.dynamic_stretch}
    return {ROPE_TABLE: table}


def _gated_classes(name: str, **more: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Classes of a family that has none for answers."""
    classes = _classes(name, **more)
    del classes[f"{name}ForQuestionAnswering"]
    return classes


NOMIC_BERT = Family(
    prefix="nomic_bert.",
    config=SIZES,
    tensors={
        "bert.embed.words": "nomic_bert.embeddings.word_embeddings",
        "bert.embed.types": "nomic_bert.embeddings.token_type_embeddings",
        "bert.embed.norm": "nomic_bert.emb_ln",
        "bert.layers.{}.attention.qkv": "nomic_bert.encoder.layers.{}.attn.Wqkv",
        "bert.layers.{}.attention.out": "nomic_bert.encoder.layers.{}.attn.out_proj",
        "bert.layers.{}.attention_norm": "nomic_bert.encoder.layers.{}.norm1",
        "bert.layers.{}.up.dense": (
            "nomic_bert.encoder.layers.{}.mlp.fc12",
            "nomic_bert.encoder.layers.{}.mlp.fc11",
        ),
        "bert.layers.{}.down": "nomic_bert.encoder.layers.{}.mlp.fc2",
        "bert.layers.{}.norm": "nomic_bert.encoder.layers.{}.norm2",
    },
    heads={
        "pooled": {"heads.pooled.dense": "nomic_bert.pooler.dense"},
        "mlm": {
            "heads.mlm.dense": "cls.predictions.transform.dense",
            "heads.mlm.norm": "cls.predictions.transform.layer_norm",
            "heads.mlm.decoder": "cls.predictions.decoder",
        },
        "classify": {
            "heads.classify.pooler.dense": "nomic_bert.pooler.dense",
            "heads.classify.dense": "classifier",
        },
        **TOKENS,
    },
    architectures=_gated_classes("NomicBert", ForPreTraining=("mlm",)),
    harmless=re.compile(r"nomic_bert\..*\.inv_freq|cls\..*"),
    defaults={"activation": "silu", "gated": True, "dropout": 0.0},
    settings=_nomic_settings,
    second_bias="cls.predictions.bias",
    aliases={
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "intermediate_size": "n_inner",
        "layer_norm_eps": "layer_norm_epsilon",
        "hidden_dropout_prob": "resid_pdrop",
    },
    other_prefixes=("bert.",),
    exports=_rope_exports,
)


def _gte_settings(raw: Mapping[str, Any]) -> dict[str, Any]:
    """GTE's fields. Its own code knows one stretching of angles, which transformers has not."""
    _only(raw, layer_norm_type="layer_norm", logn_attention_scale=False, pack_qkv=True)
    table = _rope_table(raw)
    _check_rope(table, "default", "ntk")
    default = 10_000.0 if raw["model_type"] == "new" else 160_000.0
    stretch = _rope_number(table, "factor", 1.0) if table["rope_type"] == "ntk" else 1.0
    return {
        "rotary_base": _rope_number(table, "rope_theta", default),
        "rotary_stretch": stretch,
    }


def _gte(name: str, prefix: str) -> Family:
    """GTE under the names of its own code ("new") or those of transformers."""
    layer = f"{prefix}encoder.layer.{{}}."
    return Family(
        prefix=prefix,
        config=SIZES,
        tensors={
            "bert.embed.words": f"{prefix}embeddings.word_embeddings",
            "bert.embed.types": f"{prefix}embeddings.token_type_embeddings",
            "bert.embed.norm": f"{prefix}embeddings.LayerNorm",
            "bert.layers.{}.attention.qkv": f"{layer}attention.qkv_proj",
            "bert.layers.{}.attention.out": f"{layer}attention.o_proj",
            "bert.layers.{}.attention_norm": f"{layer}attn_ln",
            "bert.layers.{}.up.dense": f"{layer}mlp.up_gate_proj",
            "bert.layers.{}.down": f"{layer}mlp.down_proj",
            "bert.layers.{}.norm": f"{layer}mlp_ln",
        },
        heads={
            "pooled": {"heads.pooled.dense": f"{prefix}pooler.dense"},
            "mlm": {
                "heads.mlm.dense": "lm_head.dense",
                "heads.mlm.norm": "lm_head.norm",
                "heads.mlm.decoder": "lm_head.decoder",
            },
            "classify": {
                "heads.classify.pooler.dense": f"{prefix}pooler.dense",
                "heads.classify.dense": "classifier",
            },
            **TOKENS,
        },
        architectures=_gated_classes(name),
        harmless=re.compile(r"lm_head\..*"),
        defaults={
            "gated": True,
            "gate_first": True,
            "up_bias": False,
            "type_vocab_size": 1,
            "max_positions": 8192 if name == "Gte" else 2048,
            **({"mlm_activation": "gelu"} if name == "Gte" else {}),
        },
        settings=_gte_settings,
        positions="rope",
        exports=_rope_exports,
    )


def _decoder_layers(normed: str) -> dict[str, Entry]:
    """Llama's names, which decoders and encoders made of them share.

    `normed` is the norm before the feed-forward: what Llama calls the norm after attention is in
    Gemma a norm of the attention's result.
    """
    layer = "model.layers.{}."
    projections = tuple(f"{layer}self_attn.{part}_proj" for part in "qkv")
    return {
        "bert.embed.words": "model.embed_tokens",
        "bert.layers.{}.attention_norm": f"{layer}input_layernorm",
        "bert.layers.{}.attention.qkv": projections,
        "bert.layers.{}.attention.q": projections[0],  # where heads share keys and values
        "bert.layers.{}.attention.kv": projections[1:],
        "bert.layers.{}.attention.out": f"{layer}self_attn.o_proj",
        "bert.layers.{}.norm": layer + normed,
        "bert.layers.{}.up.dense": (f"{layer}mlp.gate_proj", f"{layer}mlp.up_proj"),
        "bert.layers.{}.down": f"{layer}mlp.down_proj",
        "bert.norm": "model.norm",
    }


QUERY_KEY_NORMS: dict[str, Entry] = {
    "bert.layers.{}.attention.query_norm": "model.layers.{}.self_attn.q_norm",
    "bert.layers.{}.attention.key_norm": "model.layers.{}.self_attn.k_norm",
}
DECODER_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "activation": "hidden_act",
    "max_positions": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
}
DECODER_DEFAULTS: dict[str, Any] = {
    "type_vocab_size": 0,
    "dropout": 0.0,
    "norm_first": True,
    "norm_kind": "rms",
    "embed_norm": False,
    "gated": True,
    "mlp_bias": False,
    "mlm_activation": "gelu",
    "mlm_dense": False,
}
# Decoders classify by the last token's state; the scores of words, which come after the layers
# that are run here, are left out.
DECODER_HEADS: dict[str, Table] = {
    "classify": {"heads.classify.dense": "score"},
    "tokens": {"heads.tokens.dense": "score"},
}


def _decoder_classes(name: str, *others: str) -> dict[str, tuple[str, ...]]:
    return {
        f"{name}ForSequenceClassification": ("classify",),
        f"{name}ForTokenClassification": ("tokens",),
        f"{name}Model": (),
        **dict.fromkeys(others, ()),
    }


def _head_counts(raw: Mapping[str, Any], kv_heads: int, width: int) -> dict[str, int]:
    """Heads of keys and values, and their width; 0: as many as the others, and their share."""
    return {
        "kv_heads": _size(raw, "num_key_value_heads", kv_heads),
        "head_width": _size(raw, "head_dim", width),
    }


def _named_layers(raw: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The layers that `layer_types` calls local; None if there is no such key."""
    return None if raw.get("layer_types") is None else _local_layers(raw)


def _qwen3_settings(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Qwen3's fields; a window counts the token itself, and hides what comes later."""
    table = _rope_table(raw)
    _check_rope(table, "default")
    layers = _count(raw, "num_hidden_layers", 0, 1000)
    local = ()
    if _flag(raw, "use_sliding_window", False) and raw.get("sliding_window") is not None:
        first: Any = raw.get("max_window_layers", 28)
        if type(first) is not int or first < 0:
            raise CheckpointError(f"config: max_window_layers is {first!r}, not a count")
        named = _named_layers(raw)
        local = tuple(range(first, layers)) if named is None else named
    return {
        "attention_bias": _flag(raw, "attention_bias", False),
        "rotary_base": _rope_number(table, "rope_theta", 10_000.0),
        "local_layers": local,
        "window": _size(raw, "sliding_window", 4096) - 1 if local else 0,
        **_head_counts(raw, 32, 128),
    }


QWEN3 = Family(
    prefix="model.",
    config=DECODER_SIZES,
    tensors=_decoder_layers("post_attention_layernorm") | QUERY_KEY_NORMS,
    heads=DECODER_HEADS,
    architectures=_decoder_classes("Qwen3", "Qwen3ForCausalLM"),
    harmless=re.compile(r"lm_head\..*"),
    defaults=DECODER_DEFAULTS
    | {
        "activation": "silu",
        "max_positions": 32_768,
        "norm_eps": 1e-6,
        "causal": True,
        "query_key_norm": True,
        "classify_dense": False,
    },
    settings=_qwen3_settings,
    heads_by_class=True,
)


def _gemma3_settings(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Gemma 3's fields. Two-way, as in EmbeddingGemma, half of the window lies on either side."""
    _only(raw, attn_logit_softcapping=None, final_logit_softcapping=None)
    counts = _head_counts(raw, 4, 256)
    scale = raw.get("query_pre_attn_scalar", 256)
    if scale != counts["head_width"]:
        raise CheckpointError(
            f"config: query_pre_attn_scalar {scale!r} is not supported, only the head's width "
            f"{counts['head_width']}"
        )
    key = "use_bidirectional_attention"
    two_way = raw.get(key) is not None and _flag(raw, key, False)
    local = _named_layers(raw)
    if local is None:
        interval = _size(raw, "sliding_window_pattern", _size(raw, "_sliding_window_pattern", 6))
        layers = range(_count(raw, "num_hidden_layers", 0, 1000))
        local = tuple(number for number in layers if (number + 1) % interval)
    window = _size(raw, "sliding_window", 4096)
    return {
        "attention_bias": _flag(raw, "attention_bias", False),
        "causal": not two_way,
        "rotary_base": _rotary_base(raw, "full_attention", GEMMA_ROPE),
        "local_rotary_base": _rotary_base(raw, "sliding_attention", GEMMA_ROPE),
        "local_layers": local,
        "window": (window // 2 if two_way else window - 1) if local else 0,
        **counts,
    }


GEMMA3 = Family(
    prefix="model.",
    config=DECODER_SIZES | {"activation": "hidden_activation"},
    tensors={
        **_decoder_layers("pre_feedforward_layernorm"),
        **QUERY_KEY_NORMS,
        "bert.layers.{}.attention_result_norm": "model.layers.{}.post_attention_layernorm",
        "bert.layers.{}.result_norm": "model.layers.{}.post_feedforward_layernorm",
    },
    heads=DECODER_HEADS,
    architectures=_decoder_classes("Gemma3Text", "Gemma3ForCausalLM"),
    harmless=re.compile(r"lm_head\..*"),
    defaults=DECODER_DEFAULTS
    | {
        "activation": "gelu_pytorch_tanh",
        "max_positions": 131_072,
        "norm_eps": 1e-6,
        "norm_kind": "rms_offset",
        "scaled_words": True,
        "branch_norms": True,
        "query_key_norm": True,
        "classify_dense": False,
    },
    settings=_gemma3_settings,
    heads_by_class=True,
)


def _eurobert_settings(raw: Mapping[str, Any]) -> dict[str, Any]:
    table = _rope_table(raw)
    _check_rope(table, "default")
    pooling = raw.get("classifier_pooling", "late")
    return {
        "attention_bias": _flag(raw, "attention_bias", False),
        "mlp_bias": _flag(raw, "mlp_bias", False),
        "decoder_bias": _flag(raw, "mlp_bias", False),
        "rotary_base": _rope_number(table, "rope_theta", 10_000.0),
        "classify_pooling": "cls" if pooling == "bos" else pooling,
        **_head_counts(raw, 0, 0),
    }


EUROBERT = Family(
    prefix="model.",
    config=DECODER_SIZES,
    tensors=_decoder_layers("post_attention_layernorm"),
    heads={
        "mlm": {"heads.mlm.decoder": "lm_head"},
        "classify": {
            "heads.classify.pooler.dense": "dense",
            "heads.classify.dense": "classifier",
        },
        **TOKENS,
    },
    architectures=_gated_classes("EuroBert"),
    harmless=re.compile(r"lm_head\..*"),
    defaults=DECODER_DEFAULTS | {"activation": "silu", "max_positions": 8192, "norm_eps": 1e-5},
    settings=_eurobert_settings,
    heads_by_class=True,
    tied=False,
)


def _jina_settings(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Jina's BERT: its code reads the activation of the gates from the feed-forward's kind."""
    if "qk-post-norm" in f"{raw.get('auto_map')} {raw.get('_name_or_path')}":
        raise CheckpointError(
            "config: jina-bert-v2-qk-post-norm is not supported: it normalizes queries and keys, "
            "and the attention's result twice"
        )
    kind = raw.get("feed_forward_type", "original")
    if not isinstance(kind, str) or kind not in JINA_GATES:
        raise CheckpointError(
            f"config: feed_forward_type {kind!r} is not supported; there are "
            f"{', '.join(JINA_GATES)}"
        )
    return {"activation": JINA_GATES[kind], "mlm_activation": raw.get("hidden_act", "gelu")}


JINA_GATES = {"geglu": "gelu", "reglu": "relu"}
JINA_BERT = Family(
    prefix="bert.",
    config=SIZES,
    tensors={
        **{name: entry for name, entry in _encoder("bert.").items() if "positions" not in name},
        "bert.layers.{}.up.dense": "bert.encoder.layer.{}.mlp.gated_layers",
        "bert.layers.{}.down": "bert.encoder.layer.{}.mlp.wo",
        "bert.layers.{}.norm": "bert.encoder.layer.{}.mlp.layernorm",
    },
    heads=BERT.heads,
    architectures=_classes("JinaBert"),
    harmless=BERT.harmless,
    defaults={"alibi": True, "gated": True, "up_bias": False},
    settings=_jina_settings,
    second_bias=BERT.second_bias,
    positions="alibi",
)


def _neobert_settings(raw: Mapping[str, Any]) -> dict[str, Any]:
    """NeoBERT's fields: its code takes two thirds of the feed-forward width, in steps of 8."""
    _only(raw, rms_norm=True, rope=True, ngpt=False)
    kind = raw.get("hidden_act", "SwiGLU")
    if not isinstance(kind, str) or kind.lower() != "swiglu":
        raise CheckpointError(f"config: hidden_act {kind!r} is not supported, only 'SwiGLU'")
    between = int(2 * _size(raw, "intermediate_size", 3072) / 3)
    return {"intermediate_size": -(-between // 8) * 8}


NEOBERT = Family(
    prefix="model.",
    config={
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "layers": "num_hidden_layers",
        "heads": "num_attention_heads",
        "intermediate_size": "intermediate_size",
        "max_positions": "max_length",
        "norm_eps": "norm_eps",
    },
    tensors={
        "bert.embed.words": "model.encoder",
        "bert.layers.{}.attention_norm": "model.transformer_encoder.{}.attention_norm",
        "bert.layers.{}.attention.qkv": "model.transformer_encoder.{}.qkv",
        "bert.layers.{}.attention.out": "model.transformer_encoder.{}.wo",
        "bert.layers.{}.norm": "model.transformer_encoder.{}.ffn_norm",
        "bert.layers.{}.up.dense": "model.transformer_encoder.{}.ffn.w12",
        "bert.layers.{}.down": "model.transformer_encoder.{}.ffn.w3",
        "bert.norm": "model.layer_norm",
    },
    heads={
        "mlm": {"heads.mlm.decoder": "decoder"},
        "classify": {
            "heads.classify.pooler.dense": "dense",
            "heads.classify.dense": "classifier",
        },
        **TOKENS,
    },
    architectures={
        "NeoBERTForSequenceClassification": ("classify",),
        "NeoBERTLMHead": ("mlm",),
        "NeoBERT": (),
    },
    harmless=re.compile(r"decoder\..*|model\.freqs_cis"),
    defaults=DECODER_DEFAULTS
    | {
        "activation": "silu",
        "mlm_activation": "tanh",
        "max_positions": 1024,
        "norm_eps": 1e-6,
        "attention_bias": False,
        "rotary_base": 10_000.0,
        "rotary_interleaved": True,
        "qkv_by_head": True,
    },
    settings=_neobert_settings,
    heads_by_class=True,
    tied=False,
    exports=lambda config: {"intermediate_size": config.intermediate_size * 3 // 2},
)


def _jina3_settings(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Jina's XLM-RoBERTa with rotary positions; transformers has other keys for the base."""
    table = _rope_table(raw)
    _check_rope(table, "default")
    default = raw.get("rotary_emb_base", 10_000.0)
    if raw["model_type"] == "jina_embeddings_v3":
        default = 20_000.0
    return {"rotary_base": _rope_number(table, "rope_theta", default)}


def _jina3(name: str) -> Family:
    """Jina's embeddings v3 under the classes of its own code or of transformers."""
    layer = "roberta.encoder.layers.{}."
    return Family(
        prefix="roberta.",
        config=SIZES,
        tensors={
            "bert.embed.words": "roberta.embeddings.word_embeddings",
            "bert.embed.types": "roberta.embeddings.token_type_embeddings",
            "bert.embed.norm": "roberta.emb_ln",
            "bert.layers.{}.attention.qkv": f"{layer}mixer.Wqkv",
            "bert.layers.{}.attention.out": f"{layer}mixer.out_proj",
            "bert.layers.{}.attention_norm": f"{layer}norm1",
            "bert.layers.{}.up.dense": f"{layer}mlp.fc1",
            "bert.layers.{}.down": f"{layer}mlp.fc2",
            "bert.layers.{}.norm": f"{layer}norm2",
        },
        heads={
            "pooled": {"heads.pooled.dense": "roberta.pooler.dense"},
            **LM_HEAD,
            **SPAN,
            **OWN_POOLER,
            **TOKENS,
        },
        architectures=_classes(name),
        harmless=re.compile(r"lm_head\..*"),
        defaults={
            "max_positions": 8194,
            "type_vocab_size": 1,
            "norm_eps": 1e-5,
            "mlm_activation": "gelu",
            "classify_activation": "tanh",
        },
        settings=_jina3_settings,
        second_bias="lm_head.bias",
        positions="rotary",
        exports=_rope_exports,
    )


FAMILIES = {
    "bert": BERT,
    "roberta": _roberta("Roberta"),
    "xlm-roberta": _roberta("XLMRoberta"),
    "camembert": _roberta("Camembert"),
    "distilbert": DISTILBERT,
    "albert": ALBERT,
    "electra": ELECTRA,
    "mpnet": MPNET,
    "deberta-v2": DEBERTA,
    "modernbert": MODERNBERT,
    "nomic_bert": NOMIC_BERT,
    "new": _gte("New", "new."),
    "gte": _gte("Gte", "gte."),
    "qwen3": QWEN3,
    "gemma3_text": GEMMA3,
    "eurobert": EUROBERT,
    "neobert": NEOBERT,
    "jina_embeddings_v3": _jina3("JinaEmbeddingsV3"),
}
# Families that share a `model_type` with another and are told from it by how positions enter.
VARIANTS = {
    ("bert", "alibi"): JINA_BERT,
    ("xlm-roberta", "rotary"): _jina3("XLMRoberta"),
}
# Prefixes that identify a family. ModernBERT's, `model.`, does not: any wrapper may use that word.
PREFIXES = {family.prefix for family in FAMILIES.values()} - {MODERNBERT.prefix}

# Families that people ask for and that do not run, with what they would need.
REFUSED = {
    "t5": "scores without a scale, a bias of distances that no position goes with, and the encoder "
    "of a model of two halves",
    "clip": "one of two towers, whose vector is that of the token that ends a text",
    "longformer": "tokens that see everything beside those that see a window, chosen by the task",
    "deberta": "queries, keys and values of one product, in which only two of them have a bias",
    "bart": "a decoder that reads the states of the encoder",
}

ACTIVATIONS = {  # name in transformers → name here
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}
ACTIVATION_FIELDS = {"activation", "mlm_activation"}
PROBLEMS = {
    "single_label_classification": "single_label",
    "multi_label_classification": "multi_label",
    "regression": "regression",
}
# Any other value of these keys would change results.
REQUIRED = {
    "is_decoder": False,
    "add_cross_attention": False,
}


def family_of(raw: Mapping[str, Any]) -> Family:
    """The family that a configuration names; raises if the model cannot run here."""
    model_type = raw.get("model_type") or "bert"  # Google's configurations have none
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        reason = REFUSED.get(model_type) if isinstance(model_type, str) else None
        reason = f": it needs {reason}" if reason else ""
        raise CheckpointError(
            f"config: model_type {model_type!r} does not run here{reason}; those that do: "
            f"{', '.join(FAMILIES)}"
        )
    positions: Any = raw.get("position_embedding_type")
    family = FAMILIES[model_type]
    if isinstance(positions, str):
        family = VARIANTS.get((model_type, positions), family)
    _only(raw, position_embedding_type=family.positions, **REQUIRED)
    fields = family.variant(raw)
    return replace(family, **fields) if fields else family


def encoder_modules(family: Family) -> set[str]:
    """The first parts of the encoder's module names below the family's prefix."""
    modules = [module for entry in table(family).values() for module in modules_of(entry)]
    return {module.split(".")[1] for module in modules if module.startswith(family.prefix)}


def table(family: Family, tied: bool = False) -> dict[str, Entry]:
    """All templates of a family; with `tied`, words are scored by their own embeddings."""
    result = dict(family.tensors)
    for entries in family.heads.values():
        result.update(entries)
    if tied:
        result["heads.mlm.decoder.weight"] = f"{result['bert.embed.words']}.weight"
    return result


def sources(name: str, table: Table) -> tuple[str, ...]:
    """The canonical foreign tensors that, concatenated row by row, are our tensor `name`."""
    if name in table:
        return modules_of(table[name])
    module, kind = name.rsplit(".", 1)
    layer = re.search(r"\.layers\.(\d+)\.", module)
    if layer is None or module in table:
        return tuple(f"{part}.{kind}" for part in modules_of(table[module]))
    template = module.replace(layer[0], ".layers.{}.")
    return tuple(f"{part}.{kind}".format(layer[1]) for part in modules_of(table[template]))


def decoder_source(kind: str, family: Family) -> str | None:
    """The canonical tensor, weight or bias, that scores words; None if the family scores none."""
    return source(f"heads.mlm.decoder.{kind}", family) if "mlm" in family.heads else None


def source(name: str, family: Family) -> str:
    """The canonical foreign tensor that is our tensor `name`; for names with one source only."""
    return sources(name, table(family))[0]


def modules_of(entry: Entry) -> tuple[str, ...]:
    """The foreign modules of a template, one or several."""
    return (entry,) if isinstance(entry, str) else entry


def siblings(module: str, ours: str, sibling: str) -> tuple[str, ...]:
    """The foreign modules of one of ours, by a foreign module that is another; empty if unknown.

    For `….layer.0.attention.output.dense`, which is BERT's `attention.out`, its sibling
    `attention.qkv` is `….layer.0.attention.self.query` and two more.
    """
    for family in FAMILIES.values():
        for name, entry in family.tensors.items():
            others = family.tensors.get(name.removesuffix(ours) + sibling)
            if not name.endswith(f".{ours}") or others is None:
                continue
            ending = _in_layer(modules_of(entry)[0], family)
            if f".{module}".endswith(f".{ending}"):
                root = module.removesuffix(ending)
                return tuple(root + _in_layer(other, family) for other in modules_of(others))
    return ()


def _in_layer(template: str, family: Family) -> str:
    """What follows the number of the layer in a template, or the family's prefix."""
    return re.split(r"\.(?:\d+|\{\})\.", template.removeprefix(family.prefix))[-1]
