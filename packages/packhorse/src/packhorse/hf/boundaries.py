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
from dataclasses import dataclass
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
        if isinstance(part, PreTrainedModel):
            hook = TellBoundaries(tuple(inspect.signature(part.forward).parameters))
            if hook not in part._forward_pre_hooks.values():
                part.register_forward_pre_hook(hook, with_kwargs=True)


@dataclass(frozen=True, slots=True)
class TellBoundaries:
    """A forward pre-hook: adds boundaries to the arguments, where position ids alone tell them."""

    parameters: tuple[str, ...]  # of the model's `forward`

    def __call__(
        self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments | None:
        """The arguments with their boundaries; None leaves them as they are."""
        ours = model.config._attn_implementation == NAME and is_family(model.config)
        if not ours or kwargs.get(GIVEN) is not None:
            return None
        named = {**dict(zip(self.parameters, args, strict=False)), **kwargs}
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
        self._refuse_unfit(type(model).__name__, named)
        return args, {**kwargs, GIVEN: bounds}

    def _refuse_unfit(self, name: str, named: dict[str, Any]) -> None:
        """Refuse what cannot be one flat row."""
        if "position_ids" not in self.parameters:
            raise InputError(
                f"{name} takes no position_ids and would number this flat batch as one text; "
                "pad it instead, one text a row"
            )
        batch = named.get("input_ids")
        rows = len(named["inputs_embeds"] if batch is None else batch)
        if rows > 1:
            raise InputError(
                f"position_ids restart within the rows of a batch of {rows}; lay all sequences in "
                "one row, as DataCollatorWithFlattening does, or give each a row and an "
                "attention_mask"
            )


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
