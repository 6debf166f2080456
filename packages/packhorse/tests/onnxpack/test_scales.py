"""Int8 models round each text as they do when they run it alone, whatever its neighbors are.

The oracle is ONNX Runtime on the original model, one text at a time. Both sides run as written
where numbers are compared closely: what ONNX Runtime fuses moves last bits, and int8 rounds those.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper
from onnxruntime.quantization import QuantType, quantize_dynamic

from packhorse import onnxpack
from packhorse.errors import CheckpointError
from packhorse.onnxpack import scales
from packhorse.onnxpack.facts import Mode
from packhorse.onnxpack.session import OnnxBackend
from packhorse.packing.batch import Packed

from .conftest import EXPORTS, INPUTS, LONGEST, Tokens
from .test_session import retold

MODES: tuple[Mode, ...] = ("positions", "mask", "repack")
PACKS = [[0, 2, 3], [1], [5, 4]]
# Weights alone, as quantize_dynamic does by default, and products of two activations as well, as
# optimum does.
QUANTIZERS: dict[str, dict[str, Any]] = {
    "weights": {},
    "all": {"extra_options": {"MatMulConstBOnly": False}, "per_channel": True},
    "uint8": {"weight_type": QuantType.QUInt8, "per_channel": True},
}


@pytest.fixture(scope="module")
def int8(
    exported: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """An export (see `exported`), quantized dynamically in one of the ways of QUANTIZERS."""
    folder = tmp_path_factory.mktemp("int8")

    def int8(name: str = "bert:eager", variant: str = "weights") -> Path:
        path = folder / f"{name.replace(':', '-')}-{variant}.onnx"
        if not path.exists():
            quantize_dynamic(exported(name), path, **QUANTIZERS[variant])
        return path

    return int8


def alone(path: Path, sequences: list[Tokens]) -> list[np.ndarray]:
    """The first output of the model as written, for each sequence by itself."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    outputs = []
    for tokens in sequences:
        columns = (tokens.ids, np.ones_like(tokens.ids), tokens.types)
        feeds = {name: column[None] for name, column in zip(INPUTS, columns, strict=True)}
        outputs.append(np.asarray(session.run(None, feeds)[0])[0])
    return outputs


def together(backend: OnnxBackend, sequences: list[Tokens]) -> list[np.ndarray]:
    """The first output of a packed model for each of the sequences in one batch."""
    batch = Packed.build(sequences)
    if backend.facts.mode == "mask":
        batch = Packed.rows(sequences, PACKS, LONGEST + 4)
    name = next(iter(backend.facts.outputs))
    (result,) = backend(batch, [name])
    if backend.facts.outputs[name] == "sequence":
        return [row.numpy() for row in batch.pick(result)]
    return [piece.numpy() for piece in batch.split(result)]


def neighbors_changed(sequences: list[Tokens]) -> list[Tokens]:
    """The same, but the fourth."""
    second = Tokens(sequences[3].ids[::-1].copy(), sequences[3].types)
    return [*sequences[:3], second, *sequences[4:]]


CASES = [
    ("positions", "bert:eager", "weights"),
    ("mask", "bert:eager", "all"),
    ("repack", "bert:eager", "all"),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("mask", "bert:eager", "weights"),
            ("repack", "bert:eager", "weights"),
            ("positions", "bert:eager", "all"),
            ("mask", "classify:eager", "uint8"),
            ("mask", "bert:eager:old:11", "all"),
            ("repack", "bert:sdpa:old:18", "all"),
        )
    ),
]


@pytest.mark.parametrize(("mode", "name", "variant"), CASES)
def test_a_text_is_rounded_as_it_is_alone(
    mode: Mode, name: str, variant: str, int8: Callable, sequences: list[Tokens], tmp_path: Path
) -> None:
    path, target = int8(name, variant), tmp_path / "packed.onnx"
    report = onnxpack.pack(path, target, mode)
    kinds = {node.op_type for node in onnx.load(target).graph.node}
    assert "MatMulInteger" in kinds and "DynamicQuantizeLinear" not in kinds
    written = together(OnnxBackend(target, plain=True), sequences)
    for loaded, reference in zip(written, alone(path, sequences), strict=True):
        # A number in 10,000 may round to the next level; a scale of another text moves them all.
        assert np.quantile(np.abs(loaded - reference), 0.99) <= 1e-5
    backend = OnnxBackend(target)
    before = together(backend, sequences)
    after = together(backend, neighbors_changed(sequences))
    same = [np.array_equal(a, b) for a, b in zip(before, after, strict=True)]
    assert same == [number != 3 for number in range(6)]
    assert any(result.what == "scale" for result in report.findings)


@pytest.mark.parametrize("mode", MODES)
def test_a_scale_of_the_batch_fails_the_check(
    mode: Mode, int8: Callable, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The control: scales left as they were, which is what a neighbor moves."""
    monkeypatch.setattr(scales, "quantize_per_sequence", lambda *arguments: [])
    with pytest.raises(
        CheckpointError, match=r"neighbors change a text's output .*quantize_static"
    ):
        onnxpack.pack(int8(), tmp_path / "packed.onnx", mode)
    assert not list(tmp_path.iterdir())


def round_by_the_batch(model: onnx.ModelProto) -> None:
    """Round the first layer's input to 1/100 of the largest number in the batch, by plain nodes."""
    graph = model.graph
    norm = next(node for node in graph.node if node.op_type == "LayerNormalization")
    source, norm.output[0] = norm.output[0], "exact"
    graph.initializer.append(numpy_helper.from_array(np.array(100, np.float32), "levels"))
    built = [
        helper.make_node("Abs", ["exact"], ["sizes"]),
        helper.make_node("ReduceMax", ["sizes"], ["largest"], keepdims=0),
        helper.make_node("Div", ["largest", "levels"], ["step"]),
        helper.make_node("Div", ["exact", "step"], ["steps"]),
        helper.make_node("Round", ["steps"], ["rounded"]),
        helper.make_node("Mul", ["rounded", "step"], [source]),
    ]
    at = list(graph.node).index(norm) + 1
    nodes = [*graph.node[:at], *built, *graph.node[at:]]
    del graph.node[:]
    graph.node.extend(nodes)


def transpose_values(model: onnx.ModelProto) -> None:
    """Quantized values that go through another node on their way into a product."""
    graph = model.graph
    node = next(node for node in graph.node if node.op_type == "MatMulInteger")
    taken, node.input[0] = node.input[0], "moved"
    at = list(graph.node).index(node)
    graph.node.insert(at, helper.make_node("Identity", [taken], ["moved"], "mover"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (round_by_the_batch, "neighbors change a text's output 'last_hidden_state'"),
        (transpose_values, r"node 'mover' \(Identity\) takes int8 values .*pack the fp32 model"),
    ],
)
def test_what_is_not_known_is_refused(
    change: Callable, message: str, int8: Callable, exported: Callable, tmp_path: Path
) -> None:
    path = int8() if change is transpose_values else exported("bert:eager")
    model = onnx.load(path)
    change(model)
    onnx.save(model, tmp_path / "changed.onnx")
    with pytest.raises(CheckpointError, match=message):
        onnxpack.pack(tmp_path / "changed.onnx", tmp_path / "packed.onnx", "mask")
    assert not (tmp_path / "packed.onnx").exists()


def test_a_large_difference_is_reported(tmp_path: Path) -> None:
    """Static int8: as written the graphs agree, fused the original differs from itself."""
    path = EXPORTS / "optimum-bert-mlm-qdq.onnx"
    report = onnxpack.pack(path, tmp_path / "packed.onnx", "mask")
    assert report.difference_unfused < 1e-5
    assert bool(report.warning) == (report.difference > 0.05)
    reported = onnxpack.PackingReport(report.facts, (), (1, 1), (), 0.26, 0.0).warning
    assert "differ from the original's by 0.26 of their size" in reported and "fuses" in reported


def test_files_whose_neighbors_mix_must_be_packed_again(int8: Callable, tmp_path: Path) -> None:
    """Packhorse 0.1.0 packed such models and noted it."""
    onnxpack.pack(int8(), tmp_path / "packed.onnx", "mask")
    old = retold(
        tmp_path / "packed.onnx", tmp_path / "old.onnx", lambda facts: facts.update(exact=False)
    )
    with pytest.raises(CheckpointError, match=r"neighbors change its int8 scales.*pack the model"):
        onnxpack.load(old)
    remaining = retold(
        tmp_path / "packed.onnx", tmp_path / "kept.onnx", lambda facts: facts.update(exact=True)
    )
    assert onnxpack.load(remaining).facts.mode == "mask"


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_real_model(mode: Mode, minilm: Path, tmp_path: Path) -> None:
    """MiniLM in int8: vectors of texts packed together, and by ONNX Runtime one by one."""
    import packhorse
    from packhorse import checkpoint

    folder = checkpoint.write(tmp_path / "onnx", checkpoint.load(minilm), to="onnx")
    quantize_dynamic(folder / "model.onnx", folder / "int8.onnx")
    onnxpack.pack(folder / "int8.onnx", folder / "packed.onnx", mode)
    texts = ["A pack horse carries sacks.", "Mules too.", "word " * 100, "over the hills " * 9]
    model = packhorse.load(folder / "packed.onnx")
    vectors = model.embed(texts)
    for number, text in enumerate(texts):
        encoding = model.tokenizer.encode([text], model.max_length)[0]
        tokens = Tokens(np.array(encoding.ids, np.int64), np.array(encoding.types, np.int64))
        mean = alone(folder / "int8.onnx", [tokens])[0].mean(0)
        assert vectors[number] @ (mean / np.linalg.norm(mean)) > 0.999
        shared = model.embed([text, *texts[::-1], "1234 # ?"])[0]
        assert np.abs(shared - vectors[number]).max() <= 1e-6
