"""The parts of DeBERTa (He et al. 2021) that other encoders do not have.

- *Distances*: one table of vectors for the distance between two tokens, exact up to a limit and
  then in logarithmic ranges, which every layer projects with its own weights or with those of its
  queries and keys. `attention.disentangled` says how they become scores.
- *Convolution* (v2-xlarge): each token is mixed with its neighbors and added to the first layer.

In inference the projected vectors are constants, so `fold` computes them once per model. Otherwise
a batch of one short text would pay for the projection of the whole table.

Shapes: T tokens, E hidden width, H heads, D head width, S span (rows on each side), P = 2S rows of
the table, R the largest distance, K tokens that the convolution sees.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from packhorse.attention.disentangled import PositionTerms
from packhorse.attention.kernels import AttentionPlan, DisentangledKernel, Kernel
from packhorse.model.config import BertConfig
from packhorse.packing.batch import Packed


@dataclass(frozen=True, slots=True)
class DisentangledPlan:
    """A kernel's plan, and the vectors of distances before a layer projects them."""

    plan: AttentionPlan
    table: Tensor | None  # [P, E]; None: every layer has them projected


class DistanceTable(nn.Module):
    """A vector for every distance or range of distances."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.span = config.distance_span
        self.reach = config.distance_reach
        self.farthest = config.max_positions - 1  # R
        self.table = nn.Embedding(2 * self.span, config.hidden_size)
        self.norm = nn.Identity()
        if config.distance_norm:
            self.norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self._rows: dict[torch.device, Tensor] = {}

    def forward(self) -> Tensor:
        """[P, E]."""
        return self.norm(self.table.weight)

    def rows(self, device: torch.device) -> Tensor:
        """[2R+1] the row of each distance, from a key R before its query to one R after it."""
        if device not in self._rows:
            # Not a buffer: a model is built without values first, and this is no weight. A tensor
            # made in inference mode could not take part in a later training step.
            with torch.inference_mode(False):
                self._rows[device] = distance_rows(self.farthest, self.span, self.reach).to(device)
        return self._rows[device]


def distance_rows(farthest: int, span: int, reach: int) -> Tensor:
    """[2R+1] the row of each distance, from a key R before its query to one R after it.

    Half of the span is for exact distances, the rest for ranges that grow up to `reach`; a reach of
    0 means that all are exact. Beyond the span all distances share the last row. Computed on the
    CPU and in fp32, because the edges of the ranges depend on rounding.
    """
    with torch.device("cpu"):
        before = torch.arange(farthest, -farthest - 1, -1)  # of the key, seen from its query
        if reach:
            half = span // 2
            away = before.abs().where(before.abs() >= half, torch.tensor(half - 1))
            growth = torch.log(torch.tensor((reach - 1) / half))
            ranges = torch.ceil(torch.log(away / half) / growth * (half - 1)) + half
            before = torch.where(away <= half, before.float(), ranges * before.sign()).long()
        return (before + span).clamp(0, 2 * span - 1)


class DisentangledSelfAttention(nn.Module):
    """Self-attention in which content is scored against distance, too."""

    # LAMB takes the trust ratio of query, key and value separately (`optim.parameter_groups`).
    stacked_tensors: ClassVar[dict[str, int]] = {"qkv": 3}
    folded_keys: Tensor | None
    folded_queries: Tensor | None

    def __init__(self, config: BertConfig, kernel: Kernel) -> None:
        super().__init__()
        self.shape = (3, config.heads, config.head_size)
        width = config.hidden_size
        self.qkv = nn.Linear(width, 3 * width, bias=config.attention_bias)
        self.out = nn.Linear(width, width, bias=config.attention_bias)
        self.by_key = "c2p" in config.disentangled
        self.by_query = "p2c" in config.disentangled
        self.shared = config.share_distance_keys  # distances use the projections of content
        self.distance_keys = None
        self.distance_queries = None
        if self.by_key and not self.shared:
            self.distance_keys = nn.Linear(width, width)
        if self.by_query and not self.shared:
            self.distance_queries = nn.Linear(width, width)
        self.dropout = nn.Dropout(config.dropout)
        # Buffers and not attributes, so that layers share compiled code and move between devices.
        self.register_buffer("folded_keys", None, persistent=False)
        self.register_buffer("folded_queries", None, persistent=False)
        self.use(kernel)

    def use(self, kernel: Kernel) -> None:
        """Replace the kernel."""
        # Not checked here: any other kernel refuses to plan a scope with `rows`.
        self.kernel = cast("DisentangledKernel", kernel)

    def forward(self, x: Tensor, plan: DisentangledPlan) -> Tensor:
        """[T, E] to [T, E]."""
        if plan.table is None:
            terms = PositionTerms(self.folded_keys, self.folded_queries)
        else:
            terms = self.project(plan.table)
        qkv = self.qkv(x).unflatten(-1, self.shape)  # [T, 3, H, D]
        return self.out(self.kernel(qkv, plan.plan, terms).flatten(1))

    def project(self, table: Tensor) -> PositionTerms:
        """The vectors of distances, [P, E], as this layer's keys and queries."""
        table = self.dropout(table)
        if self.shared:
            queries, keys, _ = self.qkv(table).unflatten(-1, self.shape).unbind(1)
            return PositionTerms(keys if self.by_key else None, queries if self.by_query else None)
        return PositionTerms(
            self._by_head(self.distance_keys, table), self._by_head(self.distance_queries, table)
        )

    def _by_head(self, projection: nn.Linear | None, table: Tensor) -> Tensor | None:
        """[P, E] projected to [P, H, D]."""
        return None if projection is None else projection(table).unflatten(-1, self.shape[1:])

    def fold(self, table: Tensor) -> None:
        """Project once for all batches; the weights must not change afterwards."""
        terms = self.project(table)
        self.folded_keys = None if terms.keys is None else terms.keys.contiguous()
        self.folded_queries = None if terms.queries is None else terms.queries.contiguous()


class Convolution(nn.Module):
    """Each token mixed with its neighbors in the same sequence, added to the first layer."""

    def __init__(self, config: BertConfig, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        width = config.hidden_size
        self.reach = config.conv_width // 2
        self.conv = nn.Conv1d(width, width, config.conv_width)
        self.norm = nn.LayerNorm(width, eps=config.norm_eps)
        self.activation = activation
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, residual: Tensor, packed: Packed) -> Tensor:
        """The layer's input and its output, [T, E], to [T, E]."""
        numbers = torch.arange(len(packed), device=x.device)
        owner = numbers.repeat_interleave(packed.lengths.long(), output_size=len(x))  # [T]
        offsets = range(-self.reach, self.reach + 1)
        neighbors = torch.cat([_neighbor(x, owner, offset) for offset in offsets], -1)  # [T, K·E]
        weight = self.conv.weight.transpose(1, 2).flatten(1)  # [E, K·E]
        mixed = F.linear(neighbors, weight, self.conv.bias)
        return self.norm(residual + self.activation(self.dropout(mixed)))


def _neighbor(x: Tensor, owner: Tensor, offset: int) -> Tensor:
    """[T, E] the token `offset` further on; zeros where that is another sequence's, or none."""
    if not offset:
        return x
    places = torch.arange(len(x), device=x.device) + offset
    inside = places.clamp(0, len(x) - 1)
    same = (inside == places) & (owner[inside] == owner)
    # Filled and not multiplied: another sequence's NaN times zero would be NaN.
    return x[inside].masked_fill(~same[:, None], 0)
