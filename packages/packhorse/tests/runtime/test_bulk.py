"""Results of whole lists: to the bit those of the jobs, whatever the texts and the pieces."""

from __future__ import annotations

import copy
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import packhorse
from packhorse.errors import InputError
from packhorse.runtime import bulk
from packhorse.runtime.encoder import Encoder, TruncationWarning
from packhorse.tokens.tokenizer import Tokenizer

from . import retrieval_models as models

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


PAIRS = [
    *zip(TEXTS, [*TEXTS[9:], *TEXTS[:9]], strict=True),
    *((f"short {i}", "word " * 100) for i in range(1, 60, 7)),
    *(("word " * 100, "short " * i) for i in range(1, 60, 7)),
    *(("word " * i, "other " * (60 - i)) for i in range(1, 60, 3)),  # about as long, and cut
]


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


@pytest.mark.parametrize("limit", [4, 5, 20, 40, 41, 256])
def test_flat_pairs_are_the_pairs(tokenizer: Tokenizer, limit: int) -> None:
    flat = tokenizer.encode_flat(PAIRS, limit)
    expected = tokenizer.encode(PAIRS, limit)
    assert np.diff(flat.bounds).tolist() == [len(encoding) for encoding in expected]
    assert np.array_equal(flat.ids, np.concatenate([encoding.ids for encoding in expected]))
    types = np.concatenate([encoding.types for encoding in expected])
    assert flat.types is not None and np.array_equal(flat.types, types) and types.any()
    assert flat.truncated == sum(bool(encoding.truncated) for encoding in expected) > 0
    turned = tokenizer.encode_flat([(b, a) for a, b in PAIRS], limit)  # the control
    assert not np.array_equal(flat.ids, turned.ids)


@pytest.mark.parametrize("pairs", [False, True])
def test_a_marker_is_behind_the_first_token(tokenizer: Tokenizer, pairs: bool) -> None:
    texts: Any = PAIRS if pairs else TEXTS
    flat = tokenizer.encode_flat(texts, 20, marker=7)
    expected = [np.insert(encoding.ids, 1, 7) for encoding in tokenizer.encode(texts, 20)]
    assert np.array_equal(flat.ids, np.concatenate(expected))
    assert np.diff(flat.bounds).tolist() == list(map(len, expected))
    assert tokenizer.starts_special


def test_token_types_of_a_template(tokenizer: Tokenizer) -> None:
    first = tokenizer._templates[False]._replace(types=(1, 0, 2))
    types = first.flat_types(np.array([0, 3]))
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


# Other tasks ------------------------------------------------------------------------------------


def as_jobs(encoder: Encoder, call: Callable[[Encoder], Any], monkeypatch: Any) -> Any:
    """What a method returns if every text goes its own way."""
    with monkeypatch.context() as patch:
        patch.setattr(bulk, "serves", lambda *texts, **options: False)
        return call(encoder)


def same(first: Any, second: Any) -> bool:
    """Equal to the bit, arrays in lists and matrices of scipy too."""
    if hasattr(first, "indptr"):
        return all(
            np.array_equal(getattr(first, name), getattr(second, name))
            and getattr(first, name).dtype == getattr(second, name).dtype
            for name in ("data", "indices", "indptr")
        ) and bool(first.shape == second.shape)
    if isinstance(first, list) and first and isinstance(first[0], np.ndarray):
        return len(first) == len(second) and all(map(np.array_equal, first, second))
    return bool(first == second)


@pytest.mark.parametrize("problem", ["single_label", "multi_label", "regression", "raw"])
@pytest.mark.parametrize("pairs", [False, True])
def test_labels_are_to_the_bit_those_of_jobs(
    problem: str, pairs: bool, tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = packhorse.load(tiny("classify"))
    texts: Any = PAIRS if pairs else TEXTS

    def classify(encoder: Encoder) -> Any:
        return encoder.classify(texts, long="truncate", problem=problem)

    labels = classify(encoder)
    assert bulk.serves(encoder, texts, "truncate", pairs=True)
    assert same(labels, as_jobs(encoder, classify, monkeypatch))
    assert [list(label.scores) for label in labels] == [
        list(label.scores) for label in as_jobs(encoder, classify, monkeypatch)
    ]
    assert not same(labels, labels[::-1])


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("top_k", [None, 5])
def test_rankings_are_to_the_bit_those_of_jobs(
    raw: bool, top_k: int | None, tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = packhorse.load(tiny("rerank"))

    def rerank(encoder: Encoder) -> Any:
        return encoder.rerank("a good mule", TEXTS, top_k=top_k, long="truncate", raw=raw)

    ranked = rerank(encoder)
    assert same(ranked, as_jobs(encoder, rerank, monkeypatch)) and len(ranked) == (top_k or 48)
    with pytest.warns(TruncationWarning) as caught:
        encoder.rerank("a good mule", TEXTS)
    assert caught[0].filename == __file__


def test_what_goes_text_by_text(encoder: Encoder) -> None:
    mixed = ["a text", ("a", "pair")]
    assert not bulk.serves(encoder, mixed, None, pairs=True)
    assert not bulk.serves(encoder, PAIRS, None)
    assert not bulk.serves(encoder, TEXTS, "chunk", pairs=True)
    framed: Any = object()  # a model's own words around a pair
    assert not bulk.serves(replace(encoder, pair_template=framed), PAIRS, None, pairs=True)
    assert bulk.serves(replace(encoder, pair_template=framed), TEXTS, None, pairs=True)


@pytest.fixture(scope="module")
def retrieval(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Encoder]]:
    """A SPLADE model, a ColBERT, and one with the weights of tokens."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("transformers").logging.disable_progress_bar()
        pytest.importorskip("sentence_transformers")
        home = tmp_path_factory.mktemp("models")
        base = models.bert(home / "mlm")
        bare = models.bert(home / "bare", "BertModel")
        models.splade(base, home / "splade", "max", "relu")
        models.stanford(bare, home / "colbert")
        models.m3(bare, home / "m3")
        yield {name: packhorse.load(home / name) for name in ("splade", "colbert", "m3")}


@pytest.mark.parametrize("name", ["splade", "m3"])
@pytest.mark.parametrize("top_k", [None, 1, 3, 10**6])
def test_sparse_vectors_are_to_the_bit_those_of_jobs(
    name: str,
    top_k: int | None,
    retrieval: dict[str, Encoder],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encoder = retrieval[name]

    def sparse(encoder: Encoder) -> Any:
        return encoder.sparse(TEXTS, top_k=top_k, long="truncate")

    vectors = sparse(encoder)
    assert vectors.nnz and same(vectors, as_jobs(encoder, sparse, monkeypatch))
    assert not same(vectors, vectors[::-1])
    monkeypatch.setattr(bulk, "PIECE_CHARACTERS", 100)
    monkeypatch.setattr(bulk, "MOST_SPARSE", 3)
    assert abs(sparse(encoder) - vectors).max() <= 1e-5


@pytest.mark.parametrize("name", ["colbert", "m3"])
@pytest.mark.parametrize("query", [False, True])
def test_vectors_of_tokens_are_to_the_bit_those_of_jobs(
    name: str, query: bool, retrieval: dict[str, Encoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = retrieval[name]

    def multi(encoder: Encoder) -> Any:
        return encoder.multi(TEXTS, query=query, long="truncate")

    vectors = multi(encoder)
    assert same(vectors, as_jobs(encoder, multi, monkeypatch))
    assert len({len(tokens) for tokens in vectors}) > 1 or query
    assert not same(vectors, vectors[::-1])
