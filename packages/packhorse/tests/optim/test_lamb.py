"""LAMB against the paper in plain numbers, against torch's Adam, against itself after a resume."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from packhorse.errors import InputError
from packhorse.optim import LAMB, lamb, load_slots, parameter_groups

SHAPES = [(), (1,), (0,), (0, 3), (5,), (3, 4), (2, 3, 4), (17, 1), (130, 70)]


def tensors(seed: int, shapes: list = SHAPES, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes
    ]


def parameters(dtype: torch.dtype = torch.float64, shapes: list = SHAPES) -> list[nn.Parameter]:
    return [nn.Parameter(tensor) for tensor in tensors(0, shapes, dtype)]


def run(optimizer: LAMB, steps: range, silent: int | None = None) -> list[Tensor]:
    """Steps with gradients that every dtype can hold; parameter `silent` sees zeros."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    for step in steps:
        gradients = tensors(1000 + step, [p.shape for p in held], torch.bfloat16)
        for number, (parameter, gradient) in enumerate(zip(held, gradients, strict=True)):
            parameter.grad = gradient.to(parameter.dtype) * (number != silent)
        optimizer.step()
    return [parameter.detach().clone() for parameter in held]


def by_hand(
    weight: list[float], gradients: list[list[float]], lr: float, decay: float, corrected: bool
) -> list[float]:
    """Algorithm 2 of the paper for one tensor, number by number, with φ(z) = z."""
    beta1, beta2, eps = 0.9, 0.99, 1e-6
    m, v = [0.0] * len(weight), [0.0] * len(weight)
    for t, gradient in enumerate(gradients, 1):
        m = [beta1 * a + (1 - beta1) * g for a, g in zip(m, gradient, strict=True)]
        v = [beta2 * a + (1 - beta2) * g * g for a, g in zip(v, gradient, strict=True)]
        fix1, fix2 = (1 - beta1**t, 1 - beta2**t) if corrected else (1.0, 1.0)
        r = [(a / fix1) / (math.sqrt(b / fix2) + eps) for a, b in zip(m, v, strict=True)]
        d = [a + decay * w for a, w in zip(r, weight, strict=True)]
        ratio = math.hypot(*weight) / math.hypot(*d)
        weight = [w - lr * ratio * a for w, a in zip(weight, d, strict=True)]
    return weight


@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize("foreach", [True, False])
def test_it_is_the_papers_algorithm(corrected: bool, foreach: bool) -> None:
    start, gradients = [0.5, -1.25, 2.0], [[0.1, -0.2, 0.3], [0.0, 1.0, -3.0], [2.0, 0.5, 0.25]]
    weight = nn.Parameter(torch.tensor(start, dtype=torch.float64))
    optimizer = LAMB(
        [weight], 0.05, (0.9, 0.99), weight_decay=0.1, bias_correction=corrected, foreach=foreach
    )
    for gradient in gradients:
        weight.grad = torch.tensor(gradient, dtype=torch.float64)
        optimizer.step()
    assert weight.tolist() == pytest.approx(by_hand(start, gradients, 0.05, 0.1, corrected), 1e-12)
    control = by_hand(start, gradients, 0.05, 0.1, not corrected)
    assert weight.tolist() != pytest.approx(control, 1e-3)


STACKED = [(6,), (3, 4), (6, 2, 5), (0, 3), (390, 70)]


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_stacked_tensors_are_updated_as_if_they_stood_alone(
    foreach: bool, dtype: torch.dtype
) -> None:
    """The same LAMB over the parts, state and master weights included.

    To rounding: on a CPU the numbers at the end of a tensor go through other instructions.
    """
    whole = parameters(dtype, STACKED)
    apart = [nn.Parameter(part.clone()) for item in whole for part in item.detach().chunk(3)]
    options = {"master_weights": True, "foreach": foreach, "clamp": (0.1, 9.0)}
    first, second = LAMB(whole, 0.02, stacked=3, **options), LAMB(apart, 0.02, **options)
    for step in range(3):
        for parameter, gradient in zip(whole, tensors(step, STACKED, torch.float32), strict=True):
            parameter.grad = gradient.to(dtype)
        pieces = [piece for item in whole if item.grad is not None for piece in item.grad.chunk(3)]
        for parameter, gradient in zip(apart, pieces, strict=True):
            parameter.grad = gradient.clone()
        first.step()
        second.step()
    for number, parameter in enumerate(whole):
        parts = apart[3 * number : 3 * number + 3]
        joined = torch.cat([part.detach() for part in parts])
        torch.testing.assert_close(
            parameter.detach(), joined, rtol=4 * torch.finfo(dtype).eps, atol=0
        )
        for kind, held in first.state[parameter].items():
            if held.ndim:
                joined = torch.cat([second.state[part][kind] for part in parts])
                torch.testing.assert_close(held, joined, rtol=4e-7, atol=0)


def test_without_stacking_the_parts_share_a_ratio() -> None:
    """The control: the same tensors, taken as one."""
    single, three = (LAMB(parameters(shapes=STACKED), 0.02, stacked=count) for count in (1, 3))
    assert not torch.equal(run(single, range(1))[1], run(three, range(1))[1])
    plain, adam = (
        LAMB(parameters(shapes=STACKED), 0.02, stacked=count, adapt=False) for count in (1, 3)
    )
    assert all(map(torch.equal, run(plain, range(2)), run(adam, range(2))))


@pytest.mark.parametrize("shape", [(), (4,), (5, 3)], ids=str)
def test_what_cannot_be_stacked_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=r"stacked is 3, and a parameter has shape"):
        LAMB(parameters(shapes=[(3,), shape]), stacked=3)
    with pytest.raises(InputError, match="stacked is 0"):
        LAMB(parameters(shapes=[(3,)]), stacked=0)


def test_state_from_before_there_was_stacking_is_read() -> None:
    held = parameters(torch.float32)
    first = LAMB(held, 0.01)
    run(first, range(2))
    saved = through_json(first.state_dict())
    for group in saved["param_groups"]:
        del group["stacked"]
    second = LAMB(copies(held), 0.01)
    second.load_state_dict(saved)
    assert all(map(torch.equal, run(second, range(2, 4)), run(first, range(2, 4))))


OPTIONS: list[dict[str, Any]] = [
    {},
    {"bias_correction": False},
    {"weight_decay": 0.0},
    {"adapt": False},
    {"clamp": (0.5, 1.5)},
    {"max_weight_norm": 0.75},
    {"betas": (0.0, 0.0), "eps": 1e-3},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_together_equals_one_by_one(
    options: dict[str, Any], dtype: torch.dtype, rtol: float
) -> None:
    together, alone = (
        run(LAMB(parameters(dtype), 0.02, foreach=foreach, **options), range(5), silent=5)
        for foreach in (True, False)
    )
    torch.testing.assert_close(together, alone, rtol=rtol, atol=rtol)
    assert not torch.equal(together[-1], parameters(dtype)[-1]), "nothing moved"


@given(
    st.lists(st.lists(st.integers(0, 6), max_size=3), min_size=1, max_size=6), st.integers(1, 60)
)
def test_together_equals_one_by_one_for_any_shapes(shapes: list, most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lamb, "TOGETHER_ON_CPU", most)
        together, alone = (
            run(LAMB(parameters(shapes=shapes), foreach=foreach), range(2))
            for foreach in (True, False)
        )
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-12)


def test_tensors_are_taken_together_up_to_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lamb, "TOGETHER_ON_CPU", 10)
    seen: list[list[int]] = []

    def recorded(weights: list[Tensor], *rest: Any) -> None:
        seen.append([weight.numel() for weight in weights])

    monkeypatch.setattr(lamb, "update_together", recorded)
    run(LAMB(parameters(shapes=[(4,), (6,), (1,), (30,), (2,), (8,)])), range(1))
    assert seen == [[4, 6], [1], [30], [2, 8]]


def test_memory_in_another_order_is_updated_rightly() -> None:
    last = nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
    transposed, plain = nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(6, 4))
    twins = [nn.Parameter(p.detach().clone().contiguous()) for p in (last, transposed, plain)]
    for parameter, twin in zip((last, transposed, plain), twins, strict=True):
        twin.grad = torch.randn(twin.shape)
        parameter.grad = twin.grad.clone()
    transposed.grad = torch.randn(4, 6).t()
    twins[1].grad = transposed.grad.contiguous()
    LAMB([last, transposed, plain], stacked=2).step()
    LAMB(twins, stacked=2).step()
    torch.testing.assert_close([last, transposed, plain], twins)


def test_without_adaptation_and_decay_it_is_adam() -> None:
    actual = run(LAMB(parameters(), 0.01, eps=1e-8, weight_decay=0.0, adapt=False), range(6))
    expected = run(torch.optim.Adam(parameters(), 0.01), range(6))  # pyright: ignore[reportArgumentType]
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("foreach", [True, False])
def test_a_tensor_moves_by_the_rate_of_its_own_length(foreach: bool) -> None:
    before = parameters()
    after = run(LAMB(parameters(), 0.01, foreach=foreach), range(1))
    for start, end in zip(before, after, strict=True):
        torch.testing.assert_close((end - start).norm(), 0.01 * start.detach().norm())


@pytest.mark.parametrize("foreach", [True, False])
def test_zero_weights_and_zero_directions_have_ratio_one(foreach: bool) -> None:
    zero, still = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.ones(4))
    zero.grad, still.grad = torch.ones(4), torch.zeros(4)
    options = {"weight_decay": 0.0, "clamp": (2.0, 3.0), "foreach": foreach}
    LAMB([zero, still], 0.01, **options).step()
    torch.testing.assert_close(zero.detach(), torch.full((4,), -0.01))  # Adam's first step, ± lr
    assert torch.equal(still.detach(), torch.ones(4))


@pytest.mark.parametrize(("clamp", "expected"), [((0.0, 0.5), 0.5), ((9.0, 10.0), 9.0)])
def test_the_clamp_bounds_the_ratio(clamp: tuple[float, float], expected: float) -> None:
    weight = nn.Parameter(torch.full((4,), 2.0))  # length 4, Adam's first direction has length 2
    weight.grad = torch.ones(4)
    LAMB([weight], 0.01, weight_decay=0.0, clamp=clamp).step()
    torch.testing.assert_close(weight.detach(), torch.full((4,), 2 - 0.01 * expected))


def test_the_weights_length_can_be_bounded() -> None:
    weight = nn.Parameter(torch.full((4,), 2.0))
    weight.grad = torch.ones(4)
    LAMB([weight], 0.01, weight_decay=0.0, max_weight_norm=1.0).step()
    torch.testing.assert_close(weight.detach(), torch.full((4,), 2 - 0.01 * 1 / 2))


def test_groups_differ_and_options_may_change() -> None:
    single, second = parameters(shapes=[(3,), (3,)])
    optimizer = LAMB([{"params": [single], "lr": 0.0}, {"params": [second]}], 0.1)
    started = [single.detach().clone(), second.detach().clone()]
    run(optimizer, range(1))
    assert torch.equal(single.detach(), started[0])
    assert not torch.equal(second.detach(), started[1])
    optimizer.param_groups[1]["lr"] = 0.0
    before = second.detach().clone()
    run(optimizer, range(1))
    assert torch.equal(second.detach(), before)


def test_a_parameter_without_gradient_waits_and_keeps_its_own_age() -> None:
    late, early = parameters(shapes=[(3,), (3,)])
    alone = parameters(shapes=[(3,), (3,)])[0]
    optimizer = LAMB([late, early], weight_decay=0.0)
    early.grad = torch.ones(3, dtype=torch.float64)
    optimizer.step()
    assert late not in optimizer.state
    late.grad = alone.grad = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    optimizer.step()
    LAMB([alone], weight_decay=0.0).step()
    assert (int(optimizer.state[late]["step"]), int(optimizer.state[early]["step"])) == (1, 2)
    torch.testing.assert_close(late, alone, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("foreach", [True, False])
def test_half_precision_has_fp32_state_and_with_masters_loses_nothing(foreach: bool) -> None:
    shapes = [(8,), (4, 6)]
    halves = parameters(torch.bfloat16, shapes)
    reference = [nn.Parameter(half.detach().float()) for half in halves]
    optimizer = LAMB(halves, 0.01, master_weights=True, foreach=foreach)
    run(optimizer, range(20))
    run(LAMB(reference, 0.01, foreach=foreach), range(20))
    for half, full in zip(halves, reference, strict=True):
        state = optimizer.state[half]
        assert {state[name].dtype for name in ("m", "v", "master")} == {torch.float32}
        assert torch.equal(state["master"], full)
        assert torch.equal(half, full.bfloat16())


def test_small_steps_add_up_only_in_master_weights() -> None:
    with_master, without = (nn.Parameter(torch.ones(4, dtype=torch.bfloat16)) for _ in range(2))
    for parameter, master in ((with_master, True), (without, False)):
        optimizer = LAMB([parameter], 1e-4, weight_decay=0.0, master_weights=master)
        for _ in range(100):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        assert optimizer.state[parameter]["m"].dtype == torch.float32
    assert torch.equal(without.detach(), torch.ones_like(without)), "bf16 cannot represent 0.9999"
    torch.testing.assert_close(
        with_master.detach().float(), torch.full((4,), 0.99), rtol=0, atol=0.004
    )


def copies(parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    return [nn.Parameter(parameter.detach().clone()) for parameter in parameters]


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    """As a checkpoint would keep it: options as JSON, tensors as they are."""
    return {**state, "param_groups": json.loads(json.dumps(state["param_groups"]))}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"master_weights": True}, {"foreach": False}], ids=str)
def test_a_resumed_run_is_the_same_to_the_bit(dtype: torch.dtype, options: dict[str, Any]) -> None:
    held = parameters(dtype)
    first = LAMB(held, 0.01, clamp=(0.0, 10.0), **options)
    run(first, range(3))
    saved = through_json(first.state_dict())
    resumed = copies(held)
    second, control = LAMB(resumed, 0.5), LAMB(copies(held), 0.01, **options)
    second.load_state_dict(saved)
    for parameter, twin in zip(held, resumed, strict=True):
        for name, value in first.state[parameter].items():
            copied = second.state[twin][name]
            assert torch.equal(copied, value)
            assert copied.dtype == value.dtype
            assert copied.data_ptr() != value.data_ptr(), "two runs would share their state"
    uninterrupted = run(first, range(3, 6))
    assert all(map(torch.equal, run(second, range(3, 6)), uninterrupted))
    assert not all(map(torch.equal, run(control, range(3, 6)), uninterrupted)), "state is no use"


def test_torchs_own_loading_would_round_the_state() -> None:
    held = parameters(torch.bfloat16)
    first = LAMB(held, 0.01)
    run(first, range(3))
    second = LAMB(copies(held), 0.01)
    torch.optim.Optimizer.load_state_dict(second, first.state_dict())
    assert second.state[second.param_groups[0]["params"][-1]]["m"].dtype == torch.bfloat16


def test_state_of_another_optimizer_or_model_is_refused_and_nothing_changes() -> None:
    held = parameters(torch.float32, [(3,)])
    optimizer = LAMB(held)
    run(optimizer, range(1))
    before = {name: value.clone() for name, value in optimizer.state[held[0]].items()}
    adam = torch.optim.Adam(copies(held))
    run(adam, range(1))  # pyright: ignore[reportArgumentType]
    another = LAMB(parameters(torch.float32, [(4,)]))
    run(another, range(1))
    with pytest.raises(InputError, match="no 'm'"):
        optimizer.load_state_dict(adam.state_dict())
    with pytest.raises(InputError, match=r"shape \[4\], the parameter \[3\]"):
        optimizer.load_state_dict(another.state_dict())
    with pytest.raises(ValueError, match="group"):
        optimizer.load_state_dict(LAMB(parameters(torch.float32, [(3,), (3,)])).state_dict())
    assert all(torch.equal(before[name], optimizer.state[held[0]][name]) for name in before)


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.norm, self.out = nn.Linear(4, 16), nn.LayerNorm(16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.norm(self.hidden(x)))).squeeze(-1)


def test_slots_of_a_checkpoint_are_put_in_place() -> None:
    model = Regression()
    optimizer = LAMB(parameter_groups(model, 0.01), 0.01)
    run(optimizer, range(3))
    named = dict(model.named_parameters())
    slots = {kind: {n: optimizer.state[p][kind].clone() for n, p in named.items()} for kind in "mv"}
    twin = Regression()
    twin.load_state_dict(model.state_dict())
    another = LAMB(parameter_groups(twin, 0.01), 0.01)
    load_slots(another, twin.named_parameters(), slots, step=3)
    assert all(map(torch.equal, run(another, range(3, 5)), run(optimizer, range(3, 5))))
    assert {int(state["step"]) for state in another.state.values()} == {5}


def test_slots_that_do_not_fit_are_refused() -> None:
    model = Regression()
    model.norm.requires_grad_(False)
    optimizer = LAMB(parameter_groups(model, 0.01))
    names = ["hidden.weight", "hidden.bias", "out.weight", "out.bias"]
    full = {name: torch.zeros(model.get_parameter(name).shape) for name in names}
    load_slots(optimizer, model.named_parameters(), {"m": full, "v": full}, 7)
    less = {name: tensor for name, tensor in full.items() if name != "out.bias"}
    more = {**full, "pooler.weight": torch.zeros(1)}
    wrong = {**full, "out.bias": torch.zeros(2)}
    for m, v, reason in (
        (less, full, r"'m' .*out\.bias"),
        (full, more, r"'v' .*pooler\.weight"),
        (wrong, full, r"'m' of out\.bias has shape \[2\]"),
    ):
        with pytest.raises(InputError, match=reason):
            load_slots(optimizer, model.named_parameters(), {"m": m, "v": v}, 7)
    with pytest.raises(InputError, match="'v'"):
        load_slots(optimizer, model.named_parameters(), {"m": full}, 7)


class Reads(TorchDispatchMode):
    """Counts what is read back from a tensor into Python, by dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[torch.dtype] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.found[args[0].dtype] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("foreach", [True, False])
def test_a_step_reads_nothing_back_from_the_device(foreach: bool) -> None:
    optimizer = LAMB(parameters(), clamp=(0.1, 10.0), max_weight_norm=5.0, foreach=foreach)
    run(optimizer, range(1))
    with Reads() as reads:
        optimizer.step()
    assert set(reads.found) <= {torch.int64}, "only the step count, which lies on the CPU"
    with Reads() as control:
        torch.ones(3).norm().item()
    assert control.found[torch.float32] == 1


@pytest.mark.parametrize("foreach", [True, False])
def test_it_learns_a_regression(foreach: bool) -> None:
    torch.manual_seed(0)
    model, x = Regression(), torch.randn(64, 4)
    y = torch.sin(x).sum(-1)
    optimizer = LAMB(parameter_groups(model, 1e-3), 0.02, foreach=foreach)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(150)]
    assert losses[-1] < losses[0] / 50


@pytest.mark.parametrize(
    "wrong",
    [
        {"lr": -1e-3},
        {"lr": math.nan},
        {"betas": (0.9, 1.0)},
        {"betas": (0.9,)},
        {"eps": 0.0},
        {"weight_decay": -0.1},
        {"clamp": (2.0, 1.0)},
        {"max_weight_norm": 0.0},
    ],
    ids=str,
)
def test_bad_options_are_refused(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(InputError, match=name):
        LAMB(parameters(), **wrong)
    optimizer = LAMB(parameters())
    with pytest.raises(InputError, match=name):
        optimizer.add_param_group({"params": parameters(), **wrong})
    assert len(optimizer.param_groups) == 1


def test_gradients_and_parameters_it_cannot_use_are_refused() -> None:
    with pytest.raises(InputError, match="floating-point"):
        LAMB([torch.zeros(3, dtype=torch.complex64)])
    table = nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(InputError, match="sparse=False"):
        LAMB(table.parameters()).step()
