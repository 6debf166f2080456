"""`packhorse.SentenceTransformer`: a vector per text, with the arguments of sentence-transformers.

Names, order and defaults of the arguments are those of sentence-transformers 6.2
(https://www.sbert.net), and so are the results. Batches are sized in tokens, so `batch_size` has no
effect, and with `output_value=None` no row is padded.
"""

# torch leaves some of its functions untyped (from_numpy, tolist …).
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from packhorse.errors import InputError
from packhorse.runtime import sentences, tasks
from packhorse.runtime.encoder import Encoder
from packhorse.runtime.precision import PRECISIONS, quantize
from packhorse.runtime.sentences import Vectors, progress_bar, prompt_of_task
from packhorse.sbert.arguments import rename_argument, similarity_name
from packhorse.sbert.packed_model import CHOSEN, PackedModel, as_list
from packhorse.tokens.tokenizer import Encoding

MTEB_ARGUMENTS = ("hf_split", "hf_subset")  # besides the task, and of no use here
OUTPUTS = ("sentence_embedding", "token_embeddings", None)


class SentenceTransformer(PackedModel):
    """A model that makes a vector of each text, computed packed, without sentence-transformers.

    The arguments are those of the class of this name there; those that mean nothing here are
    accepted, and logged once as ignored. To make a model of `modules=`, or to train one, take that
    library's class and `packhorse.accelerate`.
    """

    model_type: ClassVar[str] = "SentenceTransformer"
    organization: ClassVar[str | None] = "sentence-transformers"
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
        use_auth_token: bool | str | None = None,
        model_kwargs: Mapping[str, Any] | None = None,
        processor_kwargs: Mapping[str, Any] | None = None,
        config_kwargs: Mapping[str, Any] | None = None,
        model_card_data: Any = None,
        backend: str = "torch",
        similarity_fn_name: Any = None,
        truncate_dim: int | None = None,
        tokenizer_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
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
            token=rename_argument("use_auth_token", use_auth_token, "token", token),
            model_kwargs=model_kwargs,
            processor_kwargs=rename_argument(
                "tokenizer_kwargs", tokenizer_kwargs, "processor_kwargs", processor_kwargs
            ),
            config_kwargs=config_kwargs,
            model_card_data=model_card_data,
            backend=backend,
        )
        own = self._settings.get("model_type", self.model_type) == self.model_type
        stored = self._settings.get("similarity_fn_name") if own else None
        known = stored if stored in sentences.SIMILARITIES else "cosine"
        self.similarity_fn_name = similarity_fn_name or known
        self.truncate_dim = truncate_dim or self._settings.get("truncate_dim")

    def _check(self, encoder: Encoder) -> None:
        if "embed" not in encoder.heads:
            raise InputError(
                f"{encoder.name} makes no vectors of texts (it has: {', '.join(encoder.heads)}); "
                "use packhorse.CrossEncoder or packhorse.SparseEncoder, or another model"
            )

    def _saved_settings(self) -> dict[str, Any]:
        return super()._saved_settings() | {"similarity_fn_name": self.similarity_fn_name}

    @property
    def similarity_fn_name(self) -> str:
        """How vectors are compared: "cosine", "dot", "euclidean" or "manhattan"; may be set."""
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
        output_value: str | None = "sentence_embedding",
        precision: str | None = "float32",
        convert_to_numpy: bool = True,
        convert_to_tensor: bool = False,
        device: str | torch.device | Sequence[str | torch.device] | None = None,
        normalize_embeddings: bool = False,
        truncate_dim: int | None = None,
        pool: dict[str, Any] | None = None,
        chunk_size: int | None = None,
        *,
        sentences: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Return a vector for a text, an array [n, width] for a list.

        `prompt` goes before each text, `prompt_name` names one of the model's. Vectors are cut to
        `truncate_dim` numbers, then normalized if `normalize_embeddings`, then made bytes or bits
        by `precision`. With `convert_to_tensor` the result is a tensor, without `convert_to_numpy`
        a list of tensors. `output_value="token_embeddings"` gives hidden states, None a dictionary
        of all there is of a text. A list of devices, or a `pool` of `start_multi_process_pool`,
        computes in several processes. `processing_kwargs={"text": {"max_length": n}}` cuts texts
        in this call only.
        """
        inputs = rename_argument("sentences", sentences, "inputs", inputs)
        if (task := kwargs.pop("task_metadata", None)) is not None:
            # MTEB's runner: batches of texts, and a task whose name or type may have a prompt.
            inputs = [text for batch in inputs for text in batch["text"]]
            kind = kwargs.pop("prompt_type", None)
            prompt_name = prompt_name or prompt_of_task(self.prompts, task, kind)
            kwargs = {name: kwargs[name] for name in kwargs if name not in MTEB_ARGUMENTS}
        self._check_call(batch_size, kwargs)
        if output_value not in OUTPUTS:
            raise InputError(f"output_value is {output_value!r}; use one of {OUTPUTS}")
        if precision is not None and precision not in PRECISIONS:
            raise InputError(
                f"Precision {precision!r} is not supported; use one of {', '.join(PRECISIONS)}"
            )
        single = self.is_singular_input(inputs)
        texts = [inputs] if single else as_list(inputs)
        options = {
            "prompt": self._resolve_prompt(prompt, prompt_name),
            "show_progress_bar": bool(show_progress_bar),
            "output_value": output_value,
            "normalize_embeddings": normalize_embeddings,
            "truncate_dim": self.truncate_dim if truncate_dim is None else truncate_dim,
            **kwargs,
        }
        results = self._distribute(texts, pool, device, chunk_size, options)
        if output_value != "sentence_embedding":
            return results[0] if single else list(results)
        vectors = results.cpu() if isinstance(results, Tensor) else torch.tensor([])
        if precision not in (None, "float32") and len(vectors):
            vectors = torch.from_numpy(quantize(vectors.float().numpy(), precision))
        if convert_to_tensor:
            converted: Any = vectors.to(self.device)
        elif convert_to_numpy:  # which has no bfloat16
            converted = (vectors.float() if vectors.dtype == torch.bfloat16 else vectors).numpy()
        else:
            converted = list(vectors)
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
        """Encode queries: `encode` with the prompt "query", if there is one."""
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
        """Encode documents: `encode` with the prompt "document", "passage" or "corpus"."""
        inputs = rename_argument("sentences", sentences, "inputs", inputs)
        if prompt_name is None and prompt is None:
            names = ("document", "passage", "corpus")
            prompt_name = next((name for name in names if name in self.prompts), None)
        return self.encode(
            inputs=inputs, prompt_name=prompt_name, prompt=prompt, task="document", **options
        )

    def encode_multi_process(
        self, sentences: Sequence[str], pool: dict[str, Any], **options: Any
    ) -> np.ndarray:
        """Encode in a pool: an older name of `encode(…, pool=pool)`."""
        return self.encode(sentences, pool=pool, **options)

    def similarity(self, embeddings1: Vectors, embeddings2: Vectors) -> Tensor:
        """Return the similarity of all first to all second vectors, [n1, n2]."""
        return sentences.similarity(self, embeddings1, embeddings2)  # type: ignore[arg-type]

    def similarity_pairwise(self, embeddings1: Vectors, embeddings2: Vectors) -> Tensor:
        """Return the similarity of the vectors of each pair, [n]."""
        return sentences.similarity_pairwise(self, embeddings1, embeddings2)  # type: ignore[arg-type]

    def get_embedding_dimension(self) -> int:
        """Return the numbers per vector."""
        width = self._open().width
        return min(width, self.truncate_dim or width)

    def get_sentence_embedding_dimension(self) -> int:
        """Return the numbers per vector: an older name of `get_embedding_dimension`."""
        return self.get_embedding_dimension()

    @contextmanager
    def truncate_embeddings(self, truncate_dim: int | None) -> Generator[None]:
        """Within this context cut vectors to so many numbers."""
        before = self.truncate_dim
        self.truncate_dim = truncate_dim
        try:
            yield
        finally:
            self.truncate_dim = before

    truncate_sentence_embeddings = truncate_embeddings

    def set_pooling_include_prompt(self, include_prompt: bool) -> None:
        """Say whether the tokens of a prompt are pooled with those of the text."""
        self._include_prompt = include_prompt

    @property
    def mteb_model_meta(self) -> Any:
        """What MTEB's runner stores results under."""
        described = replace(self._open(), prompts=self.prompts, truncate_dim=self.truncate_dim)
        return described.mteb_model_meta

    def _inference(
        self,
        inputs: list[Any],
        *,
        prompt: str | None,
        show_progress_bar: bool,
        output_value: str | None,
        normalize_embeddings: bool,
        truncate_dim: int | None,
        **others: Any,
    ) -> Any:
        encoder = self._open()
        limit = self._limit(encoder, others)
        if output_value == "sentence_embedding":
            if not inputs:
                return []
            with progress_bar(show_progress_bar) as progress:
                features = {"inputs": inputs, "prompt": prompt, "options": others}
                vectors = self(features | {"progress": progress})["sentence_embedding"]
            vectors = vectors[:, :truncate_dim]
            if not normalize_embeddings:
                return vectors
            return normalize(vectors.float(), dim=1).to(vectors.dtype)
        encodings = self._encodings(encoder, inputs, prompt, others)
        heads = ("hidden",) if output_value else ("hidden", "embed")
        with progress_bar(show_progress_bar) as progress:
            rows = encoder.run(encodings, *heads, progress=progress)
        states = [self._converted(row[0]) for row in rows]
        if output_value:
            return states
        results: list[dict[str, Any]] = []
        for encoding, row, tokens in zip(encodings, rows, states, strict=True):
            features = {name: column[0] for name, column in self._features([encoding]).items()}
            features["token_embeddings"] = tokens
            vector = self._converted(row[1][:truncate_dim])
            results.append({**features, "sentence_embedding": vector})
            results[-1]["modality"] = "text"
            if prompt:
                (alone,) = encoder.tokenizer.encode([prompt], limit)
                results[-1]["prompt_length"] = len(alone) - int(alone.special[-1])
        return results

    def forward(self, input: Mapping[str, Any], **_: Any) -> dict[str, Any]:
        """Compute `sentence_embedding`, the vectors, of what `preprocess` returned."""
        encoder = self._open()
        progress = input.get("progress")
        if "inputs" in input:  # of `_inference`: texts have a quicker way
            inputs, prompt, options = (input[key] for key in ("inputs", "prompt", "options"))
            vectors = self._vectors(encoder, inputs, prompt, options, progress)
        else:
            rows = encoder.run(self._unpadded(input), "embed", progress=progress)
            vectors = np.stack([vector for (vector,) in rows])
        return {**input, "sentence_embedding": self._converted(vectors)}

    def _converted(self, numbers: np.ndarray) -> Tensor:
        return torch.from_numpy(numbers).to(self.device, self._result_dtype)

    def _encodings(
        self, encoder: Encoder, inputs: list[Any], prompt: str | None, options: Mapping[str, Any]
    ) -> list[Encoding]:
        encodings = super()._encodings(encoder, inputs, prompt, options)
        excluded = tasks.excluded_tokens(encoder, prompt, encoder.max_length)
        return [replace(row, prompt_length=excluded) for row in encodings]

    def _vectors(
        self,
        encoder: Encoder,
        inputs: list[Any],
        prompt: str | None,
        options: Mapping[str, Any],
        progress: tasks.Progress | None,
    ) -> np.ndarray:
        if all(isinstance(entry, str) for entry in inputs):
            name = None
            if prompt:
                encoder = replace(encoder, prompts={CHOSEN: prompt})
                name = CHOSEN
            limit = self._limit(encoder, options)
            return encoder.embed(
                inputs, prompt=name, max_length=limit, long="truncate", progress=progress
            )
        encodings = self._encodings(encoder, inputs, prompt, options)
        return np.stack(
            [vector for (vector,) in encoder.run(encodings, "embed", progress=progress)]
        )
