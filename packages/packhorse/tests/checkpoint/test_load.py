"""Models saved by transformers give the same results here, and ours the same there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from packhorse import checkpoint
from packhorse.errors import CheckpointError, InputError
from packhorse.packing.batch import Packed

# class → our heads, and where transformers puts the same tensor
OUTPUTS = {
    "BertModel": {"hidden": "last_hidden_state", "pooled": "pooler_output"},
    "BertForPreTraining": {"mlm": "prediction_logits", "nsp": "seq_relationship_logits"},
    "BertForMaskedLM": {"mlm": "logits"},
    "BertForNextSentencePrediction": {"nsp": "logits"},
    "BertForQuestionAnswering": {"span": "start_logits"},
    "BertForSequenceClassification": {"classify": "logits"},
    "BertForTokenClassification": {"tokens": "logits"},
}
Tensors = dict[str, torch.Tensor]
Save = Callable[..., tuple[Any, Path]]
Run = Callable[[Any, str], torch.Tensor]


def edit(folder: Path, change: Callable[[Tensors], object] | None = None, **config: Any) -> Path:
    """Change the tensors and the configuration of a saved model."""
    if change:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


def same(model: Any, folder: Path, packed: Packed, reference_run: Run) -> None:
    """Every output that transformers has for a model is ours too."""
    loaded = checkpoint.load(folder).model
    for head, output in OUTPUTS[type(model).__name__].items():
        with torch.inference_mode():
            (got,) = loaded(packed, head)
        want = reference_run(model, output)
        if head == "span":
            want = torch.stack([want, reference_run(model, "end_logits")], dim=1)
        assert_close(got, want, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", OUTPUTS)
def test_every_class_of_transformers(
    kind: str, save: Save, reference_run: Run, packed: Packed
) -> None:
    model, folder = save(kind)
    same(model, folder, packed, reference_run)
    edit(folder, lambda t: [t[n].add_(1e-3) for n in t if n.endswith("embeddings.LayerNorm.bias")])
    with pytest.raises(AssertionError):
        same(model, folder, packed, reference_run)


@pytest.mark.parametrize("act", ["gelu_new", "gelu_pytorch_tanh", "relu", "silu", "swish", "tanh"])
def test_activations(act: str, save: Save, reference_run: Run, packed: Packed) -> None:
    model, folder = save("BertForMaskedLM", hidden_act=act)
    same(model, folder, packed, reference_run)


@pytest.mark.parametrize("kind", OUTPUTS)
def test_transformers_loads_what_we_write(
    kind: str, save: Save, transformers: ModuleType, tmp_path: Path
) -> None:
    model, folder = save(kind)
    checkpoint.write(tmp_path / "ours", checkpoint.load(folder))
    again, info = getattr(transformers, kind).from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert again.state_dict().keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    unlike = {k for k, v in model.config.to_dict().items() if again.config.to_dict()[k] != v}
    assert unlike <= {"_name_or_path", "dtype", "problem_type"}


def test_shards_both_ways(
    save: Save, reference_run: Run, packed: Packed, transformers: ModuleType, tmp_path: Path
) -> None:
    model, folder = save("BertForMaskedLM", shard="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    same(model, folder, packed, reference_run)
    loaded = checkpoint.load(folder)
    checkpoint.write(tmp_path / "ours", loaded, max_shard_bytes=20_000)
    assert len(list((tmp_path / "ours").glob("model-*-of-*.safetensors"))) > 2
    same(model, tmp_path / "ours", packed, reference_run)
    again = transformers.BertForMaskedLM.from_pretrained(tmp_path / "ours")
    assert_close(reference_run(again, "logits"), reference_run(model, "logits"), atol=1e-6, rtol=0)


def old_spelling(tensors: Tensors) -> None:
    for name in list(tensors):
        old = name.replace("LayerNorm.weight", "LayerNorm.gamma")
        tensors[old.replace("LayerNorm.bias", "LayerNorm.beta")] = tensors.pop(name)


SPELLINGS: dict[str, Callable[[Tensors], object]] = {
    "gamma and beta": old_spelling,
    "position_ids": lambda t: t.update({"bert.embeddings.position_ids": torch.arange(24)[None]}),
    "a copy of the tied decoder": lambda t: t.update(
        {"cls.predictions.decoder.weight": t["bert.embeddings.word_embeddings.weight"].clone()}
    ),
    "the new name of the bias": lambda t: t.update(
        {"cls.predictions.decoder.bias": t.pop("cls.predictions.bias")}
    ),
    "both names of the bias": lambda t: t.update(
        {"cls.predictions.decoder.bias": t["cls.predictions.bias"].clone()}
    ),
    "the pooler not used": lambda t: t.update(
        {"bert.pooler.dense.weight": torch.randn(32, 32), "bert.pooler.dense.bias": torch.randn(32)}
    ),
    "what is left of another head": lambda t: t.update(
        {"cls.seq_relationship.weight": torch.randn(2, 32)}
    ),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings(spelling: str, save: Save, reference_run: Run, packed: Packed) -> None:
    model, folder = save("BertForMaskedLM")
    edit(folder, SPELLINGS[spelling])
    same(model, folder, packed, reference_run)
    loaded = checkpoint.load(folder)
    assert loaded.model.heads["mlm"].decoder.weight is loaded.model.bert.embed.words.weight
    harmless = {"position_ids": 1, "both names of the bias": 1, "what is left of another head": 1}
    assert len(loaded.report.unexpected) == harmless.get(spelling, 0)


@pytest.mark.parametrize("settings", [True, False])
def test_scores_that_are_not_the_embeddings(
    settings: bool,
    save: Save,
    reference_run: Run,
    packed: Packed,
    transformers: ModuleType,
    tmp_path: Path,
) -> None:
    """Whatever `tie_word_embeddings` says: the file has both, and they differ."""
    model, folder = save("BertForMaskedLM", tie_word_embeddings=False)
    edit(folder, tie_word_embeddings=settings)
    same(model, folder, packed, reference_run)
    checkpoint.write(tmp_path / "ours", checkpoint.load(folder))
    again = transformers.BertForMaskedLM.from_pretrained(tmp_path / "ours")
    assert_close(reference_run(again, "logits"), reference_run(model, "logits"), atol=1e-6, rtol=0)


def test_heads_share_one_pooler(save: Save) -> None:
    _, folder = save("BertForPreTraining")
    heads = checkpoint.load(folder).model.heads
    assert list(heads) == ["pooled", "mlm", "nsp", "embed"]
    assert heads["nsp"].pooler is heads["pooled"]
    _, folder = save("BertForQuestionAnswering")
    assert list(checkpoint.load(folder).model.heads) == ["span"]


def test_a_token_classifier_may_keep_a_pooler(save: Save) -> None:
    """The architecture decides; without one the pooler does."""
    _, folder = save("BertForSequenceClassification")
    assert "classify" in checkpoint.load(edit(folder, architectures=None)).model.heads
    edit(folder, architectures=["BertForTokenClassification"])
    assert list(checkpoint.load(folder).model.heads) == ["pooled", "tokens"]


def test_vectors_of_a_plain_encoder_are_means(
    save: Save, reference_run: Run, packed: Packed
) -> None:
    model, folder = save("BertModel")
    states = packed.split(reference_run(model, "last_hidden_state"))
    (got,) = checkpoint.load(folder).model(packed, "embed")
    assert_close(got, torch.stack([s.mean(0) for s in states]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("stored", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("requested", [torch.float32, torch.bfloat16, torch.float64])
def test_dtypes(stored: torch.dtype, requested: torch.dtype, save: Save) -> None:
    _, folder = save("BertModel")
    edit(folder, lambda t: t.update({name: tensor.to(stored) for name, tensor in t.items()}))
    loaded = checkpoint.load(folder, dtype=requested).model
    assert {parameter.dtype for parameter in loaded.parameters()} == {requested}
    words = load_file(folder / "model.safetensors")["embeddings.word_embeddings.weight"]
    assert torch.equal(loaded.bert.embed.words.weight, words.to(requested))
    assert not loaded.training


def test_the_dtype_is_written(save: Save, transformers: ModuleType, tmp_path: Path) -> None:
    _, folder = save("BertModel")
    checkpoint.write(tmp_path / "half", checkpoint.load(folder, dtype=torch.bfloat16))
    assert transformers.BertModel.from_pretrained(tmp_path / "half").dtype == torch.bfloat16


MISFITS: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "missing": (
        lambda t: t.pop("bert.encoder.layer.1.attention.self.key.bias"),
        r"1 missing \(bert\.encoder\.layer\.1\.attention\.self\.key\.bias \[32\]\)",
    ),
    "promised head": (
        lambda t: [t.pop(n) for n in list(t) if n.startswith("qa_")],
        r"2 missing \(qa_outputs\.weight \[2, 32\], qa_outputs\.bias \[2\]\)",
    ),
    "other shape": (
        lambda t: t.update({"bert.encoder.layer.0.output.dense.weight": torch.zeros(48, 32)}),
        r"1 of another shape \(bert\.encoder\.layer\.0\.output\.dense\.weight: "
        r"\[48, 32\] for \[32, 48\]\)",
    ),
    "unknown": (
        lambda t: t.update({"bert.encoder.layer.0.adapter.weight": torch.zeros(2)}),
        r"1 unknown \(bert\.encoder\.layer\.0\.adapter\.weight\)",
    ),
    "many": (
        lambda t: [t.pop(n) for n in list(t) if ".layer." in n],
        r"32 missing \(bert\.encoder.*, …\)",
    ),
    "quantized": (
        lambda t: t.update({"qa_outputs.bias": torch.zeros(2, dtype=torch.int8)}),
        r"qa_outputs\.bias holds torch\.int8",
    ),
    "two names": (
        lambda t: t.update({"bert.embeddings.LayerNorm.gamma": torch.zeros(32)}),
        r"two names of one tensor",
    ),
}


@pytest.mark.parametrize("case", MISFITS)
def test_tensors_that_do_not_fit(case: str, save: Save) -> None:
    _, folder = save("BertForQuestionAnswering")
    change, message = MISFITS[case]
    with pytest.raises(CheckpointError, match=message) as caught:
        checkpoint.load(edit(folder, change))
    assert str(folder) in str(caught.value)


def test_missing_names_are_spelled_as_in_the_file(save: Save) -> None:
    _, folder = save("BertModel")
    edit(folder, lambda t: t.pop("embeddings.word_embeddings.weight"))
    with pytest.raises(
        CheckpointError, match=r"\(embeddings\.word_embeddings\.weight \[50, 32\]\)"
    ):
        checkpoint.load(folder)


def test_values_that_are_not_finite(save: Save) -> None:
    _, folder = save("BertModel")
    name = "encoder.layer.0.attention.self.key.weight"
    edit(folder, lambda t: t[name][0, :3].fill_(float("nan")))
    with pytest.raises(CheckpointError, match=rf"NaN or infinity \({name}: 3 values\)"):
        checkpoint.load(folder)
    assert checkpoint.load(folder, allow_nonfinite=True).report.nonfinite == {name: 3}


def test_values_out_of_range(save: Save) -> None:
    """Large is not wrong: only a cast that loses it is."""
    _, folder = save("BertModel")
    name = "encoder.layer.1.output.dense.bias"
    edit(folder, lambda t: t[name].fill_(1e38))
    assert not checkpoint.load(folder).report.nonfinite
    assert not checkpoint.load(folder, dtype=torch.bfloat16).report.overflowed
    with pytest.raises(CheckpointError, match=rf"beyond the range of fp16 \({name}: 32 values\)"):
        checkpoint.load(folder, dtype=torch.float16)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "family": (
        {"model_type": "deberta"},
        "model_type 'deberta' does not run.*: bert, roberta",
    ),
    "names of another family": ({"model_type": "roberta"}, r"named bert\.…, but .* roberta\.…"),
    "family is no name": ({"model_type": ["bert"]}, "model_type"),
    "architecture": ({"architectures": ["BertLMHeadModel"]}, "'BertLMHeadModel' does not run"),
    "positions": ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
    "decoder": ({"is_decoder": True}, "is_decoder True"),
    "cross-attention": ({"add_cross_attention": True}, "add_cross_attention"),
    "activation": ({"hidden_act": "mish"}, "hidden_act 'mish' is unknown"),
    "activation is no name": ({"hidden_act": {}}, "hidden_act"),
    "heads": ({"num_attention_heads": 5}, "5 heads do not divide"),
    "no layers": ({"num_hidden_layers": 0}, "layers is 0"),
    "huge": ({"vocab_size": 10**12}, "vocab_size"),
    "not a count": ({"hidden_size": "32"}, "hidden_size is '32'"),
    "epsilon": ({"layer_norm_eps": "small"}, "layer_norm_eps 'small'"),
    "epsilon is NaN": ({"layer_norm_eps": float("nan")}, "epsilon nan"),
    "problem": ({"problem_type": "guess"}, "problem_type 'guess'"),
    "labels with a gap": ({"id2label": {"0": "a", "2": "b"}}, "without a gap"),
    "labels that are no map": ({"id2label": ["a", "b"]}, "id2label"),
    "too few labels": ({"id2label": {"0": "a"}}, r"classifier\.weight: \[3, 32\] for \[1, 32\]"),
    "too many layers": ({"num_hidden_layers": 1000}, "1000 layers in a file of 41 tensors"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_configurations_that_do_not_run(case: str, save: Save) -> None:
    _, folder = save("BertForSequenceClassification", num_labels=3)
    change, message = REFUSED[case]
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load(edit(folder, **change))


@pytest.mark.parametrize("text", ["", "[]", "{", "\x00", "[" * 100_000, '{"vocab_size": 50}'])
def test_configurations_that_are_none(text: str, save: Save) -> None:
    _, folder = save("BertModel")
    (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match="config"):
        checkpoint.load(folder)


def test_a_given_configuration_wins(save: Save, tmp_path: Path) -> None:
    """Over one that is broken, and over one that says something else."""
    _, folder = save("BertModel")
    good = (folder / "config.json").rename(tmp_path / "good.json")
    for text in ("{", "[]", '{"model_type": "gpt2"}'):
        (folder / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"config\.json.*--config"):
            checkpoint.load(folder)
        for config in (good, json.loads(good.read_text())):
            for model in (folder, folder / "model.safetensors"):
                assert checkpoint.load(model, config=config).config.layers == 2


def test_its_own_configuration_comes_first(save: Save) -> None:
    """Before one of TensorFlow's in the same folder."""
    _, folder = save("BertModel")
    (folder / "bert_config.json").write_text("{")
    assert checkpoint.load(folder).config.heads == 4


def test_two_biases_of_tied_scores(save: Save) -> None:
    """Which of them is the model's would be a guess; without ties transformers takes one."""
    _, folder = save("BertForMaskedLM")
    bias = torch.randn(50)
    edit(folder, lambda t: t.update({"cls.predictions.decoder.bias": bias}))
    with pytest.raises(CheckpointError, match=r"decoder\.bias and cls\.predictions\.bias .*fer"):
        checkpoint.load(folder)
    edit(folder, lambda t: t.update({"cls.predictions.decoder.bias": bias[:7].clone()}))
    with pytest.raises(CheckpointError, match="two names of one tensor, and they differ"):
        checkpoint.load(folder)
    edit(folder, lambda t: t.update({"cls.predictions.bias": bias.clone()}))
    edit(folder, lambda t: t.update({"cls.predictions.decoder.bias": bias}))
    state = checkpoint.load(folder).model.state_dict()
    assert torch.equal(state["heads.mlm.decoder.bias"], bias)


BEGUN: dict[str, tuple[str, str, str]] = {
    "the word scores": ("BertForMaskedLM", "cls.predictions.bias", "[50]"),
    "their norm": ("BertForMaskedLM", "cls.predictions.transform.LayerNorm.weight", "[32]"),
    "spans": ("BertForQuestionAnswering", "qa_outputs.bias", "[2]"),
    "sequences": ("BertForSequenceClassification", "classifier.bias", "[2]"),
    "tokens": ("BertForTokenClassification", "classifier.bias", "[2]"),
    "the pooler": ("BertForSequenceClassification", "bert.pooler.dense.bias", "[32]"),
    "the pooler alone": ("BertModel", "pooler.dense.weight", "[32, 32]"),
}


@pytest.mark.parametrize("case", BEGUN)
@pytest.mark.parametrize("promised", [True, False])
def test_a_head_that_is_only_begun(case: str, promised: bool, save: Save) -> None:
    """Also where no architecture promises it."""
    kind, gone, shape = BEGUN[case]
    _, folder = save(kind)
    edit(folder, lambda t: t.pop(gone), architectures=[kind] if promised else None)
    with pytest.raises(CheckpointError, match=re.escape(f": 1 missing ({gone} {shape}) (the con")):
        checkpoint.load(folder)


def test_what_is_not_used_is_noted(save: Save) -> None:
    _, folder = save("BertForMaskedLM")
    assert checkpoint.load(edit(folder, SPELLINGS["position_ids"])).notes == ()
    edit(folder, SPELLINGS["what is left of another head"])
    loaded = checkpoint.load(folder)
    assert loaded.notes == ("not used: 1 tensors (cls.seq_relationship.weight)",)
    edit(folder, lambda t: t.update({f"cls.more.{n}": torch.zeros(1) for n in range(20)}))
    assert checkpoint.load(folder).notes[0].startswith("not used: 21 tensors (cls.")
    assert checkpoint.load(folder).notes[0].endswith(", …)")


def test_labels_and_problems(save: Save) -> None:
    named = {
        "id2label": {0: "good", 1: "bad", 2: "odd"},
        "label2id": {"good": 0, "bad": 1, "odd": 2},
    }
    kind = "BertForSequenceClassification"
    for settings, labels, problem in (
        (named, ("good", "bad", "odd"), "single_label"),
        ({}, ("LABEL_0", "LABEL_1"), "single_label"),
        ({"num_labels": 1}, ("LABEL_0",), "regression"),
        ({"problem_type": "multi_label_classification"}, ("LABEL_0", "LABEL_1"), "multi_label"),
    ):
        loaded = checkpoint.load(save(kind, **settings)[1])
        assert (loaded.labels, loaded.problem) == (labels, problem)
    assert checkpoint.load(save("BertModel", **named)[1]).labels == ()


def test_the_longest_sequence(save: Save, tokenizer: Callable[..., None]) -> None:
    _, folder = save("BertModel")
    assert checkpoint.load(folder).max_length == 24
    for settings, length in ((10**30, 24), (512, 24), (16, 16), (None, 24)):
        tokenizer(folder, model_max_length=settings)
        assert checkpoint.load(folder).max_length == length
    tokenizer(folder, model_max_length=0)
    with pytest.raises(CheckpointError, match="maximum length 0"):
        checkpoint.load(folder)


def test_a_written_folder_is_whole(
    save: Save, tokenizer: Callable[..., None], tmp_path: Path
) -> None:
    _, folder = save("BertModel", my_own_key="kept")
    tokenizer(folder)
    (folder / "model_notes.txt").write_text("not part of the model")
    loaded = checkpoint.load(folder)
    assert checkpoint.write(tmp_path / "new" / "one", loaded) == tmp_path / "new" / "one"
    result = {path.name for path in (tmp_path / "new" / "one").iterdir()}
    assert result == {"config.json", "model.safetensors", "tokenizer_config.json", "vocab.txt"}
    assert len({path.stat().st_mode for path in (tmp_path / "new" / "one").iterdir()}) == 1
    raw = json.loads((tmp_path / "new" / "one" / "config.json").read_text())
    assert raw["my_own_key"] == "kept" and raw["architectures"] == ["BertModel"]
    with pytest.raises(InputError, match="not empty"):
        checkpoint.write(tmp_path / "new" / "one", loaded)
    checkpoint.write(folder, loaded, overwrite=True)  # onto itself, tokenizer and all
    assert checkpoint.load(folder).report == checkpoint.LoadReport()
    assert not [path for path in tmp_path.rglob(".*")]


def test_a_failed_write_leaves_nothing(save: Save, tmp_path: Path) -> None:
    _, folder = save("BertModel")
    (folder / "vocab.txt").mkdir()  # found when most files are written
    loaded = checkpoint.load(folder)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    for target in (tmp_path / "new", folder):
        with pytest.raises(CheckpointError, match=r"vocab\.txt is not a regular file"):
            checkpoint.write(target, loaded, overwrite=True)
    assert {path for path in tmp_path.rglob("*")} == set(before)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is a file"):
        checkpoint.write(tmp_path / "file", loaded, overwrite=True)
    with pytest.raises(CheckpointError, match="cannot be written"):
        checkpoint.write(tmp_path / "file" / "below", loaded)


def test_minilm_against_transformers(minilm: Path, transformers: ModuleType) -> None:
    loaded = checkpoint.load("all-MiniLM-L6-v2")
    assert (loaded.name, loaded.max_length) == ("all-MiniLM-L6-v2", 256)
    assert loaded.vocabulary == minilm and loaded.report.unexpected == ("embeddings.position_ids",)
    rng = np.random.default_rng(0)
    ids = [torch.from_numpy(rng.integers(0, 30_522, n)) for n in (3, 17, 128)]

    class Row:
        def __init__(self, ids: torch.Tensor) -> None:
            self.ids, self.types = ids, torch.zeros_like(ids)

    reference = transformers.BertModel.from_pretrained(minilm).eval()
    with torch.inference_mode():
        hidden, vectors = loaded.model(Packed.build([Row(i) for i in ids]), "hidden", "embed")
        want = torch.cat([reference(i[None]).last_hidden_state[0] for i in ids])
    assert_close(hidden, want, atol=1e-5, rtol=0)
    means = torch.stack([piece.mean(0) for piece in want.split([3, 17, 128])])
    assert_close(vectors, torch.nn.functional.normalize(means), atol=1e-5, rtol=0)


HALF = """
import resource, sys
from packhorse import checkpoint
checkpoint.load(sys.argv[1])  # what Python imports is imported, as a small model needs it
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
model = checkpoint.load(sys.argv[2])
print(peak() - before)
"""


def test_half_precision_takes_twice_its_file(save: Save, tmp_path: Path) -> None:
    """Computed in fp32 as it is; a copy of the file or of the weights beside that would show."""
    folders = {}
    for name, words in (("small", 100), ("large", 400_000)):
        model, _ = save("BertModel", vocab_size=words, hidden_size=128)
        model.half().save_pretrained(tmp_path / name)
        folders[name] = tmp_path / name
    size = (folders["large"] / "model.safetensors").stat().st_size
    assert size > 100_000_000
    reported = subprocess.run(
        [sys.executable, "-c", HALF, str(folders["small"]), str(folders["large"])],
        capture_output=True,
        text=True,
    )
    assert reported.returncode == 0, reported.stderr
    assert int(reported.stdout) < 2 * size + (64 << 20)
