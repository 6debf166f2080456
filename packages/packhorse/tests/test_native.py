"""How C is built and kept, and what is said where it cannot be."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from packhorse import native
from packhorse.native import FLAGS, LONG, POINTER, UNSIGNED, Obstacle, function, openmp_entry
from packhorse.processor import Features, features

pytestmark = [
    pytest.mark.machine,
    pytest.mark.skipif(
        platform.system() != "Linux" or shutil.which("cc") is None, reason="needs Linux and cc"
    ),
]

# Each thread of the pool adds STEP to what it is handed.
SOURCE = """
typedef void Parallel(void (*body)(void *), void *shared, unsigned threads, unsigned flags);
static void work(void *to) { __atomic_fetch_add((long *)to, STEP, __ATOMIC_SEQ_CST); }
void count(long *to, Parallel *parallel, unsigned threads) { parallel(work, to, threads, 0); }
"""
TAKES = (POINTER, POINTER, UNSIGNED)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "counting.c"
    path.write_text(SOURCE)
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, not made yet."""
    monkeypatch.setenv("PACKHORSE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def load(source: Path, step: int = 1):
    return function(source, "count", TAKES, (f"STEP={step}",))


def refusal(source: Path) -> str:
    with pytest.raises(Obstacle) as reason:
        load(source)
    assert "\n" not in str(reason.value)
    return str(reason.value)


def test_runs_on_the_threads_of_torch_with_what_was_defined(source: Path, cache: Path) -> None:
    total = LONG(0)
    load(source, 1)(ctypes.byref(total), openmp_entry(), 2)
    load(source, 10)(ctypes.byref(total), openmp_entry(), 2)
    assert total.value == 22


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("/bin/false", "the C compiler /bin/false failed: exit status 1; set CC to one that works"),
        ("/no/such/cc", "CC names /no/such/cc, which does not exist"),
        ("cc -include /no/such/header.h", "header.h"),
    ],
)
def test_without_a_working_compiler_it_says_so(
    compiler: str, reason: str, source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", compiler)
    assert reason in refusal(source)
    assert not list(cache.rglob("*.so"))


def test_no_compiler_at_all(source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(cache))
    assert refusal(source) == "no C compiler found; install gcc or clang"


def test_compiles_once_and_again_for_another_source_or_define(
    source: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, compiler = tmp_path / "log", tmp_path / "logging-cc"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {log}\nexec {shutil.which("cc")} "$@"\n')
    compiler.chmod(0o700)
    monkeypatch.setenv("CC", str(compiler))
    compilations = lambda: sum(" -o " in line for line in log.read_text().splitlines())  # noqa: E731
    for _ in range(2):
        load(source)
        assert compilations() == 1
    load(source, step=2)
    assert compilations() == 2
    source.write_text(SOURCE + "/* changed */\n")
    load(source)
    assert compilations() == 3
    monkeypatch.setattr(native, "FLAGS", (*FLAGS, "-g"))
    load(source)
    assert compilations() == len(list(cache.rglob("*.so"))) == 4


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names x86 instruction sets")
def test_what_is_compiled_for_a_smaller_processor_lies_apart(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And has none of the instructions that the smaller one lacks."""
    source = tmp_path / "add.c"
    source.write_text("void add(float *x) { for (int i = 0; i < 4096; i++) x[i] += 1; }\n")
    names = {features().march, "haswell", "skylake-avx512"}  # this machine may be one of them
    smaller = native._compiled_library(source, ()) and Features(avx2=True, march="haswell")
    monkeypatch.setattr(native, "features", lambda: smaller)
    native._compiled_library(source, ())
    monkeypatch.setattr(
        native, "features", lambda: Features(avx2=True, avx512=True, march="skylake-avx512")
    )
    native._compiled_library(source, ())
    assert len(list((cache / "native").iterdir())) == len(names)
    if disassembler := shutil.which("objdump"):
        for library in (cache / "native").iterdir():
            listing = subprocess.run([disassembler, "-d", library], capture_output=True, text=True)
            assert "vaddps" in listing.stdout  # of 128 bits where those are faster, as on Zen 1
        monkeypatch.setattr(native, "features", lambda: smaller)
        listing = subprocess.run(
            [disassembler, "-d", native._compiled_library(source, ())],
            capture_output=True,
            text=True,
        )
        assert "zmm" not in listing.stdout


def test_builders_may_race(source: Path, cache: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        built = set(pool.map(lambda _: native._compiled_library(source, ("STEP=1",)), range(4)))
    assert [*built] == [*cache.rglob("*.so")]


def test_a_cache_that_others_can_write_is_refused(source: Path, cache: Path) -> None:
    cache.mkdir()
    cache.chmod(0o777)
    assert "can be written by others" in refusal(source)
    assert not list(cache.iterdir())


def test_a_library_that_others_could_have_changed_is_built_anew(source: Path, cache: Path) -> None:
    before = os.umask(0o002)
    try:
        library = native._compiled_library(source, ("STEP=1",))
    finally:
        os.umask(before)
    assert library.stat().st_mode & 0o077 == 0
    for mode in (0o770, 0o777):
        library.write_bytes(b"planted")
        library.chmod(mode)
        assert native._compiled_library(source, ("STEP=1",)) == library
        assert library.read_bytes() != b"planted" and library.stat().st_mode & 0o077 == 0
    elsewhere = cache / "elsewhere.so"
    elsewhere.write_bytes(b"planted")
    library.unlink()
    library.symlink_to(elsewhere)
    assert native._compiled_library(source, ("STEP=1",)).read_bytes() != b"planted"
    assert not library.is_symlink()


def test_the_compiler_is_told_no_secrets(
    source: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, compiler = tmp_path / "log", tmp_path / "spying-cc"
    compiler.write_text(f'#!/bin/sh\nenv >> {log}\nexec {shutil.which("cc")} "$@"\n')
    compiler.chmod(0o700)
    for name in ("PACKHORSE_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "db_password"):
        monkeypatch.setenv(name, "hidden-value")
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("CPATH", "kept-value")
    load(source)
    environment = log.read_text()
    assert "hidden-value" not in environment and "kept-value" in environment


def test_a_damaged_library_is_named(source: Path, cache: Path) -> None:
    library = native._compiled_library(source, ("STEP=1",))
    library.write_bytes(b"not a library")
    assert f"cannot load {library}, delete it" in refusal(source)


def test_a_library_that_may_not_be_executed_names_its_folder(
    source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What glibc's loader says of a library on a file system that is mounted noexec."""

    def refuse(path: str) -> None:
        raise OSError(f"{path}: failed to map segment from shared object")

    openmp_entry()
    monkeypatch.setattr(ctypes, "CDLL", refuse)
    assert refusal(source) == (
        f"nothing can be run from the cache folder {cache}/native, which is mounted noexec; set "
        "PACKHORSE_CACHE to a folder on another file system"
    )


def test_a_name_that_the_source_does_not_have(source: Path, cache: Path) -> None:
    with pytest.raises(Obstacle, match="no_such_name"):
        function(source, "no_such_name", TAKES, ("STEP=1",))
