"""A model's heads, some of which are handed some of the tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from packhorse.errors import CheckpointError
from packhorse.packing.batch import Packed
from packhorse.runtime.proof import SyntheticSequence


def test_heads_of_sequences_see_all_tokens_beside_heads_of_some(make_model, rng) -> None:
    model = make_model(torch.float64)
    built = [SyntheticSequence(rng.integers(0, 97, n), np.zeros(n, int)) for n in (7, 3, 12)]
    packed, at = Packed.build(built), torch.tensor([2, 8, 20, 21])
    names = ("hidden", "mlm", "tokens", "nsp", "embed", "classify", "span", "pooled")
    whole, selected = model(packed, *names), model(packed, *names, at=at)
    for name, all_of_it, part in zip(names, whole, selected, strict=True):
        per_token = name in ("hidden", "mlm", "tokens", "span")
        torch.testing.assert_close(part, all_of_it[at] if per_token else all_of_it)


def test_a_head_that_is_not_there_is_never_made_up(make_model) -> None:
    with pytest.raises(CheckpointError, match="no 'replaced' head"):
        make_model(torch.float32).head("replaced")
