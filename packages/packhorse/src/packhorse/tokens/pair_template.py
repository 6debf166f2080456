"""Pairs as one text with fixed words around it: the input of rerankers that are language models.

The words before and after are stored as tokens, so that truncation cannot cut them and they cannot
merge with a user's text. Between them the query, the document and the label in front of each are
tokenized as one text, whose end is cut if it is too long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from packhorse.errors import InputError
from packhorse.tokens.tokenizer import Encoding, OnLong, Tokenizer


@dataclass(frozen=True, slots=True)
class PairTemplate:
    """The words around a query and a document; JSON can hold all fields."""

    before: tuple[int, ...]  # tokens that begin every sequence
    query: str  # goes before the query
    document: str  # goes between the query and the document
    after: tuple[int, ...]  # tokens that end every sequence

    def encode(
        self,
        tokenizer: Tokenizer,
        pairs: Sequence[tuple[str, str]],
        limit: int,
        on_long: OnLong = "truncate",
    ) -> list[Encoding]:
        """Encode pairs in at most `limit` tokens; offsets are those of the joined text."""
        fixed = len(self.before) + len(self.after)
        room = limit - fixed
        if room < 1:
            raise InputError(
                f"max_length is {limit}, and this model's words around a pair take {fixed} tokens; "
                f"it must be at least {fixed + 1}"
            )
        texts = [self.query + query + self.document + document for query, document in pairs]
        return [self._framed(encoding) for encoding in tokenizer.encode(texts, room, on_long)]

    def _framed(self, encoding: Encoding) -> Encoding:
        first = len(self.before)
        ends = (first, len(self.after))
        return replace(
            encoding,
            ids=np.concatenate([self.before, encoding.ids, self.after]).astype(np.int32),
            types=np.pad(encoding.types, ends),
            offsets=np.pad(encoding.offsets, (ends, (0, 0))),
            special=np.pad(encoding.special, ends, constant_values=True),
            spans=tuple(slice(span.start + first, span.stop + first) for span in encoding.spans),
        )
