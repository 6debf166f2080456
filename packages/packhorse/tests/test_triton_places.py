"""Where Triton's kernels run: not on GPUs older than Ampere, which training must do without."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from packhorse import attention
from packhorse import device as devices
from packhorse.model import float8_inference, fused_layer, rows
from packhorse.model.config import BertConfig
from packhorse.optim import lamb
from packhorse.packing.batch import Packed
from packhorse.reports import random_model
from packhorse.runtime.backend import TorchBackend
from packhorse.runtime.invariant import SyntheticSequence
from packhorse.train.objectives import word_loss

CUDA = torch.device("cuda:0")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """A GPU whose capability is the list's only item, as torch describes it; Triton is there."""
    capability = [(8, 0)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability[0])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "a GPU")
    monkeypatch.setattr(devices, "find_spec", lambda name: name)
    devices.runs_triton.cache_clear()
    yield capability
    devices.runs_triton.cache_clear()


@pytest.mark.parametrize("capability", [(7, 0), (7, 5)])
def test_older_gpus_train_by_torchs_kernels(
    gpu: list[tuple[int, int]], capability: tuple[int, int]
) -> None:
    assert devices.runs_triton(CUDA)  # an A100
    assert fused_layer.serves(CUDA, torch.bfloat16)
    assert "fused" in str(attention.pick(CUDA, torch.float16, head_size=64))
    gpu[0] = capability
    devices.runs_triton.cache_clear()
    assert not devices.runs_triton(CUDA)
    assert not fused_layer.serves(CUDA, torch.bfloat16)
    with FakeTensorMode(allow_non_fake_inputs=True):
        scores = torch.zeros(3, 8, dtype=torch.float16, device=CUDA)
        targets = torch.zeros(3, dtype=torch.int64, device=CUDA)
        assert rows._kernels(scores) is None
        loss, _ = word_loss.word_loss(scores, targets)
        assert loss.shape == (3,)
        weight = torch.nn.Parameter(torch.zeros(1024, 512, device=CUDA))
        m, v = torch.zeros_like(weight), torch.zeros_like(weight)
        update = lamb.ParameterUpdate(weight, weight, torch.zeros_like(weight), m, v, 1, 1)
        group = lamb.LAMB([weight]).param_groups[0]
        assert not lamb._update_large(update, group)


def test_a_model_runs_while_its_device_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton and CUDA graphs launch on the current GPU, which need not be the model's."""
    inside: list[torch.device] = []
    ran: list[int] = []

    @contextmanager
    def current(device: torch.device) -> Iterator[None]:
        inside.append(device)
        yield
        inside.pop()

    config = BertConfig(100, hidden_size=16, layers=1, heads=2, intermediate_size=32)
    backend = TorchBackend(random_model.build(config, seed=0), torch.device("cpu"), "small")
    backend.model.bert.register_forward_hook(lambda *_: ran.append(len(inside)))
    monkeypatch.setattr(devices, "current", current)
    ids = np.arange(5)
    packed = Packed.build([SyntheticSequence(ids, ids * 0)])
    backend(packed, ["hidden"])
    backend.prepare_later([packed])
    assert backend.prepare_next()
    assert ran and set(ran) == {1}


@pytest.mark.parametrize(("room", "has"), [(99 << 10, False), (227 << 10, True)])
def test_the_product_with_activation_needs_room(
    gpu: list[tuple[int, int]], room: int, has: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blackwell's small GPUs (12.0) have 99 KiB, its large ones and Hopper 227."""
    gpu[0] = (12, 0)
    found = SimpleNamespace(shared_memory_per_block_optin=room)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    assert float8_inference._has_product(CUDA) == has
    assert not float8_inference._has_product(torch.device("cpu"))
