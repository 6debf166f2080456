"""Batches for transformers' Trainer laid end to end, boundaries told and nothing guessed.

The collator wraps the one a script already has (or a tokenizer: then sequences are padded as
Trainer would). That one does its work, masking words or padding labels, with the same draws as
ever; then its padding is taken out. So a step holds the sequences of a padded step and has its
gradient, and whatever the inner collator can do is kept. The price is small: integers are padded on
the host only to be dropped.

    PackedCollator(tokenizer, model)
    PackedCollator(DataCollatorForLanguageModeling(tokenizer), model)

Positions restart in each sequence, for the RoBERTa family after the padding id, as the model itself
would number the padded batch. Boundaries are passed as transformers names them.

Shapes: T tokens, S sequences, L columns of the padded batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from packhorse.errors import InputError
from packhorse.hf.families import AFTER_PADDING
from packhorse.hf.heads import Head, head_of, packed

IGNORED = -100  # the label that no loss of transformers counts
PER_TOKEN = ("input_ids", "token_type_ids", "position_ids", "special_tokens_mask")


class PackedCollator:
    """Flat batches for a model, which it makes ready for them."""

    def __init__(self, inner: Any, model: Any) -> None:
        """inner: a tokenizer, or the collator that made padded batches so far."""
        packed(model)
        # The model itself is not kept: workers of a DataLoader get a copy of the collator.
        self.head: Head = head_of(model)
        family = AFTER_PADDING[model.config.model_type]
        self.padding_id: int | None = model.config.pad_token_id if family else None
        self.inner: Callable[..., Any] = _padding(inner, self.head) if _tokenizes(inner) else inner

    def __call__(self, features: Sequence[Any]) -> dict[str, Any]:
        """Tokens as [1, T], boundaries, and labels where the model's head expects them."""
        batch = dict(self.inner(features))
        mask = _mask_of(batch)
        batch.setdefault("position_ids", _positions(batch["input_ids"], mask, self.padding_id))
        flat = {name: batch.pop(name)[mask].unsqueeze(0) for name in PER_TOKEN if name in batch}
        if self.head.token_labels and "labels" in batch:
            batch["labels"] = self._token_labels(batch["labels"], mask)
        lengths = mask.sum(1)
        bounds = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(torch.int32)
        longest = int(lengths.max())
        told = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
        return {**batch, **flat, **told, "max_length_q": longest, "max_length_k": longest}

    def _token_labels(self, labels: Tensor, mask: Tensor) -> Tensor:
        """[S, L] to [1, T], or to rows as wide as the longest sequence."""
        if not self.head.rows:
            return labels[mask].unsqueeze(0)
        lengths = mask.sum(1, keepdim=True)
        rows = labels.new_full((len(mask), int(lengths.max())), IGNORED)
        rows[torch.arange(rows.shape[1]) < lengths] = labels[mask]
        return rows


def _mask_of(batch: dict[str, Any]) -> Tensor:
    if "attention_mask" not in batch:
        raise InputError(
            "the batch has no attention_mask, so padding cannot be told from tokens; let the "
            "tokenizer return it"
        )
    mask = batch.pop("attention_mask").bool()
    if mask.ndim != 2 or not mask.any(1).all():
        raise InputError(f"the mask is {list(mask.shape)}; it takes a row a sequence, with tokens")
    return mask


def _positions(ids: Tensor, mask: Tensor, padding_id: int | None) -> Tensor:
    """[S, L] as the model would number them, padding on either side left out of the count."""
    if padding_id is None:
        columns = torch.arange(ids.shape[1]).expand_as(ids)
        return columns - mask.int().argmax(1, keepdim=True)
    counted = ids.ne(padding_id).long()
    return counted.cumsum(1) * counted + padding_id


def _tokenizes(inner: Any) -> bool:
    return hasattr(inner, "pad") and hasattr(inner, "convert_tokens_to_ids")


def _padding(tokenizer: Any, head: Head) -> Any:
    from transformers import DataCollatorForTokenClassification, DataCollatorWithPadding

    kind = DataCollatorForTokenClassification if head.token_labels else DataCollatorWithPadding
    return kind(tokenizer)
