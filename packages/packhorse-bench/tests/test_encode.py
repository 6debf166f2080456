"""One run, one table: rows for all engines and orders, and for what failed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from packhorse.errors import InputError
from packhorse.reports import random_model
from packhorse_bench import encode, workloads

LENGTHS = workloads.draw("normal", 20, longest=48)


def request_for(**changes) -> encode.EncodeRequest:
    defaults = {"lengths": LENGTHS, "model": "", "config": "tiny", "repeats": 2, "batch_size": 4}
    return encode.EncodeRequest(**(defaults | {"peers": (), "budget": 256} | changes))


def test_rows_of_ours_and_a_peer() -> None:
    pytest.importorskip("transformers")
    progress = []
    request = request_for(dtypes=("fp32", "bf16"), peers=("transformers",))
    measured = encode.measure(request, lambda *at: progress.append(at))
    rows = measured.rows
    assert measured.lengths.tolist() == LENGTHS.tolist()
    keys = [(row.engine, row.dtype, row.order) for row in rows]
    assert keys == [
        (engine, dtype, order)
        for dtype in ("fp32", "bf16")
        for engine in ("packhorse", "transformers")
        for order in ("arrival", "sorted")
    ]
    assert progress == [(i, 20) for i in range(1, 21)]  # four engines opened, eight trials twice
    by_key = dict(zip(keys, rows, strict=True))
    for row in rows:
        base = by_key["transformers", row.dtype, "sorted"]
        ratio = row.sequences_per_second / base.sequences_per_second
        assert row.over_sorted == pytest.approx(ratio)
        assert row.tokens_per_second == pytest.approx(row.sequences_per_second * LENGTHS.mean())
        assert 0 < row.slowest <= row.sequences_per_second <= row.fastest
        assert row.cosine_min > (0.99999 if row.dtype == "fp32" else 0.999)
        assert row.cosine_min <= row.cosine_mean


@pytest.mark.parametrize("request_int8", [{"int8": True}, {"dtypes": ("fp32", "int8")}])
def test_int8_is_a_lane_of_ours(request_int8: dict) -> None:
    rows = encode.measure(request_for(**request_int8, graphs=False)).rows
    assert [(row.dtype, row.order) for row in rows] == [
        (dtype, order) for dtype in ("fp32", "int8") for order in ("arrival", "sorted")
    ]
    assert all(row.cosine_min > 0.999 for row in rows)


def test_passages_of_an_exact_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "DISTINCT", 16)
    texts = ("a mule carries sacks to the market", "the old horse is good with no load at all")
    request = request_for(lengths=None, texts=texts, tokens=9, count=300, repeats=1)
    measured = encode.measure(request)
    assert measured.lengths.tolist() == [9] * 300
    assert [row.order for row in measured.rows] == ["arrival", "sorted"]
    assert min(row.cosine_min for row in measured.rows) > 0.99999
    with pytest.raises(InputError, match="--tokens 600: the model takes 512"):
        encode.measure(replace(request, tokens=600))


def test_a_peer_that_fails_is_a_row() -> None:
    pytest.importorskip("openvino")
    rows = encode.measure(request_for(dtypes=("fp16",), peers=("openvino",), repeats=1)).rows
    assert [row.engine for row in rows if row.problem] == ["openvino"]
    assert rows[-1].problem == "computes in fp32 or bf16, not in fp16"
    assert [row.order for row in rows if not row.problem] == ["arrival", "sorted"]
    assert rows[0].over_sorted is None


def test_whatever_an_engine_raises_is_its_row() -> None:
    def explode() -> encode.PeerEngine:
        raise RuntimeError("the boiler burst\nat line 3")

    def missing() -> encode.PeerEngine:
        import a_library_nobody_has  # noqa: F401 # pyright: ignore

        raise AssertionError

    trials, failures = [], []
    for opener in (explode, missing):
        encode._warm_up(encode.Candidate("x", "fp32", opener), [], trials, failures)
    assert [row.problem for row in failures] == [
        "RuntimeError: the boiler burst",
        "a_library_nobody_has is not installed; pip install 'packhorse[peers]'",
    ]
    assert not trials


def test_arrival_cuts_and_keeps_the_order() -> None:
    sequences = workloads.sequences(LENGTHS, 2048)
    batches = list(encode.batches_in_arrival_order(sequences, 100))
    assert [s for batch in batches for s in batch] == sequences
    assert all(sum(map(len, batch)) <= 100 for batch in batches)
    assert [len(b) for b in encode.batches_in_arrival_order(sequences[:3], 1)] == [1, 1, 1]


def test_a_wrong_vector_shows_in_the_cosine(tiny_folder: Path) -> None:
    engine = encode.packhorse_engine(tiny_folder, "fp32", torch.device("cpu"))
    sequences = workloads.sequences(LENGTHS, 2048)
    exact = engine.run(sequences, "sorted")
    shuffled = encode.EncodeTrial(engine, "sorted", np.roll(exact, 1, axis=0), [1.0])
    right = encode.EncodeTrial(engine, "arrival", engine.run(sequences, "arrival"), [1.0])
    longer = encode.EncodeTrial(engine, "arrival", 1.01 * exact, [1.0])
    wrong_row, right_row, longer_row = encode._rows([shuffled, right, longer], exact, LENGTHS)
    assert wrong_row.cosine_min < 0.999 < right_row.cosine_min
    assert longer_row.cosine_mean == pytest.approx(1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 0}, "--batch-size 0"),
        ({"repeats": 0}, "--repeats 0"),
        ({"peers": ("keras",)}, "unknown peer 'keras'"),
        ({"dtypes": ("fp8",)}, "unknown dtype"),
        ({"config": "huge"}, "unknown configuration"),
        ({"lengths": np.array([600])}, "--max-length 512"),
    ],
)
def test_mistakes(changes: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        encode.measure(request_for(**changes))


def test_random_models_are_seeded(tmp_path: Path, tiny_folder: Path) -> None:
    again = random_model.write("tiny", tmp_path / "again")
    second_model = random_model.write("tiny", tmp_path / "other", seed=1)
    weights = [(f / "model.safetensors").read_bytes() for f in (tiny_folder, again, second_model)]
    assert weights[0] == weights[1] != weights[2]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's, about torch.jit
def test_compiled_peers() -> None:
    pytest.importorskip("transformers")
    request = request_for(peers=("transformers",), compile_peers=True, repeats=1)
    rows = {(row.engine, row.order): row for row in encode.measure(request).rows}
    for order in ("fixed", "sorted"):
        row = rows["transformers compiled", order]
        assert row.problem is None and row.cosine_min > 0.99999


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's, about torch.jit
def test_ours_compiled() -> None:
    rows = encode.measure(request_for(graphs=True, repeats=1)).rows
    assert [(row.engine, row.problem) for row in rows[2:]] == [("packhorse graphs", None)] * 2
    assert min(row.cosine_min for row in rows) > 0.99999
