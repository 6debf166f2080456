"""What a table of names is: the fields of a family, and the entries that several families share."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Table = Mapping[str, str | tuple[str, ...]]


@dataclass(frozen=True)
class Family:
    """The tables of one `model_type`."""

    prefix: str  # of the encoder's tensors; files of a bare encoder leave it off
    config: dict[str, str]
    tensors: Table
    heads: dict[str, Table]
    architectures: dict[str, tuple[str, ...]]  # and the heads each must have
    harmless: re.Pattern[str]  # tensors that nothing here needs and that change no result
    # Of our configuration, where it is not BERT's and the file does not say.
    defaults: dict[str, Any] = field(default_factory=dict)
    second_bias: str | None = None  # another name of the bias of the word scores
    after_padding: bool = False  # positions are numbered from `pad_token_id` + 1
    padding: int | None = None  # that id, where the family's code has it whatever is configured
    # What several keys say together, or no key of ours.
    axes: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda raw: {}
    # Heads share their names: only the class says which they are.
    heads_by_class: bool = False


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
# RoBERTa, ELECTRA and MPNet: a classifier with a pooler of its own.
OWN_POOLER: dict[str, Table] = {
    "classify": {
        "heads.classify.pooler.dense": "classifier.dense",
        "heads.classify.dense": "classifier.out_proj",
    }
}


def classes(name: str, **others: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Classes by their heads; the first whose heads a model has is the one it is written as."""
    return {
        f"{name}ForSequenceClassification": ("classify",),
        f"{name}ForTokenClassification": ("tokens",),
        f"{name}ForQuestionAnswering": ("span",),
        **{f"{name}{ending}": heads for ending, heads in others.items()},
        f"{name}ForMaskedLM": ("mlm",),
        f"{name}Model": (),
    }
