"""Every lane gives the vectors of the padded original, and computes the tokens it says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from packhorse import executable
from packhorse.attention import Kernel
from packhorse.errors import InputError
from packhorse.packing.batch import Packed
from packhorse.runtime.backend import TorchBackend
from packhorse.runtime.batches import PackedShape
from packhorse.runtime.encoder import Encoder
from packhorse_bench import lanes, modes
from packhorse_bench.lanes import MODES, ModeLane, ModesStage, PackingMode, Pass

ROWS, CAPACITY, COUNT = 4, 48, 43  # the last padded batch has three sequences
LENGTHS = modes.draw_lengths(modes.ModesSetup(rows=ROWS, capacity=CAPACITY, requests=COUNT))
REQUESTS = modes.draw_ids(LENGTHS, 2048, 0)
CLOSE = 1e-5


@pytest.fixture(scope="module")
def stage(tiny_folder: Path) -> ModesStage:
    return ModesStage(tiny_folder, torch.device("cpu"), "fp32", ROWS, CAPACITY, timeout=0.001)


@pytest.fixture(scope="module")
def opened(stage: ModesStage) -> tuple[list[ModeLane], Encoder]:
    return lanes.open_modes(stage)


@pytest.fixture(scope="module")
def passes(opened: tuple[list[ModeLane], Encoder]) -> dict[str, Pass]:
    return {lane.name: lane.run(REQUESTS) for lane in opened[0]}


def batches(mode: str, policy: str = "first_fit") -> int:
    return sum(1 for _ in PackedShape(mode, ROWS, CAPACITY, policy=policy).cut(LENGTHS.tolist()))


def test_the_names_are_those_of_poprt_and_ours() -> None:
    assert [mode.name for mode in MODES] == [
        "Original",
        "Pack Offline Unpack Repack",
        "Pack Online Unpack Repack",
        "Pack Offline AttentionMask",
        "Pack Online AttentionMask(first_fit)",
        "Pack Online AttentionMask(next_fit)",
        "Pack Offline Ragged",
        "Pack Online Ragged",
    ]


def test_all_lanes_run_the_same_model(opened: tuple[list[ModeLane], Encoder]) -> None:
    mode_lanes, encoder = opened
    assert {lane.kernel for lane in mode_lanes} == {encoder.kernel}


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_all_agree_with_the_original(mode: PackingMode, passes: dict[str, Pass]) -> None:
    original, mode_pass = passes["Original"].vectors, passes[mode.name]
    assert mode_pass.vectors.shape == original.shape == (COUNT, 64)
    assert np.abs(mode_pass.vectors - original).max() < CLOSE
    # Answers in another order would show: no two requests are that close.
    assert np.abs(np.roll(mode_pass.vectors, 1, 0) - original).max(1).min() > 100 * CLOSE
    assert mode_pass.seconds > 0 and (mode_pass.packing is None) == mode.online


class Leaking:
    """A kernel that attends across all sequences of a batch."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel, self.serves = kernel, kernel.serves

    def plan(self, packed: Packed) -> Any:
        whole = packed.cu_seqlens[[0, -1]]
        return self.kernel.plan(replace(packed, cu_seqlens=whole, max_seqlen=len(packed.ids)))

    def __call__(self, qkv: Tensor, plan: Any) -> Tensor:
        return self.kernel(qkv, plan)


def test_a_kernel_that_leaks_would_show(stage: ModesStage, passes: dict[str, Pass]) -> None:
    leaking = lanes.open_model(stage)
    bert = leaking.meter.backend.model.bert
    bert.use(Leaking(bert.kernel))
    leaking_pass = lanes._lane(PackingMode("Leaking", "ragged"), stage, leaking).run(REQUESTS)
    assert np.abs(leaking_pass.vectors - passes["Original"].vectors).max() > 100 * CLOSE


def test_what_offline_modes_compute(passes: dict[str, Pass]) -> None:
    batch = ROWS * CAPACITY
    assert passes["Original"].computed == 11 * batch
    assert passes["Pack Offline Unpack Repack"].computed == batches("repack") * batch
    assert passes["Pack Offline AttentionMask"].computed == batches("mask", "next_fit") * batch
    assert passes["Pack Offline Ragged"].computed == LENGTHS.sum()


def test_what_online_modes_compute(passes: dict[str, Pass]) -> None:
    """A batch may go out early, when its time has come; it is as large as a full one."""
    batch = ROWS * CAPACITY
    for name, ideal in (
        ("Pack Online Unpack Repack", batches("repack")),
        ("Pack Online AttentionMask(first_fit)", batches("mask")),
        ("Pack Online AttentionMask(next_fit)", batches("mask", "next_fit")),
    ):
        whole, rest = divmod(passes[name].computed, batch)
        assert whole >= ideal and rest == 0
    assert passes["Pack Online Ragged"].computed == LENGTHS.sum()


def test_padded_batches_have_a_sequence_a_row(opened: tuple[list[ModeLane], Encoder]) -> None:
    sequences = opened[1].tokenize(REQUESTS)
    laid = list(lanes.one_per_row(PackedShape("mask", ROWS, CAPACITY), sequences))
    assert [len(packed.ids) for packed in laid] == [ROWS * CAPACITY] * 11
    starts = [int(packed.starts[place]) for packed in laid for place in packed.places]
    assert starts == [CAPACITY * (i % ROWS) for i in range(COUNT)]
    lengths = [int(packed.lengths[place]) for packed in laid for place in packed.places]
    assert lengths == LENGTHS.tolist()


def test_padding_online_is_padding(stage: ModesStage) -> None:
    (lane,), encoder = lanes.open_modes(stage, MODES[:1])
    assert lane.runner is not None and isinstance(encoder.backend, lanes.Meter)
    exact, before = lane.run(REQUESTS).vectors, encoder.backend.tokens
    with lane.runner(COUNT) as runner:
        vectors = np.stack(runner.run(REQUESTS))
        batches = runner.stats().batches
    assert np.abs(vectors - exact).max() < CLOSE
    assert batches >= -(-COUNT // ROWS)
    assert encoder.backend.tokens - before == batches * ROWS * CAPACITY


def test_runners_refuse_no_one(opened: tuple[list[ModeLane], Encoder]) -> None:
    waiting = {lane.name for lane in opened[0] if lane.runner}
    assert waiting == {"Original", *(mode.name for mode in MODES if mode.online)}
    for lane in opened[0]:
        if lane.runner:
            with lane.runner(COUNT) as runner:
                futures = [runner.submit(np.ones(CAPACITY, np.int32)) for _ in range(COUNT)]
                assert all(np.isfinite(future.result()).all() for future in futures)
                assert runner.stats().refused == 0


@pytest.mark.parametrize(
    ("graphs", "capacity", "counted"), [(False, 0, 300), (True, 0, 320), (True, 100, 300)]
)
def test_a_bucket_is_computed_whole(graphs: bool, capacity: int, counted: int) -> None:
    backend = TorchBackend.__new__(TorchBackend)
    backend.graphs, backend.smallest, backend.largest, backend.fixed = graphs, 64, 1000, None
    zeros = torch.zeros(300, dtype=torch.long)
    packed = Packed(zeros, zeros, zeros, torch.tensor([0, 300]), 300, (0,), capacity)
    assert backend.computed(packed) == counted


def test_graphs_are_shown(stage: ModesStage, tmp_path: Path, monkeypatch) -> None:
    if executable.cpp_compiler() is None:
        pytest.skip("no C++ compiler")
    monkeypatch.setenv("PACKHORSE_CACHE", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert lanes.open_model(replace(stage, graphs=True)).kernel.endswith(" graphs")


def test_rows_longer_than_the_model_are_refused(stage: ModesStage) -> None:
    wide = replace(stage, capacity=513)
    with pytest.raises(InputError, match=r"513 tokens and .* 512 positions; pass --capacity 512"):
        lanes.open_model(wide)


def test_a_padded_peer(
    stage: ModesStage, opened: tuple[list[ModeLane], Encoder], tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    lane = lanes.open_peer("transformers", stage, opened[1], tmp_path)
    assert lane.name == "Original (transformers)" and lane.runner is None
    peer_pass = lane.run(REQUESTS)
    assert np.abs(peer_pass.vectors - opened[0][0].run(REQUESTS).vectors).max() < CLOSE
    widest = [LENGTHS[i : i + ROWS] for i in range(0, COUNT, ROWS)]
    assert peer_pass.computed == sum(len(batch) * batch.max() for batch in widest)


def test_tokens_of_padded_batches(opened: tuple[list[ModeLane], Encoder]) -> None:
    sequences = opened[1].tokenize([[1] * n for n in (3, 5, 2, 9, 4)])
    assert lanes.padded_tokens(sequences, rows=2) == 2 * 5 + 2 * 9 + 4
    assert lanes.padded_tokens(sequences, rows=2, width=10) == 3 * 2 * 10
