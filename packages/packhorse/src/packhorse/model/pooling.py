"""Pooling: one vector of the hidden states of each sequence, as sentence-transformers does it.

Sequences are reduced with segment reductions, never with a product over the whole batch: a NaN in
one must not reach another. Where a batch has `prompt_lengths`, the leading tokens that they count
take no part. A sequence that is nothing but prompt gives zeros, and its first token under "cls", as
in sentence-transformers (whose "max" is minus infinity there).

Shapes: T tokens, S sequences, E hidden width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from packhorse.packing.batch import Packed

POOLINGS = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")


def pool(mode: str, hidden: Tensor, packed: Packed) -> Tensor:
    """[T, E] to [S, E]."""
    lengths = packed.lengths.long()
    prompts = packed.prompt_lengths
    pooled = lengths if prompts is None else lengths - prompts  # [S] tokens that take part
    if mode == "cls":
        return _at(packed.starts if prompts is None else _after_prompt(packed, pooled), hidden)
    nothing = (pooled == 0).unsqueeze(-1)
    if mode == "lasttoken":
        return _at(packed.cu_seqlens[1:] - 1, hidden).masked_fill(nothing, 0)
    if mode == "max":
        # Of nothing it is minus infinity, whose gradient would be NaN where poolings meet.
        return _reduce("max", hidden, packed).masked_fill(nothing, 0)
    if mode == "weightedmean":
        # A token weighs as much as its place from 1, the prompt's places counted.
        total = _reduce("sum", hidden * _places(hidden, packed).unsqueeze(-1), packed)
        weight = _sum_to(lengths) - (0 if prompts is None else _sum_to(prompts))
    else:
        total = _reduce("sum", hidden, packed)
        weight = pooled
    weight = weight.clamp(min=1).unsqueeze(-1).to(hidden.dtype)
    return total / (weight.sqrt() if mode == "mean_sqrt_len_tokens" else weight)


def _at(places: Tensor, hidden: Tensor) -> Tensor:
    # Empty slots at the end of a bucket start at T; any token will do for them.
    return hidden[places.clamp(0, len(hidden) - 1)]


def _after_prompt(packed: Packed, pooled: Tensor) -> Tensor:
    """[S] each sequence's first token after its prompt."""
    prompts = packed.prompt_lengths
    return packed.starts if prompts is None else packed.starts + prompts.where(pooled > 0, 0)


def _reduce(how: str, hidden: Tensor, packed: Packed) -> Tensor:
    """[T, E] to [S, E], over the tokens that take part."""
    lengths, prompts = packed.lengths.long(), packed.prompt_lengths
    if prompts is None:
        return torch.segment_reduce(hidden, how, lengths=lengths, axis=0, unsafe=True)
    # Prompt and rest as two segments: no token has to be copied, and no device waited for.
    both = torch.stack([prompts, lengths - prompts], 1).flatten()  # [2S]
    return torch.segment_reduce(hidden, how, lengths=both, axis=0, unsafe=True)[1::2]


def _places(hidden: Tensor, packed: Packed) -> Tensor:
    """[T] from 1 in each sequence."""
    tokens = len(hidden)
    starts = packed.starts.repeat_interleave(packed.lengths, output_size=tokens)
    return (torch.arange(1, tokens + 1, device=hidden.device) - starts).to(hidden.dtype)


def _sum_to(count: Tensor) -> Tensor:
    """1 + 2 + … + count."""
    return count * (count + 1) // 2
