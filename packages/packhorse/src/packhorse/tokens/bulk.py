"""The token ids of very many sentences, without special tokens: for building a corpus.

A corpus says the same words again and again. In BERT a blank always ends a word, so the tokens of a
sentence are those of its words: each new word is tokenized once and from then on looked up. Arrow
splits the sentences and numbers their words, a dictionary is asked for each word that is in them,
and one gather lays the tokens of all end to end. That is some fifteen times as fast as the library,
and five times in the first megabytes. The price is memory, about 200 bytes for a word, so the words
are forgotten when there are too many; what comes out does not depend on it.

Most new words are ASCII, where BERT's cleaning is nothing but lower case, and are taken apart at
their punctuation here: what `word,` and `(Word` consist of is then looked up as well. Other words
go to the library whole. A tokenizer of another kind (byte-level BPE, SentencePiece) is asked
sentence by sentence. A special token that is spelled out in the text is text: a corpus must not be
able to forge one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import compress, count
from typing import TYPE_CHECKING, Any, final

import numpy as np

from packhorse.errors import InputError, MissingExtra
from packhorse.tokens.files import blaming

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

    from packhorse.tokens import Tokenizer

BLANK = " "
MARK = r"([!-/:-@\[-`{-~])"  # of ASCII, each is a word of its own
WORDS_KEPT = 500_000

# The tokens of some texts end to end, and where each text begins, with the end: [n + 1]
Tokens = tuple[np.ndarray, np.ndarray]


@final
class Bulk:
    """A tokenizer and the words it has seen. Not to be shared between threads."""

    def __init__(self, tokenizer: Tokenizer, words_kept: int = WORDS_KEPT) -> None:
        from tokenizers import Tokenizer as Library

        self._library = Library.from_str(tokenizer._library.to_str())
        self._library.encode_special_tokens = True
        self._model = self._library.model
        self._vocabulary = self._library.get_vocab(with_added_tokens=False)
        self._dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
        self._by_words = _blanks_end_words(self._library)
        self._lower = self._by_words and self._library.normalizer.lowercase
        self._words_kept = words_kept
        if self._by_words:
            self._arrow = _arrow()
        self._forget()

    def encode(self, sentences: Sequence[str]) -> Tokens:
        """All token ids end to end, and where each sentence begins, with the end: [n + 1]."""
        if not self._by_words:
            return self._ask(sentences)
        with blaming(InputError, "a text cannot be tokenized"):
            lines = self._arrow.array(sentences, self._arrow.large_string())
        found = self._looked_up(self._words, lines)
        if len(self._words) > self._words_kept:
            self._forget()
        return found

    def _forget(self) -> None:
        self._words = _Memory(self._of_words, self._dtype)
        self._parts = _Memory(self._of_parts, self._dtype)

    def _looked_up(self, memory: _Memory, texts: Any) -> Tokens:
        """What stands between the blanks of an Arrow array's texts, out of a memory."""
        found = self._arrow.compute.split_pattern(texts, BLANK)
        every = found.flatten().dictionary_encode()
        ids, bounds = memory.look_up(every.dictionary.to_pylist(), every.indices.to_numpy())
        return ids, bounds[found.offsets.to_numpy()]

    def _of_words(self, words: list[str]) -> Tokens:
        simple = np.fromiter((w.isascii() and w.isprintable() for w in words), bool, len(words))
        groups = (
            (simple, self._taken_apart(list(compress(words, simple)))),
            (~simple, self._ask(list(compress(words, ~simple)))),
        )
        sizes = np.zeros(len(words), np.int64)
        for which, (_, bounds) in groups:
            sizes[which] = np.diff(bounds)
        ids = np.empty(sizes.sum(), self._dtype)
        for which, (tokens, _) in groups:
            ids[np.repeat(which, sizes)] = tokens
        return ids, _bounds(sizes)

    def _taken_apart(self, words: list[str]) -> Tokens:
        texts = self._arrow.array(words, self._arrow.large_string())
        if self._lower:
            texts = self._arrow.compute.ascii_lower(texts)
        apart = self._arrow.compute.replace_substring_regex(texts, MARK, r" \1 ")
        return self._looked_up(self._parts, apart)

    def _of_parts(self, parts: list[str]) -> Tokens:
        whole, tokenize = self._vocabulary.get, self._model.tokenize
        return self._flat(
            [token.id for token in tokenize(part)] if (id := whole(part)) is None else [id]
            for part in parts
        )

    def _ask(self, texts: Sequence[str]) -> Tokens:
        with blaming(InputError, "a text cannot be tokenized"):
            found = self._library.encode_batch_fast(list(texts), add_special_tokens=False)
        return self._flat(encoding.ids for encoding in found)

    def _flat(self, lists: Iterable[list[int]]) -> Tokens:
        """One list for all: a hundred thousand would keep the garbage collector busy."""
        sizes: list[int] = []
        ids: list[int] = []
        for each in lists:
            sizes.append(len(each))
            ids += each
        return np.array(ids, self._dtype), _bounds(sizes)


class _Memory:
    """Strings, and the tokens that `find` says each has; it is asked once for each."""

    def __init__(self, find: Callable[[list[str]], Tokens], dtype: type) -> None:
        self._find = find
        self._numbers: dict[str, int] = {}
        self._tokens = np.zeros(0, dtype)
        self._begins = np.zeros(1, np.int64)

    def __len__(self) -> int:
        return len(self._numbers)

    def look_up(self, strings: list[str], which: np.ndarray) -> Tokens:
        """The tokens of these strings, all different, taken in the order `which`."""
        if new := [string for string in strings if string not in self._numbers]:
            ids, bounds = self._find(new)
            self._numbers.update(zip(new, count(len(self._numbers))))
            self._begins = np.concatenate([self._begins, bounds[1:] + len(self._tokens)])
            self._tokens = np.concatenate([self._tokens, ids])
        numbers = np.fromiter(map(self._numbers.__getitem__, strings), np.int64, len(strings))
        sizes = np.diff(self._begins)[numbers][which]
        bounds = _bounds(sizes)
        places = np.repeat(self._begins[numbers][which] - bounds[:-1], sizes)
        places += np.arange(len(places))
        return self._tokens[places], bounds


def _blanks_end_words(library: Library) -> bool:
    """Is it BERT's own way, with no words added that would be found in the text before it?"""
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
    """Where each thing of a size begins, and the end."""
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])


def _arrow() -> Any:
    try:
        import pyarrow.compute
    except ImportError as error:
        raise MissingExtra("pyarrow", "data") from error
    return pyarrow
