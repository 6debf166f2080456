"""Prepare a model of transformers for flat batches: attention replaced, heads unchanged.

Heads expect one row per sequence: they read its first token, or compare its tokens with its labels.
So the encoder, which takes nearly all the time, runs flat, and its output is laid out in rows
again, as wide as the longest sequence; losses, metrics and predictions are then those of padded
training, in the shapes that a script expects. Only heads over the vocabulary stay flat: they cost
as much as half an encoder, and their loss is a mean over tokens wherever these lie.

This is done by forward hooks and changes neither weights nor classes; an ordinary padded batch
passes through them unchanged. Two things differ from padded training on purpose. The loss of an
answer span considers only its own sequence, where transformers lets padding compete for the answer.
And hidden states are zero in padding.

Shapes: T tokens, S sequences, L the longest, E hidden width.
"""

# torch leaves some of its functions untyped (from_numpy, tolist, split …).
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from packhorse.errors import InputError
from packhorse.hf.attention import register
from packhorse.hf.families import is_family, unknown_family
from packhorse.hf.layout import BOUNDARIES, NAME, SequenceLayout, layout_of_boundaries, was_used

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ModelT = TypeVar("ModelT", bound="PreTrainedModel")


@dataclass(frozen=True, slots=True)
class Head:
    """What a head expects."""

    rows: bool  # one row per sequence, or all tokens flat
    token_labels: bool  # `labels` has one per token, or one per sequence


# By the end of a model's class name.
HEADS = {
    "ForMaskedLM": Head(rows=False, token_labels=True),
    "ForPreTraining": Head(rows=False, token_labels=True),
    "ForTokenClassification": Head(rows=True, token_labels=True),
    "ForSequenceClassification": Head(rows=True, token_labels=False),
    "ForNextSentencePrediction": Head(rows=True, token_labels=False),
    "ForQuestionAnswering": Head(rows=True, token_labels=False),
}
FIRST_TOKEN = ("cls", "bos")  # its names in `classifier_pooling`
NO_HEAD = Head(rows=True, token_labels=False)


def packed(model: ModelT) -> ModelT:
    """Prepare the model for flat batches besides padded ones, and return it; may be repeated."""
    register()
    _check(model)
    head = head_of(model)
    model.set_attn_implementation(NAME)
    # transformers has no public name for it.
    if model.config._attn_implementation != NAME:  # pyright: ignore[reportPrivateUsage]
        raise InputError(unknown_family(model.config.model_type))
    _hook(model.base_model, _in_rows if head.rows else _pooled)
    if _class_ending(model) == "ForQuestionAnswering":
        _hook(model, _own_spans)
    return model


def head_of(model: PreTrainedModel) -> Head:
    """Return what the model's head expects; raise for a head that is not in the table."""
    if model.base_model is model:
        return NO_HEAD
    ending = _class_ending(model)
    if ending is None:
        raise InputError(
            f"{type(model).__name__} has a head that Packhorse does not support; use a class that "
            f"ends in {', '.join(HEADS)}"
        )
    pooling = getattr(model.config, "classifier_pooling", "cls")
    if ending == "ForSequenceClassification" and pooling not in FIRST_TOKEN:
        raise InputError(
            f"classifier_pooling={pooling!r} needs the mask of a padded batch; keep your collator "
            f'and use only attn_implementation="{NAME}"'
        )
    return HEADS[ending]


def _class_ending(model: PreTrainedModel) -> str | None:
    """Return the key of `HEADS` that the model's class, or one of its bases, ends in."""
    names = [kind.__name__ for kind in type(model).__mro__]
    return next((end for name in names for end in HEADS if name.endswith(end)), None)


def _check(model: Any) -> None:
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise InputError(
            f"{type(model).__name__} is not a model of transformers; pass the model itself, before "
            "it is wrapped"
        )
    causal = any(getattr(part, "is_causal", False) for part in model.modules())
    if causal or model.config.is_encoder_decoder:
        name = type(model).__name__
        raise InputError(f"{name} is causal: Packhorse packs encoders, not generative models")
    if not is_family(model.config):
        raise InputError(unknown_family(model.config.model_type))


def _hook(module: nn.Module, hook: Any) -> None:
    # torch has no public list of hooks.
    if hook not in module._forward_hooks.values():  # pyright: ignore[reportPrivateUsage]
        module.register_forward_hook(hook, with_kwargs=True)


def _layout(kwargs: dict[str, Any], output: Any) -> SequenceLayout | None:
    """Return the layout of a flat batch; None if the batch is padded."""
    bounds = kwargs.get(BOUNDARIES)
    if bounds is None:
        return None
    if isinstance(output, tuple):
        raise InputError("a flat batch needs return_dict=True, which is the default")
    if not was_used(bounds):
        raise InputError(
            f"the attention of this model ignored {BOUNDARIES}; "
            f'set its attention implementation to "{NAME}" again'
        )
    return layout_of_boundaries(bounds, output[0].shape[1])


def _in_rows(base: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    """Lay out the output of an encoder, [1, T, E], in rows [S, L, E]."""
    layout = _layout(kwargs, output)
    if layout is None:
        return None
    _pool(base, output, layout)
    output.last_hidden_state = _rows(output.last_hidden_state, layout)
    if output.get("hidden_states") is not None:
        output.hidden_states = tuple(_rows(x, layout) for x in output.hidden_states)
    return output


def _pooled(base: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    """Leave the output of an encoder flat, except for the pooled first tokens."""
    layout = _layout(kwargs, output)
    return None if layout is None else _pool(base, output, layout)


def _pool(base: Any, output: Any, layout: SequenceLayout) -> Any:
    if getattr(base, "pooler", None) is not None:
        firsts = output.last_hidden_state[0, layout.packed.starts]  # [S, E]
        if isinstance(base.pooler, nn.Linear):  # ALBERT's, which takes [S, E]
            output.pooler_output = base.pooler_activation(base.pooler(firsts))
        else:
            output.pooler_output = base.pooler(firsts.unsqueeze(1))
    return output


def _rows(flat: Tensor, layout: SequenceLayout) -> Tensor:
    """[1, T, E] to [S, L, E], zero behind the end of a sequence."""
    sizes = len(layout.lengths), layout.packed.max_seqlen
    rows = flat.new_zeros(sizes[0] * sizes[1], flat.shape[-1])
    return rows.index_copy(0, layout.rows, flat[0]).unflatten(0, sizes)


def _own_spans(model: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    """Let no answer start or end in padding, and compute the loss without it."""
    if kwargs.get(BOUNDARIES) is None:
        return None
    rows, longest = output.start_logits.shape
    lengths = kwargs[BOUNDARIES].diff()  # [S]
    padding = torch.arange(longest, device=lengths.device) >= lengths[:, None]
    for name in ("start_logits", "end_logits"):
        logits = output[name]
        # The smallest finite number, as in transformers' own masks.
        output[name] = logits.masked_fill(padding, torch.finfo(logits.dtype).min)
    if output.loss is not None:
        # A label outside its own sequence is ignored, as transformers does beyond the longest.
        labels = (kwargs[name].view(rows) for name in ("start_positions", "end_positions"))
        targets = (label.where(label < lengths, longest) for label in labels)
        output.loss = model.loss_function(output.start_logits, output.end_logits, *targets)
    return output
