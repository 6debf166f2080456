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
from packhorse.checkpoint.names.families import FAMILIES, modules_of
from packhorse.errors import CheckpointError, InputError

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
    assert names.sources("heads.mlm.decoder.weight", table) == ("cls.predictions.decoder.weight",)
    assert names.sources("heads.mlm.decoder.weight", names.table(names.BERT, tied=True)) == (
        "bert.embeddings.word_embeddings.weight",
    )
    with pytest.raises(KeyError):
        names.sources("bert.layers.0.gate.weight", table)


def test_canonical_names_keep_their_spelling() -> None:
    tensors = {name: torch.zeros(1) for name in ("embeddings.LayerNorm.gamma", "own.weight")}
    result = names.canonical({}, tensors)
    assert tensors == {}  # moved, so that they are not held twice
    assert result.in_file == {
        "bert.embeddings.LayerNorm.weight": "embeddings.LayerNorm.gamma",
        "own.weight": "own.weight",
    }
    assert result.name_in_file("bert.pooler.dense.bias") == "pooler.dense.bias"
    prefixed = names.canonical({}, {"bert.pooler.dense.weight": torch.zeros(1)})
    assert prefixed.name_in_file("bert.pooler.dense.bias") == "bert.pooler.dense.bias"


def test_old_files_do_not_name_their_family(save: Callable[..., tuple[Any, Path]]) -> None:
    _, folder = save("BertModel")
    read = hf.read(folder)
    raw = {k: v for k, v in (read.config or {}).items() if k != "model_type"}
    result = names.canonical(raw, read.tensors)
    assert result.family is names.BERT and names.config(result).layers == 2


def test_what_is_called_otherwise_in_the_file() -> None:
    tensors = {"bert.pooler.dense.weight": torch.zeros(1)}
    result = names.canonical({}, tensors, {"bert.pooler.dense.weight": "bert/pooler/dense/kernel"})
    assert result.name_in_file("bert.pooler.dense.weight") == "bert/pooler/dense/kernel"


def test_an_encoder_alone_under_its_prefix(save: Callable[..., tuple[Any, Path]]) -> None:
    for kind in ("BertModel", "BertForMaskedLM"):
        loaded = checkpoint.load(save(kind)[1])
        state = loaded.model.state_dict()
        raw, tensors = names.export(loaded.raw, loaded.config, state, loaded.model.heads.keys())
        named = names.prefixed(raw, tensors)
        assert len(named) == len(tensors)
        assert all(name.startswith(("bert.", "cls.")) for name in named)


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_table_is_whole(kind: str) -> None:
    """Each of our modules has one foreign name of its own, but those that are shared on purpose."""
    family = FAMILIES[kind]
    entries = [part for entry in names.table(family).values() for part in modules_of(entry)]
    shared = {name for name in entries if entries.count(name) > 1}
    poolers = {f"{family.prefix}pooler.dense", f"{family.prefix}pooler"}
    allowed = poolers | {"classifier", "score"}
    # In one product, or that of queries apart where heads share keys and values.
    allowed |= {f"model.layers.{{}}.self_attn.{part}_proj" for part in "qkv"}
    assert shared <= allowed | ({"head.dense", "head.norm"} if family.heads_by_class else set())
    assert {head for heads in family.architectures.values() for head in heads} <= set(family.heads)
    assert list(family.architectures.values())[-1] == ()  # else none after it is ever written
    assert family.defaults.keys() <= names.BertConfig.__dataclass_fields__.keys()


# ---- tables of another size, on request ----

ROBERTA = {
    "model_type": "roberta",
    "vocab_size": 50,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "max_position_embeddings": 22,
    "pad_token_id": 1,
}
WORDS, POSITIONS = (f"roberta.embeddings.{n}_embeddings.weight" for n in ("word", "position"))


def roberta(**raw: Any) -> names.CanonicalCheckpoint:
    tensors = {
        WORDS: torch.randn(50, 8),
        POSITIONS: torch.randn(22, 8),
        "lm_head.decoder.weight": torch.randn(50, 8),
        "lm_head.bias": torch.randn(50),
    }
    return names.canonical({**ROBERTA, **raw}, tensors)


@pytest.mark.parametrize(("size", "variant"), [(64, "padded with zeros"), (40, "cropped")])
def test_another_vocabulary(size: int, variant: str) -> None:
    result = roberta()
    before = dict(result.tensors)
    with pytest.warns(names.ResizeWarning) as warned:
        resized = names.resize(result, vocab_size=size)
    changed = {WORDS, "lm_head.decoder.weight", "lm_head.bias"}
    assert str(warned[0].message).split("; ") == [
        f"{name}: {variant} from 50 rows to {size}"
        for name in (WORDS, "lm_head.decoder.weight", "lm_head.bias")
    ]
    assert names.config(resized).vocab_size == size == resized.raw["vocab_size"]
    resized_names = [name for name in before if len(resized.tensors[name]) == size]
    assert {resized.name_in_file(name) for name in resized_names} == changed
    for name, tensor in resized.tensors.items():
        remaining = min(len(tensor), len(before[name]))
        assert (
            torch.equal(tensor[:remaining], before[name][:remaining])
            and not tensor[remaining:].any()
        )


def test_fewer_positions() -> None:
    """A count of those that can be used: the rows before the first stay."""
    result = roberta()
    table = result.tensors[POSITIONS]
    with pytest.warns(names.ResizeWarning, match=f"{POSITIONS}: cropped from 22 rows to 14"):
        result = names.resize(result, max_positions=12)
    assert names.config(result).max_positions == 12
    assert torch.equal(result.tensors[POSITIONS], table[:14])


def test_more_positions_only_if_repeated() -> None:
    result = roberta()
    table = result.tensors[POSITIONS]
    with pytest.raises(InputError, match=f"{POSITIONS} holds 20 positions, not 45.*repeat_positi"):
        names.resize(result, max_positions=45, vocab_size=9)
    assert len(result.tensors[WORDS]) == 50  # all or nothing
    assert result.tensors[POSITIONS] is table and result.raw["max_position_embeddings"] == 22
    with pytest.warns(names.ResizeWarning, match=f"{POSITIONS}: repeated from 22 rows to 47"):
        result = names.resize(result, max_positions=45, repeat_positions=True)
    assert names.config(result).max_positions == 45
    assert torch.equal(result.tensors[POSITIONS], torch.cat([table, table[2:], table[2:7]]))


def test_the_same_size_is_no_change(recwarn: pytest.WarningsRecorder) -> None:
    result = roberta()
    before = dict(result.tensors)
    same = names.resize(result, vocab_size=50, max_positions=20)
    assert same.raw == result.raw and all(same.tensors[n] is t for n, t in before.items())
    assert not recwarn.list


def test_sizes_that_are_none() -> None:
    for settings in ({"vocab_size": 0}, {"max_positions": -1}):
        with pytest.raises(InputError, match="must be at least 1"):
            names.resize(roberta(), **settings)
    for settings in ({"vocab_size": 10**12}, {"max_positions": 10**12}):
        with pytest.raises(CheckpointError, match="not a count"):
            names.resize(roberta(), **settings, repeat_positions=True)
    hollow = roberta(pad_token_id=20, max_position_embeddings=40)
    hollow.tensors[POSITIONS] = torch.zeros(3, 8)  # fewer than there are before the first position
    assert (
        len(names.resize(hollow, max_positions=5).tensors[POSITIONS]) == 3
    )  # for others to refuse
