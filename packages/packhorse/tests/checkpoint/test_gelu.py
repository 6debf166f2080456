"""Which GELU a TensorFlow model computes; the oracle is the graph itself, run by TensorFlow.

Google's configurations call both forms `gelu`, so every configuration here does.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from packhorse import checkpoint
from packhorse.checkpoint import Checkpoint, gelu
from packhorse.checkpoint.inspection import inspect
from packhorse.checkpoint.tensorflow import freezing, frozen, graphdef
from packhorse.errors import CheckpointError, InputError
from packhorse.packing.batch import Packed

FORMS = {"erf": "gelu", "tanh": "gelu_new"}
OTHER = {"erf": "tanh", "tanh": "erf"}


@pytest.fixture(scope="module")
def model(tf: ModuleType, tf_bert: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """By form: the files that TensorFlow wrote of a model, and what it computes."""
    created: dict[str, SimpleNamespace] = {}

    def model(form: str) -> SimpleNamespace:
        if form not in created:
            built = tf_bert.build(tf, {"hidden_act": FORMS[form]})
            built.config["hidden_act"] = "gelu"
            folder = tmp_path_factory.mktemp(form)
            batch = tf_bert.batch(built.config)
            created[form] = SimpleNamespace(
                folder=folder,
                meta=tf_bert.save(tf, built, folder / "model.ckpt"),
                frozen=tf_bert.freeze(tf, built, folder / "frozen.pb"),
                batch=batch,
                outputs=tf_bert.run(tf, built, *batch),
                weights=built.weights,
            )
        return created[form]

    return model


@pytest.fixture
def bare(model: Callable[[str], SimpleNamespace], tmp_path: Path) -> Callable[[str], Path]:
    """The checkpoint alone, without its graph."""

    def bare(form: str) -> Path:
        folder = tmp_path / f"bare-{form}"
        shutil.copytree(model(form).folder, folder, dirs_exist_ok=True)
        for name in ("model.ckpt.meta", "frozen.pb", "checkpoint"):
            (folder / name).unlink(missing_ok=True)
        return folder / "model.ckpt"

    return bare


def difference(loaded: Checkpoint, reference: SimpleNamespace) -> float:
    """The largest difference of hidden states and word scores."""
    ids, mask, segments = reference.batch
    sequences = [
        SimpleNamespace(ids=i[:n], types=s[:n])
        for i, s, n in zip(ids, segments, mask.sum(1), strict=True)
    ]
    with torch.no_grad():
        result = loaded.model(Packed.build(sequences), "hidden", "mlm")
    expected = [
        reference.outputs[name][mask.astype(bool)] for name in ("sequence_output", "mlm_logits")
    ]
    return max(float(np.abs(a.numpy() - b).max()) for a, b in zip(result, expected, strict=True))


@pytest.mark.parametrize("location", ["meta", "frozen"])
@pytest.mark.parametrize("form", FORMS)
def test_the_form_of_gelu_is_read_from_the_graph(form: str, location: str, model: Callable) -> None:
    reference = model(form)
    path = getattr(reference, location)
    loaded = checkpoint.load(path)
    assert difference(loaded, reference) <= 1e-5
    name = "model.ckpt.meta" if location == "meta" else "frozen.pb"
    assert (loaded.gelu.form, loaded.gelu.reason) == (form, f"the nodes of {name} compute it so")
    # The control: the other form, which the user may insist on.
    wrong = checkpoint.load(path, gelu=OTHER[form])
    assert difference(wrong, reference) > 1e-4
    assert f"although {name} computes it by {form}" in wrong.gelu.reason


@pytest.mark.parametrize("form", FORMS)
def test_a_bare_checkpoint_is_exact_and_says_so_once(
    form: str, bare: Callable, model: Callable
) -> None:
    with warnings.catch_warnings(record=True) as reported:
        warnings.simplefilter("always")
        loaded = checkpoint.load(bare(form))
    assert [item.category for item in reported] == [gelu.GeluWarning]
    for part in ("transformers does", "February 2019", "--gelu tanh (gelu='tanh')", "--gelu erf"):
        assert part in str(reported[0].message)
    assert loaded.gelu.form == "erf" and loaded.raw["hidden_act"] == "gelu"
    assert (difference(loaded, model(form)) <= 1e-5) == (form == "erf")
    message = checkpoint.load(bare(form).parent, gelu=form)  # without a warning, which is an error
    assert (
        difference(message, model(form)) <= 1e-5 and message.gelu.reason == "--gelu (gelu=) says so"
    )


def test_a_configuration_of_transformers_is_clear(bare: Callable) -> None:
    """It names its model_type, and there `gelu` is exact and `gelu_new` is not."""
    prefix = bare("erf")
    place = prefix.with_name("bert_config.json")
    raw = json.loads(place.read_text())
    for settings, form in {"gelu": "erf", "gelu_new": "tanh"}.items():
        place.write_text(json.dumps(raw | {"model_type": "bert", "hidden_act": settings}))
        loaded = checkpoint.load(prefix)
        assert loaded.gelu.form == form and f"hidden_act '{settings}'" in loaded.gelu.reason
    place.write_text(json.dumps(raw | {"hidden_act": "relu"}))
    assert checkpoint.load(prefix).gelu.form == ""
    with pytest.raises(InputError, match="the configuration says hidden_act 'relu'"):
        checkpoint.load(prefix, gelu="tanh")
    with pytest.raises(InputError, match="is 'fast'; it is erf or tanh"):
        checkpoint.load(prefix, gelu="fast")
    place.unlink()
    with pytest.warns(gelu.GeluWarning):
        checkpoint.load(prefix, heads=4)


def test_conversions_keep_the_form(
    model: Callable, transformers: ModuleType, tmp_path: Path
) -> None:
    """Through Hugging Face, TensorFlow, ONNX and a graph frozen here."""
    reference = model("tanh")
    folder = checkpoint.write(tmp_path / "hf", checkpoint.load(reference.meta), to="hf")
    assert json.loads((folder / "config.json").read_text())["hidden_act"] == "gelu_new"
    ids, mask, segments = (torch.from_numpy(x.astype(np.int64)) for x in reference.batch)
    second = transformers.BertForPreTraining.from_pretrained(folder).eval()
    with torch.no_grad():
        scores = second(input_ids=ids, attention_mask=mask, token_type_ids=segments)
    real = mask.bool().numpy()
    expected = reference.outputs["mlm_logits"][real]
    assert np.abs(scores.prediction_logits.numpy()[real] - expected).max() <= 1e-5
    path = folder
    for to in ("tf1", "onnx", "hf"):
        path = checkpoint.write(tmp_path / f"to-{to}", checkpoint.load(path), to=to)
        loaded = checkpoint.load(path)
        assert loaded.gelu.form == "tanh" and difference(loaded, reference) <= 1e-5
    outputs = ["sequence_output", "mlm_logits"]
    freezing.freeze(None, reference.meta, outputs, tmp_path / "frozen.pb")
    loaded = checkpoint.load(tmp_path / "frozen.pb", config=reference.folder / "bert_config.json")
    assert loaded.gelu.form == "tanh" and difference(loaded, reference) <= 1e-5


def test_inspection_prints_it_and_why(model: Callable, bare: Callable) -> None:
    result = inspect(model("tanh").frozen)
    assert (result.gelu, result.gelu_reason) == ("tanh", "the nodes of frozen.pb compute it so")
    assert result.config["activation"] == "gelu_tanh"
    assert inspect(bare("tanh"), gelu="erf").gelu == "erf"
    with pytest.warns(gelu.GeluWarning):
        assert "transformers reads it so" in inspect(bare("erf").parent).gelu_reason


def test_a_damaged_graph_is_reported(bare: Callable, model: Callable) -> None:
    prefix = bare("tanh")
    whole = (model("tanh").folder / "model.ckpt.meta").read_bytes()
    prefix.with_name("model.ckpt.meta").write_bytes(whole[: len(whole) // 2])
    with pytest.warns(gelu.GeluWarning):
        loaded = checkpoint.load(prefix)
    assert any("model.ckpt.meta is not read" in note for note in loaded.notes)


def forms(tf: ModuleType, folder: Path, compute: Callable[[Any], Any], dtype: str) -> frozenset:
    """What is seen in the graph of a function of TensorFlow 2."""
    function = tf.function(compute).get_concrete_function(tf.TensorSpec([2, 3], dtype))
    path = folder / "graph.pb"
    path.write_bytes(function.graph.as_graph_def().SerializeToString())
    data = memoryview(path.read_bytes())
    with path.open("rb") as file:
        return gelu.forms_in_nodes(data, graphdef.nodes(data, 0, len(data)), file)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_forms_by_their_nodes(dtype: str, tf: ModuleType, tmp_path: Path) -> None:
    """TensorFlow's own gelu in both forms; a Tanh alone is a pooler's."""
    exact = forms(tf, tmp_path, lambda x: tf.nn.gelu(x, approximate=False), dtype)
    tanh = forms(tf, tmp_path, lambda x: tf.nn.gelu(x, approximate=True), dtype)
    none = forms(tf, tmp_path, lambda x: tf.tanh(tf.nn.relu(x) * 0.5), dtype)
    assert (exact, tanh, none) == ({"erf"}, {"tanh"}, set())


def test_both_forms_in_one_graph(tf: ModuleType, model: Callable, tmp_path: Path) -> None:
    folder = tmp_path / "both"
    shutil.copytree(model("tanh").folder, folder)
    graph = tf.compat.v1.GraphDef.FromString((folder / "frozen.pb").read_bytes())
    graph.node.add(name="second/Erf", op="Erf", input=["sequence_output"])
    (folder / "frozen.pb").write_bytes(graph.SerializeToString())
    with pytest.raises(CheckpointError, match=r"in both forms, by erf and by tanh.*--gelu"):
        checkpoint.load(folder / "frozen.pb")
    assert difference(checkpoint.load(folder / "frozen.pb", gelu="tanh"), model("tanh")) <= 1e-5


@pytest.mark.parametrize(("fused", "form"), [(b"GeluExact", "erf"), (b"GeluApproximate", "tanh")])
def test_a_gelu_that_was_fused_into_a_product(
    fused: bytes, form: str, tf: ModuleType, tmp_path: Path
) -> None:
    """As TensorFlow's optimizer names it, on processors where it fuses that far."""
    graph = tf.compat.v1.GraphDef()
    for name, op in (("x", "Placeholder"), ("w", "Const"), ("b", "Const")):
        graph.node.add(name=name, op=op).attr["dtype"].type = 1
    for node in graph.node[1:]:
        node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto([1.0, 2.0]))
    product = graph.node.add(name="y", op="_FusedMatMul", input=["x", "w", "b"])
    product.attr["fused_ops"].list.s.extend([b"BiasAdd", fused])
    (tmp_path / "frozen.pb").write_bytes(graph.SerializeToString())
    assert frozen.read(tmp_path / "frozen.pb").gelu == {form}
