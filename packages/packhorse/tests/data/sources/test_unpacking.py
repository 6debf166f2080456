"""Packed files give the text that their own tools do, up to any damage, within bounded memory."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import random
import shutil
import subprocess
import sys
import tarfile
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from packhorse.data.sources import bz2streams, unpacking
from packhorse.data.sources.chunking import chunks
from packhorse.data.sources.documents import Document, ReadTally, read
from packhorse.data.sources.files import find
from packhorse.data.sources.unpacking import open_streams, packing_of_file
from packhorse.errors import InputError

zstandard = pytest.importorskip("zstandard", reason="no zstandard: pip install 'packhorse[data]'")
pytest.importorskip("nupunkt", reason="no nupunkt: pip install 'packhorse[data]'")

TOOLS = {"gzip": "gz", "bzip2": "bz2", "xz": "xz", "zstd": "zst"}
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": lambda text: gzip.compress(text, mtime=0),
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zstd": lambda text: zstandard.ZstdCompressor(3).compress(text),
}
LINES = [f"Line {i} tells of {random.Random(i).random()} horses." for i in range(8_000)]
TEXT = ("\n".join(LINES) + "\n").encode()


def unpack_all(path: Path) -> tuple[dict[str, bytes], list[str]]:
    """The text of each stream by its name, and all problems."""
    texts: dict[str, bytes] = {}
    problems: list[str] = []
    for stream in open_streams(path, packing_of_file(path)):
        text = b""
        for piece, problem in stream.pieces:
            text += piece
            problems += [problem] if problem else []
        if text:
            texts[stream.member] = text
    return texts, problems


def read_lines(path: Path, size: int = 100_000) -> tuple[list[Document], ReadTally]:
    documents: list[Document] = []
    total = ReadTally()
    for chunk in chunks(find([path], documents="lines"), size):
        more, tally = read(chunk)
        documents += more
        total += tally
    return documents, total


def tar_of(files: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, text in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text))
    return packed.getvalue()


# The tools' own files ----------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["-1", "-9"])
@pytest.mark.parametrize("tool", TOOLS)
def test_what_a_compressor_wrote(tmp_path: Path, tool: str, level: str) -> None:
    if not shutil.which(tool):
        pytest.skip(f"{tool} is not installed")
    (tmp_path / "a.txt").write_bytes(TEXT)
    subprocess.run([tool, level, "-q", "-k", tmp_path / "a.txt"], check=True)
    packed = tmp_path / f"a.txt.{TOOLS[tool]}"
    assert unpack_all(packed) == ({"": TEXT}, [])
    documents, tally = read_lines(packed)
    assert [document.sentences for document in documents] == [[line] for line in LINES]
    assert not tally.bad


@pytest.mark.parametrize("flags", ["cf", "czf", "cjf", "cJf"])
def test_what_tar_wrote(tmp_path: Path, flags: str) -> None:
    """A folder packed by tar is read as the folder is, in tar's order."""
    folder = tmp_path / "texts"
    (folder / "deep" / ("long" * 40)).mkdir(parents=True)
    for number, name in enumerate(("a.txt", "deep/b.txt", f"deep/{'long' * 40}/c.txt", "_no.txt")):
        (folder / name).write_text(f"Text {number} of the folder.\n")
    (folder / "link.txt").symlink_to("a.txt")
    subprocess.run(["tar", flags, tmp_path / "packed", "--sort=name", "texts"], cwd=tmp_path)
    texts, problems = unpack_all(tmp_path / "packed")
    assert not problems
    assert {name.removeprefix("texts/"): text for name, text in texts.items()} == {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*.txt")
        if path.name not in ("_no.txt", "link.txt")
    }


def test_what_zip_wrote(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.txt", TEXT)
        archive.writestr("deep/b.txt", "Täxt.", zipfile.ZIP_STORED)
        archive.writestr("c.txt", b"More.", zipfile.ZIP_LZMA)
        archive.writestr("__MACOSX/a.txt", b"no")
    texts, problems = unpack_all(tmp_path / "a.zip")
    assert texts == {"a.txt": TEXT, "deep/b.txt": "Täxt.".encode(), "c.txt": b"More."}
    assert not problems


@pytest.mark.parametrize("packing", COMPRESS)
def test_streams_end_to_end_and_packed_files_in_archives(tmp_path: Path, packing: str) -> None:
    half = len(TEXT) // 2
    packed = COMPRESS[packing](TEXT[:half]) + COMPRESS[packing](TEXT[half:])
    (tmp_path / "two").write_bytes(packed)
    assert unpack_all(tmp_path / "two") == ({"": TEXT}, [])
    (tmp_path / "a.tar").write_bytes(tar_of({"x/two.txt": packed, "plain.txt": b"Plain."}))
    assert unpack_all(tmp_path / "a.tar") == ({"x/two.txt": TEXT, "plain.txt": b"Plain."}, [])


def test_frames_of_other_programs_are_skipped(tmp_path: Path) -> None:
    skippable = (0x184D2A51).to_bytes(4, "little") + (3).to_bytes(4, "little") + b"abc"
    packed = COMPRESS["zstd"](TEXT)
    for number, data in enumerate((skippable + packed, packed + skippable)):
        (tmp_path / str(number)).write_bytes(data)
        assert unpack_all(tmp_path / str(number)) == ({"": TEXT}, [])


# Damage ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
@pytest.mark.parametrize("packing", COMPRESS)
def test_a_cut_file_is_used_up_to_the_cut(tmp_path: Path, packing: str, share: float) -> None:
    # In several streams, because a bz2 block may hold all of it.
    packed = b"".join(COMPRESS[packing](TEXT[i : i + 10_000]) for i in range(0, len(TEXT), 10_000))
    (tmp_path / "a").write_bytes(packed[: int(share * len(packed))])
    texts, problems = unpack_all(tmp_path / "a")
    assert TEXT.startswith(texts[""])
    assert len(texts[""]) > (share - 0.1) * len(TEXT) - 1
    assert len(problems) == 1 and "cut at byte" in problems[0]


@pytest.mark.parametrize("packing", ["", *COMPRESS])
def test_a_cut_tar_is_used_up_to_the_cut(tmp_path: Path, packing: str) -> None:
    files = {
        f"{i}.txt": f"Text {i} is here. {random.Random(i).random()}".encode() for i in range(99)
    }
    tar = tar_of(files)
    if packing:
        tar = b"".join(COMPRESS[packing](tar[i : i + 5120]) for i in range(0, len(tar), 5120))
    (tmp_path / "a").write_bytes(tar[: len(tar) // 2])
    texts, problems = unpack_all(tmp_path / "a")
    assert 40 < len(texts) < 60
    assert all(files[name].startswith(text) for name, text in texts.items())
    assert len(problems) == 1 and "cut" in problems[0]


def test_what_tar_would_not_reach_is_reported(tmp_path: Path) -> None:
    """A damaged header looks like the end to tarfile, and so does the end of a first archive."""
    tar = tar_of({f"{i}.txt": f"Text {i}.".encode() * 200 for i in range(4)})
    second = tar.index(b"1.txt")
    (tmp_path / "damaged").write_bytes(tar[:second] + b"?" + tar[second + 1 :])
    texts, problems = unpack_all(tmp_path / "damaged")
    assert list(texts) == ["0.txt"] and len(problems) == 1 and "damaged" in problems[0]
    (tmp_path / "two").write_bytes(tar + tar)
    texts, problems = unpack_all(tmp_path / "two")
    assert len(texts) == 4 and len(problems) == 1 and "behind its end" in problems[0]


def test_a_packed_tar_is_known_by_its_first_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of bzip2 is hundreds of kilobytes long."""
    tar = COMPRESS["bz2"](tar_of({"a.txt": random.Random(0).randbytes(300_000)}))
    (tmp_path / "a.tar.bz2").write_bytes(tar)
    assert packing_of_file(tmp_path / "a.tar.bz2") == ("bz2", "tar")
    unpacking.standard_input.cache_clear()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(tar)))
    assert packing_of_file(unpacking.STANDARD_INPUT) == ("bz2", "tar")
    unpacking.standard_input.cache_clear()


@pytest.mark.parametrize("sizes_follow", [False, True])
def test_a_cut_zip_is_used_up_to_the_cut(tmp_path: Path, sizes_follow: bool) -> None:
    packed = io.BytesIO()
    stream = _Unseekable(packed) if sizes_follow else packed
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:  # pyright: ignore[reportArgumentType]
        for number in range(50):
            archive.writestr(f"{number}.txt", TEXT[number * 1000 :][:20_000])
    whole = packed.getvalue()
    (tmp_path / "a.zip").write_bytes(whole[: len(whole) // 2])
    texts, problems = unpack_all(tmp_path / "a.zip")
    assert list(texts)[:20] == [f"{number}.txt" for number in range(20)]
    assert all(
        TEXT[int(name.removesuffix(".txt")) * 1000 :].startswith(text)
        for name, text in texts.items()
    )
    assert len(problems) == 2 and "directory is missing" in problems[0]


class _Unseekable(io.RawIOBase):
    """A file that zipfile cannot go back in, so sizes stand behind each entry."""

    def __init__(self, file: io.BytesIO) -> None:
        self.file = file

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.file.write(data)


@pytest.mark.parametrize("packing", COMPRESS)
def test_flipped_bits_are_reported_or_harmless(tmp_path: Path, packing: str) -> None:
    packed = COMPRESS[packing](TEXT)
    for at in range(100, len(packed), len(packed) // 7):
        damaged = bytearray(packed)
        damaged[at] ^= 4
        (tmp_path / "a").write_bytes(damaged)
        texts, problems = unpack_all(tmp_path / "a")
        assert problems or texts[""] == TEXT or packing == "zstd", "zstd's checksum is optional"


def test_a_zip_that_is_encrypted_is_reported(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("a.txt", b"Text.")
    data = bytearray((tmp_path / "a.zip").read_bytes())
    for header in (6, data.index(b"PK\x01\x02") + 8):
        data[header] |= 1
    (tmp_path / "a.zip").write_bytes(data)
    texts, problems = unpack_all(tmp_path / "a.zip")
    assert not texts and "encrypted" in problems[0]


# Bounds ------------------------------------------------------------------------------------------

BOMB = bytes(100 << 20)


@pytest.mark.parametrize("packing", ["gzip", "xz", "zstd"])
def test_a_bomb_is_left_out(tmp_path: Path, packing: str) -> None:
    (tmp_path / "a").write_bytes(COMPRESS[packing](b"Text. ") + COMPRESS[packing](BOMB))
    total = 0
    problems = []
    for stream in open_streams(tmp_path / "a", packing_of_file(tmp_path / "a")):
        for piece, problem in stream.pieces:
            assert len(piece) <= unpacking.FED_BYTES_ZSTD * 32_768
            total += len(piece)
            problems += [problem] if problem else []
    assert total <= bz2streams.BURST + 100 * (tmp_path / "a").stat().st_size
    assert len(problems) == 1 and "more than 100 times its size" in problems[0]


def test_a_bomb_in_a_zip_is_left_out(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("bomb.txt", BOMB)
        archive.writestr("a.txt", b"Text.")
    sizes: dict[str, int] = {}
    problems: list[str] = []
    for stream in open_streams(tmp_path / "a.zip", ("zip",)):
        for piece, problem in stream.pieces:
            sizes[stream.member] = sizes.get(stream.member, 0) + len(piece)
            problems += [problem] if problem else []
    assert sizes["a.txt"] == 5 and sizes["bomb.txt"] < 90 << 20
    assert len(problems) == 1


def header(name: str, size: int, kind: bytes) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    return info.tobuf(tarfile.GNU_FORMAT)


def pax(kind: bytes, key: bytes, size: int) -> bytes:
    """A header of one record, padded to whole blocks by its own value."""
    record = b"%d %s=" % (size, key)
    return header("pax", size, kind) + record + b"a" * (size - len(record) - 1) + b"\n"


def sparse(blocks: int) -> bytes:
    """A file with holes, whose map goes on in so many blocks."""
    first = bytearray(header("holes", 0, b"S"))
    first[482] = 1  # the map goes on
    first[148:156] = b"%06o\0 " % (sum(first[:148]) + 8 * 32 + sum(first[156:]))
    block = b"00000000001\0" * 42 + b"\1" + bytes(7)
    return bytes(first) + block * (blocks - 1) + block[:504] + bytes(8)


LARGE = 1 << 25
HEADERS: dict[str, Callable[[], bytes]] = {
    "a long name": lambda: header("././@LongLink", LARGE, b"L") + b"a" * LARGE,
    "a pax record": lambda: pax(b"x", b"path", LARGE),
    "records for all files": lambda: b"".join(pax(b"g", b"%d" % n, 1 << 20) for n in range(32)),
    "a map of holes": lambda: sparse(1 << 15),
}


def most_memory(path: Path) -> tuple[int, dict[str, bytes], list[str]]:
    tracemalloc.start()
    texts, problems = unpack_all(path)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return most, texts, problems


@pytest.mark.parametrize("case", HEADERS)
def test_large_headers_of_a_tar_are_left_out(tmp_path: Path, case: str) -> None:
    tar = tar_of({"a.txt": b"Text."})
    (tmp_path / "a").write_bytes(tar[:1024] + HEADERS[case]() + tar)
    most, texts, problems = most_memory(tmp_path / "a")
    assert texts == {"a.txt": b"Text."}
    assert len(problems) == 1 and "headers of more than 4194304 bytes" in problems[0]
    assert most < 20 << 20


def test_records_for_all_files_do_not_add_up(tmp_path: Path) -> None:
    tar = tar_of({"a.txt": b"Text."})
    parts = (pax(b"g", b"%d" % n, 1 << 20) + tar[:1024] for n in range(32))
    (tmp_path / "a").write_bytes(tar[:1024] + b"".join(parts) + tar[1024:])
    most, texts, problems = most_memory(tmp_path / "a")
    assert texts == {"a.txt": b"Text."} and not problems
    assert most < 20 << 20


# Chunks and documents ----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 5000, 1 << 22])
@pytest.mark.parametrize("packing", ["gzip", "zstd"])
def test_a_packed_archive_gives_the_documents_of_its_folder(
    tmp_path: Path, packing: str, size: int
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in LINES[:50]))
    (folder / "b.txt").write_text(" ".join(LINES[50:60]))
    (folder / "c.json").write_text(json.dumps([{"text": text} for text in LINES[60:90]], indent=1))
    (folder / "part-0").write_text("\n\n".join(LINES[90:99]))
    files = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
    (tmp_path / "a.tar.x").write_bytes(COMPRESS[packing](tar_of(files)))
    read_both = []
    for source in (folder, tmp_path / "a.tar.x"):
        outcomes = [read(chunk) for chunk in chunks(find([source]), size)]
        read_both.append([doc.sentences for documents, _ in outcomes for doc in documents])
        assert not any(tally.bad for _, tally in outcomes)
    assert read_both[0] == read_both[1] and len(read_both[0]) == 50 + 1 + 30 + 9


def test_what_an_archive_holds_that_is_no_text_is_counted(tmp_path: Path) -> None:
    files = {
        "a.txt": b"Text.",
        "noise.bin": bytes(range(256)),
        "rows.parquet": b"PAR1",
        "e.txt": b"",
    }
    (tmp_path / "a.tar").write_bytes(tar_of(files))
    documents, tally = read_lines(tmp_path / "a.tar")
    assert [document.sentences for document in documents] == [["Text."]]
    reasons = [bad.reason for bad in tally.bad]
    assert len(reasons) == 2 and "cannot tell its format" in reasons[0]
    assert "rows.parquet is parquet" in reasons[1]


def test_the_progress_of_a_packed_file_is_that_of_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(COMPRESS["gzip"](TEXT))
    parts = list(chunks(find([tmp_path / "a.txt.gz"]), 10_000))
    assert len(parts) > 5
    assert sum(part.stored or 0 for part in parts) == (tmp_path / "a.txt.gz").stat().st_size


def test_standard_input_is_read_once_from_a_pipe(tmp_path: Path) -> None:
    """In a process of its own, packed and plain, as `cat` would pipe it."""
    script = (
        "from pathlib import Path\n"
        "from packhorse.data.sources.files import find\n"
        "from packhorse.data.sources.chunking import chunks\n"
        "from packhorse.data.sources.documents import read\n"
        "parts = chunks(find([Path('-')], documents='lines'), 50_000)\n"
        "docs = [document for part in parts for document in read(part)[0]]\n"
        "print(len(docs), docs[0].sentences, docs[-1].sentences)\n"
    )
    for data in (TEXT, COMPRESS["zstd"](TEXT), tar_of({"a.txt": TEXT})):
        result = subprocess.run([sys.executable, "-c", script], input=data, capture_output=True)
        assert result.stdout.decode().split(" ", 1)[0] == str(len(LINES)), result.stderr.decode()
    empty = subprocess.run([sys.executable, "-c", script], input=b"", capture_output=True)
    assert b"standard input is empty" in empty.stderr


def test_what_cannot_be_read_from_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("a.txt", b"Text.")
    for data, message in ((packed.getvalue(), "a zip"), (b"PAR1 rows", "unpack it to a file")):
        unpacking.standard_input.cache_clear()
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
        with pytest.raises(InputError, match=message):
            find([Path("-")])
    unpacking.standard_input.cache_clear()
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(InputError, match="standard input is closed"):
        find([Path("-")])
