"""Translate TensorFlow's variable names to canonical names and back.

Google's BERT and ELECTRA name a module by its variable scopes: slashes for dots, `layer_0` for
`layer.0`, `kernel` for a dense weight, which is [in, out] there and [out, in] here, `gamma` and
`beta` for a norm, nothing at all for an embedding table. The heads have irregular names, listed in
`HEADS`; their `output_weights` are [out, in] as ours are.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from torch import Tensor

from packhorse.errors import CheckpointError

HEADS = {
    "cls/predictions/output_bias": "cls.predictions.bias",
    "cls/predictions/output_weights": "cls.predictions.decoder.weight",
    "cls/seq_relationship/output_weights": "cls.seq_relationship.weight",
    "cls/seq_relationship/output_bias": "cls.seq_relationship.bias",
    "cls/squad/output_weights": "qa_outputs.weight",
    "cls/squad/output_bias": "qa_outputs.bias",
    "output_weights": "classifier.weight",
    "output_bias": "classifier.bias",
    "discriminator_predictions/dense_1/kernel": "discriminator_predictions.dense_prediction.weight",
    "discriminator_predictions/dense_1/bias": "discriminator_predictions.dense_prediction.bias",
}
FROM_HEADS = {canonical: variable for variable, canonical in HEADS.items()}
NORM = re.compile(r"layer_?norm$", re.IGNORECASE)
TABLE = re.compile(r"_embeddings$")
ENCODER = re.compile(r"((?:.*/)?)(bert|electra)/embeddings/word_embeddings")


def scope(names: Collection[str]) -> str:
    """What precedes `bert/`, with its slash: graphs may be imported under a prefix."""
    prefixes = [match[1] for name in names if (match := ENCODER.fullmatch(name))]
    return prefixes[0] if len(prefixes) == 1 else ""


def from_tensorflow(
    tensors: dict[str, Tensor], prefix: str
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors by canonical name (kernels as transposed views), and each one's name in the file.

    `tensors` is emptied, so that none is held twice; `prefix` is their scope.
    """
    result: dict[str, Tensor] = {}
    called: dict[str, str] = {}
    for name in list(tensors):
        canonical, transposed = canonical_name(name.removeprefix(prefix))
        if canonical in called:
            raise CheckpointError(f"{name} and {called[canonical]} are two names of one tensor")
        tensor = tensors.pop(name)
        result[canonical] = tensor.T if transposed and tensor.ndim == 2 else tensor
        called[canonical] = name
    return result, called


def to_tensorflow(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by the names of TensorFlow's variables, kernels as transposed views."""
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        variable, transposed = variable_name(name)
        result[variable] = tensor.T if transposed else tensor
    return result


def canonical_name(name: str) -> tuple[str, bool]:
    """The canonical name of a variable, and whether its tensor has to be transposed."""
    if name in HEADS:
        return HEADS[name], name.endswith("/kernel")
    module, _, kind = re.sub(r"/layer_(\d+)/", r"/layer/\1/", name).rpartition("/")
    module = module.replace("/", ".")
    if TABLE.search(kind):
        return f"{module}.{kind}.weight", False
    attribute = {"kernel": "weight", "gamma": "weight", "beta": "bias"}.get(kind, kind)
    return f"{module}.{attribute}" if module else attribute, kind == "kernel"


def variable_name(name: str) -> tuple[str, bool]:
    """The variable of a canonical name, and whether its tensor has to be transposed."""
    if name in FROM_HEADS:
        return FROM_HEADS[name], FROM_HEADS[name].endswith("/kernel")
    module, _, kind = name.rpartition(".")
    scoped = re.sub(r"/layer/(\d+)/", r"/layer_\1/", module.replace(".", "/") + "/")
    if TABLE.search(module) and kind == "weight":
        return scoped[:-1], False
    if NORM.search(module):
        return scoped + {"weight": "gamma", "bias": "beta"}[kind], False
    return scoped + {"weight": "kernel"}.get(kind, kind), kind == "weight"
