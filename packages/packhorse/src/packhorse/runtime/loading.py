"""Load a model and decide where and how it runs: device, number format, attention kernel.

`dtype="auto"` is measured, not guessed: each format that the device computes in hardware encodes
the same texts, and the fastest whose vectors stay within cosine 0.999 of fp32 is taken. int8 and
float8 are never among them. `invariant` is the opposite trade: batches are padded to fixed shapes
so that results are equal bit by bit.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from packhorse import attention, checkpoint, onnxpack
from packhorse import device as devices
from packhorse.attention.hidden_keys import HiddenKeys
from packhorse.checkpoint import Checkpoint, fingerprint, retrieval, sentence
from packhorse.checkpoint.configuration import ConfigInput
from packhorse.checkpoint.loading import pair_template
from packhorse.errors import InputError, KernelError
from packhorse.model.heads import Embed
from packhorse.model.retrieval import MultiVector
from packhorse.runtime import cores
from packhorse.runtime import invariant as shapes
from packhorse.runtime.backend import Graphs, TorchBackend
from packhorse.runtime.calibration import input_scales
from packhorse.runtime.encoder import TOKENS_PER_BATCH, Encoder
from packhorse.runtime.packed_onnx import open_packed

Load = Callable[..., Checkpoint]
# torch and oneDNN each cache 1,024 prepared matrix products, one per shape, and hardly two packed
# batches have the same shape: that is half a gigabyte after a few hundred batches, and no gain that
# can be measured. Each library reads its variable when it prepares its first product, and has no
# other setting for it. torch caches for each thread, oneDNN for the process.
PREPARED = 64
PREPARED_BY_GROUP = 16  # a layer has four products, and a group soon another shape
CLOSE_ENOUGH = 0.999  # the least cosine to fp32 that `dtype="auto"` accepts
SAMPLE = ("The quick brown fox jumps over the lazy dog.", "Packing leaves no token to waste. " * 12)


def prepared_limits() -> dict[str, str]:
    """The variables that say how many prepared matrix products torch and oneDNN keep.

    Groups of cores work on as many shapes at once as there are groups. With too small a cache they
    would drop each other's products between two layers, and prepare each of them anew.
    """
    together = max(PREPARED, PREPARED_BY_GROUP * cores.usable_threads())
    return {"LRU_CACHE_CAPACITY": f"{PREPARED}", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": f"{together}"}


def load(
    model: str | Path,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    kernel: str | None = None,
    graphs: Graphs = False,
    budget: int | None = None,
    invariant: bool = False,
    config: ConfigInput = None,
    vocab: str | Path | None = None,
    heads: int | None = None,
    gelu: str | None = None,
    ignore: Sequence[str] = (),
    adapter: str | Path | None = None,
    adapters: Mapping[str, str | Path] | None = None,
    truncate_dim: int | None = None,
) -> Encoder:
    """Return an `Encoder` over `model`: a folder, a weights file, a TensorFlow prefix or a hub id.

    A file that `packhorse onnx pack` wrote runs on ONNX Runtime as it is.

    device: "cpu", "cuda" …; by default the accelerator, if there is one. dtype: "fp32", "bf16",
    "fp16", "int8" (matrix products on a CPU, see `model.int8`), "float8" (matrix products on CUDA,
    see `model.float8_inference`) or "auto"; by default fp32 on a CPU and bf16 on CUDA, or int8 or
    float8 where the file holds that and the device is faster with it. kernel: an attention kernel
    by name; by default the fastest that supports device and dtype. graphs: compile each bucket of
    shapes, and on CUDA replay it as a graph; "small" only does the latter, for batches of up to
    16,384 tokens, which take longer to launch than to compute. budget: tokens per batch. invariant:
    the result for a text is the same bit by bit whatever its neighbors, its position and the batch,
    see `runtime.invariant`; the number of torch's threads must not change. config, vocab: files to
    use instead of those in the model's folder. heads: the number of attention heads, if no file has
    it. gelu: "erf" or "tanh", if no graph shows which GELU it is. ignore: patterns of tensor names
    in the file that are not part of the model. adapter: a LoRA folder in PEFT's layout or its hub
    id, merged into the weights; or the name of an adapter that the model's own file has (Jina's
    embeddings v3). adapters: several, by name, each opened beside the model; see `Encoder.adapted`.
    truncate_dim: keep so many numbers of each vector, as models do that were trained for it
    (Matryoshka); by default those that the model's folder names, else all.

    Sets the environment variables `LRU_CACHE_CAPACITY` and `ONEDNN_PRIMITIVE_CACHE_CAPACITY`,
    unless they are set, so that torch caches few prepared matrix products.
    """
    for name, capacity in prepared_limits().items():
        os.environ.setdefault(name, capacity)
    if truncate_dim is not None and truncate_dim < 1:
        raise InputError(f"truncate_dim is {truncate_dim}; a vector has at least 1 number")
    if budget is not None and budget < 1:
        raise InputError(f"budget is {budget} tokens per batch; it must be at least 1")
    if invariant:
        shapes.check(bool(graphs), dtype)
    if adapters:
        one = partial(
            load,
            model,
            device=device,
            dtype=dtype,
            kernel=kernel,
            graphs=graphs,
            budget=budget,
            invariant=invariant,
            config=config,
            vocab=vocab,
            heads=heads,
            gelu=gelu,
            ignore=ignore,
            truncate_dim=truncate_dim,
        )
        opened = {name: one(adapter=folder) for name, folder in adapters.items()}
        return replace(one(adapter=adapter), adapters=opened)
    chosen_device = devices.choose_device(device)
    if onnxpack.is_packed(path := Path(model).expanduser()):
        if invariant:
            raise InputError(
                f"{path} is a packed ONNX graph, and ONNX Runtime does not keep results invariant; "
                "load the model that the graph was exported from"
            )
        if adapter is not None:
            raise InputError(
                f"{path} is a packed ONNX graph, whose weights take no adapter; merge it first: "
                "packhorse convert BASE FOLDER --adapter ADAPTER"
            )
        return shortened(open_packed(path, device, config, vocab, budget), truncate_dim)
    load_checkpoint = partial(
        checkpoint.load,
        model,
        config=config,
        vocab=vocab,
        heads=heads,
        gelu=gelu,
        ignore=ignore,
        adapter=adapter,
    )
    if dtype == "auto":
        fastest = _fastest(load_checkpoint, chosen_device, kernel, graphs, budget)
        return shortened(fastest, truncate_dim)
    if dtype is None:
        chosen_dtype = devices.default_dtype(chosen_device)
    else:
        chosen_dtype = devices.parse_dtype(dtype)
    named = dtype is not None
    encoder = open_checkpoint(
        load_checkpoint, chosen_device, chosen_dtype, kernel, graphs, budget, invariant, named
    )
    return shortened(encoder, truncate_dim)


def shortened(encoder: Encoder, truncate_dim: int | None) -> Encoder:
    """Return an encoder whose vectors have so many numbers; None: as the model's folder says."""
    if truncate_dim is None:
        return encoder
    if not encoder.width:
        raise InputError(f"{encoder.name} makes no vectors; leave out truncate_dim")
    if truncate_dim > encoder.width:
        raise InputError(
            f"truncate_dim is {truncate_dim}; vectors of {encoder.name} have {encoder.width} "
            "numbers; pass at most as many"
        )
    return replace(encoder, truncate_dim=truncate_dim)


def open_checkpoint(
    load: Load,
    device: torch.device,
    dtype: torch.dtype,
    kernel: str | None = None,
    graphs: Graphs = False,
    budget: int | None = None,
    invariant: bool = False,
    named: bool = True,
) -> Encoder:
    """Open a model in a dtype; one that is not `named` gives way to int8 or float8 in the file."""
    pick = shapes.pick if invariant else attention.pick
    if dtype == torch.int8:
        check_int8(device, bool(graphs))
    floats = devices.float_dtype(dtype, device)
    # Raise for a kernel that cannot run here before reading the weights, which takes long.
    pick(device, floats, name=kernel)
    stored = torch.float32 if dtype == devices.FLOAT8 else floats  # float8 is rounded from fp32
    loaded = load(device=device, dtype=stored)
    if not named and loaded.quantized and _is_fast(loaded.quantized, device, bool(graphs)):
        dtype = loaded.quantized
        if loaded.quantized == devices.FLOAT8:
            return open_checkpoint(load, device, dtype, kernel, graphs, budget, invariant)
    choice = pick(device, floats, name=kernel, **loaded.config.needs)
    side_by_side = device.type == "cpu" and not graphs and not invariant
    tokens = budget or TOKENS_PER_BATCH.get(device.type, 16384)
    if side_by_side and not budget:
        tokens = cores.default_budget(tokens)
    fixed = shapes.largest(tokens, loaded.max_length) if invariant else 0
    tokenizer = checkpoint.tokenizer(loaded)
    layout = loaded.layout
    heads = dict(loaded.model.heads)
    head = heads.get("embed")
    vectors = heads.get("multi")
    width = vectors.width(loaded.config.hidden_size) if isinstance(vectors, MultiVector) else 0
    multi = retrieval.multi_settings(layout.multi if layout else None, [*heads], tokenizer, width)
    splade = layout.splade if layout else None
    sparse = retrieval.sparse_settings(splade, [*heads], tokenizer, loaded.config.vocab_size)
    hides = multi is not None and multi.hides_filler
    if hides and invariant:
        raise InputError(
            f"{loaded.name} fills queries up with tokens that are not attended to, and that is not "
            "invariant; leave out invariant"
        )
    products = dtype if devices.is_rounded(dtype) else None
    scales = input_scales(loaded, tokenizer, device) if dtype == devices.FLOAT8 else {}
    loaded.model.bert.use(HiddenKeys(choice.kernel) if hides else choice.kernel)
    backend = TorchBackend(loaded.model, device, graphs, fixed, products, loaded.kept, scales)
    return Encoder(
        name=loaded.name,
        tokenizer=tokenizer,
        backend=backend,
        heads=tuple(loaded.model.heads),
        width=head.width(loaded.config.hidden_size) if isinstance(head, Embed) else 0,
        labels=loaded.labels,
        problem=loaded.problem,
        score_activation=loaded.score_activation,
        pair_template=pair_template(loaded, tokenizer),
        prompts=loaded.prompts,
        default_prompt=loaded.default_prompt,
        max_length=loaded.max_length,
        device=device,
        dtype=dtype,
        kernel=choice.name,
        reason=choice.reason,
        capacity=loaded.max_length if choice.kernel.serves.rows else 0,
        budget=tokens,
        side_by_side=side_by_side,
        embedder=head if isinstance(head, Embed) else None,
        sparse_settings=sparse,
        multi_settings=multi,
        digests=fingerprint.digests(loaded),
        **sentence.comparing(loaded.layout),
    )


def _is_fast(dtype: torch.dtype, device: torch.device, graphs: bool) -> bool:
    """Whether products in the format that a file holds are faster here than floats."""
    if dtype == torch.int8:
        return device.type == "cpu" and not graphs
    return devices.float8_products(device)


def check_int8(device: torch.device, graphs: bool = False) -> None:
    """Raise `InputError` where a model cannot run in int8."""
    if device.type != "cpu":
        raise InputError(f"dtype int8 is for CPUs, not for {device}; use bf16 there")
    if graphs:
        raise InputError("dtype int8 and graphs cannot be combined; leave out graphs")


def _fastest(
    load: Load,
    device: torch.device,
    kernel: str | None,
    graphs: Graphs,
    budget: int | None,
) -> Encoder:
    """Return the encoder in fp32, or in the fastest other format that stays close to it."""
    best = open_checkpoint(load, device, torch.float32, _if_fp32(kernel, device), graphs, budget)
    seconds, exact = _trial(best)
    candidates: list[torch.dtype] = []
    if devices.fast_bf16(device):
        candidates.append(torch.bfloat16)
    if device.type == "cuda":
        candidates.append(torch.float16)
    for dtype in candidates:
        encoder = open_checkpoint(load, device, dtype, kernel, graphs, budget)
        trial_seconds, vectors = _trial(encoder)
        if trial_seconds < seconds and _cosine(exact, vectors) >= CLOSE_ENOUGH:
            best = encoder
            seconds = trial_seconds
    return best


def _if_fp32(kernel: str | None, device: torch.device) -> str | None:
    """Return the kernel if it supports fp32, which may serve here only for comparison."""
    try:
        attention.pick(device, torch.float32, name=kernel)
    except KernelError:
        return None
    return kernel


def _trial(encoder: Encoder, rounds: int = 3) -> tuple[float, np.ndarray]:
    """Return the best time of a few rounds over the sample texts, and their vectors."""
    encodings = encoder.tokenizer.encode(SAMPLE * 8, encoder.max_length)
    head = "embed" if "embed" in encoder.heads else "hidden"
    rows = [row for (row,) in encoder.run(encodings, head)]
    times: list[float] = []
    for _ in range(rounds):
        start = time.perf_counter()
        encoder.run(encodings, head)
        times.append(time.perf_counter() - start)
    return min(times), np.stack([row.reshape(-1, row.shape[-1]).mean(0) for row in rows])


def _cosine(a: np.ndarray, b: np.ndarray) -> float:
    """Return the smallest cosine between corresponding rows."""
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return float(((a * b).sum(1) / norms).min())
