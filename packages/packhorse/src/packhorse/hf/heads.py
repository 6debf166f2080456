"""A model of transformers made ready for flat batches: attention replaced, heads none the wiser.

Heads expect a row a sequence: they read its first token, or its tokens' answers beside its labels.
So the encoder runs flat, which is all that costs, and what leaves it is laid in rows again, as wide
as the longest sequence; losses, metrics and predictions are then those of padded training, in the
shapes that a script expects. Only heads over the vocabulary stay flat: they cost as much as half an
encoder, and their loss is a mean over tokens wherever these lie.

This is done by forward hooks, and touches neither weights nor classes; an ordinary padded batch
passes through them unchanged. Two things differ from padded training on purpose. A span's loss
looks at its own sequence only, where transformers lets padding compete for the answer. And hidden
states are zero in padding.

Shapes: T tokens, S sequences, L the longest, E hidden width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from packhorse.errors import InputError
from packhorse.hf.attention import register
from packhorse.hf.families import is_family, unknown_family
from packhorse.hf.layout import GIVEN, NAME, Layout, of_boundaries, was_used

if TYPE_CHECKING:
    from transformers import PreTrainedModel

AModel = TypeVar("AModel", bound="PreTrainedModel")


@dataclass(frozen=True, slots=True)
class Head:
    """What a head reads."""

    rows: bool  # a row a sequence, or all tokens flat
    token_labels: bool  # `labels` has one for each token, or for each sequence


# By the end of a class's name.
HEADS = {
    "ForMaskedLM": Head(rows=False, token_labels=True),
    "ForPreTraining": Head(rows=False, token_labels=True),
    "ForTokenClassification": Head(rows=True, token_labels=True),
    "ForSequenceClassification": Head(rows=True, token_labels=False),
    "ForNextSentencePrediction": Head(rows=True, token_labels=False),
    "ForQuestionAnswering": Head(rows=True, token_labels=False),
}
FIRST_TOKEN = ("cls", "bos")  # what `classifier_pooling` calls it
NO_HEAD = Head(rows=True, token_labels=False)


def packed(model: AModel) -> AModel:
    """The same model, ready for flat batches as well as padded ones; twice does no harm."""
    register()
    _check(model)
    head = head_of(model)
    model.set_attn_implementation(NAME)
    if model.config._attn_implementation != NAME:
        raise InputError(unknown_family(model.config.model_type))
    _hook(model.base_model, _in_rows if head.rows else _pooled)
    if _name(model) == "ForQuestionAnswering":
        _hook(model, _own_spans)
    return model


def head_of(model: PreTrainedModel) -> Head:
    """What the model's head reads; a head that is not in the table is refused."""
    if model.base_model is model:
        return NO_HEAD
    name = _name(model)
    if name is None:
        raise InputError(
            f"{type(model).__name__} has a head that Packhorse does not know; it knows those of "
            f"classes that end in {', '.join(HEADS)}"
        )
    pooling = getattr(model.config, "classifier_pooling", "cls")
    if name == "ForSequenceClassification" and pooling not in FIRST_TOKEN:
        raise InputError(
            f"classifier_pooling={pooling!r} needs the mask of a padded batch; keep your collator "
            f'and use attn_implementation="{NAME}" alone'
        )
    return HEADS[name]


def _name(model: PreTrainedModel) -> str | None:
    names = [kind.__name__ for kind in type(model).__mro__]
    return next((end for name in names for end in HEADS if name.endswith(end)), None)


def _check(model: Any) -> None:
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise InputError(
            f"a {type(model).__name__} is no model of transformers; pass the model itself, before "
            "anything is wrapped around it"
        )
    causal = any(getattr(part, "is_causal", False) for part in model.modules())
    if causal or model.config.is_encoder_decoder:
        name = type(model).__name__
        raise InputError(f"{name} is causal: Packhorse packs encoders, not models that generate")
    if not is_family(model.config):
        raise InputError(unknown_family(model.config.model_type))


def _hook(module: nn.Module, hook: Any) -> None:
    if hook not in module._forward_hooks.values():
        module.register_forward_hook(hook, with_kwargs=True)


def _layout(kwargs: dict[str, Any], output: Any) -> Layout | None:
    """Of a flat batch; None if it is padded."""
    bounds = kwargs.get(GIVEN)
    if bounds is None:
        return None
    if isinstance(output, tuple):
        raise InputError("a flat batch needs return_dict=True, which is the default")
    if not was_used(bounds):
        raise InputError(
            f'the attention that saw this batch knows nothing of {GIVEN}; set it to "{NAME}" again'
        )
    return of_boundaries(bounds, output[0].shape[1])


def _in_rows(base: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    """Lay what an encoder answers, [1, T, E], in rows [S, L, E]."""
    layout = _layout(kwargs, output)
    if layout is None:
        return None
    _pool(base, output, layout)
    output.last_hidden_state = _rows(output.last_hidden_state, layout)
    if output.get("hidden_states") is not None:
        output.hidden_states = tuple(_rows(x, layout) for x in output.hidden_states)
    return output


def _pooled(base: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    """Leave what an encoder answers flat, but for the pooled first tokens."""
    layout = _layout(kwargs, output)
    return None if layout is None else _pool(base, output, layout)


def _pool(base: Any, output: Any, layout: Layout) -> Any:
    if getattr(base, "pooler", None) is not None:
        firsts = output.last_hidden_state[0, layout.packed.starts]  # [S, E]
        if isinstance(base.pooler, nn.Linear):  # ALBERT's, which takes no rows
            output.pooler_output = base.pooler_activation(base.pooler(firsts))
        else:
            output.pooler_output = base.pooler(firsts.unsqueeze(1))
    return output


def _rows(flat: Tensor, layout: Layout) -> Tensor:
    """[1, T, E] to [S, L, E], zero where a sequence has ended."""
    sizes = len(layout.lengths), layout.packed.max_seqlen
    rows = flat.new_zeros(sizes[0] * sizes[1], flat.shape[-1])
    return rows.index_copy(0, layout.rows, flat[0]).unflatten(0, sizes)


def _own_spans(model: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    """Let no answer begin or end in padding, and take the loss from what is left."""
    if kwargs.get(GIVEN) is None:
        return None
    rows, longest = output.start_logits.shape
    lengths = kwargs[GIVEN].diff()  # [S]
    padding = torch.arange(longest, device=lengths.device) >= lengths[:, None]
    for name in ("start_logits", "end_logits"):
        logits = output[name]
        output[name] = logits.masked_fill(padding, torch.finfo(logits.dtype).min)
    if output.loss is not None:
        # A label outside its own sequence is ignored, as transformers does beyond the longest.
        labels = (kwargs[name].view(rows) for name in ("start_positions", "end_positions"))
        within = (label.where(label < lengths, longest) for label in labels)
        output.loss = model.loss_function(output.start_logits, output.end_logits, *within)
    return output
