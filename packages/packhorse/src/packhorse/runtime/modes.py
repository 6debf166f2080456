"""The shape of an online batch: `rows` × `capacity` tokens, in one of three modes.

*ragged* is our own: rows × capacity is no more than a budget, sequences lie end to end, nothing is
padded. *mask* and *repack* are PopRT's two modes: a batch has rows × capacity tokens whatever is in
it, so every linear layer pays for what is empty. In *mask* a sequence keeps to one row and each
row's unused tail is a dummy sequence; the attention kernel of that name masks neighbours. In
*repack* sequences may cross rows, so only the end of the batch is empty; its kernel unpacks for
attention alone. What a sequence is answered is the same in all three.

    shape = Shape("mask", rows=16, capacity=256, policy="next_fit")
    for indices, packs in shape.cut(lengths): ...     # offline, in the order given
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from packhorse import executable
from packhorse.errors import InputError
from packhorse.packing.batch import Packed, TokenSequence
from packhorse.packing.online import OnlinePacker

MODES = ("ragged", "mask", "repack")


@dataclass(frozen=True, slots=True)
class Shape:
    """How much goes into a batch, and where in it."""

    mode: str
    rows: int
    capacity: int
    max_sequences: int | None = None
    policy: str = "first_fit"  # which row of a batch in mode mask; the others have but one

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise InputError(f"unknown mode {self.mode!r}; there are {', '.join(MODES)}")
        OnlinePacker(self.capacity, self.rows, self.max_sequences, policy=self.policy)  # checks

    @property
    def tokens(self) -> int:
        """What fits into a batch."""
        return self.rows * self.capacity

    def packer(self) -> OnlinePacker:
        """For one batch after another."""
        if self.mode == "mask":
            return OnlinePacker(self.capacity, self.rows, self.max_sequences, policy=self.policy)
        return OnlinePacker(self.tokens, 1, self.max_sequences)

    def cut(self, lengths: Sequence[int]) -> Iterator[tuple[range, list[list[int]]]]:
        """Batches of sequences in the order given: which they are, and which go into which row."""
        packer, begin = self.packer(), 0
        for end, length in enumerate(lengths):
            if packer.add(length) is None:
                yield range(begin, end), packer.flush()
                begin = end
                packer.add(length)
        if len(packer):
            yield range(begin, len(lengths)), packer.flush()

    def sizes(self) -> list[int]:
        """Tokens of the batches that are compiled apart: in mode ragged every bucket, else one."""
        if self.mode != "ragged":
            return [self.tokens]
        return [min(size, self.tokens) for size in executable.sizes(self.tokens)]

    def lay(self, sequences: Sequence[TokenSequence], packs: Sequence[Sequence[int]]) -> Packed:
        """The batch: `packs` says which of the sequences share a row."""
        if self.mode == "mask":
            empty = [[]] * (self.rows - len(packs))
            return Packed.rows(sequences, [*packs, *empty], self.capacity)
        # The longest there could be: batches that differ in that alone share a bucket.
        packed = replace(Packed.build(sequences), max_seqlen=self.capacity)
        if self.mode == "ragged":
            return packed
        spare = self.tokens - len(packed.ids)
        return packed.pad(self.tokens, len(packed) + -(-spare // packed.max_seqlen))
