"""Packed: sequences laid end to end, the only thing a model ever sees.

Three shapes of the same value. *Ragged*: T is the sum of the lengths. *Bucket*: T and S are rounded
up to a fixed shape, so that a compiled step is compiled once; the spare tokens are dummy sequences.
*Rows*: T = rows × capacity, no sequence crosses a row, each row's unused tail is a dummy sequence.
Whatever the shape, `cu_seqlens` alone says where a sequence begins and ends, so a model or a kernel
needs no second code path, and `places` says which of the S sequences are the caller's own.

Shapes: T tokens, S sequences (dummies included).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from packhorse.errors import InputError


class Tokens(Protocol):
    """What a sequence must offer to be packed; `tokens.Encoding` does."""

    @property
    def ids(self) -> Any: ...
    @property
    def types(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class Packed:
    """S sequences laid end to end in T tokens."""

    ids: Tensor  # [T]
    types: Tensor  # [T]
    positions: Tensor  # [T]    restart in each sequence
    cu_seqlens: Tensor  # [S+1]  int32
    max_seqlen: int
    places: tuple[int, ...]  # which sequence slot holds the caller's i-th sequence
    capacity: int = 0  # tokens a row where sequences may not cross rows; 0 = ragged
    # [S] int64: leading tokens of each sequence that pooling leaves out; None = all are pooled
    prompt_lengths: Tensor | None = None

    @classmethod
    def build(cls, sequences: Sequence[Tokens]) -> Packed:
        """Lay `sequences` end to end, in the order given."""
        if not sequences:
            raise InputError("there is no sequence to pack; pass at least one")
        lengths = np.array([len(s.ids) for s in sequences])
        if not lengths.all():
            raise InputError(f"sequence {int(lengths.argmin())} has no tokens; drop it first")
        return cls(
            ids=_join(s.ids for s in sequences),
            types=_join(s.types for s in sequences),
            positions=torch.from_numpy(_restarting(lengths)),
            cu_seqlens=_cumulative(lengths),
            max_seqlen=int(lengths.max()),
            places=tuple(range(len(sequences))),
            prompt_lengths=_prompt_lengths(sequences, lengths),
        )

    @classmethod
    def rows(
        cls, sequences: Sequence[Tokens], packs: Sequence[Sequence[int]], capacity: int
    ) -> Packed:
        """Lay each pack (indices into `sequences`) into a row of `capacity` tokens."""
        if sorted(chain.from_iterable(packs)) != list(range(len(sequences))):
            raise InputError("the packs must name every sequence exactly once, by its index")
        slots: list[Tokens] = []
        places = [0] * len(sequences)
        for pack in packs:
            room = capacity
            for index in pack:
                places[index] = len(slots)
                slots.append(sequences[index])
                room -= len(sequences[index].ids)
            if room < 0:
                raise InputError(f"a pack holds {capacity - room} tokens, its row {capacity}")
            if room:
                slots.append(_Dummy.of(room))
        built = cls.build(slots)
        real = np.repeat([not isinstance(s, _Dummy) for s in slots], built.lengths.numpy())
        return replace(
            built,
            # A tail may be longer than a model has positions for; it needs none of its own.
            positions=built.positions * torch.from_numpy(real),
            places=tuple(places),
            capacity=capacity,
        )

    def pad(self, tokens: int, sequences: int) -> Packed:
        """Fill up to a bucket: `tokens` tokens in `sequences` sequence slots.

        The spare tokens become dummy sequences no longer than the longest real one, so that they
        cost next to nothing; the slots left over are empty sequences at the very end.
        """
        spare = tokens - len(self.ids)
        dummies = -(-spare // self.max_seqlen)
        empty = sequences - len(self) - dummies
        if self.capacity or spare < 0 or empty < 0:
            raise InputError(
                f"{len(self)} sequences of {len(self.ids)} tokens do not fit a bucket of "
                f"{sequences} sequences and {tokens} tokens"
            )
        lengths = np.full(dummies, self.max_seqlen)
        if dummies:
            lengths[-1] = spare - self.max_seqlen * (dummies - 1)
        tail = _cumulative(np.append(lengths, np.zeros(empty, int)))[1:] + len(self.ids)
        zeros = self.ids.new_zeros(spare)
        positions = torch.from_numpy(_restarting(lengths)).to(self.ids.device)
        return replace(
            self,
            ids=torch.cat([self.ids, zeros]),
            types=torch.cat([self.types, zeros]),
            positions=torch.cat([self.positions, positions]),
            cu_seqlens=torch.cat([self.cu_seqlens, tail.to(self.cu_seqlens)]),
            prompt_lengths=_filled(self.prompt_lengths, sequences),
        )

    def to(self, device: torch.device | str) -> Packed:
        """The same batch on `device`; to CUDA it is copied while the device works on another."""
        target = torch.device(device)
        if target == self.ids.device:
            return self
        if target.type == "cuda" and self.ids.device.type == "cpu":
            return self._staged(target)
        names = ("ids", "types", "positions", "cu_seqlens")
        moved = {name: getattr(self, name).to(target) for name in names}
        if self.prompt_lengths is not None:
            moved["prompt_lengths"] = self.prompt_lengths.to(target)
        return replace(self, **moved)

    def _staged(self, target: torch.device) -> Packed:
        """In one copy, from pinned memory: from any other it would wait for the device's work."""
        tokens, bounds = len(self.ids), len(self.cu_seqlens)
        staged = torch.empty(3 * tokens + -(-bounds // 2), dtype=torch.int64, pin_memory=True)
        host = staged.numpy()
        per_token = (self.ids, self.types, self.positions)
        np.concatenate([x.numpy() for x in per_token], out=host[: 3 * tokens])
        host[3 * tokens :].view(np.int32)[:bounds] = self.cu_seqlens.numpy()
        there = staged.to(target, non_blocking=True)
        ids, types, positions = there[: 3 * tokens].view(3, tokens)
        cu_seqlens = there[3 * tokens :].view(torch.int32)[:bounds]
        prompts = self.prompt_lengths
        if prompts is not None:  # few models have any: they may take a copy of their own
            prompts = prompts.pin_memory().to(target, non_blocking=True)
        return replace(
            self,
            ids=ids,
            types=types,
            positions=positions,
            cu_seqlens=cu_seqlens,
            prompt_lengths=prompts,
        )

    def __len__(self) -> int:
        """Sequence slots, dummies included."""
        return len(self.cu_seqlens) - 1

    @property
    def lengths(self) -> Tensor:
        """[S] tokens of each sequence."""
        return self.cu_seqlens.diff()

    @property
    def starts(self) -> Tensor:
        """[S] index of each sequence's first token."""
        return self.cu_seqlens[:-1]

    def split(self, per_token: Tensor, at: Tensor | None = None) -> list[Tensor]:
        """Cut a per-token result into one view for each of the caller's sequences.

        `per_token` is [T, …]; or [n, …] for the n tokens `at`, in rising order, alone.
        """
        bounds = self.cu_seqlens if at is None else torch.searchsorted(at, self.cu_seqlens)
        ends = bounds.tolist()
        return [per_token[ends[place] : ends[place + 1]] for place in self.places]

    def pick(self, per_sequence: Tensor) -> Tensor:
        """Keep the caller's sequences of a per-sequence result [S, …], in the caller's order."""
        if self.places == tuple(range(len(self.places))):  # dummies come last: no index to copy
            return per_sequence[: len(self.places)]
        return per_sequence[list(self.places)]


@dataclass(frozen=True, slots=True)
class _Dummy:
    """Filler that no one asks about; token 0 at type 0."""

    ids: np.ndarray
    types: np.ndarray

    @classmethod
    def of(cls, length: int) -> _Dummy:
        zeros = np.zeros(length, np.int64)
        return cls(zeros, zeros)


def _join(arrays: Iterable[Any]) -> Tensor:
    pieces = [np.asarray(a) for a in arrays]
    return torch.from_numpy(np.concatenate(pieces, dtype=np.int64, casting="unsafe"))


def _prompt_lengths(sequences: Sequence[Tokens], lengths: np.ndarray) -> Tensor | None:
    """[S], as far as sequences have a prompt that is not pooled; None where none has."""
    found = np.array([getattr(sequence, "prompt_length", 0) for sequence in sequences], np.int64)
    return torch.from_numpy(np.minimum(found, lengths)) if found.any() else None


def _filled(prompt_lengths: Tensor | None, sequences: int) -> Tensor | None:
    """The same for more sequence slots, which have no prompt."""
    if prompt_lengths is None:
        return None
    return F.pad(prompt_lengths, (0, sequences - len(prompt_lengths)))


def _cumulative(lengths: np.ndarray) -> Tensor:
    return torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))


def _restarting(lengths: np.ndarray) -> np.ndarray:
    """Counts 0, 1, 2 … anew for each length: [T]."""
    starts = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum())) - np.repeat(starts, lengths)
