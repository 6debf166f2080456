"""The model that is trained: what it takes over, what is drawn, and its weights in fp32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from packhorse import attention, checkpoint
from packhorse.errors import InputError
from packhorse.model.config import BertConfig
from packhorse.train.preparing import (
    LabelSet,
    in_fp32,
    new_config,
    optimizer_for,
    prepare,
    truncated_normal,
)
from packhorse.train.settings import TrainSettings

Make = Callable[..., Any]
CONFIG = BertConfig(64, 32, 2, 2, 64, max_positions=48)


def prepared(begun: Any, *heads: str, labels: tuple[str, ...] = (), **options: Any) -> Any:
    kernel = attention.kernel("reference")
    return prepare(TrainSettings(**options), begun, heads, kernel, LabelSet(labels))


def test_a_new_model_is_drawn_as_bert_was() -> None:
    source, new = prepared(CONFIG, "mlm", "nsp")
    named = dict(source.model.named_parameters())
    assert sorted(new) == sorted(named)
    words = named["bert.embed.words.weight"]
    drawn = words.detach()
    assert 0.015 < float(drawn.std()) < 0.02 and float(drawn.abs().max()) <= 0.04
    assert torch.equal(named["bert.layers.0.norm.weight"], torch.ones(32))
    assert torch.equal(named["heads.mlm.norm.weight"], torch.ones(32))
    assert not named["bert.layers.0.down.bias"].any()
    parameters = dict(source.model.named_parameters(remove_duplicate=False))
    assert parameters["heads.mlm.decoder.weight"] is words  # tied


def test_draws_are_normal_up_to_two_deviations() -> None:
    """Against torch's own, which inverts the distribution."""
    shape, generator = torch.Size((1000, 400)), torch.Generator().manual_seed(3)
    drawn = truncated_normal(shape, 0.5, generator)
    assert float(drawn.abs().max()) <= 1.0 and abs(float(drawn.mean())) < 4e-3
    # A normal number cut off at two deviations has 0.8796 of the deviation.
    assert float(drawn.std()) == pytest.approx(0.8796 * 0.5, rel=5e-3)
    reference = torch.nn.init.trunc_normal_(torch.empty(shape), 0.0, 0.5, -1.0, 1.0)
    shares = torch.linspace(0.01, 0.99, 30)
    actual, known = (torch.quantile(x.flatten(), shares) for x in (drawn, reference))
    assert torch.allclose(actual, known, atol=8e-3)
    clamped = torch.empty(shape).normal_(0.0, 0.5, generator=generator).clamp(-1.0, 1.0)
    piled = torch.quantile(clamped.flatten(), shares)  # the control: what is beyond, at the ends
    assert not torch.allclose(piled, known, atol=8e-3)
    again = truncated_normal(shape, 0.5, torch.Generator().manual_seed(3))
    assert torch.equal(drawn, again)


def test_draws_follow_the_seed() -> None:
    def words(seed: int) -> torch.Tensor:
        return prepared(CONFIG, "mlm", seed=seed)[0].model.bert.embed.words.weight

    assert torch.equal(words(1), words(1))
    assert not torch.equal(words(1), words(2))


def test_weights_are_taken_over_and_dropout_is_set(tiny: Path) -> None:
    begun = checkpoint.load(tiny)
    source, new = prepared(begun, "classify", labels=("a", "b", "c"), dropout=0.3)
    assert new == ["heads.classify.dense.weight", "heads.classify.dense.bias"]
    before, after = dict(begun.model.named_parameters()), dict(source.model.named_parameters())
    pooler = after["heads.classify.pooler.dense.weight"]
    assert torch.equal(pooler, before["heads.pooled.dense.weight"])
    assert torch.equal(
        after["bert.layers.1.up.dense.weight"], before["bert.layers.1.up.dense.weight"]
    )
    rates = {m.p for m in source.model.modules() if isinstance(m, torch.nn.Dropout)}
    assert rates == {0.3} and source.config.dropout == 0.3
    assert source.labels == ("a", "b", "c")


def test_sizes_must_be_set_and_agree(tiny: Path) -> None:
    with pytest.raises(InputError, match="heads is not set"):
        new_config(TrainSettings(layers=2, hidden_size=8), 10, 16)
    with pytest.raises(InputError, match="max_positions is 8; sequences have up to 16 tokens"):
        new_config(TrainSettings(layers=2, hidden_size=8, heads=2, max_positions=8), 10, 16)
    assert (
        new_config(TrainSettings(layers=2, hidden_size=8, heads=2), 10, 16).intermediate_size == 32
    )
    with pytest.raises(InputError, match="hidden_size is set to 8, but model has 32"):
        prepared(checkpoint.load(tiny), "mlm", hidden_size=8)


def test_adamw_is_torchs() -> None:
    torch.manual_seed(0)
    model_here, reference = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    reference.load_state_dict(model_here.state_dict())
    settings = TrainSettings(optimizer="adamw", learning_rate=0.01, weight_decay=0.1, epsilon=1e-8)
    optimizer_here = optimizer_for(settings, model_here, half=False)
    groups = [
        {"params": [reference.weight], "weight_decay": 0.1},
        {"params": [reference.bias], "weight_decay": 0.0},
    ]
    reference_optimizer = torch.optim.AdamW(groups, lr=0.01, eps=1e-8)
    for _ in range(10):
        x = torch.randn(4, 8)
        for model, optimizer in ((model_here, optimizer_here), (reference, reference_optimizer)):
            optimizer.zero_grad()
            (model(x) ** 2).sum().backward()
            optimizer.step()
    assert torch.allclose(model_here.weight, reference.weight, atol=1e-6)
    assert torch.allclose(model_here.bias, reference.bias, atol=1e-6)
    lamb = optimizer_for(replace(settings, optimizer="lamb"), model_here, half=False)
    assert [group["adapt"] for group in lamb.param_groups] == [True, False]


def test_bf16_moves_weights_that_it_keeps_in_fp32() -> None:
    source, _ = prepared(CONFIG, "mlm", "nsp")
    before = {n: p.detach().clone() for n, p in source.model.named_parameters()}
    settings = TrainSettings(optimizer="lamb", learning_rate=1e-5, weight_decay=0.0)
    optimizer = optimizer_for(settings, source.model, half=True)
    assert {p.dtype for p in source.model.parameters()} == {torch.bfloat16}
    full = dict(in_fp32(source, optimizer).model.named_parameters())
    assert all(torch.equal(full[name], before[name]) for name in before)  # nothing was rounded
    weight = source.model.bert.layers[0].get_parameter("down.weight")
    for _ in range(3):
        (weight.float() * 1e-3).sum().backward()
    assert weight.grad is not None and weight.grad.dtype == torch.float32
    rounded = weight.detach().clone()
    for _ in range(20):
        optimizer.step()
    moved = dict(in_fp32(source, optimizer).model.named_parameters())["bert.layers.0.down.weight"]
    assert not torch.equal(moved, before["bert.layers.0.down.weight"])
    assert torch.equal(moved.bfloat16(), weight) and int((rounded != weight).sum()) < weight.numel()
    assert in_fp32(source, optimizer).model.heads["mlm"].decoder.weight.dtype == torch.float32
