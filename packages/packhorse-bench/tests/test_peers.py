"""Peers see the same tokens, padded; what they return is in the order of arrival."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from packhorse.reports import padded
from packhorse_bench import encode, peers, workloads

pytest.importorskip("transformers")

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def sequences() -> list:
    return workloads.sequences(workloads.draw("normal", 21, longest=40), 2048, ends=(2, 3))


@pytest.fixture
def setting(tiny_folder: Path, tmp_path: Path) -> padded.PeerSetting:
    return padded.PeerSetting(tiny_folder, CPU, batch_size=4, longest=40, scratch=tmp_path)


def first_token(ids: np.ndarray, mask: np.ndarray) -> torch.Tensor:
    """A "model" whose vector is the sum of a row's real tokens and the width it was padded to."""
    sums = (ids * mask).sum(1).tolist()
    return torch.tensor([[float(total), float(ids.shape[1])] for total in sums])


@pytest.mark.parametrize("order", padded.ORDERS)
def test_padding_keeps_arrival_order(order: str, sequences: list) -> None:
    vectors = padded.padded(first_token, [s.ids for s in sequences], order, 4)
    assert vectors[:, 0].tolist() == [float(s.ids.sum()) for s in sequences]
    widths = vectors[:, 1]
    lengths = np.array([len(s) for s in sequences])
    assert (widths >= lengths).all()
    if order == "sorted":
        assert (widths - lengths).sum() < (
            padded.padded(first_token, [s.ids for s in sequences], "arrival", 4)[:, 1] - lengths
        ).sum()


def test_full_batches_of_one_width(sequences: list) -> None:
    shapes = []

    def forward(ids: np.ndarray, mask: np.ndarray) -> torch.Tensor:
        shapes.append(ids.shape)
        assert (mask.sum(1) > 0).all()
        return first_token(ids, mask)

    vectors = padded.padded(
        forward, [s.ids for s in sequences], "fixed", 4, lambda longest: 40, full=True
    )
    assert set(shapes) == {(4, 40)} and len(shapes) == 6
    assert vectors[:, 0].tolist() == [float(s.ids.sum()) for s in sequences]


def test_pooling_does_not_see_padding() -> None:
    hidden, mask = torch.randn(2, 5, 8), torch.ones(2, 5, dtype=torch.long)
    mask[1, 3:] = 0
    before = padded.mean_pool(hidden, mask)
    hidden[1, 3:] = 1e3
    assert torch.equal(before, padded.mean_pool(hidden, mask))
    hidden[1, 2] = 1e3
    assert not torch.equal(before, padded.mean_pool(hidden, mask))
    assert torch.allclose(before.norm(dim=1), torch.ones(2))


def test_transformers_agrees_with_ours(setting: padded.PeerSetting, sequences: list) -> None:
    expected = encode.packhorse_engine(setting.folder, "fp32", CPU).run(sequences, "sorted")
    peer = padded.transformers(setting, "fp32")
    for order in peer.orders:
        assert np.abs(peer.run(sequences, order) - expected).max() < 1e-5
    wrong = workloads.sequences(np.array([len(s) for s in sequences]), 2048, ends=(2, 3), seed=9)
    assert np.abs(peer.run(wrong, "sorted") - expected).max() > 1e-2


def test_unserved(setting: padded.PeerSetting) -> None:
    pytest.importorskip("openvino")
    with pytest.raises(peers.Unserved, match="not in fp16"):
        peers.openvino(setting, "fp16")


TEXTS = ["A man eats.", "Someone eats a meal of bread and cheese.", "The stock market fell today."]


def test_texts_are_tokenized_inside(setting: padded.PeerSetting) -> None:
    """By ours and by a peer alike; sentence-transformers goes through its own `encode`."""
    pytest.importorskip("sentence_transformers")
    packhorse_engine = encode.packhorse_engine(setting.folder, "fp32", CPU)
    expected = packhorse_engine.run(TEXTS, "sorted")
    assert np.abs(packhorse_engine.run(TEXTS, "arrival") - expected).max() < 1e-6
    sentences = peers.sentence_transformers(setting, "fp32")
    assert sentences.orders == ("sorted",)
    for engine in (padded.transformers(setting, "fp32"), sentences):
        assert np.abs(engine.run(TEXTS, "sorted") - expected).max() < 1e-5
    with pytest.raises(peers.Unserved, match="takes texts"):
        sentences.run(workloads.sequences(np.array([5]), 2048, ends=(2, 3)), "sorted")


def test_onnxruntime_runs_a_graph_that_it_fused_itself(setting: padded.PeerSetting) -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    graph = onnx.load(peers.fused_onnx(setting)).graph
    fused = [node.op_type for node in graph.node]
    assert fused.count("Attention") == 2 and fused.count("SkipLayerNormalization") == 4
    assert "Softmax" not in fused


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in peers.PEERS if n != "transformers"])
def test_every_peer_agrees(name: str, setting: padded.PeerSetting, sequences: list) -> None:
    pytest.importorskip(name.replace("-", "_"))
    sequences = TEXTS if name == "sentence-transformers" else sequences
    expected = encode.packhorse_engine(setting.folder, "fp32", CPU).run(sequences, "sorted")
    for dtype, least in (("fp32", 0.99999), ("int8", 0.99)):
        if dtype == "int8" and name not in peers.INT8:
            continue
        if dtype == "int8" and name == "openvino":
            pytest.importorskip("nncf")
        engine = peers.PEERS[name](setting, dtype)
        for order in engine.orders:
            assert (engine.run(sequences, order) * expected).sum(1).min() > least


def test_hushed_ends(caplog: pytest.LogCaptureFixture) -> None:
    with padded.silence_libraries():
        logging.getLogger("x").warning("not heard")
        warnings.warn("not an error", stacklevel=1)
    logging.getLogger("x").warning("heard")
    assert [record.message for record in caplog.records] == ["heard"]
    with pytest.raises(UserWarning):
        warnings.warn("an error again", stacklevel=1)
