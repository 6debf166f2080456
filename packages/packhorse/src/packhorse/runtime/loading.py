"""Open a model and decide where and how it runs: device, number format, attention kernel.

`dtype="auto"` is measured, not guessed: each format the device computes in hardware encodes the
same texts, and the fastest whose vectors stay within cosine 0.999 of fp32 is taken. `invariant` is
the opposite trade: shapes that are fixed, and what they fill up with is the price of equal bits.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from packhorse import attention, checkpoint, onnxpack
from packhorse import device as devices
from packhorse.checkpoint import Checkpoint, sentence
from packhorse.checkpoint.configuration import ConfigInput
from packhorse.errors import InputError, KernelError
from packhorse.model.heads import Embed
from packhorse.runtime import invariant as shapes
from packhorse.runtime.backend import TorchBackend
from packhorse.runtime.encoder import TOKENS_A_BATCH, Encoder
from packhorse.runtime.packed_onnx import open_packed

Load = Callable[..., Checkpoint]
# torch and oneDNN each keep 1,024 prepared products, one a shape, and hardly two packed batches are
# of one shape: half a gigabyte after a few hundred batches, for nothing that can be measured. Each
# reads its variable at the first product that it prepares; there is no other way to tell them.
PREPARED = {"LRU_CACHE_CAPACITY": "64", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64"}
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
    invariant: bool = False,
    config: ConfigInput = None,
    vocab: str | Path | None = None,
    heads: int | None = None,
    gelu: str | None = None,
    ignore: Sequence[str] = (),
) -> Encoder:
    """An `Encoder` over `model`: a folder, a file of weights, a TensorFlow prefix or a hub id.

    What `packhorse onnx pack` wrote is run as it is, on ONNX Runtime.

    device: "cpu", "cuda" …; the accelerator if there is one. dtype: "fp32", "bf16", "fp16" or
    "auto"; fp32 on a CPU and bf16 on CUDA. kernel: an attention kernel by name; the fastest that
    serves. graphs: compile each bucket of shapes, and on CUDA replay it as a graph. budget: tokens
    a batch. invariant: a text's result is the same to the bit whatever its neighbours, its place
    and the batch, see `runtime.invariant`; the number of torch's threads must stay. config, vocab:
    files to use instead of those beside the weights. heads: attention heads, where no file says.
    gelu: "erf" or "tanh", where no graph shows which GELU it is. ignore: patterns of tensors in the
    file that are no part of the model.

    The environment is asked to have torch keep few prepared products, unless it says something of
    that itself (`LRU_CACHE_CAPACITY`, `ONEDNN_PRIMITIVE_CACHE_CAPACITY`).
    """
    for name, most in PREPARED.items():
        os.environ.setdefault(name, most)
    if budget is not None and budget < 1:
        raise InputError(f"the budget is {budget} tokens a batch; it must be at least 1")
    if invariant:
        shapes.check(graphs, dtype)
    where = devices.choose_device(device)
    if onnxpack.is_packed(path := Path(model).expanduser()):
        if invariant:
            raise InputError(
                f"{path} is a packed ONNX graph, which ONNX Runtime computes as it likes; for "
                "invariant results load the model that it was made of"
            )
        return open_packed(path, device, config, vocab, budget)
    given = {"config": config, "vocab": vocab, "heads": heads, "gelu": gelu, "ignore": ignore}
    opened = partial(checkpoint.load, model, **given)
    if dtype == "auto":
        return _fastest(opened, where, kernel, graphs, budget)
    chosen = devices.default_dtype(where) if dtype is None else devices.parse_dtype(dtype)
    return _open(opened, where, chosen, kernel, graphs, budget, invariant)


def _open(
    load: Load,
    device: torch.device,
    dtype: torch.dtype,
    kernel: str | None,
    graphs: bool,
    budget: int | None,
    invariant: bool = False,
) -> Encoder:
    pick = shapes.pick if invariant else attention.pick
    pick(device, dtype, name=kernel)  # refuse what cannot run before reading weights
    found = load(device=device, dtype=dtype)
    choice = pick(device, dtype, name=kernel, **found.config.needs)
    tokens = budget or TOKENS_A_BATCH.get(device.type, 16384)
    fixed = shapes.largest(tokens, found.max_length) if invariant else 0
    found.model.bert.use(choice.kernel)
    head = dict(found.model.heads).get("embed")
    return Encoder(
        name=found.name,
        tokenizer=checkpoint.tokenizer(found),
        backend=TorchBackend(found.model, device, graphs, fixed),
        heads=tuple(found.model.heads),
        width=head.width(found.config.hidden_size) if isinstance(head, Embed) else 0,
        labels=found.labels,
        problem=found.problem,
        prompts=found.prompts,
        default_prompt=found.default_prompt,
        max_length=found.max_length,
        device=device,
        dtype=dtype,
        kernel=choice.name,
        why=choice.reason,
        capacity=found.max_length if choice.kernel.serves.rows else 0,
        budget=tokens,
        embedder=head if isinstance(head, Embed) else None,
        **sentence.comparing(found.layout),
    )


def _fastest(
    load: Load,
    device: torch.device,
    kernel: str | None,
    graphs: bool,
    budget: int | None,
) -> Encoder:
    """fp32, or the quickest of the other formats that stays close to it."""
    best = _open(load, device, torch.float32, _if_it_serves(kernel, device), graphs, budget)
    seconds, exact = _trial(best)
    faster = [torch.bfloat16] if devices.fast_bf16(device) else []
    faster += [torch.float16] if device.type == "cuda" else []
    for dtype in faster:
        other = _open(load, device, dtype, kernel, graphs, budget)
        taken, vectors = _trial(other)
        if taken < seconds and _cosine(exact, vectors) >= CLOSE_ENOUGH:
            best, seconds = other, taken
    return best


def _if_it_serves(kernel: str | None, device: torch.device) -> str | None:
    """The kernel asked for may not know fp32, which is only the measure here."""
    try:
        attention.pick(device, torch.float32, name=kernel)
    except KernelError:
        return None
    return kernel


def _trial(encoder: Encoder, rounds: int = 3) -> tuple[float, np.ndarray]:
    """Best time of a few rounds over the sample, and its vectors."""
    encodings = encoder.tokenizer.encode(SAMPLE * 8, encoder.max_length)
    head = "embed" if "embed" in encoder.heads else "hidden"
    rows = [row for (row,) in encoder.run(encodings, head)]
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        encoder.run(encodings, head)
        times.append(time.perf_counter() - start)
    return min(times), np.stack([row.reshape(-1, row.shape[-1]).mean(0) for row in rows])


def _cosine(a: np.ndarray, b: np.ndarray) -> float:
    """The smallest cosine between rows of the same number."""
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return float(((a * b).sum(1) / norms).min())
