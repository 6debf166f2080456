"""`attend`: attention over a packed batch, for models that are not ours.

    mixed = attend(q, k, v, packed)

In a model of several layers `PackedAttention(packed)` does the same and prepares a batch once for
all of them. Models of this package hold a kernel and call it with queries, keys and values side by
side; here they come apart, as most models have them, and one copy puts them together.

Shapes: T tokens, H heads, D head width.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from packhorse.attention.kernels import AttentionPlan, Kernel, pick
from packhorse.attention.scope import FULL_SCOPE, AttentionScope
from packhorse.device import dtype_name
from packhorse.errors import InputError
from packhorse.packing.batch import Packed


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packed: Packed,
    *,
    dropout: float = 0.0,
    scope: AttentionScope = FULL_SCOPE,
    kernel: str | None = None,
) -> Tensor:
    """Self-attention within each sequence of `packed`: [T, H, D] each to [T, H, D].

    It equals torch's `scaled_dot_product_attention` of every sequence alone, forward and backward,
    on CPU and CUDA; the fastest kernel for the device, dtype, head size and pass is chosen. For the
    arguments see `PackedAttention`, which prepares a batch once for several layers.
    """
    return PackedAttention(packed, dropout=dropout, scope=scope, kernel=kernel)(q, k, v)


class PackedAttention:
    """Attention over one batch, for all layers of a model: create it at the start of `forward`.

    dropout: fraction of attention probabilities to drop, drawn anew in each call (0 in evaluation).
    scope: a window, causal attention, or scores that depend on distance. kernel: the name of a
    kernel to use; without one the fastest that can run is chosen in the first call, and another one
    if dtype, head size or the need of gradients changes.
    """

    def __init__(
        self,
        packed: Packed,
        *,
        dropout: float = 0.0,
        scope: AttentionScope = FULL_SCOPE,
        kernel: str | None = None,
    ) -> None:
        if not 0 <= dropout < 1:
            raise InputError(f"dropout must be at least 0 and below 1, got {dropout}")
        if scope.window is not None and scope.window >= packed.max_seqlen - 1:
            scope = replace(scope, window=None)  # it hides nothing, and every kernel will do
        self.packed = packed
        self.dropout = dropout
        self.scope = scope
        self.kernel = kernel
        self._prepared: dict[tuple[torch.dtype, int, bool], tuple[Kernel, AttentionPlan]] = {}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Queries, keys and values, [T, H, D] each, to [T, H, D]."""
        self._check(q, k, v)
        added = [x for x in (self.scope.bias, self.scope.slopes) if x is not None]
        inputs = (q, k, v, *added)
        backward = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
        key = (q.dtype, q.shape[-1], backward)
        if key not in self._prepared:
            choice = pick(
                q.device,
                q.dtype,
                name=self.kernel,
                backward=backward,
                head_size=q.shape[-1],
                dropout=self.dropout > 0,
                windows=self.scope.window is not None,
                biases=self.scope.biased,
                causal=self.scope.causal,
            )
            plan = choice.kernel.plan(self.packed, self.dropout, self.scope)
            self._prepared[key] = choice.kernel, plan
        kernel, plan = self._prepared[key]
        return kernel(torch.stack([q, k, v], 1), plan)

    def _check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        tokens = len(self.packed.ids)
        shapes = ", ".join(str(list(x.shape)) for x in (q, k, v))
        if q.ndim != 3 or len(q) != tokens:
            raise InputError(
                f"q, k and v must be [tokens, heads, head width] with the {tokens} tokens of the"
                f" batch; their shapes are {shapes}"
            )
        if not q.shape == k.shape == v.shape:
            raise InputError(
                f"q, k and v must have one shape, but have {shapes}; heads of k and v that several"
                " queries share must be repeated (repeat_interleave)"
            )
        if not (q.dtype == k.dtype == v.dtype and q.dtype.is_floating_point):
            dtypes = ", ".join(dtype_name(x.dtype) for x in (q, k, v))
            raise InputError(f"q, k and v must have one floating dtype, but have {dtypes}")
        devices = {x.device for x in (q, k, v, self.packed.ids)}
        if len(devices) > 1:
            raise InputError(
                f"q, k and v are on {q.device}, {k.device}, {v.device} and the batch on"
                f" {self.packed.ids.device}; move the batch with packed.to(device)"
            )
