"""`model.tokenizer`: our tokenizer behind the methods of one of transformers.

Only the methods that other libraries call are here. Special tokens, truncation and padding are
arguments of the call, as there. To use another vocabulary, assign another tokenizer to the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from packhorse.errors import InputError
from packhorse.tokens.tokenizer import Encoding, Tokenizer

NO_LIMIT = 1 << 30
NO_TRUNCATION = (False, None, "do_not_truncate")
TENSORS = {"pt": torch.tensor, "np": np.array}


class HubTokenizer:
    """A tokenizer with the methods of transformers' that other libraries call."""

    def __init__(self, tokenizer: Tokenizer, model_max_length: int) -> None:
        self._tokenizer = tokenizer
        self._library = tokenizer.copy_library()
        self._library.no_truncation()
        self._library.no_padding()
        self.model_max_length = model_max_length

    def __len__(self) -> int:
        return self._library.get_vocab_size()

    @property
    def vocab_size(self) -> int:
        """The size of the vocabulary without added tokens."""
        return self._library.get_vocab_size(with_added_tokens=False)

    @property
    def pad_token_id(self) -> int | None:
        """The token that fills rows up."""
        return self._tokenizer.pad_id

    @property
    def cls_token_id(self) -> int | None:
        """The token that sequences begin with."""
        return self._tokenizer.cls_id

    @property
    def sep_token_id(self) -> int | None:
        """The token that ends a text."""
        return self._tokenizer.sep_id

    @property
    def mask_token_id(self) -> int | None:
        """The token that stands for a hidden one."""
        return self._tokenizer.mask_id

    def __call__(
        self,
        text: Any,
        text_pair: Any = None,
        *,
        add_special_tokens: bool = True,
        padding: bool | str = False,
        truncation: bool | str | None = None,
        max_length: int | None = None,
        return_tensors: str | None = None,
        **_: Any,
    ) -> dict[str, Any]:
        """Return `input_ids`, `token_type_ids` and `attention_mask` of a text or of a list."""
        if return_tensors is not None and return_tensors not in TENSORS:
            raise InputError(f"return_tensors is {return_tensors!r}; use 'pt' or 'np'")
        single = isinstance(text, str)
        texts: list[Any] = [text] if single else list(text)
        if text_pair is not None:
            others: list[Any] = [text_pair] if single else list(text_pair)
            texts = list(zip(texts, others, strict=True))
        limit = NO_LIMIT
        if truncation not in NO_TRUNCATION:
            limit = max_length or self.model_max_length
        rows = [self._encode(entry, limit, add_special_tokens) for entry in texts]
        columns = self.columns(rows, padded=bool(padding))
        if return_tensors is not None:
            return {name: TENSORS[return_tensors](values) for name, values in columns.items()}
        return {name: values[0] if single else values for name, values in columns.items()}

    def columns(self, rows: Sequence[Encoding], padded: bool) -> dict[str, list[list[int]]]:
        """Return the ids, types and masks of sequences, if `padded` all equally long."""
        longest = max(map(len, rows), default=0) if padded else 0
        columns: dict[str, list[list[int]]] = {
            "input_ids": [],
            "token_type_ids": [],
            "attention_mask": [],
        }
        for row in rows:
            missing = max(0, longest - len(row))
            columns["input_ids"].append(row.ids.tolist() + [self.pad_token_id or 0] * missing)
            columns["token_type_ids"].append(row.types.tolist() + [0] * missing)
            columns["attention_mask"].append([1] * len(row) + [0] * missing)
        return columns

    def encode(
        self,
        text: str,
        text_pair: str | None = None,
        *,
        add_special_tokens: bool = True,
        truncation: bool | str | None = None,
        max_length: int | None = None,
        **_: Any,
    ) -> list[int]:
        """Return the token ids of a text or a pair."""
        return self(
            text,
            text_pair,
            add_special_tokens=add_special_tokens,
            truncation=truncation,
            max_length=max_length,
        )["input_ids"]

    def tokenize(self, text: str, add_special_tokens: bool = False) -> list[str]:
        """Return the tokens of a text as they are spelled in the vocabulary."""
        return self._library.encode(text, add_special_tokens=add_special_tokens).tokens

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **_: Any) -> str:
        """Return the text of token ids."""
        ids = [int(id) for id in np.atleast_1d(np.asarray(token_ids))]
        return self._tokenizer.decode(ids, skip_special=skip_special_tokens)

    def batch_decode(self, rows: Any, skip_special_tokens: bool = False, **_: Any) -> list[str]:
        """Return the text of each row of token ids."""
        return [self.decode(row, skip_special_tokens) for row in rows]

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> Any:
        """Return how a token, or each of several, is spelled."""
        if isinstance(ids, int):
            return self._tokenizer.token(ids)
        return [self._tokenizer.token(int(id)) for id in ids]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """Return the id of a token, or of each of several; None for one that there is not."""
        if isinstance(tokens, str):
            return self._tokenizer.find(tokens)
        return [self._tokenizer.find(token) for token in tokens]

    def get_vocab(self) -> dict[str, int]:
        """Return the id of each token."""
        return self._library.get_vocab()

    def _encode(self, text: Any, limit: int, special: bool) -> Encoding:
        (encoding,) = self._tokenizer.encode([text], limit)
        if special:
            return encoding
        ordinary = ~encoding.special
        return Encoding(
            encoding.ids[ordinary],
            encoding.types[ordinary],
            encoding.offsets[ordinary],
            encoding.special[ordinary],
            (slice(0, int(ordinary.sum())),),
        )
