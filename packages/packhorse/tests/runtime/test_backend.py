"""Buckets that are prepared while nobody waits; tests/gpu/test_cuda.py has those of CUDA."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from packhorse import attention, executable
from packhorse.packing.batch import Packed
from packhorse.runtime.backend import PATIENCE, TorchBackend
from packhorse.runtime.runner import PackRunner

CPU = torch.device("cpu")


class PackedIds:
    """All that a batch needs of a sequence."""

    def __init__(self, length: int, prompt_length: int = 0, first: int = 5) -> None:
        self.prompt_length = prompt_length
        self.ids = np.arange(first, first + length, dtype=np.int32)
        self.types = np.zeros(length, np.uint8)

    def __len__(self) -> int:
        return len(self.ids)


def batch(*lengths: int) -> Packed:
    return Packed.build([PackedIds(length) for length in lengths])


@pytest.fixture
def graphs(make_model, monkeypatch: pytest.MonkeyPatch) -> tuple[TorchBackend, list[int]]:
    """A backend with graphs whose compiler does nothing, and the tokens that went through it."""
    compiled: list[int] = []

    def compile(modules: Any) -> list[Callable[..., Any]]:
        def run(module: Any, x: torch.Tensor, plan: Any) -> torch.Tensor:
            compiled.append(len(x))
            return module(x, plan)

        return [lambda x, plan, module=module: run(module, x, plan) for module in modules]

    monkeypatch.setattr(executable, "compiled", compile)
    model = make_model(torch.float32, width=32, heads=2, positions=48)
    model.bert.use(attention.kernel("bucketed"))
    return TorchBackend(model, CPU, graphs=True), compiled


def test_a_bucket_is_prepared_when_it_comes(graphs: tuple[TorchBackend, list[int]]) -> None:
    backend, compiled = graphs
    backend(batch(20, 7), ["hidden"])
    assert set(compiled) == {64}


def test_or_later_and_its_batches_run_unprepared_until_then(
    graphs: tuple[TorchBackend, list[int]],
) -> None:
    backend, compiled = graphs
    backend.prepare_later([batch(40, 40, 40), batch(48)])
    before = backend(batch(20, 7), ["hidden"])[0]
    assert not compiled and before.shape[0] == 27
    prepared: list[int] = []
    while backend.prepare_next():
        prepared.append(max(compiled))
        compiled.clear()
    assert prepared == [64, 128, 64]  # what came, then what was expected, in order
    after = backend(batch(20, 7), ["hidden"])[0]
    assert set(compiled) == {64}
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-6)
    assert not backend.prepare_next()


def test_or_not_at_all_before_that(graphs: tuple[TorchBackend, list[int]]) -> None:
    backend, compiled = graphs
    backend.hold()
    for _ in range(PATIENCE + 1):
        backend(batch(20, 7), ["hidden"])
    assert not compiled and not backend.prepare_next()
    backend.prepare_later([batch(48)])
    assert backend.prepare_next() and set(compiled) == {64}


def test_a_busy_server_prepares_what_comes_again_and_again(
    graphs: tuple[TorchBackend, list[int]],
) -> None:
    backend, compiled = graphs
    backend.prepare_later([])
    for _ in range(PATIENCE - 1):
        backend(batch(20, 7), ["hidden"])
    assert not compiled
    backend(batch(20, 7), ["hidden"])
    assert set(compiled) == {64} and not backend.prepare_next()


@pytest.mark.parametrize("capacity", [0, 48], ids=["ragged", "rows"])
@pytest.mark.parametrize("prompt", [0, 2])
@pytest.mark.parametrize("heads", [["embed"], ["pooled", "embed"], ["hidden"], ["embed", "hidden"]])
def test_heads_give_the_same_inside_a_recorded_graph(
    make_model, monkeypatch: pytest.MonkeyPatch, heads: list[str], prompt: int, capacity: int
) -> None:
    """What is recorded is called directly here; tests/gpu/test_cuda.py records it."""
    model = make_model(torch.float32, width=32, heads=2, positions=48)
    plain, graphs = TorchBackend(model, CPU), TorchBackend(model, CPU, graphs="small")
    recorded: list[tuple[str, ...]] = []

    def record(*tensors: Any, **constants: Any) -> Any:
        recorded.append(constants["prepared"].heads)
        return graphs._run(*tensors, **constants)

    monkeypatch.setattr(graphs, "graphs", True)
    monkeypatch.setattr(graphs, "_recorded", record)
    sequences = [PackedIds(length, prompt) for length in (20, 7, 31, 3)]
    packed = Packed.build(sequences)
    if capacity:
        packed = Packed.rows(sequences, [[2, 1], [0], [3]], capacity)
    other = Packed.build([PackedIds(length, prompt, first=9) for length in (20, 7, 31, 3)])
    expected, actual = plain(packed, heads), graphs(packed, heads)
    for head, there, here in zip(heads, expected, actual, strict=True):
        select = (lambda values: values) if head == "hidden" else packed.pick
        torch.testing.assert_close(select(here), select(there), rtol=1e-5, atol=1e-6)
    assert recorded == [tuple(heads) if not prompt and "hidden" not in heads else ()]
    if not capacity:  # the control: other tokens
        assert not torch.allclose(plain(other, heads)[0], actual[0], atol=1e-3)


def test_small_graphs_are_for_cuda_alone(make_model) -> None:
    model = make_model(torch.float32, width=32, heads=2, positions=48)
    backend = TorchBackend(model, CPU, graphs="small")
    assert not backend.graphs and backend.computed(batch(20, 7)) == 27


def test_an_idle_runner_prepares_until_a_request_comes(make_encoder) -> None:
    """Work for the time without requests never delays one by more than a piece of it."""
    pieces: list[int] = []
    released = threading.Semaphore(0)

    def work() -> bool:
        released.acquire()
        pieces.append(runner.stats().requests)
        return True

    with PackRunner(make_encoder(), when_idle=work) as runner:
        released.release(3)
        while len(pieces) < 3:
            time.sleep(0.001)
        future = runner.submit("the cat sat")  # while the fourth piece is under way
        assert not future.done()
        released.release()
        assert future.result(60) is not None
        assert pieces[:3] == [0, 0, 0] and len(pieces) == 4
        released.release(1000)  # so that it ends


def test_work_that_fails_is_given_up(make_encoder, caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []

    def work() -> bool:
        calls.append(1)
        raise RuntimeError("out of memory")

    with PackRunner(make_encoder(), when_idle=work) as runner:
        while "they run slower" not in caplog.text:
            time.sleep(0.001)
        for _ in range(3):
            runner.run(["the cat sat"])
    assert calls == [1] and "they run slower" in caplog.text
