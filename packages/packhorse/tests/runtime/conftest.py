"""Small encoders with every head, for tests of what runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

VOCABULARY = (
    "[PAD] [UNK] [CLS] [SEP] [MASK] the cat sat on a mat and saw one red hat . ? who what poison"
    " horse mule carries sacks to market is good bad old brown with no load"
)
LABELS = {"classify": ("good", "bad", "ugly"), "rerank": ("score",)}
LABELS["label"] = ("B-CAT", "I-CAT", "B-MAT", "I-MAT", "O")


class Around:
    """A backend around another: `before` sees each batch first, and may wait or raise."""

    def __init__(self, backend: Any, before: Callable[[Any], Any]) -> None:
        self.backend, self.before = backend, before

    def __call__(self, packed: Any, heads: Sequence[str], at: Any = None) -> Any:
        self.before(packed)
        return self.backend(packed, heads, at)


@pytest.fixture(scope="session")
def make_encoder(make_model, tmp_path_factory):
    """A tiny encoder for a task over a kernel; `before` sees each batch before the model does."""
    import torch

    from packhorse import attention
    from packhorse.runtime.backend import TorchBackend
    from packhorse.runtime.encoder import Encoder
    from packhorse.tokens import Tokenizer

    folder: Path = tmp_path_factory.mktemp("vocabulary")
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY.split()))
    tokenizer, cpu, encoders = Tokenizer.load(folder), torch.device("cpu"), {}

    def build(kernel: str) -> Encoder:
        model = make_model(torch.float32, width=32, heads=2, positions=48)
        model.bert.use(attention.kernel(kernel))
        return Encoder(
            name="tiny",
            tokenizer=tokenizer,
            backend=TorchBackend(model, cpu),
            heads=tuple(model.heads),
            width=96,
            labels=LABELS["classify"],
            problem="single_label",
            prompts={"query": "who saw "},
            default_prompt=None,
            max_length=48,
            device=cpu,
            dtype=torch.float32,
            kernel=kernel,
            reason="asked for",
            capacity=48 if kernel == "mask" else 0,
            budget=4 * 48,
        )

    def make(task: str = "embed", kernel: str = "bucketed", before=None) -> Encoder:
        if kernel not in encoders:
            encoders[kernel] = build(kernel)
        encoder = replace(encoders[kernel], labels=LABELS.get(task, LABELS["classify"]))
        return (
            encoder if before is None else replace(encoder, backend=Around(encoder.backend, before))
        )

    return make


@pytest.fixture
def quiet_runtime(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, threads) -> None:
    """Figures are published where no one else looks; one thread is enough for tiny models."""
    monkeypatch.setenv("PACKHORSE_RUNTIME", str(tmp_path / "runtime"))
    threads(1)
