"""The interface between a task and a model of any library: texts in, an array out, a row per text.

Rows are vectors or logits, as the task needs. A text may have a role in its task; the reader
decides which prompt the model puts before texts of that role.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Literal, Protocol

import numpy as np

from packhorse.runtime.encoder import Encoder, Progress
from packhorse.runtime.precision import quantize_singly
from packhorse.tokens.tokenizer import Text

Role = Literal["query", "document"]
# The names that sentence-transformers tries for each role, in this order.
PROMPTS: dict[str, tuple[str, ...]] = {
    "query": ("query",),
    "document": ("document", "passage", "corpus"),
}


class TextReader(Protocol):
    """Turns texts into rows of numbers, float32 [n, width]."""

    def __call__(
        self, texts: Sequence[Text], role: Role | None = None, progress: Progress | None = None
    ) -> np.ndarray: ...


def prompt_of(role: Role | None, prompts: Mapping[str, str]) -> str | None:
    """Return the name of the prompt for a role; None means the model's default, if any."""
    return next((name for name in PROMPTS.get(role or "", ()) if name in prompts), None)


def reader(encoder: Encoder, head: str, max_length: int | None = None) -> TextReader:
    """Return a reader of an encoder's vectors (embed) or logits (classify)."""
    return partial({"embed": _vectors, "classify": _logits}[head], encoder, max_length)


def quantized(read: TextReader, precision: str, ranges: np.ndarray | None = None) -> TextReader:
    """Return a reader of the same vectors in fewer bytes, as numbers that an index compares.

    Bytes are numbers as they are, and bits -1 or 1, whose cosines order texts as their Hamming
    distances do.
    """

    def read_quantized(
        texts: Sequence[Text], role: Role | None = None, progress: Progress | None = None
    ) -> np.ndarray:
        vectors = read(texts, role, progress)
        rows = quantize_singly(vectors, precision, ranges)
        if precision in ("binary", "ubinary"):
            bits = np.unpackbits(rows.view(np.uint8), axis=1, count=vectors.shape[1])
            return np.where(bits, np.float32(1), np.float32(-1))
        return rows.astype(np.float32)

    return read_quantized


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
