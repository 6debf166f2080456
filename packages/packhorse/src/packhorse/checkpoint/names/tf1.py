"""TensorFlow's spelling of the canonical names, both ways.

Google's BERT and ELECTRA spell a module by its variable scopes: slashes for dots, `layer_0` for
`layer.0`, `kernel` for a dense weight, which lies [in, out] there and [out, in] here, `gamma` and
`beta` for a norm, nothing at all for an embedding table. Only the heads have names of their own;
they stand in `HEADS`, and their `output_weights` lie [out, in] as ours do.
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
FROM_HEADS = {theirs: ours for ours, theirs in HEADS.items()}
NORM = re.compile(r"layer_?norm$", re.IGNORECASE)
TABLE = re.compile(r"_embeddings$")
ENCODER = re.compile(r"((?:.*/)?)(bert|electra)/embeddings/word_embeddings")


def scope(names: Collection[str]) -> str:
    """What stands before `bert/` throughout, with its slash: graphs are imported under a prefix."""
    found = [match[1] for name in names if (match := ENCODER.fullmatch(name))]
    return found[0] if len(found) == 1 else ""


def from_tensorflow(
    tensors: dict[str, Tensor], prefix: str
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors by canonical spelling (kernels as transposed views), and what each was called.

    `tensors` is emptied, so that none is held twice; `prefix` is their scope.
    """
    result: dict[str, Tensor] = {}
    called: dict[str, str] = {}
    for name in list(tensors):
        ours, transposed = spell_ours(name.removeprefix(prefix))
        if ours in called:
            raise CheckpointError(f"{name} and {called[ours]} are two names of one tensor")
        tensor = tensors.pop(name)
        result[ours] = tensor.T if transposed and tensor.ndim == 2 else tensor
        called[ours] = name
    return result, called


def to_tensorflow(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The way back."""
    result = {}
    for name, tensor in tensors.items():
        theirs, transposed = spell_theirs(name)
        result[theirs] = tensor.T if transposed else tensor
    return result


def spell_ours(name: str) -> tuple[str, bool]:
    """The canonical name of a variable, and whether its tensor is to be transposed."""
    if name in HEADS:
        return HEADS[name], name.endswith("/kernel")
    module, _, kind = re.sub(r"/layer_(\d+)/", r"/layer/\1/", name).rpartition("/")
    module = module.replace("/", ".")
    if TABLE.search(kind):
        return f"{module}.{kind}.weight", False
    ours = {"kernel": "weight", "gamma": "weight", "beta": "bias"}.get(kind, kind)
    return f"{module}.{ours}" if module else ours, kind == "kernel"


def spell_theirs(name: str) -> tuple[str, bool]:
    """The variable that a canonical name stands for, and whether its tensor is to be transposed."""
    if name in FROM_HEADS:
        return FROM_HEADS[name], FROM_HEADS[name].endswith("/kernel")
    module, _, kind = name.rpartition(".")
    scoped = re.sub(r"/layer/(\d+)/", r"/layer_\1/", module.replace(".", "/") + "/")
    if TABLE.search(module) and kind == "weight":
        return scoped[:-1], False
    if NORM.search(module):
        return scoped + {"weight": "gamma", "bias": "beta"}[kind], False
    return scoped + {"weight": "kernel"}.get(kind, kind), kind == "weight"
