"""Requests of known size for servers: so many texts per request, of exactly so many tokens each.

Speed depends on the number of tokens, and on how much work it is to find them, so texts are real
ones, cut by the model's own tokenizer. Random weights come without a real vocabulary; theirs is
learned from the same texts (WordPiece), so that words fall into pieces as they do elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from packhorse.errors import InputError
from packhorse.tokens.tokenizer import NO_LIMIT, Tokenizer
from packhorse_bench.serving_load import RequestTexts

TOKENS = 1 << 18  # of all texts of a shape, about: more would only take time to tokenize
LEAST_TEXTS = 64
DRAWS = 20  # of as many passages as there are texts, before a shape is given up


@dataclass(frozen=True, order=True)
class Shape:
    """The size of a request: `texts` texts of `tokens` tokens each, special tokens included."""

    tokens: int
    texts: int

    def __str__(self) -> str:
        return f"{self.tokens}x{self.texts}"

    @property
    def all_tokens(self) -> int:
        """Tokens of a request."""
        return self.tokens * self.texts

    @classmethod
    def parse(cls, text: str) -> Shape:
        """A shape from TOKENSxTEXTS."""
        tokens, separator, texts = text.strip().partition("x")
        if not (separator and tokens.isdecimal() and texts.isdecimal()):
            raise InputError(f"--shape {text}: pass TOKENSxTEXTS, such as 50x16")
        shape = cls(int(tokens), int(texts))
        if shape.tokens < 3 or shape.texts < 1:
            raise InputError(f"--shape {text}: a request has 1 text or more, of 3 tokens or more")
        return shape


def requests(
    shape: Shape, tokenizer: Tokenizer, words: Sequence[str], count: int, seed: int = 0
) -> list[RequestTexts]:
    """Different requests of this shape, from at most about `count` texts."""
    texts_wanted = max(min(count, TOKENS // shape.tokens), LEAST_TEXTS)
    request_count = max(1, texts_wanted // shape.texts)
    texts = exact_texts(shape.tokens, request_count * shape.texts, tokenizer, words, seed)
    if shape.texts == 1:
        return list(texts)
    return [texts[i : i + shape.texts] for i in range(0, len(texts), shape.texts)]


def exact_texts(
    tokens: int, count: int, tokenizer: Tokenizer, words: Sequence[str], seed: int = 0
) -> list[str]:
    """Texts of exactly this many tokens, special ones included: passages of `words`, cut."""
    if not words:
        raise InputError("the texts hold no word; there is nothing to ask")
    generator = np.random.default_rng(seed)
    specials = tokenizer.specials_per(False)
    texts: list[str] = []
    for _ in range(DRAWS):
        starts = generator.integers(0, len(words), count - len(texts)).tolist()
        passages = [" ".join(_passage(words, start, tokens)) for start in starts]
        cut = [
            passage[: encoding.offsets[~encoding.special][tokens - specials - 1, 1]]
            for passage, encoding in zip(
                passages, tokenizer.encode(passages, NO_LIMIT), strict=True
            )
            if len(encoding) >= tokens
        ]
        # A tokenizer may read the end of a text in another way once the rest is gone.
        lengths = [len(encoding) for encoding in tokenizer.encode(cut, NO_LIMIT)]
        texts += [text for text, length in zip(cut, lengths, strict=True) if length == tokens]
        if len(texts) >= count:
            return texts
    raise InputError(
        f"only {len(texts)} of {count} passages could be cut to {tokens} tokens; pass other --texts"
    )


def _passage(words: Sequence[str], start: int, count: int) -> Iterator[str]:
    """`count` words from `start` on, from the beginning again after the last."""
    return (words[place % len(words)] for place in range(start, start + count))


def learn_vocabulary(texts: Sequence[str], size: int, path: Path) -> Path:
    """Write a `vocab.txt` of at most `size` WordPieces, learned from these texts."""
    from tokenizers import BertWordPieceTokenizer

    library = BertWordPieceTokenizer(lowercase=True)
    library.train_from_iterator(iter(texts), vocab_size=size, show_progress=False)
    pieces = library.get_vocab()
    path.write_text("\n".join(sorted(pieces, key=pieces.__getitem__)) + "\n", "utf-8")
    return path
