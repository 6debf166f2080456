"""Models written as ONNX: ONNX Runtime computes what we do, and reading gives back every bit."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from packhorse import attention
from packhorse.checkpoint import files, names
from packhorse.checkpoint import onnx as reader
from packhorse.checkpoint.building import build
from packhorse.checkpoint.onnx import export as onnx_export
from packhorse.errors import CheckpointError, MissingExtra
from packhorse.model.config import BertConfig
from packhorse.model.model import Model
from packhorse.packing.batch import Packed

LENGTHS = (5, 24, 1, 9)
SCORES = {"mlm", "nsp", "classify", "tokens", "replaced"}
NOT_WRITTEN = {"lexical", "multi", "sparse"}


class Case(NamedTuple):
    """A model of some family."""

    family: str
    heads: tuple[str, ...] = ()
    tied: bool = True
    changes: dict[str, Any] = {}  # noqa: RUF012


CASES = {
    "encoder": Case("bert"),
    "pooled": Case("bert", ("pooled",)),
    "pretraining": Case("bert", ("pooled", "mlm", "nsp")),
    "untied": Case("bert", ("mlm",), tied=False),
    "span": Case("bert", ("span",)),
    "classify": Case("bert", ("pooled", "classify")),
    "tokens": Case("bert", ("tokens",)),
    "roberta": Case("roberta", ("mlm",), changes={"position_offset": 2, "type_vocab_size": 1}),
    "roberta, classify": Case(
        "roberta",
        ("classify",),
        changes={"position_offset": 2, "type_vocab_size": 1, "classify_activation": "tanh"},
    ),
    "distilbert": Case("distilbert", ("mlm",), changes={"type_vocab_size": 0}),
    "distilbert, classify": Case(
        "distilbert", ("classify",), changes={"type_vocab_size": 0, "classify_activation": "relu"}
    ),
    "electra": Case("electra", ("replaced",), changes={"embedding_size": 16}),
    "electra, mlm": Case("electra", ("mlm",), changes={"embedding_size": 16}),
    **{
        name: Case("bert", ("mlm",), changes={"activation": name})
        for name in ("gelu_tanh", "relu", "silu", "tanh")
    },
}


def make(case: Case, dtype: torch.dtype = torch.float32) -> tuple[Model, dict[str, Tensor]]:
    """A random model, and its tensors under the family's names."""
    sizes: dict[str, Any] = {"vocab_size": 60, "hidden_size": 32, "layers": 2, "heads": 4}
    config = BertConfig(**sizes, intermediate_size=48, max_positions=24, **case.changes)
    model = build(config, attention.kernel("reference"), case.heads, 3, case.tied, None)
    model = model.to_empty(device="cpu").to(dtype)
    if case.tied and "mlm" in case.heads:  # what `to_empty` took apart
        model.head("mlm").decoder.weight = model.bert.embed.words.weight  # pyright: ignore
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model, export(model, case.family)


def export(model: Model, family: str) -> dict[str, Tensor]:
    raw = {"model_type": family}
    return names.export(raw, model.bert.config, model.state_dict(), model.heads.keys())[1]


def batch(rng: np.random.Generator) -> tuple[Packed, dict[str, np.ndarray]]:
    """The same sequences packed and padded."""
    rows = [
        SimpleNamespace(ids=rng.integers(2, 60, n), types=rng.integers(0, 2, n)) for n in LENGTHS
    ]
    shape = (len(LENGTHS), max(LENGTHS))
    padded = {"input_ids": np.ones(shape, np.int64)}  # RoBERTa's padding
    padded |= {key: np.zeros(shape, np.int64) for key in ("attention_mask", "token_type_ids")}
    for number, row in enumerate(rows):
        for key, values in zip(padded, (row.ids, 1, row.types), strict=True):
            padded[key][number, : LENGTHS[number]] = values
    return Packed.build(rows), padded


def run(path: Path, padded: dict[str, np.ndarray]) -> dict[str, Tensor]:
    """What ONNX Runtime computes, of rows of tokens those that are not padding."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options)
    fed = {i.name: padded[i.name] for i in session.get_inputs()}
    loaded = session.run(None, fed)
    result = {
        o.name: torch.from_numpy(a) for o, a in zip(session.get_outputs(), loaded, strict=True)
    }
    seen = torch.from_numpy(padded["attention_mask"]).bool()
    return {name: x[seen] if x.shape[:2] == seen.shape else x for name, x in result.items()}


def outputs(model: Model) -> dict[str, tuple[str, Any]]:
    """Name of an output → our head and its part."""
    scored = [head for head in model.heads if head in SCORES]
    pair = {"mlm": "prediction_logits", "nsp": "seq_relationship_logits"}
    result: dict[str, tuple[str, Any]] = {"last_hidden_state": ("hidden", ...)}
    if "pooled" in model.heads:
        result["pooler_output"] = ("pooled", ...)
    if "span" in model.heads:
        result |= {"start_logits": ("span", (..., 0)), "end_logits": ("span", (..., 1))}
    return result | {("logits" if len(scored) == 1 else pair[h]): (h, ...) for h in scored}


def compare(model: Model, packed: Packed, result: dict[str, Tensor], bound: float = 1e-5) -> None:
    expected = outputs(model)
    assert result.keys() == expected.keys()
    for name, (head, part) in expected.items():
        with torch.no_grad():
            loaded = model(packed, head)[0][part]
        assert_close(result[name], loaded, atol=bound, rtol=bound, msg=lambda m: f"{name}: {m}")  # noqa: B023


@pytest.mark.parametrize("case", CASES)
def test_onnx_runtime_and_back(case: str, tmp_path: Path, rng: np.random.Generator) -> None:
    model, tensors = make(CASES[case])
    onnx_export.write(tmp_path / "model.onnx", model, tensors)
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
    onnx.checker.check_model(str(tmp_path / "model.onnx"), full_check=True)
    packed, padded = batch(rng)
    compare(model, packed, run(tmp_path / "model.onnx", padded))
    result = reader.read(tmp_path / "model.onnx").tensors
    assert result.keys() == tensors.keys()
    assert all(torch.equal(result[name], tensor) for name, tensor in tensors.items())


def test_every_head_at_once(make_model: Any, tmp_path: Path, rng: np.random.Generator) -> None:
    """No class of transformers has them all; each output then has a name of its own."""
    every = make_model(torch.float32)
    heads = {name: head for name, head in every.heads.items() if name not in NOT_WRITTEN}
    model = Model(every.bert, heads)
    state = {n: t for n, t in model.state_dict().items() if ".qkv." not in n}
    for name, tensor in model.state_dict().items():
        if ".qkv." in name:
            state |= {
                name.replace("qkv", k): t for k, t in zip("qkv", tensor.chunk(3), strict=True)
            }
    onnx_export.write(tmp_path / "model.onnx", model, state)
    for name in NOT_WRITTEN:
        with pytest.raises(CheckpointError, match=f"the head '{name}' cannot be written"):
            other = Model(every.bert, {name: every.heads[name]})
            onnx_export.write(tmp_path / "other.onnx", other, state)
    packed, padded = batch(rng)
    result = run(tmp_path / "model.onnx", padded)
    assert result.keys() >= {"prediction_logits", "classify_logits", "tokens_logits", "end_logits"}
    with torch.no_grad():
        labels, scores = model(packed, "classify", "tokens")
    assert_close(result["classify_logits"], labels, atol=1e-5, rtol=1e-5)
    assert_close(result["tokens_logits"], scores, atol=1e-5, rtol=1e-5)


def test_padding_is_not_seen(tmp_path: Path, rng: np.random.Generator) -> None:
    model, tensors = make(CASES["classify"])
    onnx_export.write(tmp_path / "model.onnx", model, tensors)
    _, padded = batch(rng)
    before = run(tmp_path / "model.onnx", padded)
    second = dict(padded)
    second["input_ids"] = np.where(padded["attention_mask"] == 1, padded["input_ids"], 42)
    after = run(tmp_path / "model.onnx", second)
    assert all(torch.equal(before[name], after[name]) for name in before)
    # Without the mask it is seen.
    second["attention_mask"] = np.ones_like(padded["attention_mask"])
    assert not torch.allclose(before["logits"], run(tmp_path / "model.onnx", second)["logits"])


def test_a_row_of_padding(tmp_path: Path, rng: np.random.Generator) -> None:
    model, tensors = make(CASES["classify"])
    onnx_export.write(tmp_path / "model.onnx", model, tensors)
    _, padded = batch(rng)
    padded["attention_mask"][1] = 0
    result = run(tmp_path / "model.onnx", padded)
    assert result["logits"].shape == (4, 3) and all(x.isfinite().all() for x in result.values())


@pytest.mark.parametrize("shape", [(1, 1), (3, 2)])
def test_any_shape(shape: tuple[int, int], tmp_path: Path) -> None:
    model, tensors = make(CASES["tokens"])
    onnx_export.write(tmp_path / "model.onnx", model, tensors)
    ones = np.ones(shape, np.int64)
    fed = {key: ones for key in ("input_ids", "attention_mask", "token_type_ids")}
    assert run(tmp_path / "model.onnx", fed)["logits"].shape == (ones.size, 3)


def test_weights_beside_the_model(tmp_path: Path, rng: np.random.Generator) -> None:
    model, tensors = make(CASES["pretraining"])
    onnx_export.write(tmp_path / "model.onnx", model, tensors, inline_limit=0)
    assert (tmp_path / "model.onnx").stat().st_size < 60_000
    packed, padded = batch(rng)
    compare(model, packed, run(tmp_path / "model.onnx", padded))
    result = reader.read(tmp_path / "model.onnx")
    assert result.files == (tmp_path / "model.onnx", tmp_path / "model.onnx.data")
    assert result.tensors.keys() == tensors.keys()
    assert all(torch.equal(result.tensors[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("case", ["classify", "pretraining", "roberta", "electra", "gelu_tanh"])
def test_half_precision(case: str, tmp_path: Path, rng: np.random.Generator) -> None:
    model, tensors = make(CASES[case], torch.float16)
    onnx_export.write(tmp_path / "model.onnx", model, tensors)
    onnx.checker.check_model(str(tmp_path / "model.onnx"), full_check=True)
    result = reader.read(tmp_path / "model.onnx").tensors
    assert all(torch.equal(result[name], tensor) for name, tensor in tensors.items())
    packed, padded = batch(rng)
    compare(model, packed, run(tmp_path / "model.onnx", padded), bound=0.02)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_precisions_that_onnx_runtime_lacks(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    """Refused, for a reason that still holds."""
    model, tensors = make(CASES["classify"], dtype)
    with pytest.raises(CheckpointError, match=f"{dtype} .* --dtype fp32 or --dtype fp16"):
        onnx_export.write(tmp_path / "model.onnx", model, tensors)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setitem(onnx_export.DTYPES, dtype, {torch.bfloat16: 16, torch.float64: 11}[dtype])
    onnx_export.write(tmp_path / "model.onnx", model, tensors)
    with pytest.raises(Exception, match="NOT_IMPLEMENTED"):
        run(tmp_path / "model.onnx", batch(rng)[1])


def test_onnx_runtime_can_fuse(tmp_path: Path) -> None:
    model, tensors = make(CASES["pooled"])
    onnx_export.write(tmp_path / "model.onnx", model, tensors)
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.log_severity_level = 3  # it warns that such a file is for this machine
    onnxruntime.InferenceSession(str(tmp_path / "model.onnx"), options)
    remaining = Counter(node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node)
    assert remaining["SkipLayerNormalization"] == 4 and remaining["BiasGelu"] == 2
    assert "Erf" not in remaining and remaining["LayerNormalization"] == 1  # that of the embeddings


def test_several_precisions_are_refused(tmp_path: Path) -> None:
    model, tensors = make(CASES["pooled"])
    model.heads.half()
    with pytest.raises(CheckpointError, match=r"torch\.float16, torch\.float32"):
        onnx_export.write(tmp_path / "model.onnx", model, tensors)
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    """In the folder that `checkpoint.write` makes; by then the weights have been written."""
    model, tensors = make(CASES["encoder"])
    model.heads["new"] = nn.Identity()
    with (
        pytest.raises(CheckpointError, match="the head 'new'"),
        files.new_folder(tmp_path / "out", overwrite=False) as draft,
    ):
        onnx_export.write(draft / "model.onnx", model, tensors, inline_limit=0)
    assert list(tmp_path.iterdir()) == []


def test_without_onnx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tensors = make(CASES["encoder"])
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(MissingExtra, match=r"packhorse\[onnx\]"):
        onnx_export.write(tmp_path / "model.onnx", model, tensors)
    assert list(tmp_path.iterdir()) == []
