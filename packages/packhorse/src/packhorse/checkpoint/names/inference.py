"""The configuration of a BERT as the shapes of its tensors show it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from packhorse.checkpoint.names.families import BERT, PREFIXES

# For each key of the configuration a tensor's name, after any prefix, and the side that has it.
SIZES = {
    "vocab_size": ("embeddings.word_embeddings.weight", 0),
    "hidden_size": ("embeddings.word_embeddings.weight", 1),
    "intermediate_size": ("encoder.layer.0.intermediate.dense.weight", 0),
    "max_position_embeddings": ("embeddings.position_embeddings.weight", 0),
    "type_vocab_size": ("embeddings.token_type_embeddings.weight", 0),
}
LAYER = re.compile(r"(?:.*\.)?encoder\.layer\.(\d{1,4})\.")
# Modules that no BERT has: another family's name, and ELECTRA's projection.
FOREIGN = PREFIXES - {BERT.prefix} | {"embeddings_project."}


def infer(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """All but the number of heads; empty where these are not the tensors of a BERT.

    RoBERTa and ELECTRA have the same shapes and other constants: their prefix gives them away, or
    where a bare encoder left it off, a single type of tokens.
    """
    if any(f".{module}" in f".{name}" for name in tensors for module in FOREIGN):
        return {}
    numbers = [int(match[1]) for name in tensors if (match := LAYER.match(name))]
    shown: dict[str, Any] = {
        "model_type": "bert",
        "num_hidden_layers": max(numbers, default=-1) + 1,
    }
    for key, (ending, side) in SIZES.items():
        shapes = [t.shape for name, t in tensors.items() if f".{name}".endswith(f".{ending}")]
        if len(shapes) != 1 or len(shapes[0]) != 2:
            return {}
        shown[key] = shapes[0][side]
    return shown if numbers and shown["type_vocab_size"] != 1 else {}
