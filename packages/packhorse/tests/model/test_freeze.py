"""Frozen layers compute what they were made from."""

from __future__ import annotations

import platform
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from packhorse import attention, native
from packhorse.errors import KernelError
from packhorse.model import freeze as freezing
from packhorse.model.bert import ACTIVATIONS, AddNorm, Bert
from packhorse.model.config import BertConfig
from packhorse.model.freeze import (
    FrozenAddNorm,
    FrozenLinear,
    PackedLinear,
    WideLinear,
    can_freeze,
    freeze,
    widen,
)
from packhorse.native import FLAGS
from packhorse.packing.batch import Packed
from packhorse.processor import Features, features
from packhorse.runtime.proof import SyntheticSequence

pytestmark = pytest.mark.machine
needs_onednn = pytest.mark.skipif(
    not can_freeze(torch.float32), reason="this torch has no oneDNN operators"
)
needs_native = pytest.mark.skipif(
    not freezing._has_fused_add_norm(torch.float32), reason="add_norm.c cannot be compiled here"
)
needs_products = pytest.mark.skipif(
    not freezing._has_products(), reason="product.c cannot be compiled here"
)
BOTH = (torch.float32, torch.bfloat16)
WIDTHS = (1, 7, 16, 32, 63, 65, 384, 1024)


def norm(width: int, dtype: torch.dtype) -> AddNorm:
    built = AddNorm(width, 1e-12)
    torch.nn.init.normal_(built.weight, 1, 0.3)
    torch.nn.init.normal_(built.bias)
    return built.to(dtype)


def draw(rows: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    return [(torch.randn(rows, width) * 2 + 0.5).to(dtype) for _ in range(2)]


def exact(norm: AddNorm, x: Tensor, residual: Tensor) -> Tensor:
    weight, bias = norm.weight.double(), norm.bias.double()
    return F.layer_norm(x.double() + residual.double(), weight.shape, weight, bias, norm.eps)


def assert_close(width: int, rows: int, dtype: torch.dtype) -> None:
    """Against float64: fp32 within 1e-5; bf16 no further away than torch's own."""
    built, inputs = norm(width, dtype), draw(rows, width, dtype)
    with torch.inference_mode():
        out, expected, truth = FrozenAddNorm(built)(*inputs), built(*inputs), exact(built, *inputs)
    assert out.dtype == dtype and out.shape == (rows, width)
    if dtype == torch.bfloat16:
        assert (out - truth).abs().max() <= (expected - truth).abs().max()
    elif width > 1:
        torch.testing.assert_close(out, truth.float(), rtol=1e-5, atol=1e-5)


@pytest.fixture
def rebuilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Nothing loaded yet and an empty cache; afterwards the process finds its own again."""
    monkeypatch.setenv("PACKHORSE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(native, "WHEEL_FOLDER", tmp_path / "no-wheel")
    cached = (
        freezing._add_norm,
        freezing._has_fused_add_norm,
        freezing._products,
        freezing._has_products,
    )
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


@needs_onednn
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu", "silu"])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_a_frozen_encoder_is_the_same(activation: str, dtype, limit: float, rng) -> None:
    config = BertConfig(60, 48, 2, 4, 80, activation=activation)
    bert = Bert(config, attention.kernel("bucketed")).to(dtype).eval()
    packed = Packed.build(
        [SyntheticSequence(rng.integers(0, 60, n), rng.integers(0, 2, n)) for n in (3, 40, 9)]
    )
    with torch.inference_mode():
        before = bert(packed)
        freeze(bert)
        after = bert(packed)
    assert not any(isinstance(m, torch.nn.Linear) for m in bert.layers.modules())
    natively = sum(isinstance(m, FrozenAddNorm) for m in bert.modules())
    assert natively == (4 if freezing._has_fused_add_norm(dtype) else 0)
    assert float((before - after).abs().max()) <= limit * float(before.abs().max())


@needs_onednn
def test_other_embeddings_are_frozen_too(rng) -> None:
    """RoBERTa's positions, no types, ELECTRA's projection."""
    config = BertConfig(60, 48, 2, 4, 80, position_offset=3, type_vocab_size=0, embedding_size=20)
    bert = Bert(config, attention.kernel("bucketed")).eval()
    packed = Packed.build(
        [SyntheticSequence(rng.integers(0, 60, n), rng.integers(0, 2, n)) for n in (3, 40, 9)]
    )
    with torch.inference_mode():
        before = bert(packed)
        freeze(bert)
        torch.testing.assert_close(bert(packed), before, rtol=1e-5, atol=1e-5)
    assert isinstance(bert.embed.project, FrozenLinear | PackedLinear)


@needs_onednn
def test_a_frozen_layer_without_bias() -> None:
    linear = torch.nn.Linear(16, 8, bias=False)
    x = torch.randn(5, 16)
    with torch.inference_mode():
        torch.testing.assert_close(FrozenLinear(linear)(x), linear(x))


@pytest.fixture
def no_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that does not multiply bf16."""
    monkeypatch.setattr(freezing, "features", lambda: Features(avx2=True))


@pytest.mark.parametrize(
    "layer",
    [
        WideLinear,
        pytest.param(FrozenLinear, marks=needs_onednn),
        pytest.param(PackedLinear, marks=needs_products),
    ],
    ids=["plain", "frozen", "packed"],
)
@pytest.mark.parametrize("bias", [True, False])
def test_bf16_without_hardware_is_the_exact_product_rounded(layer, bias, no_bf16: None) -> None:
    """Against float64: the nearest bf16, but where the sum of fp32 rounds to its neighbor."""
    linear = torch.nn.Linear(96, 80, bias=bias).bfloat16()
    x = torch.randn(200, 96).bfloat16()
    weight, shift = linear.weight.double(), linear.bias.double() if bias else None
    with torch.inference_mode():
        y = layer(linear)(x)
        truth = F.linear(x.double(), weight, shift)
    assert y.dtype == torch.bfloat16 and y.shape == (200, 80)
    nearest = truth.bfloat16()
    assert (y == nearest).double().mean() > 0.995
    limit = 2**-8 * truth.abs() + 1e-6  # half a step of bf16, and what fp32 sums lose
    assert ((y.double() - truth).abs() <= limit).all()


@pytest.mark.parametrize("dtype_source", ["freeze", "widen"])
def test_a_model_in_bf16_without_hardware_stays_bf16(dtype_source: str, no_bf16: None, rng) -> None:
    if dtype_source == "freeze" and not can_freeze(torch.bfloat16):
        pytest.skip("this torch has no oneDNN operators")
    config = BertConfig(60, 48, 2, 4, 80)
    bert = Bert(config, attention.kernel("bucketed")).bfloat16().eval()
    packed = Packed.build(
        [SyntheticSequence(rng.integers(0, 60, n), rng.integers(0, 2, n)) for n in (3, 40, 9)]
    )
    with torch.inference_mode():
        exact = deepcopy(bert).double()(packed)
        before = bert(packed)
        getattr(freezing, dtype_source)(bert)
        after = bert(packed)
    assert after.dtype == bert.embed.words.weight.dtype == torch.bfloat16
    assert not any(isinstance(m, torch.nn.Linear) for m in bert.layers.modules())
    # Not further from the truth than torch's own bf16, but for the luck of single roundings.
    assert (after - exact).abs().mean() <= 1.1 * (before - exact).abs().mean()


def test_layers_are_left_alone_where_the_processor_multiplies(monkeypatch) -> None:
    monkeypatch.setattr(freezing, "features", lambda: Features(bf16=True))
    layer = torch.nn.Sequential(torch.nn.Linear(8, 8).bfloat16(), torch.nn.Linear(8, 8))
    widen(layer)
    assert [type(item) for item in layer] == [torch.nn.Linear] * 2


def test_double_is_left_alone() -> None:
    assert not can_freeze(torch.float64)


# ---- the residual sum and its norm ----


@needs_native
@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("width", WIDTHS)
def test_sum_and_norm_at_every_width(width: int, dtype: torch.dtype) -> None:
    for rows in (1, 2, 31, 32, 33, 500):
        assert_close(width, rows, dtype)


@needs_native
def test_a_row_of_equal_numbers_is_the_bias() -> None:
    for width in WIDTHS:
        built = norm(width, torch.float32)
        x = torch.full((3, width), 2.0)
        with torch.inference_mode():
            torch.testing.assert_close(FrozenAddNorm(built)(x, x), built.bias.expand(3, -1))


@needs_native
@pytest.mark.parametrize("dtype", BOTH)
def test_every_number_of_rows_and_threads_gives_the_same_bits(dtype, threads) -> None:
    frozen, (x, residual) = FrozenAddNorm(norm(40, dtype)), draw(500, 40, dtype)
    threads(1)
    alone = frozen(x, residual)
    for count in (1, 2, 3):
        threads(count)
        for rows in (0, 1, 2, 31, 32, 33, 64, 65, 499, 500):
            assert torch.equal(frozen(x[:rows], residual[:rows]), alone[:rows])


@needs_native
@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("width", [7, 384])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_in_its_row(dtype: torch.dtype, width: int, value: float) -> None:
    built, (x, residual) = norm(width, dtype), draw(70, width, dtype)
    frozen = FrozenAddNorm(built)
    clean = frozen(x, residual)
    x[34, width - 1], residual[69, 0] = value, value
    out, sick = frozen(x, residual), torch.zeros(70, dtype=torch.bool)
    sick[[34, 69]] = True
    assert out[sick].isnan().all() and built(x, residual)[sick].isnan().all()
    assert torch.equal(out[~sick], clean[~sick])


@needs_native
@pytest.mark.parametrize("dtype", BOTH)
def test_rows_that_lie_apart(dtype: torch.dtype) -> None:
    frozen, (x, residual) = FrozenAddNorm(norm(24, dtype)), draw(50, 24, dtype)
    expected = frozen(x, residual)
    assert torch.equal(frozen(x.T.contiguous().T, residual), expected)
    assert torch.equal(frozen(x, torch.cat([x, residual], 1)[:, 24:]), expected)
    buffer = torch.cat([x[0, :1], x.flatten()])  # begins where no vector would
    assert torch.equal(frozen(buffer[1:].view(50, 24), residual), expected)


@needs_native
def test_refuses_what_c_would_read_astray() -> None:
    frozen, (x, residual) = FrozenAddNorm(norm(24, torch.float32)), draw(5, 24, torch.float32)
    wrong = (residual[:4], residual[:, :23], residual[None], residual.bfloat16(), x.to("meta"))
    for another in wrong:
        with pytest.raises(KernelError, match="takes two tensors"):
            frozen(x, another)
        with pytest.raises(KernelError, match="takes two tensors"):
            frozen(another, x)


@needs_native
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names an x86 instruction set")
@pytest.mark.parametrize("level", ["x86-64-v3", "x86-64-v4"])
def test_cpus_with_fewer_instructions_get_the_same_answers(
    level: str, rebuilt: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if level == "x86-64-v4" and not features().avx512:
        pytest.skip("this CPU has no AVX-512")
    older = (*FLAGS, f"-march={level}")
    monkeypatch.setattr("packhorse.native.FLAGS", older)
    for dtype in BOTH:
        for width in WIDTHS:
            assert_close(width, 40, dtype)
        x, residual = draw(3, 24, dtype)
        x[1] = float("nan")
        assert FrozenAddNorm(norm(24, dtype))(x, residual).isnan().all(1).tolist() == [0, 1, 0]


@needs_onednn
@pytest.mark.parametrize("compiler", ["/bin/false", "/no/such/cc"])
def test_without_a_compiler_the_norms_stay_as_they_are(
    compiler: str, rebuilt: None, monkeypatch: pytest.MonkeyPatch, rng
) -> None:
    monkeypatch.setenv("CC", compiler)
    bert = Bert(BertConfig(60, 48, 2, 4, 80), attention.kernel("bucketed")).eval()
    packed = Packed.build(
        [SyntheticSequence(rng.integers(0, 60, n), rng.integers(0, 2, n)) for n in (3, 40, 9)]
    )
    with torch.inference_mode():
        before = bert(packed)
        freeze(bert)
        torch.testing.assert_close(bert(packed), before, rtol=1e-5, atol=1e-5)
    assert sum(isinstance(m, AddNorm) for m in bert.modules()) == 4
    assert not any(isinstance(m, torch.nn.Linear) for m in bert.layers.modules())


def test_the_source_lies_beside_the_module() -> None:
    assert freezing.ADD_NORM.is_file()
    assert freezing.ADD_NORM.parent == Path(freezing.__file__).parent


# ---- products of fp32 in C ----

# Rows: of one tile, of several and a rest, of two blocks. Inputs: of one, two and three parts.
# Columns: fewer than a tile, a tile and a rest, whole tiles.
SHAPES = [(1, 5, 3), (7, 384, 40), (13, 385, 64), (150, 64, 100), (31, 1000, 33), (300, 384, 96)]


def exact_linear(linear: torch.nn.Linear, x: Tensor, activation: str | None) -> Tensor:
    bias = None if linear.bias is None else linear.bias.double()
    y = F.linear(x.double(), linear.weight.double(), bias)
    return y if activation is None else ACTIVATIONS[activation](y)


@needs_products
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("activation", [None, "gelu", "gelu_tanh", "relu"])
def test_packed_products_equal_those_of_float64(
    shape: tuple[int, int, int], activation: str | None, threads
) -> None:
    rows, inputs, columns = shape
    for bias in (True, False):
        linear = torch.nn.Linear(inputs, columns, bias=bias)
        x = torch.randn(rows, inputs) * 3
        with torch.inference_mode():
            truth = exact_linear(linear, x, activation)
            packed = PackedLinear(linear, activation)
            for count in (1, 2, 3):
                threads(count)
                out = packed(x)
                torch.testing.assert_close(out, truth.float(), rtol=2e-6, atol=1e-5)
        wrong = {None: "relu", "relu": None, "gelu": "gelu_tanh", "gelu_tanh": "gelu"}[activation]
        if rows * columns > 100:  # the control: another activation is seen
            with pytest.raises(AssertionError):
                other = exact_linear(linear, x, wrong).float()
                torch.testing.assert_close(out, other, rtol=2e-6, atol=1e-5)


@needs_products
def test_activations_from_the_smallest_to_the_largest_number() -> None:
    """GELU by its own polynomial: a rounding of 1 away at most, and the limits are exact."""
    wide = torch.cat([torch.linspace(-15, 15, 9001), torch.logspace(-30, 37, 500)])
    x = torch.cat([wide, -wide, torch.tensor([0.0, float("inf"), float("nan")])])
    linear = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(linear.weight)
    with torch.inference_mode():
        for activation in ("gelu", "gelu_tanh", "relu"):
            out = PackedLinear(linear, activation)(x[:, None])[:, 0]
            truth = ACTIVATIONS[activation](x.double())
            torch.testing.assert_close(out, truth.float(), rtol=2e-7, atol=1.5e-7, equal_nan=True)
            near = (x.abs() < 1) & (x != 0)  # and no digit is lost near zero
            assert ((out.double() - truth) / truth)[near].abs().max() < 1e-6 or activation == "relu"


@needs_products
def test_a_row_has_the_same_bits_beside_any_others(threads) -> None:
    packed = PackedLinear(torch.nn.Linear(400, 70), "gelu")
    x = torch.randn(310, 400)
    with torch.inference_mode():
        threads(1)
        alone = torch.cat([packed(row[None]) for row in x])
        assert torch.equal(packed(x), alone)
        for count, rows in ((1, 6), (2, 7), (2, 145), (3, 301)):
            threads(count)
            assert torch.equal(packed(x[5 : 5 + rows]), alone[5 : 5 + rows])
        changed = x.clone()
        changed[:50], changed[51:] = float("nan"), float("inf")
        assert torch.equal(packed(changed)[50], alone[50])
        assert not torch.equal(packed(changed)[49], alone[49])  # the control


@needs_products
def test_packed_products_refuse_what_they_would_read_beyond() -> None:
    packed = PackedLinear(torch.nn.Linear(16, 8))
    for x in (torch.randn(3, 15), torch.empty(3, 16, device="meta")):
        with pytest.raises(KernelError, match=r"takes \[tokens, 16\]"):
            packed(x)
    with torch.inference_mode():
        assert packed(torch.empty(0, 16)).shape == (0, 8)
        strided = torch.randn(9, 32)[:, ::2]
        assert torch.equal(packed(strided), packed(strided.contiguous()))
        assert packed(torch.randn(2, 3, 16)).shape == (2, 3, 8)
        assert torch.equal(packed(torch.zeros(2, 16)), packed.bias[:8].expand(2, 8))


@needs_products
@needs_onednn
@pytest.mark.parametrize(("width", "layer"), [(512, PackedLinear), (513, FrozenLinear)])
def test_wide_layers_are_onednns(width: int, layer: type, monkeypatch) -> None:
    monkeypatch.setattr(freezing, "LARGEST_PACKED", 512 * 8)
    layers = torch.nn.Sequential(torch.nn.Linear(width, 8))
    x = torch.randn(4, width)
    with torch.inference_mode():
        before = layers(x)
        freeze(layers)
        torch.testing.assert_close(layers(x), before, rtol=1e-5, atol=1e-5)
    assert isinstance(layers[0], layer)


@needs_products
@needs_onednn
def test_without_the_c_code_layers_are_onednns(rebuilt: None, monkeypatch) -> None:
    monkeypatch.setenv("CC", "/no/such/cc")
    layers = torch.nn.Sequential(torch.nn.Linear(8, 8))
    with pytest.warns(RuntimeWarning, match="slower than this machine can"):
        native._warn_once.cache_clear()
        freeze(layers)
    assert isinstance(layers[0], FrozenLinear)
