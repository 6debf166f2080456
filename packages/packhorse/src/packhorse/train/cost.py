"""The cost of a training step: operations, memory, and the share of a device's peak (MFU).

Operations are those of the model (two per multiplication and addition, three times the forward pass
for a step), counted over real tokens and lengths; filler is not work. MFU is that over the device's
dense bf16 peak (Chowdhery et al. 2022, PaLM, appendix B).

Memory follows Korthikanti et al. 2022: in half precision a layer keeps about 34 bytes per token and
hidden unit for its backward pass. Attention scores are not included, since no kernel here keeps
any.

Shapes: T tokens, E hidden width, F feed-forward width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from packhorse.model.config import BertConfig

# Dense bf16 operations per second from the makers' data sheets; the first matching name counts.
PEAKS = {
    "GB200": 2.5e15,
    "B200": 2.25e15,
    "H200": 989e12,
    "GH200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H800": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A10": 125e12,
}
USUAL_SHARE = 0.4  # of the peak that BERT-Large reaches in bf16, for estimates
BYTES_KEPT = 34  # per layer, token and hidden unit, in half precision
MASKED_SHARE = 0.15  # of the tokens, for which word scores are computed in pretraining
MAX_TOKENS = 1 << 16  # at once; beyond it, matrix products get no faster
CPU_TOKENS = 1 << 13  # at once on a CPU, for the cache
MEMORY_SHARE = 0.75  # of the device's memory that is planned with


@dataclass(frozen=True, slots=True)
class StepWork:
    """Sizes of batches as sums, so that they can be added."""

    tokens: float = 0  # without filler
    squares: float = 0  # of the sequences' lengths, which attention is proportional to
    masked: float = 0  # masked tokens
    computed: float = 0  # tokens including filler

    def __add__(self, more: StepWork) -> StepWork:
        return StepWork(
            self.tokens + more.tokens,
            self.squares + more.squares,
            self.masked + more.masked,
            self.computed + more.computed,
        )

    @property
    def fill(self) -> float:
        """The share of computed tokens that is not filler."""
        return self.tokens / self.computed if self.computed else 1.0


def work(batches: Iterable[Any], tokens_each: int = 0) -> StepWork:
    """The work of batches on the host; `tokens_each` if each will be filled up to that size."""
    total = StepWork()
    for batch in batches:
        lengths = batch.packed.lengths[list(batch.packed.places)].long()
        squares = int((lengths * lengths).sum())
        masked = len(getattr(batch, "masked_at", ()))
        computed = tokens_each or len(batch.packed.ids)
        total += StepWork(batch.tokens, squares, masked, computed)
    return total


def operations(config: BertConfig, work: StepWork) -> float:
    """The operations of a training step, forward and backward."""
    hidden = config.hidden_size
    matrices = 3 if config.gated else 2  # of the feed-forward layer
    attended = config.heads * config.head_size
    projections = 2 * hidden * config.head_size * (config.heads + config.key_heads)
    weights = projections + matrices * hidden * config.intermediate_size  # per layer
    linear = 2 * config.layers * weights * work.tokens
    attention = 4 * config.layers * attended * work.squares
    words = 2 * config.embedding_size * (hidden + config.vocab_size) * work.masked
    return 3.0 * (linear + attention + words)


def peak(device: torch.device) -> float | None:
    """The device's peak in operations per second, if it is known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((value for known, value in PEAKS.items() if known in name), None)


def micro_tokens(config: BertConfig, device: torch.device, half: bool) -> int:
    """How many tokens to run at once so that their backward pass fits: a power of two."""
    if device.type != "cuda":
        return CPU_TOKENS
    width = 1 if half else 2  # of a number, relative to half precision
    layers = config.layers * config.hidden_size * BYTES_KEPT * width
    # A score and its gradient in fp32, and both again in the model's dtype.
    words = MASKED_SHARE * config.vocab_size * (8 + 4 * width)
    memory = torch.cuda.get_device_properties(device).total_memory * MEMORY_SHARE
    # 20 bytes per parameter: weight, gradient, two averages and a master copy.
    free = memory - 20 * parameters(config)
    fitting = max(512, int(free / (layers + words)))
    return min(MAX_TOKENS, 1 << (fitting.bit_length() - 1))


def parameters(config: BertConfig) -> int:
    """The approximate number of parameters."""
    matrices = 3 if config.gated else 2
    projections = 2 * config.head_size * (config.heads + config.key_heads)
    layer = config.hidden_size * (projections + matrices * config.intermediate_size)
    return config.layers * layer + config.vocab_size * config.embedding_size
