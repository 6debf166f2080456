"""Run a packed model on ONNX Runtime, as a backend of the Encoder: `backend(packed, heads)`.

The batch is laid into the rows that the model expects, by the facts in its metadata (`facts`), and
the results are flattened again: [T, …] per token, [S, …] per sequence. If the rows are fixed, a
batch may take several runs. Mask mode needs a batch that is laid in rows; the other modes take any.

Shapes: T tokens, S sequences, R rows, C tokens per row.
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
from packhorse.onnxpack.engine import open_session, runtime_errors
from packhorse.onnxpack.facts import KEY, PackedModelFacts, parse
from packhorse.onnxpack.probe import numpy_type
from packhorse.packing.batch import Packed

Arrays = dict[str, np.ndarray]


class OnnxBackend:
    """An open packed model."""

    def __init__(
        self,
        path: str | Path,
        *,
        device: torch.device | str = "cpu",
        heads: Mapping[str, nn.Module] | None = None,
        plain: bool = False,
    ) -> None:
        """Open a packed model.

        heads: modules that run here on the hidden states, besides the model's own heads. plain: run
        the graph as it is written, with nothing fused.
        """
        self.path = Path(path)
        self.device = torch.device(device)
        if not self.path.is_file():
            raise InputError(f"there is no {self.path}")
        self.session = open_session(self.path, device=device, plain=plain)
        self.facts = self._facts()
        self.torch_heads = dict(heads or {})
        if self.torch_heads and "hidden" not in self.facts.heads:
            raise CheckpointError(
                f"{path} has no hidden states to make {list(self.torch_heads)} of"
            )
        self._types = {value.name: numpy_type(value.type) for value in self.session.get_inputs()}
        inputs = set(self._types)
        outputs = {value.name for value in self.session.get_outputs()}
        if inputs != set(self.facts.inputs.values()) or outputs != self.facts.outputs.keys():
            raise CheckpointError(f"{path}: its packing facts are another model's; pack it again")

    def _facts(self) -> PackedModelFacts:
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
        """The names of all heads."""
        return (*self.facts.heads, *self.torch_heads)

    @property
    def capacity(self) -> int:
        """Tokens per row, if batches must be laid in rows; 0 if they need not."""
        if self.facts.mode != "mask":
            return 0
        return self.facts.shape[1] if self.facts.shape else self.facts.max_positions

    @property
    def max_length(self) -> int:
        """The largest number of tokens in a sequence."""
        rows, capacity = self.facts.shape or (1, self.facts.max_positions)
        room = rows * capacity if self.facts.mode == "repack" else capacity
        return min(self.facts.max_positions, room)

    def width(self, head: str) -> int:
        """The width of a head's results per token or sequence."""
        shapes = {value.name: value.shape for value in self.session.get_outputs()}
        last = shapes[self._outputs(head)[0]][-1]
        return last if isinstance(last, int) else 1

    def __call__(
        self, packed: Packed, heads: Sequence[str], at: Tensor | None = None
    ) -> list[Tensor]:
        """Run the heads on a batch; `at` selects tokens, for heads that answer per token."""
        batch = packed.to("cpu")
        names = dict.fromkeys(name for head in heads for name in self._outputs(head))
        outputs = self._run(batch, list(names))
        at = None if at is None else at.cpu()
        return [self._head(head, outputs, batch, at) for head in heads]

    def _outputs(self, head: str) -> tuple[str, ...]:
        if head in self.torch_heads or self._raw(head):
            return self.facts.heads["hidden"]
        if head not in self.facts.heads:
            names = ", ".join(self.heads)
            raise CheckpointError(f"{self.path} has no {head!r} head (it has: {names})")
        return self.facts.heads[head]

    def _raw(self, head: str) -> Callable[[Tensor, Packed], Tensor] | None:
        """The function for vectors before normalization, if they are computed here."""
        embed = self.torch_heads.get("embed") if head == "raw" else None
        return embed.raw if isinstance(embed, Embed) else None

    def _head(
        self, head: str, outputs: Mapping[str, Tensor], packed: Packed, at: Tensor | None
    ) -> Tensor:
        parts = [outputs[name] for name in self._outputs(head)]
        value = parts[0] if len(parts) == 1 else torch.stack(parts, dim=-1)
        if torch_head := self._raw(head) or self.torch_heads.get(head):
            with torch.inference_mode():
                return torch_head(value, packed)
        per_token = self.facts.outputs[self._outputs(head)[0]] == "token"
        return value[at] if per_token and at is not None else value

    def _run(self, packed: Packed, names: list[str]) -> dict[str, Tensor]:
        self._check(packed)
        parts: dict[str, list[np.ndarray]] = {name: [] for name in names}
        for run in LAYOUTS[self.facts.mode](_columns(packed, self.facts), self.facts):
            feeds = {
                name: run.feeds[role].astype(self._types[name], copy=False)
                for role, name in self.facts.inputs.items()
            }
            with runtime_errors(f"{self.path} failed in ONNX Runtime"):
                results = self.session.run(names, feeds)
            for name, result in zip(names, results, strict=True):
                parts[name].append(self._flat(name, np.asarray(result), run))
        return {name: torch.from_numpy(np.concatenate(part)) for name, part in parts.items()}

    def _flat(self, name: str, result: np.ndarray, run: SessionRun) -> np.ndarray:
        """A result without padding: [T, …] or [S, …]. A model may merge its first two axes."""
        if self.facts.outputs[name] == "sequence":
            return result[: run.sequences]
        rows, capacity = run.feeds["ids"].shape
        tail = result.shape[2:] if result.shape[:2] == (rows, capacity) else (-1,)
        if result.shape[0] == rows * capacity:
            tail = result.shape[1:]
        return result.reshape(rows * capacity, *tail)[run.tokens]

    def _check(self, packed: Packed) -> None:
        facts = self.facts
        longest = int(packed.positions.max()) + 1
        word = int(packed.ids.max())
        if longest > facts.max_positions:
            raise InputError(f"a sequence has {longest} tokens, the model {facts.max_positions}")
        if word >= facts.vocab_size or int(packed.ids.min()) < 0:
            raise InputError(
                f"token {word} is outside the model's vocabulary of {facts.vocab_size}"
            )
        if facts.mode != "mask":
            return
        if not packed.capacity:
            raise KernelError("mode mask needs a batch laid in rows; build it with Packed.rows")
        if facts.shape and packed.capacity != facts.shape[1]:
            raise InputError(
                f"the batch has rows of {packed.capacity} tokens, {self.path} of {facts.shape[1]}"
            )


@dataclass(frozen=True)
class SessionRun:
    """One run of the session: its inputs by role, and where to find its results."""

    feeds: Arrays
    tokens: np.ndarray | slice  # indices into the flattened rows, in the batch's order
    sequences: int


@dataclass(frozen=True)
class _Columns:
    """A batch as numpy arrays."""

    tokens: Arrays  # [T] each: ids, types, positions, mask
    bounds: np.ndarray  # [S + 1]
    capacity: int

    def part(self, begin: int, end: int) -> tuple[Arrays, np.ndarray, np.ndarray]:
        """The tokens, starts and lengths of the sequences from `begin` to `end`."""
        first = self.bounds[begin]
        last = self.bounds[end]
        tokens = {role: values[first:last] for role, values in self.tokens.items()}
        starts = self.bounds[begin:end] - first
        return tokens, starts, np.diff(self.bounds[begin : end + 1])


def _columns(packed: Packed, facts: PackedModelFacts) -> _Columns:
    bounds = packed.cu_seqlens.numpy().astype(np.int64)
    lengths = np.diff(bounds)
    real = np.zeros(len(packed), bool)  # others are dummy sequences, which count as padding
    real[list(packed.places)] = True
    numbers = np.where(real, np.arange(1, len(packed) + 1), 0)
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


def _by_rows(batch: _Columns, facts: PackedModelFacts) -> Iterator[SessionRun]:
    """Mask mode: the batch's rows, as many per run as the model takes."""
    rows = len(batch.tokens["ids"]) // batch.capacity
    step = facts.shape[0] if facts.shape else rows
    # A sequence belongs to the run of its row; empty sequences at the end to the last run.
    row = np.minimum(batch.bounds[:-1] // batch.capacity, rows - 1)
    for first in range(0, rows, step):
        begin, end = np.searchsorted(row, [first, first + step])
        tokens, starts, lengths = batch.part(begin, end)
        count = len(tokens["ids"])
        feeds = _in_rows(tokens, (step, batch.capacity))
        last = np.minimum(starts, count - 1)
        yield SessionRun({**feeds, "first": last, "lengths": lengths}, slice(count), len(starts))


def _end_to_end(batch: _Columns, facts: PackedModelFacts) -> Iterator[SessionRun]:
    """Repack mode: sequences end to end across rows, as many per run as the model has room for."""
    rows, capacity = facts.shape or (1, int(batch.bounds[-1]))
    begin = 0
    count = len(batch.bounds) - 1
    while begin < count:
        room = batch.bounds[begin] + rows * capacity
        end = int(np.searchsorted(batch.bounds, room, side="right")) - 1
        if end == begin:
            raise InputError(f"a sequence is longer than the model's {rows * capacity} tokens")
        tokens, starts, lengths = batch.part(begin, end)
        feeds = _in_rows(tokens, (rows, capacity))
        yield SessionRun({**feeds, "lengths": lengths}, slice(len(tokens["ids"])), len(starts))
        begin = end


def _one_per_row(batch: _Columns, facts: PackedModelFacts) -> Iterator[SessionRun]:
    """Positions mode: one sequence per row, padded, since the model cannot separate neighbors."""
    lengths = np.diff(batch.bounds)
    rows, capacity = facts.shape or (len(lengths), int(lengths.max()))
    if lengths.max() > capacity:
        raise InputError(f"a sequence has {lengths.max()} tokens, a row {capacity}")
    if "mask" not in facts.inputs and lengths.min() < capacity:
        raise InputError("the model takes no mask: only sequences of one length can share a run")
    for begin in range(0, len(lengths), rows):
        end = min(begin + rows, len(lengths))
        tokens, starts, counts = batch.part(begin, end)
        row = np.repeat(np.arange(end - begin), counts)
        places = row * capacity + np.arange(len(row)) - np.repeat(starts, counts)
        tokens["mask"] = np.ones_like(tokens["ids"])
        yield SessionRun(_in_rows(tokens, (rows, capacity), places), places, end - begin)


LAYOUTS: dict[str, Callable[[_Columns, PackedModelFacts], Iterator[SessionRun]]] = {
    "mask": _by_rows,
    "repack": _end_to_end,
    "positions": _one_per_row,
}


def _in_rows(tokens: Arrays, shape: tuple[int, int], places: np.ndarray | None = None) -> Arrays:
    """Each column as [R, C], with zeros where there is no token."""
    rows = {}
    for role, values in tokens.items():
        rows[role] = np.zeros(shape, values.dtype)
        rows[role].reshape(-1)[slice(len(values)) if places is None else places] = values
    return rows
