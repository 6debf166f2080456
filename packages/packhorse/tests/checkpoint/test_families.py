"""Families beside BERT: models of transformers give the same results here, and ours there."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

import packhorse
from packhorse import attention, checkpoint
from packhorse.errors import CheckpointError, InputError
from packhorse.packing.batch import Packed
from packhorse.runtime.proof import prove

FAMILIES = ("Roberta", "XLMRoberta", "Camembert", "DistilBert", "Albert", "Electra")
# End of a class's name → our heads, and where transformers puts the same.
CLASSES = {
    "Model": {"hidden": "last_hidden_state"},
    "ForMaskedLM": {"mlm": "logits"},
    "ForSequenceClassification": {"classify": "logits"},
    "ForTokenClassification": {"tokens": "logits"},
    "ForQuestionAnswering": {"span": ("start_logits", "end_logits")},
}
CASES = [(family, ending) for family in FAMILIES for ending in CLASSES]
CASES += [("Electra", "ForPreTraining")]
NO_OFFSET = ("DistilBert", "Albert", "Electra")  # positions begin with the first row
Tensors = dict[str, torch.Tensor]


class Sizes(NamedTuple):
    layers: int = 2
    heads: int = 4
    head_size: int = 8
    intermediate: int = 40
    embedding: int = 16
    types: int = 1
    pad: int = 1
    activation: str = "gelu"
    lengths: tuple[int, ...] = (5, 24, 1, 9)
    seed: int = 7
    tied: bool = True
    groups: int = 1  # of ALBERT's layers
    inner: int = 1


USUAL = Sizes()


def make(transformers: ModuleType, family: str, ending: str, sizes: Sizes = USUAL) -> Any:
    """A random model of transformers, in float64."""
    rows = max(sizes.lengths) + (0 if family in NO_OFFSET else sizes.pad + 1)
    settings: dict[str, Any] = {
        "hidden_size": sizes.heads * sizes.head_size,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "intermediate_size": sizes.intermediate,
        "hidden_act": sizes.activation,
        "layer_norm_eps": 1e-5,
        "type_vocab_size": sizes.types,
        "pad_token_id": sizes.pad,
    }
    if family == "DistilBert":
        keys = ("dim", "n_layers", "n_heads", "hidden_dim", "activation")
        settings = dict(zip(keys, settings.values(), strict=False))
    if family in ("Albert", "Electra"):
        settings["embedding_size"] = sizes.embedding
    if family == "Albert":
        settings |= {"num_hidden_groups": sizes.groups, "inner_group_num": sizes.inner}
    labels = {} if ending == "ForQuestionAnswering" else {"num_labels": 3}
    config = getattr(transformers, f"{family}Config")(
        vocab_size=50,
        max_position_embeddings=rows,
        tie_word_embeddings=sizes.tied,
        **settings,
        **labels,
    )
    torch.manual_seed(sizes.seed)
    model = getattr(transformers, family + ending)(config).double().eval()
    with torch.no_grad():  # zeros and ones would hide a bias or a norm that went astray
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def saved(model: Any, folder: Path, change: Callable[[Tensors], object] | None = None) -> Path:
    model.save_pretrained(folder)
    if change:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def edit(folder: Path, **config: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


def sequences_of(sizes: Sizes) -> list[SimpleNamespace]:
    """Ids of all words, the padding word too; types where there are several."""
    random = np.random.default_rng(sizes.seed)
    return [
        SimpleNamespace(ids=random.integers(0, 50, n), types=random.integers(0, sizes.types, n))
        for n in sizes.lengths
    ]


def run_padded(
    model: Any, sequences: list[SimpleNamespace], output: Any, per_sequence: bool = False
) -> torch.Tensor:
    """The output of a padded batch, what is padding cut away, laid end to end."""
    longest = max(len(s.ids) for s in sequences)
    ids, types, mask = (torch.zeros(len(sequences), longest, dtype=torch.long) for _ in range(3))
    ids += model.config.pad_token_id
    for row, sequence in enumerate(sequences):
        n = len(sequence.ids)
        ids[row, :n], types[row, :n] = torch.tensor(sequence.ids), torch.tensor(sequence.types)
        mask[row, :n] = 1
    options = {"input_ids": ids, "attention_mask": mask}
    if hasattr(model.config, "type_vocab_size"):
        options["token_type_ids"] = types
    with torch.inference_mode():
        result = model(**options)
    names = output if isinstance(output, tuple) else (output,)
    whole = torch.stack([result[name] for name in names], -1)
    whole = whole if isinstance(output, tuple) else whole[..., 0]
    return whole if per_sequence else whole[mask.bool()]


def same(model: Any, folder: Path, sizes: Sizes = USUAL) -> None:
    """Every output that transformers has for a model is ours too."""
    loaded, sequences = checkpoint.load(folder, dtype=torch.float64), sequences_of(sizes)
    ending = type(model).__name__.partition("For")
    outputs = CLASSES.get(ending[1] + ending[2] or "Model", {"replaced": "logits"})
    if "pooled" in loaded.model.heads and not ending[1]:
        outputs = {**outputs, "pooled": "pooler_output"}
    for head, output in outputs.items():
        with torch.inference_mode():
            (got,) = loaded.model(Packed.build(sequences), head)
        want = run_padded(model, sequences, output, head in ("pooled", "classify"))
        assert_close(got, want, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize(("family", "ending"), CASES)
def test_every_class(family: str, ending: str, transformers: ModuleType, tmp_path: Path) -> None:
    model = make(transformers, family, ending)
    same(model, saved(model, tmp_path))
    with torch.no_grad():  # the control
        model.base_model.embeddings.position_embeddings.weight[:, 0] += 1e-6
    with pytest.raises(AssertionError):
        same(model, tmp_path)


@pytest.mark.parametrize(
    ("layers", "groups", "inner", "order"),
    [
        (3, 1, 1, (0, 0, 0)),
        (4, 2, 1, (0, 0, 1, 1)),
        (5, 3, 2, (0, 1, 0, 1, 2, 3, 2, 3, 4, 5)),
        (3, 3, 1, (0, 1, 2)),
    ],
)
def test_layers_that_share_weights(
    layers: int,
    groups: int,
    inner: int,
    order: tuple[int, ...],
    transformers: ModuleType,
    tmp_path: Path,
) -> None:
    """ALBERT's, in groups; the control runs the stored layers in another order."""
    sizes = Sizes(layers=layers, groups=groups, inner=inner, embedding=32)
    model = make(transformers, "Albert", "Model", sizes)
    same(model, saved(model, tmp_path), sizes)
    loaded = checkpoint.load(tmp_path, dtype=torch.float64)
    assert loaded.config.layer_order == order
    assert len(loaded.model.bert.layers) == loaded.config.stored_layers == groups * inner
    packed = Packed.build(sequences_of(sizes))
    (hidden,) = loaded.model(packed, "hidden")
    loaded.model.bert.order = order[:-1] + order[:1] if len(set(order)) > 1 else order[:-1]
    loaded.model.bert.local = loaded.model.bert.local[: len(loaded.model.bert.order)]
    assert not torch.allclose(loaded.model(packed, "hidden")[0], hidden, atol=1e-3)
    checkpoint.write(tmp_path / "ours", checkpoint.load(tmp_path, dtype=torch.float64))
    before, after = (load_file(f / "model.safetensors") for f in (tmp_path, tmp_path / "ours"))
    assert all(torch.equal(before[name], after[name]) for name in before.keys() | after.keys())


RANDOM = st.builds(
    Sizes,
    layers=st.integers(1, 3),
    heads=st.integers(1, 4),
    head_size=st.sampled_from([4, 5, 8]),
    intermediate=st.integers(1, 40),
    embedding=st.integers(8, 32),
    types=st.integers(1, 3),
    pad=st.integers(0, 5),
    activation=st.sampled_from(["gelu", "gelu_new", "relu", "silu"]),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5).map(tuple),
    seed=st.integers(0, 2**16),
    tied=st.booleans(),
    groups=st.just(1),
    inner=st.integers(1, 2),
).filter(lambda sizes: sizes.heads * sizes.head_size >= 8)


def check_random(transformers: ModuleType, family: str, ending: str, sizes: Sizes) -> None:
    model = make(transformers, family, ending, sizes)
    with tempfile.TemporaryDirectory() as folder:
        same(model, saved(model, Path(folder)), sizes)


FREE = {"suppress_health_check": list(HealthCheck), "phases": [Phase.explicit, Phase.generate]}


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=6, **FREE)
@example(ending="ForMaskedLM", sizes=Sizes(activation="relu", pad=3, types=2, tied=False))
@given(ending=st.sampled_from(list(CLASSES)), sizes=RANDOM)
def test_random_models(family: str, ending: str, sizes: Sizes, transformers: ModuleType) -> None:
    check_random(transformers, family, ending, sizes)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "ending"), CASES)
@settings(max_examples=40, **FREE)
@given(sizes=RANDOM)
def test_many_random_models(
    family: str, ending: str, sizes: Sizes, transformers: ModuleType
) -> None:
    check_random(transformers, family, ending, sizes)


WRITTEN = [(*case, True) for case in CASES] + [
    (family, "ForMaskedLM", False) for family in FAMILIES
]


@pytest.mark.parametrize(("family", "ending", "tied"), WRITTEN)
def test_transformers_loads_what_we_write(
    family: str, ending: str, tied: bool, transformers: ModuleType, tmp_path: Path
) -> None:
    model = make(transformers, family, ending, Sizes(tied=tied))
    loaded = checkpoint.load(saved(model, tmp_path / "theirs"), dtype=torch.float64)
    checkpoint.write(tmp_path / "ours", loaded)
    before, after = (load_file(tmp_path / n / "model.safetensors") for n in ("theirs", "ours"))
    assert before.keys() == after.keys()
    again, info = type(model).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert again.dtype == torch.float64
    unused = set() if tied else {"lm_head.bias", "predictions.bias"}
    for name in model.state_dict().keys() - unused:
        assert torch.equal(model.state_dict()[name], again.state_dict()[name]), name
    unlike = {k for k, v in model.config.to_dict().items() if again.config.to_dict()[k] != v}
    assert unlike <= {"_name_or_path", "dtype", "problem_type"}
    actual = checkpoint.load(tmp_path / "ours", dtype=torch.float64)
    assert actual.config == loaded.config and actual.labels == loaded.labels
    for name, tensor in loaded.model.state_dict().items():
        assert torch.equal(tensor, actual.model.state_dict()[name]), name
    if "mlm" in actual.model.heads:
        words = actual.model.bert.embed.words.weight
        assert (actual.model.heads["mlm"].decoder.weight is words) == tied


# ---- what a file may call its tensors ----

PREFIXES = {
    "Roberta": "roberta.",
    "DistilBert": "distilbert.",
    "Albert": "albert.",
    "Electra": "electra.",
}


def rename(change: Callable[[str], str]) -> Callable[[Tensors], object]:
    return lambda tensors: [tensors.update({change(n): tensors.pop(n)}) for n in list(tensors)]


@pytest.mark.parametrize("family", PREFIXES)
@pytest.mark.parametrize("ending", ["Model", "ForSequenceClassification"])
def test_prefixes(family: str, ending: str, transformers: ModuleType, tmp_path: Path) -> None:
    model, usual = make(transformers, family, ending), PREFIXES[family]
    spellings: list[Callable[[str], str]] = [
        lambda name: name.removeprefix(usual),
        lambda name: f"module.{name}",
        lambda name: f"model.module.{name}",
        lambda name: name.replace(usual, "encoder.") if ending != "Model" else f"encoder.{name}",
        lambda name: name.replace(usual, "0.auto_model."),
    ]
    for number, spelling in enumerate(spellings):
        folder = saved(model, tmp_path / str(number), rename(spelling))
        same(model, folder)
        tensors = load_file(folder / "model.safetensors")
        gone = next(name for name in tensors if "position_embeddings" in name)
        del tensors[gone]
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(CheckpointError, match=rf"1 missing \({re.escape(gone)} \["):
            checkpoint.load(folder)


def test_two_encoders_are_not_guessed_between(transformers: ModuleType, tmp_path: Path) -> None:
    def twice(tensors: Tensors) -> None:
        rename(lambda name: f"left.{name}")(tensors)
        tensors.update({n.replace("left.", "right."): t.clone() for n, t in tensors.items()})

    model = make(transformers, "Roberta", "Model")
    with pytest.raises(CheckpointError, match=r"several encoders, under left\., right\."):
        checkpoint.load(saved(model, tmp_path, twice))


def test_names_of_one_family_in_a_configuration_of_another(
    transformers: ModuleType, tmp_path: Path
) -> None:
    model = make(transformers, "Roberta", "ForMaskedLM")
    saved(model, tmp_path)
    with pytest.raises(CheckpointError, match=r"named roberta\.…, but .* bert\.…"):
        checkpoint.load(edit(tmp_path, model_type="bert", architectures=None))
    edit(tmp_path, model_type="xlm-roberta", architectures=None)  # those two share their names
    assert list(checkpoint.load(tmp_path).model.heads) == ["mlm", "embed"]


def add_pooler(tensors: Tensors) -> None:
    tensors["roberta.pooler.dense.weight"] = torch.randn(32, 32)
    tensors["roberta.pooler.dense.bias"] = torch.randn(32)


SPELLINGS: dict[str, tuple[str, str, Callable[[Tensors], object], int]] = {
    "position_ids": (
        "Roberta",
        "ForMaskedLM",
        lambda t: t.update({"roberta.embeddings.position_ids": torch.arange(26)[None]}),
        1,
    ),
    "a copy of the tied decoder": (
        "Roberta",
        "ForMaskedLM",
        lambda t: t.update(
            {"lm_head.decoder.weight": t["roberta.embeddings.word_embeddings.weight"].clone()}
        ),
        0,
    ),
    "both names of the bias": (
        "Camembert",
        "ForMaskedLM",
        lambda t: t.update({"lm_head.decoder.bias": t["lm_head.bias"].clone()}),
        1,
    ),
    "a projector beside the words": (
        "DistilBert",
        "ForMaskedLM",
        lambda t: t.update(
            {"vocab_projector.weight": t["distilbert.embeddings.word_embeddings.weight"].clone()}
        ),
        0,
    ),
    "what is left of another head": (
        "DistilBert",
        "ForQuestionAnswering",
        lambda t: t.update({"vocab_transform.weight": torch.randn(32, 32)}),
        1,
    ),
    "half a generator": (
        "Electra",
        "ForPreTraining",
        lambda t: t.update({"generator_predictions.dense.bias": torch.randn(16)}),
        1,
    ),
    "gamma and beta": (
        "Electra",
        "ForTokenClassification",
        rename(
            lambda n: n.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
                "LayerNorm.bias", "LayerNorm.beta"
            )
        ),
        0,
    ),
}


@pytest.mark.parametrize("case", SPELLINGS)
def test_spellings(case: str, transformers: ModuleType, tmp_path: Path) -> None:
    family, ending, change, unexpected = SPELLINGS[case]
    model = make(transformers, family, ending)
    same(model, saved(model, tmp_path, change))
    loaded = checkpoint.load(tmp_path)
    assert len(loaded.report.unexpected) == unexpected
    if ending == "ForMaskedLM":
        words = loaded.model.bert.embed.words.weight
        assert loaded.model.heads["mlm"].decoder.weight is words


def test_a_classifier_keeps_apart_from_a_pooler(transformers: ModuleType, tmp_path: Path) -> None:
    """Old files of RoBERTa hold both; which head `classifier` is, its own tensors say."""
    model = make(transformers, "Roberta", "ForSequenceClassification")
    folder = saved(model, tmp_path / "classify", add_pooler)
    edit(folder, architectures=None)
    heads = checkpoint.load(folder).model.heads
    assert list(heads) == ["pooled", "classify"] and heads["classify"].pooler is not heads["pooled"]
    model = make(transformers, "Roberta", "ForTokenClassification")
    folder = edit(saved(model, tmp_path / "tokens", add_pooler), architectures=None)
    assert list(checkpoint.load(folder).model.heads) == ["pooled", "tokens"]
    for ending, head in (("Sequence", "classify"), ("Token", "tokens")):
        model = make(transformers, "DistilBert", f"For{ending}Classification")
        folder = edit(saved(model, tmp_path / head), architectures=None)
        assert list(checkpoint.load(folder).model.heads) == [head]


def test_an_encoder_may_keep_the_architecture_it_came_from(
    transformers: ModuleType, tmp_path: Path
) -> None:
    """As sentence-transformers' do; a head that is there in part is still missed."""
    folder = saved(make(transformers, "Roberta", "Model"), tmp_path)
    edit(folder, architectures=["RobertaForMaskedLM"])
    assert list(checkpoint.load(folder).model.heads) == ["pooled", "embed"]
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"lm_head.bias": torch.zeros(50)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"4 missing \(lm_head\.dense\.weight"):
        checkpoint.load(folder)


@pytest.mark.parametrize("family", ["Roberta", "XLMRoberta", "DistilBert", "Electra"])
def test_shapes_do_not_tell_a_family(family: str, transformers: ModuleType, tmp_path: Path) -> None:
    """With or without its prefix, none is taken for a BERT."""
    ending = "Model" if family == "Electra" else "ForMaskedLM"
    model = make(transformers, family, ending, Sizes(types=2 if family == "Electra" else 1))
    prefix = f"{family.lower().removeprefix('xlm')}."
    spellings: list[Callable[[str], str]] = [
        lambda name: name,
        lambda name: f"module.{name}",
        lambda name: name.removeprefix(prefix),
        lambda name: f"0.auto_model.{name.removeprefix(prefix)}",
    ]
    for number, spelling in enumerate(spellings):
        folder = saved(model, tmp_path / "a" / str(number), rename(spelling))
        (folder / "config.json").unlink()
        for heads in (None, 4):
            with pytest.raises(CheckpointError, match=r"above it; pass --config FILE \(config=\)$"):
                checkpoint.load(folder, heads=heads)


@pytest.mark.parametrize("family", ["Roberta", "Electra"])
def test_a_prefix_tells_a_family_of_two_types(
    family: str, transformers: ModuleType, tmp_path: Path
) -> None:
    """Where nothing else does: as wide embeddings as states."""
    model = make(transformers, family, "ForTokenClassification", Sizes(types=2, embedding=32))
    for number, before in enumerate(("", "model.module.")):
        folder = saved(model, tmp_path / "a" / str(number), rename(lambda n, b=before: b + n))
        (folder / "config.json").unlink()
        with pytest.raises(CheckpointError, match=r"above it; pass --config FILE \(config=\)$"):
            checkpoint.load(folder, heads=4)


def test_heads_go_by_the_key_of_the_family(transformers: ModuleType, tmp_path: Path) -> None:
    folder = saved(make(transformers, "DistilBert", "Model"), tmp_path)
    loaded = checkpoint.load(folder, heads=4)
    assert loaded.raw == checkpoint.load(folder).raw
    with pytest.raises(InputError, match=r"is 2, but .*config\.json says n_heads 4"):
        checkpoint.load(folder, heads=2)
    raw = {key: value for key, value in loaded.raw.items() if key != "n_heads"}
    assert checkpoint.load(folder, config=raw, heads=2).raw == raw | {"n_heads": 2}


def test_a_generator_left_behind_begins_no_head(transformers: ModuleType, tmp_path: Path) -> None:
    """Google's checkpoints of ELECTRA hold one, and their configurations name no architecture."""
    model = make(transformers, "Electra", "ForPreTraining")
    name = "generator_predictions.dense.weight"
    folder = saved(model, tmp_path, lambda t: t.update({name: torch.randn(16, 8)}))
    loaded = checkpoint.load(edit(folder, architectures=None))
    assert "mlm" not in loaded.model.heads and "replaced" in loaded.model.heads
    assert loaded.notes == (f"not used: 1 tensors ({name})",)


def test_a_discriminator_beside_its_generator(transformers: ModuleType, tmp_path: Path) -> None:
    def add_generator(tensors: Tensors) -> None:
        for name in list(tensors):
            if name.startswith("electra."):
                tensors[name.replace("electra.", "generator.")] = torch.randn(3)

    model = make(transformers, "Electra", "ForPreTraining")
    same(model, saved(model, tmp_path, add_generator))


# ---- what does not fit ----

MISFITS: dict[str, tuple[str, str, Callable[[Tensors], object], str]] = {
    "a layer of DistilBERT": (
        "DistilBert",
        "Model",
        lambda t: t.pop("transformer.layer.1.attention.k_lin.bias"),
        r"1 missing \(transformer\.layer\.1\.attention\.k_lin\.bias \[32\]\)",
    ),
    "the projection": (
        "Electra",
        "ForPreTraining",
        lambda t: t.pop("electra.embeddings_project.weight"),
        r"1 missing \(electra\.embeddings_project\.weight \[32, 16\]\)",
    ),
    "a promised head": (
        "Roberta",
        "ForSequenceClassification",
        lambda t: t.pop("classifier.dense.weight"),
        r"1 missing \(classifier\.dense\.weight \[32, 32\]\)",
    ),
    "types that are not there": (
        "DistilBert",
        "Model",
        lambda t: t.update({"embeddings.token_type_embeddings.weight": torch.zeros(2, 32)}),
        r"1 unknown \(embeddings\.token_type_embeddings\.weight\)",
    ),
    "positions": (
        "Camembert",
        "Model",
        lambda t: t.update({"embeddings.position_embeddings.weight": torch.zeros(24, 32)}),
        r"of another shape \(embeddings\.position_embeddings\.weight: \[24, 32\] for \[26, 32\]\)",
    ),
    "a second embedding": (
        "XLMRoberta",
        "ForMaskedLM",
        lambda t: t.update({"roberta.embeddings.more.weight": torch.zeros(2)}),
        r"1 unknown \(roberta\.embeddings\.more\.weight\)",
    ),
}


@pytest.mark.parametrize("case", MISFITS)
def test_tensors_that_do_not_fit(case: str, transformers: ModuleType, tmp_path: Path) -> None:
    family, ending, change, message = MISFITS[case]
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load(saved(make(transformers, family, ending), tmp_path, change))


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "no padding word": ("Roberta", {"pad_token_id": None}, "pad_token_id None"),
    "padding below zero": ("Roberta", {"pad_token_id": -1}, "pad_token_id -1"),
    "padding that is no number": ("Roberta", {"pad_token_id": "1"}, "pad_token_id '1'"),
    "padding beyond all positions": ("Camembert", {"pad_token_id": 10**30}, "leaves no position"),
    "as many positions as padding": ("XLMRoberta", {"pad_token_id": 25}, "leaves no position"),
    "no table": ("Roberta", {"max_position_embeddings": "many"}, "max_position_embeddings 'many'"),
    "too many": ("Roberta", {"max_position_embeddings": 10**9}, "max_positions is"),
    "causal": ("Roberta", {"architectures": ["RobertaForCausalLM"]}, "does not run here"),
    "another's class": ("Camembert", {"architectures": ["RobertaModel"]}, "CamembertModel"),
    "multiple choice": ("Electra", {"architectures": ["ElectraForMultipleChoice"]}, "does not run"),
    "embeddings": ("Electra", {"embedding_size": -3}, "embedding_size is -3"),
    "wide embeddings": ("Electra", {"embedding_size": 10**9}, "embedding_size is"),
    "decoder": ("Electra", {"is_decoder": True}, "is_decoder True"),
    "positions": ("XLMRoberta", {"position_embedding_type": "relative_key"}, "relative_key"),
    "more groups than layers": ("Albert", {"num_hidden_groups": 3}, "num_hidden_groups 3 is more"),
    "no inner layer": ("Albert", {"inner_group_num": 0}, "inner_group_num is 0"),
    "no width": ("DistilBert", {"dim": None}, "hidden_size is None"),
    "activation": ("DistilBert", {"activation": "mish"}, "activation 'mish' is unknown"),
    "dropout": ("DistilBert", {"dropout": 10**400}, "dropout"),
    "epsilon": ("Roberta", {"layer_norm_eps": 10**400}, "epsilon"),
    "too many layers": ("DistilBert", {"n_layers": 900}, "900 layers in a file of"),
    "family": (
        "Roberta",
        {"model_type": "roberta-prelayernorm"},
        "those that do: bert, roberta, xlm-roberta, camembert, distilbert, albert, electra",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_configurations_that_do_not_run(
    case: str, transformers: ModuleType, tmp_path: Path
) -> None:
    family, change, message = REFUSED[case]
    folder = saved(make(transformers, family, "Model"), tmp_path)
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load(edit(folder, **change))


# ---- as users run them ----


def test_positions_that_can_be_used(transformers: ModuleType, tmp_path: Path) -> None:
    """The table's rows before the first position are no room for a text."""
    loaded = checkpoint.load(saved(make(transformers, "Roberta", "Model"), tmp_path))
    assert (loaded.config.max_positions, loaded.config.position_offset) == (24, 2)
    assert loaded.max_length == 24 and len(loaded.model.bert.embed.positions.weight) == 26


def test_one_type_whatever_the_tokenizer_says(transformers: ModuleType, tmp_path: Path) -> None:
    loaded = checkpoint.load(saved(make(transformers, "XLMRoberta", "Model"), tmp_path))
    ids = np.arange(2, 14)
    rows = [SimpleNamespace(ids=ids, types=np.full(12, kind)) for kind in (0, 1)]
    (hidden,) = loaded.model(Packed.build(rows), "hidden")
    assert_close(hidden[:12], hidden[12:])


def byte_level(folder: Path) -> None:
    """A tokenizer as RoBERTa's: bytes, `<s>` and `</s>`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    letters = [*"abcdefghijklmnopqrstuvwxyz", "Ġ"]
    vocabulary = {word: number for number, word in enumerate([*special, *letters, "Ġh", "or"])}
    built = Tokenizer(models.BPE(vocabulary, [("Ġ", "h"), ("o", "r")]))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    built.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    built.add_special_tokens(special)
    built.save(str(folder / "tokenizer.json"))
    names = {"bos": "<s>", "cls": "<s>", "sep": "</s>", "pad": "<pad>", "mask": "<mask>"}
    settings = {f"{role}_token": token for role, token in names.items()} | {"model_max_length": 512}
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


TEXTS = ["a horse", "pack", "the <pad> word", "a b c d e f g h i j k l m n o p", "horse " * 9]


@pytest.mark.parametrize("family", ["Roberta", "DistilBert", "Albert", "Electra"])
@pytest.mark.parametrize("kernel", ["native", "bucketed", "mask"])
def test_an_encoder_gives_the_same_vectors(
    family: str, kernel: str, transformers: ModuleType, tmp_path: Path
) -> None:
    """Frozen layers and the kernels of a CPU, in fp32, against transformers in float64."""
    device = torch.device("cpu")
    if refusal := attention.kernel(kernel).serves.refusal(device, torch.float32):
        pytest.skip(refusal)
    model = make(transformers, family, "Model")
    byte_level(saved(model, tmp_path))
    encoder = packhorse.load(tmp_path, device="cpu", kernel=kernel)
    with pytest.warns(UserWarning, match="2 of 5 texts were cut to 24 tokens"):
        got = encoder.embed(TEXTS)
        encodings = encoder.tokenize(TEXTS)
    rows = [SimpleNamespace(ids=e.ids.astype(np.int64), types=e.types) for e in encodings]
    states = run_padded(model, rows, "last_hidden_state").split([len(row.ids) for row in rows])
    assert_close(
        torch.from_numpy(got).double(),
        torch.stack([s.mean(0) for s in states]),
        atol=1e-5,
        rtol=1e-5,
    )


@pytest.mark.parametrize(
    ("family", "ending"),
    [("Roberta", "ForMaskedLM"), ("Albert", "ForMaskedLM"), ("Electra", "ForPreTraining")],
)
def test_results_do_not_depend_on_neighbors(
    family: str, ending: str, transformers: ModuleType, tmp_path: Path
) -> None:
    model = make(transformers, family, ending, Sizes(lengths=(120,)))
    loaded = checkpoint.load(saved(model, tmp_path)).model
    proofs = list(prove(loaded, torch.device("cpu"), ["bucketed"], packs=4))
    assert {proof.head for proof in proofs} == {"hidden", *loaded.heads}
    assert all(proof.passed for proof in proofs), [p for p in proofs if not p.passed]


@pytest.mark.parametrize("family", ["XLMRoberta", "DistilBert", "Albert", "Electra"])
def test_sentence_transformers(family: str, transformers: ModuleType, tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers")
    from sentence_transformers.sentence_transformer import modules

    folder = saved(make(transformers, family, "Model").float(), tmp_path / "theirs")
    byte_level(folder)
    parts = [modules.Transformer(str(folder), max_seq_length=20), modules.Pooling(32)]
    reference = library.SentenceTransformer(modules=[*parts, modules.Normalize()], device="cpu")
    reference.save(str(tmp_path / "layout"))
    want = reference.encode(TEXTS, show_progress_bar=False)
    encoder = packhorse.load(tmp_path / "layout", device="cpu")
    with pytest.warns(UserWarning, match="cut to 20 tokens"):
        assert_close(encoder.embed(TEXTS), want, atol=1e-5, rtol=0)
    checkpoint.write(tmp_path / "ours", checkpoint.load(tmp_path / "layout"))
    again = library.SentenceTransformer(str(tmp_path / "ours"), device="cpu")
    assert_close(again.encode(TEXTS, show_progress_bar=False), want, atol=1e-6, rtol=0)
