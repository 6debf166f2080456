"""Vectors of chunks that were read together: transformers' states are the measure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import packhorse
from packhorse.errors import CheckpointError, InputError
from packhorse.runtime.encoder import Encoder
from packhorse.runtime.runner import PackRunner

CHUNKS = [
    "Berlin is the capital.",
    "The city has 3.8 million people,",
    "naïve 東京",
    "and it grows!",
]


@pytest.fixture(scope="module")
def encoder(minilm: Path) -> Encoder:
    return packhorse.load(minilm, device="cpu", dtype="fp32")


@pytest.fixture(scope="module")
def states(minilm: Path) -> Any:
    """The states and offsets that transformers has for a text."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm)
    model = transformers.AutoModel.from_pretrained(minilm).eval()

    def read(text: str) -> tuple[np.ndarray, np.ndarray]:
        inputs = tokenizer(text, return_tensors="pt", return_offsets_mapping=True)
        offsets = inputs.pop("offset_mapping")[0].numpy()
        with torch.no_grad():
            return model(**inputs).last_hidden_state[0].numpy(), offsets

    return read


def expected_vectors(hidden: np.ndarray, offsets: np.ndarray, chunks: list[str]) -> np.ndarray:
    """Average by a plain loop; [CLS] belongs to the first chunk and [SEP] to the last."""
    vectors = []
    start = 0
    for number, chunk in enumerate(chunks):
        end = start + len(chunk)
        rows = [
            row
            for row, (begin, stop) in zip(hidden, offsets, strict=True)
            if start <= begin < stop <= end
        ]
        if number == 0:
            rows.append(hidden[0])
        if number == len(chunks) - 1:
            rows.append(hidden[-1])
        vectors.append(np.mean(rows, axis=0))
        start = end + 1
    return np.stack(vectors)


def normalized(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def test_chunks_are_averages_of_the_whole_text(encoder: Encoder, states: Any) -> None:
    hidden, offsets = states(" ".join(CHUNKS))
    expected = expected_vectors(hidden, offsets, CHUNKS)
    raw = encoder.embed(CHUNKS, late_chunking=True, normalize=False)
    assert np.allclose(raw, expected, atol=1e-5)
    assert np.allclose(encoder.embed(CHUNKS, late_chunking=True), normalized(expected), atol=1e-5)
    # The control: chunks that are read alone have other vectors.
    assert not np.allclose(encoder.embed(CHUNKS), normalized(expected), atol=1e-2)


def test_a_runner_does_not_take_chunks_apart(encoder: Encoder) -> None:
    with PackRunner(encoder) as runner, pytest.raises(InputError, match=r"use Encoder\.embed"):
        runner.run(CHUNKS, late_chunking=True)


def test_one_chunk_is_the_text(encoder: Encoder) -> None:
    for prompt in ("", "query"):
        model = replace(encoder, prompts={"query": "query: "})
        alone = model.embed(CHUNKS[:1], late_chunking=True, prompt=prompt)
        assert np.allclose(alone, model.embed(CHUNKS[:1], prompt=prompt), atol=1e-6)
    assert encoder.embed([], late_chunking=True).shape == (0, 384)


def test_a_prompt_is_read_before_the_first_chunk(encoder: Encoder, states: Any) -> None:
    model = replace(encoder, prompts={"query": "query: "})
    hidden, offsets = states("query: " + " ".join(CHUNKS))
    with_prompt = ["query: " + CHUNKS[0], *CHUNKS[1:]]
    expected = normalized(expected_vectors(hidden, offsets, with_prompt))
    actual = model.embed(CHUNKS, late_chunking=True, prompt="query")
    assert np.allclose(actual, expected, atol=1e-5)
    # Left out of the average where the model says so: [CLS], `query` and `:`.
    head: Any = SimpleNamespace(normalize=True, include_prompt=False, is_average=True)
    outside = replace(model, embedder=head).embed(CHUNKS, late_chunking=True, prompt="query")
    end = len(CHUNKS[0]) + len("query: ")
    rows = [
        row for row, (begin, stop) in zip(hidden, offsets, strict=True) if 6 < begin < stop <= end
    ]
    assert np.allclose(outside[:1], normalized(np.mean(rows, axis=0)[None]), atol=1e-5)
    assert np.allclose(outside[1:], expected[1:], atol=1e-5)


def test_refusals(encoder: Encoder) -> None:
    with pytest.raises(InputError, match=r"all inputs are read together, and .* takes 256 tokens"):
        encoder.embed(["one two three " * 40] * 3, late_chunking=True)
    with pytest.raises(InputError, match="input 1 has no token"):
        encoder.embed(["a", " ", "b"], late_chunking=True)
    with pytest.raises(InputError, match="input 0 has no token"):
        prompted = replace(encoder, prompts={"query": "query: "})
        prompted.embed([" ", "b"], late_chunking=True, prompt="query")
    pairs: Any = [("a", "b")]
    with pytest.raises(InputError, match="late chunking takes single texts"):
        encoder.embed(pairs, late_chunking=True)
    head: Any = SimpleNamespace(normalize=True, include_prompt=True, is_average=False)
    for embedder in (None, head):
        with pytest.raises(CheckpointError, match="use a model with mean pooling"):
            replace(encoder, embedder=embedder).embed(["a"], late_chunking=True)
