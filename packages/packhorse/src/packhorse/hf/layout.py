"""The layout of a transformers batch: where its sequences lie, computed once for all layers.

A model of transformers gives its attention either boundaries (`cu_seq_lens_q`, the contract of its
padding-free batches) or a mask of the padded rows. Both become a `SequenceLayout`. It is stored on
the very tensor it was computed from, because that tensor alone reaches every layer of a batch and
is freed with it; a boundary tensor that was written to since is read again. Reading costs one wait
for the device per batch: boundaries that do not fit the tokens would otherwise silently give wrong
numbers.

Some batches have neither. transformers' DataCollatorWithFlattening lays sequences end to end in one
row and marks where they end by `position_ids` alone, unless it is asked for `cu_seq_lens_q`.
Neither the mask function of transformers nor every layer sees position ids, so a forward pre-hook
on each model with our attention reads them before the model runs, and passes boundaries on. It also
tells the layers that it ran: a model that got our attention behind our back (by its config alone)
has no hook, and its layers refuse a batch without boundaries.

Nothing is guessed. Position ids that count up by one are one sequence per row, whatever they start
with. Ids that return to the first one start a sequence there. All others raise: a wrong guess would
let tokens of one text see another, and nobody would notice.

Shapes: T tokens, S sequences, B rows, L columns of a padded batch.
"""

# torch leaves some of its functions untyped (from_numpy, tolist, split …).
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from packhorse.errors import InputError
from packhorse.hf.families import AFTER_PADDING, is_family
from packhorse.packing.batch import Packed

NAME = "packhorse"  # of our attention in transformers
BOUNDARIES = "cu_seq_lens_q"  # transformers' name for the boundaries
POSITIONS_READ = "packhorse_positions_read"  # the argument by which the hook tells that it ran
LAYOUT_ATTRIBUTE = "_packhorse_layout"  # of the tensor that a layout is stored on

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class SequenceLayout:
    """The sequences of one batch, and what was computed for them so far."""

    packed: Packed
    lengths: list[int]  # [S]
    tokens: Tensor | None = None  # [T] the slots of the padded batch that hold tokens; None: flat
    # A kernel's plan by (kernel, dropout, window); "contiguous" and "rows", the properties below;
    # "keys", the boundaries of the keys once they were found equal to those of the queries.
    cache: dict[Any, Any] = field(default_factory=dict)

    @property
    def contiguous(self) -> bool:
        """Whether the tokens of each sequence are next to each other."""
        if self.tokens is None:
            return True
        if "contiguous" not in self.cache:
            nonempty = self.packed.lengths > 0
            first = self.packed.starts[nonempty]
            last = self.packed.cu_seqlens[1:][nonempty] - 1
            distance = self.tokens[last] - self.tokens[first]
            self.cache["contiguous"] = bool((distance == last - first).all())
        return self.cache["contiguous"]

    @property
    def rows(self) -> Tensor:
        """[T] the slot of each token in S rows as wide as the longest sequence."""
        if "rows" not in self.cache:
            width = self.packed.max_seqlen
            starts = self.packed.starts
            shift = torch.arange(len(self.lengths), device=starts.device) * width - starts
            tokens = self.packed.positions
            self.cache["rows"] = tokens + shift.repeat_interleave(
                self.packed.lengths, output_size=len(tokens)
            )
        return self.cache["rows"]


def layout_of_boundaries(bounds: Tensor, tokens: int) -> SequenceLayout:
    """Return the layout of a flat batch of `tokens` tokens."""
    # Tensors created in inference mode do not count their changes, so a stored layout could be
    # stale: it is read anew for every layer.
    version = None if bounds.is_inference() else bounds._version
    stored_version, layout = getattr(bounds, LAYOUT_ATTRIBUTE, (None, None))
    if layout is None or stored_version is None or stored_version != version:
        layout = _read(bounds)
        setattr(bounds, LAYOUT_ATTRIBUTE, (version, layout))
    total = sum(layout.lengths)
    if total != tokens:
        raise InputError(
            f"{BOUNDARIES} is for {total} tokens, but the batch has {tokens}; pass that of the "
            "whole batch (torch's DataParallel cuts it: start one process per device instead)"
        )
    return layout


def was_used(bounds: Tensor) -> bool:
    """Return whether a layer has computed attention within these boundaries."""
    return hasattr(bounds, LAYOUT_ATTRIBUTE)


def layout_of_mask(mask: Tensor) -> SequenceLayout:
    """Return the layout of padded rows, [B, L], where `mask` is true for tokens."""
    lengths = mask.sum(1)
    tokens = mask.flatten().nonzero().squeeze(1)
    bounds = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(torch.int32)
    return _layout(bounds, lengths.tolist(), tokens)


def store_layout(layout: SequenceLayout, mask: Tensor) -> Tensor:
    """Return a view of the mask with its layout stored on it.

    A view, so that the layout is not on a tensor that the caller holds, and may change.
    """
    mask = mask.view_as(mask)
    setattr(mask, LAYOUT_ATTRIBUTE, (None, layout))
    return mask


def stored_layout(mask: Tensor) -> SequenceLayout:
    """Return the layout of a mask; read anew where a copy to another device has lost it."""
    entry = getattr(mask, LAYOUT_ATTRIBUTE, None)
    return layout_of_mask(mask) if entry is None else entry[1]


def _read(bounds: Tensor) -> SequenceLayout:
    if bounds.ndim != 1 or bounds.is_floating_point():
        raise InputError(
            f"{BOUNDARIES} must be a flat tensor of integers, not of shape {list(bounds.shape)} "
            f"and {bounds.dtype}"
        )
    ends: list[int] = bounds.tolist()
    lengths = [end - start for start, end in pairwise(ends)]
    if not lengths or ends[0] or min(lengths) < 0:
        raise InputError(f"{BOUNDARIES} must begin at 0, never fall and have at least two numbers")
    return _layout(bounds.to(torch.int32), lengths)


def _layout(bounds: Tensor, lengths: list[int], tokens: Tensor | None = None) -> SequenceLayout:
    # Kernels look at the boundaries only; ids, types and positions may be any tensor [T].
    indices = torch.arange(sum(lengths), device=bounds.device)
    places = tuple(range(len(lengths)))
    packed = Packed(indices, indices, indices, bounds, max(lengths, default=0), places)
    return SequenceLayout(packed, lengths, tokens)


def add_boundary_hooks(model: Any) -> None:
    """Add the pre-hook to a model of transformers and to all models inside it."""
    from transformers import PreTrainedModel

    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            parameters = inspect.signature(part.forward).parameters
            open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
            hook = AddBoundaries(tuple(parameters), open_ended)
            # Equal hooks compare equal, being dataclasses: a second call adds none.
            # torch has no public list of hooks.
            if hook not in part._forward_pre_hooks.values():  # pyright: ignore[reportPrivateUsage]
                part.register_forward_pre_hook(hook, with_kwargs=True)


@dataclass(frozen=True, slots=True)
class AddBoundaries:
    """A forward pre-hook that adds boundaries to the arguments, read from position ids."""

    parameters: tuple[str, ...]  # of the model's `forward`
    open_ended: bool  # whether it takes other arguments too, which it passes to its layers

    def __call__(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Return the arguments with boundaries, where the batch has them."""
        if model.config._attn_implementation != NAME or not is_family(model.config):
            return args, kwargs
        bounds = kwargs.get(BOUNDARIES)
        if bounds is None:
            bounds = self._boundaries(model, args, kwargs)
        added: dict[str, Any] = {} if bounds is None else {BOUNDARIES: bounds}
        if self.open_ended:
            added[POSITIONS_READ] = True
        return args, {**kwargs, **added}

    def _boundaries(
        self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor | None:
        """Read the boundaries of a flat batch; None for any other."""
        named = {**dict(zip(self.parameters, args, strict=False)), **kwargs}
        positions = named.get("position_ids")
        mask = named.get("attention_mask")
        if positions is None:
            _refuse_sequence_ids(named.get("seq_idx"))
            return None
        if positions.ndim != 2 or (mask is not None and mask.ndim != 2):
            return None  # several texts per row, or a ready-made mask: the inner model decides
        if mask is not None and not bool(mask.all()):
            _refuse_restarts(mask.bool(), positions)
            return None
        bounds = boundaries_of_positions(positions, _padding_id(model.config))
        if bounds is not None:
            self._refuse_unfit(type(model).__name__, named)
        return bounds

    def _refuse_unfit(self, name: str, named: dict[str, Any]) -> None:
        """Raise for arguments that cannot be one flat row."""
        if "position_ids" not in self.parameters:
            raise InputError(
                f"{name} takes no position_ids and would number this flat batch as one text; "
                "pad it instead, one text per row"
            )
        batch = named.get("input_ids")
        rows = len(named["inputs_embeds"] if batch is None else batch)
        if rows > 1:
            raise InputError(
                f"position_ids restart within the rows of a batch of {rows}; lay all sequences in "
                "one row, as DataCollatorWithFlattening does, or give each a row and an "
                "attention_mask"
            )


def boundaries_of_positions(positions: Tensor, padding_id: int | None = None) -> Tensor | None:
    """Return the boundaries [S+1] of rows [B, L] laid end to end; None if a row is one sequence.

    padding_id: the position of padding, for models that start to count after it.
    """
    breaks = positions.diff(dim=1) != 1  # [B, L-1]
    if not bool(breaks.any()):
        return None
    first = positions[:, :1]
    if padding_id is not None and bool((first == padding_id).any()):
        raise InputError(
            f"position_ids begin with {padding_id}, which this model keeps for padding: pass an "
            f"attention_mask, or begin with {padding_id + 1} "
            f"(DataCollatorWithFlattening: position_ids_start={padding_id + 1})"
        )
    unclear = breaks & (positions[:, 1:] != first)
    if bool(unclear.any()):
        row, column = unclear.nonzero()[0].tolist()
        before, after = positions[row, column : column + 2].tolist()
        raise InputError(
            f"position_ids neither count up nor return to {int(first[row])} at token {column + 1} "
            f"({before}, then {after}), so it is unclear where sequences end; pass {BOUNDARIES}"
        )
    starts = torch.nn.functional.pad(breaks, (1, 0), value=True).flatten().nonzero().squeeze(1)
    return torch.cat([starts, starts.new_tensor([positions.numel()])]).to(torch.int32)


def _refuse_restarts(mask: Tensor, positions: Tensor) -> None:
    """Raise for padded rows, [B, L], that hold several sequences."""
    slots = mask.flatten().nonzero().squeeze(1)  # [n] those that hold tokens
    columns = mask.shape[1]
    steps = positions.expand(mask.shape).flatten()[slots].diff()
    distance = slots.diff()
    in_one_row = slots[1:] // columns == slots[:-1] // columns
    # Padding within a row may be counted or not: a step of 1, or as far as the slots are apart.
    if bool((in_one_row & (steps != 1) & (steps != distance)).any()):
        raise InputError(
            "position_ids restart although an attention_mask marks padding, so it is unclear where "
            f"sequences end; leave attention_mask and padding out, or pass {BOUNDARIES}"
        )


def _refuse_sequence_ids(sequence_ids: Tensor | None) -> None:
    if sequence_ids is not None and bool((sequence_ids != sequence_ids[..., :1]).any()):
        raise InputError(
            "seq_idx marks several sequences in a row, but there are no position_ids; let the "
            f"collator return position_ids (and {BOUNDARIES})"
        )


def _padding_id(config: Any) -> int | None:
    return config.pad_token_id if AFTER_PADDING[config.model_type] else None
