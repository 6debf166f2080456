"""C that is compiled at first use, for the few loops that torch has no fast form of on a CPU.

A source is compiled for this very CPU in half a second, kept in the user's own cache folder
(`packhorse.cache`) under a name that holds all it depends on, and loaded from nowhere else. The
price is a C compiler on the machine: where there is none, or anything else is amiss, `Obstacle`
says why, the caller does without, and `warn_lost` tells the user once what would bring the speed
back. The C knows nothing of torch or Python: pointers go in, and the entry of the OpenMP library
that torch itself uses, so that both share one pool of threads and the cores are not crowded by two.
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
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from packhorse.cache import is_mine_alone, private_folder
from packhorse.environment import without_secrets
from packhorse.errors import InputError
from packhorse.processor import features

FLAGS = (
    *("-std=gnu11", "-O3", "-shared", "-fPIC"),
    *("-ffp-contract=fast", "-fno-math-errno"),  # roots are instructions then, not calls of libm
)
POINTER, LONG, FLOAT, UNSIGNED = ctypes.c_void_p, ctypes.c_long, ctypes.c_float, ctypes.c_uint
INT = ctypes.c_int


class Obstacle(Exception):
    """Why a function cannot be built or loaded here, in one line.

    fixable: whether a user could change that; not where the C is not written for such a machine.
    """

    def __init__(self, reason: str, fixable: bool = True) -> None:
        super().__init__(reason)
        self.fixable = fixable


def warn_lost(reason: Obstacle) -> None:
    """Tell the user that code which could be fast here is not, if there is a way to change that."""
    if reason.fixable:
        _warn_once(str(reason))


@cache
def _warn_once(reason: str) -> None:
    message = f"running slower than this machine can, without Packhorse's C kernels: {reason}"
    warnings.warn(message, RuntimeWarning, stacklevel=3)


def function(
    source: Path,
    name: str,
    takes: tuple[Any, ...],
    defines: tuple[str, ...] = (),
    returns: Any = None,
) -> Callable[..., Any]:
    """The function `name` of the C file `source`; `takes` and `returns` are its ctypes.

    Raises `Obstacle` where it cannot be had. The caller keeps it: to ask again runs the compiler.
    """
    openmp_entry()
    if platform.machine() in ("x86_64", "AMD64") and not features().avx2:
        raise Obstacle("this processor has no AVX2", fixable=False)
    library = _built(source, defines)
    try:
        found = getattr(ctypes.CDLL(str(library)), name)
    except (OSError, AttributeError) as error:
        raise _not_loaded(library, _first_line(str(error))) from error
    found.restype, found.argtypes = returns, takes
    return found


@cache
def openmp_entry() -> int:
    """The address of GOMP_parallel as torch itself resolves it; LLVM and Intel offer it as well."""
    if not sys.platform.startswith("linux"):
        raise Obstacle(f"it is built on Linux only, not on {sys.platform}", fixable=False)
    for library in (None, Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"):
        try:
            entry = ctypes.CDLL(library and str(library)).GOMP_parallel
            return ctypes.cast(entry, POINTER).value or 0
        except (OSError, AttributeError):
            continue
    raise Obstacle("torch's OpenMP library has no GOMP_parallel", fixable=False)


def _built(source: Path, defines: tuple[str, ...]) -> Path:
    """The compiled library in the cache, compiled now if it is not there yet."""
    compiler = _compiler()
    flags = (f"-march={features().march}", *FLAGS, *(f"-D{define}" for define in defines))
    version = _run([*compiler, "--version"])
    depends_on = repr((source.read_bytes(), compiler, version, flags, _cpu()))
    try:
        folder = private_folder("native")
        target = folder / f"{source.stem}-{sha256(depends_on.encode()).hexdigest()[:32]}.so"
        if os.path.lexists(target) and is_mine_alone(target):
            return target
        # Another process may be at the same: each works by itself, and the last one stands.
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            fresh = Path(scratch) / target.name
            _run([*compiler, *flags, "-o", str(fresh), str(source)])
            fresh.chmod(0o700)  # whatever the umask says
            fresh.replace(target)
    except (InputError, OSError) as error:
        raise Obstacle(_first_line(str(error))) from error
    return target


def _compiler() -> list[str]:
    """`$CC`, which may hold arguments, or the first that is installed."""
    asked = shlex.split(os.environ.get("CC", ""))
    found = next((name for name in asked[:1] or ("cc", "gcc", "clang") if shutil.which(name)), None)
    if found is None:
        missing = f"CC names {asked[0]}, which is not there" if asked else "no C compiler found"
        raise Obstacle(f"{missing}; install gcc or clang")
    return asked or [found]


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env=without_secrets(),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        why = _first_line(str(error))
        raise Obstacle(f"cannot run the C compiler: {why}; set CC to one that works") from error
    if done.returncode:
        said = _first_line(done.stderr) or f"exit status {done.returncode}"
        raise Obstacle(f"the C compiler {command[0]} failed: {said}; set CC to one that works")
    return done.stdout


def _not_loaded(library: Path, error: str) -> Obstacle:
    if "failed to map segment" in error:  # what the loader says of a library it may not execute
        return Obstacle(
            f"nothing can be run from the cache folder {library.parent}, which is mounted noexec; "
            "set PACKHORSE_CACHE to a folder on another file system"
        )
    return Obstacle(f"cannot load {library}, delete it: {error}")


def _first_line(text: str) -> str:
    return text.strip().split("\n", 1)[0]


def _cpu() -> str:
    """What -march=native depends on: a home folder may be shared by unlike machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    kinds = ("flags", "Features", "model name", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(kinds)}))
