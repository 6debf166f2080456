"""Open a model and decide where and how it runs: device, number format, attention kernel.

`dtype="auto"` is measured, not guessed: each format the device computes in hardware encodes the
same texts, and the fastest whose vectors stay within cosine 0.999 of fp32 is taken.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import torch

from packhorse import attention, checkpoint
from packhorse import device as devices
from packhorse.runtime.backend import TorchBackend
from packhorse.runtime.encoder import TOKENS_A_BATCH, Encoder
from packhorse.tokens import Tokenizer

CLOSE_ENOUGH = 0.999  # cosine to fp32 that `dtype="auto"` asks of a faster format
SAMPLE = ("The quick brown fox jumps over the lazy dog.", "Packing leaves no token to waste. " * 12)


def load(
    model: str | Path,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    kernel: str | None = None,
    graphs: bool = False,
    budget: int | None = None,
) -> Encoder:
    """An `Encoder` over `model`, a folder or a hub id.

    device: "cpu", "cuda" …; the accelerator if there is one. dtype: "fp32", "bf16", "fp16" or
    "auto"; fp32 on a CPU and bf16 on CUDA. kernel: an attention kernel by name; the fastest that
    serves. graphs: compile each bucket of shapes, and on CUDA replay it as a graph. budget: tokens
    a batch.
    """
    where = devices.choose_device(device)
    if dtype == "auto":
        return _fastest(model, where, kernel, graphs, budget)
    chosen = devices.default_dtype(where) if dtype is None else devices.parse_dtype(dtype)
    return _open(model, where, chosen, kernel, graphs, budget)


def _open(
    model: str | Path,
    device: torch.device,
    dtype: torch.dtype,
    kernel: str | None,
    graphs: bool,
    budget: int | None,
) -> Encoder:
    choice = attention.pick(device, dtype, name=kernel)
    found = checkpoint.load(model, kernel=choice.kernel, device=device, dtype=dtype)
    tokenizer = Tokenizer.load(found.folder, found.max_length, found.config.vocab_size)
    return Encoder(
        name=found.name,
        tokenizer=tokenizer,
        backend=TorchBackend(found.model, device, graphs),
        heads=tuple(found.model.heads),
        labels=found.labels,
        problem=found.problem,
        prompts=found.prompts,
        default_prompt=found.default_prompt,
        max_length=found.max_length,
        device=device,
        dtype=dtype,
        kernel=choice.name,
        why=choice.why,
        capacity=found.max_length if choice.kernel.serves.rows else 0,
        budget=budget or TOKENS_A_BATCH.get(device.type, 16384),
    )


def _fastest(
    model: str | Path,
    device: torch.device,
    kernel: str | None,
    graphs: bool,
    budget: int | None,
) -> Encoder:
    best = _open(model, device, torch.float32, kernel, graphs, budget)
    if not devices.fast_bf16(device):
        return best
    seconds, exact = _trial(best)
    other = _open(model, device, torch.bfloat16, kernel, graphs, budget)
    quicker, vectors = _trial(other)
    return other if quicker < seconds and _cosine(exact, vectors) >= CLOSE_ENOUGH else best


def _trial(encoder: Encoder, rounds: int = 3) -> tuple[float, np.ndarray]:
    """Best time of a few rounds over the sample, and its vectors (states averaged per text)."""
    encodings = encoder.tokenizer.encode(SAMPLE * 8, encoder.max_length)
    vectors = np.stack([h.states.mean(0) for h in encoder.hidden(SAMPLE)])
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        encoder.run(encodings, "hidden")
        times.append(time.perf_counter() - start)
    return min(times), vectors


def _cosine(a: np.ndarray, b: np.ndarray) -> float:
    """The smallest cosine between rows of the same number."""
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return float(((a * b).sum(1) / norms).min())
