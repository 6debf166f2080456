"""PopTorch's optimizers step as torch's do, to the bit; what they add, works or is said."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn

from packhorse import optim as ours
from packhorse_port import notices, optim
from packhorse_port.notices import UsageError


@pytest.fixture(autouse=True)
def fresh() -> None:
    notices.reset()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def train(make, steps: int = 6, clip: float = 0.0, scale: float = 1.0) -> list[torch.Tensor]:
    """The weights after some steps under `make(parameters)`."""
    net = model()
    optimizer = make(net.parameters())
    torch.manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        (net(torch.randn(4, 5) * scale) ** 2).mean().backward()
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
    return [parameter.detach() for parameter in net.parameters()]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "maximize": True}),
    ("Adam", {}),
    ("Adam", {"lr": 0.01, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.1}),
    ("AdamW", {}),
    ("AdamW", {"lr": 0.01, "amsgrad": True, "foreach": False}),
    ("RMSprop", {}),
    ("RMSprop", {"lr": 0.01, "alpha": 0.9, "momentum": 0.9, "centered": True}),
]


@pytest.mark.parametrize(("name", "settings"), SETTINGS)
def test_steps_are_torchs_to_the_bit(name: str, settings: dict[str, Any]) -> None:
    ported, plain = getattr(optim, name), getattr(torch.optim, name)
    expected = train(lambda parameters: plain(parameters, **settings))
    assert same(train(lambda parameters: ported(parameters, **settings)), expected)
    meaningless = {"loss_scaling": 1024.0, "accum_type": torch.float16}
    assert same(train(lambda p: ported(p, **settings, **meaningless)), expected)
    assert issubclass(ported, plain) and not same(train(plain_sgd), expected)


def plain_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05)


@pytest.mark.parametrize(("name", "settings"), SETTINGS)
def test_state_goes_to_torchs_and_back(name: str, settings: dict[str, Any]) -> None:
    net = model()
    ported = getattr(optim, name)(net.parameters(), **settings)
    net(torch.ones(1, 5)).sum().backward()
    ported.step()
    plain = getattr(torch.optim, name)(net.parameters(), **settings)
    plain.load_state_dict(ported.state_dict())
    ported.load_state_dict(plain.state_dict())
    assert ported.state_dict()["param_groups"][0].keys() == plain.param_groups[0].keys()


def test_defaults_are_torchs() -> None:
    for name in ("Adam", "AdamW", "RMSprop"):
        actual = getattr(optim, name)(model().parameters()).defaults
        assert actual == getattr(torch.optim, name)(model().parameters()).defaults
    assert "lr" in inspect.signature(optim.SGD).parameters
    with pytest.raises(TypeError, match="lr"):
        optim.SGD(model().parameters())  # pyright: ignore[reportCallIssue]


def test_groups_and_schedules() -> None:
    layers = list(model().children())
    parameters = [{"params": layers[0].parameters(), "lr": 0.5}, {"params": layers[2].parameters()}]
    optimizer = optim.AdamW(parameters, lr=0.1, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    optimizer.step()
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.05, 0.01])


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_max_grad_norm_clips_all_together(name: str) -> None:
    plain, ported = getattr(torch.optim, name), getattr(optim, name)
    clipped = train(lambda p: ported(p, lr=0.1, max_grad_norm=0.01), scale=20)
    assert same(clipped, train(lambda p: plain(p, lr=0.1), clip=0.01, scale=20))
    assert not same(clipped, train(lambda p: plain(p, lr=0.1), scale=20))


def test_a_closure_is_clipped_after_it_ran() -> None:
    net = model()
    optimizer = optim.SGD(net.parameters(), lr=1.0, max_grad_norm=1e-3)
    before = [parameter.detach().clone() for parameter in net.parameters()]

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(torch.ones(3, 5)).pow(2).sum()
        loss.backward()
        return loss.detach()

    assert optimizer.step(closure) is not None
    moved = [(a.detach() - b).pow(2).sum() for a, b in zip(net.parameters(), before, strict=True)]
    assert float(sum(moved)) ** 0.5 == pytest.approx(1e-3, rel=1e-3)


def test_adamw_without_bias_correction() -> None:
    def by_hand(parameters):
        settings: dict[str, Any] = {"bias_correction": False, "adapt": False, "foreach": False}
        return ours.LAMB(parameters, lr=0.01, eps=1e-8, weight_decay=0.1, **settings)

    for foreach in (False, True):
        uncorrected = train(
            lambda p, by_foreach=foreach: optim.AdamW(
                p, lr=0.01, weight_decay=0.1, bias_correction=False, foreach=by_foreach
            )
        )
        for single, second in zip(uncorrected, train(by_hand), strict=True):
            assert torch.allclose(single, second, atol=1e-6, rtol=1e-5)
    assert not torch.allclose(
        uncorrected[0], train(lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1))[0], atol=1e-3
    )


def test_rmsprop_as_tensorflow_has_it() -> None:
    weight = nn.Parameter(torch.tensor([1.0, -2.0]))
    settings = {"alpha": 0.9, "eps": 1e-3, "momentum": 0.5, "use_tf_variant": True}
    optimizer = optim.RMSprop([weight], lr=0.1, **settings)
    square, velocity, expected = torch.ones(2), torch.zeros(2), weight.detach().clone()
    for gradient in (torch.tensor([0.5, -1.0]), torch.tensor([2.0, 0.0])):
        weight.grad = gradient
        optimizer.step()
        square = 0.9 * square + 0.1 * gradient**2
        velocity = 0.5 * velocity + 0.1 * gradient / (square + 1e-3).sqrt()
        expected = expected - velocity
        assert torch.allclose(weight, expected)
    with_closure = optim.RMSprop([weight], use_tf_variant=True, centered=True)
    assert with_closure.step(lambda: 3.0) == 3.0


def test_hooks_run_once_whoever_was_made_before() -> None:
    torch.optim.RMSprop(model().parameters())
    calls: list[int] = []
    for make in (optim.RMSprop, lambda p: optim.SGD(p, lr=0.1), optim.AdamW):
        optimizer = make(model().parameters())
        optimizer.register_step_post_hook(lambda *_: calls.append(1))
        optimizer.step()
    assert len(calls) == 3


def test_lamb_has_poptorchs_defaults() -> None:
    lamb = optim.LAMB(model().parameters())
    assert isinstance(lamb, torch.optim.Optimizer)
    defaults = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}
    defaults |= {"bias_correction": True, "max_weight_norm": 65500.0}
    assert {name: lamb.defaults[name] for name in defaults} == defaults
    settings = {"lr": 0.01, "max_weight_norm": 2.0, "bias_correction": False}
    expected = train(lambda p: ours.LAMB(p, eps=1e-8, **settings))
    assert same(train(lambda p: optim.LAMB(p, **settings, loss_scaling=64.0)), expected)
    assert [notice.key for notice in notices.logged()] == ["optim.loss_scaling"]


def test_without_effect_is_kept_and_said_once() -> None:
    scaled: dict[str, Any] = {"loss_scaling": 8.0, "velocity_scaling": 2.0, "momentum": 0.9}
    types: dict[str, Any] = {"accum_type": torch.float16, "velocity_accum_type": torch.float16}
    optim.SGD(model().parameters(), 0.1, use_combined_accum=True, **scaled, **types)
    optimizer = optim.SGD(model().parameters(), 0.1, use_combined_accum=True, **scaled, **types)
    assert optimizer.loss_scaling == 8.0 and optimizer.accum_type == torch.float16
    assert len(notices.logged()) == 5
    notices.reset()
    optim.AdamW(model().parameters(), loss_scaling=1.0, accum_type=torch.float32)
    assert not notices.logged()


def test_variable_attributes() -> None:
    attrs = optim.AdamW(model().parameters(), lr=0.1, loss_scaling=2.0).variable_attrs
    assert not attrs.isConstant("lr") and attrs.isConstant("weight_decay")
    attrs.markAsConstant("lr")
    attrs.markAsVariable("weight_decay")
    assert attrs.isConstant("lr") and not attrs.isConstant("weight_decay")
    with pytest.raises(UsageError, match="no 'learning_rate'; it has lr"):
        attrs.markAsConstant("learning_rate")


def test_accumulators_have_two_types() -> None:
    with pytest.raises(UsageError, match=r"float32 or torch\.float16, not torch\.bfloat16"):
        optim.Adam(model().parameters(), accum_type=torch.bfloat16)


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "LAMB", "RMSprop"])
def test_half_weights_are_updated_in_fp32(kind: str) -> None:
    """Gradients whose squares vanish in half: the update is that of fp32, rounded once."""
    start = torch.linspace(-0.5, 0.5, 8)
    gradient = torch.full((8,), 1e-5)
    settings = {"lr": 1e-2, "weight_decay": 0.0, "eps": 1e-8}
    wide = nn.Parameter(start.half().float())
    narrow = nn.Parameter(start.half())
    for parameter in (wide, narrow):
        optimizer = getattr(optim, kind)([parameter], **settings)
        for _ in range(3):
            parameter.grad = gradient.half().to(parameter.dtype)
            optimizer.step()
        assert parameter.grad.dtype == parameter.dtype
        moments = [v for n, v in optimizer.state[parameter].items() if n != "step"]
        assert moments and all(moment.dtype == torch.float32 for moment in moments)
    # Each of the three updates is rounded to half: half a unit in the last place of 0.5 each.
    torch.testing.assert_close(narrow.float(), wide, rtol=0, atol=3 * 2**-12)
    plain = nn.Parameter(start.half())
    plain.grad = gradient.half()
    torch.optim.Adam([plain], lr=1e-2, eps=1e-8).step()  # the control
    assert not torch.allclose(plain.float(), wide, rtol=0, atol=3 * 2**-12, equal_nan=False)
