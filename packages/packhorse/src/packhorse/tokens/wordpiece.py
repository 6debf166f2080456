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
from typing import TYPE_CHECKING, Any, final

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
            nodes = _functions()[0](
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
        added = [token.content for token in library.get_added_tokens_decoder().values()]
        self._added = re.compile("|".join(map(re.escape, added)) or r"(?!)")
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
        # Two arrays in place of four: to ask numpy for an address takes longer than a word.
        bounds = np.empty((2, len(parts)), np.int64)
        bounds[0] = list(accumulate(map(len, parts)))
        tokens = np.empty(3 * len(data), np.int32)
        trie = self._trie or self._build()
        ends_address = bounds.ctypes.data
        ids_address = tokens.ctypes.data
        _functions()[1](
            data,
            ends_address,
            len(parts),
            trie.edges_address,
            trie.mask,
            trie.tokens_address,
            self._unknown,
            self._longest_word,
            self._lowercase,
            ids_address,
            ids_address + 4 * len(data),
            ends_address + 8 * len(parts),
        )
        ids = tokens[: len(data)]
        offsets = tokens[len(data) :].reshape(-1, 2)
        counts = bounds[1].tolist()
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


@cache
def _functions() -> tuple[Any, Any]:
    """The functions of wordpiece.c that add to a trie and that tokenize."""
    text = ctypes.c_char_p
    trie = (POINTER, LONG, POINTER)  # edges, mask, tokens
    add_types = (text, POINTER, POINTER, LONG, INT, INT)
    add = function(SOURCE, "packhorse_wordpiece_add", add_types + trie, returns=INT)
    input_types = (text, POINTER, LONG)
    rule_types = (INT, LONG, INT)  # unknown, longest word, lowercase
    output_types = (POINTER, POINTER, POINTER)  # ids, offsets, counts
    tokenize = function(
        SOURCE, "packhorse_wordpiece", input_types + trie + rule_types + output_types
    )
    return add, tokenize
