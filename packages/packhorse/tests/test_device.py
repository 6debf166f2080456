"""Which device is chosen: the one named, that of the environment, an accelerator, the CPU."""

from __future__ import annotations

import pytest
import torch

from packhorse.device import choose_device
from packhorse.errors import InputError

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def _one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: GPU)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)


@pytest.mark.parametrize(
    ("named", "environment", "expected"),
    [
        (None, "", GPU),
        ("auto", "", GPU),
        (None, "cpu", CPU),
        ("auto", "cpu", CPU),
        (None, "auto", GPU),
        ("cuda", "cpu", GPU),
        (CPU, "cuda", CPU),
        (None, "cuda:0", torch.device("cuda:0")),
    ],
)
def test_the_name_then_the_environment_then_the_accelerator(
    named: str | torch.device | None,
    environment: str,
    expected: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PACKHORSE_DEVICE", environment)
    assert choose_device(named) == expected


def test_without_an_accelerator_it_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACKHORSE_DEVICE")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    assert choose_device() == CPU
    with pytest.raises(InputError, match="cuda is not available: torch sees only the CPU"):
        choose_device("cuda")


@pytest.mark.parametrize(
    ("environment", "message"),
    [("gpu", "unknown device 'gpu'"), ("cuda:1", "cuda:1 does not exist"), ("xpu", "cuda and the")],
)
def test_a_wrong_environment_is_reported(
    environment: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACKHORSE_DEVICE", environment)
    with pytest.raises(InputError, match=message):
        choose_device()
