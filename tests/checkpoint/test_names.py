"""The tables of names lead both ways, and every name of ours is in them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from packhorse import checkpoint
from packhorse.checkpoint import hf, names

KINDS = [name for name in names.BERT.architectures if name != "BertModel"]


@pytest.mark.parametrize("kind", ["BertModel", *KINDS])
def test_there_and_back(kind: str, save: Callable[..., tuple[Any, Path]]) -> None:
    """What is exported is what was read, name by name and bit by bit."""
    _, folder = save(kind)
    loaded = checkpoint.load(folder)
    state = loaded.model.state_dict()
    raw, tensors = names.export(loaded.raw, loaded.config, state, loaded.model.heads.keys())
    want = load_file(folder / "model.safetensors")
    assert raw["architectures"] == [kind]
    assert tensors.keys() == want.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in want.items())


def test_queries_keys_and_values_are_one(save: Callable[..., tuple[Any, Path]]) -> None:
    _, folder = save("BertModel")
    file = load_file(folder / "model.safetensors")
    fused = checkpoint.load(folder).model.bert.layers[1].attention.qkv.weight
    for piece, name in zip(fused.chunk(3), ("query", "key", "value"), strict=True):
        assert torch.equal(piece, file[f"encoder.layer.1.attention.self.{name}.weight"])


def test_sources() -> None:
    table = names.table(names.BERT)
    assert names.sources("bert.layers.11.norm.bias", table) == (
        "bert.encoder.layer.11.output.LayerNorm.bias",
    )
    assert names.sources("heads.mlm.decoder.weight", table) == (names.DECODER_WEIGHT,)
    assert names.sources("heads.mlm.decoder.weight", names.table(names.BERT, tied=True)) == (
        "bert.embeddings.word_embeddings.weight",
    )
    with pytest.raises(KeyError):
        names.sources("bert.layers.0.gate.weight", table)


def test_canonical_names_keep_their_spelling() -> None:
    tensors = {name: torch.zeros(1) for name in ("embeddings.LayerNorm.gamma", "own.weight")}
    found = names.canonical({}, tensors)
    assert tensors == {}  # moved, so that they are not held twice
    assert found.spelling == {
        "bert.embeddings.LayerNorm.weight": "embeddings.LayerNorm.gamma",
        "own.weight": "own.weight",
    }
    assert found.spell("bert.pooler.dense.bias") == "pooler.dense.bias"
    prefixed = names.canonical({}, {"bert.pooler.dense.weight": torch.zeros(1)})
    assert prefixed.spell("bert.pooler.dense.bias") == "bert.pooler.dense.bias"


def test_old_files_do_not_name_their_family(save: Callable[..., tuple[Any, Path]]) -> None:
    _, folder = save("BertModel")
    raw, tensors = hf.read(folder)
    found = names.canonical({k: v for k, v in raw.items() if k != "model_type"}, tensors)
    assert found.family is names.BERT and names.config(found).layers == 2
