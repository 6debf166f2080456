"""The encoder families of transformers that Packhorse supports, and how they number positions.

A literal table, and not a guess from the code of a model: one that mixes tokens outside its
attention (a convolution, a relative position bias) would silently return wrong numbers for a flat
batch. Each name here is tested against transformers' own attention, padded and flat.
"""

from __future__ import annotations

from typing import Any

# By `config.model_type`: whether positions start after the padding id (as in fairseq), or at 0.
AFTER_PADDING = {
    "albert": False,
    "bert": False,
    "camembert": True,
    "data2vec-text": True,
    "distilbert": False,
    "electra": False,
    "ernie": False,
    "eurobert": False,
    "gte": False,
    "jina_embeddings_v3": False,
    "modernbert": False,
    "nomic_bert": False,
    "roberta": True,
    "roberta-prelayernorm": True,
    "xlm-roberta": True,
    "xlm-roberta-xl": True,
}


def is_family(config: Any) -> bool:
    """Return whether Packhorse supports this encoder."""
    return config.model_type in AFTER_PADDING


def unknown_family(name: str) -> str:
    """Return the error message for an encoder that is not supported."""
    known = ", ".join(sorted(AFTER_PADDING))
    return f"the attention of {name!r} cannot be replaced; Packhorse supports {known}"
