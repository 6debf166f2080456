"""docs/models.md is what its script writes, and each configuration of it runs as its library runs.

Of each listed configuration a tiny model is made: only the sizes are smaller. transformers reads
the same folder with the same keys, and the states and the outputs of the head must be equal.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from packhorse import attention, checkpoint
from packhorse.checkpoint import names
from packhorse.checkpoint.names.families import FAMILIES
from packhorse.model.bert import Bert
from packhorse.packing.batch import Packed
from packhorse.runtime.proof import SyntheticSequence

DOCS = Path(__file__).resolve().parents[4] / "docs"
Raw = dict[str, Any]
WORDS = 60
LENGTHS = (5, 40, 1, 9, 60, 33)
# Smaller sizes, by key; every other key stays as it is published.
SMALLER: dict[str, int] = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "dim": 32,
    "num_attention_heads": 4,
    "n_heads": 4,
    "intermediate_size": 48,
    "hidden_dim": 48,
    "max_position_embeddings": 96,
    "embedding_size": 16,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "local_attention": 18,
    "sliding_window": 16,
    "position_buckets": 8,
}
# Layouts of which transformers has no class under the published keys: those that are tested
# elsewhere, in the tests that LAYOUTS names, by the same fields of our own configuration.
ELSEWHERE = (
    "new",
    "nomic_bert",
    "bert with ALiBi",
    "xlm-roberta with rotary positions",
    "neobert",
    "qwen3 that answers yes or no",
)
# Numbers of MTEB that are another model's: those of the English models in place of the Chinese,
# and with adapters, which are no part of the encoder.
OTHER_NUMBERS = (
    "BAAI/bge-small-zh-v1.5",
    "BAAI/bge-base-zh-v1.5",
    "BAAI/bge-large-zh-v1.5",
    "jinaai/jina-embeddings-v3",
)
OUTPUTS = {
    "ForMaskedLM": ("mlm", ("logits",)),
    "ForSequenceClassification": ("classify", ("logits",)),
    "ForTokenClassification": ("tokens", ("logits",)),
    "ForQuestionAnswering": ("span", ("start_logits", "end_logits")),
}


def load_page() -> ModuleType:
    spec = importlib.util.spec_from_file_location("models_page", DOCS / "models.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["models_page"] = module
    spec.loader.exec_module(module)
    return module


PAGE = load_page()


@pytest.fixture(scope="module")
def models() -> ModuleType:
    return PAGE


def shrunk(raw: Raw) -> Raw:
    """The configuration in smaller sizes."""
    small = {key: SMALLER.get(key, value) for key, value in raw.items()}
    for key in ("num_hidden_layers", "n_layers"):
        if key in small:
            # ModernBERT has a global layer in three, Gemma one in six.
            small[key] = min(raw[key], 7 if raw["model_type"] == "gemma3_text" else 4)
    if "num_key_value_heads" in raw:
        few = raw["num_key_value_heads"] < raw["num_attention_heads"]
        small["num_key_value_heads"] = 2 if few else 4
    if raw["model_type"] == "electra" and raw["embedding_size"] == raw["hidden_size"]:
        small["embedding_size"] = 32
    # The families' own numbers of special tokens are beyond the smaller table.
    if raw["model_type"] in ("modernbert", "eurobert", "qwen3"):
        small |= dict.fromkeys(("eos_token_id", "bos_token_id"), 0) | {"pad_token_id": 1}
    if raw["model_type"] == "modernbert":
        small |= dict.fromkeys(("cls_token_id", "sep_token_id"), 0)
    if raw["model_type"] == "eurobert":
        small["mask_token_id"] = 0
    return small


def class_name(raw: Raw) -> str:
    """transformers' class; a ColBERT is an encoder with a projection, a base model has no class."""
    named = (raw.get("architectures") or [""])[0]
    prefix = {"bert": "Bert", "deberta-v2": "DebertaV2"}.get(raw["model_type"], "")
    return (
        f"{prefix}Model" if named in ("", "HF_ColBERT") else named.replace("ForCausalLM", "Model")
    )


def cases() -> list[Any]:
    """All understood configurations of which transformers has a class."""
    seen: set[str] = set()
    result: list[Any] = []  # of each layout and head one is quick, all others are slow
    for _, name, raw, good, _ in PAGE.rows():
        if not good or PAGE.layout_of(raw) in ELSEWHERE:
            continue
        layout = f"{PAGE.layout_of(raw)} {class_name(raw)}"
        marks = () if layout not in seen else (pytest.mark.slow,)
        seen.add(layout)
        result.append(pytest.param(name, raw, id=name.replace("/", "."), marks=marks))
    return result


def batch() -> tuple[list[SyntheticSequence], torch.Tensor, torch.Tensor]:
    random = np.random.default_rng(5)
    ids = [random.integers(2, WORDS, n) for n in LENGTHS]
    entries = [SyntheticSequence(row, np.zeros(len(row), int)) for row in ids]
    padded = torch.ones(len(ids), max(LENGTHS), dtype=torch.int64)
    mask = torch.zeros_like(padded)
    for row, item in enumerate(ids):
        padded[row, : len(item)] = torch.from_numpy(item)
        mask[row, : len(item)] = 1
    return entries, padded, mask


def write(folder: Path, raw: Raw) -> Any:
    """A tiny random model of transformers, under the published keys, as transformers reads it."""
    import transformers

    kind = class_name(raw)
    fields = {k: v for k, v in raw.items() if k not in ("architectures", "model_type")}
    config = transformers.AutoConfig.for_model(raw["model_type"], **fields)
    torch.manual_seed(3)
    model = getattr(transformers, kind)(config).eval()
    with torch.no_grad():  # zeros and ones would hide a bias or a norm that went astray
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    published = raw | {"architectures": [kind], "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(published))
    return getattr(transformers, kind).from_pretrained(folder, attn_implementation="eager").eval()


@pytest.mark.parametrize(("name", "raw"), cases())
def test_a_configuration_runs_as_in_its_library(name: str, raw: Raw, tmp_path: Path) -> None:
    small = shrunk(raw)
    model = write(tmp_path, small)
    entries, ids, mask = batch()
    with torch.no_grad():
        result = model(input_ids=ids, attention_mask=mask, output_hidden_states=True)
    states = result.last_hidden_state if "last_hidden_state" in result else result.hidden_states[-1]
    ours = checkpoint.load(tmp_path, kernel=attention.kernel("reference")).model
    packed = Packed.build(entries)
    with torch.no_grad():
        hidden = ours.bert(packed)
        assert_close(hidden, states[mask.bool()], atol=1e-5, rtol=0)
        ending = next((end for end in OUTPUTS if class_name(raw).endswith(end)), None)
        if ending is not None:
            head, keys = OUTPUTS[ending]
            outputs = [result[key] for key in keys]
            want = outputs[0] if len(outputs) == 1 else torch.stack(outputs, -1)
            want = want if head == "classify" else want[mask.bool()]
            assert_close(ours(packed, head)[0], want, atol=2e-5, rtol=0)


def test_the_comparison_can_fail(tmp_path: Path) -> None:
    """The control: another field of the configuration, and the states are others."""
    small = shrunk(PAGE.modernbert())
    model = write(tmp_path, small)
    entries, ids, mask = batch()
    with torch.no_grad():
        states = model(input_ids=ids, attention_mask=mask).last_hidden_state
        (tmp_path / "config.json").write_text(json.dumps(small | {"global_rope_theta": 900.0}))
        ours = checkpoint.load(tmp_path, kernel=attention.kernel("reference")).model
        difference = (ours.bert(Packed.build(entries)) - states[mask.bool()]).abs().max()
    assert difference > 1e-3


def test_the_page_is_what_the_script_writes(models: ModuleType) -> None:
    message = "verdicts have changed; where they should: python docs/models.py docs/models.md"
    assert (DOCS / "models.md").read_text("utf-8") == models.page(), message


def test_every_family_and_every_gap_has_a_model(models: ModuleType) -> None:
    result = list(models.rows())
    assert len(result) >= 150 and len({name for _, name, *_ in result}) == len(result)
    assert {raw["model_type"] for _, _, raw, good, _ in result if good} == set(FAMILIES)
    assert {models.lacking(raw) for _, _, raw, good, _ in result if not good} == set(models.MISSING)


def test_every_layout_cites_a_public_file(models: ModuleType) -> None:
    used = {models.layout_of(raw) for _, _, raw, good, _ in models.rows() if good}
    assert used == set(models.LAYOUTS)
    for source, oracle in models.LAYOUTS.values():
        assert "`" in source and oracle


def test_the_sizes_are_the_published_ones(models: ModuleType) -> None:
    """The weights of the encoder are as many as MTEB counts, but for a pooler and a head."""
    compared = 0
    for _, name, raw, good, _ in models.rows():
        published = models.known(name).get("parameters")
        if not good or published is None or name in OTHER_NUMBERS:
            continue
        config = names.understand(raw)
        with torch.device("meta"):
            encoder = Bert(config, attention.kernel("reference"))
        counted = sum(parameter.numel() for parameter in encoder.parameters())
        if raw["model_type"] == "qwen3" and "8B" in name and "Rerank" in name:
            counted += config.vocab_size * config.hidden_size  # scores of words of their own
        assert abs(counted / published - 1) < 0.02, (name, counted, published)
        compared += 1
    assert compared >= 110
    assert set(models.FACTS["models"]) <= {name for _, name, *_ in models.rows()}


def test_a_verdict_is_the_check_of_the_loader(models: ModuleType) -> None:
    """The control: one field more, and a model that works does not."""
    assert models.verdict(models.modernbert()) == (True, "")
    good, reason = models.verdict(models.modernbert() | {"rope_scaling": {"factor": 2.0}})
    assert not good and "rotary positions" in reason
    assert not models.verdict(models.bert(is_decoder=True))[0]
    assert "it needs one of two towers" in models.verdict(models.other("clip"))[1]
