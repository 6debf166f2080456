"""transformers on padded batches: what packing is compared with.

Texts are tokenized by transformers' fast tokenizer; to compare the models alone, pass token ids in
place of texts. A batch is padded to its longest sequence, in order of arrival or sorted by length;
vectors are the normalized mean.

Shapes: n sequences of a batch, L their padded length, E hidden width.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from packhorse import device as devices
from packhorse.tokens import Encoding

ORDERS = ("arrival", "sorted")
Hidden = Callable[[Tensor, Tensor], Tensor]  # ids, mask [n, L] → states [n, L, E]
Vectors = Callable[[np.ndarray, np.ndarray], Tensor]  # ids, mask [n, L] → vectors [n, E]
TextsOrTokens = Sequence[str] | Sequence[Encoding]  # token ids if tokenizing is not measured
Run = Callable[[TextsOrTokens, str], np.ndarray]  # order → vectors, in the order of the input


@dataclass(frozen=True)
class PeerSetting:
    """The settings that all engines of a run share."""

    folder: Path  # the model, as transformers reads it
    device: torch.device
    batch_size: int
    longest: int  # tokens of the longest sequence: the width of a fixed shape
    scratch: Path  # for exported models

    @property
    def threads(self) -> int:
        """Number of threads: those of torch, so that no engine gets more."""
        return torch.get_num_threads()

    @cached_property
    def tokenizer(self) -> Any:
        """The model's fast tokenizer of transformers."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.folder)

    def ids(self, work: TextsOrTokens) -> list[np.ndarray]:
        """Return the token ids of each sequence; texts are tokenized and cut to `longest`."""
        encodings = [item for item in work if isinstance(item, Encoding)]
        if encodings:
            return [encoding.ids for encoding in encodings]
        encoded = self.tokenizer(
            list(work), add_special_tokens=True, truncation=True, max_length=self.longest
        )
        return [np.asarray(row) for row in encoded["input_ids"]]


@dataclass(frozen=True)
class PeerEngine:
    """An encoder of another library: texts or token ids to vectors [n, E]."""

    name: str
    dtype: str
    orders: tuple[str, ...]
    run: Run


def transformers(setting: PeerSetting, dtype: str) -> PeerEngine:
    """Open Hugging Face transformers with its own choice of attention."""
    states = transformers_states(setting, dtype)
    return padding_engine("transformers", dtype, setting, pooled(states, setting.device))


def padded(
    forward: Vectors,
    sequences: Sequence[np.ndarray],
    order: str,
    batch_size: int,
    width: Callable[[int], int] = lambda longest: longest,
    full: bool = False,
) -> np.ndarray:
    """Cut into batches, pad each, run, and return the vectors in the order of the input.

    `width` can make a batch wider than its longest sequence; `full` fills the last batch with empty
    rows.
    """
    lengths = np.array([len(sequence) for sequence in sequences])
    indices = in_order(sequences, order)
    outputs = []
    for start in range(0, len(indices), batch_size):
        chosen = indices[start : start + batch_size]
        rows = batch_size if full else len(chosen)
        ids, mask = pad([sequences[i] for i in chosen], rows, width(int(lengths[chosen].max())))
        outputs.append(forward(ids, mask)[: len(chosen)])
    joined = torch.cat(outputs).cpu().numpy()  # the only point that waits for the device
    vectors = np.empty_like(joined)
    vectors[indices] = joined
    return vectors


def in_order(sequences: Sequence[Encoding] | Sequence[np.ndarray], order: str) -> np.ndarray:
    """Return the indices of the sequences; for the order "sorted", longest first."""
    lengths = np.array([len(sequence) for sequence in sequences])
    return np.argsort(-lengths, kind="stable") if order == "sorted" else np.arange(len(lengths))


def pad(sequences: Sequence[np.ndarray], rows: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return padded token ids and their mask, [rows, width] each."""
    ids, mask = np.zeros((2, rows, width), np.int64)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = sequence
        mask[row, : len(sequence)] = 1
    mask[len(sequences) :, 0] = 1  # a row without any token would be a softmax over nothing
    return ids, mask


def mean_pool(hidden: Tensor, mask: Tensor) -> Tensor:
    """Average the states [n, L, E] to normalized vectors [n, E], in fp32."""
    weights = mask.unsqueeze(-1).float()
    return F.normalize((hidden.float() * weights).sum(1) / weights.sum(1), dim=-1)


@contextmanager
def silence_libraries() -> Iterator[None]:
    """Suppress warnings and log messages of libraries while they load and export."""
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous)


def padding_engine(name: str, dtype: str, setting: PeerSetting, vectors: Vectors) -> PeerEngine:
    """Return an engine that pads the batches of `vectors`."""

    def run(work: TextsOrTokens, order: str) -> np.ndarray:
        return padded(vectors, setting.ids(work), order, setting.batch_size)

    return PeerEngine(name, dtype, ORDERS, run)


def pooled(states: Hidden, device: torch.device) -> Vectors:
    """Return a function that runs `states` on the device and pools its result."""

    @torch.inference_mode()
    def vectors(ids: np.ndarray, mask: np.ndarray) -> Tensor:
        device_ids = torch.from_numpy(ids).to(device, non_blocking=True)
        device_mask = torch.from_numpy(mask).to(device, non_blocking=True)
        return mean_pool(states(device_ids, device_mask), device_mask)

    return vectors


def transformers_model(setting: PeerSetting, dtype: str, **options: Any) -> Any:
    """Load the model with transformers, without its pooler."""
    import transformers as library

    library.utils.logging.disable_progress_bar()
    with silence_libraries():
        model = library.AutoModel.from_pretrained(
            setting.folder, dtype=devices.parse_dtype(dtype), add_pooling_layer=False, **options
        )
    return model.eval().to(setting.device)


def transformers_states(setting: PeerSetting, dtype: str) -> Hidden:
    """Return a function from ids and mask to the hidden states of transformers' model."""
    model = transformers_model(setting, dtype)

    def states(ids: Tensor, mask: Tensor) -> Tensor:
        return model(input_ids=ids, attention_mask=mask).last_hidden_state

    return states
