"""An `Encoder` over a packed ONNX model: ONNX Runtime computes, all around it is the same.

Such a file is the graph alone. Labels, pooling and vocabulary are looked for where those of any
model are: in the configuration, the sentence-transformers layout and the tokenizer beside it, or
where the user says.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from packhorse import device as devices
from packhorse import onnxpack
from packhorse.checkpoint import configuration, names, sentence
from packhorse.checkpoint.configuration import ConfigInput
from packhorse.errors import CheckpointError, InputError
from packhorse.model.heads import Embed
from packhorse.runtime.encoder import TOKENS_A_BATCH, Encoder
from packhorse.tokens import Tokenizer

if TYPE_CHECKING:
    from packhorse.onnxpack.session import OnnxBackend  # which needs the extra `onnx`

Named = str | torch.device | None  # a device


def open_packed(
    path: Path, named: Named, config: ConfigInput, vocab: str | Path | None, budget: int | None
) -> Encoder:
    """The encoder of a model that `packhorse onnx pack` wrote."""
    device, layout = _device(named), sentence.read(path.parent)
    backend = onnxpack.load(path, device=device)
    made = _embed(backend, layout)
    backend.torch_heads |= made
    raw = _raw(path.parent, config)
    labels = _labels(backend, raw)
    prompts, default_prompt = sentence.prompts(layout.settings if layout else {})
    return Encoder(
        name=path.name,
        tokenizer=_tokenizer(path, vocab, backend),
        backend=backend,
        heads=backend.heads,
        width=backend.width("hidden" if "embed" in backend.torch_heads else "embed")
        if "embed" in backend.heads
        else 0,
        labels=labels,
        problem=names.problem(raw, labels),
        prompts=prompts,
        default_prompt=default_prompt,
        max_length=_max_length(backend, layout),
        device=device,
        dtype=torch.float32,
        kernel=backend.facts.mode,
        why="it is a packed ONNX graph, run by ONNX Runtime",
        capacity=backend.capacity,
        budget=budget or TOKENS_A_BATCH.get(device.type, 16384),
        embedder=made.get("embed"),
        **sentence.comparing(layout),
    )


def _device(named: Named) -> torch.device:
    """The one asked for; unasked an accelerator only if this ONNX Runtime serves it."""
    found = devices.choose_device(named)
    asked = named is not None and str(named) != "auto"
    return found if asked or onnxpack.serves(found) else torch.device("cpu")


def _embed(backend: OnnxBackend, layout: sentence.SentenceLayout | None) -> dict[str, Embed]:
    """Vectors of a graph that gives hidden states and was not trained for another task."""
    heads = set(backend.facts.heads)
    if "embed" in heads or "hidden" not in heads or heads & {"span", "classify", "tokens"}:
        return {}
    if layout is None:
        return {"embed": Embed(("mean",), normalise=False)}
    if layout.layers or len(layout.pooling) != 1 or not layout.include_prompt:
        raise CheckpointError(
            "the sentence-transformers layout beside the graph has dense layers, norms, several "
            "poolings or a prompt that is not pooled, which are not run after a packed graph; "
            "export them with it, or load the model that the graph was made of"
        )
    return {"embed": Embed(layout.pooling, normalise=layout.normalize)}


def _raw(folder: Path, config: ConfigInput) -> Mapping[str, Any]:
    try:
        return configuration.find(folder, config, None, {})
    except CheckpointError:
        if config:
            raise
        return {}  # a graph needs none


def _labels(backend: OnnxBackend, raw: Mapping[str, Any]) -> tuple[str, ...]:
    head = next((head for head in ("classify", "tokens") if head in backend.facts.heads), None)
    if head is None:
        return ()
    width = backend.width(head)
    named = names.named_labels(raw)
    if named and len(named) != width:
        raise InputError(f"the configuration names {len(named)} labels, the graph gives {width}")
    return named or tuple(f"LABEL_{number}" for number in range(width))


def _tokenizer(path: Path, vocab: str | Path | None, backend: OnnxBackend) -> Tokenizer:
    where = configuration.vocabulary(path.parent, vocab)
    if where is None:
        raise CheckpointError(
            f"{path} has no tokenizer.json and no vocab.txt beside it; "
            f"copy the model's there, or pass --vocab FILE (vocab=)"
        )
    return Tokenizer.load(where, backend.max_length, vocab_size=backend.facts.vocab_size)


def _max_length(backend: OnnxBackend, layout: sentence.SentenceLayout | None) -> int:
    said = layout.max_length if layout else None
    return min(backend.max_length, said) if said else backend.max_length
