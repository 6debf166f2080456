"""Load C, for the few loops that torch has no fast version of on a CPU.

A wheel has the libraries compiled (`c_sources`), a variant per kind of processor; the best that
this one runs is loaded. A source tree, an editable install and a wheel for all machines have none:
there a source is compiled for this CPU at first use, in half a second, and stored in the user's
cache folder (`packhorse.cache`), under a name that is a hash of all it depends on. That needs a C
compiler. If there is none, or anything else goes wrong, `Obstacle` tells why, the caller uses torch
instead, and `warn_slow` tells the user once what would make it fast. The C code does not know torch
or Python: it gets pointers and the entry point of the OpenMP library that torch itself uses, so
that both share one thread pool and the libraries need none of their own.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from packhorse.c_sources import (
    FLAGS,
    VARIANTS,
    WHEEL_FOLDER,
    CSource,
    compile_command,
    contents,
    library_name,
)
from packhorse.cache import is_private_file, private_folder
from packhorse.environment import without_secrets
from packhorse.errors import InputError
from packhorse.processor import features, runs_variant

POINTER = ctypes.c_void_p
LONG = ctypes.c_long
FLOAT = ctypes.c_float
UNSIGNED = ctypes.c_uint
INT = ctypes.c_int


class Obstacle(Exception):
    """Why a function cannot be built or loaded here, in one line.

    fixable: whether a user could change that; False if the C code does not support the machine.
    """

    def __init__(self, reason: str, fixable: bool = True) -> None:
        super().__init__(reason)
        self.fixable = fixable


def warn_slow(reason: Obstacle) -> None:
    """Warn that code runs slower than it could here, if the user can change that."""
    if reason.fixable:
        _warn_once(str(reason))


@cache
def _warn_once(reason: str) -> None:
    message = f"running slower than this machine can, without Packhorse's C kernels: {reason}"
    warnings.warn(message, RuntimeWarning, stacklevel=3)


def function(
    source: Path,
    name: str,
    argument_types: tuple[Any, ...],
    defines: tuple[str, ...] = (),
    returns: Any = None,
) -> Callable[..., Any]:
    """The function `name` of the C file `source`, with the types of its arguments and result.

    Raises `Obstacle` if there is no library of it and none can be built. Callers should cache the
    result: every call reads the source, and may run the compiler for its version.
    """
    entry = getattr(_load(source, defines, name).handle, name)
    entry.restype = returns
    entry.argtypes = argument_types
    return entry


@dataclass(frozen=True, slots=True)
class LoadedLibrary:
    """A library, and where it came from."""

    handle: ctypes.CDLL
    path: Path
    variant: str  # one of `VARIANTS`, or the compiler's -march

    @property
    def from_wheel(self) -> bool:
        """Whether it was installed with the package."""
        return self.path.parent == WHEEL_FOLDER


def _load(source: Path, defines: tuple[str, ...], name: str = "") -> LoadedLibrary:
    """Load the library of a source, which must have a function called `name`, if that is set."""
    if platform.machine() in ("x86_64", "AMD64") and not features().avx2:
        raise Obstacle("this processor has no AVX2", fixable=False)
    if installed := _installed_library(source, defines):
        try:  # a damaged file, or a system that may not execute it: perhaps a compiler helps
            return _open(installed[0], installed[1], name)
        except Obstacle:
            pass
    if not sys.platform.startswith("linux"):
        reason = f"it is built on Linux only, not on {sys.platform}, and the wheel has none"
        raise Obstacle(reason, fixable=False)
    return _open(_compiled_library(source, defines), features().march, name)


def loaded(source: CSource) -> LoadedLibrary:
    """Load what `function` takes the functions of a source from; for those who report it."""
    if not any(map(runs_variant, source.variants)):
        needed = " or ".join(source.variants)
        raise Obstacle(f"this processor runs none of its variants: {needed}", fixable=False)
    return _load(source.path, source.defines)


def _open(path: Path, variant: str, name: str) -> LoadedLibrary:
    try:
        handle = ctypes.CDLL(str(path))
        if name:
            getattr(handle, name)
    except (OSError, AttributeError) as error:
        raise _load_obstacle(path, _first_line(str(error))) from error
    return LoadedLibrary(handle, path, variant)


def _installed_library(source: Path, defines: tuple[str, ...]) -> tuple[Path, str] | None:
    """The best library of the wheel that this processor runs, and its variant."""
    if not WHEEL_FOLDER.is_dir():
        return None
    for variant in filter(runs_variant, VARIANTS):
        path = WHEEL_FOLDER / library_name(source, defines, variant, FLAGS)
        if path.is_file():
            return path, variant
    return None


@cache
def openmp_library() -> ctypes.CDLL:
    """The OpenMP library that torch uses: GNU's, or LLVM's or Intel's, which have its names."""
    folder = Path(torch.__file__).parent / "lib"
    for path in (None, folder / "libtorch_cpu.so", folder / "libomp.dylib"):
        try:
            library = ctypes.CDLL(path and str(path))
            if library.GOMP_parallel:
                return library
        except (OSError, AttributeError):
            continue
    raise Obstacle("torch's OpenMP library has no GOMP_parallel", fixable=False)


@cache
def openmp_entry() -> int:
    """The address of its GOMP_parallel."""
    return ctypes.cast(openmp_library().GOMP_parallel, POINTER).value or 0


def _compiled_library(source: Path, defines: tuple[str, ...]) -> Path:
    """The compiled library in the cache; compiles it if it is not there yet."""
    compiler = _compiler()
    march = (f"-march={features().march}",)
    version = _run([*compiler, "--version"])
    depends_on = repr((contents(source), compiler, version, march, FLAGS, defines, _cpu()))
    try:
        folder = private_folder("native")
        target = folder / f"{source.stem}-{sha256(depends_on.encode()).hexdigest()[:32]}.so"
        if os.path.lexists(target) and is_private_file(target):
            return target
        # Another process may do the same: each compiles by itself, and the last rename wins.
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            fresh = Path(scratch) / target.name
            _run(compile_command(compiler, source, fresh, march, defines, FLAGS))
            fresh.chmod(0o700)  # whatever the umask is
            fresh.replace(target)
    except (InputError, OSError) as error:
        raise Obstacle(_first_line(str(error))) from error
    return target


def _compiler() -> list[str]:
    """`$CC`, which may contain arguments, or the first compiler that is installed."""
    configured = shlex.split(os.environ.get("CC", ""))
    candidates = configured[:1] or ("cc", "gcc", "clang")
    installed = next((name for name in candidates if shutil.which(name)), None)
    if installed is None:
        problem = "no C compiler found"
        if configured:
            problem = f"CC names {configured[0]}, which does not exist"
        raise Obstacle(f"{problem}; install gcc or clang")
    return configured or [installed]


def _run(command: list[str]) -> str:
    try:
        result = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env=without_secrets(),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = _first_line(str(error))
        raise Obstacle(f"cannot run the C compiler: {reason}; set CC to one that works") from error
    if result.returncode:
        reason = _first_line(result.stderr) or f"exit status {result.returncode}"
        raise Obstacle(f"the C compiler {command[0]} failed: {reason}; set CC to one that works")
    return result.stdout


def _load_obstacle(library: Path, error: str) -> Obstacle:
    if "failed to map segment" in error:  # the loader's message if it may not execute the file
        return Obstacle(
            f"nothing can be run from the cache folder {library.parent}, which is mounted noexec; "
            "set PACKHORSE_CACHE to a folder on another file system"
        )
    return Obstacle(f"cannot load {library}, delete it: {error}")


def _first_line(text: str) -> str:
    return text.strip().split("\n", 1)[0]


def _cpu() -> str:
    """What -march=native depends on: different machines may share a home folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    kinds = ("flags", "Features", "model name", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(kinds)}))
