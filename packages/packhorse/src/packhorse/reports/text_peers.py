"""Run other libraries (peers) from texts to vectors or logits, to compare Packhorse with them.

`packhorse_bench.peers` feeds token ids, to compare the models alone. Here a peer tokenizes,
batches, encodes and pools, with the same weights, device, dtype, length and prompts as our encoder,
and has the interface of a `TextReader`. Batches are sorted by length, as sentence-transformers does
itself and a careful user of transformers would. transformers does not pool, so its states are
pooled here, for the most used kinds of pooling.

Shapes: n texts of a batch, L their padded length, E hidden width, C labels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from packhorse.checkpoint import sentence
from packhorse.device import float_dtype
from packhorse.errors import InputError, MissingExtra
from packhorse.reports.padded import silence_libraries
from packhorse.runtime.encoder import Encoder, Progress
from packhorse.runtime.evaluation.reading import Role, TextReader, prompt_of
from packhorse.tokens.tokenizer import Text


@dataclass(frozen=True)
class TextPeerSetting:
    """The settings that a peer shares with our encoder."""

    folder: Path  # as Hugging Face's libraries read it
    encoder: Encoder
    head: str  # embed or classify
    max_length: int
    batch_size: int = 32
    outputs: tuple[str, ...] = ()  # of the head "outputs": dense, sparse, multi


class TextPeer(NamedTuple):
    """A library that can be compared with."""

    open: Callable[[TextPeerSetting], TextReader]
    heads: tuple[str, ...]  # that it can run
    extra: str  # that installs it


def choose_peer(name: str | None, head: str) -> str | None:
    """Return the named peer, or the first that is installed; None if there is none."""
    capable = [name for name, peer in PEERS.items() if head in peer.heads]
    if name is None:
        return next((peer for peer in capable if _installed(peer)), None)
    if name not in capable:
        known = ", ".join(capable)
        raise InputError(f"{name} has no {head!r} head to compare with; there is {known}")
    if not _installed(name):
        raise MissingExtra(name, PEERS[name].extra)
    return name


def open_peer(name: str, setting: TextPeerSetting) -> TextReader:
    """Open the peer; an error of it, now or while reading, becomes an InputError of one line."""
    with _one_line_errors(name, setting):
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        with silence_libraries():
            peer_read = PEERS[name].open(setting)

    def read(
        texts: Sequence[Text], role: Role | None = None, progress: Progress | None = None
    ) -> np.ndarray:
        with _one_line_errors(name, setting):
            return peer_read(texts, role, progress)

    return read


@contextmanager
def _one_line_errors(name: str, setting: TextPeerSetting) -> Iterator[None]:
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        raise InputError(
            f"{name} fails on {setting.encoder.name} ({type(error).__name__}: {reason:.160}); "
            "pass --beside none"
        ) from error


def _installed(name: str) -> bool:
    return find_spec(name.replace("-", "_")) is not None


def _floats(encoder: Encoder) -> torch.dtype:
    """The number format of a peer: ours, or that of what is not rounded in ours."""
    return float_dtype(encoder.dtype, encoder.device)


def _sentence_transformers(setting: TextPeerSetting) -> TextReader:
    from sentence_transformers import SentenceTransformer

    encoder = setting.encoder
    model = SentenceTransformer(
        str(setting.folder), device=str(encoder.device), model_kwargs={"dtype": _floats(encoder)}
    ).eval()
    model.max_seq_length = setting.max_length
    normalize = encoder.embedder is not None and encoder.embedder.normalize

    def read(
        texts: Sequence[Text], role: Role | None = None, progress: Progress | None = None
    ) -> np.ndarray:
        counter = _BatchCounter(progress, len(texts))
        # encode() reports no progress, but each of its batches goes through the first module.
        hook = model[0].register_forward_hook(lambda module, inputs, output: counter.add(inputs[0]))
        try:
            vectors = model.encode(
                list(map(str, texts)),
                prompt_name=prompt_of(role, encoder.prompts),
                batch_size=setting.batch_size,
                show_progress_bar=False,
                normalize_embeddings=normalize,
            )
        finally:
            hook.remove()
        return np.asarray(vectors, np.float32)

    return read


class _BatchCounter:
    """Counts the texts of each batch that goes through a model."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self.progress = progress
        self.total = total
        self.done = 0

    def add(self, features: Any) -> None:
        """Count the texts of one batch, and report the progress."""
        self.done += len(features["input_ids"])
        if self.progress is not None:
            self.progress(self.done, self.total)


def _transformers(setting: TextPeerSetting) -> TextReader:
    import transformers as library

    encoder = setting.encoder
    embed = setting.head == "embed"
    layout = sentence.read(setting.folder)
    folder = layout.transformer if layout else setting.folder
    model_class = library.AutoModel if embed else library.AutoModelForSequenceClassification
    tokenizer = library.AutoTokenizer.from_pretrained(folder)
    model = model_class.from_pretrained(folder, dtype=_floats(encoder)).eval().to(encoder.device)
    finish = _pooling(encoder) if embed else lambda output, mask: output.logits

    @torch.inference_mode()
    def run(texts: Sequence[Text]) -> Tensor:
        first_texts, second_texts = _columns(texts)
        batch = tokenizer(
            first_texts,
            second_texts,
            return_tensors="pt",
            padding=True,
            truncation=True,
            max_length=setting.max_length,
        ).to(encoder.device)
        return finish(model(**batch), batch["attention_mask"]).float()

    return partial(_read_sorted, run, encoder, embed, setting.batch_size)


def _columns(texts: Sequence[Text]) -> tuple[list[str], list[str] | None]:
    """Return the texts as a tokenizer takes them: first texts, and second texts of pairs."""
    pairs = [text for text in texts if isinstance(text, tuple)]
    if not pairs:
        return [str(text) for text in texts], None
    return [first for first, _ in pairs], [second for _, second in pairs]


def _read_sorted(
    run: Callable[[Sequence[Text]], Tensor],
    encoder: Encoder,
    embed: bool,
    batch_size: int,
    texts: Sequence[Text],
    role: Role | None = None,
    progress: Progress | None = None,
) -> np.ndarray:
    """Run batches sorted by length, longest first; returns rows in the order of the texts."""
    prompt = (prompt_of(role, encoder.prompts) or encoder.default_prompt) if embed else None
    if prompt is not None:
        texts = [encoder.prompts[prompt] + str(text) for text in texts]
    order = sorted(range(len(texts)), key=lambda i: -_characters(texts[i]))
    rows: list[np.ndarray] = []
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        rows += list(run([texts[i] for i in chosen]).cpu().numpy())
        if progress is not None:
            progress(start + len(chosen), len(order))
    return np.stack(rows)[np.argsort(order)]


def _characters(text: Text) -> int:
    return len(text) if isinstance(text, str) else sum(map(len, text))


def _pooling(encoder: Encoder) -> Callable[[Any, Tensor], Tensor]:
    """Return a function from the model's output to vectors [n, E], pooled as our encoder does."""
    head = encoder.embedder
    is_plain = head is not None and head.include_prompt and not len(head.stages)
    kind = "+".join(head.pooling) if head is not None and is_plain else ""
    if head is None or kind not in PADDED_POOLINGS:
        raise InputError(
            f"transformers alone cannot pool the vectors of {encoder.name}; pass --beside "
            "sentence-transformers or none"
        )
    pool = PADDED_POOLINGS[kind]
    normalize = head.normalize

    def finish(output: Any, mask: Tensor) -> Tensor:
        vectors = pool(output.last_hidden_state.float(), mask.unsqueeze(-1).float())
        return F.normalize(vectors, dim=-1) if normalize else vectors

    return finish


def _mean(states: Tensor, mask: Tensor) -> Tensor:
    """Average the states [n, L, E] over the mask [n, L, 1], to [n, E]."""
    return (states * mask).sum(1) / mask.sum(1)


def _first(states: Tensor, mask: Tensor) -> Tensor:
    return states[:, 0]


def _largest(states: Tensor, mask: Tensor) -> Tensor:
    return states.masked_fill(mask == 0, -torch.inf).amax(1)


PADDED_POOLINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": _mean,
    "cls": _first,
    "max": _largest,
}


def _outputs(name: str, setting: TextPeerSetting) -> Callable[[Sequence[str], Role | None], Any]:
    """Open sentence-transformers' model for an output: a function from texts to that output."""
    import sentence_transformers as library

    encoder = setting.encoder
    if name != "dense" and "lexical" in encoder.heads:
        raise InputError(
            f"sentence-transformers has no {name} output of {encoder.name}; pass --beside none"
        )
    kind = {
        "dense": "SentenceTransformer",
        "sparse": "SparseEncoder",
        "multi": "MultiVectorEncoder",
    }
    model = getattr(library, kind[name])(
        str(setting.folder), device=str(encoder.device), model_kwargs={"dtype": _floats(encoder)}
    ).eval()
    options: dict[str, Any] = {"batch_size": setting.batch_size, "show_progress_bar": False}

    def read(texts: Sequence[str], role: Role | None) -> Any:
        encode = model.encode_query if role == "query" else model.encode_document
        output = encode(list(texts), **options)
        if name == "sparse":
            from scipy.sparse import coo_array

            output = output.coalesce().cpu()
            values = output.values().float().numpy()
            return coo_array((values, output.indices().numpy()), tuple(output.shape)).tocsr()
        if name == "multi":
            return [torch.as_tensor(vectors).float().cpu().numpy() for vectors in output]
        return np.asarray(output, np.float32)

    return read


def _sentence_transformers_outputs(setting: TextPeerSetting) -> Any:
    models = {name: _outputs(name, setting) for name in setting.outputs}

    def read(
        texts: Sequence[str], role: Role | None = None, progress: Progress | None = None
    ) -> dict[str, Any]:
        outputs: dict[str, Any] = {}
        for number, (name, encode) in enumerate(models.items(), 1):
            outputs[name] = encode(texts, role)
            if progress is not None:
                progress(number * len(texts), len(models) * len(texts))
        return outputs

    return read


def _open_sentence_transformers(setting: TextPeerSetting) -> Any:
    opened = _sentence_transformers_outputs if setting.outputs else _sentence_transformers
    return opened(setting)


PEERS = {  # the preferred one first
    "sentence-transformers": TextPeer(_open_sentence_transformers, ("embed", "outputs"), "peers"),
    "transformers": TextPeer(_transformers, ("embed", "classify"), "hf"),
}
