"""Records of fixed width, as the programs of BERT, MLPerf and Graphcore write them, to sequences.

A record is a row of tokens with a few arrays beside it. Three forms are known, and all are one
thing: each place of the row says to which sequence it belongs (its *owner*: 1, 2 …, 0 for padding)
and at which position of it, each masked token names its place, and so does each next-sentence
label. An unpacked record has one owner and its positions are its places; where [CLS] tokens were
moved to the end of the row, for a pooler that takes a slice, their positions still say 0. So no
form needs code of its own: tokens are put where owner and position send them, and the record is
good if that fills every place exactly once.

Nothing is mended: what contradicts itself, or could not be said in a shard (a token that is masked
twice, words in the padding, three segments), is refused with the record's number. All records of a
run are done at once. Shapes: n records, W tokens a row, M masks, K sequences a row at most.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from packhorse.data.packed.examples import Sequences
from packhorse.data.packed.masking import Masks, Specials, narrow
from packhorse.data.packed.packs import cumulative
from packhorse.errors import InputError

WIDEST = 0xFFFF  # tokens of a record: lengths and positions are uint16 everywhere
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
# The features of each form, and the one that only this form has; the first that fits is taken.
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

Where = Callable[[int], str]


@dataclass(frozen=True, slots=True)
class Unpacked:
    """The sequences of some records, in the order of their rows."""

    sequences: Sequences
    offsets: np.ndarray  # [rows+1] the sequence each row begins with, and the end
    records: np.ndarray  # [S] the record each sequence is from
    empty: int  # records without any sequence, which have no row


def unpack(columns: Mapping[str, np.ndarray], vocab_size: int, where: Where) -> Unpacked:
    """The sequences of n records, whose arrays are given by their roles.

    `positions` are missing where records hold one sequence each, and `cls_at` as well where the
    [CLS] tokens are the last of the row. `where` names a record in a message.
    """
    found = _checked(_completed(columns, where), vocab_size, where)
    tokens = _Tokens.of(found, where)
    empty = np.count_nonzero(np.diff(tokens.offsets) == 0)
    if empty and "positions" not in columns:
        refuse(np.diff(tokens.offsets) == 0, where, "its input_mask is 0 throughout")
    return Unpacked(
        sequences=_sequences(found, tokens, vocab_size, where),
        offsets=np.unique(tokens.offsets),
        records=tokens.records,
        empty=int(empty),
    )


def _completed(columns: Mapping[str, np.ndarray], where: Where) -> dict[str, np.ndarray]:
    """All roles, those left out as their form means them, and the widths compared."""
    found = dict(columns)
    (n, width), slots = found["ids"].shape, found["labels"].shape[1]
    if "positions" not in columns:
        found["positions"] = np.broadcast_to(np.arange(width), (n, width))
        found["present"] = np.ones((n, slots), np.int64)
        found["cls_at"] = np.zeros((n, slots), np.int64)
    elif "cls_at" not in columns:
        found["cls_at"] = np.broadcast_to(np.arange(width - slots, width), (n, slots))
    for roles in (TOKEN_ROLES, MASK_ROLES, LABEL_ROLES):
        widths = {role: found[role].shape[1] for role in roles}
        if len(set(widths.values())) > 1 or not widths[roles[0]]:
            raise InputError(f"{where(0)}: its arrays do not have one width: {widths}")
    if slots > width or width > WIDEST:
        raise InputError(f"{where(0)}: {slots} sequences and {width} tokens a row are not read")
    return {role: np.ascontiguousarray(array) for role, array in found.items()}


def _checked(
    columns: dict[str, np.ndarray], vocab_size: int, where: Where
) -> dict[str, np.ndarray]:
    """The same as whole numbers, each in its range, so that one may index with them."""
    width, slots = columns["ids"].shape[1], columns["labels"].shape[1]
    most = {
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
    found = {}
    for role, (highest, what) in most.items():
        array = columns[role]
        good = (array >= 0) & (array <= highest)  # what is not a number is not good
        if array.dtype.kind == "f":
            good &= array == np.floor(array)
        if not good.all():
            refuse(~good, where, f"{what}: {array[~good][0]}, not a whole number up to {highest}")
        found[role] = array.astype(np.int64) if array.dtype.kind == "f" else array
    padding = found["owner"] == 0
    refuse(padding & (found["ids"] != 0), where, "its padding is not empty: it holds token ids")
    refuse(padding & (found["types"] != 0), where, "its padding is not empty: it holds segment ids")
    return found


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Where the tokens of n records go."""

    offsets: np.ndarray  # [n+1] the sequence each record begins with
    records: np.ndarray  # [S] the record each sequence is from
    lengths: np.ndarray  # [S]
    begins: np.ndarray  # [S]
    at: np.ndarray  # [T] places in the records' arrays, flat
    to: np.ndarray  # [T] and in the sequences laid end to end

    @classmethod
    def of(cls, found: dict[str, np.ndarray], where: Where) -> _Tokens:
        owner = found["owner"]
        counts = owner.max(axis=1)
        offsets, records = cumulative(counts), np.repeat(np.arange(len(owner)), counts)
        at = np.flatnonzero(owner)
        sequence = offsets[at // owner.shape[1]] + owner.ravel()[at] - 1
        lengths = np.bincount(sequence, minlength=len(records))
        refuse(lengths == 0, where, "a sequence without tokens between two others", records)
        begins = cumulative(lengths)[:-1]
        to = begins[sequence] + found["positions"].ravel()[at]
        filled = np.zeros(len(at) + owner.shape[1], bool)  # a wrong position may lead beyond
        filled[to] = True
        gaps = ~filled[: len(at)]
        refuse(
            gaps,
            where,
            "the tokens of a sequence are not in one piece (input_mask and positions)",
            np.repeat(records, lengths),
        )
        return cls(offsets, records, lengths, begins, at, to)


def _sequences(
    found: dict[str, np.ndarray], tokens: _Tokens, vocab_size: int, where: Where
) -> Sequences:
    longest, most = found["ids"].shape[1], vocab_size - 1
    ids = np.empty(len(tokens.at), np.uint16 if most <= 0xFFFF else np.uint32)
    ids[tokens.to] = found["ids"].ravel()[tokens.at]
    return Sequences(
        ids=ids,
        lengths=narrow(tokens.lengths, longest),
        first=narrow(_first(found["types"], tokens, where), longest),
        random_next=_labels(found, tokens, where),
        masked=_masks(found, tokens, vocab_size, where),
    )


def _first(types: np.ndarray, tokens: _Tokens, where: Where) -> np.ndarray:
    """[S] the tokens of each sequence's first segment."""
    if not len(tokens.lengths):
        return tokens.lengths
    laid = np.empty(len(tokens.at), np.int64)
    laid[tokens.to] = types.ravel()[tokens.at]
    first = tokens.lengths - np.add.reduceat(laid, tokens.begins)
    within = np.arange(len(laid)) - np.repeat(tokens.begins, tokens.lengths)
    wrong = laid != (within >= np.repeat(first, tokens.lengths))
    wrong |= np.repeat(first == 0, tokens.lengths)
    say = "its segment ids are not 0 and then 1 in each sequence"
    refuse(wrong, where, say, np.repeat(tokens.records, tokens.lengths))
    return first


def _labels(found: dict[str, np.ndarray], tokens: _Tokens, where: Where) -> np.ndarray:
    """[S] whether the second segment is from elsewhere."""
    slot = np.flatnonzero(found["present"])
    record = slot // found["present"].shape[1]
    place = record * found["ids"].shape[1] + found["cls_at"].ravel()[slot]
    owner = found["owner"].ravel()[place]
    astray = (owner == 0) | (found["positions"].ravel()[place] != 0)
    refuse(astray, where, "a next-sentence label that does not point at a first token", record)
    sequence = tokens.offsets[record] + owner - 1
    times = np.bincount(sequence, minlength=len(tokens.lengths))
    refuse(times != 1, where, "a sequence without one next-sentence label", tokens.records)
    labels = np.zeros(len(times), bool)
    labels[sequence] = found["labels"].ravel()[slot] == 1
    return labels


def _masks(found: dict[str, np.ndarray], tokens: _Tokens, vocab_size: int, where: Where) -> Masks:
    longest = found["ids"].shape[1]
    slot = np.flatnonzero(found["masked_owner"])
    record = slot // found["masked_owner"].shape[1]
    place = record * longest + found["masked_at"].ravel()[slot]
    owner = found["owner"].ravel()[place]
    strange = owner != found["masked_owner"].ravel()[slot]
    refuse(strange, where, "a masked token outside its sequence", record)
    sequence = tokens.offsets[record] + owner - 1
    position = found["positions"].ravel()[place]
    laid = tokens.begins[sequence] + position
    order = np.argsort(laid, kind="stable")  # nearly always sorted already
    twice = np.diff(laid[order], prepend=-1) == 0
    refuse(twice, where, "a token that is masked twice", record[order])
    return Masks(
        positions=narrow(position[order], longest),
        ids=narrow(found["masked_ids"].ravel()[slot][order], vocab_size - 1),
        counts=narrow(np.bincount(sequence, minlength=len(tokens.lengths)), longest),
    )


def guess(found: Unpacked, vocab_size: int) -> Specials:
    """The special tokens, from sequences alone: what begins and ends them, and what hides words."""
    s, masks = found.sequences, found.sequences.masked
    begins = cumulative(s.lengths)
    hidden = np.zeros(0, np.int64)
    if masks is not None:
        hidden = s.ids[np.repeat(begins[:-1], masks.counts) + masks.positions]
    counts = np.bincount(hidden, minlength=1)
    if 2 * counts.max() <= len(hidden):
        raise InputError("cannot tell which token is [MASK] from these records; pass --tokenizer")
    cls, sep = int(s.ids[0]), int(s.ids[begins[1] - 1])
    return Specials(cls, sep, mask=int(counts.argmax()), pad=0, vocab_size=vocab_size)


def check_specials(found: Unpacked, specials: Specials, where: Where) -> None:
    """Sequences must begin with [CLS] and each segment end with [SEP]; others are misread."""
    s = found.sequences
    begins = cumulative(s.lengths)
    wrong = s.ids[begins[:-1]] != specials.cls
    refuse(
        wrong, where, f"a sequence that does not begin with [CLS] ({specials.cls})", found.records
    )
    for ends in (begins[:-1] + s.first, begins[1:]):
        wrong = s.ids[ends - 1] != specials.sep
        refuse(
            wrong, where, f"a segment that does not end with [SEP] ({specials.sep})", found.records
        )


def refuse(bad: np.ndarray, where: Where, what: str, records: np.ndarray | None = None) -> None:
    """Name the first record that is bad: a row of `bad`, or the one that `records` gives for it."""
    if bad.any():
        row = int(bad.reshape(len(bad), -1).any(axis=1).argmax())
        raise InputError(f"{where(row if records is None else int(records[row]))}: {what}")
