"""Attention for CPUs in one pass over the batch: native.c, compiled in wheels or at first use.

The fastest on a CPU at BERT's lengths: nothing is padded, gathered or masked, and scores never
leave the cache. Blocks of keys that a window or causal attention hides are skipped; what a distance
adds to a score, minus infinity where a key is hidden, is a table that the C code reads. There is no
backward pass, and outside a wheel it needs a C compiler on the machine.

Shapes: T tokens, H heads, D head width, L tokens of the longest sequence.
"""

# torch leaves some of its functions untyped (from_numpy, tolist, split …).
# pyright: reportUnknownMemberType=false

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

from packhorse.attention.kernels import NO_DROPOUT, KernelSupport, check_scope
from packhorse.attention.scope import FULL_SCOPE, AttentionScope
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
    warn_slow,
)
from packhorse.packing.batch import Packed
from packhorse.processor import features

CHUNK = 128  # query rows per work item: enough to pay for packing the keys, few enough to balance
WIDEST = 256  # the largest head width; it sizes the buffers of the threads
# Numbers that C may read past a bias table: it computes GROUP queries at once (at most 32), and the
# last group of a sequence is filled up with queries that do not exist.
OVERRUN = 64
SOURCE = Path(__file__).with_name("native.c")


@dataclass(frozen=True, slots=True)
class NativePlan:
    """Every sequence cut into work items, the most expensive first."""

    items: Tensor  # [n, 3] int32: first token and length of the sequence, first query row
    tokens: int
    cu_seqlens: Tensor  # [S+1] what the plan was made from
    scope: AttentionScope = FULL_SCOPE
    table: Tensor | None = None  # [H or 1, 2L-1+OVERRUN], see `AttentionScope.bias_table`
    longest: int = 0  # L


def obstacle() -> str | None:
    """What keeps the kernel from running on this machine; compiles it to find out."""
    try:
        _function(bf16=False)
    except Obstacle as reason:
        return str(reason)
    return None


def _warn() -> None:
    try:
        _function(bf16=False)
    except Obstacle as reason:
        warn_slow(reason)


class Native:
    """One call of compiled C for the whole batch."""

    serves = KernelSupport(
        devices=frozenset({"cpu"}),
        dtypes=frozenset({torch.float32, torch.bfloat16}),
        backward=False,
        head_sizes=range(1, WIDEST + 1),
        compiles=True,
        dropout=False,
        one_at_a_time=True,
        windows=True,
        biases=True,
        causal=True,
        obstacle=lambda device: obstacle(),
        warn=_warn,
    )

    def plan(
        self, packed: Packed, dropout: float = 0.0, scope: AttentionScope = FULL_SCOPE
    ) -> NativePlan:
        """Cut the batch into work items."""
        check_scope("native", scope, self.serves)
        if dropout:
            raise KernelError(f"kernel 'native': {NO_DROPOUT}; use 'reference', or a rate of 0")
        return _plan(packed.cu_seqlens, scope)

    def __call__(self, qkv: Tensor, plan: NativePlan) -> Tensor:
        """[T, 3, H, D] to [T, H, D]."""
        q, k, v = qkv.unbind(1)
        if torch.compiler.is_compiling():
            scope = plan.scope
            options = (scope.window, scope.bias, scope.causal, scope.slopes)
            return _opaque(q, k, v, plan.cu_seqlens, *options)
        return attend(q, k, v, plan)


@torch.library.custom_op("packhorse::native", mutates_args=())
def _opaque(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    window: int | None = None,
    bias: Tensor | None = None,
    causal: bool = False,
    slopes: Tensor | None = None,
) -> Tensor:
    """The kernel as one node of a compiled graph."""
    scope = AttentionScope(window, bias, causal=causal, slopes=slopes)
    return attend(q, k, v, _plan(cu_seqlens, scope))


@_opaque.register_fake
def _(q: Tensor, *rest: Any) -> Tensor:
    return q.new_empty(q.shape)


def _plan(cu_seqlens: Tensor, scope: AttentionScope = FULL_SCOPE) -> NativePlan:
    bounds = cu_seqlens.cpu().numpy().astype(np.int64)
    lengths = np.diff(bounds)
    if bounds[0] != 0 or (lengths < 0).any():
        raise KernelError("cu_seqlens must begin at 0 and never fall")
    chunks = -(-lengths // CHUNK)  # per sequence; 0 for an empty slot
    # One entry per item from here on. Its first query row is CHUNK times its number within its
    # sequence.
    first_item = np.repeat(np.cumsum(chunks) - chunks, chunks)  # of the same sequence
    first_row = (np.arange(len(first_item)) - first_item) * CHUNK
    length = np.repeat(lengths, chunks)
    first_token = np.repeat(bounds[:-1], chunks)
    # Threads take items in order; with the most expensive first they finish at about the same
    # time. The cost of an item is its query rows times the keys of its sequence.
    order = np.argsort(-length * np.minimum(CHUNK, length - first_row), kind="stable")
    items = np.stack([first_token, length, first_row], 1)[order]
    longest = int(lengths.max(initial=0))
    return NativePlan(
        items=torch.from_numpy(items.astype(np.int32)),
        tokens=int(bounds[-1]),
        cu_seqlens=cu_seqlens,
        scope=scope,
        table=_table(scope, longest),
        longest=longest,
    )


def _table(scope: AttentionScope, longest: int) -> Tensor | None:
    table = scope.bias_table(longest) if longest else None
    return None if table is None else F.pad(table.detach(), (0, OVERRUN))


def attend(q: Tensor, k: Tensor, v: Tensor, plan: NativePlan) -> Tensor:
    """Attend within each sequence of the plan: q, k, v and the result are [T, H, D]."""
    _check(q, k, v, plan)
    _, heads, width = q.shape
    bf16 = q.dtype == torch.bfloat16
    # VDPBF16PS multiplies pairs of neighbors, so an odd width has to be computed in fp32.
    if bf16 and (width % 2 or not _multiplies_bf16()):
        return attend(q.float(), k.float(), v.float(), plan).bfloat16()
    kernel = _function(bf16)
    q, k, v = (_with_adjacent_heads(x) for x in (q, k, v))
    out = torch.empty(q.shape, dtype=q.dtype)
    table = plan.table
    window = plan.scope.window
    failed = kernel(
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        out.data_ptr(),
        plan.items.data_ptr(),
        None if table is None else table.data_ptr(),
        len(plan.items),
        heads,
        width,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        # All heads share a table that only hides keys.
        0 if table is None or len(table) == 1 else table.stride(0),
        plan.longest,
        plan.longest if window is None else window,
        _visible_after(plan),
        width**-0.5 * log2(e),  # scale of the scores; C computes powers of two
        width**0.5,  # unit of the table, which is added before the scores are scaled
        openmp_entry(),
        torch.get_num_threads(),
    )
    if failed:
        raise MemoryError("kernel 'native': no thread could allocate its half megabyte of scratch")
    return out


def _visible_after(plan: NativePlan) -> int:
    """How many tokens after itself a query sees."""
    if plan.scope.causal:
        return 0
    return plan.longest if plan.scope.window is None else plan.scope.window


def _check(q: Tensor, k: Tensor, v: Tensor, plan: NativePlan) -> None:
    """Check what torch would check: C reads or writes out of bounds instead of raising."""
    added = [x for x in (plan.scope.bias, plan.scope.slopes) if x is not None]
    inputs = (q, k, v, *added)
    backward = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    refusal = Native.serves.refusal(q.device, q.dtype, backward)
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


def _with_adjacent_heads(x: Tensor) -> Tensor:
    """C needs the heads of a token side by side; tokens may be any stride apart."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


@cache
def _multiplies_bf16() -> bool:
    try:
        _function(bf16=True)
    except Obstacle:  # fp32 will do
        return False
    return True


@cache
def _function(bf16: bool) -> Callable[..., int]:
    """The compiled kernel; raises `Obstacle` if it cannot be built (exceptions are not cached)."""
    if bf16 and not features().avx512_bf16:
        raise Obstacle("this processor has no AVX512-BF16", fixable=False)
    openmp_entry()  # or the obstacle would come with the first batch
    defines = (f"BF16={int(bf16)}", f"CHUNK={CHUNK}", f"WIDEST={WIDEST}")
    argument_types = (*[POINTER] * 6, *[LONG] * 10, FLOAT, FLOAT, POINTER, UNSIGNED)
    return function(SOURCE, "packhorse_attend", argument_types, defines, returns=INT)
