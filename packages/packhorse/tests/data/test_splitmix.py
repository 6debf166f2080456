"""SplitMix64, against the numbers that its authors' generator gives from 0."""

from __future__ import annotations

import numpy as np

from packhorse.data.order import GOLDEN, mixed

FROM_ZERO = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC]


def test_keys_a_golden_step_apart_are_the_generators_numbers() -> None:
    assert mixed(GOLDEN * np.arange(1, 5, dtype=np.uint64)).tolist() == FROM_ZERO


def test_no_two_numbers_become_one() -> None:
    assert len(np.unique(mixed(np.arange(100_000, dtype=np.uint64)))) == 100_000
