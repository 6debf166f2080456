"""BERT's tokenizer in C for the texts that most are: ASCII, without special tokens spelled out.

The `tokenizers` library takes about a microsecond per character, because it tracks every rule of
Unicode. In ASCII the rules are few: a blank or a punctuation mark ends a word, letters may be
lowercased, and WordPiece takes the longest piece of the vocabulary again and again. For these texts
C code gives the same tokens some thirty times as fast; for all others `encode` returns None, and
the library is asked. It is not used for a tokenizer of another kind, nor without a C compiler.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np

from packhorse.native import INT, LONG, POINTER, Obstacle, function, warn_slow

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

SOURCE = Path(__file__).with_name("wordpiece.c")
FIRST = 0  # node of the trie where words begin
CONTINUATION = 1  # node where continuations begin, without their prefix
# Of all words. A word may be in the trie twice with a node per byte, and wordpiece.c numbers up to
# 8 million nodes.
MAX_VOCABULARY_BYTES = 4_000_000


@final
class Trie:
    """The vocabulary as wordpiece.c reads it."""

    def __init__(self, nodes: int) -> None:
        """Make a trie without words, with room for so many nodes."""
        slots = 1 << (2 * nodes - 1).bit_length()  # at most half of them are used
        self._edges = np.full((slots, 2), -1, np.int32)
        self._tokens = np.full(nodes, -1, np.int32)  # id of the word that ends at a node, or -1
        self.mask = slots - 1
        self.edges_address = self._edges.ctypes.data
        self.tokens_address = self._tokens.ctypes.data

    def add(self, words: dict[bytes, int], continuations: dict[bytes, int]) -> int:
        """Add a vocabulary, and return the number of nodes."""
        nodes = 2
        for root, part in ((FIRST, words), (CONTINUATION, continuations)):
            ends = np.cumsum([len(word) for word in part], dtype=np.int64)
            ids = np.fromiter(part.values(), np.int32, len(part))
            nodes = _functions().add(
                b"".join(part),
                ends.ctypes.data,
                ids.ctypes.data,
                len(part),
                root,
                nodes,
                self.edges_address,
                self.mask,
                self.tokens_address,
            )
        return nodes


class WordPieceSequences(NamedTuple):
    """Sequences end to end; a text that needs the library has the size -1 and no ids."""

    ids: np.ndarray  # int32, of all sequences
    sizes: np.ndarray  # int64 [n], tokens of each
    cut: np.ndarray  # bool [n], whether text was left


@final
class AsciiWordPiece:
    """The rules of a tokenizer, for ASCII text alone. May be shared between threads."""

    def __init__(self, library: Library) -> None:
        """Copy the rules; the trie is built when the first text comes."""
        model: Any = library.model
        self._vocabulary = library.get_vocab(with_added_tokens=False)
        self._prefix: str = model.continuing_subword_prefix
        self._longest_word: int = model.max_input_chars_per_word
        self._unknown = self._vocabulary[model.unk_token]
        self._lowercase = int(library.normalizer.lowercase)
        self._added_tokens = [
            token.content for token in library.get_added_tokens_decoder().values() if token.content
        ]
        self._added = re.compile("|".join(map(re.escape, self._added_tokens)) or r"(?!)")
        self._trie: Trie | None = None

    @classmethod
    def of(cls, library: Library) -> AsciiWordPiece | None:
        """Return the rules of a library's tokenizer; None if they are not BERT's."""
        from tokenizers.models import WordPiece
        from tokenizers.normalizers import BertNormalizer
        from tokenizers.pre_tokenizers import BertPreTokenizer

        model = library.model
        if not (
            isinstance(library.normalizer, BertNormalizer)
            and isinstance(library.pre_tokenizer, BertPreTokenizer)
            and isinstance(model, WordPiece)
        ):
            return None
        # Tokens that are looked for after the text was normalized cannot be found before that.
        if any(token.normalized for token in library.get_added_tokens_decoder().values()):
            return None
        words = library.get_vocab(with_added_tokens=False)
        if (
            model.unk_token not in words
            or sum(len(word.encode()) for word in words) > MAX_VOCABULARY_BYTES
        ):
            return None
        try:
            _functions()
        except Obstacle as reason:
            warn_slow(reason)
            return None
        return cls(library)

    def encode(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray] | None]:
        """Return ids [n] and offsets [n, 2] of each text, int32; None for one of other rules."""
        simple = [text.isascii() and not self._added.search(text) for text in texts]
        parts = [text if is_simple else "" for text, is_simple in zip(texts, simple, strict=True)]
        data = "".join(parts).encode()
        # Two arrays in place of five: to ask numpy for an address takes longer than a word.
        n = len(parts)
        numbers = np.empty(2 * n + min(self._longest_word, len(data)) + 1, np.int64)
        numbers[:n] = list(accumulate(map(len, parts)))
        tokens = np.empty(3 * len(data), np.int32)
        ends_address = numbers.ctypes.data
        ids_address = tokens.ctypes.data
        _functions().tokenize(
            data,
            ends_address,
            n,
            *self._rules(),
            ids_address,
            ids_address + 4 * len(data),
            ends_address + 8 * n,
            ends_address + 16 * n,
        )
        ids = tokens[: len(data)]
        offsets = tokens[len(data) :].reshape(-1, 2)
        counts = numbers[n : 2 * n].tolist()
        results: list[tuple[np.ndarray, np.ndarray] | None] = []
        begin = 0
        for is_simple, count in zip(simple, counts, strict=True):
            if not is_simple or count < 0:
                results.append(None)
            else:
                end = begin + count
                results.append((ids[begin:end], offsets[begin:end]))
                begin = end
        return results

    def sequences(
        self,
        texts: Sequence[str],
        *,
        before: Sequence[int],
        after: Sequence[int],
        room: int,
        longest: int,
    ) -> WordPieceSequences:
        """Return whole sequences: `before`, at most `room` tokens of the text, `after`.

        Texts of more than `longest` characters are left to the library. No Python code runs per
        text but `len`.
        """
        lengths = np.fromiter(map(len, texts), np.int64, len(texts))
        joined = "".join(texts)
        others = self._needs_library(joined, texts, lengths)
        others |= lengths > longest
        if others.any():
            texts = ["" if skip else text for text, skip in zip(texts, others, strict=True)]
            lengths[others] = 0
            joined = "".join(texts)
        ends = np.cumsum(lengths)
        special = np.array([*before, *after], np.int32)
        ids = np.empty(len(joined) + len(special) * len(texts), np.int32)
        sizes = np.empty(len(texts), np.int64)
        cut = np.empty(len(texts), bool)
        _functions().sequences(
            joined.encode(),
            ends.ctypes.data,
            len(texts),
            *self._rules(),
            special.ctypes.data,
            len(before),
            len(after),
            room,
            ids.ctypes.data,
            sizes.ctypes.data,
            cut.ctypes.data,
        )
        ids = ids[: sizes.clip(0).sum()]
        if others.any():  # each has left its special tokens
            ids = ids[~np.repeat(others, sizes.clip(0))]
            sizes[others] = -1
        return WordPieceSequences(ids, sizes, cut)

    def _needs_library(self, joined: str, texts: Sequence[str], lengths: np.ndarray) -> np.ndarray:
        """Return which texts are not ASCII, or spell out an added token."""
        others = np.zeros(len(texts), bool)
        if not joined.isascii():
            others[:] = [not text.isascii() for text in texts]
        ends = np.cumsum(lengths)
        # One search for each token, because a pattern of all of them is ten times as slow. The end
        # of a text and the beginning of the next may look like one, which costs nothing but speed.
        for token in self._added_tokens:
            position = joined.find(token)
            while position >= 0:
                owner = int(np.searchsorted(ends, position, side="right"))
                others[owner] = True
                position = joined.find(token, int(ends[owner]))
        return others

    def _rules(self) -> tuple[int, ...]:
        """Return what wordpiece.c needs to know of the vocabulary."""
        trie = self._trie or self._build()
        return (
            trie.edges_address,
            trie.mask,
            trie.tokens_address,
            self._unknown,
            self._longest_word,
            self._lowercase,
        )

    def _build(self) -> Trie:
        """Build the trie; two threads that do so at once build the same."""
        words = {word.encode(): id for word, id in self._vocabulary.items()}
        prefix = self._prefix.encode()
        continuations = {
            word.removeprefix(prefix): id for word, id in words.items() if word.startswith(prefix)
        }
        # As large as it could be; of this one only the number of nodes is needed.
        most = 2 + sum(map(len, words)) + sum(map(len, continuations))
        trie = Trie(Trie(most).add(words, continuations))
        trie.add(words, continuations)
        self._trie = trie
        return trie


class _Functions(NamedTuple):
    """The functions of wordpiece.c."""

    add: Any
    tokenize: Any
    sequences: Any


@cache
def _functions() -> _Functions:
    text = ctypes.c_char_p
    trie = (POINTER, LONG, POINTER)  # edges, mask, tokens
    rules = (*trie, INT, LONG, INT)  # unknown, longest word, lowercase
    texts = (text, POINTER, LONG)
    return _Functions(
        add=function(
            SOURCE,
            "packhorse_wordpiece_add",
            (text, POINTER, POINTER, LONG, INT, INT, *trie),
            returns=INT,
        ),
        # ids, offsets, counts, ends of pieces
        tokenize=function(
            SOURCE, "packhorse_wordpiece", (*texts, *rules, POINTER, POINTER, POINTER, POINTER)
        ),
        # special ids, how many before and after, room; ids, counts, cut
        sequences=function(
            SOURCE,
            "packhorse_wordpiece_sequences",
            (*texts, *rules, POINTER, LONG, LONG, LONG, POINTER, POINTER, POINTER),
        ),
    )
