"""On CUDA: the fused kernel serves transformers' models, flat and padded, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from packhorse import hf
from packhorse.hf.layout import LAYOUT_ATTRIBUTE

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize("family", ["bert", "roberta", "modernbert"])
def test_half_precision_is_close_to_the_cpu(make, padded: dict[str, Any], family: str) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 2}  # heads as wide as the kernel serves
    truth = make(family, **sizes)
    model = make(family, **sizes)
    collator = hf.PackedCollator(lambda features: padded, model)
    model.to("cuda", torch.bfloat16)
    real, expected = padded["attention_mask"].bool(), truth(**padded)[0]
    expected[real].square().mean().backward()
    slope = truth.get_input_embeddings().weight.grad
    flat = collator([])
    untold = {k: v for k, v in flat.items() if not k.startswith("cu_seq_lens")}  # by position ids
    for batch in (padded, untold, flat):
        there = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
        model.zero_grad()
        actual = model(**there)[0]
        actual[real.cuda()].square().mean().backward()
        grad = model.get_input_embeddings().weight.grad
        assert (actual.cpu().float() - expected)[real].norm() < 0.03 * expected[real].norm()
        assert (grad.cpu().float() - slope).norm() < 0.1 * slope.norm()
    if family != "modernbert":
        cache = getattr(there["cu_seq_lens_q"], LAYOUT_ATTRIBUTE)[1].cache
        assert [key[0] for key in cache if isinstance(key, tuple)] == ["fused"]
