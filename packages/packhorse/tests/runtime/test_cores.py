"""Batches on groups of cores: the same bits as one part at a time, in order, and failing apart."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import packhorse
from packhorse.errors import RunnerStopped
from packhorse.packing.batch import Packed
from packhorse.runtime import cores
from packhorse.runtime.batches import LaunchedBatch
from packhorse.runtime.cores import CoreGroups, cores_to_bind, divide, group_layout
from packhorse.runtime.encoder import Encoder
from packhorse.runtime.proof import SyntheticSequence
from packhorse.runtime.runner import PackRunner

pytestmark = pytest.mark.machine
needs_openmp = pytest.mark.skipif(
    not cores._can_divide_threads(), reason="torch's OpenMP library is unknown here"
)
TEXTS = ["a horse carries sacks", "good", "the mule to market " * 9, "hello the bad horse"] * 40


@pytest.fixture
def small_parts(threads: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cores, whatever is here, and parts so small that test models have them."""
    threads(2)
    monkeypatch.setattr(cores, "_usable_cores", lambda: 2)
    monkeypatch.setattr(cores, "SMALLEST_PART", 32)


def load(folder: Path, dtype: str = "fp32") -> Encoder:
    encoder = packhorse.load(str(folder), device="cpu", dtype=dtype, budget=1000)
    assert encoder.side_by_side
    return encoder


def sequences(*lengths: int) -> list[SyntheticSequence]:
    rng = np.random.default_rng(0)
    return [SyntheticSequence(rng.integers(5, 50, n), np.zeros(n, int)) for n in lengths]


def one_at_a_time(encoder: Encoder, packed: Packed, heads: tuple[str, ...]) -> list[Tensor]:
    """The outputs of the parts, run one after another on a thread."""
    torch.set_num_threads(1)
    rows = [encoder.backend(part, heads) for part in divide(packed, 2)]
    torch.set_num_threads(2)
    return [torch.cat(column) for column in zip(*rows, strict=True)]


def count_parts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many parts each batch has had from now on."""
    counts: list[int] = []
    launch = cores.launch

    def counting(*arguments):
        parts = launch(*arguments)
        counts.append(len(parts))
        return parts

    monkeypatch.setattr(cores, "launch", counting)
    return counts


@pytest.mark.parametrize(
    ("tokens", "threads", "groups"),
    [
        (100, 16, (1, 16)),
        (1024, 16, (2, 8)),
        (4096, 16, (8, 2)),
        (8192, 16, (16, 1)),
        (99999, 16, (16, 1)),
        (1024, 2, (2, 1)),
        (1023, 2, (1, 2)),
        (4096, 1, (1, 1)),
        (1600, 6, (3, 2)),
        (1, 3, (1, 3)),
    ],
)
def test_how_many_groups(tokens: int, threads: int, groups: tuple[int, int]) -> None:
    assert group_layout(tokens, threads) == groups


def test_parts_cost_the_same_and_are_the_batch() -> None:
    lengths = np.random.default_rng(0).integers(1, 250, 300).tolist()
    packed = Packed.build(sequences(*lengths))
    parts = divide(packed, 8)
    assert len(parts) == 8
    for name in ("ids", "types", "positions"):
        whole = torch.cat([getattr(part, name) for part in parts])
        assert torch.equal(whole, getattr(packed, name))
    lengths_of_parts = torch.cat([part.lengths for part in parts])
    assert torch.equal(lengths_of_parts, packed.lengths)
    costs = [float((n * (1 + n / cores.DOUBLED_LENGTH)).sum()) for n in (p.lengths for p in parts)]
    assert max(costs) - min(costs) < 2 * 250 * 1.25  # no cut is a sequence away from its place


def test_fewer_sequences_than_groups() -> None:
    assert [len(part) for part in divide(Packed.build(sequences(9, 3)), 8)] == [1, 1]
    assert [len(part) for part in divide(Packed.build(sequences(500, 1, 1)), 2)] == [1, 2]


@needs_openmp
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("head", ["embed", "hidden"])
def test_the_bits_are_those_of_one_part_at_a_time(
    dtype: str, head: str, tiny: Callable[[str], Path], small_parts: None
) -> None:
    encoder = load(tiny("embed"), dtype)
    packed = Packed.build(sequences(*range(3, 60)))
    launched = encoder.launch(packed, (head,))
    assert len(launched.parts) == 2 and not launched.is_back
    result = launched.wait()
    assert result.is_back
    expected = one_at_a_time(encoder, packed, (head,))
    for ours, theirs in zip(result.outputs, expected, strict=True):
        assert torch.equal(ours, theirs.float())
    other = encoder.launch(Packed.build(sequences(*range(4, 61))), (head,)).wait()
    assert not torch.equal(other.outputs[0][:9], result.outputs[0][:9])  # the control


@needs_openmp
def test_a_neighbor_in_another_part_or_the_same_changes_no_bit(
    tiny: Callable[[str], Path], small_parts: None
) -> None:
    encoder = load(tiny("embed"))
    own = sequences(*range(3, 60))
    before = encoder.launch(Packed.build(own), ("embed",)).wait().outputs[0]
    rng = np.random.default_rng(1)
    others = [SyntheticSequence(rng.integers(5, 50, len(s.ids)), s.types) for s in own]
    for kept in (0, 30, 56):
        mixed = [own[i] if i == kept else others[i] for i in range(len(own))]
        after = encoder.launch(Packed.build(mixed), ("embed",)).wait().outputs[0]
        assert torch.equal(after[kept], before[kept])
        assert not torch.equal(after[10], before[10])  # the control: its own tokens changed


@needs_openmp
@pytest.mark.parametrize("task", ["embed", "hidden", "fill"])
def test_every_way_in_divides_and_answers_in_order(
    task: str,
    tiny: Callable[[str], Path],
    small_parts: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encoder = load(tiny("mlm" if task == "fill" else "embed"))
    texts = [f"{text} [MASK]" for text in TEXTS] if task == "fill" else TEXTS
    plain = replace(encoder, side_by_side=False)
    counts = count_parts(monkeypatch)
    run = getattr(encoder, task)
    answers = run(texts)
    assert counts and max(counts) == 2
    del counts[:]
    expected = getattr(plain, task)(texts)
    assert not counts  # the control ran undivided
    assert same(task, answers, expected)
    assert not same(task, answers, [*expected[1:], expected[0]])
    with PackRunner(encoder, capacity=64, rows=8, publish=False) as runner:
        assert same(task, runner.run(texts, task), expected)
        assert max(counts) == 2


def same(task: str, answers: list, expected: list) -> bool:
    if task == "fill":
        return [words(answer) for answer in answers] == [words(answer) for answer in expected]
    pairs = list(zip(answers, expected, strict=True))
    if task == "hidden":
        pairs = [(a.states, b.states) for a, b in pairs]
    return all(a.shape == b.shape and np.allclose(a, b, atol=1e-5) for a, b in pairs)


def words(answer: list) -> list[str]:
    return [mask[0].text for mask in answer]


@needs_openmp
def test_callers_on_many_threads_get_their_own(
    tiny: Callable[[str], Path], small_parts: None
) -> None:
    encoder = load(tiny("embed"))
    lists = [TEXTS[i:] + TEXTS[:i] for i in range(4)]
    expected = [encoder.embed(texts) for texts in lists]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(encoder.embed, lists * 3))
    assert all(np.array_equal(a, b) for a, b in zip(results, expected * 3, strict=True))
    assert not np.array_equal(expected[0], expected[1])


@needs_openmp
def test_an_error_of_a_part_is_that_of_the_batch_and_of_no_other(
    tiny: Callable[[str], Path], small_parts: None
) -> None:
    whole = load(tiny("embed"))
    mixed = sequences(*range(3, 60))
    for index, sequence in enumerate(mixed):
        sequence.ids[0] = 7 if index == 20 else 8
        sequence.ids[1:] = sequence.ids[1:].clip(8)

    def failing(packed: Packed, heads: Sequence[str], at: Tensor | None = None) -> Sequence[Tensor]:
        if (packed.ids == 7).any():
            raise ValueError("a 7")
        return whole.backend(packed, heads, at)

    encoder = replace(whole, backend=failing)
    launched = encoder.launch(Packed.build(mixed), ("embed",))
    with pytest.raises(ValueError, match="a 7"):
        launched.wait()
    assert encoder.launch(Packed.build(mixed[21:]), ("embed",)).wait().finite()
    with PackRunner(encoder, capacity=64, rows=8, publish=False) as runner:
        futures = [runner.submit(sequence.ids, "embed") for sequence in mixed]
        outcomes = [future.exception() for future in futures]
        assert [i for i, error in enumerate(outcomes) if error] == [20]


@needs_openmp
def test_closing_at_any_moment_while_others_use_the_groups(
    tiny: Callable[[str], Path], small_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runners and direct calls share the groups; who got a future gets an answer or an error."""
    encoder = load(tiny("embed"))
    expected = encoder.embed(TEXTS)
    counts = count_parts(monkeypatch)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for number in range(6):
            limits = {"max_waiting_requests": 1000, "max_waiting_tokens": 100_000}
            runner = PackRunner(encoder, capacity=64, rows=8, publish=False, **limits)

            def client(begin: int, runner: PackRunner = runner, number: int = number) -> None:
                futures = []
                with suppress(RunnerStopped):
                    for text in TEXTS[begin:]:
                        futures.append(runner.submit(text))
                for place, future in enumerate(futures, begin):
                    if (error := future.exception(120)) is None:
                        assert np.allclose(future.result(), expected[place], atol=1e-5)
                    else:
                        assert isinstance(error, RunnerStopped) and number % 2 == 0

            def closer(runner: PackRunner = runner, number: int = number) -> None:
                encoder.embed(TEXTS[:20])
                runner.close(drain=bool(number % 2))

            with ThreadPoolExecutor(6) as pool:
                others = [pool.submit(client, begin) for begin in (0, 1, 2)]
                others.append(pool.submit(closer))
                direct = [pool.submit(encoder.embed, TEXTS) for _ in range(2)]
                assert all(np.array_equal(future.result(120), expected) for future in direct)
                for future in others:
                    future.result(120)
    finally:
        sys.setswitchinterval(before)
    assert max(counts) > 1
    assert np.array_equal(encoder.embed(TEXTS), expected)


def test_small_batches_and_other_layouts_run_as_a_whole(
    tiny: Callable[[str], Path], threads: Callable[[int], None]
) -> None:
    threads(2)
    encoder = load(tiny("embed"))
    for packed in (
        Packed.build(sequences(5, 9)),
        Packed.build(sequences(2000)),
        Packed.rows(sequences(*[60] * 40), [[i] for i in range(40)], 64),
    ):
        assert cores.launch(encoder.backend, packed, ("embed",), None) == []
    assert not packhorse.load(str(tiny("embed")), device="cpu", invariant=True).side_by_side
    assert isinstance(encoder.launch(Packed.build(sequences(5, 9)), ("embed",)), LaunchedBatch)


@needs_openmp
def test_a_large_batch_is_cut_into_parts_of_a_cache(
    tiny: Callable[[str], Path], small_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores, "LARGEST_PART", 100)
    encoder = load(tiny("embed"))
    packed = Packed.build(sequences(*range(3, 60)))
    launched = encoder.launch(packed, ("embed",))
    assert len(launched.parts) == 2 * -(-len(packed.ids) // 200)
    expected = replace(encoder, side_by_side=False).launch(packed, ("embed",)).wait()
    torch.testing.assert_close(launched.wait().outputs[0], expected.outputs[0])


@needs_openmp
def test_no_more_groups_than_a_quota_keeps_busy(
    tiny: Callable[[str], Path], small_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = load(tiny("embed"))
    packed = Packed.build(sequences(*range(3, 60)))
    monkeypatch.setattr(cores, "_usable_cores", lambda: 1)
    assert not cores.launch(encoder.backend, packed, ("embed",), None)
    monkeypatch.setattr(cores, "_usable_cores", lambda: 2)
    assert len(cores.launch(encoder.backend, packed, ("embed",), None)) == 2


@needs_openmp
def test_groups_work_on_cores_that_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "cores_to_bind", lambda count: [100_000 + n for n in range(count)])
    groups = CoreGroups(2, 1)
    results = [groups.submit(lambda n=n: n + 1) for n in range(4)]
    assert [result.result(300) for result in results] == [1, 2, 3, 4]


AT_THE_END = """
import sys, threading, time
import packhorse, torch
from packhorse.runtime import cores
torch.set_num_threads(2)
cores.SMALLEST_PART = 16
cores._usable_cores = lambda: 2
encoder = packhorse.load(sys.argv[1], device="cpu", dtype="fp32")
texts = ["a horse carries sacks to market"] * 200
first = encoder.embed(texts)
parts = []
launch = cores.launch
def counting(*arguments):
    parts.append(launch(*arguments))
    return parts[-1]
cores.launch = counting
def late():
    time.sleep(0.5)  # the main thread has ended by then
    print(len(parts[0]), abs(encoder.embed(texts) - first).max() < 1e-5, len(parts[-1]))
threading.Thread(target=late).start()
encoder.embed(texts * 5)
"""


@needs_openmp
def test_the_end_of_the_process(tiny: Callable[[str], Path]) -> None:
    """A thread that outlives the main one computes as a whole, and none aborts the process."""
    command = [sys.executable, "-c", AT_THE_END, str(tiny("embed"))]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (result.returncode, result.stdout) == (0, "2 True 0\n"), result.stderr


@needs_openmp
def test_the_threads_of_others_stay_as_they_are(threads: Callable[[int], None]) -> None:
    threads(2)
    groups = CoreGroups(2, 1)
    counts = [groups.submit(torch.get_num_threads) for _ in range(6)]
    assert {count.result() for count in counts} == {1}
    assert torch.get_num_threads() == 2
    with ThreadPoolExecutor(1) as pool:  # a thread that begins later
        assert pool.submit(torch.get_num_threads).result() == 2


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads are not bound here")
def test_which_cores_threads_are_bound_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for core in range(8):
        folder = tmp_path / f"cpu{core}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{core % 4},{core % 4 + 4}\n")
    monkeypatch.delenv("OMP_PROC_BIND", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.setattr(cores, "usable_cores", lambda: 8)
    assert cores_to_bind(4, tmp_path) == [0, 1, 2, 3]  # one of each pair of siblings
    assert cores_to_bind(2, tmp_path) == cores_to_bind(8, tmp_path) == []
    assert cores_to_bind(4, tmp_path / "nowhere") == []
    monkeypatch.setenv("OMP_PROC_BIND", "false")
    assert cores_to_bind(4, tmp_path) == []
    monkeypatch.delenv("OMP_PROC_BIND")
    monkeypatch.setattr(cores, "usable_cores", lambda: 4)  # a quota
    assert cores_to_bind(4, tmp_path) == []


@needs_openmp
def test_groups_are_bound_to_cores_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(allowed) < 2:
        pytest.skip("needs two cores that threads can be bound to")
    monkeypatch.setattr(cores, "cores_to_bind", lambda count: allowed[:count])
    groups = CoreGroups(2, 1)
    both = threading.Barrier(2)

    def where() -> set[int]:
        both.wait(300)
        return os.sched_getaffinity(0)

    futures = [groups.submit(where) for _ in range(2)]
    assert sorted(map(sorted, (f.result() for f in futures))) == [[core] for core in allowed[:2]]
    assert sorted(os.sched_getaffinity(0)) == allowed
