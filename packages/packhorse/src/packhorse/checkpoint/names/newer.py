"""The tables of MPNet (Song et al. 2020) and ModernBERT (Warner et al. 2024); see `families`."""

from __future__ import annotations

import re

from packhorse.checkpoint.names import axes
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

MPNET = Family(
    prefix="mpnet.",
    config={ours: key for ours, key in SIZES.items() if ours != "type_vocab_size"},
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
    architectures=classes("MPNet"),
    harmless=re.compile(r"mpnet\.embeddings\.position_ids|lm_head\..*"),
    defaults={"type_vocab_size": 0, "mlm_activation": "gelu", "classify_activation": "tanh"},
    second_bias="lm_head.bias",
    after_padding=True,
    padding=1,
    axes=axes.mpnet,
)


def _modern_head(head: str, part: str) -> dict[str, Table]:
    """All but the word scores have these names, whatever they are for."""
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
    architectures=classes("ModernBert"),
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
    axes=axes.modernbert,
    heads_by_class=True,
)
