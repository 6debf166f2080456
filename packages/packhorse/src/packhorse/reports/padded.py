"""transformers over padded batches: what packing is compared with.

Texts are tokenized by transformers' fast tokenizer; token ids can be given in place of texts, to
compare the models alone. A batch is padded to its longest sequence, in the order of arrival or
sorted by length, and pooled with the mean, normalized.

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
Work = Sequence[str] | Sequence[Encoding]  # texts, or token ids where tokenizing is not measured
Run = Callable[[Work, str], np.ndarray]  # what to encode, order → vectors, as they came


@dataclass(frozen=True)
class PeerSetting:
    """What every engine of a run shares."""

    folder: Path  # of the model, as transformers reads it
    device: torch.device
    batch_size: int
    longest: int  # tokens of the longest sequence: the width of a fixed shape
    scratch: Path  # for exported models

    @property
    def threads(self) -> int:
        """As many as torch uses: no engine gets more."""
        return torch.get_num_threads()

    @cached_property
    def tokenizer(self) -> Any:
        """transformers' fast tokenizer of the model."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.folder)

    def ids(self, work: Work) -> list[np.ndarray]:
        """The token ids of each sequence, cut to `longest`; texts are tokenized here."""
        encodings = [item for item in work if isinstance(item, Encoding)]
        if encodings:
            return [encoding.ids for encoding in encodings]
        cut = {"truncation": True, "max_length": self.longest}
        rows = self.tokenizer(list(work), add_special_tokens=True, **cut)["input_ids"]
        return [np.asarray(row) for row in rows]


@dataclass(frozen=True)
class PeerEngine:
    """Something that turns texts or sequences, taken in one of its orders, into vectors [n, E]."""

    name: str
    dtype: str
    orders: tuple[str, ...]
    run: Run


def transformers(setting: PeerSetting, dtype: str) -> PeerEngine:
    """Hugging Face transformers with its own choice of attention."""
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
    """Cut into batches, pad each, run, and put the vectors back in the order of arrival.

    `width` makes a batch wider than its longest; `full` fills the last one up with empty rows.
    """
    lengths = np.array([len(s) for s in sequences])
    places = in_order(sequences, order)
    pieces = []
    for start in range(0, len(places), batch_size):
        chosen = places[start : start + batch_size]
        rows = batch_size if full else len(chosen)
        ids, mask = pad([sequences[i] for i in chosen], rows, width(int(lengths[chosen].max())))
        pieces.append(forward(ids, mask)[: len(chosen)])
    joined = torch.cat(pieces).cpu().numpy()  # only here does a device have to catch up
    vectors = np.empty_like(joined)
    vectors[places] = joined
    return vectors


def in_order(sequences: Sequence[Encoding] | Sequence[np.ndarray], order: str) -> np.ndarray:
    """The places of the sequences, longest first if they are to be sorted."""
    lengths = np.array([len(s) for s in sequences])
    return np.argsort(-lengths, kind="stable") if order == "sorted" else np.arange(len(lengths))


def pad(sequences: Sequence[np.ndarray], rows: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and mask, [rows, width] each."""
    ids, mask = np.zeros((2, rows, width), np.int64)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = sequence
        mask[row, : len(sequence)] = 1
    mask[len(sequences) :, 0] = 1  # a row without any token would be a softmax over nothing
    return ids, mask


def mean_pool(hidden: Tensor, mask: Tensor) -> Tensor:
    """[n, L, E] to normalized [n, E], in fp32."""
    weights = mask.unsqueeze(-1).float()
    return F.normalize((hidden.float() * weights).sum(1) / weights.sum(1), dim=-1)


@contextmanager
def hushed() -> Iterator[None]:
    """Without what libraries say about themselves while they load and export."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def padding_engine(name: str, dtype: str, setting: PeerSetting, vectors: Vectors) -> PeerEngine:
    def run(work: Work, order: str) -> np.ndarray:
        return padded(vectors, setting.ids(work), order, setting.batch_size)

    return PeerEngine(name, dtype, ORDERS, run)


def pooled(states: Hidden, device: torch.device) -> Vectors:
    @torch.inference_mode()
    def vectors(ids: np.ndarray, mask: np.ndarray) -> Tensor:
        here = [torch.from_numpy(x).to(device, non_blocking=True) for x in (ids, mask)]
        return mean_pool(states(*here), here[1])

    return vectors


def transformers_model(setting: PeerSetting, dtype: str, **how: Any) -> Any:
    import transformers as library

    library.utils.logging.disable_progress_bar()
    with hushed():
        model = library.AutoModel.from_pretrained(
            setting.folder, dtype=devices.parse_dtype(dtype), add_pooling_layer=False, **how
        )
    return model.eval().to(setting.device)


def transformers_states(setting: PeerSetting, dtype: str) -> Hidden:
    model = transformers_model(setting, dtype)

    def states(ids: Tensor, mask: Tensor) -> Tensor:
        return model(input_ids=ids, attention_mask=mask).last_hidden_state

    return states
