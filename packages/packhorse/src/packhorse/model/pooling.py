"""Pooling: one vector per sequence from its hidden states, as in sentence-transformers.

Sequences are reduced with segment reductions, never with a matrix product over the whole batch: a
NaN in one sequence must not reach another. If a batch has `prompt_lengths`, these leading tokens
are left out. A sequence that is nothing but prompt gives zeros, or its first token for "cls", as in
sentence-transformers (whose "max" is minus infinity then).

Shapes: T tokens, S sequences, E hidden width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from packhorse.errors import InputError
from packhorse.packing.batch import Packed

POOLINGS = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")


def pool(mode: str, hidden: Tensor, packed: Packed) -> Tensor:
    """Reduce hidden states [T, E] to one vector per sequence, [S, E], by one of `POOLINGS`."""
    lengths = packed.lengths.long()
    prompts = packed.prompt_lengths
    pooled = lengths if prompts is None else lengths - prompts  # [S] tokens that are pooled
    if mode == "cls":
        return _at(packed.starts if prompts is None else _after_prompt(packed, pooled), hidden)
    if mode == "lasttoken":
        last = _at(packed.cu_seqlens[1:] - 1, hidden)
        return last.masked_fill((pooled == 0).unsqueeze(-1), 0)
    if mode == "max":
        # The maximum of nothing is minus infinity, whose gradient is NaN if poolings are combined.
        largest = _reduce("max", hidden, lengths, prompts)
        return largest.masked_fill((pooled == 0).unsqueeze(-1), 0)
    if mode == "weightedmean":
        # The weight of a token is its position, counted from 1 and including the prompt.
        weighted = hidden * _positions_from_1(hidden, packed).unsqueeze(-1)
        total = _reduce("sum", weighted, lengths, prompts)
        weight = _sum_to(lengths) - (0 if prompts is None else _sum_to(prompts))
    elif mode in ("mean", "mean_sqrt_len_tokens"):
        total = _reduce("sum", hidden, lengths, prompts)
        weight = pooled
    else:
        raise InputError(f"pooling {mode!r} is unknown; there are {', '.join(POOLINGS)}")
    weight = weight.clamp(min=1).unsqueeze(-1).to(hidden.dtype)
    return total / (weight.sqrt() if mode == "mean_sqrt_len_tokens" else weight)


def _at(indices: Tensor, hidden: Tensor) -> Tensor:
    # The empty sequences that `Packed.pad` adds start at T, past the last token. Their result is
    # never read, so any token will do.
    return hidden[indices.clamp(0, len(hidden) - 1)]


def _after_prompt(packed: Packed, pooled: Tensor) -> Tensor:
    """[S] each sequence's first token after its prompt."""
    prompts = packed.prompt_lengths
    return packed.starts if prompts is None else packed.starts + prompts.where(pooled > 0, 0)


def _reduce(reduction: str, hidden: Tensor, lengths: Tensor, prompts: Tensor | None) -> Tensor:
    """[T, E] to [S, E], over the tokens that are pooled."""
    if prompts is None:
        # unsafe=True skips torch's check of the lengths, for which the host waits for the device.
        return torch.segment_reduce(hidden, reduction, lengths=lengths, axis=0, unsafe=True)
    # Prompt and text are two segments of which only the second is used: no token is copied, and the
    # host does not have to wait for the device to know the lengths.
    segments = torch.stack([prompts, lengths - prompts], 1).flatten()  # [2S]
    return torch.segment_reduce(hidden, reduction, lengths=segments, axis=0, unsafe=True)[1::2]


def _positions_from_1(hidden: Tensor, packed: Packed) -> Tensor:
    """[T] positions, counted from 1 in each sequence."""
    tokens = len(hidden)
    starts = packed.starts.repeat_interleave(packed.lengths, output_size=tokens)
    return (torch.arange(1, tokens + 1, device=hidden.device) - starts).to(hidden.dtype)


def _sum_to(count: Tensor) -> Tensor:
    """1 + 2 + … + count."""
    return count * (count + 1) // 2
