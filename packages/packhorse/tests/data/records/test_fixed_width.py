"""Sequences laid into records by plain loops come out again; what contradicts itself does not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from packhorse.data.packed.packs import Rows
from packhorse.data.records import fixed_width, tfrecord
from packhorse.errors import InputError

WIDTH, MASKS, MOST, VOCAB = 40, 7, 3, 100


def record_name(record: int) -> str:
    return f"record {record}"


def columns(rows: list[dict[str, list]], form: str) -> dict[str, np.ndarray]:
    names = fixed_width.FORMS[form][1]
    return {role: np.array([row[name] for row in rows]) for role, name in names.items()}


@pytest.fixture
def sequences(record_files: ModuleType, rng: np.random.Generator) -> list:
    return [record_files.draw(rng, WIDTH if i % 2 else 12, VOCAB) for i in range(60)]


@pytest.fixture
def forms(record_files: ModuleType, sequences: list) -> dict[str, tuple[list[dict], list[int]]]:
    """The same sequences in every form, and how many each row holds."""
    rows = record_files.packs(sequences, WIDTH, MOST)
    counts = [len(row) for row in rows]
    assert {1, 2, 3} == set(counts)
    ten = [record_files.ten_arrays(row, WIDTH, MASKS, MOST) for row in rows]
    habana = [{name.removeprefix("packed_"): row[name] for name in row} for row in ten]
    last = [record_files.cls_last(row, WIDTH, MASKS, MOST) for row in rows]
    alone = [record_files.unpacked(sequence, WIDTH, MASKS) for sequence in sequences]
    return {
        "unpacked": (alone, [1] * len(sequences)),
        "packed": (ten, counts),
        "packed, as Habana names it": (habana, counts),
        "packed, [CLS] last": (last, counts),
    }


@pytest.mark.parametrize("form", fixed_width.FORMS)
def test_every_form_gives_the_same_sequences(
    record_files: ModuleType, sequences: list, forms: dict, form: str
) -> None:
    rows, counts = forms[form]
    assert next(name for name, (key, _) in fixed_width.FORMS.items() if key in rows[0]) == form
    result = fixed_width.unpack(columns(rows, form), VOCAB, record_name)
    assert record_files.as_drawn(result.sequences) == sequences
    assert np.diff(result.offsets).tolist() == counts
    assert result.records.tolist() == np.repeat(np.arange(len(rows)), counts).tolist()
    assert result.sequences.ids.dtype == result.sequences.lengths.dtype == np.uint16
    specials = fixed_width.guess(result, VOCAB)
    assert (specials.cls, specials.sep, specials.mask) == (2, 3, 4)
    fixed_width.check_specials(result, specials, record_name)
    assert len(Rows.of(result.sequences, result.offsets)) == len(rows)


def test_rows_without_a_sequence_are_counted(forms: dict, record_files: ModuleType) -> None:
    """Graphcore's packer fills rows with padding sequences, and now and then with nothing else."""
    rows, counts = forms["packed"]
    empty = {name: [0] * len(values) for name, values in rows[0].items()}
    result = fixed_width.unpack(columns([empty, *rows, empty], "packed"), VOCAB, record_name)
    assert result.empty == 2
    assert np.diff(result.offsets).tolist() == counts
    alone, _ = forms["unpacked"]
    alone[2]["input_mask"], alone[2]["input_ids"] = [0] * WIDTH, [0] * WIDTH
    alone[2]["segment_ids"] = [0] * WIDTH
    alone[2]["masked_lm_weights"] = [0] * MASKS
    with pytest.raises(InputError, match="record 2: its input_mask is 0 throughout"):
        fixed_width.unpack(columns(alone, "unpacked"), VOCAB, record_name)


def test_masks_may_come_in_any_order(
    forms: dict, sequences: list, record_files: ModuleType
) -> None:
    result = columns(forms["packed"][0], "packed")
    for role in ("masked_at", "masked_ids", "masked_owner"):
        result[role] = result[role][:, ::-1]
    assert (
        record_files.as_drawn(fixed_width.unpack(result, VOCAB, record_name).sequences) == sequences
    )


Change = Callable[[dict[str, np.ndarray]], None]


def put(role: str, place: int, value: float) -> Change:
    """In record 5."""

    def change(result: dict[str, np.ndarray]) -> None:
        kind = np.int64 if float(value).is_integer() else np.float64
        result[role] = result[role].astype(kind)
        result[role][5, place] = value

    return change


def both(*changes: Change) -> Change:
    def change(result: dict[str, np.ndarray]) -> None:
        for item in changes:
            item(result)

    return change


def swap(role: str, a: int, b: int) -> Change:
    def change(result: dict[str, np.ndarray]) -> None:
        result[role][5, [a, b]] = result[role][5, [b, a]]

    return change


def mask_twice(result: dict[str, np.ndarray]) -> None:
    for role in fixed_width.MASK_ROLES:
        result[role][5, 1] = result[role][5, 0]


def join_two(result: dict[str, np.ndarray]) -> None:
    result["owner"][5] = np.where(result["owner"][5] == 1, 2, result["owner"][5])


OUTSIDE, NO_FIRST = "outside its sequence", "does not point at a first token"
BAD: dict[str, tuple[str, Change, str]] = {
    "an id too large": ("unpacked", put("ids", 1, VOCAB), "vocabulary: 100, not a whole number up"),
    "a negative id": ("packed", put("ids", 1, -1), "not of the vocabulary: -1"),
    "a hole": ("unpacked", put("owner", 2, 0), "padding is not empty"),
    "a hole without a token": (
        "unpacked",
        both(put("ids", 1, 0), put("owner", 1, 0), put("types", 1, 0)),
        "not in one piece",
    ),
    "mask of 2": ("unpacked", put("owner", 0, 2), "input_mask: 2, not a whole number up to 1"),
    "a third segment": ("unpacked", put("types", 0, 2), "segment_ids: 2"),
    "segments the wrong way": ("unpacked", put("types", 0, 1), "not 0 and then 1"),
    "no first segment": (
        "unpacked",
        lambda result: result["types"].__setitem__(5, result["owner"][5]),
        "not 0 and then 1",
    ),
    "padding with a segment": ("packed", put("types", -1, 1), "padding is not empty"),
    "padding with a token": ("packed", put("ids", -1, 9), "padding is not empty"),
    "a position twice": ("packed", put("positions", 2, 1), "not in one piece"),
    "a position beyond": ("packed", put("positions", 1, WIDTH - 1), "not in one piece"),
    "a position outside": ("packed", put("positions", 1, WIDTH), "positions: 40"),
    "a mask outside": ("packed", put("masked_at", 0, WIDTH), "masked_lm_positions: 40"),
    "a mask in the padding": ("packed", put("masked_at", 0, WIDTH - 1), OUTSIDE),
    "a mask of another": ("packed", put("masked_owner", 0, 2), OUTSIDE),
    "a token masked twice": ("packed", mask_twice, "masked twice"),
    "a masked id too large": ("packed", put("masked_ids", 0, VOCAB), "masked token is not of"),
    "half a weight": ("unpacked", put("masked_owner", 0, 0.5), "masked_lm_weights: 0.5"),
    "a weight of 2": ("unpacked", put("masked_owner", 0, 2), "masked_lm_weights: 2"),
    "not a number": ("unpacked", put("masked_owner", 0, np.nan), "masked_lm_weights: nan"),
    "a label of 2": ("packed", put("labels", 0, 2), "next_sentence_labels: 2"),
    "no label": ("packed", put("present", 0, 0), "without one next-sentence label"),
    "a label of the padding": ("packed", put("cls_at", 2, WIDTH - 1), NO_FIRST),
    "a label of no [CLS]": ("packed", put("cls_at", 0, 1), NO_FIRST),
    "two labels of one": ("packed", put("cls_at", 1, 0), "without one next-sentence label"),
    "[CLS] astray": ("packed, [CLS] last", swap("owner", -1, -4), "padding|piece|segment"),
    "two sequences in one": ("packed", join_two, "without tokens|not in one piece"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_contradicts_itself_is_refused(forms: dict, name: str) -> None:
    form, harm, message = BAD[name]
    result = columns(forms[form][0], form)
    harm(result)
    with pytest.raises(InputError, match=rf"record 5: .*({message})"):
        fixed_width.unpack(result, VOCAB, record_name)


def test_widths_must_agree(forms: dict) -> None:
    result = columns(forms["packed"][0], "packed")
    with pytest.raises(InputError, match=r"one width: .*'types': 39"):
        fixed_width.unpack(result | {"types": result["types"][:, 1:]}, VOCAB, record_name)
    with pytest.raises(InputError, match="one width"):
        fixed_width.unpack(result | {"masked_at": result["masked_at"][:, 1:]}, VOCAB, record_name)
    with pytest.raises(InputError, match="one width"):
        fixed_width.unpack(
            result | {role: result[role][:, :0] for role in fixed_width.MASK_ROLES},
            VOCAB,
            record_name,
        )


def test_special_tokens_are_checked(forms: dict) -> None:
    result = columns(forms["unpacked"][0], "unpacked")
    specials = fixed_width.guess(fixed_width.unpack(result, VOCAB, record_name), VOCAB)
    for place, message in ((0, r"begin with \[CLS\] \(2\)"), (-1, r"end with \[SEP\] \(3\)")):
        harmed = result | {"ids": result["ids"].copy()}
        length = result["owner"][7].sum()
        harmed["ids"][7, place % length] = 50
        unpacked = fixed_width.unpack(harmed, VOCAB, record_name)
        with pytest.raises(InputError, match=f"record 7: .*{message}"):
            fixed_width.check_specials(unpacked, specials, record_name)


def test_without_masks_the_mask_token_is_not_guessed(forms: dict) -> None:
    result = columns(forms["unpacked"][0], "unpacked")
    result["masked_owner"][:] = 0
    with pytest.raises(InputError, match="pass --tokenizer"):
        fixed_width.guess(fixed_width.unpack(result, VOCAB, record_name), VOCAB)


def test_the_real_file(shared_data: Path) -> None:
    """Graphcore's sample: 44 rows, one of two sequences, [CLS] tokens at the end of each row."""
    path = shared_data / "packing" / "sample_text_packed.tfrecord"
    index = path.with_suffix(".index").read_text().split("\n")
    (run,) = tfrecord.read_blocks(path)
    assert [f"{at} {len(data) + 16}" for at, data in zip(run.offsets, run.data, strict=True)] == [
        line for line in index if line
    ]
    names = fixed_width.FORMS["packed, [CLS] last"][1]
    assert set(names.values()) == tfrecord.feature_names(run)
    table = tfrecord.read_features(run, [*names.values()])
    result = fixed_width.unpack(
        {role: table[name] for role, name in names.items()}, 30522, run.place
    )
    specials = fixed_width.guess(result, 30522)
    assert (specials.cls, specials.sep, specials.mask) == (101, 102, 103)
    fixed_width.check_specials(result, specials, run.place)
    assert (len(result.offsets) - 1, len(result.sequences.lengths)) == (44, 45)
    assert result.sequences.lengths.max() == 128
    words = (shared_data / "vocab" / "bert-base-uncased-vocab.txt").read_text().split("\n")
    begin = " ".join(words[token] for token in result.sequences.ids[:13])
    assert begin == "[CLS] this text is included to make sure [MASK] is handled properly :"
    masks = result.sequences.masked
    assert masks is not None and words[masks.ids[0]] == "unicode"
