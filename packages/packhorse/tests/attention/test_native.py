"""The compiled CPU kernel against the reference, its isolation, and where it cannot be built."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from packhorse import attention
from packhorse import native as compiled
from packhorse.attention import native
from packhorse.attention.native import CHUNK, WIDEST, Native
from packhorse.attention.reference import Reference
from packhorse.errors import KernelError
from packhorse.native import FLAGS
from packhorse.packing.batch import Packed

pytestmark = pytest.mark.machine
BOTH = (torch.float32, torch.bfloat16)
EDGES = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48, 127, 128, 129, 200, 256, 257, 384, 513, 600)
CACHED = (native._function, native._multiplies_bf16)

needs_native = pytest.mark.skipif(
    native.obstacle() is not None, reason=f"kernel 'native': {native.obstacle()}"
)
needs_linux = pytest.mark.skipif(
    platform.system() != "Linux" or shutil.which("cc") is None, reason="needs Linux and cc"
)


@dataclass(frozen=True)
class Blank:
    ids: np.ndarray
    types: np.ndarray


def batch(lengths: Sequence[int]) -> Packed:
    return Packed.build([Blank(np.zeros(n), np.zeros(n)) for n in lengths])


def draw(
    tokens: int, heads: int, width: int, dtype: torch.dtype, spread: float = 1
) -> list[Tensor]:
    """Queries, keys and values as the model hands them over: views of one tensor."""
    return list((spread * torch.randn(tokens, 3, heads, width)).to(dtype).unbind(1))


def run(kernel: Native | Reference, qkv: list[Tensor], packed: Packed) -> Tensor:
    return kernel(torch.stack(qkv, 1), kernel.plan(packed))  # pyright: ignore


def exact(qkv: list[Tensor], packed: Packed) -> Tensor:
    return run(Reference(), [x.double() for x in qkv], packed)


def assert_close(qkv: list[Tensor], packed: Packed) -> None:
    """fp32: 1e-5; bf16: what torch's own attention loses to the format, and half of that more."""
    out, truth = run(Native(), qkv, packed), exact(qkv, packed)
    assert out.dtype == qkv[0].dtype and out.is_contiguous()
    if out.dtype == torch.float32:
        assert (out - truth).abs().max() < 1e-5
        return
    actual, expected = ((x.double() - truth).abs() for x in (out, run(Reference(), qkv, packed)))
    assert actual.max() <= 1.5 * expected.max()
    assert actual.mean() <= 1.1 * expected.mean()


@pytest.fixture
def rebuilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Nothing loaded yet and an empty cache; afterwards the process finds its own again."""
    monkeypatch.setenv("PACKHORSE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(compiled, "WHEEL_FOLDER", tmp_path / "no-wheel")
    for function in CACHED:
        function.cache_clear()
    yield tmp_path / "cache"
    for function in CACHED:
        function.cache_clear()


# ---- equality ----


@needs_native
@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize(
    ("heads", "width"),
    [(1, 16), (12, 32), (16, 64), (3, 80), (2, 128), (1, 256), (5, 24), (2, 2), (3, 7), (2, 33)],
)
def test_equals_the_reference_at_every_head_size(heads: int, width: int, dtype: torch.dtype):
    packed = batch((5, 130, 1, 33, 257))
    assert_close(draw(len(packed.ids), heads, width, dtype), packed)


@needs_native
@pytest.mark.parametrize("dtype", BOTH)
def test_equals_the_reference_at_every_length(dtype: torch.dtype):
    packed = batch(range(1, 601))
    assert_close(draw(len(packed.ids), 1, 16, dtype), packed)


@needs_native
def test_a_wrong_scale_would_be_seen():
    packed = batch((40, 9))
    q, k, v = draw(49, 2, 32, torch.float32)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(
            run(Native(), [q * 1.001, k, v], packed), run(Reference(), [q, k, v], packed)
        )


@needs_native
@pytest.mark.parametrize("dtype", BOTH)
def test_layouts_that_are_not_one_qkv_tensor(dtype: torch.dtype):
    packed = batch((20, 45))
    q, k, v = draw(65, 4, 32, dtype)
    expected = run(Native(), [q, k, v], packed)
    heads_first = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]
    every_other = [torch.stack([x, x], -1).flatten(2)[..., ::2] for x in (q, k, v)]
    for layout in (heads_first, every_other, [q.contiguous(), k, heads_first[2]]):
        assert torch.equal(native.attend(*layout, native._plan(packed.cu_seqlens)), expected)


@needs_native
@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("spread", [3.9, 40.0])
def test_large_scores_stay_exact(dtype: torch.dtype, spread: float):
    packed = batch((64, 300))
    q, k, v = draw(364, 2, 32, dtype, spread)
    scores = q[:64, 0].double() @ k[:64, 0].double().T / 32**0.5
    assert scores.abs().max() > 50
    out, truth = run(Native(), [q, k, v], packed), exact([q, k, v], packed)
    allowed = 2e-5 * spread if dtype == torch.float32 else 0.01
    assert (out - truth).abs().max() < allowed * v.abs().max()


@needs_native
def test_exponentials_are_accurate_down_to_the_smallest():
    """One key far below another: its weight is 2^-x, read off the result."""
    steps = torch.linspace(0, 120, 400)
    for low in steps.tolist():
        q = torch.tensor([[[1.0, 0.0]]]).expand(2, 1, 2).contiguous()
        k = torch.tensor([[[0.0, 0.0]], [[-low * 2**0.5 * np.log(2), 0.0]]]).float()
        v = torch.tensor([[[0.0, 1.0]], [[1.0, 0.0]]])
        weight = run(Native(), [q, k, v], batch((2,)))[0, 0, 0].item()
        true = 2.0**-low / (1 + 2.0**-low)
        assert weight == pytest.approx(true, rel=2e-5)  # the score itself is rounded to 6e-8 · 120


# ---- isolation ----


@needs_native
@pytest.mark.parametrize("dtype", BOTH)
def test_a_neighbor_changes_no_bit(dtype: torch.dtype):
    packed, separate = batch((17, 140, 33)), slice(17, 157)
    qkv = draw(190, 3, 32, dtype)
    before = run(Native(), qkv, packed)[separate]
    for x in qkv:
        x[:17], x[157:] = 1e30, float("nan")
    assert torch.equal(run(Native(), qkv, packed)[separate], before)
    alone = run(Native(), [x[separate] for x in qkv], batch((140,)))
    assert torch.equal(alone, before)


@needs_native
def test_without_the_boundary_the_neighbor_is_seen():
    qkv = draw(190, 3, 32, torch.float32)
    before = run(Native(), qkv, batch((17, 140, 33)))
    assert not torch.allclose(run(Native(), qkv, batch((190,)))[17:157], before[17:157], atol=1e-2)


@needs_native
@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("length", [40, 300])
def test_what_is_not_finite_shows_where_it_must_and_nowhere_else(
    dtype: torch.dtype, which: int, value: float, length: int
):
    packed, separate = batch((20, length, 20)), slice(20, 20 + length)
    qkv = draw(40 + length, 2, 32, dtype)
    clean = run(Native(), qkv, packed)
    for token in (21, 19 + length):  # in the first block of keys and in the last
        dirty = [x.clone() for x in qkv]
        dirty[which][token, 1, 5] = value
        out = run(Native(), dirty, packed)
        truth = exact([x[separate] for x in dirty], batch((length,)))
        assert torch.equal(out[separate].isfinite(), truth.isfinite())
        assert not truth.isfinite().all()
        assert torch.equal(out[:20], clean[:20]) and torch.equal(out[-20:], clean[-20:])
        assert torch.equal(out[:, 0], clean[:, 0])


@needs_native
def test_empty_slots_and_dummies_of_a_bucket():
    packed = batch((5, 30))
    filled = packed.pad(tokens=70, sequences=9)
    qkv = draw(70, 2, 32, torch.float32)
    out = run(Native(), qkv, filled)
    assert torch.equal(out[:35], run(Native(), [x[:35] for x in qkv], packed))
    assert out.isfinite().all()


# ---- threads, work items, graphs ----


@needs_native
@pytest.mark.parametrize("dtype", BOTH)
def test_one_thread_and_two_agree_to_the_bit(dtype: torch.dtype, threads):
    packed = batch((8, 256, 77, 500, 1, 130))
    qkv = draw(len(packed.ids), 3, 32, dtype)
    threads(1)
    alone = run(Native(), qkv, packed)
    threads(2)
    assert all(torch.equal(run(Native(), qkv, packed), alone) for _ in range(5))


@needs_native
def test_callers_on_several_threads_do_not_disturb_each_other():
    packed = batch((100, 60))
    inputs = [draw(160, 4, 32, torch.float32) for _ in range(8)]
    expected = [run(Native(), qkv, packed) for qkv in inputs]
    with ThreadPoolExecutor(2) as pool:
        result = list(pool.map(lambda qkv: run(Native(), qkv, packed), inputs * 4))
    assert all(torch.equal(a, b) for a, b in zip(result, expected * 4, strict=True))


def test_the_plan_covers_every_row_once_and_puts_the_costliest_first():
    lengths = (5, 300, 128, 129, 1)
    plan = Native().plan(batch(lengths).pad(tokens=600, sequences=10))
    assert isinstance(plan, native.NativePlan) and plan.tokens == 600
    items = [(start + row, n, min(CHUNK, n - row)) for start, n, row in plan.items.tolist()]
    rows = [first + i for first, _, count in items for i in range(count)]
    assert sorted(rows) == list(range(600))
    costs = [n * count for _, n, count in items]
    assert costs == sorted(costs, reverse=True)


@needs_native
@pytest.mark.parametrize("dtype", BOTH)
def test_one_node_of_a_compiled_graph(dtype: torch.dtype):
    packed = batch((30, 12))
    qkv = torch.stack(draw(42, 2, 32, dtype), 1)

    kernel = Native()
    plan = kernel.plan(packed)

    def layer(qkv: Tensor, plan: native.NativePlan) -> Tensor:
        return kernel(qkv, plan) * 2

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with torch.inference_mode():
        assert torch.equal(compiled(qkv, plan), layer(qkv, plan))
    torch.library.opcheck(native._opaque, (*qkv.unbind(1), packed.cu_seqlens))


# ---- memory ----

SMALL_STACKS = """
import threading
import numpy as np, torch
from packhorse.attention.native import Native
from packhorse.attention.reference import Reference
from packhorse.model.bert import AddNorm
from packhorse.model.freeze import FrozenAddNorm
from packhorse.packing.batch import Packed
from packhorse.runtime.proof import SyntheticSequence

lengths = (300, 40, 129)
packed = Packed.build([SyntheticSequence(np.zeros(n, int), np.zeros(n, int)) for n in lengths])
native, reference, norm = Native(), Reference(), AddNorm(1024, 1e-12)
frozen = FrozenAddNorm(norm)

def work():
    torch.set_num_threads(2)
    with torch.inference_mode():
        for dtype in (torch.float32, torch.bfloat16):
            for width in (64, 256):
                qkv = torch.randn(sum(lengths), 3, 2, width).to(dtype)
                found = native(qkv, native.plan(packed)).float()
                expected = reference(qkv.float(), reference.plan(packed))
                differences.append(float((found - expected).abs().max()))
        rows = torch.randn(2, 64, 1024)
        differences.append(float((frozen(*rows) - norm(*rows)).abs().max()))

differences = []
threading.stack_size(256 << 10)
workers = [threading.Thread(target=work) for _ in range(2)]
for worker in workers:
    worker.start()
for worker in workers:
    worker.join()
print(len(differences), max(differences))
"""


@needs_native
def test_threads_with_small_stacks():
    """256 KiB for threads of Python's and of OpenMP's; a stack that overflows ends the process."""
    environment = {**os.environ, "OMP_STACKSIZE": "256k", "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-c", SMALL_STACKS]
    completed = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=240
    )
    assert completed.returncode == 0, (completed.returncode, completed.stderr)
    count, difference = completed.stdout.split()
    assert int(count) == 10 and float(difference) < 0.05


@needs_native
def test_without_memory_it_raises(rebuilt: Path, monkeypatch: pytest.MonkeyPatch):
    """Heads so wide that their buffers have no place in any address space."""
    monkeypatch.setattr(native, "WIDEST", 1 << 40)
    with pytest.raises(MemoryError, match="scratch"):
        run(Native(), draw(4, 1, 8, torch.float32), batch((4,)))


# ---- refusals ----


@needs_native
def test_refuses_what_c_would_read_astray():
    packed = batch((4, 6))
    q, k, v = draw(10, 2, 32, torch.float32)
    wide = draw(10, 1, WIDEST + 1, torch.float32)
    cases = [
        (wide, "serves up to 256"),
        (draw(11, 2, 32, torch.float32), "plan is for 10 tokens and there are 11"),
        ([q, k[:9], v], "one shape"),
        ([q, k.bfloat16(), v], "differ in dtype"),
        ([x.half() for x in (q, k, v)], "not in fp16"),
        ([x.to("meta") for x in (q, k, v)], "not on meta"),
        ([q.clone().requires_grad_(), k, v], "no backward pass"),
    ]
    for qkv, message in cases:
        with pytest.raises(KernelError, match=message):
            native.attend(*qkv, native._plan(packed.cu_seqlens))
    with pytest.raises(KernelError, match="never fall"):
        native._plan(torch.tensor([0, 5, 3], dtype=torch.int32))


def test_serves_inference_on_cpus_only():
    cpu, serves = torch.device("cpu"), Native.serves
    assert "no backward" in (serves.refusal(cpu, torch.float32, True) or "")
    assert "not on cuda" in (serves.refusal(torch.device("cuda"), torch.float32, False) or "")
    assert "not in fp64" in (serves.refusal(cpu, torch.float64, False) or "")


# ---- building ----


@needs_linux
def test_without_a_working_compiler_it_says_so(rebuilt: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CC", "/bin/false")
    reason = native.obstacle()
    assert reason == "the C compiler /bin/false failed: exit status 1; set CC to one that works"
    assert reason == Native.serves.refusal(torch.device("cpu"), torch.float32, False)
    with pytest.raises(KernelError, match="use 'bucketed'"):
        run(Native(), draw(4, 1, 8, torch.float32), batch((4,)))
    assert not rebuilt.exists() or not list(rebuilt.iterdir())


@needs_linux
def test_a_choice_that_lost_the_kernel_says_so_once(
    rebuilt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "/no/such/cc")
    compiled._warn_once.cache_clear()
    cpu = torch.device("cpu")
    with pytest.warns(
        RuntimeWarning, match=r"C kernels: CC names /no/such/cc.*install gcc"
    ) as caught:
        for dtype in (*BOTH, torch.float32):
            assert attention.pick(cpu, dtype).name == "bucketed"
        attention.pick(cpu, torch.float32, backward=True)
    assert len(caught) == 1
    compiled._warn_once.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention.pick(cpu, torch.float64)  # which the kernel does not serve: nothing is lost
        attention.pick(cpu, torch.float32, backward=True)
        monkeypatch.setattr("sys.platform", "darwin")
        compiled.openmp_entry.cache_clear()
        attention.pick(cpu, torch.float32)  # where it is not built: nothing could be done
    monkeypatch.undo()
    compiled.openmp_entry.cache_clear()


@needs_native
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names an x86 instruction set")
def test_cpus_without_avx512_get_the_same_answers(rebuilt: Path, monkeypatch: pytest.MonkeyPatch):
    older = (*FLAGS, "-march=x86-64-v3")
    monkeypatch.setattr("packhorse.native.FLAGS", older)
    packed = batch(EDGES)
    for dtype in BOTH:
        assert_close(draw(len(packed.ids), 2, 40, dtype), packed)
    assert not native._multiplies_bf16()  # bf16 went through floats
    dirty = draw(300, 1, 16, torch.float32)
    dirty[1][7, 0, 0], dirty[0][280, 0, 0] = float("nan"), float("inf")
    out = run(Native(), dirty, batch((100, 200)))
    assert out[:100].isnan().all() and out[280].isnan().all()
    assert out[100:280].isfinite().all() and out[281:].isfinite().all()


def test_the_source_lies_beside_the_module():
    assert native.SOURCE.is_file() and native.SOURCE.parent == Path(native.__file__).parent
