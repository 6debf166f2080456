"""`attn_implementation="packhorse"`: our kernels behind transformers' AttentionInterface.

transformers calls one function per layer of a model and one for its mask. Ours take a flat batch
with boundaries (`cu_seq_lens_q` in its padding-free contract; where the batch has none, they are
read from position ids that restart, see `layout`), where nothing is padded anywhere, and an
ordinary padded one, where attention alone skips the padding: its slots are zero in the output. Rows
without a mask are one sequence each. The kernel is the fastest that supports the device, dtype and
pass, as everywhere.

Anything but bidirectional self-attention within a sequence raises and is never computed as if it
were that: causal models, cross attention, biases, ready-made masks. Windows (ModernBERT's local
layers) run on the kernels that support them. The encoders of transformers use the interface since
5.0; older versions raise.

Shapes: B rows, L columns, H heads, D head width, T tokens.
"""

# torch leaves some of its functions untyped (from_numpy, tolist, split …).
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from packhorse.attention import KernelChoice, pick
from packhorse.attention.scope import AttentionScope
from packhorse.errors import InputError, MissingExtra
from packhorse.hf.families import is_family, unknown_family
from packhorse.hf.layout import (
    BOUNDARIES,
    NAME,
    POSITIONS_READ,
    SequenceLayout,
    add_boundary_hooks,
    layout_of_boundaries,
    layout_of_mask,
    store_layout,
    stored_layout,
)

OLDEST = 5  # the major version of transformers
INSTEAD = 'use attn_implementation="sdpa" for it'
# Arguments of a layer that change its scores and that none of our kernels supports.
UNSUPPORTED = ("head_mask", "position_bias", "softcap", "s_aux", "cache")


def register() -> None:
    """Make `attn_implementation="packhorse"` known to transformers; may be called again."""
    try:
        import transformers
    except ModuleNotFoundError as error:  # another ImportError names what transformers lacks
        raise MissingExtra("transformers", "hf") from error
    if int(transformers.__version__.split(".")[0]) < OLDEST:
        raise InputError(
            f"transformers {transformers.__version__} does not let the attention of encoders be "
            f"replaced; install transformers>={OLDEST}"
        )
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    # Plans contain lengths: inside a compiled graph, every batch would be compiled again.
    AttentionInterface.register(NAME, torch.compiler.disable(attend))
    AttentionMaskInterface.register(NAME, torch.compiler.disable(mask_with_layout))
    _watch_models()


def _watch_models() -> None:
    """Add the hook that reads position ids to each model as soon as it gets our attention.

    Neither interface of transformers passes the model. The methods that are wrapped here have it:
    the first runs when a model is created, the second when it is told its attention later, also
    where its config names it already.
    """
    from transformers import PreTrainedModel

    choose, change = (
        PreTrainedModel.get_correct_attn_implementation,
        PreTrainedModel.set_attn_implementation,
    )
    if NAME in vars(choose):
        return

    @wraps(choose)
    def choose_and_watch(self: Any, *args: Any, **kwargs: Any) -> str:
        attention = choose(self, *args, **kwargs)
        if attention == NAME:
            add_boundary_hooks(self)
        return attention

    @wraps(change)
    def change_and_watch(self: Any, *args: Any, **kwargs: Any) -> None:
        change(self, *args, **kwargs)
        if self.config._attn_implementation == NAME:
            add_boundary_hooks(self)

    vars(choose_and_watch)[NAME] = True  # a mark for the next call of `register`
    PreTrainedModel.get_correct_attn_implementation = choose_and_watch
    PreTrainedModel.set_attn_implementation = change_and_watch


def mask_with_layout(
    mask_function: Callable[..., Any],
    config: Any,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    **_: Any,
) -> Tensor | None:
    """Return what layers get as their mask: which slots hold tokens, with the layout stored on it.

    None where no slot is padding. It does not depend on a window: layers pass theirs themselves.
    """
    zero = torch.tensor(0)
    one_later = torch.tensor(1)
    # May query 0 see key 1, in batch 0 and head 0? If not, the mask is causal.
    if not mask_function(zero, zero, zero, one_later):
        raise InputError(f"{config.model_type} is causal, Packhorse runs encoders; {INSTEAD}")
    if not is_family(config):
        raise InputError(unknown_family(config.model_type))
    # transformers sets `use_vmap` for a model that adds mask functions of its own.
    if use_vmap or getattr(config, "add_cross_attention", False):
        raise InputError(
            f"cross attention and masks other than padding are not supported; {INSTEAD}"
        )
    if attention_mask is None:
        return None
    if attention_mask.ndim != 2:
        raise InputError(_ready_made(attention_mask))
    if bool(attention_mask.all()):
        return None
    return store_layout(layout_of_mask(attention_mask), attention_mask)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend within each sequence: query, key and value [B, H, L, D] to [B, L, H, D]."""
    _refuse(module, query, key, value, options)
    if cu_seq_lens_q is None and POSITIONS_READ not in options:
        raise InputError(
            f"{type(module).__name__} cannot tell whether a row of this batch is several texts: "
            f"its model got this attention by its config alone. Call "
            f'model.set_attn_implementation("{NAME}"), or pass {BOUNDARIES}'
        )
    layout = _layout(query, attention_mask, cu_seq_lens_q, cu_seq_lens_k)
    # transformers counts the token itself, as FlashAttention's windows do.
    window = None if sliding_window is None else sliding_window - 1
    if layout is None:  # all rows are equally long: nothing to pack
        allowed = AttentionScope(window).visible(query.shape[2], query.device)
        padded = scaled_dot_product_attention(query, key, value, allowed, dropout, scale=scaling)
        return padded.transpose(1, 2), None
    query, key, value = (_flatten(x, layout) for x in (query, key, value))  # [T, H, D]
    # Our kernels scale by 1 / sqrt(D): bring in any other factor beforehand.
    default_scaling = query.shape[-1] ** -0.5
    if scaling is not None and scaling != default_scaling:
        query = query * (scaling / default_scaling)
    out = _run_kernel(torch.stack([query, key, value], 1), layout, dropout, window)
    return _unflatten(out, layout, attention_mask), None


def _layout(
    query: Tensor, mask: Tensor | None, bounds: Tensor | None, key_bounds: Tensor | None
) -> SequenceLayout | None:
    rows, _, columns, _ = query.shape
    if bounds is None:
        return None if mask is None else stored_layout(_checked(mask, rows, columns))
    if mask is not None or rows != 1:
        raise InputError("a flat batch is one row without a mask; leave attention_mask out")
    layout = layout_of_boundaries(bounds, columns)
    if key_bounds is None or key_bounds is bounds or layout.cache.get("keys") is key_bounds:
        return layout
    if not torch.equal(key_bounds, bounds):
        raise InputError(f"cu_seq_lens_q and cu_seq_lens_k differ: cross attention; {INSTEAD}")
    layout.cache["keys"] = key_bounds  # compared once per batch, because it waits for the device
    return layout


def _checked(mask: Tensor, rows: int, columns: int) -> Tensor:
    if mask.dtype != torch.bool or mask.shape != (rows, columns):
        raise InputError(_ready_made(mask))
    return mask


def _ready_made(mask: Tensor) -> str:
    return f"a ready-made mask of shape {list(mask.shape)} is not supported; {INSTEAD}"


def _refuse(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: Any) -> None:
    causal = options.get("is_causal")
    if getattr(module, "is_causal", False) if causal is None else causal:
        raise InputError(f"{type(module).__name__} is causal, Packhorse runs encoders; {INSTEAD}")
    if not query.shape == key.shape == value.shape:
        raise InputError(
            f"{type(module).__name__} has keys of another shape than its queries (cross attention, "
            f"a cache, shared heads), which is not supported; {INSTEAD}"
        )
    unsupported = [name for name in UNSUPPORTED if options.get(name) is not None]
    if unsupported:
        raise InputError(
            f"{type(module).__name__} has a {unsupported[0]}, which is not supported; {INSTEAD}"
        )
    if options.get("output_attentions"):
        raise InputError(
            'attention probabilities are not computed; use attn_implementation="eager" for them'
        )


def _flatten(x: Tensor, layout: SequenceLayout) -> Tensor:
    """[B, H, L, D] to [T, H, D]."""
    x = x.transpose(1, 2).flatten(0, 1)
    return x if layout.tokens is None else x[layout.tokens]


def _unflatten(out: Tensor, layout: SequenceLayout, mask: Tensor | None) -> Tensor:
    """[T, H, D] to [B, L, H, D]; padding is zero."""
    if layout.tokens is None or mask is None:
        return out.unsqueeze(0)
    padded = out.new_zeros(mask.numel(), *out.shape[1:])
    return padded.index_copy(0, layout.tokens, out).unflatten(0, mask.shape)


def _run_kernel(qkv: Tensor, layout: SequenceLayout, dropout: float, window: int | None) -> Tensor:
    if window is not None and not layout.contiguous:
        raise InputError(f"a window and a mask with holes cannot be combined; {INSTEAD}")
    if window is not None and window >= layout.packed.max_seqlen - 1:
        window = None  # it hides nothing, and without one every kernel will do
    backward = torch.is_grad_enabled() and qkv.requires_grad
    choice = _choice(
        qkv.device,
        qkv.dtype,
        backward=backward,
        head_size=qkv.shape[-1],
        dropout=dropout > 0,
        windows=window is not None,
    )
    key = choice.name, dropout, window
    if key not in layout.cache:
        layout.cache[key] = choice.kernel.plan(layout.packed, dropout, AttentionScope(window))
    return choice.kernel(qkv, layout.cache[key])


@cache
def _choice(
    device: torch.device,
    dtype: torch.dtype,
    backward: bool,
    head_size: int,
    dropout: bool,
    windows: bool,
) -> KernelChoice:
    return pick(
        device, dtype, backward=backward, head_size=head_size, dropout=dropout, windows=windows
    )
