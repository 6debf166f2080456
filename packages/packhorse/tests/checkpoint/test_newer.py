"""ModernBERT, MPNet, DeBERTa: models of transformers give the same results here, and ours there."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

import packhorse
from packhorse import attention, checkpoint
from packhorse.checkpoint import names
from packhorse.errors import CheckpointError, InputError, KernelError
from packhorse.packing.batch import Packed
from packhorse.runtime.proof import SyntheticSequence

FAMILIES = {"ModernBert": "model.", "MPNet": "mpnet.", "DebertaV2": "deberta."}
CLASSES: dict[str, dict[str, Any]] = {
    "Model": {"hidden": "last_hidden_state"},
    "ForMaskedLM": {"mlm": "logits"},
    "ForSequenceClassification": {"classify": "logits"},
    "ForTokenClassification": {"tokens": "logits"},
    "ForQuestionAnswering": {"span": ("start_logits", "end_logits")},
}
KERNELS = [name for name in attention.KERNELS if name not in ("fused", "varlen", "mask")]
LENGTHS = (5, 40, 1, 9, 150, 33)
OTHER = {  # the same models off their usual place on the axes
    "ModernBert": {
        "attention_bias": True,
        "mlp_bias": True,
        "norm_bias": True,
        "classifier_bias": True,
        "decoder_bias": False,
        "classifier_pooling": "mean",
        "hidden_activation": "silu",
        "classifier_activation": "relu",
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "local_attention": 20,
    },
    "MPNet": {"hidden_act": "relu", "pad_token_id": 0, "tie_word_embeddings": False},
    "DebertaV2": {
        "share_att_key": False,
        "position_biased_input": True,
        "type_vocab_size": 2,
        "norm_rel_ebd": "none",
        "position_buckets": -1,
        "max_relative_positions": 20,
        "conv_kernel_size": 3,
        "conv_act": "gelu",
        "pooler_hidden_act": "relu",
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    },
}
OWN: dict[str, dict[str, Any]] = {
    "ModernBert": {"local_attention": 9},
    "MPNet": {},
    "DebertaV2": {  # as v3 has them, with fewer ranges of distances
        "relative_attention": True,
        "pos_att_type": "p2c|c2p",
        "position_buckets": 16,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "position_biased_input": False,
    },
}
Tensors = dict[str, torch.Tensor]


def make(transformers: ModuleType, family: str, ending: str, seed: int = 3, **settings: Any) -> Any:
    """A random model, in fp32: transformers turns queries in no more."""
    special = dict.fromkeys(("bos_token_id", "cls_token_id"), 0)
    special |= dict.fromkeys(("eos_token_id", "sep_token_id"), 2)
    usual: dict[str, Any] = {
        "vocab_size": 50,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 24,
        "max_position_embeddings": 160,
        "pad_token_id": 1,
        **(special if family == "ModernBert" else {}),
        **OWN[family],
        **({} if ending == "ForQuestionAnswering" else {"num_labels": 3}),
    }
    config = getattr(transformers, f"{family}Config")(**usual | settings)
    torch.manual_seed(seed)
    model = getattr(transformers, family + ending)(config).eval()
    with torch.no_grad():  # zeros and ones would hide a bias or a norm that went astray
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def edit(folder: Path, *gone: str, **settings: Any) -> Path:
    path = folder / "config.json"
    raw = {k: v for k, v in json.loads(path.read_text()).items() if k not in gone}
    path.write_text(json.dumps(raw | settings))
    return folder


def sequences(lengths: tuple[int, ...] = LENGTHS) -> list[SyntheticSequence]:
    """Ids of all words, the padding word too."""
    random = np.random.default_rng(5)
    return [SyntheticSequence(random.integers(0, 50, n), np.zeros(n, int)) for n in lengths]


def run_padded(model: Any, output: Any, per_sequence: bool = False) -> torch.Tensor:
    """The output of a padded batch, what is padding cut away, laid end to end."""
    entries = sequences()
    ids = torch.full((len(entries), max(LENGTHS)), 1)
    mask = torch.zeros_like(ids)
    for row, item in enumerate(entries):
        ids[row, : len(item.ids)] = torch.from_numpy(item.ids)
        mask[row, : len(item.ids)] = 1
    result = model(input_ids=ids, attention_mask=mask)
    parts = [result[name] for name in ([output] if isinstance(output, str) else output)]
    whole = parts[0] if isinstance(output, str) else torch.stack(parts, -1)
    return whole if per_sequence else whole[mask.bool()]


def run_packed(model: Any, kernel: str, head: str) -> torch.Tensor:
    model.bert.use(attention.kernel(kernel))
    return model(Packed.build(sequences()), head)[0]


def outputs_of(ending: str, heads: Any) -> dict[str, Any]:
    return CLASSES[ending] | ({"pooled": "pooler_output"} if "pooled" in heads else {})


def cannot_run(kernel: str, model: Any) -> str | None:
    needs = model.bert.config.needs
    return attention.kernel(kernel).serves.refusal(torch.device("cpu"), torch.float32, **needs)


@torch.inference_mode()
def same(model: Any, loaded: Any, ending: str, kernels: list[str]) -> None:
    for head, output in outputs_of(ending, loaded.heads).items():
        want = run_padded(model, output, head in ("pooled", "classify"))
        for kernel in kernels:
            if cannot_run(kernel, loaded):
                continue
            assert_close(run_packed(loaded, kernel, head), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ending", CLASSES)
def test_every_class_on_and_off_the_usual_axes(
    family: str, ending: str, transformers: ModuleType, tmp_path: Path
) -> None:
    for number, settings in enumerate(({}, OTHER[family])):
        model = make(transformers, family, ending, **settings)
        model.save_pretrained(tmp_path / str(number))
        loaded = checkpoint.load(tmp_path / str(number)).model
        same(model, loaded, ending, KERNELS if ending == "Model" else ["bucketed"])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_comparison_can_fail(family: str, transformers: ModuleType, tmp_path: Path) -> None:
    """The controls: a window or a bias that is ignored, one token wider, one bucket off."""
    model = make(transformers, family, "Model")
    model.save_pretrained(tmp_path)
    same(model, checkpoint.load(tmp_path).model, "Model", ["reference"])
    if family == "ModernBert":
        wrong = [{"local_attention": 10_000}, {"local_attention": 10}, {"local_rope_theta": 9e3}]
        for settings in wrong:
            loaded = checkpoint.load(edit(tmp_path, "rope_parameters", **settings)).model
            with pytest.raises(AssertionError):
                same(model, loaded, "Model", ["reference"])
            edit(tmp_path, "local_rope_theta", local_attention=9)
        return
    table, rows = "bert.distances.table.weight", [slice(None), 31, 15, 0]
    if family == "DebertaV2":
        table, rows = "bert.relative.table.weight", [slice(None), 31, 17, 16, 15, 1]
        wrong = [{"position_buckets": 14}, {"pos_att_type": "c2p"}, {"norm_rel_ebd": "none"}]
        wrong += [{"max_relative_positions": 40}, {"layer_norm_eps": 1e-2}]
        for settings in wrong:
            raw = json.loads((tmp_path / "config.json").read_text()) | settings
            with pytest.raises((AssertionError, CheckpointError)):
                same(model, checkpoint.load(tmp_path, config=raw).model, "Model", ["reference"])
    for row in rows:
        loaded = checkpoint.load(tmp_path).model
        with torch.no_grad():
            loaded.get_parameter(table)[row] = 0
        with pytest.raises(AssertionError):
            same(model, loaded, "Model", ["reference"])


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_theirs(family: str, transformers: ModuleType, tmp_path: Path) -> None:
    model = make(transformers, family, "ForMaskedLM", **OTHER[family])
    model.save_pretrained(tmp_path)
    loaded = checkpoint.load(tmp_path)
    weight = torch.randn(sum(LENGTHS), 50)
    (run_padded(model, "logits") * weight).sum().backward()
    yours = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    tied = loaded.model.heads["mlm"].decoder.weight is loaded.model.bert.embed.words.weight
    table = names.table(names.canonical(loaded.raw, {}).family, tied)
    for kernel in ("bucketed", "reference"):
        loaded.model.zero_grad()
        (run_packed(loaded.model, kernel, "mlm") * weight).sum().backward()
        learned = {n: p.grad for n, p in loaded.model.named_parameters() if p.grad is not None}
        assert yours.keys() == {part for name in learned for part in names.sources(name, table)}
        for name, grad in learned.items():
            reference = torch.cat([yours[part] for part in names.sources(name, table)])
            if ".embed." in name and grad.ndim == 2:  # transformers never learns the padding word
                grad[1] = reference[1] = 0
            error = float((grad - reference).norm() / reference.norm().clamp(min=1e-2))
            assert error < 1e-4, f"{name} under {kernel}: {error:.1e}"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kernel", ["native", "bucketed", "mask"])
def test_packed_is_as_alone(
    family: str, kernel: str, transformers: ModuleType, tmp_path: Path
) -> None:
    make(transformers, family, "Model").save_pretrained(tmp_path)
    loaded = checkpoint.load(tmp_path, kernel=attention.kernel(kernel)).model
    if refusal := cannot_run(kernel, loaded):
        pytest.skip(refusal)
    entries = sequences((30, 7, 100, 1))
    rows = kernel == "mask"
    packed = Packed.rows(entries, [[0, 2], [1, 3]], 140) if rows else Packed.build(entries)
    with torch.inference_mode():
        together = packed.split(loaded(packed, "hidden")[0])
        loaded.bert.use(attention.kernel("reference"))
        for item, result in zip(entries, together, strict=True):
            assert_close(result, loaded(Packed.build([item]), "hidden")[0], atol=1e-5, rtol=1e-5)


# ---- what files say ----


def test_both_spellings_of_layers_and_angles(transformers: ModuleType, tmp_path: Path) -> None:
    """As files on the hub have them, and as transformers 5 writes them."""
    make(transformers, "ModernBert", "Model", num_hidden_layers=5).save_pretrained(tmp_path)
    new = checkpoint.load(tmp_path)
    old = {"global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "local_rope_theta": 1e4}
    old |= {"position_embedding_type": "absolute", "deterministic_flash_attn": False}
    edit(tmp_path, "layer_types", "rope_parameters", **old)
    assert checkpoint.load(tmp_path).config == new.config
    assert new.config.local_layers == (1, 2, 4) and new.config.window == 4
    edit(tmp_path, global_attn_every_n_layers=1, max_position_embeddings=8192)
    entries = checkpoint.load(tmp_path)
    assert entries.config.local_layers == () and entries.max_length == 8192


SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
SIZES += ("intermediate_size",)
REFUSED = {
    "classifier_pooling": ("max", "classifier pooling 'max' is unknown"),
    "hidden_activation": ("mish", "hidden_activation 'mish' is unknown"),
    "classifier_activation": ("mish", "classifier_activation 'mish' is unknown"),
    "norm_bias": ("no", "norm_bias 'no' is neither true nor false"),
    "local_attention": (0, "local_attention is 0, not a count"),
    "layer_types": (["full_attention"], "layer_types does not name the kind of 3 layers"),
    "rope_parameters": (
        {"full_attention": {"rope_type": "yarn", "factor": 4.0}},
        "rotary positions of .*yarn.* are not supported",
    ),
    "rope_scaling": ({"type": "linear", "factor": 2.0}, "rotary positions of .* not supported"),
    "num_attention_heads": (32, "need an even head size, and it is 1"),
    "architectures": (["ModernBertForMultipleChoice"], "ForMultipleChoice' does not run here"),
}


@pytest.fixture(scope="module")
def modern(transformers: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("modern")
    make(transformers, "ModernBert", "Model").save_pretrained(folder)
    return folder


@pytest.mark.parametrize("key", REFUSED)
def test_what_would_change_numbers_is_refused(key: str, modern: Path) -> None:
    value, message = REFUSED[key]
    raw = json.loads((modern / "config.json").read_text())
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load(modern, config=raw | {key: value})


def test_other_refusals(transformers: ModuleType, tmp_path: Path, modern: Path) -> None:
    raw = json.loads((modern / "config.json").read_text())
    kinds = ["full_attention", "chunked_attention", "full_attention"]
    with pytest.raises(CheckpointError, match="'chunked_attention' is unknown"):
        checkpoint.load(modern, config=raw | {"layer_types": kinds})
    with pytest.raises(InputError, match="made for 160 positions, not 200"):
        checkpoint.load(modern, max_positions=200)
    assert checkpoint.load(modern, max_positions=80).config.max_positions == 80
    with pytest.raises(CheckpointError, match="relative_attention_num_buckets 64"):
        wrong = {"model_type": "mpnet", "relative_attention_num_buckets": 64}
        names.understand(wrong | dict.fromkeys(SIZES, 4))
    make(transformers, "ModernBert", "ForTokenClassification").save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="architectures is missing"):
        checkpoint.load(edit(tmp_path, "architectures"))
    loaded = checkpoint.load(modern).model
    loaded.bert.use(attention.kernel("fused"))
    with pytest.raises(KernelError, match="'fused' cannot run this model"):
        loaded(Packed.build(sequences()), "hidden")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_bare_encoder_or_a_wrapped_one(
    family: str, transformers: ModuleType, tmp_path: Path
) -> None:
    model = make(transformers, family, "ForMaskedLM")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    wrapped = {f"module.{name}": tensor for name, tensor in tensors.items()}
    save_file(wrapped, tmp_path / "model.safetensors", {"format": "pt"})
    same(model, checkpoint.load(tmp_path).model, "ForMaskedLM", ["reference"])
    bare = {n.removeprefix(FAMILIES[family]): t for n, t in tensors.items()}
    save_file(bare, tmp_path / "model.safetensors", {"format": "pt"})
    assert "mlm" in checkpoint.load(edit(tmp_path, "architectures")).model.heads


# ---- and back ----


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ending", CLASSES)
def test_transformers_loads_what_we_write(
    family: str, ending: str, transformers: ModuleType, tmp_path: Path
) -> None:
    model = make(transformers, family, ending, **OTHER[family])
    model.save_pretrained(tmp_path / "theirs")
    loaded = checkpoint.load(tmp_path / "theirs")
    checkpoint.write(tmp_path / "ours", loaded)
    again, info = type(model).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    unused = {"lm_head.bias", "cls.predictions.bias"}
    for name in model.state_dict().keys() - unused:
        assert torch.equal(model.state_dict()[name], again.state_dict()[name]), name
    unlike = {k for k, v in model.config.to_dict().items() if again.config.to_dict()[k] != v}
    allowed = {"_name_or_path", "dtype", "problem_type"}
    # Of words that no head scores, nothing says whether they would be tied.
    assert unlike <= allowed | (set() if "mlm" in loaded.model.heads else {"tie_word_embeddings"})
    assert checkpoint.load(tmp_path / "ours").config == loaded.config
    for to in ("onnx", "tf1"):
        with pytest.raises(InputError, match=f"models cannot be written as '{to}'"):
            checkpoint.write(tmp_path / to, loaded, to=to)


# ---- a folder as it lies on the hub ----

WORDS = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", *"abcdefghijklmnopqrstuvwxyz", "horse", "pack"]


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    built = Tokenizer(models.WordLevel({w: n for n, w in enumerate(WORDS)}, unk_token="<unk>"))
    built.pre_tokenizer = pre_tokenizers.Whitespace()
    built.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    special = dict(cls_token="<s>", sep_token="</s>", pad_token="<pad>", mask_token="<mask>")
    PreTrainedTokenizerFast(
        tokenizer_object=built, unk_token="<unk>", model_max_length=128, **special
    ).save_pretrained(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_vectors_of_a_folder_are_those_of_transformers(
    family: str, transformers: ModuleType, tmp_path: Path
) -> None:
    model = make(transformers, family, "Model")
    model.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    texts = ["horse", "pack a horse " * 12, "b c d", "z " * 60]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    options = tokenizer(texts, padding=True, return_tensors="pt")
    options.pop("token_type_ids", None)
    with torch.inference_mode():
        states = model(**options).last_hidden_state
    mask = options["attention_mask"].unsqueeze(-1)
    want = (states * mask).sum(1) / mask.sum(1)
    encoder = packhorse.load(tmp_path, device="cpu")
    assert encoder.max_length == 128
    np.testing.assert_allclose(encoder.embed(texts), want.numpy(), atol=1e-5)
