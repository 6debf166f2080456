"""Are two checkpoints, in whatever formats, the same model? Tensor by tensor, and on real text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from packhorse.checkpoint import Checkpoint
from packhorse.packing.batch import Packed
from packhorse.tokens import Encoding

BATCH = 16  # sequences


@dataclass(frozen=True, slots=True)
class Difference:
    """How far one tensor, or one head's output, is from the other model's."""

    name: str
    largest: float  # absolute; infinite where shapes differ, NaN differs from all but NaN
    equal: bool  # bit by bit


def compare_tensors(a: Checkpoint, b: Checkpoint) -> tuple[list[Difference], list[str], list[str]]:
    """The tensors that both have, under our names; what only one of them has."""
    first, second = a.model.state_dict(), b.model.state_dict()
    both = [_difference(name, first[name], second[name]) for name in first if name in second]
    only_a = [name for name in first if name not in second]
    return both, only_a, [name for name in second if name not in first]


def compare_outputs(
    a: Checkpoint, b: Checkpoint, encodings: Sequence[Encoding]
) -> list[Difference]:
    """Hidden states and every head that both have, over the same tokens, computed in fp32."""
    heads = ["hidden", *(head for head in a.model.heads if head in b.model.heads)]
    worst = {head: Difference(head, 0.0, True) for head in heads}
    first, second = a.model.float().eval(), b.model.float().eval()
    for start in range(0, len(encodings), BATCH):
        packed = Packed.build(encodings[start : start + BATCH])
        with torch.inference_mode():
            pairs = zip(heads, first(packed, *heads), second(packed, *heads), strict=True)
            found = [_difference(*pair) for pair in pairs]
        for new in found:
            old = worst[new.name]
            largest = max(old.largest, new.largest, key=lambda x: (x != x, x))
            worst[new.name] = Difference(new.name, largest, old.equal and new.equal)
    return list(worst.values())


def _difference(name: str, a: torch.Tensor, b: torch.Tensor) -> Difference:
    if a.shape != b.shape:
        return Difference(name, float("inf"), False)
    if a.dtype == b.dtype and torch.equal(a, b):
        return Difference(name, 0.0, True)
    wide = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    apart = (a.to(wide) - b.to(wide)).abs().max() if a.numel() else torch.zeros(())
    return Difference(name, float(apart), False)
