"""An `Encoder` over a packed ONNX model: ONNX Runtime computes, everything else is the same.

The file holds only the graph. Labels, pooling and vocabulary are looked up where those of any model
are: in the configuration, the sentence-transformers layout and the tokenizer in the same folder, or
in the files that the user names.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from packhorse import device as devices
from packhorse import onnxpack
from packhorse.checkpoint import configuration, fingerprint, names, sentence
from packhorse.checkpoint.configuration import ConfigInput
from packhorse.errors import CheckpointError, InputError
from packhorse.model.heads import Embed
from packhorse.runtime.encoder import TOKENS_PER_BATCH, Encoder
from packhorse.runtime.tasks import TASKS
from packhorse.tokens import Tokenizer

if TYPE_CHECKING:
    from packhorse.onnxpack.session import OnnxBackend  # which needs the extra `onnx`

DeviceName = str | torch.device | None
# In the order of the table. Hidden states of a fine-tuned model make no good sentence vectors.
LABELED_HEADS = tuple(dict.fromkeys(spec.head for spec in TASKS.values() if spec.uses_labels))
FINE_TUNED_HEADS = {spec.head for spec in TASKS.values() if spec.fine_tuned}


def open_packed(
    path: Path,
    device_name: DeviceName,
    config: ConfigInput,
    vocab: str | Path | None,
    budget: int | None,
) -> Encoder:
    """Return the encoder of a model that `packhorse onnx pack` wrote."""
    device = _device(device_name)
    layout = sentence.read(path.parent)
    backend = onnxpack.load(path, device=device)
    heads_in_torch = _embed(backend, layout)
    backend.torch_heads |= heads_in_torch
    width = 0
    if "embed" in backend.heads:
        width = backend.width("hidden" if "embed" in backend.torch_heads else "embed")
    raw = _raw(path.parent, config)
    labels = _labels(backend, raw)
    problem = names.problem(raw, labels)
    prompts, default_prompt = sentence.prompts(layout.settings if layout else {})
    return Encoder(
        name=path.name,
        tokenizer=_tokenizer(path, vocab, backend),
        backend=backend,
        heads=backend.heads,
        width=width,
        labels=labels,
        problem=problem,
        score_activation=sentence.score_activation(raw, layout, labels),
        prompts=prompts,
        default_prompt=default_prompt,
        max_length=_max_length(backend, layout),
        device=device,
        dtype=torch.float32,
        kernel=backend.facts.mode,
        reason="it is a packed ONNX graph, run by ONNX Runtime",
        capacity=backend.capacity,
        budget=budget or TOKENS_PER_BATCH.get(device.type, 16384),
        embedder=heads_in_torch.get("embed"),
        digests={
            # The graph, and its weights if they are in files of their own.
            "weights": fingerprint.of_files(
                [path, *sorted(path.parent.glob(f"{path.name}.data*"))]
            ),
            "config": fingerprint.digest([problem, labels]),
        },
        **sentence.comparing(layout),
    )


def _device(name: DeviceName) -> torch.device:
    """Return the named device; by default an accelerator only if this ONNX Runtime supports it."""
    device = devices.choose_device(name)
    named = name is not None and str(name) != "auto"
    return device if named or onnxpack.serves(device) else torch.device("cpu")


def _embed(backend: OnnxBackend, layout: sentence.SentenceLayout | None) -> dict[str, Embed]:
    """Return a head that pools hidden states, for a graph that has these and no other purpose."""
    heads = set(backend.facts.heads)
    if "embed" in heads or "hidden" not in heads or heads & FINE_TUNED_HEADS:
        return {}
    if layout is None:
        return {"embed": Embed(("mean",), normalize=False)}
    if layout.layers or len(layout.pooling) != 1 or not layout.include_prompt:
        raise CheckpointError(
            "the sentence-transformers layout of this model has dense layers, norms, several "
            "poolings or a prompt excluded from pooling, which cannot run after a packed graph; "
            "export them with the graph, or load the model that it was exported from"
        )
    return {"embed": Embed(layout.pooling, normalize=layout.normalize)}


def _raw(folder: Path, config: ConfigInput) -> Mapping[str, Any]:
    try:
        return configuration.find(folder, config, None, {})
    except CheckpointError:
        if config:
            raise
        return {}  # a graph runs without one


def _labels(backend: OnnxBackend, raw: Mapping[str, Any]) -> tuple[str, ...]:
    head = next((head for head in LABELED_HEADS if head in backend.facts.heads), None)
    if head is None:
        return ()
    width = backend.width(head)
    named = names.named_labels(raw)
    if named and len(named) != width:
        raise InputError(
            f"the configuration names {len(named)} labels, but the graph has {width} outputs; "
            "pass the configuration of this model (config=)"
        )
    return named or tuple(f"LABEL_{number}" for number in range(width))


def _tokenizer(path: Path, vocab: str | Path | None, backend: OnnxBackend) -> Tokenizer:
    vocabulary = configuration.vocabulary(path.parent, vocab)
    if vocabulary is None:
        raise CheckpointError(
            f"there is no tokenizer.json and no vocab.txt in the folder of {path}; "
            "copy the model's there, or pass --vocab FILE (vocab=)"
        )
    return Tokenizer.load(vocabulary, backend.max_length, vocab_size=backend.facts.vocab_size)


def _max_length(backend: OnnxBackend, layout: sentence.SentenceLayout | None) -> int:
    limit = layout.max_length if layout else None
    return min(backend.max_length, limit) if limit else backend.max_length
