"""Libraries that read texts as their users hand them over: tokenizing, batches, pooling and all.

`bench.peers` feeds token ids, to compare the models alone. Here a peer does the whole work with the
same weights, device, number format, length and prompts as ours. Batches are sorted by length, which
sentence-transformers does by itself and a careful user of transformers too. transformers pools
nothing, so its states are pooled here, for the poolings that are most used.

Shapes: n texts of a batch, L their padded length, E hidden width, C labels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from packhorse.checkpoint import sentence
from packhorse.errors import InputError, MissingExtra
from packhorse.reports.padded import hushed
from packhorse.runtime.encoder import Encoder, Progress
from packhorse.runtime.evaluation.reading import Role, TextReader, prompt_of
from packhorse.tokens import Text


@dataclass(frozen=True)
class Setting:
    """What a peer shares with ours."""

    folder: Path  # as Hugging Face's libraries read it
    encoder: Encoder
    head: str  # embed, classify
    max_length: int
    batch_size: int = 32


def choose(name: str | None, head: str) -> str | None:
    """The peer that is meant: the one that is named, or the first that is installed."""
    able = [peer for peer, (_, heads, _) in PEERS.items() if head in heads]
    if name is None:
        return next((peer for peer in able if _installed(peer)), None)
    if name not in able:
        raise InputError(f"{name} has no {head!r} head to compare with; there is {', '.join(able)}")
    if not _installed(name):
        raise MissingExtra(name, PEERS[name][2])
    return name


def open_peer(name: str, setting: Setting) -> TextReader:
    """The peer, ready to read; whatever it raises, now or then, is one line."""
    with _in_a_line(name, setting):
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        with hushed():
            opened = PEERS[name][0](setting)

    def read(
        texts: Sequence[Text], role: Role | None = None, progress: Progress | None = None
    ) -> np.ndarray:
        with _in_a_line(name, setting):
            return opened(texts, role, progress)

    return read


@contextmanager
def _in_a_line(name: str, setting: Setting) -> Iterator[None]:
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


def _sentence_transformers(setting: Setting) -> TextReader:
    from sentence_transformers import SentenceTransformer

    encoder = setting.encoder
    model = SentenceTransformer(
        str(setting.folder), device=str(encoder.device), model_kwargs={"dtype": encoder.dtype}
    ).eval()
    model.max_seq_length = setting.max_length
    normal = encoder.embedder is not None and encoder.embedder.normalise

    def read(
        texts: Sequence[Text], role: Role | None = None, progress: Progress | None = None
    ) -> np.ndarray:
        told = _Told(progress, len(texts))
        watch = model[0].register_forward_hook(lambda module, given, out: told.more(given[0]))
        try:
            vectors = model.encode(
                list(map(str, texts)),
                prompt_name=prompt_of(role, encoder.prompts),
                batch_size=setting.batch_size,
                show_progress_bar=False,
                normalize_embeddings=normal,
            )
        finally:
            watch.remove()
        return np.asarray(vectors, np.float32)

    return read


class _Told:
    """Counts the texts of each batch that goes through a model."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self.progress, self.total, self.done = progress, total, 0

    def more(self, features: Any) -> None:
        self.done += len(features["input_ids"])
        if self.progress is not None:
            self.progress(self.done, self.total)


def _transformers(setting: Setting) -> TextReader:
    import transformers as library

    encoder, embed = setting.encoder, setting.head == "embed"
    layout = sentence.read(setting.folder)
    home = layout.transformer if layout else setting.folder
    kind = library.AutoModel if embed else library.AutoModelForSequenceClassification
    tokenizer = library.AutoTokenizer.from_pretrained(home)
    model = kind.from_pretrained(home, dtype=encoder.dtype).eval().to(encoder.device)
    finish = _pooling(encoder) if embed else lambda out, mask: out.logits

    @torch.inference_mode()
    def run(texts: Sequence[Text]) -> Tensor:
        alone, pairs = _columns(texts)
        how = {"padding": True, "truncation": True, "max_length": setting.max_length}
        batch = tokenizer(alone, pairs, return_tensors="pt", **how).to(encoder.device)
        return finish(model(**batch), batch["attention_mask"]).float()

    return partial(_sorted, run, encoder, embed, setting.batch_size)


def _columns(texts: Sequence[Text]) -> tuple[list[str], list[str] | None]:
    """As a tokenizer takes them: texts, or the two of each pair apart."""
    pairs = [text for text in texts if isinstance(text, tuple)]
    if not pairs:
        return [str(text) for text in texts], None
    return [first for first, _ in pairs], [second for _, second in pairs]


def _sorted(
    run: Callable[[Sequence[Text]], Tensor],
    encoder: Encoder,
    embed: bool,
    batch_size: int,
    texts: Sequence[Text],
    role: Role | None = None,
    progress: Progress | None = None,
) -> np.ndarray:
    """Batches by length, the longest first; rows in the order of the texts."""
    name = (prompt_of(role, encoder.prompts) or encoder.default_prompt) if embed else None
    given = texts if name is None else [encoder.prompts[name] + str(text) for text in texts]
    order = sorted(range(len(given)), key=lambda i: -_letters(given[i]))
    rows: list[np.ndarray] = []
    for begin in range(0, len(order), batch_size):
        chosen = order[begin : begin + batch_size]
        rows += list(run([given[i] for i in chosen]).cpu().numpy())
        if progress is not None:
            progress(begin + len(chosen), len(order))
    return np.stack(rows)[np.argsort(order)]


def _letters(text: Text) -> int:
    return len(text) if isinstance(text, str) else sum(map(len, text))


def _pooling(encoder: Encoder) -> Callable[[Any, Tensor], Tensor]:
    """From what the model says to vectors [n, E], as the model's own layout has it."""
    head = encoder.embedder
    plain = head is not None and head.include_prompt and not len(head.stages)
    how = "+".join(head.pooling) if head is not None and plain else ""
    if head is None or how not in POOLINGS:
        raise InputError(
            f"the vectors of {encoder.name} are made in a way that transformers alone does not "
            "know; pass --beside sentence-transformers or none"
        )
    pool, normal = POOLINGS[how], head.normalise

    def finish(out: Any, mask: Tensor) -> Tensor:
        vectors = pool(out.last_hidden_state.float(), mask.unsqueeze(-1).float())
        return F.normalize(vectors, dim=-1) if normal else vectors

    return finish


def _mean(states: Tensor, mask: Tensor) -> Tensor:
    """[n, L, E] to [n, E]."""
    return (states * mask).sum(1) / mask.sum(1)


def _first(states: Tensor, mask: Tensor) -> Tensor:
    return states[:, 0]


def _largest(states: Tensor, mask: Tensor) -> Tensor:
    return states.masked_fill(mask == 0, -torch.inf).amax(1)


POOLINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": _mean,
    "cls": _first,
    "max": _largest,
}
# How each is opened, the heads it has, and the extra that brings it; the first is preferred.
PEERS: dict[str, tuple[Callable[[Setting], TextReader], tuple[str, ...], str]] = {
    "sentence-transformers": (_sentence_transformers, ("embed",), "peers"),
    "transformers": (_transformers, ("embed", "classify"), "hf"),
}
