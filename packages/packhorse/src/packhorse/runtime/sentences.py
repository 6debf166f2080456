"""The shape of sentence-transformers: its names, its options, its answers, over the packed encoder.

Code that calls `encode`, `encode_query`, `encode_document` and `similarity` runs as it is, and so
does MTEB's runner, whose `encode` takes the batches of a task instead of texts. Names and order of
the options are those of sentence-transformers 6.2 (https://www.sbert.net), and so are the vectors;
its quirks are kept where another answer would not fit an index that is already there. What has no
meaning here is refused in a line, never swallowed.

The functions are methods of `Encoder`, which takes them as they are: this file knows nothing of it
but `Encodes`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from packhorse.results import Hidden
from packhorse.runtime.jobs import Given
from packhorse.runtime.tasks import Described

Advance = Callable[[int, int], None]  # sequences done, sequences in all
Vectors = np.ndarray | Tensor | Sequence[np.ndarray] | Sequence[Tensor]

ALWAYS = {"query": "", "document": ""}  # prompts that every model has, if only empty ones
VALUES = ("sentence_embedding", "token_embeddings")
PRECISIONS = ("float32", "binary", "ubinary")
DISTANCES = {"euclidean": 2.0, "manhattan": 1.0}
SIMILARITIES = ("cosine", "dot", *DISTANCES)
CHOSEN = "chosen"


class PromptWarning(UserWarning):
    """A model has prompts, and texts were encoded without one."""


class Encodes(Described, Protocol):
    """What this shape is put over; an `Encoder` is it."""

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
    def told(self) -> set[str]: ...
    @property
    def embed(self) -> Callable[..., np.ndarray]: ...
    @property
    def hidden(self) -> Callable[..., list[Hidden]]: ...


def encode(
    self: Encodes,
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
    task_metadata: Any = None,
    hf_split: str | None = None,
    hf_subset: str | None = None,
    prompt_type: Any = None,
) -> Any:
    """One vector for a text, float32 [n, width] for a list of n, as sentence-transformers has it.

    `prompt` goes before each text as it stands, `prompt_name` names one of the model's; without
    both its default does, if there is one, and a model that has prompts but no default says so
    once. "query" and "document" are known to all models, and `prompt=""` is none. Vectors are first
    cut to `truncate_dim` numbers, then `normalize_embeddings` makes them one long. They come as an
    array, with `convert_to_tensor` as a tensor on the model's device, without `convert_to_numpy` as
    a list of tensors; as a list of states with `output_value="token_embeddings"`. `precision` may
    be "binary" or "ubinary".

    `batch_size` changes nothing: batches are counted in tokens, see `load(budget=)`. Texts that are
    too long are cut in silence, as there; `embed` tells of it and has other ways. `sentences` is an
    older name of `inputs`. The last four are what MTEB's runner says of its task, whose name, type
    or side choose the prompt.
    """
    width = self.truncate_dim if truncate_dim is None else truncate_dim
    _refuse_numbers(batch_size=batch_size, truncate_dim=width)
    _refuse(self, output_value, precision, device, pool or chunk_size)
    single, texts = _texts(inputs if sentences is None else sentences, task_metadata)
    if task_metadata is not None and prompt is None and prompt_name is None:
        prompt_name = _of_task(self.prompts, task_metadata, prompt_type)
        if prompt_name == "document":
            _mind_passages(self)
    model, name = _prompting(self, prompt, prompt_name)
    with _bar(bool(show_progress_bar)) as progress:
        how: dict[str, Any] = {"prompt": name, "long": "truncate", "progress": progress}
        if output_value == "token_embeddings":
            states = [torch.from_numpy(each.states) for each in model.hidden(texts, **how)]
            found: Any = [each.to(self.device) for each in states]
            return found[0] if single else found
        found = np.ascontiguousarray(model.embed(texts, **how)[:, :width])
    if normalize_embeddings:
        found = normalize(torch.from_numpy(found), dim=1).numpy()
    if precision != "float32":
        found = _bits(found, precision)
    if convert_to_tensor or not convert_to_numpy:
        found = torch.from_numpy(found).to(self.device)
        found = found if convert_to_tensor else list(found)
    return found[0] if single else found


def encode_query(
    self: Encodes,
    inputs: str | Iterable[Any] | None = None,
    prompt_name: str | None = None,
    prompt: str | None = None,
    **options: Any,
) -> Any:
    """`encode` after the model's prompt "query", or none where it has none of that name."""
    if prompt is None and prompt_name is None:
        prompt_name = "query"
    return encode(self, inputs, prompt_name, prompt, **options)


def encode_document(
    self: Encodes,
    inputs: str | Iterable[Any] | None = None,
    prompt_name: str | None = None,
    prompt: str | None = None,
    **options: Any,
) -> Any:
    """`encode` after the model's prompt "document", or none where it has none of that name.

    sentence-transformers passes over a prompt that is called "passage" or "corpus": so it is here,
    but not without a word.
    """
    if prompt is None and prompt_name is None:
        prompt_name = "document"
        _mind_passages(self)
    return encode(self, inputs, prompt_name, prompt, **options)


def similarity(self: Encodes, embeddings1: Vectors, embeddings2: Vectors) -> Tensor:
    """How alike each of the first and each of the second are, [n1, n2], in the model's own way."""
    compared = _comparable(self.similarity_fn_name, embeddings1, embeddings2)
    one, other = map(torch.atleast_2d, compared)
    if power := DISTANCES.get(self.similarity_fn_name):
        return -torch.cdist(one, other, p=power)
    return one @ other.T


def similarity_pairwise(self: Encodes, embeddings1: Vectors, embeddings2: Vectors) -> Tensor:
    """How alike the first and the second of each pair are, [n]."""
    one, other = _comparable(self.similarity_fn_name, embeddings1, embeddings2)
    if power := DISTANCES.get(self.similarity_fn_name):
        return -torch.linalg.vector_norm(one - other, ord=power, dim=-1)
    return (one * other).sum(-1)


def embedding_dimension(self: Encodes) -> int:
    """How many numbers a vector of `encode` has."""
    return min(self.width, self.truncate_dim or self.width)


def mteb_model_meta(self: Encodes) -> Any:
    """What MTEB wants to know of a model; it keeps results under this name and number format."""
    try:
        from mteb.models.model_meta import ModelMeta, ScoringFunction
    except ImportError as error:
        raise AttributeError("mteb_model_meta is there once mteb is installed") from error
    said = {
        "name": self.name if "/" in self.name else f"local/{self.name}",
        "framework": ["PyTorch"],
        "max_tokens": self.max_length,
        "embed_dim": embedding_dimension(self),
        "similarity_fn_name": ScoringFunction(self.similarity_fn_name),
        "use_instructions": any(self.prompts.values()),
        "experiment_kwargs": {"packhorse": devices.dtype_name(self.dtype)},
    }
    return ModelMeta.create_empty(overwrites=said)


def _refuse_numbers(**given: int | None) -> None:
    for name, number in given.items():
        if number is not None and number < 1:
            raise InputError(f"{name} is {number}; it must be at least 1")


def _refuse(model: Encodes, value: str | None, precision: str, device: Any, pool: Any) -> None:
    """Say what cannot be had before anything runs."""
    if value not in VALUES:
        raise InputError(f"output_value is {value!r}; there are {', '.join(VALUES)}")
    if precision not in PRECISIONS:
        raise InputError(
            f"precision is {precision!r}; there are {', '.join(PRECISIONS)}; for others take "
            "float32 and the ranges of the whole collection"
        )
    if pool or isinstance(device, list | tuple):
        raise InputError(
            "encode runs in this process, which uses all cores or one accelerator; "
            "leave out pool, chunk_size and lists of devices"
        )
    if device is not None and not _same(devices.choose_device(device), model.device):
        raise InputError(
            f"{model.name} is on {model.device}; load it with device={str(device)!r} to move it"
        )


def _same(asked: torch.device, there: torch.device) -> bool:
    return asked.type == there.type and (asked.index or 0) == (there.index or 0)


def _texts(inputs: Any, task: Any) -> tuple[bool, list[Given]]:
    """Whether it was one text alone, and the texts."""
    if task is not None:
        return False, [text for batch in inputs for text in batch["text"]]
    if isinstance(inputs, str):
        return True, [inputs]
    if isinstance(inputs, Mapping) or not isinstance(inputs, Iterable):
        raise InputError(f"encode takes a text or a list of texts, not {inputs!r:.80}")
    return False, list(as_texts(inputs))


def _of_task(prompts: Mapping[str, str], task: Any, kind: Any) -> str | None:
    """The prompt for a task of MTEB: the more it says of the task, the sooner it is taken."""
    side = getattr(kind, "value", kind)
    names = (f"{task.name}-{side}", task.name, f"{task.type}-{side}", task.type, side)
    return next((name for name in names if name in ALWAYS or name in prompts), None)


def _mind_passages(model: Encodes) -> None:
    """Tell who encodes documents that the model has a prompt for them under another name."""
    other = next((name for name in ("passage", "corpus") if model.prompts.get(name)), None)
    if other and "document" not in model.prompts:
        message = (
            f"{model.name} has no prompt 'document', so none goes before the texts; "
            f"its prompt {other!r} may be the one you want: prompt_name={other!r}"
        )
        _tell(model, message)


def _prompting(model: Encodes, prompt: str | None, name: str | None) -> tuple[Encodes, str | None]:
    """The model and the name that put the right words before a text."""
    if prompt is None and name is None:
        if model.default_prompt is None and any(model.prompts.values()):
            have = ", ".join(name for name, text in model.prompts.items() if text)
            message = (
                f"{model.name} has prompts ({have}) and none was chosen; "
                'pass prompt_name, or prompt="" for none'
            )
            _tell(model, message)
        return model, model.default_prompt
    if prompt is None:
        known = ALWAYS | dict(model.prompts)
        if name not in known:
            raise InputError(f"{model.name} has no prompt {name!r}; it has: {', '.join(known)}")
        prompt = known[name]
    if not prompt:
        return replace(model, default_prompt=None), None
    return replace(model, prompts={CHOSEN: prompt}), CHOSEN


def _tell(model: Encodes, message: str) -> None:
    """Warn once in the life of a model, at the place that called the method which found it."""
    if message not in model.told:
        model.told.add(message)
        warnings.warn(message, PromptWarning, stacklevel=4)


@contextmanager
def _bar(shown: bool) -> Iterator[Advance | None]:
    """A bar on stderr, where it was asked for."""
    if not shown:
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("Encoding", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _bits(vectors: np.ndarray, precision: str) -> np.ndarray:
    """A bit for each number, whether it is above 0; eight to a byte, signed or not."""
    packed = np.packbits(vectors > 0, axis=-1)
    return packed if precision == "ubinary" else (packed.astype(np.int16) - 128).astype(np.int8)


def _comparable(how: str, one: Vectors, other: Vectors) -> tuple[Tensor, Tensor]:
    """Both as float32 on one device; all one long where only the angle counts."""
    if how not in SIMILARITIES:
        raise InputError(f"similarity_fn_name is {how!r}; there are {', '.join(SIMILARITIES)}")
    first, second = _tensor(one), _tensor(other)
    second = second.to(first.device)
    if how == "cosine":
        return normalize(first, dim=-1), normalize(second, dim=-1)
    return first, second


def _tensor(vectors: Vectors) -> Tensor:
    if not isinstance(vectors, np.ndarray | Tensor):
        vectors = torch.stack([torch.as_tensor(each) for each in vectors])
    return torch.as_tensor(vectors).float()
