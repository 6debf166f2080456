"""What a step costs: arithmetic, memory, and how much of a device's peak that is.

Arithmetic is the model's own (two operations a multiplication and addition, three times the forward
pass for a step), counted over real tokens and real lengths: filler is no work. MFU is that over the
device's peak in bf16 without sparsity (Chowdhery et al. 2022, PaLM, appendix B).

Memory follows Korthikanti et al. 2022: a layer keeps about 34 bytes a token and hidden unit for its
backward pass in half precision, attention's scores not among them, for no kernel here keeps any.

Shapes: T tokens, E hidden width, F feed-forward width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from packhorse.model.config import BertConfig

# Dense bf16 operations a second, from the makers' data sheets; the first name that fits.
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
USUAL = 0.4  # of the peak, reached by BERT-Large in bf16: for what is to be expected
KEPT = 34  # bytes a layer keeps for a token and hidden unit, in half precision
MOST_TOKENS = 1 << 16  # at once: beyond, products get no faster
ON_CPU = 1 << 13  # tokens at once, for the cache
SPARE = 0.75  # of the memory is planned with


@dataclass(frozen=True, slots=True)
class Work:
    """What some batches hold; sums, so that they add up."""

    tokens: float = 0
    squares: float = 0  # of the sequences' lengths: what attention works on
    guessed: float = 0  # masked tokens
    places: float = 0  # tokens that are run, filler included

    def __add__(self, other: Work) -> Work:
        pairs = ((getattr(self, n), getattr(other, n)) for n in self.__slots__)
        return Work(*(a + b for a, b in pairs))

    @property
    def fill(self) -> float:
        """The share of what is run that is real."""
        return self.tokens / self.places if self.places else 1.0


def work(batches: Iterable[Any], places: int = 0) -> Work:
    """Of batches on the host; `places` where they will be filled up to so many tokens each."""
    total = Work()
    for batch in batches:
        lengths = batch.packed.lengths[list(batch.packed.places)].long()
        run = places or len(batch.packed.ids)
        guessed = len(getattr(batch, "masked_at", ()))
        total += Work(batch.tokens, int((lengths * lengths).sum()), guessed, run)
    return total


def operations(config: BertConfig, done: Work) -> float:
    """Of a training step on so much, forward and backward."""
    width, wide = config.hidden_size, config.intermediate_size
    halves = 3 if config.gated else 2  # of the feed-forward
    linear = 2 * config.layers * (4 * width * width + halves * width * wide) * done.tokens
    attention = 4 * config.layers * width * done.squares
    words = 2 * config.embedding_size * (width + config.vocab_size) * done.guessed
    return 3.0 * (linear + attention + words)


def peak(device: torch.device) -> float | None:
    """Operations a second at most, where the device is known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((value for known, value in PEAKS.items() if known in name), None)


def micro_tokens(config: BertConfig, device: torch.device, half: bool) -> int:
    """How many tokens to run at once, so that their backward pass fits: a power of two."""
    if device.type != "cuda":
        return ON_CPU
    width = 1 if half else 2
    layers = config.layers * config.hidden_size * KEPT * width
    words = 0.15 * config.vocab_size * (8 + 4 * width)  # scores, and their gradient
    free = torch.cuda.get_device_properties(device).total_memory * SPARE - 20 * parameters(config)
    fits = max(512, int(free / (layers + words)))
    return min(MOST_TOKENS, 1 << (fits.bit_length() - 1))


def parameters(config: BertConfig) -> int:
    """About; each has a gradient, two averages and maybe a master."""
    halves = 3 if config.gated else 2
    layer = 4 * config.hidden_size**2 + halves * config.hidden_size * config.intermediate_size
    return config.layers * layer + config.vocab_size * config.embedding_size
