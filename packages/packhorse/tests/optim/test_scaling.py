"""The packing rule, its worked example, and that β to the power p forgets as p steps do."""

from __future__ import annotations

import doctest
from typing import Any

import pytest

from packhorse.errors import InputError
from packhorse.optim import packing_rule, scaling


def test_the_worked_example_holds() -> None:
    assert doctest.testmod(scaling) == doctest.TestResults(failed=0, attempted=2)


def test_the_papers_numbers() -> None:
    scaled = packing_rule((0.9, 0.999), 2e-3, 1536, 2.0, keep="batch")
    assert scaled.betas == pytest.approx((0.81, 0.998001))
    assert (scaled.lr, scaled.rows, scaled.sequences) == (2e-3, 1536, 3072)


def test_an_average_forgets_as_much_over_as_many_sequences() -> None:
    beta = packing_rule((0.9, 0.999), 1e-3, 100, 4.0, keep="batch").betas[0]
    packed = unpacked = 1.0
    for _ in range(3):
        packed *= beta
    for _ in range(12):
        unpacked *= 0.9
    assert packed == pytest.approx(unpacked)


def test_the_batch_is_divided_to_the_nearest_row_and_never_to_none() -> None:
    scaled = packing_rule((0.9, 0.999), 1e-3, 256, 1.79)
    assert scaled.rows == 143
    assert scaled.sequences == pytest.approx(256, rel=0.5 / 143)
    assert packing_rule((0.9, 0.999), 1e-3, 1, 8.0).rows == 1


@pytest.mark.parametrize("keep", ["batch", "betas"])
def test_without_packing_nothing_changes(keep: Any) -> None:
    scaled = packing_rule((0.9, 0.999), 1e-3, 32, 1.0, keep=keep)
    assert (scaled.betas, scaled.lr, scaled.rows) == ((0.9, 0.999), 1e-3, 32)


@pytest.mark.parametrize(
    "wrong", [{"factor": 0.5}, {"factor": float("nan")}, {"batch": 0}, {"betas": (0.9, 1.0)}]
)
def test_impossible_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        packing_rule(**{"betas": (0.9, 0.999), "lr": 1e-3, "batch": 8, "factor": 2.0, **wrong})


def test_an_unknown_choice_is_refused() -> None:
    with pytest.raises(InputError, match="'batch' or the 'betas'"):
        packing_rule((0.9, 0.999), 1e-3, 8, 2.0, keep="rate")  # pyright: ignore[reportArgumentType]
