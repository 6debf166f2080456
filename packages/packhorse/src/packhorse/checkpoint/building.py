"""Build a model without weights, on the `meta` device, where tensors are only shapes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from packhorse.attention import Kernel
from packhorse.checkpoint import sentence
from packhorse.model.bert import Bert
from packhorse.model.config import BertConfig
from packhorse.model.heads import (
    Embed,
    Mlm,
    PooledLabels,
    Pooler,
    ReplacedTokenDetection,
    TokenLabels,
)
from packhorse.model.model import Model


def build(
    config: BertConfig,
    kernel: Kernel,
    heads: Iterable[str],
    labels: int,
    tied: bool,
    layout: sentence.Layout | None,
) -> Model:
    """The encoder with these heads, and the one for vectors that the layout describes."""
    with torch.device("meta"), _NoInitialisation():
        bert = Bert(config, kernel)
        return Model(bert, _heads(bert, heads, labels, tied) | _embed(layout, heads, config)).eval()


class _NoInitialisation(TorchFunctionMode):
    """Random numbers on `meta` are no numbers, yet drawing them imports a compiler: 1.2 s."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Leave out what fills a tensor with random numbers."""
        if func.__name__ in ("normal_", "uniform_", "kaiming_uniform_"):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def _heads(bert: Bert, heads: Iterable[str], labels: int, tied: bool) -> dict[str, nn.Module]:
    """One pooler serves all heads that need it, but for classifiers with one of their own."""
    config, pooler = bert.config, Pooler(bert.config)
    own, pooling = config.classify_activation, config.classify_pooling
    makers = {
        "pooled": lambda: pooler,
        "mlm": lambda: Mlm(config, bert.embed.words, tied),
        "replaced": lambda: ReplacedTokenDetection(config),
        "nsp": lambda: PooledLabels(config, pooler, 2),
        "span": lambda: TokenLabels(config, 2),
        "classify": lambda: PooledLabels(
            config, Pooler(config, own, pooling) if own else pooler, labels
        ),
        "tokens": lambda: TokenLabels(config, labels, config.dropout),
    }
    return {head: makers[head]() for head in heads}


def _embed(
    layout: sentence.Layout | None, heads: Iterable[str], config: BertConfig
) -> dict[str, nn.Module]:
    if layout:
        return {"embed": sentence.embed(layout, config)} if layout.pooling else {}
    if {"span", "classify", "tokens"} & set(heads):
        return {}
    return {"embed": Embed(("mean",), normalise=False)}
