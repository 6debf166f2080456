"""The reference in lists keeps to its definition; what is fast is tested against it elsewhere."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import tokenizers as tk

from packhorse.data.packed.masking import Recipe
from packhorse_bench import list_examples

TEXTS = [
    "The cats' unaffable walk; isn't it 3.14?",
    "",
    "naïve Café E\u0301COLE 中文字cat \ufffd\0\x7f tab\tnewline\n",
    "x" * 100 + " " + "x" * 101,
]
WORDS = ["the", "cat", "##s", "un", "##aff", "##able", "walk", "naive", "cafe", "ecole", "中", "is"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
VOCABULARY = {
    word: number for number, word in enumerate([*SPECIAL, *WORDS, *".,;'?314nxt", "##x", "##t"])
}


@pytest.mark.parametrize("lower", [True, False])
def test_word_pieces_are_the_librarys(lower: bool) -> None:
    library = tk.Tokenizer(tk.models.WordPiece(VOCABULARY, unk_token="[UNK]"))
    library.normalizer = tk.normalizers.BertNormalizer(lowercase=lower)
    library.pre_tokenizer = tk.pre_tokenizers.BertPreTokenizer()
    expected = [encoding.tokens for encoding in library.encode_batch(TEXTS)]
    assert list_examples.word_pieces(VOCABULARY, lower)(TEXTS) == expected
    assert "##aff" in str(expected) and "[UNK]" in str(expected)


def test_word_pieces_of_a_real_text(shared_data: Path) -> None:
    from packhorse.tokens.files import open_library

    library, _ = open_library(shared_data / "vocab" / "bert-base-uncased-vocab.txt", {})
    library.encode_special_tokens = True
    texts = (shared_data / "text" / "wikitext-2-valid.txt").read_text("utf-8").splitlines()[:600]
    expected = [e.tokens for e in library.encode_batch(texts, add_special_tokens=False)]
    assert list_examples.word_pieces(library.get_vocab())(texts) == expected


def test_examples_and_rows() -> None:
    documents = [[[f"{d}.{s}.{t}" for t in range(7)] for s in range(9)] for d in range(4)]
    recipe = Recipe(max_length=32, duplicates=2, max_predictions=3)
    tokens = [token for document in documents for sentence in document for token in sentence]
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *tokens])}
    examples = list_examples.make(documents, vocabulary, recipe, seed=0)
    assert {example.random_next for example in examples} == {True, False}
    for example in examples:
        assert example.tokens[0] == "[CLS]" and example.tokens.count("[SEP]") >= 2
        assert len(example.types) == len(example.tokens) <= 32
        assert len(example.masked_at) == min(3, max(1, round(len(example.tokens) * 0.15)))
    first, second = examples[:2]
    (row,) = list_examples.lay(examples, [[0, 1]], vocabulary, capacity=70)
    here, there = len(first.tokens), len(second.tokens)
    assert row.ids[:here] == [vocabulary[token] for token in first.tokens]
    assert row.members == [1] * here + [2] * there + [0] * (70 - here - there)
    assert row.positions[here : here + there] == list(range(there))
    assert row.masked_at[-1] == here + second.masked_at[-1]
    assert row.masked_ids[-1] == vocabulary[second.masked[-1]]
    assert row.next_labels == [first.random_next, second.random_next]
    assert {len(x) for x in (row.ids, row.types, row.positions, row.members)} == {70}


def test_empty_sentences_and_documents_are_left_out() -> None:
    split = list_examples.tokenized([["a b", ""], [""], []], lambda d: [s.split() for s in d])
    assert split == [[["a", "b"]]]


def test_whole_words_keep_together() -> None:
    tokens = ["[CLS]", "un", "##aff", "##able", "[SEP]", "##s", "cat", "[SEP]"]
    recipe = Recipe(whole_words=True, mask_probability=0.4)
    for seed in range(50):
        at, masked = list_examples.mask([*tokens], recipe, WORDS, random.Random(seed))
        assert set(at) in ({1, 2, 3}, {5, 6}) and masked == [tokens[place] for place in at]
