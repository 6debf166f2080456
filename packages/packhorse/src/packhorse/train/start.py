"""Where a run begins: any checkpoint that can be read, with the optimizer's state if it has one.

TensorFlow keeps LAMB's and Adam's averages beside the weights, each in the shape of its weight. So
they go the same way through the tables of names: transposed where a weight is, queries, keys and
values joined, words padded where the model's table is. MLPerf's BERT begins so, from its own
model.ckpt-28252, and goes on from step 28,252 of its averages.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from glob import escape
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from packhorse import checkpoint
from packhorse.checkpoint import Checkpoint, names, sources
from packhorse.checkpoint.names import tf1
from packhorse.errors import CheckpointError

RESIZES = ("vocab_size", "max_positions", "repeat_positions")
MLPERF = (
    "MLPerf's own, model.ckpt-28252, is not part of Packhorse: the page of BERT in MLCommons' "
    "training repository (language_model/tensorflow/bert) says where it is; put its .index and "
    ".data files, bert_config.json and vocab.txt in one folder and pass FOLDER/model.ckpt-28252"
)


@dataclass(frozen=True, eq=False)
class Start:
    """A model with its weights, and what its file held of an optimizer."""

    checkpoint: Checkpoint
    # "m" and "v" by parameter name, as `optim.load_slots` takes them; empty where there are none.
    slots: dict[str, dict[str, Tensor]] = field(default_factory=dict, repr=False)
    step: int | None = None


def start(path: str | Path, *, slots: bool = True, **options: Any) -> Start:
    """Read a checkpoint to train from; `options` are those of `checkpoint.load`.

    slots: also the optimizer's state, two thirds of such a file; leave it out to fine-tune.
    """
    source = find(path)
    contents = source.read(slots=slots)
    found = checkpoint.load(source, contents=contents, **options)
    resized = {key: options[key] for key in RESIZES if options.get(key)}
    averages = {kind: _ours(of, found, resized) for kind, of in contents.slots.items()}
    return Start(found, averages, contents.step)


def find(path: str | Path) -> sources.ModelSource:
    """The checkpoint's files; where there are none, an error that says where they come from."""
    try:
        return sources.find(path)
    except CheckpointError as error:
        place = Path(path).expanduser()
        there = place.exists() or any(place.parent.glob(f"{escape(place.name)}.*"))
        if there or "ckpt" not in place.name:
            raise
        raise CheckpointError(f"{error}; {MLPERF}") from error.__cause__


def _ours(slots: dict[str, Tensor], of: Checkpoint, resized: dict[str, Any]) -> dict[str, Tensor]:
    """One kind of slots by the names of the model's parameters, of those that have it whole."""
    tensors, called = tf1.from_tensorflow(dict(slots), tf1.scope(slots))
    found = names.canonical(of.raw, tensors, called)
    if resized:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", names.ResizeWarning)  # said of the weights already
            found = names.resize(found, **resized)
    table = names.table(found.family) | (of.layout.table if of.layout else {})
    result = {}
    for name, _ in of.model.named_parameters():
        parts = [found.tensors.get(part) for part in names.sources(name, table)]
        whole = [part for part in parts if part is not None]
        if len(whole) == len(parts):
            result[name] = whole[0].contiguous() if len(whole) == 1 else torch.cat(whole)
    return result
