"""`AttentionScope`: how far a token sees within its sequence, and what distance adds to a score.

Newer encoders vary attention in two ways. A *window* hides keys that are farther away (Beltagy et
al. 2020, Longformer; the local layers of ModernBERT). A *bias* is added to each score depending on
the key's distance from the query (relative position bias: Raffel et al. 2020, T5; MPNet). Both
depend only on the distance, so a kernel gets numbers by distance and need not know how a model
computes them. The cost is an [L, L] matrix per length in kernels that cannot do better; it is
computed once per batch and shared by all layers.

Shapes: H heads, L tokens of a sequence, R the largest distance that has its own bias.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class AttentionScope:
    """Window and bias of a layer's attention; by default neither."""

    window: int | None = None  # tokens visible on either side; None: all
    bias: Tensor | None = None  # [H, 2R+1], key R before to R after the query; beyond R: as at R
    rows: Tensor | None = None  # [2R+1] of the vectors that score distances (`disentangled`)

    def visible(self, length: int, device: torch.device) -> Tensor | None:
        """[L, L] which (query, key) pairs of a sequence see each other; None: all of them."""
        if self.window is None or self.window >= length - 1:
            return None
        positions = torch.arange(length, device=device)
        return (positions - positions[:, None]).abs() <= self.window

    def bias_matrix(self, length: int) -> Tensor | None:
        """[H, L, L] what is added to the scores (query, key); None: nothing."""
        if self.bias is None:
            return None
        # Query i needs the distances -i … L-1-i. In the list of distances 1-L … L-1 that is the
        # window of L entries which starts one earlier than that of query i-1: unfold, then flip.
        return self._by_distance(self.bias, length).unfold(-1, length, 1).flip(-2)

    def bias_table(self, length: int) -> Tensor | None:
        """[H or 1, 2L-1] in fp32, bias and window in one: minus infinity outside the window.

        Indexed by how far the key lies *before* the query, which is the order in which native.c
        walks it: from the key L-1 after the query to the key L-1 before it.
        """
        if self.bias is None and self.window is None:
            return None
        numbers = torch.zeros(1, 1) if self.bias is None else self.bias.float()
        table = self._by_distance(numbers, length).flip(-1)
        if self.window is None:
            return table.contiguous()
        outside = torch.arange(1 - length, length, device=table.device).abs() > self.window
        return table.masked_fill(outside, float("-inf"))

    def position_rows(self, length: int) -> Tensor | None:
        """[2L-1] the rows for all distances, from a key L-1 before its query to one after it."""
        return None if self.rows is None else self._by_distance(self.rows[None], length)[0]

    @staticmethod
    def _by_distance(numbers: Tensor, length: int) -> Tensor:
        """[H, 2R+1] to [H, 2L-1]: the numbers for all distances within a sequence."""
        farthest = numbers.shape[-1] // 2
        distances = torch.arange(1 - length, length, device=numbers.device)
        return numbers[:, distances.clamp(-farthest, farthest) + farthest]


FULL_SCOPE = AttentionScope()
