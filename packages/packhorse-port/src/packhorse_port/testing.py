"""`poptorch.testing`: comparison of nested outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def allclose(ref: Any, other: Any) -> bool:
    """Whether two tensors, tuples or lists have the same structure and nearly equal numbers."""
    if isinstance(ref, Tensor):
        return isinstance(other, Tensor) and torch.allclose(other, ref)
    if type(ref) is not type(other) or len(ref) != len(other):
        return False
    return all(map(allclose, ref, other))
