"""Tokenize very many sentences, without special tokens: for building a corpus.

A corpus repeats the same words. In BERT a blank always ends a word, so the tokens of a sentence are
those of its words: each new word is tokenized once and looked up from then on. Arrow splits the
sentences and numbers their words, a dictionary is asked once per distinct word, and one gather
concatenates all tokens. That is some fifteen times as fast as the library, and five times in the
first megabytes. The cost is memory, about 200 bytes per word, so the cache is cleared when it gets
too large; the results do not depend on it.

Most new words are ASCII, where BERT's text cleaning only lowercases, and are split at their
punctuation here, so that the parts of `word,` and `(Word` are looked up as well. Other words go to
the library whole. A tokenizer of another kind (byte-level BPE, SentencePiece) gets whole sentences.
A special token that is spelled out in the text is text: a corpus must not be able to forge one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from itertools import compress, count
from typing import TYPE_CHECKING, Any, final

import numpy as np

from packhorse.errors import InputError, MissingExtra
from packhorse.tokens.files import wrap_errors

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

    from packhorse.tokens.tokenizer import Tokenizer

BLANK = " "
PUNCTUATION = r"([!-/:-@\[-`{-~])"  # in ASCII; each is a word of its own
MAX_CACHED_WORDS = 500_000

# The tokens of n texts, concatenated, and the bounds of each text: [n + 1]
FlatTokens = tuple[np.ndarray, np.ndarray]


@final
class BulkTokenizer:
    """A tokenizer with a cache of words. Not to be shared between threads."""

    def __init__(self, tokenizer: Tokenizer, max_cached_words: int = MAX_CACHED_WORDS) -> None:
        self._library = tokenizer.copy_library()
        self._library.encode_special_tokens = True
        self._model = self._library.model
        self._vocabulary = self._library.get_vocab(with_added_tokens=False)
        self._dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
        self._by_words = _blanks_end_words(self._library)
        self._lower = self._by_words and self._library.normalizer.lowercase
        self._max_cached_words = max_cached_words
        if self._by_words:
            self._arrow = _arrow()
        self._clear_cache()

    def encode(self, sentences: Sequence[str]) -> FlatTokens:
        """The token ids of all sentences, concatenated, and the bounds of each: [n + 1]."""
        if not self._by_words:
            return self._call_library(sentences)
        with wrap_errors(InputError, "a text cannot be tokenized"):
            lines = self._arrow.array(sentences, self._arrow.large_string())
        tokens = self._look_up_parts(self._words, lines)
        if len(self._words) > self._max_cached_words:
            self._clear_cache()
        return tokens

    def _clear_cache(self) -> None:
        self._words = _TokenCache(self._tokenize_words, self._dtype)
        self._parts = _TokenCache(self._tokenize_parts, self._dtype)

    def _look_up_parts(self, cache: _TokenCache, texts: Any) -> FlatTokens:
        """Split the texts of an Arrow array at blanks, and look the pieces up."""
        pieces = self._arrow.compute.split_pattern(texts, BLANK)
        encoded = pieces.flatten().dictionary_encode()
        ids, bounds = cache.look_up(encoded.dictionary.to_pylist(), encoded.indices.to_numpy())
        return ids, bounds[pieces.offsets.to_numpy()]

    def _tokenize_words(self, words: list[str]) -> FlatTokens:
        """New words: simple ones by their parts, others by the library, joined in order."""
        simple = np.fromiter((w.isascii() and w.isprintable() for w in words), bool, len(words))
        groups = (
            (simple, self._split_and_look_up(list(compress(words, simple)))),
            (~simple, self._call_library(list(compress(words, ~simple)))),
        )
        sizes = np.zeros(len(words), np.int64)
        for selected, (_, bounds) in groups:
            sizes[selected] = np.diff(bounds)
        ids = np.empty(sizes.sum(), self._dtype)
        for selected, (tokens, _) in groups:
            ids[np.repeat(selected, sizes)] = tokens
        return ids, _bounds(sizes)

    def _split_and_look_up(self, words: list[str]) -> FlatTokens:
        texts = self._arrow.array(words, self._arrow.large_string())
        if self._lower:
            texts = self._arrow.compute.ascii_lower(texts)
        split = self._arrow.compute.replace_substring_regex(texts, PUNCTUATION, r" \1 ")
        return self._look_up_parts(self._parts, split)

    def _tokenize_parts(self, parts: list[str]) -> FlatTokens:
        """New parts of words: most are tokens themselves; WordPiece splits the others."""
        token_id = self._vocabulary.get
        tokenize = self._model.tokenize
        return self._flatten(
            [token.id for token in tokenize(part)] if (id := token_id(part)) is None else [id]
            for part in parts
        )

    def _call_library(self, texts: Sequence[str]) -> FlatTokens:
        with wrap_errors(InputError, "a text cannot be tokenized"):
            encodings = self._library.encode_batch_fast(list(texts), add_special_tokens=False)
        return self._flatten(encoding.ids for encoding in encodings)

    def _flatten(self, lists: Iterable[list[int]]) -> FlatTokens:
        """Concatenate while iterating: 100,000 lists at once would burden the garbage collector."""
        sizes: list[int] = []
        ids: list[int] = []
        for text_ids in lists:
            sizes.append(len(text_ids))
            ids += text_ids
        return np.array(ids, self._dtype), _bounds(sizes)


class _TokenCache:
    """Strings and their tokens; `tokenize` is called once for each new string."""

    def __init__(self, tokenize: Callable[[list[str]], FlatTokens], dtype: type) -> None:
        self._tokenize = tokenize
        self._numbers: dict[str, int] = {}  # of a string, in order of arrival
        self._tokens: np.ndarray = np.zeros(0, dtype)  # of all strings, concatenated
        self._begins = np.zeros(1, np.int64)  # of string i, and the end

    def __len__(self) -> int:
        return len(self._numbers)

    def look_up(self, strings: list[str], order: np.ndarray) -> FlatTokens:
        """The tokens of `strings[i]` for each i in `order`; the strings are distinct."""
        if new := [string for string in strings if string not in self._numbers]:
            ids, bounds = self._tokenize(new)
            self._numbers.update(zip(new, count(len(self._numbers))))
            self._begins = np.concatenate([self._begins, bounds[1:] + len(self._tokens)])
            self._tokens = np.concatenate([self._tokens, ids])
        numbers = np.fromiter(map(self._numbers.__getitem__, strings), np.int64, len(strings))
        sizes = np.diff(self._begins)[numbers][order]
        bounds = _bounds(sizes)
        # Index of every token in the cache: where its string begins, plus its place within it.
        indices = np.repeat(self._begins[numbers][order] - bounds[:-1], sizes)
        indices += np.arange(len(indices))
        return self._tokens[indices], bounds


def _blanks_end_words(library: Library) -> bool:
    """Is it BERT's tokenizer, without added words that the library would look for first?"""
    from tokenizers.models import WordPiece
    from tokenizers.normalizers import BertNormalizer
    from tokenizers.pre_tokenizers import BertPreTokenizer

    return (
        isinstance(library.normalizer, BertNormalizer)
        and isinstance(library.pre_tokenizer, BertPreTokenizer)
        and isinstance(library.model, WordPiece)
        and all(token.special for token in library.get_added_tokens_decoder().values())
    )


def _bounds(sizes: Sequence[int] | np.ndarray) -> np.ndarray:
    """Where each item begins, and the end: [n + 1]."""
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])


def _arrow() -> Any:
    try:
        arrow = import_module("pyarrow")
        import_module("pyarrow.compute")  # which pyarrow itself does not import
    except ImportError as error:
        raise MissingExtra("pyarrow", "data") from error
    return arrow
