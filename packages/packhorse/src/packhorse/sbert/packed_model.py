"""What `SentenceTransformer`, `CrossEncoder` and `SparseEncoder` share: a folder and its settings.

Weights of an `Encoder` are prepared for one device and number format and cannot change. So these
objects remember the folder and the settings, and open the encoder again after `to` or `half`. That
makes copies cheap (they share the encoder) and pickles small (a path and settings; the process that
unpickles one reads the weights itself). Everything else, such as prompts and `max_seq_length`, is a
plain attribute that each call reads.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import copy
import logging
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, ClassVar, Self, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from packhorse import device as devices
from packhorse.checkpoint import files, sentence
from packhorse.errors import InputError
from packhorse.model.model import Model
from packhorse.runtime.encoder import Encoder
from packhorse.runtime.loading import load
from packhorse.sbert import arguments, pools, saving
from packhorse.sbert.hub_tokenizer import HubTokenizer
from packhorse.sbert.model_parts import ModelPart, parts_of
from packhorse.tokens.tokenizer import Encoding, Tokenizer

logger = logging.getLogger(__name__)

Hook = Callable[[Any, tuple[Any, ...], Any], Any]  # as torch's: model, inputs, output
CHOSEN = "chosen"  # the name under which the encoder gets a prompt
CALL_EXTRAS = {"task", "processing_kwargs"}  # arguments that every model takes


class PackedModel(ABC):
    """A folder of a model, the settings of its user, and the encoder once it is needed."""

    model_type: ClassVar[str]
    organization: ClassVar[str | None] = None  # of names without one
    processor_options: ClassVar[tuple[str, ...]] = ("model_max_length",)

    def __new__(cls, *args: Any, modules: Any = None, **options: Any) -> Any:
        """Make a model of a folder; of modules, which are the library's, its own class of model."""
        if modules is None:
            return super().__new__(cls)
        return arguments.of_modules(cls.model_type, modules, options)

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
    ) -> None:
        options = model_kwargs or {}
        processor = processor_kwargs or {}
        arguments.log_ignored_options(
            backend,
            options,
            processor,
            config_kwargs or {},
            trust_remote_code,
            self.processor_options,
        )
        self.model_card_data = model_card_data or SimpleNamespace()
        self._trusted = trust_remote_code
        self._source = arguments.locate(
            model_name_or_path,
            organization=self.organization,
            revision=revision,
            cache_folder=cache_folder,
            token=token,
            local_files_only=local_files_only,
        )
        self._device = devices.choose_device(device)
        self._settings = self._read(sentence.SETTINGS)
        self._config = self._read("config.json")
        folder_dtype = self._config.get("dtype") or self._config.get("torch_dtype")
        self._dtype = arguments.dtype_of(options, folder_dtype, self._device)
        self._max_length: int | None = processor.get("model_max_length")
        self._tokenizer: Tokenizer | None = None  # one that was assigned
        self._tokenizer_view: HubTokenizer | None = None
        self._include_prompt: bool | None = None
        self._encoder: Encoder | None = None
        self._hooks: OrderedDict[int, Hook] = OrderedDict()
        inherits = self._settings.get("model_type", self.model_type) == self.model_type
        stored, default = sentence.prompts(self._settings if inherits else {})
        self.prompts: dict[str, str] = self._base_prompts() | stored | dict(prompts or {})
        self.default_prompt_name = default_prompt_name or default
        if self.default_prompt_name is not None and self.default_prompt_name not in self.prompts:
            raise InputError(
                f"Default prompt name {self.default_prompt_name!r} not found in the configured "
                f"prompts dictionary with keys {list(self.prompts)}."
            )
        self._open()  # so that a folder that cannot be used is refused here

    @abstractmethod
    def _inference(self, inputs: list[Any], **options: Any) -> Any:
        """Compute a list of inputs in this process."""

    @abstractmethod
    def forward(self, input: Mapping[str, Any], **options: Any) -> dict[str, Any]:
        """Compute what `preprocess` returned."""

    @abstractmethod
    def _check(self, encoder: Encoder) -> None:
        """Raise if a model of this kind has no such encoder."""

    def _base_prompts(self) -> dict[str, str]:
        return {"query": "", "document": ""}

    def _saved_settings(self) -> dict[str, Any]:
        return {
            "model_type": self.model_type,
            "prompts": self.prompts,
            "default_prompt_name": self.default_prompt_name,
        }

    def _read(self, name: str) -> dict[str, Any]:
        folder = self._source if self._source.is_dir() else self._source.parent
        return files.read_object(folder, name, optional=True)

    # The encoder, and what it depends on.

    def _open(self) -> Encoder:
        if self._encoder is None:
            encoder = load(self._source, device=self._device, dtype=self._dtype)
            self._check(encoder)
            changes: dict[str, Any] = {"default_prompt": None, "truncate_dim": None}
            if self._tokenizer is not None:
                changes["tokenizer"] = self._tokenizer
            self._encoder = replace(encoder, **changes)
        encoder = self._encoder
        if self._max_length is not None:
            length = min(self._max_length, _positions(encoder))
            # A capacity of 0 means that batches have no rows.
            capacity = max(length, encoder.capacity) if encoder.capacity else 0
            encoder = replace(encoder, max_length=length, capacity=capacity)
        if self._include_prompt is not None and encoder.embedder is not None:
            embedder = copy.copy(encoder.embedder)
            embedder.include_prompt = self._include_prompt
            encoder = replace(encoder, embedder=embedder)
        return encoder

    @property
    def encoder(self) -> Encoder:
        """The `Encoder` that computes, with all of its methods."""
        return self._open()

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return self._device

    @property
    def dtype(self) -> torch.dtype:
        """The number format that the model computes in."""
        return self._dtype

    @property
    def _result_dtype(self) -> torch.dtype:
        """The number format of vectors, as of a module of torch; they are computed in float32."""
        return self._dtype if self._dtype.is_floating_point else torch.float32

    @property
    def max_seq_length(self) -> int:
        """How many tokens a text may have; assign to change it, up to the model's positions."""
        return self._open().max_length

    @max_seq_length.setter
    def max_seq_length(self, value: int) -> None:
        self._max_length = value
        self._tokenizer_view = None

    def get_max_seq_length(self) -> int:
        """Return how many tokens a text may have."""
        return self.max_seq_length

    @property
    def tokenizer(self) -> Any:
        """The tokenizer; may be replaced by one of Packhorse, or a fast one of transformers."""
        if self._tokenizer_view is None:
            self._tokenizer_view = HubTokenizer(self._open().tokenizer, self.max_seq_length)
        return self._tokenizer_view

    @tokenizer.setter
    def tokenizer(self, tokenizer: Any) -> None:
        if isinstance(tokenizer, HubTokenizer):
            tokenizer = tokenizer._tokenizer
        if not isinstance(tokenizer, Tokenizer):
            with TemporaryDirectory() as folder:
                tokenizer.save_pretrained(folder)
                tokenizer = Tokenizer.load(Path(folder))
        if tokenizer.vocab_size > int(self._config.get("vocab_size", tokenizer.vocab_size)):
            raise InputError(
                f"the tokenizer has {tokenizer.vocab_size} tokens and the model knows "
                f"{self._config['vocab_size']}; use one that it was trained with"
            )
        self._tokenizer = tokenizer
        self._tokenizer_view = None
        self._encoder = replace(self._open(), tokenizer=tokenizer)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Compute on another device, or in another number format, from the next call on."""
        for value in [*args, *kwargs.values()]:
            if isinstance(value, torch.dtype):
                self._change(dtype=value)
            elif isinstance(value, str | torch.device | int) and not isinstance(value, bool):
                name = f"cuda:{value}" if isinstance(value, int) else value
                self._change(device=devices.choose_device(name))
        return self

    def _change(self, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Self:
        if device not in (None, self._device) or dtype not in (None, self._dtype):
            self._device = device or self._device
            self._dtype = dtype or self._dtype
            self._encoder = None
        return self

    def cpu(self) -> Self:
        """Compute on the CPU."""
        return self.to("cpu")

    def cuda(self, device: int | None = None) -> Self:
        """Compute on a GPU."""
        return self.to("cuda" if device is None else f"cuda:{device}")

    def half(self) -> Self:
        """Compute in float16."""
        return self._change(dtype=torch.float16)

    def bfloat16(self) -> Self:
        """Compute in bfloat16."""
        return self._change(dtype=torch.bfloat16)

    def float(self) -> Self:
        """Compute in float32."""
        return self._change(dtype=torch.float32)

    def eval(self) -> Self:
        """Return the model, which only ever computes and is never trained."""
        return self

    @property
    def training(self) -> bool:
        """Always false."""
        return False

    def train(self, mode: bool = True) -> Self:
        """Refuse: to train, take the library's own model, accelerated."""
        if mode:
            raise InputError(
                f"packhorse.{self.model_type} cannot be trained; train sentence-transformers' own, "
                "which packhorse.accelerate makes as fast"
            )
        return self

    # The modules that the folder describes.

    def _parts(self) -> list[ModelPart]:
        return parts_of(self)

    def __len__(self) -> int:
        return len(self._parts())

    def __iter__(self) -> Iterator[ModelPart]:
        return iter(self._parts())

    def __getitem__(self, index: int) -> ModelPart:
        return self._parts()[index]

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the weights, as they lie prepared for this device."""
        model = getattr(self._open().backend, "model", None)
        if isinstance(model, nn.Module):
            yield from model.parameters()

    def get_model_kwargs(self) -> list[str]:
        """Return the further arguments that the model's modules take: none."""
        return []

    # Tokens.

    def preprocess(
        self, inputs: Sequence[Any], prompt: str | None = None, **options: Any
    ) -> dict[str, Tensor]:
        """Return the token ids, types and mask of texts, as rows of one length."""
        texts = [inputs] if isinstance(inputs, str) else list(inputs)
        encodings = self._encodings(self._open(), texts, prompt, options)
        return self._features(encodings)

    def tokenize(self, texts: Sequence[Any]) -> dict[str, Tensor]:
        """Return the token ids, types and mask of texts, as rows of one length."""
        return self.preprocess(texts)

    def _features(self, encodings: Sequence[Encoding]) -> dict[str, Tensor]:
        columns = cast("HubTokenizer", self.tokenizer).columns(encodings, padded=True)
        return {name: torch.tensor(values) for name, values in columns.items()}

    def _encodings(
        self, encoder: Encoder, inputs: list[Any], prompt: str | None, options: Mapping[str, Any]
    ) -> list[Encoding]:
        """Return the sequences of texts or pairs, cut to the length that the user set."""
        return encoder.tokenizer.encode(
            [_with_prompt(entry, prompt) for entry in inputs], self._limit(encoder, options)
        )

    def _limit(self, encoder: Encoder, options: Mapping[str, Any]) -> int:
        limit = encoder.max_length
        if self._tokenizer_view is not None:
            limit = min(limit, self._tokenizer_view.model_max_length)
        arguments_of_call: Mapping[str, Any] = options.get("processing_kwargs") or {}
        of_texts: Mapping[str, Any] = arguments_of_call.get("text", {})
        if of_texts.get("max_length") is not None:
            limit = min(limit, int(of_texts["max_length"]))
        return limit

    # What a module of torch is called by.

    def __call__(self, input: Mapping[str, Any], **options: Any) -> dict[str, Any]:
        """Run `forward`, and then the hooks, each of which may replace its result."""
        output = self.forward(input, **options)
        for hook in tuple(self._hooks.values()):
            replaced = hook(self, (input,), output)
            output = output if replaced is None else replaced
        return output

    def register_forward_hook(self, hook: Hook) -> RemovableHandle:
        """Have a function called with the model, its features and its result."""
        handle = RemovableHandle(self._hooks)
        self._hooks[handle.id] = hook
        return handle

    def _unpadded(self, features: Mapping[str, Any]) -> list[Encoding]:
        """Return the sequences of `features`: as `_inference` gives them, or of padded rows."""
        if "encodings" in features:
            return features["encodings"]
        ids = features["input_ids"]
        mask = features.get("attention_mask", torch.ones_like(ids)).bool()
        types = features.get("token_type_ids", torch.zeros_like(ids))
        rows: list[Encoding] = []
        for row, kept, kinds in zip(ids, mask, types, strict=True):
            tokens = row[kept].cpu().numpy().astype(np.int32)
            size = len(tokens)
            rows.append(
                Encoding(
                    tokens,
                    kinds[kept].cpu().numpy().astype(np.uint8),
                    np.zeros((size, 2), np.int32),
                    np.zeros(size, bool),
                    (slice(0, size),),
                )
            )
        return rows

    # What calls have in common.

    def _resolve_prompt(self, prompt: str | None, prompt_name: str | None) -> str | None:
        """Return the text that goes before the inputs, if any."""
        if prompt is not None:
            if prompt_name is not None:
                logger.warning("prompt and prompt_name were both given; prompt is taken")
            return prompt
        if prompt_name is not None:
            if prompt_name not in self.prompts:
                raise InputError(
                    f"Prompt name {prompt_name!r} not found in the configured prompts dictionary "
                    f"with keys {list(self.prompts)}."
                )
            return self.prompts[prompt_name]
        return self.prompts.get(self.default_prompt_name) if self.default_prompt_name else None

    def _check_call(self, batch_size: int, others: Mapping[str, Any]) -> None:
        if batch_size <= 0:
            raise InputError(f"batch_size must be a positive integer, got {batch_size}.")
        if unknown := sorted(set(others) - CALL_EXTRAS):
            raise InputError(
                f"this {self.model_type} takes no {', '.join(unknown)}; it has no modules with "
                "arguments of their own"
            )

    def _distribute(
        self,
        inputs: list[Any],
        pool: dict[str, Any] | None,
        device: Any,
        chunk_size: int | None,
        options: dict[str, Any],
    ) -> Any:
        """Compute in a pool, in a process per device of a list, or here."""
        if chunk_size is not None and chunk_size <= 0:
            raise InputError(f"chunk_size must be a positive integer, got {chunk_size}.")
        if pool is None and not isinstance(device, list | tuple):
            if device is not None:
                self.to(device)
            return self._inference(inputs, **options)
        if not inputs:
            return []
        temporary = pool is None
        pool = self.start_multi_process_pool(cast("Any", device)) if pool is None else pool
        try:
            return pools.compute(pool, inputs, chunk_size, options)
        finally:
            if temporary:
                self.stop_multi_process_pool(pool)

    def start_multi_process_pool(
        self, target_devices: Sequence[str | torch.device] | None = None
    ) -> dict[str, Any]:
        """Start a process per device, for `encode(pool=)` or `predict(pool=)`; return the pool.

        By default there is one process per GPU, or two on the CPU, which share its cores. A pool
        is faster where there are several GPUs. On a CPU it is not: one process uses all cores.
        """
        return pools.start(self, target_devices)

    @staticmethod
    def stop_multi_process_pool(pool: dict[str, Any]) -> None:
        """End the processes of a pool."""
        pools.stop(pool)

    # Copies and files.

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a copy with settings of its own; both share the encoder, which cannot change."""
        new = copy.copy(self)
        memo[id(self)] = new
        for name, value in vars(self).items():
            if name not in ("_encoder", "_tokenizer"):
                setattr(new, name, copy.deepcopy(value, memo))
        return new

    def __copy__(self) -> Self:
        new = object.__new__(type(self))
        vars(new).update(vars(self))
        return new

    def __getstate__(self) -> dict[str, Any]:
        """Return the folder and the settings; the weights are read again where they arrive."""
        state = dict(vars(self))
        state["_encoder"] = None
        state["_hooks"] = OrderedDict()
        state["_tokenizer_view"] = None
        state["_tokenizer"] = None if self._tokenizer is None else self._tokenizer.to_json()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the model from a pickle."""
        tokenizer = state["_tokenizer"]
        if tokenizer is not None:
            tokenizer = Tokenizer.from_json(tokenizer)
        vars(self).update(state | {"_tokenizer": tokenizer})

    def save_pretrained(
        self,
        path: str | Path | None,
        model_name: str | None = None,
        create_model_card: bool = True,
        train_datasets: Sequence[str] | None = None,
        safe_serialization: bool = True,
    ) -> None:
        """Write a folder that sentence-transformers, transformers and Packhorse load.

        The weights are those of the model's folder, in the number format that the model has now;
        prompts, lengths and the like are as they were set. `create_model_card` writes a README.md
        if the folder has none; the last two arguments have no effect.
        """
        if not safe_serialization:
            arguments.log_ignored("safe_serialization", "weights are written as safetensors")
        if path is None:
            raise InputError("no folder was named")
        saving.save(
            Path(path),
            source=self._source,
            encoder=self._open(),
            settings=self._settings | self._saved_settings(),
            max_length=self._max_length,
            tokenizer=self._tokenizer,
            include_prompt=self._include_prompt,
            card=(model_name or str(path), self.model_type) if create_model_card else None,
        )

    def save(self, path: str | Path, *args: Any, **kwargs: Any) -> None:
        """Do what `save_pretrained` does."""
        self.save_pretrained(path, *args, **kwargs)

    def push_to_hub(
        self,
        repo_id: str,
        token: str | None = None,
        private: bool | None = None,
        safe_serialization: bool = True,
        commit_message: str | None = None,
        local_model_path: str | None = None,
        exist_ok: bool = False,
        replace_model_card: bool = False,
        train_datasets: Sequence[str] | None = None,
        revision: str | None = None,
        create_pr: bool = False,
    ) -> str:
        """Upload what `save_pretrained` writes to the hub; return the address of the commit."""
        return saving.push(
            self.save_pretrained,
            repo_id,
            token=token,
            private=private,
            message=commit_message,
            folder=local_model_path,
            exist_ok=exist_ok or create_pr,
            revision=revision,
            create_pr=create_pr,
        )


def as_list(inputs: Any) -> list[Any]:
    """Return inputs of any kind of list as a list."""
    if isinstance(inputs, np.ndarray):
        return inputs.tolist()
    if isinstance(inputs, str | Mapping) or not isinstance(inputs, Iterable):
        raise InputError(f"a list is expected, not {inputs!r:.80}")
    return list(cast("Iterable[Any]", inputs))


def _positions(encoder: Encoder) -> int:
    """Return how many positions the weights have."""
    model = getattr(encoder.backend, "model", None)
    return model.bert.config.max_positions if isinstance(model, Model) else encoder.max_length


def _with_prompt(entry: Any, prompt: str | None) -> Any:
    if isinstance(entry, list | tuple):
        pair = cast("Sequence[Any]", entry)
        if len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise InputError(f"a pair of texts is expected, not {pair!r:.80}")
        return (prompt or "") + pair[0], pair[1]
    if not isinstance(entry, str):
        raise InputError(f"a text is expected, not {entry!r:.80}")
    return (prompt or "") + entry
