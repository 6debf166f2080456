"""Fixed shapes: the result for a text is the same bit by bit, whatever else is in the batch.

Packing keeps sequences apart, but not their rounding: a library of matrix products sums in an order
that it chooses by the number of rows, torch's loops treat the last numbers of an array differently
from the rest, and so a text alone and a text among others differ in the last digits. Here a batch
is padded to one of a few sizes, heads run on a fixed number of rows, and attention uses a kernel
that processes one sequence at a time.

Which sizes give equal bits is measured, not assumed: before a size is first used, sequences fill it
in three orders and run through the first layers. Unless all results are equal, and equal to those
of the largest size, that size is skipped for the next larger one. The trial takes many tokens, all
different: bf16 rounds sums in two orders to the same number in all but one case in ten thousand.
Where the library is regular a small batch costs little more than its tokens, and where it is not,
as much as the largest size. The bits are those of this machine, its libraries, and this number of
tokens per batch; another number of threads is tried like a size, and refused if the bits differ.

Shapes: T tokens, S sequences, E hidden width.
"""

# torch leaves some of its functions untyped (from_numpy, tolist, split …).
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

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
from packhorse.model.model import Model
from packhorse.model.retrieval import HEADS_BY_TOKEN, Splade
from packhorse.packing.batch import Packed

SMALLEST = 16  # tokens
# A product for AVX2 computes 24 or 16 rows at a time, and the rows that are left over in another
# order. So sizes on a CPU include the multiples of both, the largest among them.
TILE = 48
FILLER = 128  # tokens of a dummy sequence, at most
ROWS = 64  # tokens or sequences that a head runs on at once
LAYERS = 2  # in a trial: the first may lack a norm, all others have the same shapes
TRIAL_TOKENS = 1024  # in a trial of a size, at least
LENGTHS = (3, 1)  # of the sequences in a trial, in turn; every size is a multiple of the sum
STRIDE = 7919  # from one token id of a trial to the next: a prime, so that ids do not repeat
SHIFTS = range(0, ROWS, 9)  # by which the rows of heads are moved in a trial
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class SyntheticSequence(NamedTuple):
    """A made-up sequence for trials, proofs and tests."""

    ids: np.ndarray
    types: np.ndarray


def check(graphs: bool, dtype: str | torch.dtype | None) -> None:
    """Raise for options that contradict invariant results."""
    if graphs:
        raise InputError(
            "invariant and graphs cannot be combined: the code compiled for each bucket rounds "
            "differently; leave one of them out"
        )
    if dtype == "auto":
        raise InputError(
            "invariant and dtype 'auto' cannot be combined: 'auto' measures and may choose "
            "differently each time; name a dtype"
        )


def pick(
    device: torch.device, dtype: torch.dtype, *, name: str | None = None, **needs: Any
) -> KernelChoice:
    """Return the named kernel, or the fastest, if it processes one sequence at a time."""
    choice = attention.pick(device, dtype, name=name, **needs)
    if choice.kernel.serves.one_at_a_time:
        return choice
    if name is None or name == "auto":
        reason = (
            f"{choice.reason}, but it computes several sequences together, which is not invariant"
        )
        return replace(attention.pick(device, dtype, name="reference", **needs), reason=reason)
    usable = [name for name in attention.KERNELS if attention.kernel(name).serves.one_at_a_time]
    raise KernelError(
        f"kernel {name!r} computes several sequences together, so that results depend on neighbors "
        f"in their last digits; with invariant, use {' or '.join(usable)}"
    )


def largest(budget: int, longest: int) -> int:
    """Return the tokens of a full batch: the budget or the longest sequence, rounded up."""
    return executable.round_up(max(budget, longest), SMALLEST)


class FixedShapes:
    """Runs a model in shapes that gave equal bits in a trial."""

    def __init__(self, model: Model, device: torch.device, tokens: int) -> None:
        self.model = model
        self.device = device
        self.sizes = _sizes(tokens, device)
        self.threads = torch.get_num_threads()
        states = self._try_layers(self.sizes[-1])
        rows = self._try_heads()
        if states is None or rows is None:
            raise KernelError(
                f"on this machine, with {self.threads} threads, results depend on the position in "
                f"a batch of {tokens} tokens; try another budget or number of threads"
            )
        self._states = states
        self._rows = rows
        # Results of the trials so far, by threads and size: did it give the expected bits?
        self._trials = {(self.threads, self.sizes[-1]): True}

    def __call__(self, packed: Packed, heads: Sequence[str], at: Tensor | None) -> list[Tensor]:
        """Return what `Model.forward` returns, up to rounding."""
        states = [self._run_padded(part) for part in _parts(packed, self.sizes[-1])]
        hidden = states[0] if len(states) == 1 else torch.cat(states)  # [T, E]
        selected = hidden if at is None else hidden[at]
        return [self._head(name, hidden, selected, packed) for name in heads]

    def computed(self, packed: Packed) -> int:
        """Return the tokens that are computed for a batch, padding included."""
        return sum(self.size(len(part.ids)) for part in _parts(packed, self.sizes[-1]))

    def size(self, tokens: int) -> int:
        """Return the smallest size that holds the tokens and has the bits of the largest."""
        if not self._is_equal(self.sizes[-1]):
            raise KernelError(
                f"with {torch.get_num_threads()} threads results differ from those with the "
                f"{self.threads} that the model was loaded with; go back to these, or reload it"
            )
        return next(size for size in self.sizes if size >= tokens and self._is_equal(size))

    def _run_padded(self, part: Packed) -> Tensor:
        """Run the encoder on a part that fits into a size; return [T, E] without padding."""
        tokens = len(part.ids)
        size = self.size(tokens)
        filler = min(FILLER, self.model.bert.config.max_positions)
        dummies = -(-(size - tokens) // filler)
        # `pad` makes dummies of `max_seqlen` tokens, so that is set to the filler for this call.
        padded = replace(part, max_seqlen=filler).pad(size, len(part) + dummies)
        padded = replace(padded, max_seqlen=max(filler, part.max_seqlen))
        return self.model.bert(padded.to(self.device))[:tokens]

    def _head(self, name: str, hidden: Tensor, selected: Tensor, packed: Packed) -> Tensor:
        """Run one head; `selected` are the rows of `hidden` that per-token heads run on."""
        if name == "hidden":
            return selected
        head = dict(self.model.heads).get(name)
        if isinstance(head, HEADS_BY_TOKEN):
            return self._per_token(name, selected, packed)
        if isinstance(head, Splade):
            return self._one_by_one(name, hidden, packed)
        return self._per_sequence(name, hidden, packed)

    def _per_token(self, name: str, states: Tensor, packed: Packed) -> Tensor:
        """[n, E] to [n, …], `ROWS` at a time."""
        padded = F.pad(states, (0, 0, 0, -len(states) % ROWS))
        outputs = [self.model.apply_heads(rows, packed, [name])[0] for rows in padded.split(ROWS)]
        return torch.cat(outputs)[: len(states)]

    def _one_by_one(self, name: str, hidden: Tensor, packed: Packed) -> Tensor:
        """[T, E] to [S, …]: a sequence by itself always has one shape, and so the same bits."""
        outputs: list[Tensor] = []
        for states in hidden.split(packed.lengths.tolist()):
            bounds = self._to_device(torch.tensor([0, len(states)], dtype=torch.int32))
            alone = replace(packed, cu_seqlens=bounds)
            outputs += self.model.apply_heads(states.clone(), alone, [name])  # aligned as any other
        return torch.cat(outputs)

    def _per_sequence(self, name: str, hidden: Tensor, packed: Packed) -> Tensor:
        """[T, E] to [S, …], `ROWS` at a time; the last group is padded with empty sequences."""
        empty = packed.cu_seqlens[-1:].expand(-len(packed) % ROWS)
        ends = torch.cat([packed.cu_seqlens, empty]).unfold(0, ROWS + 1, ROWS)  # [groups, ROWS + 1]
        prompts: Sequence[Tensor | None] = [None] * len(ends)
        if packed.prompt_lengths is not None:
            padded = F.pad(packed.prompt_lengths, (0, -len(packed) % ROWS))
            prompts = list(self._to_device(padded).split(ROWS))
        groups = zip(
            self._to_device(ends - ends[:, :1]), prompts, ends[:, [0, -1]].tolist(), strict=True
        )
        outputs: list[Tensor] = []
        for slots, lengths, (first, last) in groups:
            group = replace(packed, cu_seqlens=slots, prompt_lengths=lengths)
            outputs += self.model.apply_heads(hidden[first:last], group, [name])
        return torch.cat(outputs)[: len(packed)]

    def _to_device(self, host: Tensor) -> Tensor:
        """Copy to the device without waiting for the work that it has queued."""
        pinned = host.pin_memory() if self.device.type == "cuda" else host
        return pinned.to(self.device, non_blocking=True)

    def _is_equal(self, size: int) -> bool:
        """Return whether this size has the bits of the largest when the model was loaded."""
        key = torch.get_num_threads(), size
        if key not in self._trials:
            is_equal = _same_bits(self._try_layers(size), self._states)
            if is_equal and size == self.sizes[-1]:
                is_equal = _same_bits(self._try_heads(), self._rows)
            self._trials[key] = is_equal
        return self._trials[key]

    @torch.inference_mode()
    def _try_layers(self, size: int) -> Tensor | None:
        """Return the bits of trial states, [tokens, E]; None if they depend on the position."""
        bert = _first_layers(self.model.bert)
        batches = max(TRIAL_TOKENS // size, 1)
        ids = np.arange(batches * size).reshape(batches, size) * STRIDE % bert.config.vocab_size
        spans = np.split(np.arange(size), np.cumsum(LENGTHS * (size // sum(LENGTHS)))[:-1])
        orders = spans, spans[3:] + spans[:3], spans[::-1]  # as they are, rotated, reversed
        # Many small batches are compared with the largest, so each needs only one of the orders.
        in_all_orders = size == self.sizes[-1] or batches < len(orders)
        trials: list[Tensor] = []
        for number, row in enumerate(ids):
            chosen = orders if in_all_orders else [orders[number % len(orders)]]
            bits = _common_bits(torch.stack([self._run(bert, row, order) for order in chosen]))
            if bits is None:
                return None
            trials.append(bits)
        return torch.cat(trials)[:TRIAL_TOKENS]

    def _run(self, bert: Bert, ids: np.ndarray, order: Sequence[np.ndarray]) -> Tensor:
        """Run sequences, spans of `ids`, in this order; return [T, E] in the order of `ids`."""
        packed = Packed.build([SyntheticSequence(ids[span], ids[span] * 0) for span in order])
        inverse = torch.from_numpy(np.concatenate(order).argsort()).to(self.device)
        return bert(packed.to(self.device))[inverse]

    @torch.inference_mode()
    def _try_heads(self) -> Tensor | None:
        """Return the bits of all heads on trial rows; None if they depend on the position."""
        # Not a float32 tensor to begin with: beside it the bit patterns would be rounded.
        outputs: list[Tensor] = [torch.empty(0, dtype=torch.int64)]
        for name in self.model.heads:
            bits = self._try_head(name)
            if bits is None:
                return None
            outputs.append(bits.flatten().long())
        return torch.cat(outputs)

    def _try_head(self, name: str) -> Tensor | None:
        """Return the bits of one head on rows that are moved from trial to trial, or None."""
        bert = self.model.bert
        random = np.random.default_rng(0).standard_normal((ROWS, bert.config.hidden_size))
        rows = torch.from_numpy(random).to(self.device, bert.embed.words.weight.dtype)
        token = SyntheticSequence(np.array([5]), np.array([0]))
        packed = Packed.build([token] * ROWS)
        outputs: list[Tensor] = []
        for shift in SHIFTS:
            moved = rows.roll(shift, 0)
            outputs.append(self._head(name, moved, moved, packed).roll(-shift, 0))
        return _common_bits(torch.stack(outputs))


def _sizes(tokens: int, device: torch.device) -> tuple[int, ...]:
    """Sizes of batches of up to so many tokens, in ascending order."""
    sizes = set(executable.sizes(tokens, SMALLEST))
    if device.type == "cpu":
        tiles = -(-tokens // TILE)
        sizes |= {TILE * min(size, tiles) for size in executable.sizes(tiles, 1)}
    return tuple(sorted(sizes))


def _parts(packed: Packed, limit: int) -> Iterator[Packed]:
    """Yield the batch as one flat part, or cut between sequences if it exceeds `limit` tokens."""
    ends: list[int] = packed.cu_seqlens.tolist()
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
        prompt_lengths=None,  # only heads need them, and run on the whole batch
    )


def _first_layers(bert: Bert) -> Bert:
    """Return a model with the same weights and fewer layers.

    A shallow copy, because the model itself may be running in another thread.
    """
    short = copy(bert)
    # torch has no public name for modules that may be None.
    children = bert._modules  # pyright: ignore[reportPrivateUsage]
    order = bert.order[:LAYERS]
    modules = {**children, "layers": bert.layers[: max(order) + 1]}
    short.__dict__ |= {"_modules": modules, "order": order, "local": bert.local[:LAYERS]}
    return short


def _common_bits(copies: Tensor) -> Tensor | None:
    """Return the bits that all of [n, …] have in common; None if one differs."""
    bits = copies.contiguous().view(BITS[copies.element_size()])
    return bits[0].cpu() if bool((bits == bits[0]).all()) else None


def _same_bits(bits: Tensor | None, expected: Tensor) -> bool:
    """Compare bits over the length that both have."""
    if bits is None:
        return False
    common = min(len(bits), len(expected))
    return torch.equal(bits[:common], expected[:common])
