"""The table of kernels: which bytes and bounds belong to which kernel."""

from __future__ import annotations

import numpy as np
import pytest

from packhorse.errors import InputError
from packhorse.reports.random_model import CONFIGS
from packhorse_bench.encode import EncodeRequest, measure
from packhorse_bench.kernel_profile import (
    RUNS,
    Ceilings,
    Launch,
    Work,
    product_work,
    summarize,
)

CEILINGS = Ceilings(bytes=4e12, bf16=8e14, float8=1.6e15)


def launches(layers: int) -> list[Launch]:
    layer = [
        Launch("nvjet_qss_1", 170.0),
        Launch("_forward", 120.0),
        Launch("nvjet_qss_2", 60.0),
        Launch("_product", 280.0),
        Launch("nvjet_qss_1", 210.0),
    ]
    return [Launch("embedding", 50.0), *layer * layers] * RUNS


def test_products_are_told_apart_by_their_place_in_a_layer() -> None:
    """One kernel of a library serves several products."""
    products = product_work(CONFIGS["large"], 32768, float8=True, one_kernel=True)
    own = {"_forward": Work("attention", 7 * 32768 * 1024)}
    rows = summarize(launches(24), own, products, CEILINGS)
    by_role = {row.role: row for row in rows if row.role}
    assert set(by_role) == {"product qkv", "product out", "product down", "attention"}
    assert by_role["product qkv"].microseconds == 170 and by_role["product qkv"].launches == 24
    assert by_role["product down"].microseconds == 210
    assert by_role["product down"].name == by_role["product qkv"].name
    assert sum(row.share for row in rows) == pytest.approx(1)
    assert [row.share for row in rows] == sorted((row.share for row in rows), reverse=True)


def test_other_numbers_of_products_are_not_guessed() -> None:
    products = product_work(CONFIGS["large"], 32768, float8=True)
    rows = summarize(launches(3), {}, products, CEILINGS)  # 9 products, not a multiple of 4
    assert not [row for row in rows if row.role or row.bound is not None]


def test_bounds_are_the_longer_of_bytes_and_arithmetic() -> None:
    assert CEILINGS.bound(Work("copy", 4_000_000)) == pytest.approx(1.0)
    assert CEILINGS.bound(Work("product", 4_000_000, 8_000_000_000)) == pytest.approx(10.0)
    assert CEILINGS.bound(Work("product", 4_000_000, 8_000_000_000, True)) == pytest.approx(5.0)


def test_the_work_of_bert_large() -> None:
    qkv, out, up, down = product_work(CONFIGS["large"], 32768, float8=False)
    assert qkv.operations == 2 * 32768 * 1024 * 3072
    assert up.operations == down.operations == 4 * out.operations
    assert out.bytes == 2 * (32768 * 1024 * 2 + 1024 * 1024)


def test_a_processor_has_no_kernels_to_show() -> None:
    request = EncodeRequest("", lengths=np.array([5]), config="tiny", device="cpu", profile=True)
    with pytest.raises(InputError, match="--profile shows the kernels of a CUDA device"):
        measure(request)
