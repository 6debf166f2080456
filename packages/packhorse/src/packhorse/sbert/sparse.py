"""`packhorse.SparseEncoder`: weights of words, with the arguments of sentence-transformers.

Names, order and defaults of the arguments are those of sentence-transformers 6.2
(https://www.sbert.net), and so are the results: sparse tensors of torch, as wide as the vocabulary.
`Encoder.sparse` gives the same as scipy's CSR, which takes less memory.
"""

# torch leaves some of its functions untyped (from_numpy, tolist …).
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor

from packhorse.errors import InputError
from packhorse.results import vectors_of
from packhorse.runtime import sentences
from packhorse.runtime.encoder import Encoder
from packhorse.runtime.sentences import progress_bar
from packhorse.sbert.arguments import rename_argument, similarity_name
from packhorse.sbert.packed_model import CHOSEN, PackedModel, as_list


class SparseEncoder(PackedModel):
    """A model that weighs the words of a text, computed packed, without sentence-transformers.

    The arguments are those of the class of this name there; those that mean nothing here are
    accepted, and logged once as ignored. To train one, take that library's class and
    `packhorse.accelerate`.
    """

    model_type: ClassVar[str] = "SparseEncoder"
    SUPPORTED_SIMILARITY_FN_NAMES: ClassVar[tuple[str, ...]] = sentences.SIMILARITIES

    def __init__(
        self,
        model_name_or_path: str | None = None,
        *,
        modules: Any = None,
        device: str | torch.device | None = None,
        prompts: Mapping[str, str] | None = None,
        default_prompt_name: str | None = None,
        cache_folder: str | None = None,
        trust_remote_code: bool = False,
        revision: str | None = None,
        local_files_only: bool = False,
        token: bool | str | None = None,
        model_kwargs: Mapping[str, Any] | None = None,
        processor_kwargs: Mapping[str, Any] | None = None,
        config_kwargs: Mapping[str, Any] | None = None,
        model_card_data: Any = None,
        backend: str = "torch",
        similarity_fn_name: Any = None,
        max_active_dims: int | None = None,
        tokenizer_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if max_active_dims is not None and (
            type(max_active_dims) is not int or max_active_dims < 1
        ):
            raise InputError(f"max_active_dims must be a positive integer, got {max_active_dims}.")
        super().__init__(
            model_name_or_path,
            modules=modules,
            device=device,
            prompts=prompts,
            default_prompt_name=default_prompt_name,
            cache_folder=cache_folder,
            trust_remote_code=trust_remote_code,
            revision=revision,
            local_files_only=local_files_only,
            token=token,
            model_kwargs=model_kwargs,
            processor_kwargs=rename_argument(
                "tokenizer_kwargs", tokenizer_kwargs, "processor_kwargs", processor_kwargs
            ),
            config_kwargs=config_kwargs,
            model_card_data=model_card_data,
            backend=backend,
        )
        stored = self._settings.get("similarity_fn_name")
        known = stored if stored in sentences.SIMILARITIES else "dot"
        self.similarity_fn_name = similarity_fn_name or known
        self.max_active_dims = max_active_dims

    def _check(self, encoder: Encoder) -> None:
        if encoder.sparse_settings is None:
            raise InputError(
                f"{encoder.name} does not weigh words (it has: {', '.join(encoder.heads)}); use a "
                "model that was trained for sparse vectors"
            )

    def _saved_settings(self) -> dict[str, Any]:
        return super()._saved_settings() | {"similarity_fn_name": self.similarity_fn_name}

    @property
    def similarity_fn_name(self) -> str:
        """How vectors are compared: "dot", "cosine", "euclidean" or "manhattan"; may be set."""
        return self._similarity_fn_name

    @similarity_fn_name.setter
    def similarity_fn_name(self, value: Any) -> None:
        self._similarity_fn_name = similarity_name(value)

    def is_singular_input(self, inputs: Any) -> bool:
        """Return whether the input is a single text."""
        return isinstance(inputs, str)

    def encode(
        self,
        inputs: Any = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
        convert_to_tensor: bool = True,
        convert_to_sparse_tensor: bool = True,
        save_to_cpu: bool = False,
        device: str | torch.device | Sequence[str | torch.device] | None = None,
        max_active_dims: int | None = None,
        pool: dict[str, Any] | None = None,
        chunk_size: int | None = None,
        *,
        sentences: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Return the weights of words in a text, a sparse tensor [n, words] for a list.

        `prompt` goes before each text, `prompt_name` names one of the model's. `max_active_dims`
        keeps so many of the heaviest words. Without `convert_to_tensor` the result is a list of
        rows, without `convert_to_sparse_tensor` it is dense. A list of devices, or a `pool` of
        `start_multi_process_pool`, computes in several processes.
        """
        inputs = rename_argument("sentences", sentences, "inputs", inputs)
        self._check_call(batch_size, kwargs)
        single = self.is_singular_input(inputs)
        texts = [inputs] if single else as_list(inputs)
        options = {
            "prompt": self._resolve_prompt(prompt, prompt_name),
            "show_progress_bar": bool(show_progress_bar),
            "max_active_dims": self.max_active_dims if max_active_dims is None else max_active_dims,
            **kwargs,
        }
        results = self._distribute(texts, pool, device, chunk_size, options)
        if isinstance(results, Tensor):
            vectors = results.cpu() if save_to_cpu else results.to(self.device)
        else:
            vectors = torch.tensor([]).to_sparse()
        if not convert_to_sparse_tensor:
            vectors = vectors.to_dense()
        converted: Any = vectors if convert_to_tensor else list(vectors)
        return converted[0] if single else converted

    def encode_query(
        self,
        inputs: Any = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
        *,
        sentences: Any = None,
        **options: Any,
    ) -> Any:
        """Encode queries: with the prompt "query", and by the model's table, if it has one."""
        inputs = rename_argument("sentences", sentences, "inputs", inputs)
        if prompt_name is None and prompt is None and "query" in self.prompts:
            prompt_name = "query"
        return self.encode(
            inputs=inputs, prompt_name=prompt_name, prompt=prompt, task="query", **options
        )

    def encode_document(
        self,
        inputs: Any = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
        *,
        sentences: Any = None,
        **options: Any,
    ) -> Any:
        """Encode documents: with the prompt "document", "passage" or "corpus"."""
        inputs = rename_argument("sentences", sentences, "inputs", inputs)
        if prompt_name is None and prompt is None:
            names = ("document", "passage", "corpus")
            prompt_name = next((name for name in names if name in self.prompts), None)
        return self.encode(
            inputs=inputs, prompt_name=prompt_name, prompt=prompt, task="document", **options
        )

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Tensor:
        """Return the similarity of all first to all second vectors, dense [n1, n2]."""
        if self.similarity_fn_name == "dot" and _all_sparse(embeddings1, embeddings2):
            first, second = (
                v if v.ndim > 1 else v.unsqueeze(0) for v in (embeddings1, embeddings2)
            )
            return torch.sparse.mm(first, second.t()).to_dense()
        return sentences.similarity(self, _dense(embeddings1), _dense(embeddings2))  # type: ignore[arg-type]

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Tensor:
        """Return the similarity of the vectors of each pair, [n]."""
        return sentences.similarity_pairwise(self, _dense(embeddings1), _dense(embeddings2))  # type: ignore[arg-type]

    def get_embedding_dimension(self) -> int:
        """Return the words of the vocabulary."""
        settings = self._open().sparse_settings
        return settings.width if settings else 0

    def get_sentence_embedding_dimension(self) -> int:
        """Return the words of the vocabulary: an older name of `get_embedding_dimension`."""
        return self.get_embedding_dimension()

    @staticmethod
    def sparsity(embeddings: Tensor) -> dict[str, float]:
        """Return how many words of a vector weigh something, and the share of those that do not."""
        rows = embeddings if embeddings.ndim > 1 else embeddings.unsqueeze(0)
        count = int(rows.to_dense().count_nonzero()) / max(1, len(rows))
        return {"active_dims": count, "sparsity_ratio": 1.0 - count / rows.shape[1]}

    def intersection(self, embeddings_1: Tensor, embeddings_2: Tensor) -> Tensor:
        """Return the products of the weights of words that a query and documents have in common."""
        return (embeddings_1.to_dense() * embeddings_2.to_dense()).to_sparse()

    def decode(self, embeddings: Tensor, top_k: int | None = None) -> Any:
        """Return the words of a vector with their weights, the heaviest first."""
        if not isinstance(embeddings, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"Expected torch.Tensor, got {type(embeddings).__name__}")
        if embeddings.ndim not in (1, 2):
            raise InputError(f"Input tensor must be 1D or 2D, and this has {embeddings.ndim} axes")
        if top_k is not None and top_k < 1:
            raise InputError(f"top_k must be a positive integer, got {top_k}")
        rows = embeddings.to_dense().cpu()
        words = [self._words(row, top_k) for row in (rows if rows.ndim > 1 else rows.unsqueeze(0))]
        return words if embeddings.ndim > 1 else words[0]

    def _words(self, row: Tensor, top_k: int | None) -> list[tuple[str, float]]:
        present = row.nonzero().flatten()
        order = present[row[present].argsort(descending=True, stable=True)][:top_k]
        tokenizer = self._open().tokenizer
        return [(tokenizer.token(int(word)), float(row[word])) for word in order]

    def _inference(
        self,
        inputs: list[Any],
        *,
        prompt: str | None,
        show_progress_bar: bool,
        max_active_dims: int | None,
        **others: Any,
    ) -> Any:
        if not inputs:
            return []
        texts = [tuple(entry) if isinstance(entry, list) else entry for entry in inputs]
        features = {"inputs": texts, "prompt": prompt, "options": others}
        with progress_bar(show_progress_bar) as progress:
            result = self(features | {"max_active_dims": max_active_dims, "progress": progress})
        return result["sentence_embedding"]

    def forward(self, input: Mapping[str, Any], **_: Any) -> dict[str, Any]:
        """Compute `sentence_embedding`, a sparse matrix, of what `preprocess` returned."""
        encoder = self._open()
        options: Mapping[str, Any] = input.get("options", {})
        prompt = input.get("prompt")
        inputs: Any = input.get("inputs")
        if inputs is None:
            inputs = [row.ids.tolist() for row in self._unpadded(input)]
        chosen = {CHOSEN: prompt or "", "query": "", "document": ""}
        rows = vectors_of(
            replace(encoder, prompts=chosen).sparse(
                inputs,
                query=options.get("task") == "query",
                prompt=CHOSEN if prompt else "",
                top_k=input.get("max_active_dims"),
                max_length=self._limit(encoder, options),
                long="truncate",
                progress=input.get("progress"),
            )
        )
        numbers = np.repeat(np.arange(len(rows)), [len(row.indices) for row in rows])
        words = np.concatenate([row.indices for row in rows]).astype(np.int64)
        weights = np.concatenate([row.weights for row in rows])
        matrix = torch.sparse_coo_tensor(
            torch.from_numpy(np.stack([numbers, words])),
            torch.from_numpy(weights).to(self._result_dtype),
            (len(rows), self.get_embedding_dimension()),
            check_invariants=False,
        )
        return {**input, "sentence_embedding": matrix.coalesce()}


def _all_sparse(*vectors: Any) -> bool:
    return all(isinstance(entry, Tensor) and entry.is_sparse for entry in vectors)


def _dense(vectors: Any) -> Any:
    if isinstance(vectors, Tensor):
        return vectors.to_dense()
    if isinstance(vectors, Sequence):
        return [_dense(vector) for vector in cast("Sequence[Any]", vectors)]
    return vectors
