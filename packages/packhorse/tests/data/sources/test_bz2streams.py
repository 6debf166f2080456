"""Streams are found wherever they begin, and damage costs no more than it must."""

from __future__ import annotations

import bz2
import random
import re
from pathlib import Path

import pytest

from packhorse.data.sources import bz2streams
from packhorse.data.sources.bz2streams import starts, unpacked


def texts(count: int, size: int = 3000) -> list[bytes]:
    rng = random.Random(count)
    return [bytes(rng.choices(b"abcdefgh \n", k=size)) for _ in range(count)]


def write(path: Path, streams: list[bytes]) -> list[int]:
    path.write_bytes(b"".join(streams))
    return [sum(map(len, streams[:i])) for i in range(len(streams))]


def text_of(path: Path, begin: int = 0, end: int | None = None) -> tuple[bytes, list[str]]:
    pieces = list(unpacked(path, begin, end))
    return b"".join(text for text, _ in pieces), [reason for _, reason in pieces if reason]


@pytest.mark.parametrize("block", [16, 97, 1 << 20])
def test_every_stream_is_found_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(bz2streams, "BLOCK_BYTES", block)
    packed = [bz2.compress(text, 1 + i % 9) for i, text in enumerate([*texts(20, 200), b""])]
    places = write(tmp_path / "a.bz2", packed)
    assert list(starts(tmp_path / "a.bz2")) == places
    assert list(starts(tmp_path / "a.bz2", places[3] + 1)) == places[4:]


def test_a_range_of_streams_is_their_text(tmp_path: Path) -> None:
    whole = texts(6)
    places = write(tmp_path / "a.bz2", [bz2.compress(text) for text in whole])
    assert text_of(tmp_path / "a.bz2") == (b"".join(whole), [])
    assert text_of(tmp_path / "a.bz2", places[2], places[4]) == (b"".join(whole[2:4]), [])


def test_a_damaged_stream_is_lost_and_the_others_are_not(tmp_path: Path) -> None:
    whole = texts(4)
    packed = [bytearray(bz2.compress(text)) for text in whole]
    packed[1][len(packed[1]) // 2] ^= 4
    places = write(tmp_path / "a.bz2", [bytes(stream) for stream in packed])
    text, problems = text_of(tmp_path / "a.bz2")
    assert text == whole[0] + whole[2] + whole[3]
    assert problems == [f"damaged bz2 data, lost from byte {places[1]} to byte {places[2]}"]


@pytest.mark.parametrize("following", [3, 6, 40])
def test_what_is_lost_lies_before_the_next_stream(tmp_path: Path, following: int) -> None:
    """Damage near a stream's end is found when the next stream's first bytes are already fed."""
    packed = [bytearray(bz2.compress(text)) for text in texts(3, 150)]
    packed[1][-following] ^= 4
    places = write(tmp_path / "a.bz2", [bytes(stream) for stream in packed])
    _, problems = text_of(tmp_path / "a.bz2")
    assert problems == [f"damaged bz2 data, lost from byte {places[1]} to byte {places[2]}"]


def test_what_is_lost_begins_where_the_last_sound_block_ends(tmp_path: Path) -> None:
    text = bytes(random.Random(0).choices(b"abcdefgh \n", k=250_000))
    packed = bytearray(bz2.compress(text, 1))
    packed[len(packed) // 2] ^= 4
    write(tmp_path / "a.bz2", [bytes(packed)])
    inputs, (problem,) = text_of(tmp_path / "a.bz2")
    begin, end = map(int, re.findall(r"byte (\d+)", problem))
    assert end == len(packed)
    assert begin <= len(bz2.compress(inputs, 1)) <= begin + 2 * bz2streams.FED_BYTES


@pytest.mark.parametrize("bit", range(8))
def test_no_byte_of_a_damaged_block_is_given(tmp_path: Path, bit: int) -> None:
    """Blocks of 100 kB; the second is damaged at many places: the first is whole, no more comes."""
    rng = random.Random(bit)
    text = bytes(rng.choices(b"abcdefgh \n", k=250_000))
    packed = bytearray(bz2.compress(text, 1))
    third = len(packed) // 3
    packed[third + rng.randrange(third // 2, third)] ^= 1 << bit
    write(tmp_path / "a.bz2", [bytes(packed)])
    inputs, problems = text_of(tmp_path / "a.bz2")
    assert len(problems) == 1
    assert 90_000 < len(inputs) < 110_000
    assert inputs == text[: len(inputs)]


@pytest.mark.parametrize("remaining", [1, 3, 20, 600])
def test_a_file_that_is_cut(tmp_path: Path, remaining: int) -> None:
    whole = texts(2)
    places = write(tmp_path / "a.bz2", [bz2.compress(text) for text in whole])
    packed = (tmp_path / "a.bz2").read_bytes()
    (tmp_path / "a.bz2").write_bytes(packed[: places[1] + remaining])
    text, problems = text_of(tmp_path / "a.bz2")
    assert text == whole[0]
    assert problems == [
        f"the bz2 stream from byte {places[1]} is cut at byte {places[1] + remaining}"
    ]


def test_what_is_no_bz2_between_and_behind_is_reported(tmp_path: Path) -> None:
    whole = texts(2)
    packed = [bz2.compress(text) for text in whole]
    write(tmp_path / "a.bz2", [packed[0], b"rubbish" * 10, packed[1], b"\0" * 50])
    text, problems = text_of(tmp_path / "a.bz2")
    assert text == b"".join(whole)
    assert len(problems) == 2


def test_a_bomb_is_left_out_and_what_lies_before_it_is_read(tmp_path: Path) -> None:
    """Three streams of some 40 bytes that unpack to 24 MB each."""
    bomb = bz2.compress(bytes(23 << 20))
    assert len(bomb) < 100
    path = tmp_path / "a.bz2"
    (before,) = texts(1)
    write(path, [bz2.compress(before), bomb, bomb, bomb])
    pieces = list(unpacked(path))
    assert pieces[0][0].startswith(before)
    assert sum(len(text) for text, _ in pieces) <= bz2streams.BURST
    (problem,) = [reason for _, reason in pieces if reason]
    assert "more than 100 times its size" in problem and "unpack it with bunzip2" in problem


def test_text_that_repeats_itself_is_no_bomb(tmp_path: Path) -> None:
    line = b"2026-11-16T12:00:00Z GET /v1/embeddings 200\n"
    whole = b"".join(
        line.replace(b"12:00", b"%02d:%02d" % divmod(i % 1440, 60)) for i in range(20_000)
    )
    path = tmp_path / "a.bz2"
    write(path, [bz2.compress(whole)])
    assert text_of(path) == (whole, [])
