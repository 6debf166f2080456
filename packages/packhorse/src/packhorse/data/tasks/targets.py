"""Examples and what they should come to, laid end to end: what fine-tuning and evaluation are fed.

    task = labelled_task(read_labelled("SST-2/train.tsv"), tokenizer, max_length=128)
    for batch in Loader(task, examples=32, seed=7, epochs=3):
        ...                                    # batch.packed, batch.targets
        state["data"] = batch.cursor           # later: Loader(…, cursor=state["data"])

A batch is a number of examples (the batch of unpacked training, without its padding) or as many as
a budget of tokens holds. Its targets follow their sequences: a span's ends are token indices of the
flat batch, so that a loss takes its logits from there directly, whatever filler `Packed.pad` adds
behind. The two sequences of a similarity pair stand side by side: 2i and 2i + 1.

Order, ranks, parts and cursor are as in `loader`: the epochs laid end to end are one stream, a
global batch is the next piece of it whatever the number of ranks, and a cursor is a place in it.
All examples are in memory, because sets to fine-tune on are small; so nothing is loaded ahead.

Shapes: N examples, S sequences, T tokens, C labels.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from itertools import chain
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from packhorse.data.order import by_tokens, permuted
from packhorse.data.tasks.labelled import Labelled
from packhorse.errors import InputError
from packhorse.packing.batch import Packed, TokenSequence
from packhorse.tokens import Encoding, Text, Tokenizer

Problem = Literal["single_label", "multi_label", "regression", "similarity", "contrastive", "span"]

NO_END = 1 << 60  # places in a stream of epochs without end
HASHED = 4096  # examples at once: few calls, and little memory


class Span(NamedTuple):
    """The first and the last token of an answer in its sequence; (0, 0), [CLS]: it has none."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Example:
    """What is learned from as one: a sequence, or the two of a pair, and their target."""

    sequences: tuple[TokenSequence, ...]
    target: int | float | tuple[int, ...] | Span | None  # by the problem; None: contrastive


@dataclass(frozen=True)
class Task:
    """Examples of one problem, and its labels for a model's configuration."""

    examples: list[Example]
    problem: Problem
    labels: tuple[str, ...] = ()
    truncated: int = 0  # examples that lost tokens to the limit of length

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each example."""
        found = [sum(len(s.ids) for s in example.sequences) for example in self.examples]
        return np.array(found, np.int64)

    @cached_property
    def fingerprint(self) -> str:
        """Tells one set of examples from another: a hash of all that is learned from.

        Tokens, targets, what they mean and their order; read once, as they lie in memory.
        """
        digest = blake2b(repr((self.problem, self.labels)).encode(), digest_size=16)
        for begin in range(0, len(self.examples), HASHED):
            part = self.examples[begin : begin + HASHED]
            sequences = [sequence for example in part for sequence in example.sequences]
            lengths = [[len(s.ids) for s in example.sequences] for example in part]
            # Lengths say where one sequence ends and the next begins.
            digest.update(repr((lengths, [example.target for example in part])).encode())
            for kind in ("ids", "types"):
                joined = np.concatenate([np.asarray(getattr(s, kind)) for s in sequences])
                digest.update(joined.astype("<i4").tobytes())
        return digest.hexdigest()

    @property
    def fingerprints(self) -> tuple[str, str]:
        """Today's, and the one that cursors of version 0.1 have: a sum of lengths alone."""
        return self.fingerprint, f"{zlib.crc32(self.lengths.tobytes()):08x}"


@dataclass(frozen=True, slots=True)
class Batch:
    """One rank's part of a batch. It may be empty: then one dummy token stands in `packed`."""

    packed: Packed  # ragged, each example's sequences side by side
    targets: Tensor  # as `COLLATE` says for the problem
    numbers: tuple[int, ...]  # of the examples, in the order of the targets
    total: int  # examples of all ranks and parts: what the sum of their losses is divided by
    tokens: int
    cursor: dict[str, Any]  # where to go on behind this batch

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on `device`."""
        targets = self.targets.to(device, non_blocking=True)
        return replace(self, packed=self.packed.to(device), targets=targets)


def labelled_task(
    found: Labelled, tokenizer: Tokenizer, max_length: int | None = None, *, apart: bool = False
) -> Task:
    """Examples of a labelled set; `apart`: a pair is two sequences whose likeness is the score."""
    if not apart:
        encodings = [(encoding,) for encoding in tokenizer.encode(found.texts, max_length)]
        return _task(encodings, found.targets, found.problem, found.labels)
    if found.problem != "regression":
        raise InputError(f"likeness is learned from scores; these are labels ({found.problem})")
    pairs = _encode_apart(found.texts, tokenizer, max_length)
    return _task(pairs, found.targets, "similarity", found.labels)


def contrastive_task(
    pairs: Sequence[Text], tokenizer: Tokenizer, max_length: int | None = None
) -> Task:
    """Pairs that belong together, each to be told from the others in its batch."""
    encodings = _encode_apart(pairs, tokenizer, max_length)
    return _task(encodings, [None] * len(pairs), "contrastive", ())


def _encode_apart(
    texts: Sequence[Text], tokenizer: Tokenizer, max_length: int | None
) -> list[tuple[Encoding, ...]]:
    if single := [i for i, text in enumerate(texts) if isinstance(text, str)]:
        raise InputError(f"text {single[0]} is not a pair; name two columns")
    encodings = tokenizer.encode(list(chain.from_iterable(texts)), max_length)
    return list(zip(encodings[::2], encodings[1::2], strict=True))


def _task(
    encodings: Sequence[tuple[Encoding, ...]],
    targets: Sequence[Any],
    problem: Problem,
    labels: tuple[str, ...],
) -> Task:
    examples = [Example(*both) for both in zip(encodings, targets, strict=True)]
    cut = sum(any(encoding.truncated for encoding in each) for each in encodings)
    return Task(examples, problem, labels, cut)


@dataclass(frozen=True)
class Loader:
    """Iterate to get this rank's share of each global batch, from the cursor on."""

    task: Task
    examples: int | None = None  # of a global batch, all ranks together; or else
    tokens: int | None = None  # the most it may have, as many examples as that holds
    seed: int = 0
    shuffle: bool = True
    epochs: int | None = None  # None: without end
    drop_last: bool = False  # each epoch ends with its last full batch; else the next fills it up
    rank: int = 0
    world: int = 1
    parts: int = 1  # batches that a rank's share is divided into, for accumulation
    row: int = 0  # tokens that every sequence is padded to, to compare with; 0: none is
    cursor: Mapping[str, Any] | None = None  # of a batch behind which to go on

    def __post_init__(self) -> None:
        if (self.examples is None) == (self.tokens is None):
            raise InputError("give the size of a batch in examples or in tokens, one of the two")
        least = {"examples": 1, "tokens": 1, "seed": 0, "world": 1, "parts": 1, "epochs": 1}
        for name, smallest in least.items():
            given = getattr(self, name)
            if given is not None and given < smallest:
                raise InputError(f"{name} must be at least {smallest}, got {given}")
        if not 0 <= self.rank < self.world:
            raise InputError(f"no rank {self.rank} of {self.world}")
        if self.drop_last and self.tokens:
            raise InputError("drop_last is for batches of a number of examples, not of tokens")
        if not self._epoch_size:
            raise InputError(f"{len(self.task.examples)} examples are not one batch; keep the last")
        for number, example in enumerate(self.task.examples):
            if not all(len(sequence.ids) for sequence in example.sequences):
                raise InputError(f"example {number} has a sequence without tokens; drop it first")
        most = int(self._lengths.argmax())
        if self.tokens and self._lengths[most] > self.tokens:
            raise InputError(
                f"example {most} has {self._lengths[most]} tokens, more than a batch of "
                f"{self.tokens}; raise tokens, or lower the max_length of examples"
            )
        self._begin()

    def __iter__(self) -> Iterator[Batch]:
        number, begin = self._begin()
        end = NO_END if self.epochs is None else self.epochs * self._epoch_size
        while begin < end:
            until = self._until(begin, end)
            yield from self._share(begin, until, number)
            number, begin = number + 1, until

    @property
    def _lengths(self) -> np.ndarray:
        return self.task.lengths

    @property
    def _epoch_size(self) -> int:
        have = len(self.task.examples)
        return have // (self.examples or 1) * (self.examples or 1) if self.drop_last else have

    def _until(self, begin: int, end: int) -> int:
        """The end of the global batch that begins at this place of the stream."""
        if self.tokens is None:
            return min(begin + (self.examples or 1), end)
        most = self.tokens // int(self._lengths.min())
        lengths = self._lengths[self._stream(begin, min(begin + most, end))]
        return begin + int(np.searchsorted(lengths.cumsum(), self.tokens, "right"))

    def _stream(self, begin: int, until: int) -> np.ndarray:
        """The numbers of the examples at these places of the stream."""
        epochs, numbers = np.divmod(np.arange(begin, until), self._epoch_size)
        for epoch in np.unique(epochs).tolist() if self.shuffle else ():
            of = epochs == epoch
            numbers[of] = permuted(numbers[of], len(self.task.examples), self.seed, epoch)
        return numbers

    def _share(self, begin: int, until: int, number: int) -> Iterator[Batch]:
        """This rank's part of a global batch, or its parts."""
        numbers = self._stream(begin, until)
        shares = self.world * self.parts
        divided = by_tokens(self._lengths[numbers], shares) if shares > 1 else [slice(None)]
        mine = divided[self.rank :: self.world]
        here, behind = self._cursor(begin, number), self._cursor(until, number + 1)
        for left, share in zip(reversed(range(self.parts)), mine, strict=True):
            # A step begun is done again: a cursor never points into a global batch.
            yield self._batch(numbers[share], len(numbers), here if left else behind)

    def _batch(self, numbers: np.ndarray, total: int, cursor: dict[str, Any]) -> Batch:
        examples = [self.task.examples[i] for i in numbers]
        sequences = [sequence for example in examples for sequence in example.sequences]
        packed = self._laid(sequences) if sequences else _nothing()
        targets = COLLATE[self.task.problem]([e.target for e in examples], self.task, packed)
        tokens = int(self._lengths[numbers].sum())
        return Batch(packed, targets, tuple(numbers.tolist()), total, tokens, cursor)

    def _laid(self, sequences: Sequence[Encoding]) -> Packed:
        if not self.row:
            return Packed.build(sequences)
        rows = Packed.rows(sequences, [[i] for i in range(len(sequences))], self.row)
        return replace(rows, capacity=0)  # what fills a row up is a sequence like any other

    def _cursor(self, at: int, batch: int) -> dict[str, Any]:
        epoch, example = divmod(at, self._epoch_size)
        made_by = {"set": self.task.fingerprint, "seed": self.seed, "shuffle": self.shuffle}
        return {**made_by, "epoch": epoch, "example": example, "batch": batch}

    def _begin(self) -> tuple[int, int]:
        """The number of the first batch, and its place in the stream."""
        if self.cursor is None:
            return 0, 0
        ours, theirs = self._cursor(0, 0), self.cursor
        if theirs.keys() != ours.keys():
            raise InputError(f"not a cursor of a task: {dict(theirs)!r:.80}")
        known = {"set": self.task.fingerprints, "seed": (self.seed,), "shuffle": (self.shuffle,)}
        for key, values in known.items():
            if theirs[key] not in values:
                raise InputError(
                    f"the cursor is of another {key} ({theirs[key]!r:.40}, now {ours[key]!r:.40}); "
                    "go on with the same, or begin again without it"
                )
        epoch, example, batch = theirs["epoch"], theirs["example"], theirs["batch"]
        if not all(type(value) is int and value >= 0 for value in (epoch, example, batch)):
            raise InputError(f"not a cursor of a task: {dict(theirs)!r:.80}")
        if example >= self._epoch_size:
            raise InputError(f"the cursor is at example {example} of {self._epoch_size}")
        return batch, epoch * self._epoch_size + example


class _Dummy(NamedTuple):
    ids: list[int]
    types: list[int]


def _nothing() -> Packed:
    return replace(Packed.build([_Dummy([0], [0])]), places=())


def _numbered(targets: list[Any], task: Task, packed: Packed) -> Tensor:
    return torch.tensor(targets, dtype=torch.int64)


def _several(targets: list[Any], task: Task, packed: Packed) -> Tensor:
    holds = torch.zeros(len(targets), len(task.labels))
    for row, labels in zip(holds, targets, strict=True):
        row[list(labels)] = 1.0
    return holds


def _scores(targets: list[Any], task: Task, packed: Packed) -> Tensor:
    return torch.tensor(targets, dtype=torch.float32)


def _ends(targets: list[Any], task: Task, packed: Packed) -> Tensor:
    within = torch.tensor(targets, dtype=torch.int64).reshape(-1, 2)
    return within + packed.pick(packed.starts)[:, None]


def _none(targets: list[Any], task: Task, packed: Packed) -> Tensor:
    return torch.empty(len(targets), 0)


COLLATE: dict[str, Callable[[list[Any], Task, Packed], Tensor]] = {
    "single_label": _numbered,  # int64 [N]: the label's number
    "multi_label": _several,  # float32 [N, C]: 1 where a label holds
    "regression": _scores,  # float32 [N]
    "similarity": _scores,  # float32 [N], of sequences 2i and 2i + 1
    "contrastive": _none,  # [N, 0]: sequence 2i belongs to 2i + 1
    "span": _ends,  # int64 [N, 2]: first and last token, as indices of the flat batch
}
