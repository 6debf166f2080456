"""How far a token sees within its sequence, and what a distance adds to a score.

Two axes of newer encoders. A *window* hides what is farther away (Beltagy et al. 2020, Longformer;
the local layers of ModernBERT); a *bias* is added to a score for the key's distance from the query
(Raffel et al. 2020, T5; MPNet). Both depend on the distance alone, so a kernel is handed numbers by
distance and never learns how a model made them. The price is a square of numbers for each length,
where a kernel knows no better; they are made once for a batch and shared by its layers.

Shapes: H heads, L tokens of a sequence, R the farthest distance with a number of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Reach:
    """What a layer's attention is told beside the batch; by default, nothing."""

    window: int | None = None  # tokens that are seen to either side; None: all
    bias: Tensor | None = None  # [H, 2R+1] for a key R before to R behind; beyond, as at the end

    def near(self, length: int, device: torch.device) -> Tensor | None:
        """Which pairs of a sequence see each other, [L, L]; None where all do."""
        if self.window is None or self.window >= length - 1:
            return None
        places = torch.arange(length, device=device)
        return (places - places[:, None]).abs() <= self.window

    def added(self, length: int) -> Tensor | None:
        """What the scores of a sequence gain, [H, L, L] (query, key); None where nothing."""
        if self.bias is None:
            return None
        # Each row begins one distance later than the row below it.
        return self._spread(self.bias, length).unfold(-1, length, 1).flip(-2)

    def table(self, length: int) -> Tensor | None:
        """Both in one, [H or 1, 2L-1] in fp32: by how far the key lies *before* the query."""
        if self.bias is None and self.window is None:
            return None
        numbers = torch.zeros(1, 1) if self.bias is None else self.bias.float()
        table = self._spread(numbers, length).flip(-1)
        if self.window is None:
            return table.contiguous()
        far = torch.arange(1 - length, length, device=table.device).abs() > self.window
        return table.masked_fill(far, float("-inf"))

    @staticmethod
    def _spread(numbers: Tensor, length: int) -> Tensor:
        """[H, 2R+1] to [H, 2L-1]: numbers for the distances of a sequence."""
        farthest = numbers.shape[-1] // 2
        distances = torch.arange(1 - length, length, device=numbers.device)
        return numbers[:, distances.clamp(-farthest, farthest) + farthest]


FULL = Reach()
