"""Packed and padded give the same vectors, and a difference would be seen."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from packhorse.reports import side_by_side, waste
from packhorse.runtime.encoder import Encoder
from packhorse.runtime.loading import load
from packhorse_bench import workloads

LENGTHS = workloads.draw("normal", 30, longest=60)


@pytest.fixture(scope="module")
def encoder(tiny_folder: Path) -> Encoder:
    return load(tiny_folder, device="cpu", budget=200)


@pytest.fixture(scope="module")
def sequences() -> list:
    return workloads.sequences(LENGTHS, 2048, ends=(2, 3))


def test_all_ways_agree(encoder: Encoder, sequences: list, tiny_folder: Path) -> None:
    pytest.importorskip("transformers")
    steps = []
    comparison = side_by_side.compare(
        encoder, str(tiny_folder), sequences, 4, lambda *at: steps.append(at)
    )
    packed, ordered, arrival = comparison.sides
    assert comparison.largest_difference < 1e-5 and comparison.smallest_cosine > 0.99999
    assert packed.padding == 0 < ordered.padding < arrival.padding
    computed = waste.padded_tokens(LENGTHS, 4)
    assert arrival.padding == pytest.approx(1 - LENGTHS.sum() / computed)
    assert packed.ratio == 1 and arrival.ratio == pytest.approx(arrival.seconds / packed.seconds)
    assert steps[-1][0] == steps[-1][1] == len(steps)
    assert np.allclose(
        comparison.vectors, side_by_side.packed_vectors(encoder, sequences), atol=1e-6
    )


def test_our_own_padding_agrees(encoder: Encoder, sequences: list) -> None:
    padded = side_by_side.padded_by_ours(encoder)(sequences)
    assert np.abs(padded - side_by_side.packed_vectors(encoder, sequences)).max() < 1e-5


def test_without_transformers_our_engine_pads(
    encoder: Encoder, sequences: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side_by_side, "find_spec", lambda name: None)
    comparison = side_by_side.compare(encoder, "unused", sequences, 4)
    assert "our engine" in comparison.sides[1].way
    assert comparison.smallest_cosine > 0.99999


def test_a_difference_is_seen() -> None:
    same = np.eye(3, dtype=np.float32)
    assert side_by_side._largest_difference([same, same, same]) == (0, 1)
    difference, cosine = side_by_side._largest_difference([same, same, np.roll(same, 1, axis=0)])
    assert difference == 1 and cosine == 0


def test_ways_take_turns() -> None:
    ways = [
        side_by_side.EncodingMethod("a", [[0], [1]], lambda batch: np.zeros(0)),
        side_by_side.EncodingMethod("b", [[0], [1], [2], [3]], lambda batch: np.zeros(0)),
    ]
    turns = side_by_side._alternate(ways)
    assert [number for number, _ in turns] == [1, 0, 1, 1, 0, 1]
    assert [batch for number, batch in turns if number == 1] == ways[1].batches
