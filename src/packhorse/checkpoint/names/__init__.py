"""The only place where foreign names live: configuration keys, tensors, heads and architectures.

A reader returns a checkpoint as it found it; here it gets our names, and a writer gets foreign ones
back from the same tables. A template maps one of our modules to the foreign module that holds its
weight and bias; `{}` is the layer; a tuple of three is joined row by row (queries, keys, values are
one product here). A family of models is one `Family`: to add one, fill in its tables.

Canonical foreign names are those of the class with heads, as transformers writes them today; what
differs from file to file (a prefix left off, `gamma` and `beta`, the bias of the word scores under
two names) is evened out by `canonical`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from packhorse.errors import CheckpointError
from packhorse.model.config import BertConfig

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


BERT = Family(
    prefix="bert.",
    config={
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
    },
    tensors={
        "bert.embed.words": "bert.embeddings.word_embeddings",
        "bert.embed.positions": "bert.embeddings.position_embeddings",
        "bert.embed.types": "bert.embeddings.token_type_embeddings",
        "bert.embed.norm": "bert.embeddings.LayerNorm",
        "bert.layers.{}.attention.qkv": (
            "bert.encoder.layer.{}.attention.self.query",
            "bert.encoder.layer.{}.attention.self.key",
            "bert.encoder.layer.{}.attention.self.value",
        ),
        "bert.layers.{}.attention.out": "bert.encoder.layer.{}.attention.output.dense",
        "bert.layers.{}.attention_norm": "bert.encoder.layer.{}.attention.output.LayerNorm",
        "bert.layers.{}.up.dense": "bert.encoder.layer.{}.intermediate.dense",
        "bert.layers.{}.down": "bert.encoder.layer.{}.output.dense",
        "bert.layers.{}.norm": "bert.encoder.layer.{}.output.LayerNorm",
    },
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
        "span": {"heads.span.dense": "qa_outputs"},
        "classify": {
            "heads.classify.pooler.dense": "bert.pooler.dense",
            "heads.classify.dense": "classifier",
        },
        "tokens": {"heads.tokens.dense": "classifier"},
    },
    # The first whose heads a model has is the one it is written as.
    architectures={
        "BertForSequenceClassification": ("classify",),
        "BertForTokenClassification": ("tokens",),
        "BertForQuestionAnswering": ("span",),
        "BertForPreTraining": ("mlm", "nsp"),
        "BertForMaskedLM": ("mlm",),
        "BertForNextSentencePrediction": ("nsp",),
        "BertModel": (),
    },
    # What is left over of a pretraining head comes after the encoder: no result can miss it.
    harmless=re.compile(r"bert\.embeddings\.position_ids|cls\..*"),
)

FAMILIES = {"bert": BERT}


@dataclass(frozen=True)
class Found:
    """A checkpoint as it was read, its tensors under canonical names."""

    raw: dict[str, Any]
    family: Family
    tensors: dict[str, Tensor]
    spelling: dict[str, str]  # canonical name → the name in the file

    def spell(self, name: str) -> str:
        """The name in the file, or what it would be."""
        if name in self.spelling:
            return self.spelling[name]
        prefixed = any(theirs.startswith(self.family.prefix) for theirs in self.spelling.values())
        return name if prefixed else name.removeprefix(self.family.prefix)


ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}
# Anything else would change the result.
REQUIRED = {
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "add_cross_attention": False,
}
# Not written back: of the file that was read, or a path to code.
FORGOTTEN = ("_name_or_path", "auto_map", "dtype", "torch_dtype", "transformers_version")
PROBLEMS = {
    "single_label_classification": "single_label",
    "multi_label_classification": "multi_label",
    "regression": "regression",
}
DECODER_WEIGHT = "cls.predictions.decoder.weight"
DECODER_BIAS = "cls.predictions.decoder.bias"
OLD_DECODER_BIAS = "cls.predictions.bias"


def canonical(raw: dict[str, Any], tensors: dict[str, Tensor]) -> Found:
    """Give the tensors their canonical names; `tensors` is emptied, so that none is held twice."""
    family = _family(raw)
    spelling = _spelling(tensors, family)
    renamed = {name: tensors.pop(theirs) for name, theirs in spelling.items()}
    return Found(raw, family, renamed, spelling)


def _family(raw: Mapping[str, Any]) -> Family:
    kind = raw.get("model_type") or "bert"  # the first checkpoints of BERT do not say
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise CheckpointError(
            f"config: model_type {kind!r} does not run here; those that do: {', '.join(FAMILIES)}"
        )
    for key, good in REQUIRED.items():
        if raw.get(key, good) not in (good, None):
            raise CheckpointError(f"config: {key} {raw[key]!r} is not supported, only {good!r}")
    return FAMILIES[kind]


def _spelling(names: Collection[str], family: Family) -> dict[str, str]:
    encoder = {name.split(".")[1] for name in _modules(family) if name.startswith(family.prefix)}
    bare = not any(name.startswith(family.prefix) for name in names)
    result: dict[str, str] = {}
    for name in names:
        new = name.replace("LayerNorm.gamma", "LayerNorm.weight")
        new = new.replace("LayerNorm.beta", "LayerNorm.bias")
        if bare and new.split(".")[0] in encoder:
            new = family.prefix + new
        if new == OLD_DECODER_BIAS and DECODER_BIAS not in names:
            new = DECODER_BIAS
        if new in result:
            raise CheckpointError(f"{name} and {result[new]} are two names of one tensor")
        result[new] = name
    return result


def _modules(family: Family) -> list[str]:
    return [part for entry in table(family).values() for part in _parts(entry)]


def config(found: Found) -> BertConfig:
    """Our configuration; keys we do not know are ignored."""
    keys = found.family.config
    values = {ours: found.raw[key] for ours, key in keys.items() if key in found.raw}
    for ours in ("vocab_size", "hidden_size", "layers", "heads", "intermediate_size"):
        if ours not in values:
            raise CheckpointError(f"config: {keys[ours]} is missing")
    for ours in ("norm_eps", "dropout"):
        if ours in values and type(values[ours]) not in (int, float):
            raise CheckpointError(f"config: {keys[ours]} {values[ours]!r} is not a number")
    activation = values.get("activation", "gelu")
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise CheckpointError(
            f"config: {keys['activation']} {activation!r} is unknown; "
            f"there are {', '.join(ACTIVATIONS)}"
        )
    result = BertConfig(**{**values, "activation": ACTIVATIONS[activation]})
    if result.layers > len(found.tensors):  # before a thousand layers are built to find out
        raise CheckpointError(
            f"config: {result.layers} layers in a file of {len(found.tensors)} tensors"
        )
    return result


def heads(found: Found) -> tuple[str, ...]:
    """The heads to build: those the architecture promises and those whose tensors are all there.

    `classifier` on a pooler is a head on sequences, otherwise on tokens, unless the architecture
    says which: old token classifiers keep a pooler that they do not use.
    """
    promised, names = _promised(found), set(found.tensors)
    pooled = _needed(found.family.heads["pooled"]) <= names
    on_sequences = "classify" in promised or (pooled and "tokens" not in promised)
    other = "tokens" if on_sequences else "classify"
    return tuple(
        head
        for head, entries in found.family.heads.items()
        if head in promised or (head != other and _needed(entries) <= names)
    )


def _promised(found: Found) -> set[str]:
    known = found.family.architectures
    said = found.raw.get("architectures") or []
    architectures = said if isinstance(said, list) else [said]
    for name in architectures:
        if not isinstance(name, str) or name not in known:
            raise CheckpointError(
                f"config: architecture {name!r} does not run here; "
                f"those that do: {', '.join(known)}"
            )
    return {head for name in architectures for head in known[name]}


def _needed(entries: Table) -> set[str]:
    modules = [module for entry in entries.values() for module in _parts(entry)]
    every = {f"{module}.{kind}" for module in modules for kind in ("weight", "bias")}
    return every - {DECODER_WEIGHT}  # which may be tied to the word embeddings


def labels(found: Found, heads: Collection[str]) -> tuple[str, ...]:
    """The classifier's labels by number; where they have no names, those transformers gives."""
    head = next((head for head in ("classify", "tokens") if head in heads), None)
    if head is None:
        return ()
    if named := _named_labels(found.raw):
        return named
    count = found.raw.get("num_labels", 2)
    classifier = f"{found.family.heads[head][f'heads.{head}.dense']}.weight"
    if "num_labels" not in found.raw and classifier in found.tensors:
        count = len(found.tensors[classifier])
    if type(count) is not int or not 1 <= count <= 1_000_000:
        raise CheckpointError(f"config: num_labels {count!r} is not a count of labels")
    return tuple(f"LABEL_{number}" for number in range(count))


def _named_labels(raw: Mapping[str, Any]) -> tuple[str, ...]:
    named = raw.get("id2label") or {}
    try:
        numbered = sorted((int(number), str(label)) for number, label in named.items())
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError("config: id2label does not map numbers to names") from error
    if [number for number, _ in numbered] != list(range(len(numbered))):
        raise CheckpointError("config: id2label does not number its labels from 0 without a gap")
    return tuple(label for _, label in numbered)


def problem(found: Found, labels: Collection[str]) -> str:
    """What a classifier's outputs mean; a single output without a word on it is a regression."""
    said = found.raw.get("problem_type")
    if said is None:
        return "regression" if len(labels) == 1 else "single_label"
    if not isinstance(said, str) or said not in PROBLEMS:
        raise CheckpointError(
            f"config: problem_type {said!r} is unknown; there are {', '.join(PROBLEMS)}"
        )
    return PROBLEMS[said]


def tied(found: Found) -> bool:
    """Are words scored by their own embeddings? A copy of these in the file is then dropped.

    Scores that differ from the embeddings are used as they are, whatever the configuration says.
    """
    if found.raw.get("tie_word_embeddings", True) is False:
        return False
    words = found.tensors.get(_parts(table(found.family)["bert.embed.words"])[0] + ".weight")
    scores = found.tensors.get(DECODER_WEIGHT)
    if scores is None:
        return True
    if words is None or words.dtype != scores.dtype or not torch.equal(words, scores):
        return False
    del found.tensors[DECODER_WEIGHT]
    return True


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
        return _parts(table[ours])
    module, kind = ours.rsplit(".", 1)
    layer = re.search(r"\.layers\.(\d+)\.", module)
    if layer is None:
        return tuple(f"{part}.{kind}" for part in _parts(table[module]))
    template = module.replace(layer[0], ".layers.{}.")
    return tuple(f"{part}.{kind}".format(layer[1]) for part in _parts(table[template]))


def _parts(entry: str | tuple[str, ...]) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else entry


def export(
    raw: Mapping[str, Any], config: BertConfig, state: Mapping[str, Tensor], heads: Collection[str]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The way back: a foreign configuration, on top of the one once read, and foreign tensors."""
    family = _family(raw)
    words, scores = state["bert.embed.words.weight"], state.get("heads.mlm.decoder.weight")
    tied = scores is None or scores.data_ptr() == words.data_ptr()
    architecture = next(
        name for name, needed in family.architectures.items() if set(needed) <= set(heads)
    )
    foreign = {key: value for key, value in raw.items() if key not in FORGOTTEN}
    foreign |= {key: getattr(config, ours) for ours, key in family.config.items()}
    foreign |= {
        family.config["activation"]: _reverse(ACTIVATIONS)[config.activation],
        "model_type": next(kind for kind, known in FAMILIES.items() if known is family),
        "architectures": [architecture],
        "tie_word_embeddings": tied,
        "torch_dtype": str(words.dtype).removeprefix("torch."),
    }
    tensors = _export_tensors(state, family, tied)
    if not family.architectures[architecture]:  # an encoder alone has no prefix
        tensors = {name.removeprefix(family.prefix): tensor for name, tensor in tensors.items()}
    return foreign, tensors


def export_labels(labels: Collection[str], problem: str) -> dict[str, Any]:
    """The foreign keys of labels and problem."""
    return {
        "id2label": {str(number): label for number, label in enumerate(labels)},
        "label2id": {label: number for number, label in enumerate(labels)},
        "problem_type": _reverse(PROBLEMS)[problem],
    }


def _export_tensors(state: Mapping[str, Tensor], family: Family, tied: bool) -> dict[str, Tensor]:
    templates, result = table(family, tied), {}
    for ours, tensor in state.items():
        parts = sources(ours, templates)
        result.update(zip(parts, tensor.chunk(len(parts)), strict=True))
    if DECODER_BIAS in result:
        # Where the scores are not tied, transformers wants the bias under both names.
        bias = result.pop(DECODER_BIAS) if tied else result[DECODER_BIAS].clone()
        result[OLD_DECODER_BIAS] = bias
    return result


def _reverse(mapping: Mapping[str, str]) -> dict[str, str]:
    """Ours → theirs, the first of theirs where there are several."""
    return {ours: theirs for theirs, ours in reversed(list(mapping.items()))}
