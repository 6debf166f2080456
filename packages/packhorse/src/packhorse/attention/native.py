"""Attention for CPUs in one pass over the batch: native.c, compiled here at first use.

The fastest on a CPU at BERT's lengths, because nothing is padded, gathered or masked and scores
never leave the cache. Blocks of keys outside a window are passed over; what a distance adds to a
score, minus infinity where it is out of reach, is a table that C reads along. The price is a C
compiler on the machine and no backward pass.

Shapes: T tokens, H heads, D head width, L tokens of the longest sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import e, log2
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from packhorse.attention import NO_DROPOUT, Support
from packhorse.attention.reach import FULL, Reach
from packhorse.errors import KernelError
from packhorse.native import (
    FLOAT,
    INT,
    LONG,
    POINTER,
    UNSIGNED,
    Obstacle,
    function,
    openmp_entry,
    warn_lost,
)
from packhorse.packing.batch import Packed
from packhorse.processor import features

CHUNK = 128  # query rows of a work item: worth packing the keys for, and sharing a sequence
WIDEST = 256  # the largest head, which sizes the threads' buffers
OVERRUN = 64  # numbers that C may read beyond a table: the queries that fill up a group
SOURCE = Path(__file__).with_name("native.c")


@dataclass(frozen=True, slots=True)
class Chunks:
    """Every sequence cut into work items, the costliest first."""

    rows: Tensor  # [n, 3] int32: first token and length of the sequence, first query row
    tokens: int
    cu_seqlens: Tensor  # [S+1] what the plan was made from
    reach: Reach = FULL
    table: Tensor | None = None  # [H or 1, 2L-1+OVERRUN] what scores gain, see `Reach.table`
    longest: int = 0  # L


def obstacle() -> str | None:
    """What keeps the kernel from running on this machine; compiles it to find out."""
    try:
        _function(bf16=False)
    except Obstacle as reason:
        return str(reason)
    return None


def _tell() -> None:
    try:
        _function(bf16=False)
    except Obstacle as reason:
        warn_lost(reason)


class Native:
    """One call of compiled C for the whole batch."""

    serves = Support(
        devices=frozenset({"cpu"}),
        dtypes=frozenset({torch.float32, torch.bfloat16}),
        backward=False,
        head_sizes=range(1, WIDEST + 1),
        compiles=True,
        dropout=False,
        windows=True,
        biases=True,
        obstacle=lambda device: obstacle(),
        tell=_tell,
    )

    def plan(self, packed: Packed, dropout: float = 0.0, reach: Reach = FULL) -> Chunks:
        """Cut the batch into work items."""
        if dropout:
            raise KernelError(f"kernel 'native': {NO_DROPOUT}; use 'reference', or a rate of 0")
        return _plan(packed.cu_seqlens, reach)

    def __call__(self, qkv: Tensor, plan: Chunks) -> Tensor:
        """[T, 3, H, D] to [T, H, D]."""
        q, k, v = qkv.unbind(1)
        if torch.compiler.is_compiling():
            return _opaque(q, k, v, plan.cu_seqlens, plan.reach.window, plan.reach.bias)
        return attend(q, k, v, plan)


@torch.library.custom_op("packhorse::native", mutates_args=())
def _opaque(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    window: int | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """The kernel as one node of a compiled graph."""
    return attend(q, k, v, _plan(cu_seqlens, Reach(window, bias)))


@_opaque.register_fake
def _(q: Tensor, *others: Any) -> Tensor:
    return q.new_empty(q.shape)


def _plan(cu_seqlens: Tensor, reach: Reach = FULL) -> Chunks:
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
    items = torch.from_numpy(rows.astype(np.int32))
    longest = int(lengths.max(initial=0))
    return Chunks(items, int(bounds[-1]), cu_seqlens, reach, _table(reach, longest), longest)


def _table(reach: Reach, longest: int) -> Tensor | None:
    table = reach.table(longest) if longest else None
    return None if table is None else F.pad(table.detach(), (0, OVERRUN))


def attend(q: Tensor, k: Tensor, v: Tensor, plan: Chunks) -> Tensor:
    """Attend within each sequence of the plan: [T, H, D] each, and the result."""
    _check(q, k, v, plan)
    (_, heads, width), bf16 = q.shape, q.dtype == torch.bfloat16
    if bf16 and (width % 2 or not _multiplies_bf16()):
        return attend(q.float(), k.float(), v.float(), plan).bfloat16()
    kernel = _function(bf16)
    q, k, v = (_with_heads_together(x) for x in (q, k, v))
    out = torch.empty(q.shape, dtype=q.dtype)
    table, window = plan.table, plan.reach.window
    failed = kernel(
        *(x.data_ptr() for x in (q, k, v, out, plan.rows)),
        None if table is None else table.data_ptr(),
        *(len(plan.rows), heads, width),
        *(x.stride(0) for x in (q, k, v)),
        *(0 if table is None or len(table) == 1 else table.stride(0), plan.longest),
        plan.longest if window is None else window,
        *(width**-0.5 * log2(e), width**0.5),
        openmp_entry(),
        torch.get_num_threads(),
    )
    if failed:
        raise MemoryError("kernel 'native': no thread could allocate its half megabyte of scratch")
    return out


def _check(q: Tensor, k: Tensor, v: Tensor, plan: Chunks) -> None:
    """C would read or write astray where torch would raise."""
    bias = () if plan.reach.bias is None else (plan.reach.bias,)
    learns = torch.is_grad_enabled() and _learns(q, k, v, *bias)
    refusal = Native.serves.refusal(q.device, q.dtype, learns)
    if refusal is None and not all(x.dtype == q.dtype and x.device == q.device for x in (k, v)):
        refusal = "queries, keys and values differ in dtype or device"
    if refusal is None and not (q.ndim == 3 and q.shape == k.shape == v.shape):
        refusal = "queries, keys and values must have one shape [tokens, heads, width]"
    if refusal is None and len(q) != plan.tokens:
        refusal = f"the plan is for {plan.tokens} tokens and there are {len(q)}"
    if refusal is None and plan.table is not None and len(plan.table) not in (1, q.shape[1]):
        refusal = f"the plan is for {len(plan.table)} heads and there are {q.shape[1]}"
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
    except Obstacle:  # then floats will do
        return False
    return True


@cache
def _function(bf16: bool) -> Callable[..., int]:
    """The compiled kernel; raises `Obstacle` every time it cannot be had."""
    if bf16 and not features().avx512_bf16:
        raise Obstacle("this processor has no AVX512-BF16", fixable=False)
    defines = (f"BF16={int(bf16)}", f"CHUNK={CHUNK}", f"WIDEST={WIDEST}")
    takes = (*[POINTER] * 6, *[LONG] * 9, FLOAT, FLOAT, POINTER, UNSIGNED)
    return function(SOURCE, "packhorse_attend", takes, defines, returns=INT)
