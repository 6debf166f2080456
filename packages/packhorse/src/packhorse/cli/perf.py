"""Measure how fast a loaded model encodes texts, for `packhorse run --perf`.

Each text runs as one batch of equal copies, so a latency is that of a batch. The time covers all
that a call does: building the batch, copying it to the device, the model, copying back. It is read
when the device has finished. Tokenizing is measured separately. Only real tokens count; padding is
no work, here or in any other figure.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from packhorse import status
from packhorse.cli.console import table

if TYPE_CHECKING:
    from packhorse.runtime.encoder import Encoder
    from packhorse.tokens.tokenizer import Text

WARM_UP = 2  # rounds: the first prepares what is done once per shape, the second its memory


def measure(
    encoder: "Encoder",
    texts: Sequence["Text"],
    head: str,
    *,
    batch_size: int,
    iterations: int,
    max_length: int | None,
) -> dict[str, Any]:
    """Run each text `iterations` times as a batch of `batch_size` copies of itself."""
    from packhorse.device import synchronize

    start = time.perf_counter()
    encodings = encoder.tokenize(texts, max_length)
    tokenizing = time.perf_counter() - start
    # The encoder would split a batch above its token budget; here one batch must be one call.
    largest_batch = batch_size * max(map(len, encodings))
    encoder = replace(encoder, budget=max(encoder.budget, largest_batch))
    only = encoder.tokenizer.mask_id if head == "mlm" else None
    latencies = []
    sequences = 0
    tokens = 0
    facts = {"does": "measuring", "model": encoder.name, "device": str(encoder.device)}
    with status.publishing("perf", facts) as publish:
        for iteration in range(WARM_UP + iterations):
            for encoding in encodings:
                start = time.perf_counter()
                encoder.run([encoding] * batch_size, head, only=only)
                synchronize(encoder.device)
                if iteration >= WARM_UP:
                    latencies.append(time.perf_counter() - start)
                sequences += batch_size
                tokens += batch_size * len(encoding)
                publish({"sequences": sequences, "tokens": tokens})
    measured_tokens = sum(map(len, encodings)) * batch_size * iterations
    return {
        **_figures(latencies, measured_tokens, batch_size),
        "tokenizing_seconds": tokenizing,
    }


def _figures(latencies: Sequence[float], tokens: int, batch_size: int) -> dict[str, Any]:
    import numpy as np

    seconds = sum(latencies)
    sequences = batch_size * len(latencies)
    p50, p90, p99 = np.percentile(np.array(latencies) * 1000, [50, 90, 99]).tolist()
    return {
        "tokens": tokens,
        "sequences": sequences,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "sequences_per_second": sequences / seconds,
        "p50_ms": p50,
        "p90_ms": p90,
        "p99_ms": p99,
    }


def show(figures: dict[str, Any]) -> None:
    """Print the figures as a table."""
    rows = [
        ["tokens", figures["tokens"]],
        ["sequences", figures["sequences"]],
        ["seconds", figures["seconds"]],
        ["tokens per second", figures["tokens_per_second"]],
        ["sequences per second", figures["sequences_per_second"]],
        ["p50, ms per batch", figures["p50_ms"]],
        ["p90, ms per batch", figures["p90_ms"]],
        ["p99, ms per batch", figures["p99_ms"]],
        ["tokenizing, ms (separate)", figures["tokenizing_seconds"] * 1000],
    ]
    table(None, ["measured", "value"], rows)
