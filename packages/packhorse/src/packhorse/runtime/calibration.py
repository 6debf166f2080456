"""The scales of float8: the largest numbers that texts show at the input of each product.

They are of the texts that a user calibrated a model with (`packhorse quantize --calibrate`) and are
kept in the saved model; a model without them is calibrated by a few texts of many kinds when it is
loaded. What matters is the order of magnitude: float8 keeps its precision over 14 binades, and
`float8_inference.HEADROOM` leaves room for texts that show more.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from packhorse.checkpoint import Checkpoint
from packhorse.model import float8_inference
from packhorse.packing.batch import Packed
from packhorse.runtime import batches
from packhorse.tokens import Tokenizer

BUDGET = 4096  # tokens of a batch
SAMPLE = (
    "The quick brown fox jumps over the lazy dog.",
    "In 1969, on 20 July at 20:17 UTC, two people landed on the Moon; a third stayed in orbit.",
    "Die Donaudampfschifffahrtsgesellschaft fährt täglich außer sonntags, 8 bis 18 Uhr.",
    "Le cœur a ses raisons que la raison ne connaît point.",
    "def mean(values: list[float]) -> float:\n    return sum(values) / len(values)",
    "https://example.org/search?q=packing&page=2#results",
    "SELECT name, COUNT(*) FROM orders WHERE total > 99.50 GROUP BY name;",
    "$1,234.56 - 12 % (-3.7) … «?!» … #1 @home & co. <b>bold</b>",
    "a",
    "!!! ??? ... ,,, ;;;",
    "東京は日本の首都です。今日は天気がいいですね。",
    "Москва, столица России. القاهرة عاصمة مصر.",
    "No, no, no, no, no, no, no, no, no, no, no, no, no, no, no, no.",
    "The defendant, hereinafter referred to as the lessee, shall not assign this agreement. " * 6,
    "Patients with type 2 diabetes received 500 mg of metformin twice daily for 12 weeks. " * 12,
    "Packing leaves no token to waste. " * 40,
)


def input_scales(
    checkpoint: Checkpoint, tokenizer: Tokenizer, device: torch.device
) -> dict[str, float]:
    """The scale of each product's input: the checkpoint's own, the rest by the built-in texts."""
    names = float8_inference.linear_layers(checkpoint.model.bert)
    if all(name in checkpoint.scales for name in names if name not in checkpoint.kept):
        return checkpoint.scales
    return calibrate(checkpoint, tokenizer, SAMPLE, device) | checkpoint.scales


def calibrate(
    checkpoint: Checkpoint, tokenizer: Tokenizer, texts: Sequence[str], device: torch.device
) -> dict[str, float]:
    """The scale of each product's input in these texts, by name below `bert.layers`."""
    encodings = tokenizer.encode(list(texts), checkpoint.max_length)
    cut = batches.by_tokens([len(encoding) for encoding in encodings], BUDGET)
    packed = (Packed.build([encodings[int(i)] for i in batch]) for batch in cut)
    bert = checkpoint.model.bert.to(device).eval()
    with torch.inference_mode():
        bert.fold()
    return float8_inference.calibrate(bert, packed)
