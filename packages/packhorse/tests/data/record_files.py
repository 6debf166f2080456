"""Records as the programs of MLPerf and Graphcore write them, put together by plain loops.

The reference for what is read: sequences are drawn, laid into the arrays of each form by its
definition, and written as TFRecords or as words. Tests find it through the fixture `record_files`.
"""

from __future__ import annotations

import gzip
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from packhorse import wire

CLS, SEP, MASK = 2, 3, 4
FIRST_WORD = 5
COMPRESSIONS = {"none": bytes, "gzip": gzip.compress, "zlib": zlib.compress}
Features = dict[str, list[int] | list[float]]


@dataclass(frozen=True)
class DrawnSequence:
    """One sequence: tokens as shown, tokens of its first segment, its label, what was masked."""

    ids: tuple[int, ...]
    first: int
    random_next: bool
    masked: tuple[tuple[int, int], ...]  # (position, the token that stood there)


def draw(rng: np.random.Generator, longest: int, vocab: int, shortest: int = 5) -> DrawnSequence:
    """A pair of segments with about 15 % masks, most of them shown as [MASK]."""
    length = int(rng.integers(shortest, longest + 1))
    first = int(rng.integers(3, length - 1))
    ids = rng.integers(FIRST_WORD, vocab, length)
    ids[0], ids[first - 1], ids[-1] = CLS, SEP, SEP
    free = [place for place in range(1, length - 1) if place != first - 1]
    count = min(max(1, round(0.15 * length)), len(free))
    places = sorted(rng.choice(free, count, replace=False).tolist())
    masked = tuple((place, int(ids[place])) for place in places)
    for number, place in enumerate(places):
        if number % 5 != 4:
            ids[place] = MASK
    return DrawnSequence(tuple(ids.tolist()), first, bool(rng.integers(2)), masked)


def types(drawn: DrawnSequence) -> list[int]:
    return [int(place >= drawn.first) for place in range(len(drawn.ids))]


def padded(values: Iterable[int], width: int) -> list[int]:
    values = list(values)
    assert len(values) <= width
    return values + [0] * (width - len(values))


def unpacked(drawn: DrawnSequence, width: int, masks: int) -> Features:
    """MLPerf's seven features."""
    return {
        "input_ids": padded(drawn.ids, width),
        "input_mask": padded([1] * len(drawn.ids), width),
        "segment_ids": padded(types(drawn), width),
        "masked_lm_positions": padded((place for place, _ in drawn.masked), masks),
        "masked_lm_ids": padded((token for _, token in drawn.masked), masks),
        "masked_lm_weights": [float(n) for n in padded([1] * len(drawn.masked), masks)],
        "next_sentence_labels": [int(drawn.random_next)],
    }


def ten_arrays(pack: Sequence[DrawnSequence], width: int, masks: int, most: int) -> Features:
    """Graphcore's packed layout: sequences end to end, everything with the sequence's number."""
    tokens: dict[str, list[int]] = {name: [] for name in ("ids", "mask", "types", "positions")}
    marked: dict[str, list[int]] = {name: [] for name in ("at", "ids", "owner")}
    begins = []
    for number, drawn in enumerate(pack, 1):
        begin = len(tokens["ids"])
        begins.append(begin)
        tokens["ids"] += drawn.ids
        tokens["mask"] += [number] * len(drawn.ids)
        tokens["types"] += types(drawn)
        tokens["positions"] += range(len(drawn.ids))
        marked["at"] += [begin + place for place, _ in drawn.masked]
        marked["ids"] += [token for _, token in drawn.masked]
        marked["owner"] += [number] * len(drawn.masked)
    return {
        "packed_input_ids": padded(tokens["ids"], width),
        "packed_input_mask": padded(tokens["mask"], width),
        "packed_segment_ids": padded(tokens["types"], width),
        "packed_positions": padded(tokens["positions"], width),
        "packed_masked_lm_positions": padded(marked["at"], masks + most),
        "packed_masked_lm_ids": padded(marked["ids"], masks + most),
        "packed_masked_lm_weights": padded(marked["owner"], masks + most),
        "packed_next_sentence_positions": padded(begins, most),
        "packed_next_sentence_labels": padded((int(drawn.random_next) for drawn in pack), most),
        "packed_next_sentence_weights": padded([1] * len(pack), most),
    }


def cls_last(pack: Sequence[DrawnSequence], width: int, masks: int, most: int) -> Features:
    """Graphcore's other packed layout: the [CLS] tokens are the last of the row, in reverse."""
    rows = {name: [0] * width for name in ("input_ids", "input_mask", "segment_ids")}
    positions = [0] * width
    marked: dict[str, list[int]] = {name: [] for name in ("at", "ids", "owner")}
    labels, present, at = [0] * most, [0.0] * most, 0
    for number, drawn in enumerate(pack, 1):
        for place, token in enumerate(drawn.ids):
            column = at + place - 1 if place else width - number
            rows["input_ids"][column] = token
            rows["input_mask"][column] = number
            rows["segment_ids"][column] = int(place >= drawn.first)
            positions[column] = place
        marked["at"] += [at + place - 1 for place, _ in drawn.masked]
        marked["ids"] += [token for _, token in drawn.masked]
        marked["owner"] += [number] * len(drawn.masked)
        labels[most - number], present[most - number] = int(drawn.random_next), 1.0
        at += len(drawn.ids) - 1
    slots = masks + most - 1
    return {
        **{f"packed_{name}": row for name, row in rows.items()},
        "packed_position_ids": positions,
        "packed_masked_lm_positions": padded(marked["at"], slots),
        "packed_masked_lm_ids": padded(marked["ids"], slots),
        "packed_masked_lm_mask": [float(n) for n in padded(marked["owner"], slots)],
        "packed_next_sentence_labels": labels,
        "packed_next_sentence_mask": present,
    }


def packs(drawn: Sequence[DrawnSequence], width: int, most: int) -> list[list[DrawnSequence]]:
    """Sequences in their order, as many a row as fit."""
    rows: list[list[DrawnSequence]] = []
    for sequence in drawn:
        last = rows[-1] if rows else []
        if rows and len(last) < most and sum(len(m.ids) for m in [*last, sequence]) <= width:
            last.append(sequence)
        else:
            rows.append([sequence])
    return rows


def example(features: Mapping[str, Sequence[int] | Sequence[float]], packed: bool = True) -> bytes:
    """A tf.train.Example; `packed` is about the encoding of its lists, not about sequences."""
    return wire.write_field(
        1, b"".join(wire.write_field(1, entry(*item, packed)) for item in features.items())
    )


def entry(name: str, values: Sequence[int] | Sequence[float], packed: bool = True) -> bytes:
    floats = any(isinstance(value, float) for value in values)
    if floats:
        parts = [struct.pack("<f", value) for value in values]
    else:
        parts = [wire.write_varint(int(value)) for value in values]
    kind, tag = (2, 1 << 3 | wire.FIXED32) if floats else (3, 1 << 3 | wire.VARINT)
    if packed:
        content = wire.write_field(1, b"".join(parts))
    else:
        content = b"".join(wire.write_varint(tag) + part for part in parts)
    return wire.write_field(1, name) + wire.write_field(2, wire.write_field(kind, content))


def frame(record: bytes) -> bytes:
    """A record as it stands in a TFRecord file."""
    length = struct.pack("<Q", len(record))
    sums = (struct.pack("<I", wire.mask(wire.crc32c(part))) for part in (length, record))
    return length + next(sums) + record + next(sums)


def write(path: Path, records: Iterable[bytes], compression: str = "none") -> Path:
    path.write_bytes(COMPRESSIONS[compression](b"".join(map(frame, records))))
    return path


def words(features: Features) -> bytes:
    """A record of Graphcore's headerless files: the arrays one after the other."""
    return np.concatenate([np.array(v).astype("<u4") for v in features.values()]).tobytes()


def as_drawn(sequences) -> list[DrawnSequence]:
    """What was read, one by one, to be compared with what was made."""
    result, token, mask = [], 0, 0
    for number, length in enumerate(sequences.lengths.tolist()):
        count = int(sequences.masked.counts[number])
        places = sequences.masked.positions[mask : mask + count].tolist()
        ids = sequences.masked.ids[mask : mask + count].tolist()
        result.append(
            DrawnSequence(
                tuple(sequences.ids[token : token + length].tolist()),
                int(sequences.first[number]),
                bool(sequences.random_next[number]),
                tuple(zip(places, ids, strict=True)),
            )
        )
        token, mask = token + length, mask + count
    return result
