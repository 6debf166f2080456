"""The loss of masked words over a large vocabulary, read once forward and once backward, in Triton.

torch copies half-precision scores to fp32, writes a log-softmax of the same size, and copies its
gradient back: eight passes over memory in place of three. Here a program takes a row of scores in
blocks, with an online softmax in fp32, and finds the largest score on the way.

`word_loss.plain` is the reference.
"""

# Functions that Triton compiles cannot be typed: their arguments are pointers and tiles of its own.
# pyright: reportUnknownParameterType=false, reportUnknownVariableType=false
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUntypedFunctionDecorator=false

from __future__ import annotations

from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from packhorse.cache import keep_kernels_private

BLOCK = 4096
WARPS = 8


class WordLoss(torch.autograd.Function):
    """Loss of each row and whether its largest score is the target's; the first has a gradient."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        rows, words = scores.shape
        scores = scores if scores.stride(1) == 1 else scores.contiguous()
        loss, lse = scores.new_empty((2, rows), dtype=torch.float32)
        correct = torch.empty(rows, dtype=torch.bool, device=scores.device)
        keep_kernels_private()
        kernel: Any = _forward
        if rows:
            kernel[(rows,)](
                scores, targets, loss, lse, correct, scores.stride(0), words, BLOCK, num_warps=WARPS
            )
        ctx.save_for_backward(scores, targets, lse)
        ctx.mark_non_differentiable(correct)
        return loss, correct

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor, _: Any
    ) -> tuple[Tensor, None]:
        scores, targets, lse = ctx.saved_tensors
        rows, words = scores.shape
        out = torch.empty((rows, words), dtype=scores.dtype, device=scores.device)
        kernel: Any = _backward
        if rows:
            sizes = (scores.stride(0), words, BLOCK)
            kernel[(rows,)](grad.contiguous(), scores, targets, lse, out, *sizes, num_warps=WARPS)
        return out, None


@triton.jit
def _forward(
    scores_ptr: tl.tensor,
    targets_ptr: tl.tensor,
    loss_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    correct_ptr: tl.tensor,
    stride: tl.tensor,
    words: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    scores_ptr += row.to(tl.int64) * stride
    maximum = float("-inf")
    best = 0
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, words, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(scores_ptr + columns, mask=columns < words, other=float("-inf")).to(tl.float32)
        largest = tl.max(x, 0)
        best = tl.where(largest > maximum, start + tl.argmax(x, 0), best)
        new_maximum = tl.maximum(maximum, largest)
        # A row that begins with -inf has no maximum yet.
        safe = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        sums = sums * tl.exp(maximum - safe) + tl.exp(x - safe)
        maximum = new_maximum
    lse = maximum + tl.log(tl.sum(sums, 0))
    target = tl.load(targets_ptr + row)
    score = tl.load(scores_ptr + target).to(tl.float32)
    tl.store(loss_ptr + row, lse - score)
    tl.store(lse_ptr + row, lse)
    tl.store(correct_ptr + row, best == target)


@triton.jit
def _backward(
    grad_ptr: tl.tensor,
    scores_ptr: tl.tensor,
    targets_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    out_ptr: tl.tensor,
    stride: tl.tensor,
    words: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    scores_ptr += row.to(tl.int64) * stride
    out_ptr += row.to(tl.int64) * words
    grad = tl.load(grad_ptr + row)
    lse = tl.load(lse_ptr + row)
    target = tl.load(targets_ptr + row)
    for start in range(0, words, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = columns < words
        x = tl.load(scores_ptr + columns, mask=mask, other=float("-inf")).to(tl.float32)
        out = (tl.exp(x - lse) - tl.where(columns == target, 1.0, 0.0)) * grad
        tl.store(out_ptr + columns, out.to(out_ptr.dtype.element_ty), mask=mask)
