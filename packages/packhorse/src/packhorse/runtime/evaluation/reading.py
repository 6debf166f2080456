"""What a task asks of a model, whosever it is: texts in, an array out, a row a text.

Rows are vectors or logits, as the task needs them. A text may have a role in its task; what a model
puts before texts of that role is the reader's business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Literal, Protocol

import numpy as np

from packhorse.runtime.encoder import Encoder, Progress
from packhorse.tokens import Text

Role = Literal["query", "document"]
# As sentence-transformers looks for them.
PROMPTS: dict[str, tuple[str, ...]] = {
    "query": ("query",),
    "document": ("document", "passage", "corpus"),
}


class Read(Protocol):
    """Turns texts into rows of numbers, float32 [n, width]."""

    def __call__(
        self, texts: Sequence[Text], role: Role | None = None, progress: Progress | None = None
    ) -> np.ndarray: ...


def prompt_of(role: Role | None, prompts: Mapping[str, str]) -> str | None:
    """The name of the prompt for the role; None: the model's default, if it has one."""
    return next((name for name in PROMPTS.get(role or "", ()) if name in prompts), None)


def reader(encoder: Encoder, head: str, max_length: int | None = None) -> Read:
    """The vectors (embed) or the logits (classify) of an encoder."""
    return partial({"embed": _vectors, "classify": _logits}[head], encoder, max_length)


def _vectors(
    encoder: Encoder,
    max_length: int | None,
    texts: Sequence[Text],
    role: Role | None = None,
    progress: Progress | None = None,
) -> np.ndarray:
    prompt = prompt_of(role, encoder.prompts)
    return encoder.embed(texts, prompt=prompt, max_length=max_length, progress=progress)


def _logits(
    encoder: Encoder,
    max_length: int | None,
    texts: Sequence[Text],
    role: Role | None = None,
    progress: Progress | None = None,
) -> np.ndarray:
    sequences = encoder.tokenize(texts, max_length)
    return np.stack([row for (row,) in encoder.run(sequences, "classify", progress=progress)])
