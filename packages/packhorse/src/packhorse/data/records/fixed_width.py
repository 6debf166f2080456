"""Sequences from records of fixed width, as the programs of BERT, MLPerf and Graphcore write them.

A record is a row of tokens with a few more arrays. Three forms are known, and all are special cases
of one: each slot of the row has the number of its sequence (its *owner*: 1, 2 …, 0 for padding) and
the position in it; each masked token has its slot, and so has each next-sentence label. An unpacked
record has one owner, and its positions are its slots. Where [CLS] tokens were moved to the end of
the row, for a pooler that takes a slice, their positions are still 0. So no form needs code of its
own: tokens go to where owner and position send them, and the record is valid if that fills every
place exactly once.

Nothing is repaired: a record that contradicts itself, or that a shard could not represent (a token
that is masked twice, words in the padding, three segments), is refused with its number. All records
of a block are processed at once.

Shapes: n records, W tokens per row, M masks, K sequences per row at most.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from packhorse.data.packed.examples import Sequences
from packhorse.data.packed.masking import Masks, Specials, narrow
from packhorse.data.packed.packs import cumulative
from packhorse.errors import InputError

WIDEST = 0xFFFF  # tokens per record: lengths and positions are stored as uint16
TOKEN_ROLES = ("ids", "owner", "types", "positions")  # [n, W]
MASK_ROLES = ("masked_at", "masked_ids", "masked_owner")  # [n, M]
LABEL_ROLES = ("labels", "present", "cls_at")  # [n, K]

UNPACKED = {
    "ids": "input_ids",
    "owner": "input_mask",
    "types": "segment_ids",
    "masked_at": "masked_lm_positions",
    "masked_ids": "masked_lm_ids",
    "masked_owner": "masked_lm_weights",
    "labels": "next_sentence_labels",
}
TEN_ARRAYS = UNPACKED | {
    "positions": "positions",
    "cls_at": "next_sentence_positions",
    "present": "next_sentence_weights",
}
CLS_LAST = UNPACKED | {
    "positions": "position_ids",
    "masked_owner": "masked_lm_mask",
    "present": "next_sentence_mask",
}
# The feature that only this form has, and the names of all by role; the first match is used.
FORMS: dict[str, tuple[str, dict[str, str]]] = {
    "packed, [CLS] last": (
        "packed_position_ids",
        {role: f"packed_{name}" for role, name in CLS_LAST.items()},
    ),
    "packed": (
        "packed_positions",
        {role: f"packed_{name}" for role, name in TEN_ARRAYS.items()},
    ),
    "packed, as Habana names it": ("positions", TEN_ARRAYS),
    "unpacked": ("input_ids", UNPACKED),
}

PlaceOf = Callable[[int], str]  # how messages name a record, from its index


@dataclass(frozen=True, slots=True)
class Unpacked:
    """The sequences of records, in the order of their rows."""

    sequences: Sequences
    offsets: np.ndarray  # [rows+1] the sequence each row begins with, and the end
    records: np.ndarray  # [S] the record that each sequence is from
    empty: int  # records without any sequence, which make no row


def unpack(columns: Mapping[str, np.ndarray], vocab_size: int, place: PlaceOf) -> Unpacked:
    """Extract the sequences of n records from their arrays, which are keyed by role.

    `positions` is absent if records hold one sequence each, and `cls_at` if the [CLS] tokens are
    the last of the row. `place` names a record in messages.
    """
    checked = _checked(_completed(columns, place), vocab_size, place)
    tokens = _TokenPlacement.of(checked, place)
    empty = np.diff(tokens.offsets) == 0
    if "positions" not in columns:  # an unpacked record must hold a sequence
        refuse(empty, place, "its input_mask is 0 throughout")
    return Unpacked(
        sequences=_sequences(checked, tokens, vocab_size, place),
        offsets=np.unique(tokens.offsets),  # a record without a sequence repeats its offset
        records=tokens.records,
        empty=int(np.count_nonzero(empty)),
    )


def _completed(columns: Mapping[str, np.ndarray], place: PlaceOf) -> dict[str, np.ndarray]:
    """Add the arrays that a form leaves out, and check that widths agree."""
    completed = dict(columns)
    n, width = columns["ids"].shape
    slots = columns["labels"].shape[1]
    if "positions" not in columns:
        completed["positions"] = np.broadcast_to(np.arange(width), (n, width))
        completed["present"] = np.ones((n, slots), np.int64)
        completed["cls_at"] = np.zeros((n, slots), np.int64)
    elif "cls_at" not in columns:
        completed["cls_at"] = np.broadcast_to(np.arange(width - slots, width), (n, slots))
    for roles in (TOKEN_ROLES, MASK_ROLES, LABEL_ROLES):
        widths = {role: completed[role].shape[1] for role in roles}
        if len(set(widths.values())) > 1 or not widths[roles[0]]:
            raise InputError(f"{place(0)}: its arrays do not have one width: {widths}")
    if slots > width or width > WIDEST:
        raise InputError(f"{place(0)}: {slots} sequences and {width} tokens per row are too many")
    return {role: np.ascontiguousarray(array) for role, array in completed.items()}


def _checked(
    columns: dict[str, np.ndarray], vocab_size: int, place: PlaceOf
) -> dict[str, np.ndarray]:
    """Check that all numbers are whole and in range, so that they can be used as indices."""
    width = columns["ids"].shape[1]
    slots = columns["labels"].shape[1]
    limits = {
        "ids": (vocab_size - 1, "a token is not of the vocabulary"),
        "masked_ids": (vocab_size - 1, "a masked token is not of the vocabulary"),
        "owner": (slots, "input_mask"),
        "types": (1, "segment_ids"),
        "positions": (width - 1, "positions"),
        "masked_at": (width - 1, "masked_lm_positions"),
        "masked_owner": (slots, "masked_lm_weights"),
        "labels": (1, "next_sentence_labels"),
        "present": (1, "next_sentence_weights"),
        "cls_at": (width - 1, "next_sentence_positions"),
    }
    checked: dict[str, np.ndarray] = {}
    for role, (highest, message) in limits.items():
        array = columns[role]
        good = (array >= 0) & (array <= highest)  # False for NaN
        if array.dtype.kind == "f":
            good &= array == np.floor(array)
        if not good.all():
            refuse(
                ~good, place, f"{message}: {array[~good][0]}, not a whole number up to {highest}"
            )
        checked[role] = array.astype(np.int64) if array.dtype.kind == "f" else array
    padding = checked["owner"] == 0
    for role, message in (("ids", "token ids"), ("types", "segment ids")):
        refuse(
            padding & (checked[role] != 0),
            place,
            f"its padding is not empty: it holds {message}",
        )
    return checked


@dataclass(frozen=True, slots=True)
class _TokenPlacement:
    """Which token of the records goes to which place of the sequences."""

    offsets: np.ndarray  # [n+1] the sequence that each record begins with
    records: np.ndarray  # [S] the record that each sequence is from
    lengths: np.ndarray  # [S]
    begins: np.ndarray  # [S] in the sequences laid end to end
    source: np.ndarray  # [T] indices into the records' arrays, flattened
    target: np.ndarray  # [T] indices into the sequences laid end to end

    @classmethod
    def of(cls, columns: dict[str, np.ndarray], place: PlaceOf) -> _TokenPlacement:
        owner = columns["owner"]
        counts = owner.max(axis=1)
        offsets = cumulative(counts)
        records = np.repeat(np.arange(len(owner)), counts)
        source = np.flatnonzero(owner)
        sequence = offsets[source // owner.shape[1]] + owner.ravel()[source] - 1
        lengths = np.bincount(sequence, minlength=len(records))
        refuse(lengths == 0, place, "a sequence without tokens between two others", records)
        begins = cumulative(lengths)[:-1]
        target = begins[sequence] + columns["positions"].ravel()[source]
        # Larger by one row, because a wrong position may lead beyond the last token.
        filled = np.zeros(len(source) + owner.shape[1], bool)
        filled[target] = True
        gaps = ~filled[: len(source)]
        refuse(
            gaps,
            place,
            "the tokens of a sequence are not in one piece (input_mask and positions)",
            np.repeat(records, lengths),
        )
        return cls(offsets, records, lengths, begins, source, target)


def _sequences(
    columns: dict[str, np.ndarray], tokens: _TokenPlacement, vocab_size: int, place: PlaceOf
) -> Sequences:
    longest = columns["ids"].shape[1]
    ids = np.empty(len(tokens.source), np.uint16 if vocab_size <= 1 << 16 else np.uint32)
    ids[tokens.target] = columns["ids"].ravel()[tokens.source]
    return Sequences(
        ids=ids,
        lengths=narrow(tokens.lengths, longest),
        first=narrow(_first_segments(columns["types"], tokens, place), longest),
        random_next=_labels(columns, tokens, place),
        masked=_masks(columns, tokens, vocab_size, place),
    )


def _first_segments(types: np.ndarray, tokens: _TokenPlacement, place: PlaceOf) -> np.ndarray:
    """[S] how many tokens the first segment of each sequence has."""
    if not len(tokens.lengths):
        return tokens.lengths
    segments = np.empty(len(tokens.source), np.int64)  # [T] 0 or 1, sequences laid end to end
    segments[tokens.target] = types.ravel()[tokens.source]
    first = tokens.lengths - np.add.reduceat(segments, tokens.begins)
    positions = np.arange(len(segments)) - np.repeat(tokens.begins, tokens.lengths)
    wrong = segments != (positions >= np.repeat(first, tokens.lengths))
    wrong |= np.repeat(first == 0, tokens.lengths)
    message = "its segment ids are not 0 and then 1 in each sequence"
    refuse(wrong, place, message, np.repeat(tokens.records, tokens.lengths))
    return first


def _labels(columns: dict[str, np.ndarray], tokens: _TokenPlacement, place: PlaceOf) -> np.ndarray:
    """[S] whether the second segment is from another document."""
    slot = np.flatnonzero(columns["present"])
    record = slot // columns["present"].shape[1]
    token = record * columns["ids"].shape[1] + columns["cls_at"].ravel()[slot]
    owner = columns["owner"].ravel()[token]
    misplaced = (owner == 0) | (columns["positions"].ravel()[token] != 0)
    refuse(misplaced, place, "a next-sentence label that does not point at a first token", record)
    sequence = tokens.offsets[record] + owner - 1
    label_counts = np.bincount(sequence, minlength=len(tokens.lengths))
    refuse(label_counts != 1, place, "a sequence without one next-sentence label", tokens.records)
    labels = np.zeros(len(label_counts), bool)
    labels[sequence] = columns["labels"].ravel()[slot] == 1
    return labels


def _masks(
    columns: dict[str, np.ndarray], tokens: _TokenPlacement, vocab_size: int, place: PlaceOf
) -> Masks:
    longest = columns["ids"].shape[1]
    slot = np.flatnonzero(columns["masked_owner"])
    record = slot // columns["masked_owner"].shape[1]
    token = record * longest + columns["masked_at"].ravel()[slot]
    owner = columns["owner"].ravel()[token]
    misplaced = owner != columns["masked_owner"].ravel()[slot]
    refuse(misplaced, place, "a masked token outside its sequence", record)
    sequence = tokens.offsets[record] + owner - 1
    position = columns["positions"].ravel()[token]
    target = tokens.begins[sequence] + position  # in the sequences laid end to end
    order = np.argsort(target, kind="stable")  # nearly always sorted already
    twice = np.diff(target[order], prepend=-1) == 0
    refuse(twice, place, "a token that is masked twice", record[order])
    return Masks(
        positions=narrow(position[order], longest),
        ids=narrow(columns["masked_ids"].ravel()[slot][order], vocab_size - 1),
        counts=narrow(np.bincount(sequence, minlength=len(tokens.lengths)), longest),
    )


def guess(unpacked: Unpacked, vocab_size: int) -> Specials:
    """Guess the special tokens: those that begin and end sequences, and the most frequent mask."""
    s = unpacked.sequences
    masks = s.masked
    begins = cumulative(s.lengths)
    visible = np.zeros(0, np.int64)  # the tokens that stand at masked positions
    if masks is not None:
        visible = s.ids[np.repeat(begins[:-1], masks.counts) + masks.positions]
    counts = np.bincount(visible, minlength=1)
    # In BERT's recipe [MASK] is 80 % of them; a token with half of them or less may be another.
    if 2 * counts.max() <= len(visible):
        raise InputError("cannot tell from these records which token is [MASK]; pass --tokenizer")
    cls = int(s.ids[0])
    sep = int(s.ids[begins[1] - 1])
    return Specials(cls, sep, mask=int(counts.argmax()), pad=0, vocab_size=vocab_size)


def check_specials(unpacked: Unpacked, specials: Specials, place: PlaceOf) -> None:
    """Check that sequences begin with [CLS] and segments end with [SEP]."""
    s = unpacked.sequences
    begins = cumulative(s.lengths)
    wrong = s.ids[begins[:-1]] != specials.cls
    refuse(
        wrong,
        place,
        f"a sequence that does not begin with [CLS] ({specials.cls})",
        unpacked.records,
    )
    for ends in (begins[:-1] + s.first, begins[1:]):
        wrong = s.ids[ends - 1] != specials.sep
        refuse(
            wrong,
            place,
            f"a segment that does not end with [SEP] ({specials.sep})",
            unpacked.records,
        )


def refuse(
    bad: np.ndarray, place: PlaceOf, message: str, records: np.ndarray | None = None
) -> None:
    """Raise an error for the first record that is bad.

    A row of `bad` is a record, or belongs to the record that `records` has for it.
    """
    if bad.any():
        row = int(bad.reshape(len(bad), -1).any(axis=1).argmax())
        raise InputError(f"{place(row if records is None else int(records[row]))}: {message}")
