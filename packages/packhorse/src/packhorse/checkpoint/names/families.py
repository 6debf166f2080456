"""The tables: what each family of models calls its configuration keys, tensors, heads and classes.

A template maps one of our modules to the foreign module that holds its weight and bias; `{}` is the
layer; a tuple of three is joined row by row (queries, keys, values are one product here). There is
one model and no class for a family: what is not a name is an axis of `BertConfig`, and `defaults`
says where a family stands on it. To add a family, fill in a `Family`.

BERT (Devlin et al. 2018), RoBERTa (Liu et al. 2019) with XLM-RoBERTa and CamemBERT, DistilBERT
(Sanh et al. 2019), ELECTRA (Clark et al. 2020), MPNet (Song et al. 2020), ModernBERT (Warner et al.
2024); names as transformers writes them today.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from packhorse.checkpoint.names.family import (
    LM_HEAD,
    OWN_POOLER,
    SIZES,
    SPAN,
    TOKENS,
    Family,
    Table,
    classes,
)
from packhorse.checkpoint.names.newer import MODERNBERT, MPNET
from packhorse.errors import CheckpointError


def _encoder(prefix: str) -> dict[str, str | tuple[str, ...]]:
    """BERT's own names, which most families kept."""
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
    architectures=classes(
        "Bert", ForPreTraining=("mlm", "nsp"), ForNextSentencePrediction=("nsp",)
    ),
    # What is left over of a pretraining head comes after the encoder: no result can miss it.
    harmless=re.compile(r"bert\.embeddings\.position_ids|cls\..*"),
    second_bias="cls.predictions.bias",
)


def _roberta(name: str) -> Family:
    """RoBERTa, and those that differ from it in what their classes are called."""
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
        architectures=classes(name),
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
    architectures=classes("DistilBert"),
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
    architectures=classes("Electra", ForPreTraining=("replaced",)),
    harmless=re.compile(
        # A checkpoint of the pretraining holds both, the generator being a model of its own.
        r"electra\.embeddings\.position_ids|discriminator_predictions\..*"
        r"|generator(_predictions|_lm_head)?\..*"
    ),
    defaults={"embedding_size": 128, "mlm_activation": "gelu", "classify_activation": "gelu"},
)

FAMILIES = {
    "bert": BERT,
    "roberta": _roberta("Roberta"),
    "xlm-roberta": _roberta("XLMRoberta"),
    "camembert": _roberta("Camembert"),
    "distilbert": DISTILBERT,
    "electra": ELECTRA,
    "mpnet": MPNET,
    "modernbert": MODERNBERT,
}
# By which a family is told where nothing says; ModernBERT's is a word that any wrapper may use.
PREFIXES = {family.prefix for family in FAMILIES.values()} - {MODERNBERT.prefix}


ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}
ACTIVATION_KEYS = {"activation", "mlm_activation"}
PROBLEMS = {
    "single_label_classification": "single_label",
    "multi_label_classification": "multi_label",
    "regression": "regression",
}
# Anything else would change the result.
REQUIRED = {
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "add_cross_attention": False,
}


def family_of(raw: Mapping[str, Any]) -> Family:
    """The family that a configuration names, if all that it asks of it runs here."""
    kind = raw.get("model_type") or "bert"  # the first checkpoints of BERT do not say
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise CheckpointError(
            f"config: model_type {kind!r} does not run here; those that do: {', '.join(FAMILIES)}"
        )
    for key, good in REQUIRED.items():
        if raw.get(key, good) not in (good, None):
            raise CheckpointError(f"config: {key} {raw[key]!r} is not supported, only {good!r}")
    return FAMILIES[kind]


def encoder_modules(family: Family) -> set[str]:
    """The first names below the family's prefix."""
    every = [module for entry in table(family).values() for module in parts(entry)]
    return {name.split(".")[1] for name in every if name.startswith(family.prefix)}


def table(family: Family, tied: bool = False) -> dict[str, str | tuple[str, ...]]:
    """Every template of a family; with `tied`, the words are scored by their own embeddings."""
    result = dict(family.tensors)
    for entries in family.heads.values():
        result.update(entries)
    if tied:
        result["heads.mlm.decoder.weight"] = f"{result['bert.embed.words']}.weight"
    return result


def sources(ours: str, table: Table) -> tuple[str, ...]:
    """The canonical foreign tensors that, joined row by row, are our tensor `ours`."""
    if ours in table:
        return parts(table[ours])
    module, kind = ours.rsplit(".", 1)
    layer = re.search(r"\.layers\.(\d+)\.", module)
    if layer is None:
        return tuple(f"{part}.{kind}" for part in parts(table[module]))
    template = module.replace(layer[0], ".layers.{}.")
    return tuple(f"{part}.{kind}".format(layer[1]) for part in parts(table[template]))


def source(ours: str, family: Family) -> str:
    """The one foreign tensor that is ours."""
    return sources(ours, table(family))[0]


def parts(entry: str | tuple[str, ...]) -> tuple[str, ...]:
    """A template's modules, one or several."""
    return (entry,) if isinstance(entry, str) else entry
