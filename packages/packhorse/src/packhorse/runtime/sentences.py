"""The interface of sentence-transformers over the packed encoder: `encode`, `similarity` and more.

Code that calls `encode`, `encode_query`, `encode_document` and `similarity` runs unchanged, and so
does MTEB's runner, whose `encode` takes the batches of a task instead of texts. Names and order of
the options are those of sentence-transformers 6.2 (https://www.sbert.net), and so are the vectors;
its quirks are kept where other vectors would not match an index that was built with it. Options
that have no meaning here raise an error, they are never ignored silently.

The functions are methods of `Encoder`, which takes them over as they are. This module knows the
encoder only by the protocol `SentenceModel`.
"""

# torch leaves some of its functions untyped (from_numpy, tolist, split …).
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from packhorse import device as devices
from packhorse.data.tables import as_texts
from packhorse.errors import InputError
from packhorse.progress import progress_display
from packhorse.results import Hidden
from packhorse.runtime.precision import check_precision, quantize
from packhorse.runtime.tasks import Progress, TaskInput, TaskModel

Vectors = np.ndarray | Tensor | Sequence[np.ndarray] | Sequence[Tensor]

BUILT_IN_PROMPTS = {"query": "", "document": ""}  # every model has these, if only empty ones
VALUES = ("sentence_embedding", "token_embeddings")
DISTANCES = {"euclidean": 2.0, "manhattan": 1.0}
SIMILARITIES = ("cosine", "dot", *DISTANCES)
CHOSEN_PROMPT = "chosen"  # the name under which a prompt given as text is passed on


class PromptWarning(UserWarning):
    """A model has prompts, but texts were encoded without one."""


class SentenceModel(TaskModel, Protocol):
    """What these functions need of a model; `Encoder` implements it."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def width(self) -> int: ...
    @property
    def similarity_fn_name(self) -> str: ...
    @property
    def truncate_dim(self) -> int | None: ...
    @property
    def warned(self) -> set[str]: ...
    @property
    def embed(self) -> Callable[..., np.ndarray]: ...
    @property
    def hidden(self) -> Callable[..., list[Hidden]]: ...


def encode(
    self: SentenceModel,
    inputs: str | Iterable[Any] | None = None,
    prompt_name: str | None = None,
    prompt: str | None = None,
    batch_size: int = 32,
    show_progress_bar: bool | None = None,
    output_value: str | None = "sentence_embedding",
    precision: str = "float32",
    convert_to_numpy: bool = True,
    convert_to_tensor: bool = False,
    device: str | torch.device | None = None,
    normalize_embeddings: bool = False,
    truncate_dim: int | None = None,
    pool: None = None,
    chunk_size: None = None,
    *,
    sentences: str | Iterable[Any] | None = None,
    ranges: np.ndarray | None = None,
    task_metadata: Any = None,
    hf_split: str | None = None,
    hf_subset: str | None = None,
    prompt_type: Any = None,
) -> Any:
    """Return a vector for a text, float32 [n, width] for a list, as sentence-transformers does.

    `prompt` is put before each text, `prompt_name` names one of the model's prompts; without both
    the model's default is used, if there is one, and a model that has prompts but no default warns
    once. All models accept the names "query" and "document"; `prompt=""` means no prompt. Vectors
    are first cut to `truncate_dim` numbers, then normalized if `normalize_embeddings`. The result
    is an array, with `convert_to_tensor` a tensor on the model's device, without `convert_to_numpy`
    a list of tensors, and with `output_value="token_embeddings"` a list of hidden states.
    `precision` may be "int8", "uint8", "binary" or "ubinary"; the first two take `ranges` [2, n]
    of `runtime.calibrate`, an option of our own, and without it those of these vectors.

    `batch_size` has no effect: batches are sized in tokens, see `load(budget=)`. Texts that are too
    long are cut without a warning, as there; `embed` warns and has other options. `sentences` is an
    older name of `inputs`. The last four parameters come from MTEB's runner; the task's name, type
    or side choose the prompt.
    """
    width = self.truncate_dim if truncate_dim is None else truncate_dim
    _refuse_numbers(batch_size=batch_size, truncate_dim=width)
    _refuse(self, output_value, precision, device, pool or chunk_size)
    single, texts = _texts(inputs if sentences is None else sentences, task_metadata)
    if task_metadata is not None and prompt is None and prompt_name is None:
        prompt_name = prompt_of_task(self.prompts, task_metadata, prompt_type)
        if prompt_name == "document":
            _warn_of_passage_prompt(self)
    model, name = _with_prompt(self, prompt, prompt_name)
    with progress_bar(bool(show_progress_bar)) as progress:
        options: dict[str, Any] = {"prompt": name, "long": "truncate", "progress": progress}
        if output_value == "token_embeddings":
            outputs = model.hidden(texts, **options)
            states = [torch.from_numpy(output.states).to(self.device) for output in outputs]
            return states[0] if single else states
        whole = replace(model, truncate_dim=None)
        vectors = np.ascontiguousarray(whole.embed(texts, **options)[:, :width])
    if normalize_embeddings:
        vectors = normalize(torch.from_numpy(vectors), dim=1).numpy()
    if precision != "float32":
        vectors = quantize(vectors, precision, ranges)
    if convert_to_numpy and not convert_to_tensor:
        return vectors[0] if single else vectors
    tensor = torch.from_numpy(vectors).to(self.device)
    if single:
        return tensor[0]
    return tensor if convert_to_tensor else list(tensor)


def encode_query(
    self: SentenceModel,
    inputs: str | Iterable[Any] | None = None,
    prompt_name: str | None = None,
    prompt: str | None = None,
    **options: Any,
) -> Any:
    """`encode` with the model's prompt "query", or without one if it has none of that name."""
    if prompt is None and prompt_name is None:
        prompt_name = "query"
    return encode(self, inputs, prompt_name, prompt, **options)


def encode_document(
    self: SentenceModel,
    inputs: str | Iterable[Any] | None = None,
    prompt_name: str | None = None,
    prompt: str | None = None,
    **options: Any,
) -> Any:
    """`encode` with the model's prompt "document", or without one if it has none of that name.

    sentence-transformers ignores a prompt that is called "passage" or "corpus"; so does this, with
    a warning.
    """
    if prompt is None and prompt_name is None:
        prompt_name = "document"
        _warn_of_passage_prompt(self)
    return encode(self, inputs, prompt_name, prompt, **options)


def similarity(self: SentenceModel, embeddings1: Vectors, embeddings2: Vectors) -> Tensor:
    """Return the model's similarity of all first to all second vectors, [n1, n2]."""
    first, second = _comparable(self.similarity_fn_name, embeddings1, embeddings2)
    first: Tensor = torch.atleast_2d(first)
    second: Tensor = torch.atleast_2d(second)
    if power := DISTANCES.get(self.similarity_fn_name):
        return -torch.cdist(first, second, p=power)
    return first @ second.T


def similarity_pairwise(self: SentenceModel, embeddings1: Vectors, embeddings2: Vectors) -> Tensor:
    """Return the model's similarity of the first and the second vector of each pair, [n]."""
    first, second = _comparable(self.similarity_fn_name, embeddings1, embeddings2)
    if power := DISTANCES.get(self.similarity_fn_name):
        return -torch.linalg.vector_norm(first - second, ord=power, dim=-1)
    return (first * second).sum(-1)


def embedding_dimension(self: SentenceModel) -> int:
    """Return how many numbers a vector of `encode` has."""
    return min(self.width, self.truncate_dim or self.width)


def mteb_model_meta(self: SentenceModel) -> Any:
    """Describe the model to MTEB, which stores results under its name and number format."""
    try:
        from mteb.models.model_meta import ModelMeta, ScoringFunction
    except ImportError as error:
        raise AttributeError("mteb_model_meta needs the package mteb") from error
    description = {
        "name": self.name if "/" in self.name else f"local/{self.name}",
        "framework": ["PyTorch"],
        "max_tokens": self.max_length,
        "embed_dim": embedding_dimension(self),
        "similarity_fn_name": ScoringFunction(self.similarity_fn_name),
        "use_instructions": any(self.prompts.values()),
        "experiment_kwargs": {"packhorse": devices.dtype_name(self.dtype)},
    }
    return ModelMeta.create_empty(overwrites=description)


def _refuse_numbers(**options: int | None) -> None:
    for name, number in options.items():
        if number is not None and number < 1:
            raise InputError(f"{name} is {number}; it must be at least 1")


def _refuse(
    model: SentenceModel, value: str | None, precision: str, device: Any, pool: Any
) -> None:
    """Raise for options that are not supported, before anything runs."""
    if value not in VALUES:
        raise InputError(f"output_value is {value!r}; use one of {', '.join(VALUES)}")
    check_precision(precision)
    if pool or isinstance(device, list | tuple):
        raise InputError(
            "encode runs in this process, which uses all cores or one accelerator; "
            "leave out pool, chunk_size and lists of devices"
        )
    if device is not None and not _same(devices.choose_device(device), model.device):
        raise InputError(
            f"{model.name} is on {model.device} and cannot be moved; "
            f"load it with device={str(device)!r}"
        )


def _same(first: torch.device, second: torch.device) -> bool:
    return first.type == second.type and (first.index or 0) == (second.index or 0)


def _texts(inputs: Any, task: Any) -> tuple[bool, list[TaskInput]]:
    """Return whether the input was a single text, and the texts."""
    if task is not None:
        return False, [text for batch in inputs for text in batch["text"]]
    if isinstance(inputs, str):
        return True, [inputs]
    if isinstance(inputs, Mapping) or not isinstance(inputs, Iterable):
        raise InputError(f"encode takes a text or a list of texts, not {inputs!r:.80}")
    return False, list(as_texts(inputs))


def prompt_of_task(prompts: Mapping[str, str], task: Any, kind: Any) -> str | None:
    """Return the prompt for a task of MTEB: the one whose name is the most specific."""
    side = getattr(kind, "value", kind)
    names = (f"{task.name}-{side}", task.name, f"{task.type}-{side}", task.type, side)
    return next((name for name in names if name in BUILT_IN_PROMPTS or name in prompts), None)


def _warn_of_passage_prompt(model: SentenceModel) -> None:
    """Warn that the model has a prompt for documents under another name."""
    name = next((name for name in ("passage", "corpus") if model.prompts.get(name)), None)
    if name and "document" not in model.prompts:
        message = (
            f"{model.name} has no prompt 'document', so documents are encoded without one; "
            f"to use its prompt {name!r}, pass prompt_name={name!r}"
        )
        _warn_once(model, message)


def _with_prompt(
    model: SentenceModel, prompt: str | None, name: str | None
) -> tuple[SentenceModel, str | None]:
    """Return a model that knows the prompt, and the prompt's name in it."""
    if prompt is None and name is None:
        if model.default_prompt is None and any(model.prompts.values()):
            names = ", ".join(name for name, text in model.prompts.items() if text)
            message = (
                f"{model.name} has prompts ({names}) and none was chosen; "
                'pass prompt_name, or prompt="" for none'
            )
            _warn_once(model, message)
        return model, model.default_prompt
    if prompt is None:
        known = BUILT_IN_PROMPTS | dict(model.prompts)
        if name not in known:
            raise InputError(f"{model.name} has no prompt {name!r}; it has: {', '.join(known)}")
        prompt = known[name]
    if not prompt:
        return replace(model, default_prompt=None), None
    return replace(model, prompts={CHOSEN_PROMPT: prompt}), CHOSEN_PROMPT


def _warn_once(model: SentenceModel, message: str) -> None:
    """Warn once per model; the warning names the line that called the encoder."""
    if message not in model.warned:
        model.warned.add(message)
        warnings.warn(message, PromptWarning, stacklevel=4)


@contextmanager
def progress_bar(shown: bool) -> Generator[Progress | None]:
    """Show progress on stderr, if it is to be shown."""
    if not shown:
        yield None
        return
    with progress_display() as show:
        yield lambda finished, total: show("Encoding", finished, total)


def _comparable(kind: str, first: Vectors, second: Vectors) -> tuple[Tensor, Tensor]:
    """Return both as float32 on one device; normalized for cosine similarity."""
    if kind not in SIMILARITIES:
        raise InputError(f"similarity_fn_name is {kind!r}; use one of {', '.join(SIMILARITIES)}")
    first = _tensor(first)
    second = _tensor(second).to(first.device)
    if kind == "cosine":
        return normalize(first, dim=-1), normalize(second, dim=-1)
    return first, second


def _tensor(vectors: Vectors) -> Tensor:
    if not isinstance(vectors, np.ndarray | Tensor):
        vectors = torch.stack([torch.as_tensor(vector) for vector in vectors])
    return torch.as_tensor(vectors).float()
