"""Kernels that train: which is chosen, what they drop out, and what compiling keeps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from packhorse import attention
from packhorse.errors import CheckpointError, KernelError
from packhorse.model.bert import BertLayer
from packhorse.model.config import BertConfig
from packhorse.packing.batch import Packed
from packhorse.runtime.proof import SyntheticSequence

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ON_CUDA = ("fused", "varlen")
DROPPING = ["bucketed", "repack", "mask", "reference"]
LENGTHS = (5, 30, 1, 16, 9)


def make_packed(seed: int = 0) -> Packed:
    random = np.random.default_rng(seed)
    built = [SyntheticSequence(random.integers(0, 97, n), np.zeros(n, int)) for n in LENGTHS]
    return Packed.rows(built, [[0, 1], [2, 3, 4]], 40)


def run(kernel: str, v: Tensor, rate: float, seed: int) -> Tensor:
    """Attention over random queries and keys."""
    packed, chosen = make_packed(), attention.kernel(kernel)
    generator = torch.Generator().manual_seed(7)
    q, k = torch.randn(2, *v.shape, generator=generator).unbind(0)
    torch.manual_seed(seed)
    return chosen(torch.stack((q, k, v), 1), chosen.plan(packed, rate))


def test_the_fastest_that_learns_on_a_cpu() -> None:
    for dtype, name in {torch.float32: "reference", torch.bfloat16: "bucketed"}.items():
        choice = attention.pick(CPU, dtype, backward=True)
        assert choice.name == name and "native: it has no backward pass" in choice.reason
    assert attention.pick(CPU, torch.float32, backward=True, dropout=True).name == "reference"


@pytest.mark.parametrize("kernel", DROPPING)
def test_probabilities_are_dropped_and_the_rest_scaled_up(kernel: str) -> None:
    """With ones for values each result is the sum of the probabilities that were left."""
    ones = torch.ones(80, 2, 4)
    torch.testing.assert_close(run(kernel, ones, 0.0, 0), ones)
    draws = torch.stack([run(kernel, ones, 0.25, seed) for seed in range(300)])  # [300, T, H, D]
    assert torch.equal(draws[3], run(kernel, ones, 0.25, 3)) and not draws[3].allclose(draws[4])
    # A sequence of one token keeps all or nothing of it.
    alone = draws[:, 40].flatten()
    fraction = float((alone > 0).float().mean())
    assert alone.unique().tolist() == [0.0, pytest.approx(4 / 3)] and 0.65 < fraction < 0.85
    assert float((draws[:, :75].mean((0, 2, 3)) - 1).abs().max()) < 0.15


@pytest.mark.parametrize("kernel", DROPPING)
def test_dropout_lets_no_neighbor_through(kernel: str) -> None:
    values = torch.randn(80, 2, 4)
    others = values.clone()
    others[5:35] = torch.randn(30, 2, 4)
    unchanged = [slice(0, 5), slice(40, 66)]
    a, b = run(kernel, values, 0.5, 1), run(kernel, others, 0.5, 1)
    assert all(torch.equal(a[part], b[part]) for part in unchanged) and not torch.equal(
        a[5:35], b[5:35]
    )


@pytest.mark.parametrize(("kernel", "instead"), [("varlen", "bucketed"), ("native", "reference")])
def test_kernels_that_cannot_drop_say_so(kernel: str, instead: str) -> None:
    message = f"cannot drop attention probabilities out; use '{instead}', or a rate of 0"
    with pytest.raises(KernelError, match=message):
        attention.kernel(kernel).plan(make_packed(), 0.1)
    serves = attention.kernel(kernel).serves
    device, dtype = (CUDA, torch.bfloat16) if kernel == "varlen" else (CPU, torch.float32)
    assert "drop" in str(serves.refusal(device, dtype, dropout=True))
    attention.kernel(kernel).plan(make_packed())


def test_a_model_drops_probabilities_in_training_alone(make_model) -> None:
    model = make_model(torch.float32)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    packed = make_packed()
    (still,) = model(packed, "hidden")
    assert torch.equal(model.train()(packed, "hidden")[0], still)
    model.bert.attention_dropout = 0.1
    (first,), (second,) = model(packed, "hidden"), model(packed, "hidden")
    assert not first.allclose(still) and not first.allclose(second)
    assert torch.equal(model.eval()(packed, "hidden")[0], still)
    model.train().bert.use(attention.kernel("native"))
    with pytest.raises(KernelError, match="cannot drop attention probabilities out"):
        model(packed, "hidden")


def test_the_rate_is_part_of_the_configuration() -> None:
    assert BertConfig(10, 6, 1, 1, 8).attention_dropout == 0
    with pytest.raises(CheckpointError, match=r"dropout 1 is not in \[0, 1\)"):
        BertConfig(10, 6, 1, 1, 8, attention_dropout=1)


def compiled(kernel: str, rate: float = 0.0) -> tuple[Any, Tensor, Any]:
    config = BertConfig(97, 8, 1, 2, 16, dropout=0.0)
    chosen = attention.kernel(kernel)
    torch.manual_seed(0)
    layer = BertLayer(config, chosen)
    x = torch.randn(80, 8, requires_grad=True)
    return layer, x, chosen.plan(make_packed(), rate)


@pytest.mark.parametrize("kernel", [name for name in attention.KERNELS if name not in ON_CUDA])
def test_what_compiles_its_backward_says_so(kernel: str) -> None:
    serves = attention.kernel(kernel).serves
    if not (serves.compiles and serves.backward):
        assert not serves.compiles_backward
        return
    layer, x, plan = compiled(kernel)
    weight = torch.randn(80, 8)
    step = torch.compile(layer, backend="aot_eager", fullgraph=True)
    if not serves.compiles_backward:
        with pytest.raises(RuntimeError, match="no autograd formula"):
            step(x, plan).sum().backward()
        return
    (result,) = torch.autograd.grad((step(x, plan) * weight).sum(), x)
    (expected,) = torch.autograd.grad((layer(x, plan) * weight).sum(), x)
    torch.testing.assert_close(result, expected)


def test_a_compiled_kernel_never_forgets_to_drop() -> None:
    layer, x, plan = compiled("bucketed", 0.1)
    step = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="cannot drop attention probabilities out"):
        step(x, plan)
