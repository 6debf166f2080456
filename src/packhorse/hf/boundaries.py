"""Where the sequences of a flat batch end, read from position ids that restart.

transformers' DataCollatorWithFlattening lays sequences end to end in one row and tells where they
end by `position_ids` alone, unless it is asked for `cu_seq_lens_q`. Neither the mask function of
transformers nor every layer sees position ids, so they are read before the model runs, by a forward
pre-hook on each model whose attention is ours; what they say goes on as `cu_seq_lens_q`.

Nothing is guessed. Ids that count on by one are one sequence a row, whatever they begin with. Ids
that return to the first one begin a sequence there. Any others are refused: a wrong guess would let
tokens of one text see another, and no one would notice.

Shapes: B rows, L columns, S sequences.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor

from packhorse.errors import InputError
from packhorse.hf.families import AFTER_PADDING, is_family
from packhorse.hf.layout import GIVEN, NAME

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def watch(model: Any) -> None:
    """Have the batches of a model of transformers, and of those inside it, looked at."""
    from transformers import PreTrainedModel

    for part in model.modules():
        known = part._forward_pre_hooks.values()
        if isinstance(part, PreTrainedModel) and tell_boundaries not in known:
            part.register_forward_pre_hook(tell_boundaries, with_kwargs=True)


def tell_boundaries(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
    """Add the boundaries to the arguments of a model, where its position ids alone tell them."""
    ours = model.config._attn_implementation == NAME and is_family(model.config)
    if not ours or kwargs.get(GIVEN) is not None:
        return None
    named = _named(model, args, kwargs)
    positions, mask = named.get("position_ids"), named.get("attention_mask")
    if positions is None:
        _refuse_numbered(named.get("seq_idx"))
        return None
    if positions.ndim != 2 or (mask is not None and mask.ndim != 2):
        return None  # several texts a row, or a ready-made mask: for the model inside to say
    if mask is not None and not bool(mask.all()):
        _refuse_restarts_beside(mask.bool(), positions)
        return None
    bounds = of_positions(positions, _padding_id(model.config))
    if bounds is None:
        return None
    if "position_ids" not in _parameters(type(model)):
        raise InputError(
            f"{type(model).__name__} takes no position_ids and would number this flat batch as one "
            "text; pad it instead, one text a row"
        )
    rows = _rows(named)
    if rows > 1:
        raise InputError(
            f"position_ids restart within the rows of a batch of {rows}; lay all sequences in one "
            "row, as DataCollatorWithFlattening does, or give each a row and an attention_mask"
        )
    return args, {**kwargs, GIVEN: bounds}


def of_positions(positions: Tensor, padding_id: int | None = None) -> Tensor | None:
    """The boundaries [S+1] of rows [B, L] laid end to end; None where each row is one sequence.

    padding_id: the position of padding, for models that begin to count after it.
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
    strange = breaks & (positions[:, 1:] != first)
    if bool(strange.any()):
        row, column = strange.nonzero()[0].tolist()
        before, after = positions[row, column : column + 2].tolist()
        raise InputError(
            f"position_ids neither count on nor return to {int(first[row])} at token {column + 1} "
            f"({before}, then {after}), so it cannot be told where sequences end; pass {GIVEN}"
        )
    starts = torch.nn.functional.pad(breaks, (1, 0), value=True).flatten().nonzero().squeeze(1)
    return torch.cat([starts, starts.new_tensor([positions.numel()])]).to(torch.int32)


def _refuse_restarts_beside(mask: Tensor, positions: Tensor) -> None:
    """Refuse padded rows, [B, L], in which several sequences lie."""
    slots = mask.flatten().nonzero().squeeze(1)  # [n] those that hold tokens
    columns = mask.shape[1]
    steps = positions.expand(mask.shape).flatten()[slots].diff()
    apart = slots.diff()
    beside = slots[1:] // columns == slots[:-1] // columns  # in one row
    # Padding within a row may be counted or not.
    if bool((beside & (steps != 1) & (steps != apart)).any()):
        raise InputError(
            "position_ids restart beside an attention_mask with padding, so it cannot be told "
            f"where sequences end; leave attention_mask and padding out, or pass {GIVEN}"
        )


def _refuse_numbered(sequence_ids: Tensor | None) -> None:
    if sequence_ids is not None and bool((sequence_ids != sequence_ids[..., :1]).any()):
        raise InputError(
            "seq_idx tells of several sequences in a row, but nothing tells their positions; let "
            f"the collator return position_ids (and {GIVEN})"
        )


def _padding_id(config: Any) -> int | None:
    return config.pad_token_id if AFTER_PADDING[config.model_type] else None


def _rows(named: dict[str, Any]) -> int:
    batch = next((named[x] for x in ("input_ids", "inputs_embeds") if named.get(x) is not None), ())
    return len(batch)


def _named(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments by name."""
    return {**dict(zip(_parameters(type(model)), args, strict=False)), **kwargs}


@cache
def _parameters(kind: type) -> tuple[str, ...]:
    """Of a class's `forward`, without `self`."""
    return tuple(inspect.signature(kind.forward).parameters)[1:]  # pyright: ignore
