"""`AttentionScope`: how far a token sees within its sequence, and what distance adds to a score.

Newer encoders vary attention in four ways. A *window* hides keys that are farther away (Beltagy et
al. 2020, Longformer; the local layers of ModernBERT). *Causal* attention hides keys that come later
(decoders, as Qwen3). A *bias* is added to each score depending on the key's distance from the query
(relative position bias: Raffel et al. 2020, T5; MPNet). *Slopes* are a bias that falls with the
distance without end (ALiBi: Press et al. 2022; Jina's models). All depend only on the distance, so
a kernel gets numbers by distance and need not know how a model computes them. The cost is an [L, L]
matrix per length in kernels that cannot do better; it is computed once per batch and shared by all
layers.

Shapes: H heads, L tokens of a sequence, R the largest distance that has its own bias.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from packhorse.errors import KernelError


@dataclass(frozen=True, slots=True, eq=False)
class AttentionScope:
    """What a layer's tokens see, and what distance adds; by default all, and nothing."""

    window: int | None = None  # tokens visible on either side; None: all
    bias: Tensor | None = None  # [H, 2R+1], key R before to R after the query; beyond R: as at R
    rows: Tensor | None = None  # [2R+1] of the vectors that score distances (`disentangled`)
    causal: bool = False  # hides the keys after the query
    slopes: Tensor | None = None  # [H] fp32 or wider: what one token of distance takes off a score

    @property
    def biased(self) -> bool:
        """Does distance add to the scores?"""
        return self.bias is not None or self.slopes is not None

    def hides(self, longest: int) -> bool:
        """Is any pair of tokens hidden in sequences of up to `longest` tokens?"""
        wide = self.window is None or self.window >= longest - 1
        return longest > 1 and (self.causal or not wide)

    def visible(self, length: int, device: torch.device) -> Tensor | None:
        """[L, L] which (query, key) pairs of a sequence see each other; None: all of them."""
        if not self.hides(length):
            return None
        positions = torch.arange(length, device=device)
        return self._sees(positions - positions[:, None])

    def _sees(self, distances: Tensor) -> Tensor:
        """Which of the distances, key minus query, are visible."""
        farthest = distances.numel() if self.window is None else self.window
        near = distances.abs() <= farthest
        return near & (distances <= 0) if self.causal else near

    def bias_matrix(self, length: int) -> Tensor | None:
        """[H, L, L] what is added to the scores (query, key); None: nothing."""
        numbers = self._added(length)
        # Query i needs the distances -i … L-1-i. In the list of distances 1-L … L-1 that is the
        # window of L entries which starts one earlier than that of query i-1: unfold, then flip.
        return None if numbers is None else numbers.unfold(-1, length, 1).flip(-2)

    def bias_table(self, length: int) -> Tensor | None:
        """[H or 1, 2L-1] in fp32, all of the scope in one: minus infinity where a key is hidden.

        Indexed by how far the key lies *before* the query, which is the order in which native.c
        walks it: from the key L-1 after the query to the key L-1 before it.
        """
        numbers = self._added(length)
        if numbers is None and self.window is None and not self.causal:
            return None
        table = torch.zeros(1, 2 * length - 1) if numbers is None else numbers.float().flip(-1)
        if self.window is None and not self.causal:
            return table.contiguous()
        before = torch.arange(1 - length, length, device=table.device)
        return table.masked_fill(~self._sees(-before), float("-inf"))

    def position_rows(self, length: int) -> Tensor | None:
        """[2L-1] the rows for all distances, from a key L-1 before its query to one after it."""
        return None if self.rows is None else _by_distance(self.rows[None], length)[0]

    def _added(self, length: int) -> Tensor | None:
        """[H, 2L-1]: what the distances -(L-1) … L-1 within a sequence add; None: nothing."""
        if self.bias is not None and self.slopes is not None:
            raise KernelError("a scope has a bias or slopes, not both; add the slopes to the bias")
        if self.slopes is not None:
            distances = torch.arange(1 - length, length, device=self.slopes.device)
            return -self.slopes[:, None] * distances.abs()
        return None if self.bias is None else _by_distance(self.bias, length)


def _by_distance(numbers: Tensor, length: int) -> Tensor:
    """[H, 2R+1] to [H, 2L-1]: the numbers for all distances within a sequence."""
    farthest = numbers.shape[-1] // 2
    distances = torch.arange(1 - length, length, device=numbers.device)
    return numbers[:, distances.clamp(-farthest, farthest) + farthest]


FULL_SCOPE = AttentionScope()
