"""Fixed shapes: what a text becomes is the same to the bit, whatever else is in the batch.

Packing keeps sequences apart, but not their rounding: a library of matrix products adds up in an
order that it chooses by the number of rows, torch's loops treat the last numbers of an array
another way than the rest, and so a text alone and a text among others differ in the last digits.
Here a batch is filled up to one of a few sizes, heads work on a fixed number of rows, and attention
is by a kernel that sees one sequence at a time.

Which sizes are alike is tried, not assumed: before a size is first used, sequences fill it in three
orders and run through the first layers. Unless all come out the same, and the same as in the
largest size, the size is passed over for the next larger. That takes many tokens, all different:
bf16 rounds the sums that two orders make to the same number but for one in ten thousand. Where the
library is steady few tokens cost little more than themselves, and where it is not, a batch costs as
much as the largest. The bits are those of this machine, its libraries, and this number of tokens a
batch; another number of threads is tried as a size is, and refused where it gives other bits.

Shapes: T tokens, S sequences, E hidden width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from packhorse import attention, executable
from packhorse.attention import KernelChoice
from packhorse.errors import InputError, KernelError
from packhorse.model.bert import Bert
from packhorse.model.heads import TOKEN_HEADS
from packhorse.model.model import Model
from packhorse.packing.batch import Packed

# A program or call of these reads one sequence, in blocks from its own beginning. The others lay
# several into one product, as wide as the longest of them.
ONE_AT_A_TIME = ("fused", "varlen", "native", "reference")
SMALLEST = 16  # tokens
FILLER = 128  # tokens of a dummy sequence, at most
ROWS = 64  # tokens or sequences that a head works on at once
LAYERS = 2  # that are tried: the first may lack a norm, no other has shapes of its own
TRIED = 1024  # tokens that a size is tried with, at least
LENGTHS = (3, 1)  # of their sequences in turn; every size is a multiple of the sum
STRIDE = 7919  # from one's word to the next one's
SHIFTS = range(0, ROWS, 9)  # by which heads' rows are moved
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Sequence(NamedTuple):
    ids: np.ndarray
    types: np.ndarray


def check(graphs: bool, dtype: str | torch.dtype | None) -> None:
    """Refuse what does not go with it."""
    if graphs:
        raise InputError(
            "invariant does not go with graphs: what is compiled for a bucket rounds in its own "
            "way; leave one of them out"
        )
    if dtype == "auto":
        raise InputError("invariant does not go with dtype 'auto', which a clock decides; name one")


def pick(
    device: torch.device, dtype: torch.dtype, *, name: str | None = None, **needs: Any
) -> KernelChoice:
    """The kernel asked for, or the fastest, if it sees one sequence at a time."""
    found = attention.pick(device, dtype, name=name, **needs)
    if found.name in ONE_AT_A_TIME:
        return found
    if name is None or name == "auto":
        why = f"{found.reason}, but it lays sequences together and invariant was asked for"
        return replace(attention.pick(device, dtype, name="reference", **needs), reason=why)
    raise KernelError(
        f"kernel {name!r} lays sequences together, so that results depend on neighbours in their "
        f"last digits; with invariant, use {' or '.join(ONE_AT_A_TIME)}"
    )


def largest(budget: int, longest: int) -> int:
    """The tokens of a full batch: the budget or the longest sequence, rounded up to a size."""
    return executable.round_up(max(budget, longest), SMALLEST)


class FixedShapes:
    """Runs a model in shapes that were tried."""

    def __init__(self, model: Model, device: torch.device, tokens: int) -> None:
        self.model, self.device = model, device
        self.sizes = tuple(executable.sizes(tokens, SMALLEST))
        self.threads = torch.get_num_threads()
        states, rows = self._try_layers(tokens), self._try_heads()
        if states is None or rows is None:
            raise KernelError(
                f"on this machine, with {self.threads} threads, results depend on the place in a "
                f"batch of {tokens} tokens; try another budget or number of threads"
            )
        self._states, self._rows = states, rows
        self._alike = {(self.threads, tokens): True}  # by threads and size

    def __call__(self, packed: Packed, heads: Sequence[str], at: Tensor | None) -> list[Tensor]:
        """What `Model.forward` gives, within rounding."""
        states = [self._in_a_size(piece) for piece in _pieces(packed, self.sizes[-1])]
        hidden = states[0] if len(states) == 1 else torch.cat(states)
        some = hidden if at is None else hidden[at]
        return [self._head(name, hidden, some, packed) for name in heads]

    def computed(self, packed: Packed) -> int:
        """The tokens that a batch costs, those that fill it up included."""
        return sum(self.size(len(piece.ids)) for piece in _pieces(packed, self.sizes[-1]))

    def size(self, tokens: int) -> int:
        """The smallest that holds so many tokens and is like the largest."""
        if not self._is_alike(self.sizes[-1]):
            raise KernelError(
                f"with {torch.get_num_threads()} threads results are not those of the "
                f"{self.threads} that the model was loaded with; go back to these, or load it anew"
            )
        return next(size for size in self.sizes if size >= tokens and self._is_alike(size))

    def _in_a_size(self, piece: Packed) -> Tensor:
        """[T, E]."""
        tokens = len(piece.ids)
        size, filler = self.size(tokens), min(FILLER, self.model.bert.config.max_positions)
        dummies = -(-(size - tokens) // filler)
        filled = replace(piece, max_seqlen=filler).pad(size, len(piece) + dummies)
        filled = replace(filled, max_seqlen=max(filler, piece.max_seqlen))
        return self.model.bert(filled.to(self.device))[:tokens]

    def _head(self, name: str, hidden: Tensor, some: Tensor, packed: Packed) -> Tensor:
        """`some` are the rows of `hidden` that heads of tokens are asked about."""
        if name == "hidden":
            return some
        if name in self.model.heads and isinstance(self.model.heads[name], TOKEN_HEADS):
            return self._of_tokens(name, some, packed)
        return self._of_sequences(name, hidden, packed)

    def _of_tokens(self, name: str, some: Tensor, packed: Packed) -> Tensor:
        """[n, E] to [n, …], `ROWS` at a time."""
        filled = F.pad(some, (0, 0, 0, -len(some) % ROWS))
        found = [self.model.apply_heads(rows, packed, [name])[0] for rows in filled.split(ROWS)]
        return torch.cat(found)[: len(some)]

    def _of_sequences(self, name: str, hidden: Tensor, packed: Packed) -> Tensor:
        """[T, E] to [S, …], `ROWS` at a time; the slots left over at last are empty."""
        empty = packed.cu_seqlens[-1:].expand(-len(packed) % ROWS)
        ends = torch.cat([packed.cu_seqlens, empty]).unfold(0, ROWS + 1, ROWS)  # [groups, ROWS + 1]
        prompts: Sequence[Tensor | None] = [None] * len(ends)
        if packed.prompt_lengths is not None:
            filled = F.pad(packed.prompt_lengths, (0, -len(packed) % ROWS))
            prompts = list(self._sent(filled).split(ROWS))
        found = []
        for slots, lengths, (first, last) in zip(
            self._sent(ends - ends[:, :1]), prompts, ends[:, [0, -1]].tolist(), strict=True
        ):
            part = replace(packed, cu_seqlens=slots, prompt_lengths=lengths)
            found += self.model.apply_heads(hidden[first:last], part, [name])
        return torch.cat(found)[: len(packed)]

    def _sent(self, host: Tensor) -> Tensor:
        """On the device, without waiting for what it is at."""
        pinned = host.pin_memory() if self.device.type == "cuda" else host
        return pinned.to(self.device, non_blocking=True)

    def _is_alike(self, size: int) -> bool:
        """Does a batch of this size give what the largest gave when the model was loaded?"""
        key = torch.get_num_threads(), size
        if key not in self._alike:
            alike = _equal(self._try_layers(size), self._states)
            if alike and size == self.sizes[-1]:
                alike = _equal(self._try_heads(), self._rows)
            self._alike[key] = alike
        return self._alike[key]

    @torch.inference_mode()
    def _try_layers(self, size: int) -> Tensor | None:
        """The bits of some tokens' states, [tokens, E], if they are the same wherever they lie."""
        bert = _first_layers(self.model.bert)
        batches = max(TRIED // size, 1)
        words = np.arange(batches * size).reshape(batches, size) * STRIDE % bert.config.vocab_size
        places = np.split(np.arange(size), np.cumsum(LENGTHS * (size // sum(LENGTHS)))[:-1])
        orders = places, places[3:] + places[:3], places[::-1]
        # Many small batches are compared with the largest: each need not lie in every order itself.
        every = size == self.sizes[-1] or batches < len(orders)
        found = []
        for number, row in enumerate(words):
            some = orders if every else [orders[number % len(orders)]]
            bits = _the_same(torch.stack([self._laid(bert, row, order) for order in some]))
            if bits is None:
                return None
            found.append(bits)
        return torch.cat(found)[:TRIED]

    def _laid(self, bert: Bert, words: np.ndarray, order: Sequence[np.ndarray]) -> Tensor:
        """[T, E], as if the sequences lay in the order of their words."""
        packed = Packed.build([_Sequence(words[at], words[at] * 0) for at in order])
        back = torch.from_numpy(np.concatenate(order).argsort()).to(self.device)
        return bert(packed.to(self.device))[back]

    @torch.inference_mode()
    def _try_heads(self) -> Tensor | None:
        """The bits of what the heads make of some rows, if they are the same at every place."""
        every = [self._try_head(name) for name in self.model.heads]
        some = [bits.flatten().long() for bits in every if bits is not None]
        return torch.cat([torch.empty(0), *some]) if len(some) == len(every) else None

    def _try_head(self, name: str) -> Tensor | None:
        """The same rows, moved."""
        bert = self.model.bert
        random = np.random.default_rng(0).standard_normal((ROWS, bert.config.hidden_size))
        rows = torch.from_numpy(random).to(self.device, bert.embed.words.weight.dtype)
        packed = Packed.build([_Sequence(np.array([5]), np.array([0]))] * ROWS)
        found = []
        for shift in SHIFTS:
            moved = rows.roll(shift, 0)
            found.append(self._head(name, moved, moved, packed).roll(-shift, 0))
        return _the_same(torch.stack(found))


def _pieces(packed: Packed, limit: int) -> Iterator[Packed]:
    """The batch without its rows, cut between sequences where it has more than `limit` tokens."""
    ends = packed.cu_seqlens.tolist()
    first = 0
    for last in range(1, len(ends)):
        if last + 1 == len(ends) or ends[last + 1] - ends[first] > limit:
            yield _cut(packed, slice(ends[first], ends[last]), slice(first, last + 1))
            first = last


def _cut(packed: Packed, tokens: slice, bounds: slice) -> Packed:
    return replace(
        packed,
        ids=packed.ids[tokens],
        types=packed.types[tokens],
        positions=packed.positions[tokens],
        cu_seqlens=packed.cu_seqlens[bounds] - tokens.start,
        capacity=0,
        prompt_lengths=None,  # heads alone ask for them, and see the whole batch
    )


def _first_layers(bert: Bert) -> Bert:
    """The same weights, fewer layers; the model itself may be running in another thread."""
    few = copy(bert)
    layers = bert.layers[:LAYERS]
    few.__dict__ |= {"_modules": {**bert._modules, "layers": layers}, "local": bert.local[:LAYERS]}
    return few


def _the_same(copies: Tensor) -> Tensor | None:
    """The bits that all of [n, …] have in common; None where one differs."""
    bits = copies.contiguous().view(BITS[copies.element_size()])
    return bits[0].cpu() if bool((bits == bits[0]).all()) else None


def _equal(found: Tensor | None, expected: Tensor) -> bool:
    """As far as both go."""
    if found is None:
        return False
    common = min(len(found), len(expected))
    return torch.equal(found[:common], expected[:common])
