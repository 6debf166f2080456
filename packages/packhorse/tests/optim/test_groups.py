"""Which parameters decay, on the project's own model and on odd ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from packhorse.errors import InputError
from packhorse.optim import LAMB, parameter_groups


def names(model: nn.Module, group: dict) -> set[str]:
    held = set(map(id, group["params"]))
    return {name for name, parameter in model.named_parameters() if id(parameter) in held}


def test_berts_biases_and_normalizations_stand_apart(make_model) -> None:
    model = make_model(torch.float32)
    decayed, excluded, stacked = parameter_groups(model, 0.01)
    parameters = dict(model.named_parameters())
    assert (
        names(model, stacked)
        == {name for name in parameters if name.endswith("qkv.weight")}
        != set()
    )
    assert (stacked["stacked"], stacked["weight_decay"], stacked["adapt"]) == (3, 0.01, True)
    assert names(model, decayed) | names(model, excluded) | names(model, stacked) == set(parameters)
    assert all(parameters[name].ndim == 2 for name in names(model, decayed))
    assert all(parameters[name].ndim == 1 for name in names(model, excluded))
    assert any(name.endswith("attention_norm.weight") for name in names(model, excluded))
    assert (decayed["weight_decay"], decayed["adapt"]) == (0.01, True)
    assert (excluded["weight_decay"], excluded["adapt"]) == (0.0, False)


def test_stacked_tensors_are_told_apart_only_where_there_is_a_ratio(make_model) -> None:
    model = make_model(torch.float32)
    assert [group.get("stacked", 1) for group in parameter_groups(model, 0.1)] == [1, 1, 3]
    assert len(parameter_groups(model, 0.1, unstack=False)) == 2
    *_, weights, biases = parameter_groups(model, 0.1, adapt_excluded=True)
    assert {name.rpartition(".")[2] for name in names(model, biases)} == {"bias"}
    assert len(biases["params"]) == len(weights["params"])
    assert (biases["stacked"], biases["weight_decay"], biases["adapt"]) == (3, 0.0, True)


class RootNorm(nn.RMSNorm):
    pass


class Scale(RootNorm):
    """A normalization by its bases alone."""


class NormLinear(nn.Linear):
    """Named after a normalization, but none."""


def test_a_normalization_is_known_by_its_class() -> None:
    model = nn.ModuleDict(
        {
            "conv": nn.Conv2d(2, 3, 1),
            "batch": nn.BatchNorm2d(3),
            "group": nn.GroupNorm(1, 3),
            "scale": Scale(3),
            "linear": NormLinear(3, 3),
            "attention": nn.MultiheadAttention(4, 2, add_bias_kv=True),
            "prelu": nn.PReLU(),
        }
    )
    decayed, excluded = parameter_groups(model, 0.1, adapt_excluded=True)
    weights = {"conv.weight", "linear.weight", "prelu.weight"}
    weights |= {"attention.in_proj_weight", "attention.out_proj.weight"}
    assert names(model, decayed) == weights
    assert {"scale.weight", "attention.in_proj_bias", "attention.bias_k"} < names(model, excluded)
    assert excluded["adapt"]


def test_tied_parameters_come_once_and_frozen_ones_never() -> None:
    words, decoder = nn.Embedding(5, 3), nn.Linear(3, 5)
    decoder.weight = words.weight
    decoder.bias.requires_grad_(False)
    decayed, excluded = parameter_groups(nn.ModuleList([words, decoder]), 0.01)
    assert decayed["params"] == [words.weight]
    assert excluded["params"] == []
    words.requires_grad_(False)
    with pytest.raises(InputError, match="nothing to train"):
        parameter_groups(nn.ModuleList([words, decoder]), 0.01)


def test_excluded_parameters_take_adams_step_in_lamb() -> None:
    torch.manual_seed(0)
    model, twin = nn.Linear(3, 3), nn.Linear(3, 3)
    twin.load_state_dict(model.state_dict())
    lamb = LAMB(parameter_groups(model, 0.1), 0.01, eps=1e-8)
    adamw = torch.optim.AdamW(parameter_groups(twin, 0.1), 0.01)
    for optimizer, single in ((lamb, model), (adamw, twin)):
        for parameter in single.parameters():
            parameter.grad = torch.linspace(-1, 1, parameter.numel()).view(parameter.shape)
        optimizer.step()
    torch.testing.assert_close(model.bias, twin.bias)
    assert not torch.allclose(model.weight, twin.weight, rtol=1e-4)
