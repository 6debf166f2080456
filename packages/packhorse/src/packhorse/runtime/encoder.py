"""The Encoder: texts in, results out, in batches without padding and in the caller's order.

`load` opens a model and decides once where and how it runs; the `Encoder` it returns shows that in
its repr. The encoder never waits and has no queue: it runs all its inputs at once. There is one
method per task of `runtime.tasks`; `prepare` and a job's `finish` are its two ends, which the
runner uses without the middle. `encode` and what belongs to it are in `sentences`, for code that
was written for sentence-transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import numpy as np
import torch
from torch import Tensor

from packhorse import device, results
from packhorse.checkpoint import fingerprint
from packhorse.checkpoint.fingerprint import Fingerprint
from packhorse.data.tables import as_texts
from packhorse.errors import InputError
from packhorse.exports import renamed_attribute
from packhorse.model.heads import Embed
from packhorse.model.retrieval import MultiSettings, SparseSettings
from packhorse.packing.batch import Packed
from packhorse.results import (
    Aggregation,
    Answer,
    Classified,
    Entity,
    Filled,
    Hidden,
    Ranked,
    SparseVector,
    csr,
)
from packhorse.runtime import batches, bulk, cores, sentences, tasks
from packhorse.runtime.batches import LaunchedBatch
from packhorse.runtime.precision import Precision, check_precision, quantize
from packhorse.runtime.tasks import InferenceJob, Long, Row, Scoring, TaskInput
from packhorse.runtime.tasks import Progress as Progress
from packhorse.runtime.tasks import TruncationWarning as TruncationWarning
from packhorse.tokens.pair_template import PairTemplate
from packhorse.tokens.tokenizer import Encoding, Text, Tokenizer

if TYPE_CHECKING:
    from scipy.sparse import csr_array  # pyright: ignore[reportMissingTypeStubs]

TOKENS_PER_BATCH = {"cpu": 4096, "cuda": 32768}  # by device type
OUTPUTS = ("embed", "sparse", "multi")  # that `Encoder.outputs` can return together


def _are_equal(first: Sequence[Encoding], second: Sequence[Encoding]) -> bool:
    """Return whether these run as the same tokens, of which the same are attended to and pooled."""
    return len(first) == len(second) and all(
        np.array_equal(a.ids, b.ids)
        and (a.key_length, a.prompt_length) == (b.key_length, b.prompt_length)
        for a, b in zip(first, second, strict=True)
    )


class Backend(Protocol):
    """Runs the model: torch, or another runtime that takes the same layout."""

    def __call__(
        self, packed: Packed, heads: Sequence[str], at: Tensor | None = None
    ) -> Sequence[Tensor]: ...


@dataclass(frozen=True)
class Encoder:
    """A loaded model. Every method takes a list of any size and returns results in its order."""

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
    reason: str  # why this device, dtype and kernel were chosen
    capacity: int = 0  # tokens per row, for kernels that need rows
    budget: int = 4096  # tokens per batch
    side_by_side: bool = False  # groups of cores may run parts of a batch (`runtime.cores`)
    embedder: Embed | None = None  # the head that makes vectors; None: the graph does
    sparse_settings: SparseSettings | None = None
    multi_settings: MultiSettings | None = None
    similarity_fn_name: str = "cosine"
    truncate_dim: int | None = None  # vectors are cut to this many numbers
    score_activation: str = "Sigmoid"  # what `rerank` puts after its logits, a class of torch
    pair_template: PairTemplate | None = None  # what a reranker has around a pair
    # Of weights and configuration; empty if the encoder was not opened by `load`.
    digests: dict[str, str] = field(default_factory=dict[str, str], repr=False)
    # The same model with adapters in it, by name; see `adapted`.
    adapters: Mapping[str, Encoder] = field(default_factory=dict[str, "Encoder"], repr=False)
    warned: set[str] = field(default_factory=set[str], repr=False, compare=False)  # see `sentences`

    # The interface of sentence-transformers, and what MTEB's runner needs besides.
    encode = sentences.encode
    """Vectors of texts, with the options and results of sentence-transformers' `encode`."""
    encode_query = sentences.encode_query
    """`encode` with the model's prompt for queries."""
    encode_document = sentences.encode_document
    """`encode` with the model's prompt for documents."""
    similarity = sentences.similarity
    """Scores of every vector with every other, by the model's similarity function."""
    similarity_pairwise = sentences.similarity_pairwise
    """Scores of vectors pair by pair, by the model's similarity function."""
    get_embedding_dimension = sentences.embedding_dimension
    """Numbers per vector."""
    get_sentence_embedding_dimension = sentences.embedding_dimension
    mteb_model_meta = property(sentences.mteb_model_meta)

    why = renamed_attribute("why", "reason")

    @property
    def max_seq_length(self) -> int:
        """The length limit in tokens, under the name that sentence-transformers uses."""
        return self.max_length

    @property
    def fingerprint(self) -> str:
        """Sixteen hexadecimal digits, equal for models that give the same vectors.

        They stand for weights, configuration, tokenizer, length limit, pooling, default prompt,
        dtype and Packhorse's minor version, and depend neither on the format of the files nor on
        the machine. Store them with the vectors; `fingerprint_parts` shows what differs.
        """
        return str(self.fingerprint_parts())

    def fingerprint_parts(
        self,
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        max_length: int | None = None,
    ) -> Fingerprint:
        """Return the parts of the fingerprint; `str` of them is the fingerprint.

        `prompt_name`, `prompt` (a text; "" for none) and `max_length` are those that texts are
        encoded with, as for `encode`; by default the model's own.
        """
        if not self.digests:
            raise InputError(
                f"{self.name} was not opened by packhorse.load, so its weights have no fingerprint"
            )
        if prompt is None:
            known = replace(self, prompts={**sentences.BUILT_IN_PROMPTS, **self.prompts})
            prompt = tasks.prompt_text(known, prompt_name) or ""
        return fingerprint.make(
            **self.digests,
            tokenizer=self.tokenizer,
            max_length=tasks.length_limit(self, max_length),
            embedder=self.embedder,
            truncate_dim=self.truncate_dim,
            prompt=prompt,
            dtype=self.dtype,
        )

    def __repr__(self) -> str:
        dtype = device.dtype_name(self.dtype)
        place = f"{device.describe(self.device)}, {dtype}, {self.kernel}"
        return f"Encoder({self.name}: {place}; heads: {', '.join(self.heads)})"

    def adapted(self, name: str) -> Encoder:
        """Return the encoder with the adapter of this name, of those that `load` was given."""
        if name not in self.adapters:
            known = ", ".join(self.adapters) or "none; pass adapters={name: folder} to load"
            raise InputError(f"{self.name} has no adapter {name!r}; there are: {known}")
        return self.adapters[name]

    def __reduce__(self) -> NoReturn:
        """Refuse: weights that were prepared for this processor cannot be copied."""
        raise TypeError(
            "an Encoder cannot be pickled or copied; load it where it is needed, "
            f"packhorse.load(…), or share a PackRunner over {self.name} between threads"
        )

    def embed(
        self,
        texts: Sequence[Text],
        *,
        prompt: str | None = None,
        max_length: int | None = None,
        long: Long | None = None,
        normalize: bool | None = None,
        precision: Precision = "float32",
        ranges: np.ndarray | None = None,
        late_chunking: bool = False,
        progress: Progress | None = None,
        normalise: bool | None = None,
    ) -> np.ndarray:
        """Return one vector per text, [n, width] of float32, or in fewer bytes.

        `prompt` names one of the model's prompts; without it the model's default goes before each
        text, if it has one. `long` says what to do with a text that is too long (see
        `runtime.tasks`). Vectors are normalized if the model does that, unless `normalize` is set.
        `normalise` is its old name. `precision` and `ranges` are those of `runtime.quantize`. With
        `late_chunking` the texts are chunks of one text, which the model reads as a whole, so that
        each vector knows its neighbors; together they must fit the model's length. A model with
        `truncate_dim` cuts its vectors as sentence-transformers does: after the model's own
        normalization, and before that of `normalize=True`.
        """
        check_precision(precision)
        texts = as_texts(texts)
        if not late_chunking and normalise is None and bulk.serves(self, texts, long):
            vectors = bulk.embed(
                self,
                texts,
                prompt=prompt,
                max_length=max_length,
                normalize=normalize,
                warn=long is None,
                progress=progress,
            )
            return vectors if precision == "float32" else quantize(vectors, precision, ranges)
        jobs = self.prepare(
            "embed",
            texts,
            prompt=prompt,
            max_length=max_length,
            long=long,
            normalize=normalize,
            normalise=normalise,
            late_chunking=late_chunking,
        )
        rows = self._finish(jobs, progress)
        if not rows:
            vectors = np.empty((0, sentences.embedding_dimension(self)), np.float32)
        else:
            vectors = rows[0] if late_chunking else np.stack(rows)
        return vectors if precision == "float32" else quantize(vectors, precision, ranges)

    def hidden(
        self,
        texts: Sequence[Text],
        *,
        prompt: str | None = None,
        max_length: int | None = None,
        long: Long | None = None,
        progress: Progress | None = None,
    ) -> list[Hidden]:
        """Return the last layer's states of each text, and the pooled output if there is one.

        A prompt goes before the texts only if it is named here.
        """
        jobs = self.prepare("hidden", texts, prompt=prompt, max_length=max_length, long=long)
        return self._finish(jobs, progress)

    def sparse(
        self,
        texts: Sequence[Text],
        *,
        query: bool = False,
        prompt: str | None = None,
        top_k: int | None = None,
        max_length: int | None = None,
        long: Long | None = None,
        progress: Progress | None = None,
    ) -> csr_array:
        """Return the weights of words in each text, [n, words of the vocabulary], as scipy's CSR.

        `words` names them. `query` says that the texts are queries, which some models read in
        another way, and takes the model's prompt of that name; `prompt` names another. `top_k`
        keeps the heaviest words of each text. Of a text in chunks a word has its largest weight.
        """
        texts = as_texts(texts)
        settings = self.sparse_settings
        has_model = settings is not None and not (query and settings.query_weights is not None)
        if has_model and bulk.serves(self, texts, long):
            return bulk.sparse(
                self,
                texts,
                query=query,
                prompt=prompt,
                top_k=top_k,
                max_length=max_length,
                warn=long is None,
                progress=progress,
            )
        jobs = self.prepare(
            "sparse",
            texts,
            query=query,
            prompt=prompt,
            top_k=top_k,
            max_length=max_length,
            long=long,
        )
        vectors: list[SparseVector] = self._finish(jobs, progress)
        return csr(vectors, self.sparse_settings.width if self.sparse_settings else 0)

    def words(self, vectors: csr_array, top_k: int | None = None) -> list[dict[str, float]]:
        """Return the words of each row of `sparse` with their weights, the heaviest first."""
        rows: list[dict[str, float]] = []
        for row in results.vectors_of(vectors):
            order = np.argsort(-row.weights, kind="stable")[:top_k]
            vector = SparseVector(row.indices[order], row.weights[order])
            names = results.words(vector, self.tokenizer)
            rows.append(dict(zip(names, vector.weights.tolist(), strict=True)))
        return rows

    def multi(
        self,
        texts: Sequence[str],
        *,
        query: bool = False,
        prompt: str | None = None,
        max_length: int | None = None,
        long: Long | None = None,
        progress: Progress | None = None,
    ) -> list[np.ndarray]:
        """Return one vector per token of each text, [tokens, width] of float32 each.

        `query` says that the texts are queries: those of a ColBERT are marked and filled up with
        mask tokens, and documents are without punctuation. `results.maxsim` compares both.
        """
        texts = as_texts(texts)
        settings = self.multi_settings
        side = settings and (settings.query if query else settings.document)
        is_plain = side is not None and side.filler is None
        if is_plain and self.tokenizer.starts_special and bulk.serves(self, texts, long):
            return bulk.multi(
                self,
                texts,
                query=query,
                prompt=prompt,
                max_length=max_length,
                warn=long is None,
                progress=progress,
            )
        jobs = self.prepare(
            "multi", texts, query=query, prompt=prompt, max_length=max_length, long=long
        )
        return self._finish(jobs, progress)

    def outputs(
        self,
        texts: Sequence[str],
        names: Sequence[str] = ("embed", "sparse", "multi"),
        *,
        query: bool = False,
        prompt: str | None = None,
        max_length: int | None = None,
        long: Long | None = None,
        progress: Progress | None = None,
    ) -> dict[str, Any]:
        """Return several outputs of each text from one pass of the model, by name of the task.

        Each is what the method of that name returns (`embed`, `sparse`, `multi`), and `query` is
        theirs. `prompt` is for all; without it that of queries or of documents, if there is one.
        Outputs for which texts become other tokens, as a model that marks its queries needs them,
        take a pass of their own.
        """
        unknown = [name for name in names if name not in OUTPUTS]
        if unknown:
            raise InputError(f"there is no output {unknown[0]!r}; there are {', '.join(OUTPUTS)}")
        options: dict[str, Any] = {"max_length": max_length, "long": long}
        side = "query" if query else "document"
        prompt = side if prompt is None and side in self.prompts else prompt
        jobs: dict[str, list[InferenceJob]] = {}
        for name in names:
            others = {} if name == "embed" else {"query": query}
            jobs[name] = self.prepare(name, texts, prompt=prompt, **options, **others)
            options["long"] = long or "truncate"  # one warning is enough
        outputs: dict[str, Any] = {}
        for name, answers in self._finish_together(jobs, progress).items():
            if name == "embed":
                width = sentences.embedding_dimension(self)
                answers = np.stack(answers) if answers else np.empty((0, width), np.float32)
            elif name == "sparse":
                answers = csr(answers, self.sparse_settings.width if self.sparse_settings else 0)
            outputs[name] = answers
        return outputs

    def classify(
        self,
        texts: Sequence[Text],
        *,
        max_length: int | None = None,
        long: Long | None = None,
        problem: str | None = None,
        progress: Progress | None = None,
    ) -> list[Classified]:
        """Return the label of each text or pair, with the scores of all labels.

        `problem` says how logits become scores, if not as the model's configuration says; see
        `results.classified`.
        """
        texts = as_texts(texts)
        if bulk.serves(self, texts, long, pairs=True):
            logits = bulk.logits(
                self,
                texts,
                "classify",
                max_length=max_length,
                warn=long is None,
                progress=progress,
            )
            return results.classified_rows(logits, self.labels, problem or self.problem)
        jobs = self.prepare("classify", texts, max_length=max_length, long=long, problem=problem)
        return self._finish(jobs, progress)

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_k: int | None = None,
        max_length: int | None = None,
        long: Long | None = None,
        raw: bool = False,
        progress: Progress | None = None,
    ) -> list[Ranked]:
        """Return the documents by how well they answer the query, best first.

        Scores are those of sentence-transformers' CrossEncoder: logits after the activation that
        the model's folder names, by default a sigmoid. With `raw` they are the logits.
        """
        documents = as_texts(documents)
        pairs = [(query, document) for document in documents]
        if "classify" in self.heads and bulk.serves(self, pairs, long, pairs=True):
            tasks.check_one_label(self)
            logits = bulk.logits(
                self,
                pairs,
                "rerank",
                max_length=max_length,
                warn=long is None,
                progress=progress,
            )
            return tasks.ranking(self, logits[:, 0].astype(np.float64), documents, top_k, raw)
        jobs = self.prepare(
            "rerank",
            [query],
            documents=documents,
            top_k=top_k,
            max_length=max_length,
            long=long,
            raw=raw,
        )
        return self._finish(jobs, progress)[0]

    def answer(
        self,
        pairs: Sequence[tuple[str, str]],
        *,
        top_k: int = 1,
        max_length: int | None = None,
        stride: int | None = None,
        max_answer_tokens: int = 30,
        no_answer: float | None = None,
        scoring: Scoring = "joint",
        align_to_words: bool = True,
        progress: Progress | None = None,
    ) -> list[list[Answer]]:
        """Return the best spans for each (question, context), of at most `max_answer_tokens`.

        Long contexts are read in windows that share `stride` tokens, by default a quarter. An empty
        answer comes first where "no answer" scores higher than the best span by more than
        `no_answer`; by default there is always an answer. `scoring="pipeline"` gives the spans and
        scores of transformers' pipeline, which has other defaults (max_length=384, stride=128,
        max_answer_tokens=15): each window scores by itself, spans are widened to whole words unless
        `align_to_words` is false, and any `no_answer` makes "no answer" one of the candidates.
        """
        jobs = self.prepare(
            "answer",
            pairs,
            top_k=top_k,
            max_length=max_length,
            stride=stride,
            max_answer_tokens=max_answer_tokens,
            no_answer=no_answer,
            scoring=scoring,
            align_to_words=align_to_words,
        )
        return self._finish(jobs, progress)

    def fill(
        self,
        texts: Sequence[str],
        *,
        top_k: int = 5,
        max_length: int | None = None,
        long: Long | None = None,
        targets: Sequence[str] | None = None,
        decoded: bool = False,
        progress: Progress | None = None,
    ) -> list[list[list[Filled]]]:
        """Return the likeliest words for each mask of each text, of all words or of `targets`.

        With `decoded` a text with a word in it is decoded from its tokens, as in transformers'
        pipeline, which loses capitals and blanks; by default it is the text as it was written.
        """
        jobs = self.prepare(
            "fill",
            texts,
            top_k=top_k,
            max_length=max_length,
            long=long,
            targets=targets,
            decoded=decoded,
        )
        return self._finish(jobs, progress)

    def label(
        self,
        texts: Sequence[str],
        *,
        max_length: int | None = None,
        long: Long | None = None,
        aggregation: Aggregation = "simple",
        stride: int | None = None,
        progress: Progress | None = None,
    ) -> list[list[Entity]]:
        """Return the labeled spans of each text (names, places …).

        `aggregation` says how labels of tokens become those of spans: "none", "simple", "first",
        "average" or "max", as in transformers; see `results.entities`. With `stride` a long text is
        read in windows that share so many tokens, and what two windows find is one span, as in
        transformers; offsets are those of the text.
        """
        jobs = self.prepare(
            "label",
            texts,
            max_length=max_length,
            long=long,
            aggregation=aggregation,
            stride=stride,
        )
        return self._finish(jobs, progress)

    def prepare(self, task: str, texts: Sequence[TaskInput], **options: Any) -> list[InferenceJob]:
        """Return one job per text: all that can be done, and refused, before the model runs.

        `options` are those of the task's method; `rerank` takes queries as its texts. Tasks that do
        not need the text itself also take token ids, as they are.
        """
        return tasks.prepare(self, task, texts, **options)

    def tokenize(self, texts: Sequence[TaskInput], max_length: int | None = None) -> list[Encoding]:
        """Return the sequences as they would run; warn if texts had to be cut."""
        return tasks.tokenize(self, texts, max_length)

    def launch(
        self, packed: Packed, heads: tuple[str, ...], only: int | None = None
    ) -> LaunchedBatch:
        """Hand a batch to the device; an accelerator computes while the caller goes on, and so do
        groups of cores.

        With `only`, per-token heads run on the tokens with this id alone.
        """
        if self.side_by_side and (parts := cores.launch(self.backend, packed, heads, only)):
            indices = None if only is None else (packed.ids == only).nonzero().flatten()
            return LaunchedBatch(packed, heads, (), indices, parts=parts)
        if only is None:
            outputs = self.backend(packed, heads, None)
            return LaunchedBatch(packed, heads, outputs, None).copy_to_host()
        indices = (packed.ids == only).nonzero().flatten()
        outputs = self.backend(packed, heads, indices.to(self.device))
        return LaunchedBatch(packed, heads, outputs, indices).copy_to_host()

    def run(
        self,
        sequences: Sequence[Encoding],
        *heads: str,
        only: int | None = None,
        progress: Progress | None = None,
    ) -> list[Row]:
        """Run heads over all sequences, batch by batch; return one row per sequence, in order.

        With `only`, per-token heads run on the tokens with this id alone.
        """
        outputs: list[Row] = [()] * len(sequences)
        finished = 0
        for indices, rows in self._batch_by_batch(sequences, heads, only):
            for index, row in zip(indices, rows, strict=True):
                outputs[index] = tasks.compact(heads, row)
            finished += len(indices)
            if progress is not None:
                progress(finished, len(sequences))
        return outputs

    def _batch_by_batch(
        self, sequences: Sequence[Encoding], heads: tuple[str, ...], only: int | None
    ) -> Iterator[tuple[list[int], Iterator[Row]]]:
        """Yield the indices and results of each batch.

        Results are read one batch late, after the next was launched: an accelerator never waits.
        """
        previous: tuple[list[int], LaunchedBatch] | None = None
        most = bulk.MOST_SPARSE if "sparse" in heads else 0
        lengths = [len(sequence) for sequence in sequences]
        for selected in batches.by_tokens(lengths, self.budget, most):
            indices: list[int] = selected.tolist()
            packed = batches.lay([sequences[i] for i in indices], self.capacity)
            batch = self.launch(packed, heads, only)
            if previous is not None:
                yield previous[0], previous[1].rows()
            previous = indices, batch
        if previous is not None:
            yield previous[0], previous[1].rows()

    def _finish_together(
        self, jobs: Mapping[str, Sequence[InferenceJob]], progress: Progress | None
    ) -> dict[str, list[Any]]:
        """Run jobs of several tasks, one pass for all tasks whose sequences are the same."""
        passes: list[tuple[list[Encoding], list[str]]] = []
        for name, group in jobs.items():
            sequences = [sequence for job in group for sequence in job.sequences]
            for first, names in passes:
                if _are_equal(first, sequences):
                    names.append(name)
                    break
            else:
                passes.append((sequences, [name]))
        answers: dict[str, list[Any]] = {}
        for sequences, names in passes:
            heads = tuple(
                dict.fromkeys(head for n in names for job in jobs[n][:1] for head in job.heads)
            )
            rows = self.run(sequences, *heads, progress=progress)
            for name in names:
                columns = [heads.index(head) for job in jobs[name][:1] for head in job.heads]
                job_rows = iter([tuple(row[column] for column in columns) for row in rows])
                answers[name] = [
                    job.finish(list(islice(job_rows, len(job.sequences)))) for job in jobs[name]
                ]
        return {name: answers[name] for name in jobs}

    def _finish(self, jobs: Sequence[InferenceJob], progress: Progress | None) -> list[Any]:
        """Run jobs of one task and return their answers."""
        if not jobs:
            return []
        sequences = [sequence for job in jobs for sequence in job.sequences]
        rows = iter(self.run(sequences, *jobs[0].heads, only=jobs[0].only, progress=progress))
        return [job.finish(list(islice(rows, len(job.sequences)))) for job in jobs]
