"""Compare two checkpoints, in any formats: tensor by tensor, and by their outputs on text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from packhorse.checkpoint import Checkpoint
from packhorse.packing.batch import Packed
from packhorse.tokens import Encoding

BATCH = 16  # sequences per batch


@dataclass(frozen=True, slots=True)
class OutputDifference:
    """The difference of one tensor, or of one head's output, between two models."""

    name: str
    largest: float  # absolute; infinite where shapes differ, NaN differs from all but NaN
    equal: bool  # bit by bit


def compare_tensors(
    a: Checkpoint, b: Checkpoint
) -> tuple[list[OutputDifference], list[str], list[str]]:
    """Compare the tensors that both have; return those and the names that only one has."""
    first = a.model.state_dict()
    second = b.model.state_dict()
    both = [_difference(name, first[name], second[name]) for name in first if name in second]
    only_a = [name for name in first if name not in second]
    return both, only_a, [name for name in second if name not in first]


def compare_outputs(
    a: Checkpoint, b: Checkpoint, encodings: Sequence[Encoding]
) -> list[OutputDifference]:
    """Compare hidden states and every head that both have, on the same tokens, in fp32."""
    heads = ["hidden", *(head for head in a.model.heads if head in b.model.heads)]
    worst = {head: OutputDifference(head, 0.0, True) for head in heads}
    first = a.model.float().eval()
    second = b.model.float().eval()
    for start in range(0, len(encodings), BATCH):
        packed = Packed.build(encodings[start : start + BATCH])
        with torch.inference_mode():
            outputs = zip(heads, first(packed, *heads), second(packed, *heads), strict=True)
            differences = [_difference(*output) for output in outputs]
        for new in differences:
            old = worst[new.name]
            # NaN, which is not equal to itself, counts as the largest.
            largest = max(old.largest, new.largest, key=lambda x: (x != x, x))
            worst[new.name] = OutputDifference(new.name, largest, old.equal and new.equal)
    return list(worst.values())


def _difference(name: str, a: torch.Tensor, b: torch.Tensor) -> OutputDifference:
    if a.shape != b.shape:
        return OutputDifference(name, float("inf"), False)
    if a.dtype == b.dtype and torch.equal(a, b):
        return OutputDifference(name, 0.0, True)
    wide = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    largest = (a.to(wide) - b.to(wide)).abs().max() if a.numel() else torch.zeros(())
    return OutputDifference(name, float(largest), False)
