"""Requests of known size: exactly so many tokens, by the tokenizer that the server has."""

from __future__ import annotations

from pathlib import Path

import pytest

from packhorse.errors import InputError
from packhorse.runtime.loading import load
from packhorse.tokens.tokenizer import NO_LIMIT, Tokenizer
from packhorse_bench.serving_texts import Shape, exact_texts, learn_vocabulary, requests

SENTENCES = (
    "A packhorse carries its load over hills that no cart can climb.",
    "Loads are packed, repacked and unpacked; packers know which sacks go together.",
    "Carrying uncommonly long words, such as antidisestablishmentarianism, is unpleasant!",
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("vocabulary")
    learn_vocabulary(SENTENCES, 120, folder / "vocab.txt")
    return Tokenizer.load(folder)


@pytest.mark.parametrize("tokens", [3, 12, 50])
def test_texts_have_exactly_so_many_tokens(tokenizer: Tokenizer, tokens: int) -> None:
    words = " ".join(SENTENCES).split()
    texts = exact_texts(tokens, 40, tokenizer, words)
    assert len(texts) == 40
    assert {len(encoding) for encoding in tokenizer.encode(texts, NO_LIMIT)} == {tokens}
    assert texts == exact_texts(tokens, 40, tokenizer, words)
    assert texts != exact_texts(tokens, 40, tokenizer, words, seed=1)


def test_a_learned_vocabulary_has_pieces_of_words_and_no_unknown_one(tokenizer: Tokenizer) -> None:
    """So a word costs several look-ups, as with a vocabulary that was learned from much more."""
    (encoding,) = tokenizer.encode([SENTENCES[2]], NO_LIMIT)
    pieces = [tokenizer.token(int(number)) for number in encoding.ids]
    assert "[UNK]" not in pieces and any(piece.startswith("##") for piece in pieces)


def test_requests_of_several_texts(tiny_folder: Path) -> None:
    tokenizer = load(tiny_folder, device="cpu").tokenizer
    words = [f"w{number}" for number in range(50)]
    many = requests(Shape(10, 4), tokenizer, words, 80)
    assert len(many) == 20 and all(isinstance(texts, list) and len(texts) == 4 for texts in many)
    single = requests(Shape(10, 1), tokenizer, words, 80)
    assert len(single) == 80 and all(isinstance(text, str) for text in single)


def test_texts_without_a_word_are_refused(tiny_folder: Path) -> None:
    tokenizer = load(tiny_folder, device="cpu").tokenizer
    with pytest.raises(InputError, match="no word"):
        exact_texts(10, 1, tokenizer, [])
    with pytest.raises(InputError, match="could be cut to 10 tokens"):
        exact_texts(10, 1, tokenizer, ["\u200b"])  # a space of no width is no token


def test_shapes_are_parsed() -> None:
    shape = Shape.parse(" 50x16")
    assert shape == Shape(50, 16) and str(shape) == "50x16" and shape.all_tokens == 800


@pytest.mark.parametrize("text", ["50", "50x", "x16", "50*16", "2x1", "50x0", "-5x1"])
def test_what_is_no_shape_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=f"--shape {text}".replace("*", r"\*")):
        Shape.parse(text)
