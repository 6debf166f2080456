"""Compiling per bucket, and the folder compiled code lives in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter

from packhorse import attention, executable
from packhorse.model.bert import Bert
from packhorse.model.config import BertConfig
from packhorse.model.model import Model
from packhorse.packing.batch import Packed, unflatten
from packhorse.runtime.backend import TorchBackend, _bucket
from packhorse.runtime.proof import SyntheticSequence

pytestmark = pytest.mark.machine

CPU = torch.device("cpu")


def make_packed(lengths: list[int], rng) -> Packed:
    return Packed.build(
        [SyntheticSequence(rng.integers(0, 50, n), np.zeros(n, int)) for n in lengths]
    )


def make_bert(kernel: str = "bucketed") -> Bert:
    config = BertConfig(vocab_size=50, hidden_size=32, layers=2, heads=2, intermediate_size=64)
    return Bert(config, attention.kernel(kernel)).eval()


@pytest.mark.parametrize("kernel", ["bucketed", "native"])
def test_one_bucket_compiles_once(kernel: str, rng) -> None:
    """Many packs of one bucket through all layers: one compilation; another bucket: one more."""
    if refusal := attention.kernel(kernel).serves.refusal(CPU, torch.float32, False):
        pytest.skip(refusal)
    bert, counter = make_bert(kernel), CompileCounter()
    plain = make_bert(kernel)
    plain.load_state_dict(bert.state_dict())
    for layer in bert.layers:
        layer.compile(backend=counter, dynamic=False, fullgraph=True)
    packs = [[20, 30, 40, 20], [64, 50], [1, 2, 3, 4, 100], [63, 49], [33] * 3]
    with torch.inference_mode():
        for lengths in packs:
            packed = make_packed(lengths, rng)
            out = bert(replace(packed.pad(128, 16), max_seqlen=128))
            expected = plain(packed)
            torch.testing.assert_close(out[: len(packed.ids)], expected, atol=1e-5, rtol=1e-5)
        assert counter.frame_count == 1
        bert(make_packed([200], rng).pad(256, 16))
    assert counter.frame_count == 2


class Announced:
    """A lock that says when someone has to wait for it."""

    def __init__(self) -> None:
        self.lock, self.awaited = threading.Lock(), threading.Event()

    def __enter__(self) -> None:
        if not self.lock.acquire(blocking=False):
            self.awaited.set()
            self.lock.acquire()

    def __exit__(self, *exception: object) -> None:
        self.lock.release()


class Device:
    """Stands in for a CUDA graph, a stream and an event; says in which order they are used."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.after_replay = lambda: None

    def replay(self) -> None:
        self.output.copy_(10 * self.input)
        self.calls.append("replay")
        self.after_replay()

    def wait_event(self, event: object) -> None:
        self.calls.append("wait")

    def record(self) -> None:
        self.calls.append("record")

    def synchronize(self) -> None:
        self.calls.append("synchronize")


def recorded_graphs(device: Device, monkeypatch: pytest.MonkeyPatch) -> executable.CudaGraphs:
    """One bucket, recorded on a device that is not there."""
    device.input, device.output = torch.zeros(1), torch.zeros(1)
    recording = executable._RecordedGraph(device, (device.input,), (device.output,))
    graphs = object.__new__(executable.CudaGraphs)  # its own parts would ask for a device
    graphs.recorded = {((torch.Size([1]), torch.float32),): recording}
    graphs.turn, graphs.copied = Announced(), device  # type: ignore[assignment]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: device)
    return graphs


def test_a_replay_waits_for_the_copy_of_the_one_before(monkeypatch) -> None:
    """A second caller comes after the first one's replay and before its output is copied."""
    device = Device()
    graphs = recorded_graphs(device, monkeypatch)
    answers: dict[int, float] = {}

    def call(number: int) -> None:
        answers[number] = float(graphs(torch.tensor([float(number)]))[0])

    def second() -> None:
        call(2)
        graphs.turn.awaited.set()  # it did not have to wait

    another = threading.Thread(target=second)

    def between() -> None:
        device.after_replay = lambda: None
        another.start()
        assert graphs.turn.awaited.wait(60)

    device.after_replay = between
    call(1)
    another.join(60)
    assert answers == {1: 10.0, 2: 20.0}
    assert device.calls == ["wait", "replay", "record"] * 2


def test_a_graph_that_is_dropped_has_ended(monkeypatch) -> None:
    device = Device()
    graphs = recorded_graphs(device, monkeypatch)
    monkeypatch.setattr(executable, "RECORDED_LIMIT", 1)
    graphs.recorded = {"older": graphs.recorded.copy(), **graphs.recorded}
    graphs(torch.ones(1))
    assert device.calls == ["wait", "synchronize", "replay", "record"]
    assert len(graphs.recorded) == 1


@pytest.mark.slow
@pytest.mark.skipif(executable.why_uncompiled() != "", reason="nothing can be compiled here")
def test_a_bucket_runs_while_another_thread_compiles(
    rng, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """torch's mark of a compilation under way is the process's, not the thread's (up to 2.13)."""
    if not hasattr(torch.fx._symbolic_trace, "_is_fx_tracing_flag"):
        pytest.skip("this torch marks a compilation for its thread only")
    monkeypatch.setenv("PACKHORSE_CACHE", str(tmp_path / "cache"))
    bert = make_bert()
    backend = TorchBackend(Model(bert, {}), CPU, graphs=True)
    for layer in bert.layers:
        layer.compile(backend="eager", dynamic=False, fullgraph=True)
    packed = make_packed([20, 30], rng)
    (expected,) = backend(packed, ["hidden"])
    monkeypatch.setattr(torch.fx._symbolic_trace, "_is_fx_tracing_flag", True)
    (result,) = backend(packed, ["hidden"])
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(executable.why_uncompiled() != "", reason="nothing can be compiled here")
def test_threads_compile_and_run_buckets_at_once(rng) -> None:
    """Each of four threads meets the buckets in another order, so that all compile and all wait."""
    bert = make_bert()
    plain = make_bert()
    plain.load_state_dict(bert.state_dict())
    backend = TorchBackend(Model(bert, {}), CPU, graphs=True)
    packs = [make_packed([n // 2, n // 3, 5], rng) for n in (40, 90, 200, 400)]
    with torch.inference_mode():
        expected = [plain(packed) for packed in packs]

    def work(number: int) -> float:
        differences = []
        for place in range(3 * len(packs)):
            which = (number + place) % len(packs)
            (result,) = backend(packs[which], ["hidden"])
            differences.append(float((result - expected[which]).abs().max()))
        return max(differences)

    with ThreadPoolExecutor(4) as pool:
        assert max(pool.map(work, range(4))) <= 1e-5


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 100, 1000, 4095, 4096, 4097, 100_000])
def test_bucket_sizes_waste_at_most_a_fifth(tokens: int) -> None:
    size = executable.round_up(tokens)
    assert size >= tokens
    assert size == executable.round_up(size)
    assert size == 64 or size - tokens <= size / 5


@pytest.mark.parametrize("largest", [1, 64, 65, 1000, 16384])
def test_every_bucket_is_listed_once(largest: int) -> None:
    result = list(executable.sizes(largest))
    assert result == sorted({executable.round_up(size) for size in range(1, largest + 1)})


def test_a_batch_fits_its_own_bucket(rng) -> None:
    for _ in range(50):
        lengths = rng.integers(1, 200, rng.integers(1, 30)).tolist()
        packed = make_packed(lengths, rng)
        bucket = _bucket(packed, 64)
        assert bucket.tokens == executable.round_up(sum(lengths))
        assert bucket.sequences & (bucket.sequences - 1) == 0
        flat = bucket.flat(packed, torch.device("cpu"))
        filled = unflatten(flat, bucket.tokens, bucket.sequences)
        assert filled["ids"].tolist()[: len(packed.ids)] == packed.ids.tolist()
        assert bucket.max_seqlen >= int(filled["cu_seqlens"].diff().max())


@pytest.mark.slow
def test_an_encoding_that_torchs_compiler_cannot_read_is_named() -> None:
    """Python reads files as ASCII under LANG=C, unless UTF-8 mode is on; torch's have more."""
    code = "from packhorse import executable; print(executable.why_uncompiled())"

    def reason(**variables: str) -> str:
        environment = {**os.environ, "LC_ALL": "C", **variables}
        command = [sys.executable, "-c", code]
        return subprocess.run(command, env=environment, capture_output=True, text=True).stdout

    if executable.cpp_compiler() is not None:
        assert "set PYTHONUTF8=1" in reason(PYTHONUTF8="0")
        assert reason(PYTHONUTF8="1").strip() == ""


def test_without_a_compiler_it_says_so_once_and_runs(monkeypatch) -> None:
    monkeypatch.setattr(executable, "cpp_compiler", lambda: None)
    executable._warn_uncompiled.cache_clear()
    layer = torch.nn.Linear(3, 3)
    with pytest.warns(RuntimeWarning, match=r"no C\+\+ compiler"):
        executable.compile([layer])
    executable.compile([layer])  # a second warning would be an error here
    assert layer(torch.ones(2, 3)).shape == (2, 3)


FIRST_RESULT = """
import json, time
import numpy as np, torch
from packhorse import attention, executable
from packhorse.model.bert import Bert
from packhorse.model.config import BertConfig
from packhorse.model.model import Model
from packhorse.packing.batch import Packed
from packhorse.runtime.backend import TorchBackend
from packhorse.runtime.proof import SyntheticSequence
torch.manual_seed(0)
config = BertConfig(vocab_size=50, hidden_size=32, layers=2, heads=2, intermediate_size=64)
bert = Bert(config, attention.kernel("bucketed"))
plain = TorchBackend(Model(bert, {}), torch.device("cpu"), graphs=False)
torch.manual_seed(0)
bert = Bert(config, attention.kernel("bucketed"))
backend = TorchBackend(Model(bert, {}), torch.device("cpu"), graphs=True)
packed = Packed.build([SyntheticSequence(np.arange(n) % 50, np.zeros(n, int)) for n in (5, 20, 31)])
start = time.perf_counter()
(found,) = backend(packed, ["hidden"])
seconds = time.perf_counter() - start
(expected,) = plain(packed, ["hidden"])
print(json.dumps({
    "seconds": seconds, "misses": executable.cache_misses(),
    "difference": float((found - expected).abs().max()),
}))
"""


@pytest.mark.slow
@pytest.mark.skipif(executable.why_uncompiled() != "", reason="nothing can be compiled here")
def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    environment = {**os.environ, "PACKHORSE_CACHE": str(tmp_path / "cache")}

    def run() -> dict:
        completed = subprocess.run(
            [sys.executable, "-c", FIRST_RESULT],
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert completed.returncode == 0, completed.stderr
        return json.loads(completed.stdout.splitlines()[-1])

    cold, warm = run(), run()
    assert cold["misses"] > 0, "the control: the first process must have compiled something"
    assert warm["misses"] == 0
    assert max(cold["difference"], warm["difference"]) <= 1e-5
    print(f"first result: cold {cold['seconds']:.2f} s, warm {warm['seconds']:.2f} s")
