"""Run a packed model on ONNX Runtime, as a backend of the Encoder: `backend(packed, heads)`.

The batch is laid into the rows that the model wants, by what the model says about itself
(`facts.Facts`), and the results are laid flat again: [T, …] a token, [S, …] a sequence. Where the
rows are fixed, a batch may take several runs. A batch laid in rows is what mask mode needs; the
other modes take any.

Shapes: T tokens, S sequences, R rows, C tokens a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from packhorse.errors import CheckpointError, InputError, KernelError
from packhorse.model.bert import positions_after_padding
from packhorse.model.heads import Embed
from packhorse.onnxpack.engine import blaming, open_session
from packhorse.onnxpack.facts import KEY, Facts, parse
from packhorse.onnxpack.probe import numpy_type
from packhorse.packing.batch import Packed

Arrays = dict[str, np.ndarray]


class OnnxBackend:
    """A packed model, opened."""

    def __init__(
        self,
        path: str | Path,
        *,
        device: torch.device | str = "cpu",
        heads: Mapping[str, nn.Module] | None = None,
        plain: bool = False,
    ) -> None:
        """heads: made of the hidden states here, beside those that the model has.

        plain: run the graph as it is written, with nothing fused.
        """
        self.path, self.device = Path(path), torch.device(device)
        if not self.path.is_file():
            raise InputError(f"there is no {self.path}")
        self.session = open_session(self.path, device=device, plain=plain)
        self.facts = self._facts()
        self.made_here = dict(heads or {})
        if self.made_here and "hidden" not in self.facts.heads:
            raise CheckpointError(f"{path} has no hidden states to make {list(self.made_here)} of")
        self._types = {v.name: numpy_type(v.type) for v in self.session.get_inputs()}
        given, made = set(self._types), {value.name for value in self.session.get_outputs()}
        if given != set(self.facts.inputs.values()) or made != self.facts.outputs.keys():
            raise CheckpointError(f"{path}: its packing facts are another model's; pack it again")

    def _facts(self) -> Facts:
        metadata = self.session.get_modelmeta().custom_metadata_map
        if KEY not in metadata:
            raise CheckpointError(
                f"{self.path} is no packed model; make one of it with: packhorse onnx pack "
                f"{self.path} PACKED.onnx --mode mask"
            )
        try:
            return parse(metadata[KEY])
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: {error}") from error

    @property
    def heads(self) -> tuple[str, ...]:
        """All that may be asked for."""
        return (*self.facts.heads, *self.made_here)

    @property
    def capacity(self) -> int:
        """Tokens a row, where batches must be laid in rows; 0: they need not."""
        if self.facts.mode != "mask":
            return 0
        return self.facts.shape[1] if self.facts.shape else self.facts.max_positions

    @property
    def max_length(self) -> int:
        """Tokens of the longest sequence."""
        rows, row = self.facts.shape or (1, self.facts.max_positions)
        return min(self.facts.max_positions, rows * row if self.facts.mode == "repack" else row)

    def width(self, head: str) -> int:
        """Numbers that a head of the model gives a token or a sequence."""
        shapes = {value.name: value.shape for value in self.session.get_outputs()}
        last = shapes[self._outputs(head)[0]][-1]
        return last if isinstance(last, int) else 1

    def __call__(
        self, packed: Packed, heads: Sequence[str], at: Tensor | None = None
    ) -> list[Tensor]:
        """What each head makes of the batch; `at` narrows heads of tokens to these tokens."""
        batch = packed.to("cpu")
        names = dict.fromkeys(name for head in heads for name in self._outputs(head))
        found = self._run(batch, list(names))
        return [self._head(head, found, batch, None if at is None else at.cpu()) for head in heads]

    def _outputs(self, head: str) -> tuple[str, ...]:
        if head in self.made_here or self._raw(head):
            return self.facts.heads["hidden"]
        if head not in self.facts.heads:
            have = ", ".join(self.heads)
            raise CheckpointError(f"{self.path} has no {head!r} head (it has: {have})")
        return self.facts.heads[head]

    def _raw(self, head: str) -> Callable[[Tensor, Packed], Tensor] | None:
        """Vectors before they are normalised, where they are made here."""
        embed = self.made_here.get("embed") if head == "raw" else None
        return embed.raw if isinstance(embed, Embed) else None

    def _head(
        self, head: str, found: Mapping[str, Tensor], packed: Packed, at: Tensor | None
    ) -> Tensor:
        parts = [found[name] for name in self._outputs(head)]
        value = parts[0] if len(parts) == 1 else torch.stack(parts, dim=-1)
        if made := self._raw(head) or self.made_here.get(head):
            with torch.inference_mode():
                return made(value, packed)
        per_token = self.facts.outputs[self._outputs(head)[0]] == "token"
        return value[at] if per_token and at is not None else value

    def _run(self, packed: Packed, names: list[str]) -> dict[str, Tensor]:
        self._check(packed)
        parts: dict[str, list[np.ndarray]] = {name: [] for name in names}
        for piece in LAY[self.facts.mode](_columns(packed, self.facts), self.facts):
            feeds = {
                name: piece.feeds[role].astype(self._types[name], copy=False)
                for role, name in self.facts.inputs.items()
            }
            with blaming(f"{self.path} failed in ONNX Runtime"):
                results = self.session.run(names, feeds)
            for name, result in zip(names, results, strict=True):
                parts[name].append(self._flat(name, np.asarray(result), piece))
        return {name: torch.from_numpy(np.concatenate(part)) for name, part in parts.items()}

    def _flat(self, name: str, result: np.ndarray, piece: Piece) -> np.ndarray:
        if self.facts.outputs[name] == "sequence":
            return result[: piece.sequences]
        rows, capacity = piece.feeds["ids"].shape
        tail = result.shape[2:] if result.shape[:2] == (rows, capacity) else (-1,)
        if result.shape[0] == rows * capacity:
            tail = result.shape[1:]
        return result.reshape(rows * capacity, *tail)[piece.tokens]

    def _check(self, packed: Packed) -> None:
        facts = self.facts
        longest, word = int(packed.positions.max()) + 1, int(packed.ids.max())
        if longest > facts.max_positions:
            raise InputError(f"a sequence has {longest} tokens, the model {facts.max_positions}")
        if word >= facts.vocab_size or int(packed.ids.min()) < 0:
            raise InputError(f"token {word} is none of the model's {facts.vocab_size}")
        if facts.mode != "mask":
            return
        if not packed.capacity:
            raise KernelError("mode mask needs a batch laid in rows; build it with Packed.rows")
        if facts.shape and packed.capacity != facts.shape[1]:
            raise InputError(
                f"the batch has rows of {packed.capacity} tokens, {self.path} of {facts.shape[1]}"
            )


@dataclass(frozen=True)
class Piece:
    """One run: its inputs by role, and where its results are."""

    feeds: Arrays
    tokens: np.ndarray | slice  # of the rows laid end to end, in the batch's order
    sequences: int


@dataclass(frozen=True)
class _Columns:
    """A batch as arrays."""

    tokens: Arrays  # [T] each: ids, types, positions, mask
    bounds: np.ndarray  # [S + 1]
    capacity: int

    def part(self, begin: int, end: int) -> tuple[Arrays, np.ndarray, np.ndarray]:
        """Of the sequences from `begin` to `end`: their tokens, starts and lengths."""
        first, last = self.bounds[begin], self.bounds[end]
        tokens = {role: values[first:last] for role, values in self.tokens.items()}
        starts = self.bounds[begin:end] - first
        return tokens, starts, np.diff(self.bounds[begin : end + 1])


def _columns(packed: Packed, facts: Facts) -> _Columns:
    bounds = packed.cu_seqlens.numpy().astype(np.int64)
    lengths = np.diff(bounds)
    own = np.zeros(len(packed), bool)
    own[list(packed.places)] = True
    numbers = np.where(own, np.arange(1, len(packed) + 1), 0)
    positions = packed.positions
    if facts.padding is not None:
        positions = positions_after_padding(packed, facts.padding + 1) - (facts.padding + 1)
    tokens = {
        "ids": packed.ids.numpy(),
        "types": packed.types.numpy(),
        "positions": positions.numpy(),
        "mask": np.repeat(numbers, lengths),
    }
    return _Columns(tokens, bounds, packed.capacity)


def _by_rows(batch: _Columns, facts: Facts) -> Iterator[Piece]:
    """Mask mode: rows as they are, as many at a time as the model takes."""
    rows = len(batch.tokens["ids"]) // batch.capacity
    step = facts.shape[0] if facts.shape else rows
    # A sequence belongs to the run of its row; empty ones at the end to the last.
    row = np.minimum(batch.bounds[:-1] // batch.capacity, rows - 1)
    for first in range(0, rows, step):
        begin, end = np.searchsorted(row, [first, first + step])
        tokens, starts, lengths = batch.part(begin, end)
        count = len(tokens["ids"])
        feeds = _in_rows(tokens, (step, batch.capacity))
        last = np.minimum(starts, count - 1)
        yield Piece({**feeds, "first": last, "lengths": lengths}, slice(count), len(starts))


def _end_to_end(batch: _Columns, facts: Facts) -> Iterator[Piece]:
    """Repack mode: across rows, as many sequences at a time as the model has room for."""
    rows, capacity = facts.shape or (1, int(batch.bounds[-1]))
    begin, count = 0, len(batch.bounds) - 1
    while begin < count:
        room = batch.bounds[begin] + rows * capacity
        end = int(np.searchsorted(batch.bounds, room, side="right")) - 1
        if end == begin:
            raise InputError(f"a sequence is longer than the model's {rows * capacity} tokens")
        tokens, starts, lengths = batch.part(begin, end)
        feeds = _in_rows(tokens, (rows, capacity))
        yield Piece({**feeds, "lengths": lengths}, slice(len(tokens["ids"])), len(starts))
        begin = end


def _one_a_row(batch: _Columns, facts: Facts) -> Iterator[Piece]:
    """Positions mode: the model knows no neighbours, so that each sequence is padded."""
    lengths = np.diff(batch.bounds)
    rows, capacity = facts.shape or (len(lengths), int(lengths.max()))
    if lengths.max() > capacity:
        raise InputError(f"a sequence has {lengths.max()} tokens, a row {capacity}")
    if "mask" not in facts.inputs and lengths.min() < capacity:
        raise InputError("the model takes no mask: only sequences of one length can share a run")
    for begin in range(0, len(lengths), rows):
        end = min(begin + rows, len(lengths))
        tokens, starts, own = batch.part(begin, end)
        row = np.repeat(np.arange(end - begin), own)
        places = row * capacity + np.arange(len(row)) - np.repeat(starts, own)
        tokens["mask"] = np.ones_like(tokens["ids"])
        yield Piece(_in_rows(tokens, (rows, capacity), places), places, end - begin)


LAY: dict[str, Callable[[_Columns, Facts], Iterator[Piece]]] = {
    "mask": _by_rows,
    "repack": _end_to_end,
    "positions": _one_a_row,
}


def _in_rows(tokens: Arrays, shape: tuple[int, int], places: np.ndarray | None = None) -> Arrays:
    """[R, C] of each column, zeros where there is no token."""
    rows = {}
    for role, values in tokens.items():
        rows[role] = np.zeros(shape, values.dtype)
        rows[role].reshape(-1)[slice(len(values)) if places is None else places] = values
    return rows
