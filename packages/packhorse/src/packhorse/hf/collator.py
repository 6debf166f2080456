"""A collator that makes flat batches for transformers' Trainer, with explicit boundaries.

    PackedCollator(tokenizer, model)
    PackedCollator(DataCollatorForLanguageModeling(tokenizer), model)

With a tokenizer the sequences are laid end to end as they are; that takes a tenth of the time of
padding them. A collator that a script already has does its own work, such as masking words or
padding labels, with the same random draws as before; then its padding is removed. So a step has the
same sequences and the same gradient as a padded step, and keeps all features of the inner collator.

Positions restart in each sequence, for the RoBERTa family after the padding id, as the model itself
would number the padded batch. Boundaries have the names that transformers uses.

Shapes: T tokens, S sequences, L columns of a padded batch.
"""

# torch leaves some of its functions untyped (from_numpy, tolist, split …).
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from packhorse.errors import InputError
from packhorse.hf.families import AFTER_PADDING
from packhorse.hf.heads import Head, head_of, packed

IGNORED = -100  # the label that the losses of transformers ignore
PER_TOKEN = ("input_ids", "token_type_ids", "position_ids", "special_tokens_mask")
LABELS = ("label", "label_ids")  # transformers' collators rename these to "labels"


class CollatedSlots(NamedTuple):
    """A batch in one row, padding included; a slot holds a token or padding."""

    per_token: dict[str, Tensor]  # [slots] by name
    mask: Tensor  # [slots] bool: which hold tokens
    widths: Tensor  # [S] slots of each sequence
    per_sequence: dict[str, Any]


class PackedCollator:
    """Makes flat batches for a model, and prepares the model for them."""

    def __init__(self, inner: Any, model: Any) -> None:
        """inner: a tokenizer, or the collator that makes padded batches."""
        packed(model)
        # The model is not stored: workers of a DataLoader get a copy of the collator.
        self.head: Head = head_of(model)
        after_padding = AFTER_PADDING[model.config.model_type]
        self.padding_id: int | None = model.config.pad_token_id if after_padding else None
        self.inner: Callable[..., Any] | None = None if _is_tokenizer(inner) else inner

    def __call__(self, features: Sequence[Any]) -> dict[str, Any]:
        """Return tokens as [1, T], boundaries, and labels in the shape that the head expects."""
        names = (*PER_TOKEN, "labels") if self.head.token_labels else PER_TOKEN
        if self.inner:
            slots = _from_padded(self.inner(features), names)
        else:
            slots = _from_features(features, names)
        flat, mask, widths, per_sequence = slots
        lengths = _lengths(mask, widths)
        flat.setdefault("position_ids", _positions(flat["input_ids"], slots, self.padding_id))
        if int(lengths.sum()) < len(mask):
            flat = {name: values[mask] for name, values in flat.items()}
        longest = int(lengths.max())
        if "labels" in flat and self.head.rows:
            per_sequence["labels"] = _in_rows(flat.pop("labels"), lengths, longest)
        bounds = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(torch.int32)
        return {
            **per_sequence,
            **{name: values.unsqueeze(0) for name, values in flat.items()},
            "cu_seq_lens_q": bounds,
            "cu_seq_lens_k": bounds,
            "max_length_q": longest,
            "max_length_k": longest,
        }


def _from_features(features: Sequence[Any], names: Sequence[str]) -> CollatedSlots:
    """Lay sequences, as a tokenizer returned them, end to end."""
    columns = {name: [feature[name] for feature in features] for name in features[0]}
    for name in LABELS:
        if name in columns:
            columns["labels"] = columns.pop(name)
    widths = torch.tensor([len(ids) for ids in columns["input_ids"]])
    mask = columns.pop("attention_mask", None)
    if mask is None:
        is_token = torch.ones(int(widths.sum()), dtype=torch.bool)
    else:
        is_token = _joined(mask).bool()
    per_token = {name: _joined(columns.pop(name)) for name in names if name in columns}
    per_sequence = {name: _stacked(name, values) for name, values in columns.items()}
    return CollatedSlots(per_token, is_token, widths, per_sequence)


def _from_padded(padded: Any, names: Sequence[str]) -> CollatedSlots:
    """Lay the rows of another collator's batch end to end, with their padding."""
    batch = dict(padded)
    if "attention_mask" not in batch:
        raise InputError(
            "the batch has no attention_mask, which marks the padding; let the tokenizer return it"
        )
    mask = batch.pop("attention_mask").bool()
    if mask.ndim != 2:
        raise InputError(
            f"attention_mask has shape {list(mask.shape)}; it must have one row per sequence"
        )
    per_token = {name: batch.pop(name).flatten() for name in names if name in batch}
    widths = torch.full((len(mask),), mask.shape[1])
    return CollatedSlots(per_token, mask.flatten(), widths, batch)


def _joined(values: Sequence[Any]) -> Tensor:
    return torch.from_numpy(np.concatenate([np.asarray(row, np.int64) for row in values]))


def _stacked(name: str, values: Sequence[Any]) -> Tensor:
    try:
        column = torch.from_numpy(np.array(values))
    except (TypeError, ValueError) as error:
        raise InputError(
            f"{name!r} is not a column of numbers, equally many per sequence; remove it, or pass a "
            "collator that can batch it instead of the tokenizer"
        ) from error
    # Python's floats arrive as doubles, which no loss expects.
    return column.float() if column.dtype == torch.float64 else column


def _lengths(mask: Tensor, widths: Tensor) -> Tensor:
    """Return the tokens of each sequence, [S]."""
    counts = torch.cat([mask.new_zeros(1, dtype=torch.int64), mask.cumsum(0)])
    ends = widths.cumsum(0)
    lengths = counts[ends] - counts[ends - widths]
    if not lengths.all():
        raise InputError(f"sequence {int(lengths.argmin())} has no tokens; leave it out")
    return lengths


def _positions(ids: Tensor, slots: CollatedSlots, padding_id: int | None) -> Tensor:
    """Return the positions, [slots], as the model would number them; padding is not counted."""
    ends = slots.widths.cumsum(0)
    starts = ends - slots.widths
    if padding_id is None:
        # The first token of each sequence is the first slot where the count of tokens exceeds the
        # count at the start of the sequence: padding may come before it.
        before = slots.mask.cumsum(0) - slots.mask.long()
        first = torch.searchsorted(before + slots.mask, before[starts] + 1)
        return torch.arange(len(ids)) - first.repeat_interleave(slots.widths)
    counted = ids.ne(padding_id).long()
    total = counted.cumsum(0)
    before = (total - counted)[starts].repeat_interleave(slots.widths)
    return (total - before) * counted + padding_id


def _in_rows(labels: Tensor, lengths: Tensor, longest: int) -> Tensor:
    """Lay labels out in rows: [T] to [S, longest]."""
    rows = labels.new_full((len(lengths), longest), IGNORED)
    rows[torch.arange(longest) < lengths[:, None]] = labels
    return rows


def _is_tokenizer(inner: Any) -> bool:
    return hasattr(inner, "pad") and hasattr(inner, "convert_tokens_to_ids")
