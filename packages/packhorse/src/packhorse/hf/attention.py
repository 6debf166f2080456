"""`attn_implementation="packhorse"`: our kernels behind transformers' AttentionInterface.

transformers calls one function for each layer of a model and one for its mask. Ours take a flat
batch with boundaries (`cu_seq_lens_q`, as its padding-free contract names them; where the batch has
none, from position ids that restart, see `boundaries`), where nothing is padded anywhere, and an
ordinary padded one, where attention alone skips the padding: its slots come out as zeros. Rows
without a mask are a sequence each. The kernel is the fastest that serves the device, dtype and
pass, as everywhere.

Attention that is not of one sequence with itself in both directions is refused, never computed as
if it were: causal models, cross attention, biases, ready-made masks. Windows (ModernBERT's local
layers) are served by the kernels that know them. transformers brought its encoders under the
interface in 5.0; older ones are refused.

Shapes: B rows, L columns, H heads, D head width, T tokens.
"""

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
from packhorse.hf.boundaries import watch
from packhorse.hf.families import is_family, unknown_family
from packhorse.hf.layout import NAME, Layout, keep, kept, of_boundaries, of_rows

OLDEST = 5
INSTEAD = 'use attn_implementation="sdpa" for it'
# What a layer may pass that changes its scores, and that no kernel of ours knows.
FOREIGN = ("head_mask", "position_bias", "softcap", "s_aux", "cache")


def register() -> None:
    """Make `attn_implementation="packhorse"` known to transformers; twice does no harm."""
    try:
        import transformers
    except ModuleNotFoundError as error:  # another ImportError speaks of its own dependencies
        raise MissingExtra("transformers", "hf") from error
    if int(transformers.__version__.split(".")[0]) < OLDEST:
        raise InputError(
            f"transformers {transformers.__version__} has encoders whose attention cannot be "
            f"replaced; install transformers>={OLDEST}"
        )
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    # Plans hold lengths: compiled in, each batch would be compiled anew.
    AttentionInterface.register(NAME, torch.compiler.disable(attend))
    AttentionMaskInterface.register(NAME, torch.compiler.disable(boundaries_of))
    _watch_models()


def _watch_models() -> None:
    """Have each model looked after from the moment on that it is given our attention.

    Neither interface of transformers hands over the model; this method does, for a model that is
    made as well as for one that changes its attention.
    """
    from transformers import PreTrainedModel

    choose = PreTrainedModel.get_correct_attn_implementation
    if NAME in vars(choose):
        return

    @wraps(choose)
    def choose_and_watch(self: Any, *args: Any, **kwargs: Any) -> str:
        attention = choose(self, *args, **kwargs)
        if attention == NAME:
            watch(self)
        return attention

    vars(choose_and_watch)[NAME] = True  # a second call of `register` finds it
    PreTrainedModel.get_correct_attn_implementation = choose_and_watch


def boundaries_of(
    mask_function: Callable[..., Any],
    config: Any,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    **_: Any,
) -> Tensor | None:
    """What layers get as their mask: which slots hold tokens, and the layout that follows from it.

    None where no slot is padding. A window is no part of it: layers name theirs themselves.
    """
    first, second = torch.tensor(0), torch.tensor(1)
    if not mask_function(first, first, first, second):
        raise InputError(f"{config.model_type} is causal, Packhorse serves encoders; {INSTEAD}")
    if not is_family(config):
        raise InputError(unknown_family(config.model_type))
    if use_vmap or getattr(config, "add_cross_attention", False):
        raise InputError(f"cross attention, or a mask beside padding's, is not served; {INSTEAD}")
    if attention_mask is None or bool(attention_mask.all()):
        return None
    return keep(of_rows(attention_mask), attention_mask)


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
    **others: Any,
) -> tuple[Tensor, None]:
    """[B, H, L, D] three times to [B, L, H, D], no token looking outside its sequence."""
    _refuse(module, query, key, value, others)
    layout = _layout(query, attention_mask, cu_seq_lens_q, cu_seq_lens_k)
    # transformers counts the token itself, as FlashAttention's windows do.
    window = None if sliding_window is None else sliding_window - 1
    if layout is None:  # all rows are as long as the longest: nothing to pack
        near = AttentionScope(window).visible(query.shape[2], query.device)
        whole = scaled_dot_product_attention(query, key, value, near, dropout, scale=scaling)
        return whole.transpose(1, 2), None
    query, key, value = (_flat(x, layout) for x in (query, key, value))  # [T, H, D]
    if scaling is not None and scaling != (usual := query.shape[-1] ** -0.5):
        query = query * (scaling / usual)
    out = _by_kernel(torch.stack([query, key, value], 1), layout, dropout, window)
    return _back(out, layout, attention_mask), None


def _layout(
    query: Tensor, mask: Tensor | None, bounds: Tensor | None, of_keys: Tensor | None
) -> Layout | None:
    rows, _, columns, _ = query.shape
    if bounds is None:
        return None if mask is None else kept(_checked(mask, rows, columns))
    if mask is not None or rows != 1:
        raise InputError("boundaries go with one flat row without a mask; leave attention_mask out")
    layout = of_boundaries(bounds, columns)
    if of_keys is None or of_keys is bounds or layout.plans.get("keys") is of_keys:
        return layout
    if not torch.equal(of_keys, bounds):
        raise InputError(f"cu_seq_lens_q and cu_seq_lens_k differ: cross attention; {INSTEAD}")
    layout.plans["keys"] = of_keys  # compared once a batch: it waits for the device
    return layout


def _checked(mask: Tensor, rows: int, columns: int) -> Tensor:
    if mask.dtype != torch.bool or mask.shape != (rows, columns):
        raise InputError(f"a ready-made mask of shape {list(mask.shape)} is not served; {INSTEAD}")
    return mask


def _refuse(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, others: Any) -> None:
    causal = others.get("is_causal")
    if getattr(module, "is_causal", False) if causal is None else causal:
        raise InputError(f"{type(module).__name__} is causal, Packhorse serves encoders; {INSTEAD}")
    if not query.shape == key.shape == value.shape:
        raise InputError(
            f"{type(module).__name__} has keys that are not its queries' own (cross attention, a "
            f"cache, shared heads), which is not served; {INSTEAD}"
        )
    if found := [name for name in FOREIGN if others.get(name) is not None]:
        raise InputError(f"{type(module).__name__} has a {found[0]}: that is not served; {INSTEAD}")
    if others.get("output_attentions"):
        raise InputError('attention probabilities are never kept; use attn_implementation="eager"')


def _flat(x: Tensor, layout: Layout) -> Tensor:
    """[B, H, L, D] to [T, H, D]."""
    x = x.transpose(1, 2).flatten(0, 1)
    return x if layout.tokens is None else x[layout.tokens]


def _back(out: Tensor, layout: Layout, mask: Tensor | None) -> Tensor:
    """[T, H, D] to [B, L, H, D]; padding is zero."""
    if layout.tokens is None or mask is None:
        return out.unsqueeze(0)
    padded = out.new_zeros(mask.numel(), *out.shape[1:])
    return padded.index_copy(0, layout.tokens, out).unflatten(0, mask.shape)


def _by_kernel(qkv: Tensor, layout: Layout, dropout: float, window: int | None) -> Tensor:
    if window is not None and not layout.whole:
        raise InputError(f"a window and a mask with holes do not go together; {INSTEAD}")
    if window is not None and window >= layout.packed.max_seqlen - 1:
        window = None  # it hides nothing, and every kernel knows that
    backward = torch.is_grad_enabled() and qkv.requires_grad
    needs = backward, qkv.shape[-1], dropout > 0, window is not None
    choice = _choice(qkv.device, qkv.dtype, *needs)
    key = choice.name, dropout, window
    if key not in layout.plans:
        layout.plans[key] = choice.kernel.plan(layout.packed, dropout, AttentionScope(window))
    return choice.kernel(qkv, layout.plans[key])


@cache
def _choice(
    device: torch.device,
    dtype: torch.dtype,
    backward: bool,
    head_size: int,
    dropout: bool,
    windows: bool,
) -> KernelChoice:
    needs = {"head_size": head_size, "dropout": dropout, "windows": windows}
    return pick(device, dtype, backward=backward, **needs)
