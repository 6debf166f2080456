"""Number types, base64 and prompts by purpose, whichever dialect asks for them."""

from __future__ import annotations

import asyncio
import base64
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from packhorse.errors import InputError
from packhorse.runtime.precision import calibrate, quantize
from packhorse.serve.dialects import vectors
from packhorse.serve.failures import UnknownModel

TEXTS = ["the cat sat", "a red hat", "horse and mule"]


def some_vectors(rng: np.random.Generator, count: int = 120, width: int = 16) -> np.ndarray:
    return rng.normal(size=(count, width)).astype(np.float32)


@pytest.mark.parametrize("endianness", ["native", "little", "big"])
def test_base64(rng: np.random.Generator, endianness: Any) -> None:
    vector = some_vectors(rng)[0]
    order = ">" if endianness == "big" else "<"
    for name in ("float32", "float16"):
        content = base64.b64decode(vectors.to_base64(vector, name, endianness))
        expected = vector.astype(name)
        assert (np.frombuffer(content, expected.dtype.newbyteorder(order)) == expected).all()
    content = base64.b64decode(vectors.to_base64(vector, "bfloat16", endianness))
    expected = torch.from_numpy(vector).bfloat16().view(torch.int16).numpy()
    assert (np.frombuffer(content, f"{order}i2") == expected).all()
    signed = np.array([-128, 0, 127], np.int8)
    assert base64.b64decode(vectors.to_base64(signed, "float16", endianness)) == b"\x80\x00\x7f"


def with_prompts(*names: str) -> Any:
    return SimpleNamespace(encoder=SimpleNamespace(prompts=dict.fromkeys(names, "some: ")))


@pytest.mark.parametrize(
    ("prompts", "purpose", "name"),
    [
        ((), None, None),
        (("query",), None, None),
        (("query", "passage"), "search_query", "query"),
        (("query", "passage"), "search_document", "passage"),
        (("query", "passage"), "retrieval.passage", "passage"),
        (("search_query", "search_document"), "query", "search_query"),
        (("document", "passage"), "passage", "passage"),
        (("query",), "document", ""),
        (("classification",), "classification", "classification"),
        (("query",), "clustering", None),
        ((), "query", ""),
    ],
)
def test_prompts_by_purpose(prompts: Any, purpose: Any, name: Any) -> None:
    assert vectors.choose_prompt(with_prompts(*prompts), purpose) == name


def test_calibration_files(server, tmp_path, rng) -> None:
    first = calibrate(some_vectors(rng))
    second = first * 2
    np.save(tmp_path / "first.npy", first)
    np.save(tmp_path / "second.npy", second)
    entries = [str(tmp_path / "first.npy"), f"tiny={tmp_path / 'second.npy'}"]
    ranges = vectors.load_calibration(entries, server.models)
    assert (ranges["mini"] == first).all() and (ranges["tiny"] == second).all()
    with pytest.raises(UnknownModel, match="there are: mini"):
        vectors.load_calibration([f"nobody={tmp_path / 'first.npy'}"], server.models)
    with pytest.raises(InputError, match="not an array"):
        vectors.load_calibration([str(tmp_path / "third.npy")], server.models)


@pytest.mark.parametrize("numbers", ["int8", "uint8", "binary", "ubinary"])
def test_a_vector_does_not_depend_on_its_neighbors(server, rng, numbers: Any) -> None:
    """A request of one input, of many, and with one that is a thousand times as large."""
    model = server.models.find("tiny")
    rows = list(some_vectors(rng))
    together = vectors.quantize_vectors(model, rows, numbers, {})
    rows[1:] = [1000 * row for row in rows[1:]]
    others = vectors.quantize_vectors(model, rows, numbers, {})
    (alone,) = vectors.quantize_vectors(model, rows[:1], numbers, {})
    assert (alone == together[0]).all() and (alone == others[0]).all()
    # The control: ranges of the vectors themselves depend on all of them.
    if numbers.endswith("int8"):
        dependent = [quantize(np.stack(some), numbers)[0] for some in (rows, rows[:100] * 2)]
        assert (dependent[0] != dependent[1]).any()


def test_calibrated_server(listen, encoders, tmp_path) -> None:
    """The bytes of a server with calibration are those of `Encoder.encode` with the same ranges."""
    import httpx

    encoder = encoders["tiny"]
    sample = encoder.embed([f"{a} {b}" for a in TEXTS for b in TEXTS] * 12)
    ranges = calibrate(sample)
    np.save(tmp_path / "ranges.npy", ranges)
    server = listen({"tiny": encoder}, calibration=(str(tmp_path / "ranges.npy"),))
    for numbers in ("int8", "uint8"):
        body = {"input": TEXTS, "output_dtype": numbers}
        answer = httpx.post(f"{server.url}/v1/embeddings", json=body).json()
        expected = encoder.embed(TEXTS, precision=numbers, ranges=ranges)
        actual = [row["embedding"] for row in answer["data"]]
        # By one step where a number lies on the edge between two: batches differ in rounding.
        assert abs(np.array(actual) - expected.astype(int)).max() <= 1
    short = httpx.post(f"{server.url}/v1/embeddings", json=body | {"dimensions": 8})
    assert short.status_code == 422
    assert "for 96 dimensions, these vectors have 8" in short.json()["error"]["message"]


def test_no_prompt_is_not_the_default_prompt(listen, encoders) -> None:
    """A model whose default prompt is for queries: documents have none."""
    import httpx

    encoder = replace(encoders["tiny"], default_prompt="query")
    server = listen({"tiny": encoder})
    plain, query = encoders["tiny"].embed(["the cat"]), encoder.embed(["the cat"])
    assert not np.allclose(plain, query, atol=1e-3)
    for fields, expected in [({}, query), ({"task": "retrieval.passage"}, plain)]:
        answer = httpx.post(f"{server.url}/v1/embeddings", json={"input": "the cat"} | fields)
        assert np.allclose(answer.json()["data"][0]["embedding"], expected[0], atol=1e-6)


def test_long_base64_is_written_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts that end between groups of three bytes; short ones stay, as a thread costs more."""
    threads: list[int] = []
    write = vectors.to_base64

    def recorded(*arguments: Any) -> str:
        threads.append(threading.get_ident())
        return write(*arguments)

    monkeypatch.setattr(vectors, "to_base64", recorded)
    rng = np.random.default_rng(0)
    wide = rng.standard_normal((2, vectors.BASE64_PART // 4 + 1), np.float32)
    for arrays, is_inline in ((list(wide), False), ([wide[0][:100]], True)):
        threads.clear()
        written = asyncio.run(vectors.base64_texts(arrays))
        assert written == [base64.b64encode(array.tobytes()).decode() for array in arrays]
        assert [thread == threading.get_ident() for thread in threads] == [is_inline] * len(arrays)
