"""Packed models answer as the originals do, and what cannot be packed is refused by name.

The inputs are laid by hand here, as a user's own code would, not by `onnxpack.session`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from packhorse import onnxpack
from packhorse.errors import CheckpointError, InputError
from packhorse.onnxpack.facts import Mode

from .conftest import EXPORTS, INPUTS, LONGEST, OUTPUTS, Answers, Tokens, alone, export, far_off

Exported = Callable[[str], Path]
AloneAnswers = Callable[[Path], Answers]

MODES: tuple[Mode, ...] = ("positions", "mask", "repack")
# Model, attention, exporter, opset; those of SOME in every run, the others in the slow ones.
SOME = ["bert:eager", "bert:sdpa", "span:sdpa", "classify:eager", "roberta:sdpa"]
SOME += ["distilbert:eager", "bert:eager:old:11", "bert:sdpa:dynamo"]
EVERY = [
    f"{kind}:{attention}" for kind in OUTPUTS for attention in ("eager", "sdpa") if kind != "mpnet"
]
EVERY += [f"{name}:dynamo" for name in EVERY]
EVERY += ["bert:eager:old:11", "bert:eager:old:13", "bert:sdpa:old:18", "bert:sdpa:dynamo:23"]
EXPORTED = [name if name in SOME else pytest.param(name, marks=pytest.mark.slow) for name in EVERY]
ROWS, CAPACITY = [[0, 2, 3], [1], [4, 5], []], LONGEST + 4  # the last is padding alone
LOOSE = {"int8": 0.2, "qdq": 0.6, "uint8": 0.2, "half": 2e-2}  # by the name of the file


def session(path: Path) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


def run(path: Path, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Only what the model takes is fed; all that it gives."""
    opened = session(path)
    expected = {value.name for value in opened.get_inputs()}
    names = [value.name for value in opened.get_outputs()]
    result = opened.run(names, {name: x for name, x in feeds.items() if name in expected})
    return {name: np.asarray(x) for name, x in zip(names, result, strict=True)}


def by_mask(path: Path, sequences: Sequence[Tokens], outputs: dict[str, str]) -> Answers:
    """ROWS, each sequence numbered within its row."""
    columns = (*INPUTS, "position_ids")
    feeds = {name: np.zeros((len(ROWS), CAPACITY), np.int64) for name in columns}
    starts = np.zeros(len(sequences), np.int64)
    for row, members in enumerate(ROWS):
        at = 0
        for number, index in enumerate(members, 1):
            ids, types = sequences[index].ids, sequences[index].types
            values = (ids, np.full(len(ids), number), types, np.arange(len(ids)))
            for name, value in zip(columns, values, strict=True):
                feeds[name][row, at : at + len(ids)] = value
            starts[index] = row * CAPACITY + at
            at += len(ids)
    lengths = np.array([len(tokens.ids) for tokens in sequences])
    result = run(path, {**feeds, "first_positions": starts, "sequence_lengths": lengths})
    return split(result, starts, lengths, outputs, len(ROWS) * CAPACITY)


def by_lengths(path: Path, sequences: Sequence[Tokens], outputs: dict[str, str]) -> Answers:
    """Three rows that sequences cross, padding after them, two empty sequences at the end."""
    lengths = np.array([len(tokens.ids) for tokens in sequences])
    starts = np.cumsum(lengths) - lengths
    shape = (3, int(lengths.sum()) // 3 + 2)
    feeds = {}
    flat = {
        "input_ids": np.concatenate([tokens.ids for tokens in sequences]),
        "token_type_ids": np.concatenate([tokens.types for tokens in sequences]),
        "position_ids": np.concatenate([np.arange(n) for n in lengths]),
    }
    for name, values in flat.items():
        feeds[name] = np.zeros(shape, np.int64)
        feeds[name].reshape(-1)[: len(values)] = values
    assert (starts // shape[1] != (starts + lengths - 1) // shape[1]).any()
    result = run(path, {**feeds, "unpack_info": np.append(lengths, [0, 0])})
    return split(result, starts, lengths, outputs, shape[0] * shape[1])


def split(
    result: dict[str, np.ndarray],
    starts: np.ndarray,
    lengths: np.ndarray,
    outputs: dict[str, str],
    tokens: int,
) -> Answers:
    assert all(np.isfinite(values).all() for values in result.values()), "padding gave no numbers"
    answers: Answers = [{} for _ in starts]
    for name, values in result.items():
        if outputs[name] == "token":
            assert values.shape[0] * values.shape[1] == tokens
            values = values.reshape(tokens, *values.shape[2:])
        for number, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            item = values[start : start + length] if outputs[name] == "token" else values[number]
            answers[number][name] = item
    return answers


def by_positions(path: Path, sequences: Sequence[Tokens], outputs: dict[str, str]) -> Answers:
    answers = []
    for tokens in sequences:
        count = np.arange(len(tokens.ids))
        values = (tokens.ids, np.ones_like(tokens.ids), tokens.types, count)
        feeds = {n: v[None] for n, v in zip((*INPUTS, "position_ids"), values, strict=True)}
        answers.append({name: value[0] for name, value in run(path, feeds).items()})
    return answers


RUN: dict[Mode, Callable[..., Answers]] = {
    "positions": by_positions,
    "mask": by_mask,
    "repack": by_lengths,
}


def check(
    path: Path, target: Path, sequences: list[Tokens], reference: Answers, mode: Mode
) -> None:
    """Equal to the original; isolated, bit by bit."""
    outputs = onnxpack.pack(path, target, mode).facts.outputs
    before = RUN[mode](target, sequences, outputs)
    assert far_off(before, reference) <= 1e-5
    changed = Tokens(sequences[3].ids[::-1].copy(), sequences[3].types)
    after = RUN[mode](target, [*sequences[:3], changed, *sequences[4:]], outputs)
    for number, (a, b) in enumerate(zip(before, after, strict=True)):
        same = [np.array_equal(a[name], b[name]) for name in a]
        assert all(same) if number != 3 else not any(same)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", EXPORTED)
def test_each_sequence_is_answered_as_alone(
    name: str,
    mode: Mode,
    exported: Exported,
    sequences: list[Tokens],
    alone_answers: AloneAnswers,
    tmp_path: Path,
) -> None:
    path = exported(name)
    check(path, tmp_path / "packed.onnx", sequences, alone_answers(path), mode)


@pytest.mark.parametrize(
    "mode", ["mask", *(pytest.param(m, marks=pytest.mark.slow) for m in ("positions", "repack"))]
)
@pytest.mark.parametrize("path", sorted(EXPORTS.glob("*.onnx")), ids=lambda path: path.stem)
def test_exports_of_other_programs(
    path: Path, mode: Mode, sequences: list[Tokens], alone_answers: AloneAnswers, tmp_path: Path
) -> None:
    limit = next((limit for mark, limit in LOOSE.items() if mark in path.stem), 1e-5)
    outputs = onnxpack.pack(path, tmp_path / "packed.onnx", mode).facts.outputs
    result = RUN[mode](tmp_path / "packed.onnx", sequences, outputs)
    assert far_off(result, alone_answers(path)) <= limit


def test_there_are_exports_of_other_programs() -> None:
    if not EXPORTS.is_dir():
        pytest.skip("no exports of other programs are committed")
    assert list(EXPORTS.glob("*.onnx"))


@pytest.mark.parametrize("name", ["bert:sdpa", "classify:eager"])
def test_the_original_mixes_what_shares_a_row(
    name: str, exported: Exported, sequences: list[Tokens], alone_answers: AloneAnswers
) -> None:
    """The control: the same test, of the model as it was."""
    path, members = exported(name), (0, 2, 3)
    ids, types = (
        np.concatenate([getattr(sequences[i], part) for i in members])[None]
        for part in ("ids", "types")
    )
    result = run(path, dict(zip(INPUTS, (ids, np.ones_like(ids), types), strict=True)))
    for output, alone_ in alone_answers(path)[0].items():
        shared = result[output][0] if alone_.ndim == 1 else result[output][0, : len(alone_)]
        assert np.abs(shared - alone_).max() > 1e-3


def test_positions_are_all_that_changes(exported: Exported, tmp_path: Path) -> None:
    path, target = exported("bert:sdpa"), tmp_path / "packed.onnx"
    onnxpack.pack(path, target, "positions")
    before, after = (onnx.load(file).graph for file in (path, target))
    changed = [node for node in after.node if node not in before.node]
    assert [(node.op_type, node.input[1]) for node in changed] == [("Gather", "position_ids")]
    gone = {node.op_type for node in before.node if node not in after.node}
    assert {"Slice", "Gather"} <= gone <= {"Slice", "Gather", "Constant", "Shape", "Unsqueeze"}
    ids = np.full((1, 4), 7)
    feeds = dict(zip(INPUTS, (ids, ids > 0, ids * 0), strict=True)) | {"position_ids": ids}
    feeds = {name: value.astype(np.int64) for name, value in feeds.items()}
    states = run(target, feeds)["last_hidden_state"][0]
    assert np.array_equal(states[0], states[3]), "every token is at position 7"


def test_a_padded_batch_is_the_case_of_one_sequence_a_row(
    exported: Exported, sequences: list[Tokens], alone_answers: AloneAnswers, tmp_path: Path
) -> None:
    path, target = exported("span:sdpa"), tmp_path / "packed.onnx"
    onnxpack.pack(path, target, "mask")
    shape = (len(sequences), LONGEST)
    feeds = {name: np.zeros(shape, np.int64) for name in INPUTS}
    for row, tokens in enumerate(sequences):
        for name, column in zip(INPUTS, (tokens.ids, 1, tokens.types), strict=True):
            feeds[name][row, : len(tokens.ids)] = column
    result = run(target, feeds | {"position_ids": np.tile(np.arange(LONGEST), (shape[0], 1))})
    loaded = [
        {name: values[row, : len(tokens.ids)] for name, values in result.items()}
        for row, tokens in enumerate(sequences)
    ]
    assert far_off(loaded, alone_answers(path)) <= 1e-5


class Sentence(nn.Module):
    """A head over the hidden states, as sentence-transformers exports it."""

    def __init__(self, model: nn.Module, variant: str) -> None:
        super().__init__()
        self.model, self.how = model, variant

    def forward(self, **options: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = self.model(**options)[0]
        mask = options["attention_mask"].unsqueeze(-1).expand(hidden.size()).float()
        return hidden, POOLINGS[self.how](hidden, mask)


POOLINGS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mean": lambda h, m: nn.functional.normalize((h * m).sum(1) / m.sum(1).clamp(min=1e-9), dim=1),
    "max": lambda h, m: h.masked_fill(m == 0, -1e9).max(1)[0],
    "average": lambda h, m: h.mean(1),
    "last": lambda h, m: h[:, -1],
    "running": lambda h, m: h.cumsum(1),
}


@pytest.fixture(scope="module")
def sentence(make: Callable[..., nn.Module], tmp_path_factory: Any) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("sentences")

    def sentence(variant: str) -> Path:
        path = folder / f"{variant}.onnx"
        names = ("token_embeddings", "sentence_embedding")
        return path if path.exists() else export(Sentence(make("bert"), variant), path, names)

    return sentence


@pytest.mark.parametrize("mode", ["mask", "repack"])
@pytest.mark.parametrize("variant", ["mean", "max"])
def test_sentences_are_pooled_over_their_own_tokens(
    variant: str,
    mode: Mode,
    sentence: Callable,
    sequences: list[Tokens],
    alone_answers: AloneAnswers,
    tmp_path: Path,
) -> None:
    path = sentence(variant)
    check(path, tmp_path / "packed.onnx", sequences, alone_answers(path), mode)


@pytest.mark.parametrize(
    ("variant", "stopped_by"),
    [("average", "(ReduceMean)"), ("last", "(Gather)"), ("running", "neighbors change")],
)
def test_other_heads_are_refused(
    variant: str, stopped_by: str, sentence: Callable, tmp_path: Path
) -> None:
    """Where the graph does not show it (a sum over all tokens before), the comparison does."""
    with pytest.raises(CheckpointError, match=stopped_by):
        onnxpack.pack(sentence(variant), tmp_path / "packed.onnx", "mask")
    assert not list(tmp_path.iterdir())


def test_fp16_keeps_inputs_and_outputs(
    exported: Exported, sequences: list[Tokens], alone_answers: AloneAnswers, tmp_path: Path
) -> None:
    path, target = exported("bert:sdpa"), tmp_path / "half.onnx"
    report = onnxpack.pack(path, target, "mask", precision="fp16")
    graph = onnx.load(target).graph
    weights = {t.data_type for t in graph.initializer if len(t.dims) == 2}
    assert weights == {TensorProto.FLOAT16}
    assert {v.type.tensor_type.elem_type for v in graph.output} == {TensorProto.FLOAT}
    result = by_mask(target, sequences, report.facts.outputs)
    assert 1e-5 < far_off(result, alone_answers(path)) <= 5e-2


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_weights_beside_the_model_stay_beside_it(
    precision: Any,
    exported: Exported,
    sequences: list[Tokens],
    alone_answers: AloneAnswers,
    tmp_path: Path,
) -> None:
    path, source, target = (
        exported("span:sdpa"),
        tmp_path / "a" / "m.onnx",
        tmp_path / "b" / "p.onnx",
    )
    source.parent.mkdir()
    target.parent.mkdir()
    onnx.save(
        onnx.load(path), source, save_as_external_data=True, location="weights", size_threshold=0
    )
    report = onnxpack.pack(source, target, "repack", precision=precision)
    assert sorted(target.parent.iterdir()) == sorted(report.files)
    assert [file.name for file in report.files] == ["p.onnx", "p.onnx.data"]
    shutil.rmtree(source.parent)
    result = by_lengths(target, sequences, report.facts.outputs)
    assert far_off(result, alone_answers(path)) <= (1e-5 if precision == "fp32" else 5e-2)


def test_rows_can_be_fixed(exported: Exported, tmp_path: Path) -> None:
    target = tmp_path / "packed.onnx"
    report = onnxpack.pack(exported("classify:eager"), target, "mask", shape=(4, 32))
    shapes = {value.name: value.shape for value in session(target).get_inputs()}
    assert shapes.pop("first_positions") == ["sequences"]
    assert set(map(tuple, shapes.values())) == {(4, 32)}
    assert report.facts.shape == (4, 32)
    outputs = {value.name: value.shape for value in session(target).get_outputs()}
    assert outputs == {"logits": ["sequences", 3]}


def test_what_was_found_is_reported(exported: Exported, tmp_path: Path) -> None:
    report = onnxpack.pack(exported("bert:eager"), tmp_path / "packed.onnx", "repack")
    reported = [(result.what, result.done) for result in report.findings]
    assert [label for label, _ in reported] == [
        *("positions", "head", "attention", "attention", "output", "output"),
    ]
    assert ("output", "one per token") in reported and ("output", "one per sequence") in reported
    assert "Softmax" in report.findings[2].where and "/Add" in report.findings[2].done
    assert report.facts.heads["hidden"] == ("last_hidden_state",)
    assert report.facts.max_positions == 24 and report.facts.vocab_size == 60
    assert report.difference < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_packhorse_own_export(
    mode: Mode, minilm: Path, sequences: list[Tokens], tmp_path: Path
) -> None:
    """The real model, as our own exporter writes it."""
    from packhorse import checkpoint

    folder = checkpoint.write(tmp_path / "onnx", checkpoint.load(minilm), to="onnx")
    path, target = folder / "model.onnx", tmp_path / "packed.onnx"
    check(path, target, sequences, alone(path, sequences), mode)


def test_relative_positions_are_refused_in_repack_mode_alone(
    exported: Exported, sequences: list[Tokens], alone_answers: AloneAnswers, tmp_path: Path
) -> None:
    path = exported("mpnet:eager")
    check(path, tmp_path / "mask.onnx", sequences, alone_answers(path), "mask")
    with pytest.raises(CheckpointError, match=r"node '.*Add' \(Add\) adds a bias for positions"):
        onnxpack.pack(path, tmp_path / "repack.onnx", "repack")


@pytest.mark.parametrize(
    ("stated", "error", "message"),
    [
        ({}, CheckpointError, "output 'attentions' is neither"),
        ({"attentions": "token"}, CheckpointError, "neighbors change a text's output 'att"),
        ({"attentions": "sequence", "states": "sequence"}, InputError, "'states' is per token"),
        ({"nothing": "token"}, InputError, "there is no output 'nothing'; there are: states"),
    ],
)
def test_outputs_of_a_third_kind_must_be_stated(
    stated: Any, error: Any, message: str, make: Callable, tmp_path: Path
) -> None:
    model = make("bert", "eager", output_attentions=True)
    names = ("states", "pooled", "attentions", "more")
    path = export(model, tmp_path / "model.onnx", names)
    with pytest.raises(error, match=message):
        onnxpack.pack(path, tmp_path / "packed.onnx", "mask", outputs={"more": "token"} | stated)


def test_an_output_kind_that_is_passed_is_used(
    make: Callable, sequences: list[Tokens], tmp_path: Path
) -> None:
    """[batch, tokens × width] shows neither; what is stated is compared as everything is."""
    head = Sentence(make("bert"), "flat")
    POOLINGS["flat"] = lambda hidden, mask: hidden.flatten(1)
    path = export(head, tmp_path / "model.onnx", ("states", "flat"))
    with pytest.raises(CheckpointError, match="output 'flat' is neither"):
        onnxpack.pack(path, tmp_path / "packed.onnx", "mask")
    report = onnxpack.pack(path, tmp_path / "packed.onnx", "mask", outputs={"flat": "token"})
    assert report.facts.outputs["flat"] == "token"


def changed(path: Path, to: Path, change: Callable[[onnx.ModelProto], None]) -> Path:
    model = onnx.load(path)
    change(model)
    onnx.save(model, to)
    return to


def rename_input(model: onnx.ModelProto) -> None:
    model.graph.input[2].name = "speaker_ids"
    for node in model.graph.node:
        node.input[:] = ["speaker_ids" if n == "token_type_ids" else n for n in node.input]


def bake_positions(model: onnx.ModelProto) -> None:
    """As if positions were computed in advance: their table is not looked up, only added."""
    graph = model.graph
    table = next(t for t in graph.initializer if "position_embeddings" in t.name)
    lookup = next(n for n in graph.node if table.name in n.input)
    lookup.CopyFrom(
        helper.make_node("ReduceMean", [table.name], lookup.output, axes=[0], keepdims=1)
    )


def multiply_mask(model: onnx.ModelProto) -> None:
    for node in model.graph.node:
        if node.op_type == "Softmax":
            next(n for n in model.graph.node if n.output[0] == node.input[0]).op_type = "Mul"


def age(model: onnx.ModelProto) -> None:
    model.opset_import[0].version = 10


REFUSED = [
    (rename_input, "input 'speaker_ids' is not one that packing knows"),
    (bake_positions, "found 0 tables that are looked up by position"),
    (multiply_mask, r"node '.*' \(Mul\) joins mask and scores"),
    (age, "opset 10"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=lambda x: getattr(x, "__name__", ""))
def test_strange_graphs_are_refused(
    change: Callable, message: str, exported: Exported, tmp_path: Path
) -> None:
    path = changed(exported("bert:eager"), tmp_path / "strange.onnx", change)
    with pytest.raises(CheckpointError, match=message):
        onnxpack.pack(path, tmp_path / "packed.onnx", "mask")
    assert not (tmp_path / "packed.onnx").exists()


def test_fixed_shapes_are_refused(make: Callable, tmp_path: Path) -> None:
    path = export(make("bert"), tmp_path / "fixed.onnx", OUTPUTS["bert"], dynamic=False)
    with pytest.raises(CheckpointError, match="are its axes dynamic"):
        onnxpack.pack(path, tmp_path / "packed.onnx", "mask")


def test_fused_models_are_refused(exported: Exported, tmp_path: Path) -> None:
    path = changed(exported("bert:eager"), tmp_path / "attention.onnx", fuse_by_hand)
    with pytest.raises(CheckpointError, match=r"node 'one' \(MultiHeadAttention\) was fused"):
        onnxpack.pack(path, tmp_path / "packed.onnx", "mask")


def fuse_by_hand(model: onnx.ModelProto) -> None:
    """What the optimiser makes depends on its version; its operation does not."""
    node = helper.make_node(
        "MultiHeadAttention", ["a", "b", "c"], ["d"], "one", domain="com.microsoft", num_heads=2
    )
    model.graph.node.insert(0, node)
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))


def test_a_packed_model_is_not_packed_again(exported: Exported, tmp_path: Path) -> None:
    target = tmp_path / "packed.onnx"
    onnxpack.pack(exported("bert:eager"), target, "mask")
    with pytest.raises(InputError, match="packed already"):
        onnxpack.pack(target, tmp_path / "again.onnx", "mask")
    with pytest.raises(InputError, match="is the model to be packed"):
        onnxpack.pack(target, target, "mask", overwrite=True)
    old = target.read_bytes()
    with pytest.raises(InputError, match="is there already"):
        onnxpack.pack(exported("bert:eager"), target, "repack")
    assert target.read_bytes() == old
    onnxpack.pack(exported("bert:eager"), target, "repack", overwrite=True)
    assert target.read_bytes() != old and list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("content", [b"", b"no model", b"\x08\x07"])
def test_files_that_are_no_models(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(content)
    with pytest.raises(CheckpointError, match="is no ONNX model"):
        onnxpack.pack(tmp_path / "model.onnx", tmp_path / "packed.onnx", "mask")
    with pytest.raises(InputError, match="there is no"):
        onnxpack.pack(tmp_path / "absent.onnx", tmp_path / "packed.onnx", "mask")


def test_weights_outside_the_folder_are_refused(exported: Exported, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    source = folder / "model.onnx"
    model = onnx.load(exported("bert:eager"))
    onnx.save(model, source, save_as_external_data=True, location="weights", size_threshold=0)
    (folder / "weights").rename(tmp_path / "weights")
    model = onnx.load(source, load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            entry.value = "../weights" if entry.key == "location" else entry.value
    onnx.save(model, source)
    with pytest.raises(CheckpointError, match="not a file beside the model"):
        onnxpack.pack(source, tmp_path / "packed.onnx", "mask")


def test_a_graph_inside_a_node_keeps_what_it_reads(exported: Exported, tmp_path: Path) -> None:
    """A branch takes values from outside without naming them as inputs."""

    def branch(model: onnx.ModelProto) -> None:
        graph = model.graph
        node = next(n for n in graph.node if n.op_type == "Tanh")
        bodies = {}
        for name in ("then_branch", "else_branch"):
            inner = helper.make_node("Tanh", [node.input[0]], [f"{name}_result"])
            info = helper.make_tensor_value_info(f"{name}_result", TensorProto.FLOAT, None)
            bodies[name] = helper.make_graph([inner], name, [], [info])
        graph.initializer.append(numpy_helper.from_array(np.array(True), "yes"))
        built = helper.make_node("If", ["yes"], list(node.output), "choice", **bodies)
        node.CopyFrom(built)

    path = changed(exported("bert:eager"), tmp_path / "branch.onnx", branch)
    assert onnxpack.pack(path, tmp_path / "packed.onnx", "repack").difference < 1e-5
