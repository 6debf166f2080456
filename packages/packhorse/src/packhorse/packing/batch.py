"""`Packed`: sequences laid end to end, the only kind of batch that a model takes.

The value has three shapes:

- *Ragged*: T is the sum of the sequence lengths.
- *Bucket*: T and S are rounded up to a fixed shape, so that a compiled step is compiled only once;
  the spare tokens are dummy sequences at the end.
- *Rows*: T = rows × capacity. No sequence crosses a row boundary, and the unused tail of a row is
  a dummy sequence.

In all three, `cu_seqlens` alone marks where a sequence begins and ends, so models and kernels need
only one code path. `places` tells which of the S sequences are the caller's.

`join` and `split` lead from values per sequence to values per token and back; `first`, `last`,
`mean` and `pick` return one value for each of the caller's sequences.

Shapes: T tokens, S sequences (dummies included), N sequences of the caller, L tokens of one.
"""

# torch leaves some of its functions untyped (from_numpy, tolist, split …).
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from packhorse.errors import InputError


class TokenSequence(Protocol):
    """A sequence with token ids and token types; `tokens.Encoding` is one."""

    @property
    def ids(self) -> Any: ...
    @property
    def types(self) -> Any: ...


IdSequence = Sequence[int] | np.ndarray | Tensor  # token ids alone; all types are 0


@dataclass(frozen=True, slots=True)
class Packed:
    """A batch of S sequences laid end to end in T tokens."""

    ids: Tensor  # [T] int64
    types: Tensor  # [T] int64, token types (segment ids)
    positions: Tensor  # [T] int64, counted from 0 in each sequence
    cu_seqlens: Tensor  # [S+1] int32, cumulative lengths: sequence i is cu[i]:cu[i+1]
    max_seqlen: int
    places: tuple[int, ...]  # places[i] is the sequence slot of the caller's i-th sequence
    capacity: int = 0  # tokens per row if sequences may not cross rows; 0 = no rows
    # [S] int64, leading tokens of each sequence that pooling leaves out; None: pool all tokens
    prompt_lengths: Tensor | None = None
    # [S] int64, leading tokens of each sequence that its tokens attend to; None: to all tokens
    key_lengths: Tensor | None = None

    @classmethod
    def build(
        cls, sequences: Sequence[TokenSequence | IdSequence], max_seqlen: int | None = None
    ) -> Packed:
        """Lay `sequences` end to end, in their order (the ragged shape); nothing is padded.

        A sequence is a list, an array or a tensor of token ids, or an object with `ids` and
        `types`, as `Tokenizer.encode` returns them. `max_seqlen` may name a longer length than that
        of the longest sequence, so that batches which differ only in that are alike.
        """
        sequences = _token_sequences(sequences)
        if not sequences:
            raise InputError("there is no sequence to pack; pass at least one")
        # Few calls of numpy for all sequences: an online batch is laid out while a device waits.
        pieces = [sequence.ids for sequence in sequences]
        sizes = [len(piece) for piece in pieces]
        if not all(sizes):
            raise InputError(f"sequence {sizes.index(0)} has no tokens; remove it first")
        ids = _concatenate(pieces)
        types = _concatenate([sequence.types for sequence in sequences])
        if len(types) != len(ids):
            raise InputError(
                f"the sequences have {len(ids)} ids but {len(types)} types; every token needs both"
            )
        lengths = np.array(sizes)
        return cls(
            ids=ids,
            types=types,
            positions=torch.from_numpy(_restarting_positions(lengths)),
            cu_seqlens=torch.from_numpy(np.array([0, *accumulate(sizes)], np.int32)),
            max_seqlen=max_seqlen or max(sizes),
            places=tuple(range(len(sizes))),
            prompt_lengths=_prompt_lengths(sequences, lengths),
            key_lengths=_key_lengths(sequences, lengths),
        )

    @classmethod
    def rows(
        cls,
        sequences: Sequence[TokenSequence | IdSequence],
        packs: Iterable[Iterable[int]],
        capacity: int,
    ) -> Packed:
        """Lay each pack (indices into `sequences`) into a row of `capacity` tokens.

        `packs` may be what `plan(lengths=…)` returns.
        """
        sequences = _token_sequences(sequences)
        packs = [list(pack) for pack in packs]
        if sorted(chain.from_iterable(packs)) != list(range(len(sequences))):
            raise InputError("the packs must name every sequence exactly once, by its index")
        slots: list[TokenSequence] = []
        places = [0] * len(sequences)
        for pack in packs:
            room = capacity
            for index in pack:
                places[index] = len(slots)
                slots.append(sequences[index])
                room -= len(sequences[index].ids)
            if room < 0:
                raise InputError(
                    f"a pack holds {capacity - room} tokens, but a row holds {capacity}"
                )
            if room:
                slots.append(_FillerSequence.of_length(room))
        packed = cls.build(slots)
        is_real = [not isinstance(slot, _FillerSequence) for slot in slots]
        real_tokens = np.repeat(is_real, packed.lengths.numpy())  # [T]
        return replace(
            packed,
            # A row's tail can be longer than the model's position table, so that counting its
            # positions would index out of range. Its output is never read: position 0 will do.
            positions=packed.positions * torch.from_numpy(real_tokens),
            places=tuple(places),
            capacity=capacity,
        )

    def pad(self, tokens: int, sequences: int) -> Packed:
        """Fill up to a bucket: `tokens` tokens in `sequences` sequence slots.

        The spare tokens become dummy sequences, none longer than the longest real one: attention
        costs the square of a length, and `max_seqlen` must not grow. Slots that are still unused
        become empty sequences at the very end.
        """
        if self.ids.device.type != "cpu":
            return self.to("cpu").pad(tokens, sequences).to(self.ids.device)
        prompts = self.prompt_lengths
        if prompts is not None:
            prompts = F.pad(prompts, (0, sequences - len(prompts)))
        parts = unflatten(self.flat(torch.device("cpu"), tokens, sequences), tokens, sequences)
        keys = self.key_lengths
        if keys is not None:  # tokens of dummy sequences attend to all of theirs
            keys = torch.cat([keys, parts["cu_seqlens"].diff()[len(self) :].to(keys)])
        return replace(self, **parts, prompt_lengths=prompts, key_lengths=keys)

    def to(self, device: torch.device | str) -> Packed:
        """The same batch on `device`; a copy to CUDA overlaps with the device's other work."""
        target = torch.device(device)
        if target == self.ids.device:
            return self
        prompts = numbers_to(self.prompt_lengths, target)
        keys = numbers_to(self.key_lengths, target)
        if target.type == "cuda" and self.ids.device.type == "cpu":
            parts = unflatten(self.flat(target), len(self.ids), len(self))
            return replace(self, **parts, prompt_lengths=prompts, key_lengths=keys)
        return replace(
            self,
            ids=self.ids.to(target),
            types=self.types.to(target),
            positions=self.positions.to(target),
            cu_seqlens=self.cu_seqlens.to(target),
            prompt_lengths=prompts,
            key_lengths=keys,
        )

    def flat(
        self, device: torch.device, tokens: int | None = None, sequences: int | None = None
    ) -> Tensor:
        """Copy a batch on the host to a device as one tensor.

        That is all but `prompt_lengths` and `key_lengths`, which few batches have.

        With `tokens` and `sequences` it is filled up on the way, see `pad`. The three int64 tensors
        [3, T] come first, then the int32 `cu_seqlens`, two to an int64; `unflatten` returns them.
        One copy instead of four saves launches; it is from pinned memory because one from pageable
        memory would block the host until the device's stream gets to it.
        """
        used = len(self.ids)
        real = len(self)
        tokens = used if tokens is None else tokens
        sequences = real if sequences is None else sequences
        spare = tokens - used
        filled = real + -(-spare // self.max_seqlen)  # sequences that are not empty
        if spare < 0 or filled > sequences or (self.capacity and spare):
            raise InputError(
                f"{real} sequences of {used} tokens do not fit a bucket of {sequences} sequences "
                f"and {tokens} tokens"
            )
        size = 3 * tokens + sequences // 2 + 1
        staging = torch.empty(size, dtype=torch.int64, pin_memory=device.type == "cuda")
        host = staging.numpy()
        ids, types, positions = host[: 3 * tokens].reshape(3, tokens)
        ids[:used] = self.ids.numpy()
        types[:used] = self.types.numpy()
        positions[:used] = self.positions.numpy()
        bounds = host[3 * tokens :].view(np.int32)
        bounds[: real + 1] = self.cu_seqlens.numpy()
        bounds[real + 1 : sequences + 1] = tokens
        if spare:
            ids[used:] = 0
            types[used:] = 0
            positions[used:] = np.arange(spare) % self.max_seqlen
            bounds[real + 1 : filled] = np.arange(used + self.max_seqlen, tokens, self.max_seqlen)
        return staging.to(device, non_blocking=True)

    def __len__(self) -> int:
        """Number of sequence slots, dummies included."""
        return len(self.cu_seqlens) - 1

    @property
    def lengths(self) -> Tensor:
        """[S] number of tokens of each sequence."""
        return self.cu_seqlens.diff()

    @property
    def starts(self) -> Tensor:
        """[S] index of each sequence's first token."""
        return self.cu_seqlens[:-1]

    def join(self, pieces: Sequence[Any], fill: float = 0) -> Tensor:
        """Lay values of the caller's sequences along the batch: [L, …] each to [T, …].

        For labels, weights or features; `split` is the inverse. Dummy sequences get `fill`.
        """
        if len(pieces) != len(self.places):
            raise InputError(
                f"there are {len(pieces)} pieces for {len(self.places)} sequences; pass one each"
            )
        lengths = self.lengths.tolist()
        tensors = [torch.as_tensor(piece, device=self.ids.device) for piece in pieces]
        slots: list[Tensor | None] = [None] * len(self)
        for index, (place, piece) in enumerate(zip(self.places, tensors, strict=True)):
            count = len(piece) if piece.ndim else 0
            if count != lengths[place]:
                raise InputError(
                    f"piece {index} has {count} values, but its sequence has {lengths[place]}"
                    " tokens; pass one value per token"
                )
            slots[place] = piece
        return torch.cat(
            [
                tensors[0].new_full((length, *tensors[0].shape[1:]), fill)
                if piece is None
                else piece
                for piece, length in zip(slots, lengths, strict=True)
            ]
        )

    def split(self, per_token: Tensor, at: Tensor | None = None) -> list[Tensor]:
        """Cut a per-token result into one view per sequence of the caller.

        `per_token` is [T, …], or [n, …] if it holds only the n tokens `at` (ascending indices).
        """
        bounds = self.cu_seqlens if at is None else torch.searchsorted(at, self.cu_seqlens)
        ends: list[int] = bounds.tolist()
        return [per_token[ends[place] : ends[place + 1]] for place in self.places]

    def pick(self, per_sequence: Tensor) -> Tensor:
        """Select the caller's sequences, in order, from a per-sequence result: [S, …] to [N, …]."""
        if self.places == tuple(range(len(self.places))):  # dummies come last: a view will do
            return per_sequence[: len(self.places)]
        return per_sequence[list(self.places)]

    def first(self, per_token: Tensor) -> Tensor:
        """The value at the first token of each of the caller's sequences: [T, …] to [N, …]."""
        return per_token[self.pick(self.starts)]

    def last(self, per_token: Tensor) -> Tensor:
        """The value at the last token of each of the caller's sequences: [T, …] to [N, …]."""
        return per_token[self.pick(self.cu_seqlens[1:]) - 1]

    def mean(self, per_token: Tensor) -> Tensor:
        """The mean over the tokens of each of the caller's sequences: [T, …] to [N, …]."""
        lengths = self.lengths.long()
        # A segment reduction adds up nothing but the tokens of its sequence, so that a NaN stays
        # there; a product with a matrix of ones and zeros would spread it.
        sums = torch.segment_reduce(per_token, "sum", lengths=lengths, axis=0, unsafe=True)
        counts = self.pick(lengths).to(per_token.dtype)
        return self.pick(sums) / counts.view(-1, *[1] * (per_token.ndim - 1))


def numbers_to(lengths: Tensor | None, target: torch.device) -> Tensor | None:
    """Numbers per sequence on a device; few batches have any, so a copy of their own will do."""
    if lengths is None or target.type != "cuda":
        return lengths if lengths is None else lengths.to(target)
    return (lengths if lengths.is_cuda else lengths.pin_memory()).to(target, non_blocking=True)


def unflatten(flat: Tensor, tokens: int, sequences: int) -> dict[str, Tensor]:
    """Views of the tensors that `Packed.flat` joined, by field."""
    ids, types, positions = flat[: 3 * tokens].view(3, tokens).unbind()
    cu_seqlens = flat[3 * tokens :].view(torch.int32)[: sequences + 1]
    return {"ids": ids, "types": types, "positions": positions, "cu_seqlens": cu_seqlens}


@dataclass(frozen=True, slots=True)
class _FillerSequence:
    """Filler whose output is never read: token 0 of type 0."""

    ids: np.ndarray
    types: np.ndarray

    @classmethod
    def of_length(cls, length: int) -> _FillerSequence:
        zeros = np.zeros(length, np.int64)
        return cls(zeros, zeros)


class _PlainSequence(NamedTuple):
    """Token ids of type 0."""

    ids: np.ndarray
    types: np.ndarray


def _token_sequences(sequences: Sequence[Any]) -> list[TokenSequence]:
    """The sequences as objects with `ids` and `types`."""
    if isinstance(sequences, np.ndarray | Tensor):
        raise InputError(
            f"an array of shape {list(sequences.shape)} may hold padding, which would become"
            " tokens; pass a list of sequences without it, as"
            " [row[:n] for row, n in zip(rows, lengths)]"
        )
    return [
        sequence
        if hasattr(sequence, "ids") and hasattr(sequence, "types")
        else _plain_sequence(sequence, index)
        for index, sequence in enumerate(sequences)
    ]


def _plain_sequence(sequence: Any, index: int) -> _PlainSequence:
    if hasattr(sequence, "ids"):
        raise InputError(
            f"sequence {index}, a {type(sequence).__name__}, has ids but no types; pass its ids"
        )
    if isinstance(sequence, str | bytes | Mapping):
        raise InputError(
            f"sequence {index} is a {type(sequence).__name__}; pass its token ids, as [5, 17, 2]"
        )
    if isinstance(sequence, Tensor):
        sequence = sequence.numpy(force=True)
    try:
        ids = np.asarray(sequence)
    except ValueError:  # lists of different lengths in one another
        raise InputError(f"sequence {index} is nested; pass a flat list of token ids") from None
    if ids.ndim == 0:
        raise InputError(
            f"sequence {index} is {sequence!r}; pass a list of sequences, as [[5, 17, 2], [8, 1]]"
        )
    if ids.ndim > 1:
        raise InputError(
            f"sequence {index} has shape {list(ids.shape)}; pass a flat list of token ids"
        )
    if ids.size and ids.dtype.kind not in "iu":
        raise InputError(
            f"sequence {index} holds {ids.dtype}; token ids are whole numbers (values of other"
            " kinds go along the batch with Packed.join)"
        )
    return _PlainSequence(ids, np.zeros(len(ids), np.int64))


def _concatenate(arrays: Sequence[Any]) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays, dtype=np.int64, casting="unsafe"))


def _prompt_lengths(sequences: Sequence[TokenSequence], lengths: np.ndarray) -> Tensor | None:
    """[S] prompt tokens that pooling leaves out, or None if no sequence has any."""
    prompts = [getattr(sequence, "prompt_length", 0) for sequence in sequences]
    return torch.from_numpy(np.minimum(prompts, lengths)) if any(prompts) else None


def _key_lengths(sequences: Sequence[TokenSequence], lengths: np.ndarray) -> Tensor | None:
    """[S] tokens that others attend to, or None if they attend to all tokens of every sequence."""
    keys = np.array([getattr(sequence, "key_length", 0) for sequence in sequences], np.int64)
    if not keys.any():
        return None
    return torch.from_numpy(np.where(keys > 0, np.minimum(keys, lengths), lengths))


def _restarting_positions(lengths: np.ndarray) -> np.ndarray:
    """[T] 0, 1, 2, … counted anew for each length."""
    starts = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum())) - np.repeat(starts, lengths)
