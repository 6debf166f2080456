"""How fast a loaded model encodes: real tokens, and the device done before the clock is read.

One call a text, as a batch of equal copies, so that a latency is that of a batch. The clock covers
all that a call does: laying the batch, copying it to the device, the model, copying back. Turning
text into tokens is measured apart. Padding does not count as work, here or in any other figure.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from packhorse import status
from packhorse.cli.console import table

if TYPE_CHECKING:
    from packhorse.runtime.encoder import Encoder
    from packhorse.tokens import Text

WARM_UP = 2  # rounds: the first prepares what is prepared once a shape, the second its memory


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
    # One batch must be one batch, whatever budget the encoder would cut it by.
    most = batch_size * max(map(len, encodings))
    encoder = replace(encoder, budget=max(encoder.budget, most))
    only = encoder.tokenizer.mask_id if head == "mlm" else None
    latencies, ran, tokens = [], 0, 0
    about = {"does": "measuring", "model": encoder.name, "device": str(encoder.device)}
    with status.publishing("perf", about) as say:
        for iteration in range(WARM_UP + iterations):
            for encoding in encodings:
                start = time.perf_counter()
                encoder.run([encoding] * batch_size, head, only=only)
                synchronize(encoder.device)
                if iteration >= WARM_UP:
                    latencies.append(time.perf_counter() - start)
                ran, tokens = ran + batch_size, tokens + batch_size * len(encoding)
                say({"sequences": ran, "tokens": tokens})
    measured = sum(map(len, encodings)) * batch_size * iterations
    return {**_figures(latencies, measured, batch_size), "tokenizing_seconds": tokenizing}


def _figures(latencies: Sequence[float], tokens: int, batch_size: int) -> dict[str, Any]:
    import numpy as np

    seconds, sequences = sum(latencies), batch_size * len(latencies)
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


def show(found: dict[str, Any]) -> None:
    """The figures as a table."""
    rows = [
        ["tokens", found["tokens"]],
        ["sequences", found["sequences"]],
        ["seconds", found["seconds"]],
        ["tokens a second", found["tokens_per_second"]],
        ["sequences a second", found["sequences_per_second"]],
        ["p50, ms a batch", found["p50_ms"]],
        ["p90, ms a batch", found["p90_ms"]],
        ["p99, ms a batch", found["p99_ms"]],
        ["tokenizing, ms (apart)", found["tokenizing_seconds"] * 1000],
    ]
    table(None, ["measured", "value"], rows)
