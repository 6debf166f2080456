"""Attention for CPUs in one pass over the batch: native.c, compiled here at first use.

The fastest on a CPU at BERT's lengths, because nothing is padded, gathered or masked and scores
never leave the cache. The price is a C compiler on the machine and no backward pass. The source is
compiled for this very CPU in half a second, kept in the user's own cache folder under a name that
holds all it depends on, and loaded from nowhere else. It knows nothing of torch or Python: pointers
go in, and the entry of the OpenMP library that torch itself uses, so that both share one pool of
threads instead of crowding the cores with two.

Shapes: T tokens, H heads, D head width.
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
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from math import e, log2
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from packhorse.attention import Support
from packhorse.device import cpu_features
from packhorse.errors import InputError, KernelError
from packhorse.executable import cache_folder
from packhorse.packing.batch import Packed

CHUNK = (
    128  # query rows of a work item: enough to pack the keys for, few enough to share a sequence
)
WIDEST = 256  # the largest head, which sizes the threads' buffers
FLAGS = ("-std=gnu11", "-O3", "-march=native", "-ffp-contract=fast", "-shared", "-fPIC")
SOURCE = Path(__file__).with_name("native.c")
POINTER, LONG = ctypes.c_void_p, ctypes.c_long


class _Obstacle(Exception):
    """Why the kernel cannot be built or loaded here, in one line."""


@dataclass(frozen=True, slots=True)
class Chunks:
    """Every sequence cut into work items, the costliest first."""

    rows: Tensor  # [n, 3] int32: first token and length of the sequence, first query row
    tokens: int
    cu_seqlens: Tensor  # [S+1] what the plan was made from


def obstacle() -> str | None:
    """What keeps the kernel from running on this machine; compiles it to find out."""
    try:
        _function(bf16=False)
    except _Obstacle as reason:
        return str(reason)
    return None


class Native:
    """One call of compiled C for the whole batch."""

    serves = Support(
        devices=frozenset({"cpu"}),
        dtypes=frozenset({torch.float32, torch.bfloat16}),
        backward=False,
        obstacle=obstacle,
    )

    def plan(self, packed: Packed) -> Chunks:
        """Cut the batch into work items."""
        return _plan(packed.cu_seqlens)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, plan: Chunks) -> Tensor:
        """[T, H, D] each."""
        if torch.compiler.is_compiling():
            return _opaque(q, k, v, plan.cu_seqlens)
        return attend(q, k, v, plan)


@torch.library.custom_op("packhorse::native", mutates_args=())
def _opaque(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The kernel as one node of a compiled graph."""
    return attend(q, k, v, _plan(cu_seqlens))


@_opaque.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
    return q.new_empty(q.shape)


def _plan(cu_seqlens: Tensor) -> Chunks:
    bounds = cu_seqlens.cpu().numpy().astype(np.int64)
    lengths = np.diff(bounds)
    if bounds[0] != 0 or (lengths < 0).any():
        raise KernelError("cu_seqlens must begin at 0 and never fall")
    pieces = -(-lengths // CHUNK)  # none for an empty slot
    before = np.repeat(np.cumsum(pieces) - pieces, pieces)
    row = (np.arange(len(before)) - before) * CHUNK
    length = np.repeat(lengths, pieces)
    costliest = np.argsort(-length * np.minimum(CHUNK, length - row), kind="stable")
    rows = np.stack([np.repeat(bounds[:-1], pieces), length, row], 1)[costliest]
    return Chunks(torch.from_numpy(rows.astype(np.int32)), int(bounds[-1]), cu_seqlens)


def attend(q: Tensor, k: Tensor, v: Tensor, plan: Chunks) -> Tensor:
    """Attend within each sequence of the plan: [T, H, D] each, and the result."""
    _check(q, k, v, plan)
    (_, heads, width), bf16 = q.shape, q.dtype == torch.bfloat16
    if bf16 and (width % 2 or not _multiplies_bf16()):
        return attend(q.float(), k.float(), v.float(), plan).bfloat16()
    function = _function(bf16)
    q, k, v = (_with_heads_together(x) for x in (q, k, v))
    out = torch.empty(q.shape, dtype=q.dtype)
    function(
        *(x.data_ptr() for x in (q, k, v, out, plan.rows)),
        *(len(plan.rows), heads, width),
        *(x.stride(0) for x in (q, k, v)),
        width**-0.5 * log2(e),
        _openmp_entry(),
        torch.get_num_threads(),
    )
    return out


def _check(q: Tensor, k: Tensor, v: Tensor, plan: Chunks) -> None:
    """C would read or write astray where torch would raise."""
    refusal = Native.serves.refusal(q.device, q.dtype, torch.is_grad_enabled() and _learns(q, k, v))
    if refusal is None and not all(x.dtype == q.dtype and x.device == q.device for x in (k, v)):
        refusal = "queries, keys and values differ in dtype or device"
    if refusal is None and not (q.ndim == 3 and q.shape == k.shape == v.shape):
        refusal = "queries, keys and values must have one shape [tokens, heads, width]"
    if refusal is None and len(q) != plan.tokens:
        refusal = f"the plan is for {plan.tokens} tokens and there are {len(q)}"
    if refusal is None and q.shape[2] > WIDEST:
        refusal = f"heads are {q.shape[2]} wide, and it serves up to {WIDEST}"
    if refusal is not None:
        raise KernelError(f"kernel 'native' cannot run: {refusal}; use 'bucketed'")


def _learns(*tensors: Tensor) -> bool:
    return any(x.requires_grad for x in tensors)


def _with_heads_together(x: Tensor) -> Tensor:
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


@cache
def _multiplies_bf16() -> bool:
    try:
        _function(bf16=True)
    except _Obstacle:  # then floats will do
        return False
    return True


# ---- building and loading ----


@cache
def _function(bf16: bool) -> Callable[..., None]:
    """The entry of the compiled library; raises `_Obstacle` every time it cannot be had."""
    _openmp_entry()
    if platform.machine() in ("x86_64", "AMD64") and not cpu_features()["avx2"]:
        raise _Obstacle("this CPU has no AVX2")
    if bf16 and not cpu_features()["avx512_bf16"]:
        raise _Obstacle("this CPU has no AVX512-BF16")
    library = _built(bf16)
    try:
        function = ctypes.CDLL(str(library)).packhorse_attend
    except (OSError, AttributeError) as error:
        raise _Obstacle(f"cannot load {library}, delete it: {_first_line(str(error))}") from error
    function.restype = None
    scale_pool_threads = (ctypes.c_float, POINTER, ctypes.c_uint)
    function.argtypes = (*[POINTER] * 5, *[LONG] * 6, *scale_pool_threads)
    return function


@cache
def _openmp_entry() -> int:
    """The address of GOMP_parallel as torch itself resolves it; LLVM and Intel offer it as well."""
    if not sys.platform.startswith("linux"):
        raise _Obstacle(f"it is built on Linux only, not on {sys.platform}")
    for library in (None, Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"):
        try:
            entry = ctypes.CDLL(library and str(library)).GOMP_parallel
            return ctypes.cast(entry, POINTER).value or 0
        except (OSError, AttributeError):
            continue
    raise _Obstacle("torch's OpenMP library has no GOMP_parallel")


def _built(bf16: bool) -> Path:
    """The compiled library in the cache, compiled now if it is not there yet."""
    compiler = _compiler()
    flags = (*FLAGS, f"-DBF16={int(bf16)}", f"-DCHUNK={CHUNK}", f"-DWIDEST={WIDEST}")
    version = _run([*compiler, "--version"])
    depends_on = repr((SOURCE.read_bytes(), compiler, version, flags, _cpu()))
    try:
        folder = cache_folder()
        target = folder / f"native-{sha256(depends_on.encode()).hexdigest()[:32]}.so"
        if target.exists():
            return target
        # Another process may be at the same: each works by itself, and the last one stands.
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            fresh = Path(scratch) / target.name
            _run([*compiler, *flags, "-o", str(fresh), str(SOURCE)])
            fresh.replace(target)
    except (InputError, OSError) as error:
        raise _Obstacle(_first_line(str(error))) from error
    return target


def _compiler() -> list[str]:
    """`$CC`, which may hold arguments, or the first that is installed."""
    asked = shlex.split(os.environ.get("CC", ""))
    found = next((name for name in asked[:1] or ("cc", "gcc", "clang") if shutil.which(name)), None)
    if found is None:
        missing = f"CC names {asked[0]}, which is not there" if asked else "no C compiler found"
        raise _Obstacle(f"{missing}; install gcc or clang")
    return asked or [found]


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _Obstacle(f"cannot run the C compiler: {_first_line(str(error))}") from error
    if done.returncode:
        said = _first_line(done.stderr) or f"exit status {done.returncode}"
        raise _Obstacle(f"the C compiler {command[0]} failed: {said}")
    return done.stdout


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
