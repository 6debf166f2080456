"""Models in float8: how near to fp32 they stay on real texts, and who may choose them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import packhorse
from packhorse.device import FLOAT8
from packhorse.runtime import quality
from packhorse.runtime.encoder import Encoder


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Paragraphs of Python's own manual, of all lengths: real prose that every machine has."""
    from pydoc_data.topics import topics

    paragraphs = [" ".join(part.split()) for text in topics.values() for part in text.split("\n\n")]
    return [text for text in dict.fromkeys(paragraphs) if 30 < len(text) < 300][:60]


@pytest.fixture(scope="module")
def exact(minilm: Path) -> Encoder:
    return packhorse.load(minilm, device="cpu", dtype="fp32")


@pytest.fixture(scope="module")
def encoder(minilm: Path) -> Encoder:
    return packhorse.load(minilm, device="cpu", dtype="float8")


def test_real_texts_stay_near_fp32(encoder: Encoder, exact: Encoder, texts: list[str]) -> None:
    report = quality.compare(encoder.embed(texts), exact.embed(texts))
    assert report.cosine_mean >= 0.995 and report.cosine_min >= 0.985
    assert report.top10_mixed >= 0.93
    assert report.cosine_mean < 0.9999  # and float8 is not fp32


def test_a_text_is_the_same_in_every_batch(encoder: Encoder, texts: list[str]) -> None:
    """Alone and among others sums are rounded differently, which may move a number to the next
    float8: far less than a scale taken from the batch would.
    """
    some = texts[:12]
    together = encoder.embed(some)
    alone = np.concatenate([encoder.embed([text]) for text in some])
    assert (together * alone).sum(1).min() > 0.9999


def test_invariant_models_may_be_float8(minilm: Path, texts: list[str]) -> None:
    encoder = packhorse.load(minilm, device="cpu", dtype="float8", invariant=True, budget=512)
    together = encoder.embed(texts[:8])
    assert np.array_equal(encoder.embed(texts[3:4])[0], together[3])


def test_the_dtype_is_told_and_part_of_the_fingerprint(encoder: Encoder, exact: Encoder) -> None:
    assert encoder.dtype == FLOAT8 and "float8" in repr(encoder)
    assert encoder.fingerprint_parts().differences(exact.fingerprint_parts()) == ["dtype"]


def test_auto_never_chooses_float8(minilm: Path) -> None:
    assert packhorse.load(minilm, device="cpu", dtype="auto").dtype != FLOAT8


def test_a_model_of_other_layers_runs_in_float8(tmp_path: Path) -> None:
    """What has no fused layer (norms before, gates, shared keys) has its linear layers replaced."""
    from packhorse import attention
    from packhorse.model import float8_inference
    from packhorse.model.bert import Bert
    from packhorse.model.config import BertConfig
    from packhorse.packing.batch import Packed
    from packhorse.runtime.invariant import SyntheticSequence

    config = BertConfig(
        300,
        hidden_size=64,
        layers=2,
        heads=4,
        intermediate_size=96,
        norm_first=True,
        gated=True,
        rotary_base=10_000.0,
    )
    torch.manual_seed(0)
    bert = Bert(config, attention.kernel("reference")).eval()
    ids = np.arange(24) * 7 % 300
    packed = Packed.build([SyntheticSequence(ids, ids * 0)])
    with torch.inference_mode():
        exact = bert(packed)
        float8_inference.use_float8(bert, float8_inference.calibrate(bert, [packed]))
        rounded = bert(packed)
    products = [m for m in bert.modules() if isinstance(m, float8_inference.Float8Product)]
    assert len(products) == 8
    assert 0.97 < float(torch.nn.functional.cosine_similarity(exact, rounded).min()) < 0.99999
