"""Packed files, archives and standard input become the same corpus as their text, killed or not."""

from __future__ import annotations

import io
import os
import random
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

from packhorse.data.corpus.building import BuildOptions, build
from packhorse.data.packed.masking import Recipe
from packhorse.data.sources import unpacking
from packhorse.errors import InputError

from .. import corpora
from ..corpora import documents, sequences_of, tree

zstandard = pytest.importorskip("zstandard", reason="no zstandard: pip install 'packhorse[data]'")
pytest.importorskip("nupunkt", reason="no nupunkt: pip install 'packhorse[data]'")

CORPUS = documents(120)
TEXT = "".join(f"{' '.join(document)}\n" for document in CORPUS).encode()


@pytest.fixture
def options(tmp_path: Path) -> BuildOptions:
    """Of a text with a document per line, packed by Zstandard."""
    corpora.write_vocabulary(tmp_path / "vocab.txt")
    (tmp_path / "texts.zst").write_bytes(zstandard.ZstdCompressor().compress(TEXT))
    (tmp_path / "texts.txt").write_bytes(TEXT)
    return BuildOptions(
        (tmp_path / "texts.zst",),
        tmp_path / "out",
        tmp_path / "vocab.txt",
        Recipe(max_length=64),
        documents="lines",
        chunk_bytes=4000,
        shard_bytes=20_000,
        workers=1,
    )


def tar_gz(files: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, text in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text))
    return packed.getvalue()


def shards_of(out: Path) -> dict[str, bytes]:
    """The rows; a manifest also names the sources."""
    return {name: data for name, data in tree(out).items() if name.endswith(".arrow")}


def command(options: BuildOptions, source: object, *more: object) -> list[str]:
    flags = {
        "--tokenizer": options.tokenizer,
        "--max-length": 64,
        "--documents": "lines",
        "--chunk-bytes": options.chunk_bytes,
        "--shard-bytes": options.shard_bytes,
        "--workers": 1,
    }
    words = [word for pair in flags.items() for word in pair]
    build = ["-m", "packhorse", "data", "build", source, options.out, *words, *more]
    return [sys.executable, *map(str, build)]


def test_a_packed_file_gives_the_rows_of_its_text(options: BuildOptions, tmp_path: Path) -> None:
    (tmp_path / "a.tgz").write_bytes(tar_gz({"x/texts.txt": TEXT}))
    plain = replace(options, sources=(tmp_path / "texts.txt",), out=tmp_path / "plain")
    build(plain)
    for name in ("texts.zst", "a.tgz"):
        packed = replace(options, sources=(tmp_path / name,), out=tmp_path / f"{name}-out")
        counts = build(packed).train.config["found"]
        assert counts["documents"] == 120 and counts["bad"] == 0
        assert shards_of(packed.out) == shards_of(plain.out)


def test_a_cut_archive_is_used_up_to_the_cut(options: BuildOptions, tmp_path: Path) -> None:
    files = {f"{i}.txt": " ".join(document).encode() for i, document in enumerate(CORPUS)}
    whole = tar_gz(files)
    (tmp_path / "cut.tgz").write_bytes(whole[: len(whole) * 2 // 3])
    cut = replace(options, sources=(tmp_path / "cut.tgz",), documents="file", out=tmp_path / "cut")
    with pytest.raises(InputError, match=r"cut at byte \d+.*--max-bad 1"):
        build(cut)
    counts = build(replace(cut, max_bad=1)).train.config["found"]
    assert counts["bad"] == 1 and 50 < counts["documents"] < 100


def test_repaired_documents_are_counted(options: BuildOptions, tmp_path: Path) -> None:
    (tmp_path / "bad.txt").write_bytes(TEXT.replace(b" ", b" \xe9 ", 1))
    bad = replace(options, sources=(tmp_path / "bad.txt",), out=tmp_path / "bad")
    with pytest.raises(InputError, match="not UTF-8"):
        build(bad)
    counts = build(replace(bad, repair=True, overwrite=True)).train.config["found"]
    assert (counts["repaired"], counts["bad"], counts["documents"]) == (1, 0, 120)


def test_guesses_are_told_once(options: BuildOptions, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for number, document in enumerate(CORPUS[:20]):
        (folder / f"{number}.txt").write_text(" ".join(document))
    told: list[str] = []
    guessing = replace(options, sources=(folder,), documents=None, out=tmp_path / "guess")
    counts = build(guessing, tell=told.append).train.config["found"]
    assert len(told) == 1 and "a document per file (guessed" in told[0]
    assert counts["without_other"] == 0


def test_pairs_without_a_second_document_are_counted(options: BuildOptions) -> None:
    """A long text that is one document in every piece, and the control with a document per line."""
    alone = replace(options, sources=(options.sources[0].with_name("texts.txt"),), documents="file")
    found = build(alone).train.config["found"]
    assert found["without_other"] == found["sequences"] > 0
    assert not any(label for _, _, label in sequences_of(alone.out / "train"))
    lines = replace(alone, documents="lines", out=alone.out.with_name("lines"))
    assert build(lines).train.config["found"]["without_other"] == 0
    assert any(label for _, _, label in sequences_of(lines.out / "train"))


# Standard input ----------------------------------------------------------------------------------


def pipe(
    options: BuildOptions, data: bytes, *more: object, **keywords: object
) -> subprocess.CompletedProcess[bytes]:
    words = command(options, "-", *more)
    return subprocess.run(words, input=data, capture_output=True, **keywords)  # type: ignore[call-overload]


def test_standard_input_is_resumed_to_the_same_rows(options: BuildOptions, tmp_path: Path) -> None:
    """Killed while it reads, continued with the same text, refused with another one."""
    text = TEXT * 10  # the reader looks 64 KiB ahead
    (tmp_path / "texts.txt").write_bytes(text)
    options = replace(options, chunk_bytes=20_000)
    build(replace(options, sources=(tmp_path / "texts.txt",), out=tmp_path / "plain"))
    with subprocess.Popen(
        command(options, "-"), stdin=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdin is not None
        process.stdin.write(text[:200_000])
        process.stdin.flush()
        while len(list(options.out.glob(".build/*/part-*"))) < 2:
            assert process.poll() is None
            time.sleep(0.02)
        process.kill()
    other = pipe(options, text.upper())
    assert other.returncode == 2 and b"standard input is not what it was" in other.stderr
    result = pipe(options, text)
    assert result.returncode == 0, result.stderr.decode()
    assert shards_of(options.out) == shards_of(tmp_path / "plain")
    again = pipe(options, text)
    assert again.returncode == 2 and b"cannot be compared" in again.stderr
    assert pipe(options, text, "--overwrite").returncode == 0
    assert shards_of(options.out) == shards_of(tmp_path / "plain")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_twenty_times(options: BuildOptions, tmp_path: Path) -> None:
    """Packed text, killed at any moment and continued, gives the same bytes."""
    build(replace(options, out=tmp_path / "undisturbed"))
    rng = random.Random(0)
    killed = 0
    while killed < 20:
        words = command(replace(options), options.sources[0])
        with subprocess.Popen(
            words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process:
            time.sleep(rng.uniform(0.3, 1.5))
            process.kill()
        if process.returncode == 0:
            assert tree(options.out) == tree(tmp_path / "undisturbed")
            for name in tree(options.out):
                os.unlink(options.out / name)
        assert process.returncode in (0, -signal.SIGKILL)
        killed += 1
    words = command(options, options.sources[0], "--overwrite")
    assert subprocess.run(words, capture_output=True).returncode == 0
    assert tree(options.out) == tree(tmp_path / "undisturbed")


@pytest.fixture(autouse=True)
def _fresh_standard_input() -> None:
    unpacking.standard_input.cache_clear()
