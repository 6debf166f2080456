"""Texts in, results out: batches by token budget, no padding, the caller's order kept.

`load` opens a model and decides once where and how it runs; the `Encoder` it returns shows that in
its repr. The encoder never waits and owns no queue: it takes all it is given, at once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from packhorse import device, results
from packhorse.errors import CheckpointError, InputError
from packhorse.packing.batch import Packed
from packhorse.results import Answer, Classified, Entity, Filled, Hidden, Ranked
from packhorse.runtime import batches
from packhorse.tokens import Encoding, Text, Tokenizer

Progress = Callable[[int, int], None]  # sequences done, sequences in all

TOKENS_A_BATCH = {"cpu": 4096, "cuda": 32768}
PER_TOKEN = ("hidden", "span", "tokens", "mlm")  # the other heads answer once a sequence


class TruncationWarning(UserWarning):
    """Texts were cut to the model's length."""


class Backend(Protocol):
    """What runs the model: torch, or another runtime over the same layout."""

    def __call__(
        self, packed: Packed, heads: Sequence[str], at: Tensor | None = None
    ) -> Sequence[Tensor]: ...


@dataclass(frozen=True)
class Encoder:
    """A loaded model. Every method takes a list of any size and keeps its order."""

    name: str
    tokenizer: Tokenizer
    backend: Backend
    heads: tuple[str, ...]
    width: int  # of a vector
    labels: tuple[str, ...]
    problem: str
    prompts: dict[str, str]
    default_prompt: str | None
    max_length: int
    device: torch.device
    dtype: torch.dtype
    kernel: str
    why: str  # how device, dtype and kernel were chosen
    capacity: int = 0  # tokens a row, for kernels that need rows
    budget: int = 4096  # tokens a batch

    def __repr__(self) -> str:
        how = f"{device.describe(self.device)}, {device.dtype_name(self.dtype)}, {self.kernel}"
        return f"Encoder({self.name}: {how}; heads: {', '.join(self.heads)})"

    def embed(
        self,
        texts: Sequence[Text],
        *,
        prompt: str | None = None,
        max_length: int | None = None,
        progress: Progress | None = None,
    ) -> np.ndarray:
        """One vector a text, float32 [n, width].

        `prompt` names one of the model's prompts; without it the model's default goes before each
        text, if it has one.
        """
        self._need("embed")
        encodings = self.encode(self._prompted(texts, prompt), max_length)
        rows = self.run(encodings, "embed", progress=progress)
        return np.stack([row for (row,) in rows]) if rows else np.empty((0, self.width), np.float32)

    def hidden(
        self,
        texts: Sequence[Text],
        *,
        max_length: int | None = None,
        progress: Progress | None = None,
    ) -> list[Hidden]:
        """The last layer's states of each text, and the pooled output where the model has one."""
        encodings = self.encode(texts, max_length)
        heads = ("hidden", "pooled") if "pooled" in self.heads else ("hidden",)
        rows = self.run(encodings, *heads, progress=progress)
        words = [tuple(map(self.tokenizer.token, e.ids.tolist())) for e in encodings]
        return [
            Hidden(states, pooled[0] if pooled else None, tokens)
            for (states, *pooled), tokens in zip(rows, words, strict=True)
        ]

    def classify(
        self,
        texts: Sequence[Text],
        *,
        max_length: int | None = None,
        progress: Progress | None = None,
    ) -> list[Classified]:
        """The label of each text or pair, with the scores of all labels."""
        self._need("classify")
        rows = self.run(self.encode(texts, max_length), "classify", progress=progress)
        return [results.classified(row, self.labels, self.problem) for (row,) in rows]

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_k: int | None = None,
        max_length: int | None = None,
        progress: Progress | None = None,
    ) -> list[Ranked]:
        """The documents by how well they answer the query, best first; scores are logits."""
        self._need("classify")
        if len(self.labels) != 1:
            raise CheckpointError(
                f"reranking needs a head with one output; {self.name} classifies into "
                f"{len(self.labels)} labels"
            )
        encodings = self.encode([(query, document) for document in documents], max_length)
        rows = self.run(encodings, "classify", progress=progress)
        return results.ranked(np.array([row[0] for (row,) in rows]), documents, top_k)

    def answer(
        self,
        pairs: Sequence[tuple[str, str]],
        *,
        top_k: int = 1,
        max_length: int | None = None,
        stride: int | None = None,
        progress: Progress | None = None,
    ) -> list[list[Answer]]:
        """The best spans for each (question, context).

        Long contexts are read in windows that share `stride` tokens, by default a quarter.
        """
        self._need("span")
        windows = self.tokenizer.windows(pairs, self._limit(max_length), stride)
        flat = [window for group in windows for window in group]
        rows = iter(self.run(flat, "span", progress=progress))
        return [
            results.answers([next(rows)[0] for _ in group], group, context, top_k)
            for group, (_, context) in zip(windows, pairs, strict=True)
        ]

    def fill(
        self,
        texts: Sequence[str],
        *,
        top_k: int = 5,
        max_length: int | None = None,
        progress: Progress | None = None,
    ) -> list[list[list[Filled]]]:
        """For each text and each mask in it, the likeliest words."""
        self._need("mlm")
        encodings = self.encode(texts, max_length)
        for i, encoding in enumerate(encodings):
            if self.tokenizer.mask_id not in encoding.ids:
                mask = self.tokenizer.token(self.tokenizer.mask_id or 0)
                cut = " within the model's length" if encoding.truncated else ""
                raise InputError(f"text {i} has no {mask} to fill{cut}")
        rows = self.run(encodings, "mlm", only=self.tokenizer.mask_id, progress=progress)
        return [
            results.filled(row, encoding, text, self.tokenizer, top_k)
            for (row,), encoding, text in zip(rows, encodings, texts, strict=True)
        ]

    def label(
        self,
        texts: Sequence[str],
        *,
        max_length: int | None = None,
        progress: Progress | None = None,
    ) -> list[list[Entity]]:
        """Labelled stretches of each text (names, places …)."""
        self._need("tokens")
        encodings = self.encode(texts, max_length)
        rows = self.run(encodings, "tokens", progress=progress)
        return [
            results.entities(row, encoding, text, self.labels)
            for (row,), encoding, text in zip(rows, encodings, texts, strict=True)
        ]

    def encode(self, texts: Sequence[Text], max_length: int | None = None) -> list[Encoding]:
        """Tokenize; warns when texts had to be cut."""
        limit = self._limit(max_length)
        encodings = self.tokenizer.encode(texts, limit)
        cut = sum(bool(e.truncated) for e in encodings)
        if cut:
            message = f"{cut} of {len(encodings)} texts were cut to {limit} tokens"
            warnings.warn(message, TruncationWarning, stacklevel=3)
        return encodings

    def run(
        self,
        sequences: Sequence[Encoding],
        *heads: str,
        only: int | None = None,
        progress: Progress | None = None,
    ) -> list[tuple[np.ndarray, ...]]:
        """Run heads over all sequences, batch by batch: an array a head for each, in their order.

        With `only`, heads of tokens see and answer for the tokens of this id alone.
        """
        out: list[tuple[np.ndarray, ...]] = [()] * len(sequences)
        done = 0
        for batch, rows in self._batch_by_batch(sequences, heads, only):
            for index, row in zip(batch, rows, strict=True):
                out[index] = row
            done += len(batch)
            if progress is not None:
                progress(done, len(sequences))
        return out

    def _batch_by_batch(
        self, sequences: Sequence[Encoding], heads: tuple[str, ...], only: int | None
    ) -> Iterator[tuple[list[int], Iterator[tuple[np.ndarray, ...]]]]:
        """Batches and their results, one batch behind: an accelerator is never kept waiting."""
        ahead: tuple[list[int], Batch] | None = None
        for indices in batches.by_tokens([len(s) for s in sequences], self.budget):
            packed = batches.lay([sequences[i] for i in indices], self.capacity)
            at = None if only is None else (packed.ids == only).nonzero().flatten()
            found = self.backend(packed, heads, None if at is None else at.to(self.device))
            if ahead is not None:
                yield ahead[0], ahead[1].rows()
            ahead = indices, Batch(packed, heads, found, at)
        if ahead is not None:
            yield ahead[0], ahead[1].rows()

    def _need(self, head: str) -> None:
        if head not in self.heads:
            have = ", ".join(self.heads) or "none"
            raise CheckpointError(
                f"{self.name} has no {head!r} head (it has: {have}); "
                "load a checkpoint that was trained for this task"
            )

    def _limit(self, max_length: int | None) -> int:
        if max_length is None or max_length <= 0:
            return self.max_length
        if max_length > self.max_length:
            raise InputError(
                f"max_length is {max_length}, but {self.name} takes {self.max_length} tokens"
            )
        return max_length

    def _prompted(self, texts: Sequence[Text], prompt: str | None) -> Sequence[Text]:
        prompt = self.default_prompt if prompt is None else prompt
        if prompt is None:
            return texts
        if prompt not in self.prompts:
            known = ", ".join(self.prompts) or "none"
            raise InputError(f"{self.name} has no prompt {prompt!r}; it has: {known}")
        if not all(isinstance(text, str) for text in texts):
            raise InputError("a prompt goes before single texts, not before pairs")
        return [self.prompts[prompt] + str(text) for text in texts]


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch that was handed to the device, and the tensors that will hold its results."""

    packed: Packed
    heads: tuple[str, ...]
    found: Sequence[Tensor]
    at: Tensor | None

    def rows(self) -> Iterator[tuple[np.ndarray, ...]]:
        """Wait, and give each of the caller's sequences its array of every head."""
        return zip(*map(self._column, self.heads, self.found), strict=True)

    def _column(self, head: str, found: Tensor) -> list[np.ndarray]:
        host = found.float().cpu()
        if head in PER_TOKEN:
            return [piece.numpy().copy() for piece in self.packed.split(host, self.at)]
        return list(self.packed.pick(host).numpy())
