"""Which kernel runs where, and what is said when one cannot."""

from __future__ import annotations

import pytest
import torch

from packhorse import attention
from packhorse.attention import KERNELS, KernelSupport
from packhorse.errors import KernelError

pytestmark = pytest.mark.machine

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_every_kernel_of_the_table_is_there() -> None:
    for name in KERNELS:
        result = attention.kernel(name)
        assert isinstance(result.serves, KernelSupport)


def test_the_choice_serves_and_says_why() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for backward in (False, True):
            choice = attention.pick(CPU, dtype, backward=backward)
            assert choice.kernel.serves.refusal(CPU, dtype, backward) is None
            assert not choice.kernel.serves.rows, "a ragged batch has no rows"
            assert "varlen: it runs on cuda" in choice.reason and choice.name in choice.reason


@pytest.mark.parametrize(
    ("name", "device", "dtype", "message"),
    [
        ("varlen", CPU, torch.bfloat16, "it runs on cuda, not on cpu; use '"),
        ("varlen", CUDA, torch.float32, "it runs in bf16, fp16, not in fp32; use 'bucketed'"),
        ("fancy", CPU, torch.float32, "unknown kernel 'fancy'; there are fused"),
    ],
)
def test_asking_outside_is_a_clear_error(name, device, dtype, message: str) -> None:
    with pytest.raises(KernelError, match=message):
        attention.pick(device, dtype, name=name)


def test_a_kernel_without_backward_is_refused_for_training() -> None:
    forward_only = KernelSupport(backward=False)
    assert forward_only.refusal(CPU, torch.float32, backward=True) == "it has no backward pass"
    assert forward_only.refusal(CPU, torch.float32, backward=False) is None


def test_obstacles_are_asked_last() -> None:
    calls = []
    support = KernelSupport(
        devices=frozenset({"cuda"}), obstacle=lambda device: calls.append(1) or "no compiler"
    )
    assert support.refusal(CPU, torch.float32, False) == "it runs on cuda, not on cpu"
    assert not calls
    assert support.refusal(CUDA, torch.float32, False) == "no compiler"


def test_a_head_too_wide_falls_to_the_next_kernel() -> None:
    varlen = attention.kernel("varlen").serves
    assert "multiples of 8 up to 256 wide, not of 20" in str(
        varlen.refusal(CUDA, torch.bfloat16, False, 20)
    )
    assert attention.pick(CPU, torch.float32, head_size=4096).name == "bucketed"


def test_mask_needs_rows() -> None:
    from packhorse.packing.batch import Packed
    from packhorse.runtime.proof import SyntheticSequence

    kernel = attention.kernel("mask")
    ragged = Packed.build([SyntheticSequence(torch.arange(3).numpy(), torch.zeros(3).numpy())])
    with pytest.raises(KernelError, match=r"build it with Packed\.rows"):
        kernel.plan(ragged)
