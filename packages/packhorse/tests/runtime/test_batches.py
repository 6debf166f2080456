"""The three shapes of a batch: what they hold, what they cost, what they refuse."""

from __future__ import annotations

import numpy as np
import pytest

from packhorse.errors import InputError
from packhorse.runtime.batches import MODES, PackedShape
from packhorse.runtime.tasks import from_ids


def sequences(*lengths: int):
    return [from_ids(np.arange(1, n + 1), 999, 1000) for n in lengths]


@pytest.mark.parametrize("mode", MODES)
def test_everyone_is_in_the_batch_once_and_whole(mode: str, rng) -> None:
    shape = PackedShape(mode, rows=4, capacity=32)
    lengths = rng.integers(1, 33, 100).tolist()
    seen: list[int] = []
    for indices, packs in shape.cut(lengths):
        chosen = sequences(*(lengths[i] for i in indices))
        packed = shape.lay(chosen, packs)
        assert len(packed.ids) == sum(map(len, chosen)) if mode == "ragged" else 4 * 32
        for sequence, ids in zip(chosen, packed.split(packed.ids), strict=True):
            assert ids.tolist() == sequence.ids.tolist()
        seen += indices
    assert seen == list(range(100))


def test_in_mask_no_sequence_crosses_a_row_and_in_repack_some_do() -> None:
    crossing = {}
    for mode in ("mask", "repack"):
        shape = PackedShape(mode, rows=3, capacity=8)
        ((_, packs),) = shape.cut([5, 5, 5])
        packed = shape.lay(sequences(5, 5, 5), packs)
        starts, ends = packed.starts, packed.cu_seqlens[1:] - 1
        real = list(packed.places)
        crossing[mode] = bool((starts[real] // 8 != ends[real] // 8).any())
        assert int(packed.cu_seqlens[-1]) == len(packed.ids) == 24
        assert packed.capacity == (8 if mode == "mask" else 0)
    assert crossing == {"mask": False, "repack": True}


def test_the_seeds_own_batches() -> None:
    """1,600 requests in 16 × 256: the counts that the published table rests on."""
    lengths = np.clip(np.random.RandomState(2023).normal(128, 128, 1600).astype(int), 1, 256)
    counts = {
        (mode, policy): sum(1 for _ in PackedShape(mode, 16, 256, 64, policy).cut(lengths.tolist()))
        for mode, policy in [("mask", "first_fit"), ("mask", "next_fit"), ("repack", "next_fit")]
    }
    assert counts[("mask", "first_fit")] == 56
    assert counts[("mask", "next_fit")] == 65
    assert 50 <= counts[("repack", "next_fit")] <= 52


def test_nonsense_is_refused() -> None:
    for options, message in [
        (("dense", 1, 1), "unknown mode 'dense'; use one of ragged, mask, repack"),
        (("mask", 0, 8), "rows must be at least 1"),
        (("mask", 1, 0), "capacity must be at least 1"),
        (("mask", 1, 8, 0), "max_sequences must be at least 1"),
        (("mask", 1, 8, 4, "worst_fit"), "unknown packing policy"),
    ]:
        with pytest.raises(InputError, match=message):
            PackedShape(*options)
