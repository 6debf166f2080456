"""Tokens by the word are those of the library, for any text and however much is remembered."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tokenizers as tk
from hypothesis import given
from hypothesis import strategies as st

from packhorse.errors import InputError
from packhorse.tokens import Tokenizer
from packhorse.tokens.bulk import BulkTokenizer

pytest.importorskip("pyarrow")

WORDS = ["the", "cat", "sat", "on", "mat", "un", "##s", "##ing", "##ly", "wal", "##k", "12", "3"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LETTERS = "abcdeklnostuxyz0123'-.,()[]|!$=/\"中é·–"  # noqa: RUF001
VOCABULARY = [
    *SPECIAL,
    *WORDS,
    *LETTERS,
    *(f"##{letter}" for letter in LETTERS if letter.isalnum()),
]
TEXTS = [
    "The cat sat on the mat.",
    "",
    "   ",
    "Cats (walking, unlikely) sat; CATS' mat-on-mat 12/3!",
    "two\nlines\tand\r\nblanks  of\xa0all\u2003kinds\u3000",
    "deleted: the\x0bcat the\x1ccat the\x85cat \0the \ufffdcat sat\x7f",
    "中文cat中 décembre E\u0301cole naïve–cat cat’s İ ﬁ",  # noqa: RUF001
    "[CLS] the [MASK]cat [SEP]",
    "x" * 99 + " " + "y" * 101 + " " + "the" * 40,
    "cat" + "\u0301" * 5 + " \u0301 on",
]


def saved(library: tk.Tokenizer, folder: Path) -> Tokenizer:
    library.save(str(folder / "tokenizer.json"))
    return Tokenizer.load(folder)


def word_piece(lowercase: bool = True) -> tk.Tokenizer:
    vocabulary = {word: number for number, word in enumerate(VOCABULARY)}
    built = tk.Tokenizer(tk.models.WordPiece(vocabulary, unk_token="[UNK]"))
    built.normalizer = tk.normalizers.BertNormalizer(lowercase=lowercase)
    built.pre_tokenizer = tk.pre_tokenizers.BertPreTokenizer()
    built.add_special_tokens(SPECIAL)
    return built


def by_library(library: tk.Tokenizer, texts: list[str]) -> list[list[int]]:
    library.encode_special_tokens = True
    return [e.ids for e in library.encode_batch(texts, add_special_tokens=False)]


def parts(result: tuple[np.ndarray, np.ndarray]) -> list[list[int]]:
    ids, bounds = result
    assert bounds[0] == 0 and bounds[-1] == len(ids)
    return [part.tolist() for part in np.split(ids, bounds[1:-1])] if len(bounds) > 1 else []


@pytest.fixture(scope="module", params=[True, False], ids=["lower", "cased"])
def pair(request, tmp_path_factory) -> tuple[tk.Tokenizer, BulkTokenizer]:
    library = word_piece(request.param)
    return library, BulkTokenizer(saved(library, tmp_path_factory.mktemp("words")))


def test_any_text_as_the_library_has_it(pair: tuple[tk.Tokenizer, BulkTokenizer]) -> None:
    library, bulk = pair
    for _ in range(2):  # new words, then known ones
        assert parts(bulk.encode(TEXTS)) == by_library(library, TEXTS)
    assert parts(bulk.encode([])) == []


@given(texts=st.lists(st.text(st.sampled_from(LETTERS + "THEat \n\x0b\x1c\u0301\xa0")), max_size=5))
def test_texts_of_all_kinds(pair: tuple[tk.Tokenizer, BulkTokenizer], texts: list[str]) -> None:
    library, bulk = pair
    assert parts(bulk.encode(texts)) == by_library(library, texts)


@given(texts=st.lists(st.text(), max_size=3))
def test_all_of_unicode(pair: tuple[tk.Tokenizer, BulkTokenizer], texts: list[str]) -> None:
    library, bulk = pair
    assert parts(bulk.encode(texts)) == by_library(library, texts)


def test_a_spelled_special_token_is_text(pair: tuple[tk.Tokenizer, BulkTokenizer]) -> None:
    ids, _ = pair[1].encode(["a [SEP] b [MASK] [CLS]"])
    assert len(ids) and not set(ids.tolist()) & {VOCABULARY.index(name) for name in SPECIAL[2:]}
    library = word_piece()
    assert VOCABULARY.index("[SEP]") in library.encode("a [SEP] b").ids  # as it would be otherwise


def test_a_small_cache_of_words_changes_nothing(tmp_path: Path) -> None:
    tokenizer = saved(word_piece(), tmp_path)
    forgetful, keeping = BulkTokenizer(tokenizer, max_cached_words=3), BulkTokenizer(tokenizer)
    for text in TEXTS * 2:
        assert parts(forgetful.encode([text])) == parts(keeping.encode([text]))
    assert len(forgetful._words) <= 3 < len(keeping._words)


@pytest.mark.parametrize("bad", ["\ud800", "the \ud800"])
def test_half_a_surrogate_is_refused_and_forgotten(tmp_path: Path, bad: str) -> None:
    bulk = BulkTokenizer(saved(word_piece(), tmp_path))
    with pytest.raises(InputError, match="cannot be tokenized"):
        bulk.encode(["cat", bad])
    assert parts(bulk.encode(["the cat"])) == [[VOCABULARY.index("the"), VOCABULARY.index("cat")]]


def test_words_that_were_added_are_found_as_the_library_does(tmp_path: Path) -> None:
    library = word_piece()
    library.add_tokens(["mat sat", "catmat"])
    bulk = BulkTokenizer(saved(library, tmp_path))
    texts = ["the mat sat on catmats", *TEXTS]
    assert parts(bulk.encode(texts)) == by_library(library, texts)


def test_other_kinds_of_tokenizers(tmp_path: Path) -> None:
    library = tk.Tokenizer(tk.models.BPE())
    library.pre_tokenizer = tk.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tk.pre_tokenizers.ByteLevel.alphabet()
    trainer = tk.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<s>"], show_progress=False
    )
    library.train_from_iterator(TEXTS, trainer)
    assert parts(BulkTokenizer(saved(library, tmp_path)).encode(TEXTS)) == by_library(
        library, TEXTS
    )


def test_the_narrowest_type_that_holds_the_vocabulary(tmp_path: Path) -> None:
    library = word_piece()
    assert BulkTokenizer(saved(library, tmp_path)).encode(["the cat"])[0].dtype == np.uint16
    wide = {**library.get_vocab(), "wide": 70_000}
    library.model = tk.models.WordPiece(wide, unk_token="[UNK]")
    ids, _ = BulkTokenizer(saved(library, tmp_path)).encode(["wide"])
    assert ids.dtype == np.uint32 and ids.tolist() == [70_000]


def test_a_real_text(shared_data: Path) -> None:
    vocabulary = shared_data / "vocab" / "bert-base-uncased-vocab.txt"
    texts = (shared_data / "wiki" / "mlperf_wiki_00").read_text("utf-8").splitlines()
    tokenizer = Tokenizer.load(vocabulary)
    library = tk.Tokenizer.from_str(tokenizer._library.to_str())
    assert parts(BulkTokenizer(tokenizer).encode(texts)) == by_library(library, texts)
