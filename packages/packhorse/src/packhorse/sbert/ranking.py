"""`packhorse.CrossEncoder`: a score per pair of texts, with the arguments of sentence-transformers.

Names, order and defaults of the arguments are those of sentence-transformers 6.2
(https://www.sbert.net), and so are the results: logits after the activation that the model's folder
names, which may be replaced for a call or for good.
"""

# torch leaves some of its functions untyped (from_numpy …).
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from packhorse.errors import InputError
from packhorse.json_types import is_object
from packhorse.runtime.encoder import Encoder
from packhorse.runtime.sentences import progress_bar
from packhorse.sbert.arguments import log_ignored, rename_argument
from packhorse.sbert.model_parts import ModelPart
from packhorse.sbert.packed_model import PackedModel, as_list
from packhorse.tokens.chat_template import ChatTemplate
from packhorse.tokens.tokenizer import Encoding

logger = logging.getLogger(__name__)

Activation = Callable[[Tensor], Tensor]
OLDER_NAMES = {
    "model_name": "model_name_or_path",
    "cache_dir": "cache_folder",
    "automodel_args": "model_kwargs",
    "config_args": "config_kwargs",
    "tokenizer_args": "processor_kwargs",
    "tokenizer_kwargs": "processor_kwargs",
    "default_activation_function": "activation_fn",
}


class CrossEncoder(PackedModel):
    """A model that scores pairs of texts, computed packed, without sentence-transformers.

    The arguments are those of its class of this name; those without a meaning here are accepted and
    logged once as ignored. To train one, use that library's class with `packhorse.accelerate`.
    """

    model_type: ClassVar[str] = "CrossEncoder"
    processor_options: ClassVar[tuple[str, ...]] = ("model_max_length", "chat_template")

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
        num_labels: int | None = None,
        max_length: int | None = None,
        activation_fn: Activation | None = None,
        keep_in_fp32_modules: Sequence[str] | None = None,
        **older: Any,
    ) -> None:
        self._wanted_labels = num_labels
        model_name_or_path = _former_argument(older, "model_name", model_name_or_path)
        cache_folder = _former_argument(older, "cache_dir", cache_folder)
        model_kwargs = _former_argument(older, "automodel_args", model_kwargs)
        config_kwargs = _former_argument(older, "config_args", config_kwargs)
        processor_kwargs = _former_argument(older, "tokenizer_args", processor_kwargs)
        processor_kwargs = _former_argument(older, "tokenizer_kwargs", processor_kwargs)
        activation_fn = _former_argument(older, "default_activation_function", activation_fn)
        dropout = older.pop("classifier_dropout", None)
        if dropout is not None:
            logger.warning(
                "the `classifier_dropout` argument is deprecated, and nothing is dropped where "
                "nothing is trained"
            )
        if older:
            raise TypeError(f"CrossEncoder takes no argument {', '.join(older)}")
        if keep_in_fp32_modules:
            log_ignored("keep_in_fp32_modules", "a model computes in one number format here")
        self.chat_template: Any = (processor_kwargs or {}).get("chat_template")
        self.processing_kwargs: dict[str, Any] = {}  # of every call, as `chat_template` for options
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
            processor_kwargs=processor_kwargs,
            config_kwargs=config_kwargs,
            model_card_data=model_card_data,
            backend=backend,
        )
        if max_length is not None:
            self.max_length = max_length
        if dropout is not None:
            self._config["classifier_dropout"] = dropout
        named = getattr(nn, self._open().score_activation, nn.Identity)
        self.activation_fn: Activation = activation_fn or named()

    @property
    def default_activation_function(self) -> Activation:
        """What comes after the logits: an older name of `activation_fn`."""
        message = (
            "The `default_activation_function` property was renamed and is now deprecated: read "
            "`activation_fn`"
        )
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return self.activation_fn

    @property
    def model(self) -> ModelPart:
        """The transformer, of which only the configuration can be read."""
        return self[0]

    @property
    def processor(self) -> Processor:
        """The tokenizer, with the chat template, which may be set."""
        return Processor(self)

    def _check(self, encoder: Encoder) -> None:
        if "classify" not in encoder.heads:
            raise InputError(
                f"{encoder.name} scores no pairs (it has: {', '.join(encoder.heads)}); use a model "
                "with a trained classification head"
            )
        if self._wanted_labels not in (None, len(encoder.labels)):
            raise InputError(
                f"{encoder.name} has {len(encoder.labels)} labels, not {self._wanted_labels}; "
                "leave out num_labels"
            )

    def _base_prompts(self) -> dict[str, str]:
        return {}

    def _saved_settings(self) -> dict[str, Any]:
        kind = type(self.activation_fn)
        return super()._saved_settings() | {"activation_fn": f"{kind.__module__}.{kind.__name__}"}

    @property
    def num_labels(self) -> int:
        """How many scores a pair gets."""
        return len(self._open().labels)

    @property
    def config(self) -> Any:
        """The settings of `config.json`, as attributes."""
        return self[0].config

    @property
    def max_length(self) -> int:
        """How many tokens a pair may have; assign to change it."""
        return self.max_seq_length

    @max_length.setter
    def max_length(self, value: int) -> None:
        self.max_seq_length = value

    def is_singular_input(self, inputs: Any) -> bool:
        """Return whether the input is a single pair."""
        if isinstance(inputs, np.ndarray):
            return inputs.size > 0 and inputs.ndim < 2
        return bool(inputs) and isinstance(inputs[0], str)

    def predict(
        self,
        inputs: Any = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
        activation_fn: Activation | None = None,
        apply_softmax: bool | None = False,
        convert_to_numpy: bool = True,
        convert_to_tensor: bool = False,
        device: str | torch.device | Sequence[str | torch.device] | None = None,
        pool: dict[str, Any] | None = None,
        chunk_size: int | None = None,
        *,
        sentences: Any = None,
        activation_fct: Activation | None = None,
        num_workers: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return the score of a pair, or an array for a list; of several labels, a row per pair.

        `activation_fn` takes the place of the model's for this call. With `convert_to_tensor` the
        result is a tensor, without `convert_to_numpy` a list of tensors. A list of devices, or a
        `pool` of `start_multi_process_pool`, computes in several processes.
        """
        inputs = rename_argument("sentences", sentences, "inputs", inputs)
        activation_fn = rename_argument(
            "activation_fct", activation_fct, "activation_fn", activation_fn
        )
        if num_workers is not None:
            log_ignored("num_workers", "texts are tokenized by all cores")
        self._check_call(batch_size, kwargs)
        single = self.is_singular_input(inputs)
        pairs = as_list(inputs)
        options = {
            "prompt": self._resolve_prompt(prompt, prompt_name),
            "show_progress_bar": bool(show_progress_bar),
            "activation_fn": activation_fn or self.activation_fn,
            "apply_softmax": bool(apply_softmax),
            **kwargs,
        }
        results = self._distribute([pairs] if single else pairs, pool, device, chunk_size, options)
        scores = results if isinstance(results, Tensor) else torch.tensor([])
        if convert_to_tensor:
            converted: Any = scores.to(self.device)
        else:
            converted = scores.cpu().numpy() if convert_to_numpy else list(scores)
        return converted[0] if single else converted

    def rank(
        self,
        query: str,
        documents: Sequence[str],
        top_k: int | None = None,
        return_documents: bool = False,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
        activation_fn: Activation | None = None,
        device: str | torch.device | Sequence[str | torch.device] | None = None,
        pool: dict[str, Any] | None = None,
        chunk_size: int | None = None,
        **kwargs: Any,
    ) -> list[dict[str, Any]]:
        """Return index and score of each document, best first; its text with `return_documents`."""
        if self.num_labels != 1:
            raise InputError(
                f"CrossEncoder.rank() only works for models with num_labels=1, and this one has "
                f"{self.num_labels}; take the scores of predict()"
            )
        for name in ("convert_to_numpy", "convert_to_tensor", "apply_softmax", "num_workers"):
            if kwargs.pop(name, None) is not None:
                log_ignored(name, "the scores of rank() are floats")
        scores = self.predict(
            [(query, document) for document in documents],
            prompt_name=prompt_name,
            prompt=prompt,
            batch_size=batch_size,
            show_progress_bar=show_progress_bar,
            activation_fn=activation_fn,
            convert_to_tensor=True,
            device=device,
            pool=pool,
            chunk_size=chunk_size,
            **kwargs,
        ).tolist()
        rows: list[dict[str, Any]] = [
            {"corpus_id": number, "score": score} for number, score in enumerate(scores)
        ]
        if return_documents:
            for row in rows:
                row["text"] = documents[row["corpus_id"]]
        return sorted(rows, key=lambda row: row["score"], reverse=True)[:top_k]

    def _encodings(
        self, encoder: Encoder, inputs: list[Any], prompt: str | None, options: Mapping[str, Any]
    ) -> list[Encoding]:
        if self.chat_template is not None:
            named = self.processing_kwargs | (options.get("processing_kwargs") or {})
            template = ChatTemplate(self.chat_template, self._special_tokens())
            chosen: Mapping[str, Any] = named.get("chat_template", {})
            limit = self._limit(encoder, options)
            return template.encode(encoder.tokenizer, inputs, limit, prompt, **chosen)
        for entry in inputs:
            if isinstance(entry, str) or len(entry) != 2:
                raise InputError(f"a CrossEncoder takes pairs of texts, not {entry!r:.80}")
        if encoder.pair_template is None:
            return super()._encodings(encoder, inputs, prompt, options)
        pairs = [((prompt or "") + first, second) for first, second in inputs]
        limit = self._limit(encoder, options)
        return list(encoder.pair_template.encode(encoder.tokenizer, pairs, limit, "truncate"))

    def _inference(
        self,
        inputs: list[Any],
        *,
        prompt: str | None,
        show_progress_bar: bool,
        activation_fn: Activation,
        apply_softmax: bool,
        **others: Any,
    ) -> Any:
        if not inputs:
            return []
        encoder = self._open()
        encodings = self._encodings(encoder, inputs, prompt, others)
        with progress_bar(show_progress_bar) as progress:
            logits = self({"encodings": encodings, "progress": progress})["scores"]  # [n, C]
        scores = activation_fn(logits)
        if self.num_labels == 1 and scores.ndim > 1:
            return scores.squeeze(-1)
        return nn.functional.softmax(scores, dim=1) if apply_softmax else scores

    def forward(self, input: Mapping[str, Any], **_: Any) -> dict[str, Any]:
        """Compute `scores`, the logits, of what `preprocess` returned."""
        rows = self._open().run(self._unpadded(input), "classify", progress=input.get("progress"))
        scores = torch.from_numpy(np.stack([row for (row,) in rows])).to(self.device)
        return {**input, "scores": scores}

    def _special_tokens(self) -> dict[str, str]:
        """Return the spellings of special tokens, which a chat template may use."""
        settings = self._read("tokenizer_config.json")
        spelled = {
            name: token.get("content") if is_object(token) else token
            for name, token in settings.items()
            if name.endswith("_token")
        }
        return {name: token for name, token in spelled.items() if isinstance(token, str)}


class Processor:
    """A model's tokenizer under the name of transformers' processors."""

    def __init__(self, model: CrossEncoder) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        """Return what the tokenizer has."""
        return getattr(self._model.tokenizer, name)

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self._model.tokenizer(*args, **kwargs)

    @property
    def chat_template(self) -> Any:
        """The template in Jinja that makes one text of a pair; may be set, None for none."""
        return self._model.chat_template

    @chat_template.setter
    def chat_template(self, template: Any) -> None:
        self._model.chat_template = template


def _former_argument(options: dict[str, Any], name: str, value: Any) -> Any:
    """Take an argument under its older name out of the options."""
    return rename_argument(name, options.pop(name, None), OLDER_NAMES[name], value)
