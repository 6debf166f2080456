"""Vectors of whole lists: to the bit those of the jobs, whatever the texts and the pieces."""

from __future__ import annotations

import copy
import threading
from collections import deque
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import packhorse
from packhorse.errors import InputError
from packhorse.runtime import bulk
from packhorse.runtime.encoder import Encoder, TruncationWarning
from packhorse.tokens.tokenizer import Tokenizer

TEXTS = [
    "A man is eating food.",
    "",
    "Caf\u00e9 na\u00efve \u4f60\u597d",
    "the [MASK] of a [SEP] token",
    "word " * 300,
    "x" * 5000,
    "tail of blanks" + " " * 4000,
    "control \x00 character",
    *(f"text {number} " * (1 + 7 * number % 23) for number in range(40)),
]


@pytest.fixture(scope="module")
def encoder(minilm: Path) -> Encoder:
    return packhorse.load(minilm)


def by_jobs(encoder: Encoder, texts: list[str], **options: object) -> np.ndarray:
    return np.stack(encoder._finish(encoder.prepare("embed", texts, **options), None))


@pytest.fixture(params=["wordpiece", "library"])
def tokenizer(request: pytest.FixtureRequest, minilm: Path, monkeypatch) -> Tokenizer:
    if request.param == "library":
        monkeypatch.setattr("packhorse.tokens.tokenizer.AsciiWordPiece.of", lambda library: None)
    return Tokenizer.load(minilm)


@pytest.mark.parametrize("limit", [3, 20, 256])
def test_flat_encodings_are_the_encodings(tokenizer: Tokenizer, limit: int) -> None:
    flat = tokenizer.encode_flat(TEXTS, limit)
    expected = tokenizer.encode(TEXTS, limit)
    assert len(flat) == len(TEXTS)
    assert np.diff(flat.bounds).tolist() == [len(encoding) for encoding in expected]
    assert np.array_equal(flat.ids, np.concatenate([encoding.ids for encoding in expected]))
    assert flat.types is None
    assert flat.truncated == sum(bool(encoding.truncated) for encoding in expected) > 0
    other = tokenizer.encode([*TEXTS[:-1], "another last text"], limit)  # the control
    assert not np.array_equal(flat.ids, np.concatenate([encoding.ids for encoding in other]))


def test_token_types_of_a_template(tokenizer: Tokenizer) -> None:
    first = tokenizer._templates[False]._replace(types=(1, 0, 2))
    types = first.flat_types(np.array([2, 5]))
    assert types is not None and types.tolist() == [1, 2, 1, 0, 0, 0, 2]


def test_no_texts(tokenizer: Tokenizer) -> None:
    flat = tokenizer.encode_flat([])
    assert len(flat) == 0 and flat.bounds.tolist() == [0]


@pytest.mark.parametrize("normalize", [None, True, False])
def test_vectors_are_to_the_bit_those_of_jobs(encoder: Encoder, normalize: bool | None) -> None:
    vectors = encoder.embed(TEXTS, long="truncate", normalize=normalize)
    jobs = by_jobs(encoder, TEXTS, long="truncate", normalize=normalize)
    assert np.array_equal(vectors, jobs)
    assert not np.array_equal(vectors, jobs[::-1])


@pytest.mark.parametrize("pooled", [True, False])
def test_prompts_that_are_pooled_or_not(encoder: Encoder, pooled: bool) -> None:
    head = copy.copy(encoder.embedder)
    assert head is not None
    head.include_prompt = pooled
    prompted = replace(encoder, prompts={"query": "what is "}, embedder=head)
    texts = ["hello world", "a mule carries sacks to market", ""]
    vectors = prompted.embed(texts, prompt="query")
    assert np.array_equal(vectors, by_jobs(prompted, texts, prompt="query"))
    by_hand = encoder.embed([f"what is {text}" for text in texts])
    assert np.allclose(vectors, by_hand, atol=1e-6) is pooled


def test_many_pieces_are_in_order(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = encoder.embed(TEXTS, long="truncate")
    monkeypatch.setattr(bulk, "PIECE_CHARACTERS", 100)
    assert len(bulk._pieces(TEXTS)) > 10
    seen: list[int] = []
    pieces = encoder.embed(TEXTS, long="truncate", progress=lambda count, _: seen.append(count))
    assert np.abs(whole - pieces).max() <= 1e-6
    assert seen == sorted(seen) and seen[-1] == len(TEXTS)


@pytest.mark.parametrize("size", [1, 50, 10**6])
def test_pieces_are_all_of_the_list(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(bulk, "PIECE_CHARACTERS", size)
    pieces = bulk._pieces(TEXTS)
    assert [text for piece in pieces for text in TEXTS[piece]] == TEXTS
    assert all(TEXTS[piece] for piece in pieces)


def test_pieces_are_tokenized_ahead_in_order(tokenizer: Tokenizer) -> None:
    threads: set[str] = set()

    def tokenize(piece: slice):
        threads.add(threading.current_thread().name)
        return tokenizer.encode_flat(TEXTS[piece])

    pieces = [slice(i, i + 5) for i in range(0, len(TEXTS), 5)]
    encoded = list(bulk._ahead(tokenize, pieces))
    assert [flat.ids.tolist() for flat in encoded] == [tokenize(p).ids.tolist() for p in pieces]
    assert any(name.startswith("packhorse-tokenize") for name in threads)

    def fail(piece: slice):
        raise InputError(f"piece {piece.start}")

    with pytest.raises(InputError, match="piece 0"):
        list(bulk._ahead(fail, pieces))
    some = bulk._ahead(tokenize, pieces)
    next(some)
    some.close()  # the thread ends with a caller who stops


def test_what_it_says_about_texts(encoder: Encoder) -> None:
    with pytest.warns(TruncationWarning, match="1 of 48 texts were cut to 256 tokens") as caught:
        encoder.embed(TEXTS)
    assert caught[0].filename == __file__
    with pytest.raises(InputError, match="text 2 is not Unicode"):
        encoder.embed(["a", "b", "\ud800"])
    with pytest.raises(InputError, match="has no prompt 'poem'"):
        encoder.embed(["a", "b"], prompt="poem")
    with pytest.raises(InputError, match="max_length is 999"):
        encoder.embed(["a", "b"], max_length=999)


def test_texts_that_cannot_be_sliced(encoder: Encoder) -> None:
    texts = dict.fromkeys(TEXTS[:3])
    expected = encoder.embed([*texts])
    assert not np.array_equal(expected[0], expected[2])
    for same in (texts.keys(), deque(texts), np.array([*texts])):
        assert np.array_equal(encoder.embed(same), expected)
