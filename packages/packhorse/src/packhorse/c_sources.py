"""The C that wheels contain compiled: sources, definitions, and a variant per kind of processor.

The build of the wheel (`hatch_build.py`) compiles every entry of `C_SOURCES` for every variant that
it names; `native` loads the best one that the processor has. A library's name has a digest of all
that decides what it computes, so that one of another source or with other definitions is never
taken for it. This module needs neither torch nor numpy, because the build has neither.
"""

from __future__ import annotations

import platform
import re
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

PACKAGE = Path(__file__).parent
# What the build puts beside the modules; absent in a source tree and an editable install.
WHEEL_FOLDER = PACKAGE / "compiled"
FLAGS = (
    "-std=gnu11",
    "-O3",
    "-shared",
    "-fPIC",
    "-ffp-contract=fast",
    "-fno-math-errno",  # makes square roots instructions instead of calls of libm
)
X86 = ("x86_64", "AMD64")
ARM = ("aarch64", "arm64")


@dataclass(frozen=True, slots=True)
class Variant:
    """Code for all processors that have certain instructions."""

    machines: tuple[str, ...]  # `platform.machine()`
    needs: str  # a field of `processor.Features`; empty: all such machines have them
    flags: tuple[str, ...]

    def is_for(self, machine: str) -> bool:
        """Return whether this machine can have the instructions."""
        return machine in self.machines


AVX2 = ("-march=haswell",)
# Single features, because compilers differ in the names of processors that have them.
AVX512 = (*AVX2, *(f"-mavx512{part}" for part in ("f", "cd", "bw", "dq", "vl")))
VNNI = (*AVX512, "-mavx512vnni")
BF16 = (*VNNI, "-mavx512bf16")
AMX = (*BF16, "-mamx-tile", "-mamx-int8", "-mamx-bf16")
# The best first; x86's are the levels of `PACKHORSE_CPU`. No flag depends on the machine that
# compiles.
VARIANTS = {
    "amx": Variant(X86, "amx", AMX),
    "bf16": Variant(X86, "avx512_bf16", BF16),
    "vnni": Variant(X86, "vnni", VNNI),
    "avx512": Variant(X86, "avx512", AVX512),
    "avx2": Variant(X86, "avx2", AVX2),
    "neon": Variant(ARM, "", ()),  # every 64-bit ARM has it, and compilers use it by default
}


@dataclass(frozen=True, slots=True)
class CSource:
    """A source with the definitions that its module compiles it with."""

    purpose: str
    file: str  # below the package
    defines: tuple[str, ...] = ()
    variants: tuple[str, ...] = ("avx512", "avx2", "neon")

    @property
    def path(self) -> Path:
        """The file itself."""
        return PACKAGE / self.file


ATTENTION = ("CHUNK=128", "WIDEST=256")
C_SOURCES = (
    CSource("attention fp32", "attention/native.c", ("BF16=0", *ATTENTION)),
    CSource("attention bf16", "attention/native.c", ("BF16=1", *ATTENTION), ("bf16",)),
    CSource("add-norm fp32", "model/add_norm.c", ("BF16=0", "BLOCK=64")),
    CSource(
        "add-norm bf16",
        "model/add_norm.c",
        ("BF16=1", "BLOCK=64"),
        ("bf16", "avx512", "avx2", "neon"),
    ),
    CSource("int8", "model/int8.c", (), ("vnni", "avx2")),
    CSource("linear layers fp32", "model/product.c", (), ("avx512", "avx2")),
    CSource("tokenizer", "tokens/wordpiece.c", (), ("avx2", "neon")),
)


def contents(source: Path) -> bytes:
    """What a library is compiled from: a source, and the headers beside it that it includes."""
    text = source.read_bytes()
    headers = re.findall(r'^#include "(.+)"', text.decode(), re.MULTILINE)
    return b"".join([text, *[contents(source.parent / header) for header in headers]])


def library_name(
    source: Path, defines: tuple[str, ...], variant: str, flags: tuple[str, ...] = FLAGS
) -> str:
    """The file name of a compiled variant in a wheel."""
    depends_on = repr((contents(source), defines, flags, VARIANTS[variant].flags))
    return f"{source.stem}-{variant}-{sha256(depends_on.encode()).hexdigest()[:16]}.so"


def compile_command(
    compiler: list[str],
    source: Path,
    output: Path,
    march: tuple[str, ...],
    defines: tuple[str, ...],
    flags: tuple[str, ...] = FLAGS,
) -> list[str]:
    """The call of the compiler for one library."""
    macros = [f"-D{define}" for define in defines]
    return [*compiler, *march, *flags, *macros, "-o", str(output), str(source)]


def wheel_libraries(machine: str = "") -> list[tuple[CSource, str]]:
    """Every source with each of its variants for `machine`, by default this one."""
    machine = machine or platform.machine()
    return [
        (source, name)
        for source in C_SOURCES
        for name in source.variants
        if VARIANTS[name].is_for(machine)
    ]
