"""Adapters that are trained here: PEFT and sentence-transformers open them, and runs go on."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import packhorse
from packhorse import checkpoint
from packhorse.errors import InputError
from packhorse.train.job import assemble
from packhorse.train.loop import train
from packhorse.train.settings import TrainSettings

TEXTS = ["good horse", "ugly mule cart road"]
QUERY_VALUE = ("query", "value")


@pytest.fixture
def of(tiny: Path, tmp_path: Path) -> Callable[..., TrainSettings]:
    rows = [
        {"anchor": f"{word} {noun}", "positive": f"{noun} {word}"}
        for word in ("good", "fine", "bad", "poor")
        for noun in ("horse", "mule", "cart")
    ]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    usual = {"task": "contrastive", "model": str(tiny), "train": str(path), "device": "cpu"}
    usual |= {"batch": 6, "steps": 6, "learning_rate": 3e-2, "compile": "off", "lora_rank": 4}
    return lambda **options: TrainSettings(**{**usual, **options})


def test_float8_would_lose_adapters(of: Any) -> None:
    """Its layers are built over the weights alone."""
    with pytest.raises(InputError, match="lora_rank is 4 and precision 'float8'"):
        of(precision="float8")


@pytest.mark.parametrize("modules", [(), QUERY_VALUE], ids=str)
def test_an_adapter_opens_in_peft_and_sentence_transformers(
    of: Any, tiny: Path, tmp_path: Path, modules: tuple[str, ...]
) -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed (pip install peft)")
    transformers = pytest.importorskip("transformers")
    sentence_transformers = pytest.importorskip("sentence_transformers")
    job = assemble(of(lora_modules=modules, lora_alpha=6.0))
    frozen = {n: p.clone() for n, p in job.model.named_parameters() if not p.requires_grad}
    folder = train(job, tmp_path / "run").model
    assert folder is not None and not (folder / "model.safetensors").exists()
    assert all(torch.equal(job.model.get_parameter(n), before) for n, before in frozen.items())
    ours = packhorse.load(folder, device="cpu", dtype="fp32").embed(TEXTS)
    before = packhorse.load(tiny, device="cpu", dtype="fp32").embed(TEXTS)
    assert np.abs(ours - before).max() > 1e-3  # the control: the base alone
    theirs = sentence_transformers.SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    assert np.abs(ours - theirs).max() < 1e-5
    base = transformers.BertModel.from_pretrained(tiny)
    wrapped = peft.PeftModel.from_pretrained(base, folder).eval()
    adapted = [n for n, _ in wrapped.named_modules() if n.endswith("lora_A.default")]
    assert len(adapted) == (4 if modules else 12)
    words = transformers.AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        with torch.no_grad():
            hidden = wrapped(**words(text, return_tensors="pt")).last_hidden_state[0]
        loaded = checkpoint.load(folder)
        (encoding,) = checkpoint.tokenizer(loaded).encode([text])
        (expected,) = loaded.model(packhorse.Packed.build([encoding]), "hidden")
        assert (hidden - expected).abs().max() < 1e-5


def test_its_gradients_are_those_of_peft(of: Any, tiny: Path) -> None:
    """Of the same loss at the same matrices, in double precision."""
    peft = pytest.importorskip("peft", reason="PEFT is not installed (pip install peft)")
    transformers = pytest.importorskip("transformers")
    from packhorse.train import lora

    job = assemble(of(dropout=0.0, lora_modules=("query", "dense")))
    model = job.model.double().eval()
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_b" in name:
            parameter.data.normal_(0, 0.1)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["query", "dense"])
    base = transformers.BertModel.from_pretrained(tiny).double().eval()
    wrapped = peft.get_peft_model(base, config)
    state = {n.replace(".weight", ".default.weight"): t for n, t in lora.tensors(model).items()}
    missing = wrapped.load_state_dict(state, strict=False)
    assert not missing.unexpected_keys
    (encoding,) = checkpoint.tokenizer(job.checkpoint).encode(["good horse w1 w2"])
    (ours,) = model(packhorse.Packed.build([encoding]), "hidden")
    ids = torch.from_numpy(np.asarray(encoding.ids)).long()[None]
    theirs = wrapped(input_ids=ids).last_hidden_state[0]
    assert (ours - theirs).abs().max() < 1e-10
    weights = torch.randn(ours.shape, dtype=torch.float64)
    (ours * weights).sum().backward()
    (theirs * weights).sum().backward()
    expected = dict(wrapped.named_parameters())
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert grads and all("lora_" in name for name in grads)
    for module in (m for m in model.modules() if isinstance(m, lora.AdaptedLinear)):
        for number, part in enumerate(module.parts):
            for own, kind in ((module.lora_a, "lora_A"), (module.lora_b, "lora_B")):
                other = expected[f"base_model.model.{part}.{kind}.default.weight"].grad
                assert own[number].grad is not None and other is not None
                assert torch.allclose(own[number].grad, other, rtol=1e-9, atol=1e-12)


def test_a_run_that_was_stopped_goes_on_to_the_bit(of: Any, tmp_path: Path) -> None:
    settings = of(optimizer="lamb", dropout=0.1)
    train(assemble(settings), tmp_path / "whole")
    for steps in (2, 2):
        calls = count()
        wish = lambda calls=calls, steps=steps: signal.SIGTERM if next(calls) >= steps else 0  # noqa: E731
        train(assemble(settings), tmp_path / "cut", stop_signal=wish)
    assert not (tmp_path / "cut/step-00000004/model.safetensors").exists()
    assert train(assemble(settings), tmp_path / "cut").step == 6
    for name in ("model/adapter_model.safetensors", "log.jsonl"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    notes: list[str] = []
    train(assemble(settings), tmp_path / "cut", report=notes.append)
    assert notes == ["finished at step 6: nothing is left to train"]


def test_bf16_keeps_master_weights(of: Any, tmp_path: Path) -> None:
    folder = train(assemble(of(precision="bf16")), tmp_path / "run").model
    assert folder is not None
    from safetensors.torch import load_file

    tensors = load_file(folder / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    assert any(not t.equal(t.bfloat16().float()) for t in tensors.values())


def test_what_does_not_fit_is_refused(of: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"lora_modules nowhere are none .* dense, key, query"):
        assemble(of(lora_modules=("nowhere",)))
    with pytest.raises(InputError, match="adapters are for embeddings, not pretrain"):
        of(task="pretrain")
    folder = train(assemble(of(steps=2)), tmp_path / "run").model
    with pytest.raises(InputError, match="is an adapter; start a new one from its base"):
        assemble(of(model=str(folder)))
    from packhorse.errors import PackhorseError

    with pytest.raises(PackhorseError, match="24 matrices, not of 4"):
        train(assemble(of(steps=8, lora_modules=("query",))), tmp_path / "run")
    train(assemble(of(steps=2, lora_rank=0, lora_modules=())), tmp_path / "whole")
    with pytest.raises(PackhorseError, match="holds a whole model and no adapter"):
        train(assemble(of(steps=3)), tmp_path / "whole")
