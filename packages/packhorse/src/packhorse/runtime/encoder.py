"""Texts in, results out: batches by token budget, no padding, the caller's order kept.

`load` opens a model and decides once where and how it runs; the `Encoder` it returns shows that in
its repr. The encoder never waits and owns no queue: it takes all it is given, at once. Every task
has two ends, `prepare` (texts to jobs) and a job's `finish` (numbers to the answer), which the
runner uses without the middle. `encode` and its kin are in `sentences`: `embed` for code that was
written for sentence-transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NoReturn, Protocol

import numpy as np
import torch
from torch import Tensor

from packhorse import device
from packhorse.model.heads import Embed
from packhorse.packing.batch import Packed
from packhorse.results import Answer, Classified, Entity, Filled, Hidden, Ranked
from packhorse.runtime import batches, sentences, tasks
from packhorse.runtime.jobs import Batch, Given, Job, Row
from packhorse.runtime.tasks import Long
from packhorse.runtime.tasks import TruncationWarning as TruncationWarning
from packhorse.tokens import Encoding, Text, Tokenizer

Progress = Callable[[int, int], None]  # sequences done, sequences in all

TOKENS_A_BATCH = {"cpu": 4096, "cuda": 32768}


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
    embedder: Embed | None = None  # what makes vectors; None: the graph itself
    similarity_fn_name: str = "cosine"
    truncate_dim: int | None = None  # numbers that `encode` keeps of a vector
    told: set[str] = field(default_factory=set, repr=False, compare=False)  # warnings given

    # The shape of sentence-transformers, and what MTEB's runner asks for besides.
    encode = sentences.encode
    encode_query = sentences.encode_query
    encode_document = sentences.encode_document
    similarity = sentences.similarity
    similarity_pairwise = sentences.similarity_pairwise
    get_embedding_dimension = sentences.embedding_dimension
    get_sentence_embedding_dimension = sentences.embedding_dimension
    mteb_model_meta = property(sentences.mteb_model_meta)

    @property
    def max_seq_length(self) -> int:
        """The longest sequence, under the name that sentence-transformers has for it."""
        return self.max_length

    def __repr__(self) -> str:
        how = f"{device.describe(self.device)}, {device.dtype_name(self.dtype)}, {self.kernel}"
        return f"Encoder({self.name}: {how}; heads: {', '.join(self.heads)})"

    def __reduce__(self) -> NoReturn:
        """Weights that were laid out for this machine's products cannot be copied."""
        raise TypeError(
            "an Encoder is neither pickled nor copied; load it where it is needed, "
            f"packhorse.load(…), or give threads a PackRunner over {self.name}"
        )

    def embed(
        self,
        texts: Sequence[Text],
        *,
        prompt: str | None = None,
        max_length: int | None = None,
        long: Long | None = None,
        normalise: bool | None = None,
        progress: Progress | None = None,
    ) -> np.ndarray:
        """One vector a text, float32 [n, width].

        `prompt` names one of the model's prompts; without it the model's default goes before each
        text, if it has one. `long` is what becomes of a text that is too long (see
        `runtime.tasks`). Vectors are as the model makes them, unless `normalise` says.
        """
        how = {"max_length": max_length, "long": long, "normalise": normalise}
        jobs = self.prepare("embed", texts, prompt=prompt, **how)
        vectors = self._finish(jobs, progress)
        return np.stack(vectors) if vectors else np.empty((0, self.width), np.float32)

    def hidden(
        self,
        texts: Sequence[Text],
        *,
        prompt: str | None = None,
        max_length: int | None = None,
        long: Long | None = None,
        progress: Progress | None = None,
    ) -> list[Hidden]:
        """The last layer's states of each text, and the pooled output where the model has one.

        No prompt but the one that is named goes before the texts.
        """
        how = {"prompt": prompt, "max_length": max_length, "long": long}
        return self._finish(self.prepare("hidden", texts, **how), progress)

    def classify(
        self,
        texts: Sequence[Text],
        *,
        max_length: int | None = None,
        long: Long | None = None,
        problem: str | None = None,
        progress: Progress | None = None,
    ) -> list[Classified]:
        """The label of each text or pair, with the scores of all labels.

        `problem` is what to make of the logits instead of the model's own, see `results`.
        """
        how = {"max_length": max_length, "long": long, "problem": problem}
        return self._finish(self.prepare("classify", texts, **how), progress)

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_k: int | None = None,
        max_length: int | None = None,
        long: Long | None = None,
        progress: Progress | None = None,
    ) -> list[Ranked]:
        """The documents by how well they answer the query, best first; scores are logits."""
        how = {"documents": documents, "top_k": top_k, "max_length": max_length, "long": long}
        return self._finish(self.prepare("rerank", [query], **how), progress)[0]

    def answer(
        self,
        pairs: Sequence[tuple[str, str]],
        *,
        top_k: int = 1,
        max_length: int | None = None,
        stride: int | None = None,
        max_answer_tokens: int = 30,
        no_answer: float | None = None,
        progress: Progress | None = None,
    ) -> list[list[Answer]]:
        """The best spans for each (question, context), of at most `max_answer_tokens`.

        Long contexts are read in windows that share `stride` tokens, by default a quarter. An empty
        answer comes first where having none scores higher than the best span by more than
        `no_answer`; by default there is always an answer.
        """
        how = {"max_length": max_length, "stride": stride, "no_answer": no_answer}
        how |= {"top_k": top_k, "max_answer_tokens": max_answer_tokens}
        return self._finish(self.prepare("answer", pairs, **how), progress)

    def fill(
        self,
        texts: Sequence[str],
        *,
        top_k: int = 5,
        max_length: int | None = None,
        long: Long | None = None,
        targets: Sequence[str] | None = None,
        progress: Progress | None = None,
    ) -> list[list[list[Filled]]]:
        """For each text and each mask in it, the likeliest words, of all or of `targets`."""
        how = {"top_k": top_k, "max_length": max_length, "long": long, "targets": targets}
        return self._finish(self.prepare("fill", texts, **how), progress)

    def label(
        self,
        texts: Sequence[str],
        *,
        max_length: int | None = None,
        long: Long | None = None,
        join: bool = True,
        progress: Progress | None = None,
    ) -> list[list[Entity]]:
        """Labelled stretches of each text (names, places …); without `join`, its tokens."""
        how = {"max_length": max_length, "long": long, "join": join}
        return self._finish(self.prepare("label", texts, **how), progress)

    def prepare(self, task: str, texts: Sequence[Given], **options: Any) -> list[Job]:
        """A job for each text: everything that can be done and refused before the model runs.

        `options` are those of the task's own method; `rerank` takes queries for texts. Where no
        text is asked for, token ids will do: they are taken as they are.
        """
        return tasks.prepare(self, task, texts, **options)

    def tokenize(self, texts: Sequence[Given], max_length: int | None = None) -> list[Encoding]:
        """The sequences as they would run; warns when texts had to be cut."""
        return tasks.tokenize(self, texts, max_length)

    def launch(self, packed: Packed, heads: tuple[str, ...], only: int | None = None) -> Batch:
        """Hand a batch to the device; an accelerator computes while the caller goes on."""
        at = None if only is None else (packed.ids == only).nonzero().flatten()
        found = self.backend(packed, heads, None if at is None else at.to(self.device))
        return Batch(packed, heads, found, at).sent()

    def run(
        self,
        sequences: Sequence[Encoding],
        *heads: str,
        only: int | None = None,
        progress: Progress | None = None,
    ) -> list[Row]:
        """Run heads over all sequences, batch by batch: an array a head for each, in their order.

        With `only`, heads of tokens see and answer for the tokens of this id alone.
        """
        out: list[Row] = [()] * len(sequences)
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
    ) -> Iterator[tuple[list[int], Iterator[Row]]]:
        """Batches and their results, one batch behind: an accelerator is never kept waiting."""
        ahead: tuple[list[int], Batch] | None = None
        for indices in batches.by_tokens([len(s) for s in sequences], self.budget):
            packed = batches.lay([sequences[i] for i in indices], self.capacity)
            batch = self.launch(packed, heads, only)
            if ahead is not None:
                yield ahead[0], ahead[1].rows()
            ahead = indices, batch
        if ahead is not None:
            yield ahead[0], ahead[1].rows()

    def _finish(self, jobs: Sequence[Job], progress: Progress | None) -> list[Any]:
        """Run jobs of one task, and what they make of it."""
        if not jobs:
            return []
        sequences = [sequence for job in jobs for sequence in job.sequences]
        rows = iter(self.run(sequences, *jobs[0].heads, only=jobs[0].only, progress=progress))
        return [job.finish(list(islice(rows, len(job.sequences)))) for job in jobs]
