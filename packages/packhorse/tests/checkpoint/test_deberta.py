"""DeBERTa beyond what every newer family is tested for: its variants, names, refusals, formats."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from packhorse import attention, checkpoint
from packhorse.checkpoint import names
from packhorse.errors import CheckpointError, InputError
from packhorse.packing.batch import Packed
from packhorse.runtime.proof import SyntheticSequence, prove

KERNELS = ("bucketed", "repack", "reference")
LENGTHS = (5, 40, 1, 9, 150, 33, 2)
Tensors = dict[str, torch.Tensor]

# A score is divided by the root of three times the width of a head (of twice, with one term more),
# which transformers takes in fp32: exact where the product is a square, as for heads of 12.
USUAL: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "max_position_embeddings": 160,
    "relative_attention": True,
    "pos_att_type": "p2c|c2p",
    "position_buckets": 16,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "position_biased_input": False,
    "pad_token_id": 1,
}
TWO_TERMS = {"hidden_size": 32}
VARIANTS: dict[str, dict[str, Any]] = {
    "v3": {},
    "projections of its own": {"share_att_key": False},
    "content to position": {"pos_att_type": ["c2p"], **TWO_TERMS},
    "position to content": {"pos_att_type": "p2c", "share_att_key": False, **TWO_TERMS},
    "a vector for each distance": {"position_buckets": -1},
    "a vector for each near distance": {"position_buckets": -1, "max_relative_positions": 20},
    "positions in the embeddings": {"position_biased_input": True, "type_vocab_size": 2},
    "vectors as they are": {"norm_rel_ebd": "none"},
    "ranges that end early": {"max_relative_positions": 60, "position_buckets": 32},
    "convolution": {"conv_kernel_size": 3, "conv_act": "gelu"},
    "a wide convolution": {"conv_kernel_size": 5},
}


def make(transformers: ModuleType, ending: str = "Model", **settings: Any) -> Any:
    config = transformers.DebertaV2Config(**USUAL | settings)
    torch.manual_seed(3)
    model = getattr(transformers, f"DebertaV2{ending}")(config).double().eval()
    with torch.no_grad():  # zeros and ones would hide a bias or a norm that went astray
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def sequences() -> list[SyntheticSequence]:
    random = np.random.default_rng(5)
    return [SyntheticSequence(random.integers(2, 50, n), np.zeros(n, int)) for n in LENGTHS]


@torch.inference_mode()
def run_padded(model: Any, output: str = "last_hidden_state") -> torch.Tensor:
    ids = torch.full((len(LENGTHS), max(LENGTHS)), 1)
    mask = torch.zeros_like(ids)
    for row, item in enumerate(sequences()):
        ids[row, : len(item.ids)] = torch.from_numpy(item.ids)
        mask[row, : len(item.ids)] = 1
    return model(input_ids=ids, attention_mask=mask)[output][mask.bool()]


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_in_float64(variant: str, transformers: ModuleType, tmp_path: Path) -> None:
    """With vectors projected in every batch and once; the control is another variant."""
    model = make(transformers, **VARIANTS[variant])
    model.save_pretrained(tmp_path)
    want = run_padded(model)
    loaded = checkpoint.load(tmp_path, dtype=torch.float64).model
    packed = Packed.build(sequences())
    with torch.inference_mode():
        for fold in (False, True):
            if fold:
                loaded.bert.fold()
            for kernel in KERNELS:
                loaded.bert.use(attention.kernel(kernel))
                assert_close(loaded(packed, "hidden")[0], want, atol=1e-10, rtol=1e-10)
        raw = {k: v for k, v in model.config.to_dict().items() if k not in VARIANTS[variant]}
        for another in set(VARIANTS) - {variant}:
            try:
                other = checkpoint.load(tmp_path, config=raw | USUAL | VARIANTS[another])
            except CheckpointError:
                continue  # its tensors differ
            states = other.model.double()(packed, "hidden")[0]
            assert not torch.allclose(states, want, atol=1e-4), another


def test_no_neighbor_changes_a_state(transformers: ModuleType, tmp_path: Path) -> None:
    """A convolution sees the next token, but not the next sequence's; `prove` has a control."""
    make(transformers, "ForMaskedLM", conv_kernel_size=3).float().save_pretrained(tmp_path)
    loaded = checkpoint.load(tmp_path).model
    proofs = list(prove(loaded, torch.device("cpu"), ["bucketed", "reference"], packs=4))
    assert {proof.head for proof in proofs} >= {"hidden", "mlm"}
    assert all(proof.passed for proof in proofs), [p for p in proofs if not p.passed]
    entries = sequences()
    packed = Packed.build(entries)
    with torch.inference_mode():
        for kernel in KERNELS:
            loaded.bert.use(attention.kernel(kernel))
            for item, together in zip(
                entries, packed.split(loaded(packed, "hidden")[0]), strict=True
            ):
                alone = loaded(Packed.build([item]), "hidden")[0]
                assert_close(together, alone, atol=1e-5, rtol=1e-5)


def test_half_precision_stays_as_close_as_transformers(
    transformers: ModuleType, tmp_path: Path
) -> None:
    model = make(transformers)
    model.save_pretrained(tmp_path)
    want = run_padded(model)
    theirs = float((run_padded(model.bfloat16()).double() - want).abs().mean())
    loaded = checkpoint.load(tmp_path, dtype=torch.bfloat16).model
    with torch.inference_mode():
        for kernel in KERNELS:
            loaded.bert.use(attention.kernel(kernel))
            ours = loaded(Packed.build(sequences()), "hidden")[0].double()
            assert 0 < float((ours - want).abs().mean()) < 1.5 * theirs


@pytest.mark.parametrize("kernel", ["bucketed", pytest.param("reference", marks=pytest.mark.slow)])
def test_training_drops_out_and_learns(
    kernel: str, transformers: ModuleType, tmp_path: Path
) -> None:
    make(transformers, "ForSequenceClassification").float().save_pretrained(tmp_path)
    model = checkpoint.load(tmp_path, kernel=attention.kernel(kernel)).model.train()
    model.bert.attention_dropout = 0.1
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    packed, labels = Packed.build(sequences()), torch.arange(len(LENGTHS)) % 2
    losses: list[float] = []
    for _ in range(30):
        loss = torch.nn.functional.cross_entropy(model(packed, "classify")[0], labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
    first, second = model(packed, "hidden")[0], model(packed, "hidden")[0]
    assert not torch.equal(first, second)  # dropout draws anew


# ---- names ----


def rename(folder: Path, change: Callable[[Tensors], Tensors]) -> None:
    tensors = change(load_file(folder / "model.safetensors"))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("legacy", [True, False])
def test_words_are_scored_under_both_names(
    legacy: bool, transformers: ModuleType, tmp_path: Path
) -> None:
    model = make(transformers, "ForMaskedLM", legacy=legacy)
    model.save_pretrained(tmp_path / "theirs")
    want = run_padded(model, "logits")
    loaded = checkpoint.load(tmp_path / "theirs", dtype=torch.float64)
    packed = Packed.build(sequences())
    with torch.inference_mode():
        assert_close(loaded.model(packed, "mlm")[0], want, atol=1e-10, rtol=1e-10)
    checkpoint.write(tmp_path / "ours", loaded)
    again, info = transformers.DebertaV2ForMaskedLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert_close(run_padded(again, "logits"), want, atol=1e-10, rtol=1e-10)


def test_files_as_microsoft_wrote_them(transformers: ModuleType, tmp_path: Path) -> None:
    """No class named, the discriminator left in, and positions that nothing reads."""
    model = make(transformers, "ForMaskedLM", legacy=False)
    model.save_pretrained(tmp_path)
    spare = {
        "mask_predictions.dense.weight": torch.zeros(48, 48),
        "mask_predictions.classifier.bias": torch.zeros(1),
        "deberta.embeddings.position_embeddings.weight": torch.ones(160, 48),
    }
    rename(tmp_path, lambda tensors: tensors | spare)
    raw = json.loads((tmp_path / "config.json").read_text())
    for key in ("architectures", "legacy", "dtype"):
        raw.pop(key)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    loaded = checkpoint.load(tmp_path, dtype=torch.float64)
    assert set(loaded.model.heads) == {"mlm", "embed"}
    assert loaded.notes and "not used: 3 tensors" in loaded.notes[0]
    with torch.inference_mode():
        scores = loaded.model(Packed.build(sequences()), "mlm")[0]
    assert_close(scores, run_padded(model, "logits"), atol=1e-10, rtol=1e-10)
    rename(tmp_path, lambda t: {k: v for k, v in t.items() if "lm_head.LayerNorm" not in k})
    with pytest.raises(CheckpointError, match="2 missing"):
        raw = raw | {"architectures": ["DebertaV2ForMaskedLM"]}
        checkpoint.load(tmp_path, config=raw)


# ---- refusals ----

REFUSED = {
    "relative_attention": (False, "relative_attention False is not supported, only True"),
    "pos_att_type": ("p2p|c2p", "pos_att_type 'p2p|c2p' is not supported"),
    "position_buckets": ("16", "position_buckets '16' is not a whole number"),
    "max_relative_positions": (9, "logarithmic distances end at 9, within the 8"),
    "norm_rel_ebd": ("batch_norm", "norm_rel_ebd 'batch_norm' is unknown"),
    "embedding_size": (16, "embedding_size 16 is not supported, only 48"),
    "attention_head_size": (16, "attention_head_size 16 is not supported, only 12"),
    "pooler_hidden_size": (16, "pooler_hidden_size 16 is not supported"),
    "pooler_hidden_act": ("mish", "pooler_hidden_act 'mish' is unknown"),
    "conv_kernel_size": (4, "conv_width 4 is not odd"),
    "conv_groups": (2, "conv_groups 2 is not supported, only 1"),
    "share_att_key": ("yes", "share_att_key 'yes' is neither true nor false"),
    "model_type": ("deberta", "model_type 'deberta' does not run here"),
    "architectures": (["DebertaV2ForMultipleChoice"], "does not run here"),
}


@pytest.mark.parametrize("key", REFUSED)
def test_what_would_change_numbers_is_refused(key: str) -> None:
    value, message = REFUSED[key]
    assert names.understand({"model_type": "deberta-v2", **USUAL}).disentangled == ("c2p", "p2c")
    with pytest.raises(CheckpointError, match=message.replace("|", r"\|")):
        names.understand({"model_type": "deberta-v2", **USUAL, key: value})


def test_fewer_positions_keep_the_ranges_of_distances(
    transformers: ModuleType, tmp_path: Path
) -> None:
    """Where nothing says how far they reach, it is as far as there were positions."""
    model = make(transformers, num_hidden_layers=1)
    model.save_pretrained(tmp_path)
    whole = checkpoint.load(tmp_path, dtype=torch.float64)
    short = checkpoint.load(tmp_path, dtype=torch.float64, max_positions=64)
    assert (whole.config.distance_reach, short.config.distance_reach) == (160, 160)
    packed = Packed.build([item for item in sequences() if len(item.ids) <= 64])
    with torch.inference_mode():
        states = [each.model(packed, "hidden")[0] for each in (whole, short)]
    assert torch.equal(*states)
    with pytest.raises(InputError, match="made for 160 positions, not 200"):
        checkpoint.load(tmp_path, max_positions=200)
