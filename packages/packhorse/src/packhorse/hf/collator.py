"""Batches for transformers' Trainer laid end to end, boundaries told and nothing guessed.

    PackedCollator(tokenizer, model)
    PackedCollator(DataCollatorForLanguageModeling(tokenizer), model)

With a tokenizer the sequences are laid end to end as they are; that takes a tenth of the time of
padding them. A collator that a script already has does its own work, masking words or padding
labels, with the same draws as ever; then its padding is taken out. So a step holds the sequences of
a padded step and has its gradient, and whatever the inner collator can do is kept.

Positions restart in each sequence, for the RoBERTa family after the padding id, as the model itself
would number the padded batch. Boundaries are passed as transformers names them.

Shapes: T tokens, S sequences, L columns of a padded batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from packhorse.errors import InputError
from packhorse.hf.families import AFTER_PADDING
from packhorse.hf.heads import Head, head_of, packed

IGNORED = -100  # the label that no loss of transformers counts
PER_TOKEN = ("input_ids", "token_type_ids", "position_ids", "special_tokens_mask")
LABELS = ("label", "label_ids")  # what transformers' collators hand on as "labels"


class Slots(NamedTuple):
    """A batch in one row, padding and all that is not of tokens still there."""

    per_token: dict[str, Tensor]  # each [slots]
    mask: Tensor  # [slots] bool: which hold tokens
    widths: Tensor  # [S] slots of each sequence
    others: dict[str, Any]


class PackedCollator:
    """Flat batches for a model, which it makes ready for them."""

    def __init__(self, inner: Any, model: Any) -> None:
        """inner: a tokenizer, or the collator that made padded batches so far."""
        packed(model)
        # The model itself is not kept: workers of a DataLoader get a copy of the collator.
        self.head: Head = head_of(model)
        family = AFTER_PADDING[model.config.model_type]
        self.padding_id: int | None = model.config.pad_token_id if family else None
        self.inner: Callable[..., Any] | None = None if _tokenizes(inner) else inner

    def __call__(self, features: Sequence[Any]) -> dict[str, Any]:
        """Tokens as [1, T], boundaries, and labels where the model's head expects them."""
        names = (*PER_TOKEN, "labels") if self.head.token_labels else PER_TOKEN
        slots = _padded(self.inner(features), names) if self.inner else _laid(features, names)
        flat, mask, widths, others = slots
        lengths = _lengths(mask, widths)
        flat.setdefault("position_ids", _positions(flat["input_ids"], slots, self.padding_id))
        if int(lengths.sum()) < len(mask):
            flat = {name: values[mask] for name, values in flat.items()}
        longest = int(lengths.max())
        if "labels" in flat and self.head.rows:
            others["labels"] = _in_rows(flat.pop("labels"), lengths, longest)
        bounds = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(torch.int32)
        told = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
        told |= {"max_length_q": longest, "max_length_k": longest}
        return {**others, **{name: values.unsqueeze(0) for name, values in flat.items()}, **told}


def _laid(features: Sequence[Any], names: Sequence[str]) -> Slots:
    """Sequences as a tokenizer left them, one behind the other."""
    columns = {name: [each[name] for each in features] for name in features[0]}
    for name in LABELS:
        if name in columns:
            columns["labels"] = columns.pop(name)
    widths = torch.tensor([len(ids) for ids in columns["input_ids"]])
    mask = columns.pop("attention_mask", None)
    whole = torch.ones(int(widths.sum()), dtype=torch.bool)
    per_token = {name: _joined(columns.pop(name)) for name in names if name in columns}
    others = {name: _stacked(name, values) for name, values in columns.items()}
    return Slots(per_token, whole if mask is None else _joined(mask).bool(), widths, others)


def _padded(made: Any, names: Sequence[str]) -> Slots:
    """What another collator made, row after row."""
    batch = dict(made)
    if "attention_mask" not in batch:
        raise InputError(
            "the batch has no attention_mask, so padding cannot be told from tokens; let the "
            "tokenizer return it"
        )
    mask = batch.pop("attention_mask").bool()
    if mask.ndim != 2:
        raise InputError(f"the mask is {list(mask.shape)}; it takes a row a sequence")
    per_token = {name: batch.pop(name).flatten() for name in names if name in batch}
    widths = torch.full((len(mask),), mask.shape[1])
    return Slots(per_token, mask.flatten(), widths, batch)


def _joined(values: Sequence[Any]) -> Tensor:
    return torch.from_numpy(np.concatenate([np.asarray(each, np.int64) for each in values]))


def _stacked(name: str, values: Sequence[Any]) -> Tensor:
    try:
        made = torch.from_numpy(np.array(values))
    except (TypeError, ValueError) as error:
        raise InputError(
            f"{name!r} is no column of numbers, as many for each sequence; remove it, or pass the "
            "collator that makes a batch of it in place of the tokenizer"
        ) from error
    return made.float() if made.dtype == torch.float64 else made  # Python's floats are doubles


def _lengths(mask: Tensor, widths: Tensor) -> Tensor:
    """[S] tokens of each sequence."""
    counts = torch.cat([mask.new_zeros(1, dtype=torch.int64), mask.cumsum(0)])
    ends = widths.cumsum(0)
    lengths = counts[ends] - counts[ends - widths]
    if not lengths.all():
        raise InputError(f"sequence {int(lengths.argmin())} has no tokens; leave it out")
    return lengths


def _positions(ids: Tensor, slots: Slots, padding_id: int | None) -> Tensor:
    """[slots] as the model would number them, padding on either side left out of the count."""
    ends = slots.widths.cumsum(0)
    starts = ends - slots.widths
    if padding_id is None:
        # The first token of each sequence: where the count of tokens before it is still its own.
        before = slots.mask.cumsum(0) - slots.mask.long()
        first = torch.searchsorted(before + slots.mask, before[starts] + 1)
        return torch.arange(len(ids)) - first.repeat_interleave(slots.widths)
    counted = ids.ne(padding_id).long()
    total = counted.cumsum(0)
    before = (total - counted)[starts].repeat_interleave(slots.widths)
    return (total - before) * counted + padding_id


def _in_rows(labels: Tensor, lengths: Tensor, longest: int) -> Tensor:
    """[T] to [S, longest]."""
    rows = labels.new_full((len(lengths), longest), IGNORED)
    rows[torch.arange(longest) < lengths[:, None]] = labels
    return rows


def _tokenizes(inner: Any) -> bool:
    return hasattr(inner, "pad") and hasattr(inner, "convert_tokens_to_ids")
