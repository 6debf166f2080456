"""The encoders of transformers that Packhorse serves, and how each numbers its positions.

A literal table, and not a guess from the code of a model: one that mixes tokens outside its
attention (a convolution, a bias by distance) would answer wrong numbers in silence where its batch
is flat. Each name here is tested against transformers' own attention, padded and flat.
"""

from __future__ import annotations

from typing import Any

# By `config.model_type`: do positions begin after the padding id (fairseq's way), or at 0?
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
    """Is it an encoder that Packhorse serves?"""
    return config.model_type in AFTER_PADDING


def unknown_family(name: str) -> str:
    """What to say of any other."""
    known = ", ".join(sorted(AFTER_PADDING))
    return f"the attention of {name!r} cannot be replaced; Packhorse serves {known}"
