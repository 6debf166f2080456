"""Texts and pairs of texts to token ids and back, for any `tokenizer.json` or an old `vocab.txt`.

`tokenizer` encodes and decodes, `bulk` encodes whole corpora, `files` finds and opens the files of
a tokenizer.
"""

from typing import TYPE_CHECKING

from packhorse.exports import lazy_exports

if TYPE_CHECKING:
    from packhorse.tokens.tokenizer import Encoding, Tokenizer
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "packhorse.tokens.tokenizer": ["Encoding", "Tokenizer"],
        },
    )

__all__ = ["Encoding", "Tokenizer"]
