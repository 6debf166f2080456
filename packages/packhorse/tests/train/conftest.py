"""A small packed corpus, a small model to start from, and settings that train in a second."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

WORDS = ("good", "fine", "nice", "bad", "poor", "ugly", "horse", "mule", "cart", "road")
VOCAB, CAPACITY = 64, 48


@pytest.fixture(autouse=True)
def _one_thread(threads) -> None:
    """Sums are then added in one order, and small models gain nothing from more."""
    threads(1)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `packhorse data build` leaves: train, eval and tokenizer."""
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    home = tmp_path_factory.mktemp("corpus")
    write_rows(home / "train", rows=40, seed=1)
    write_rows(home / "eval", rows=4, seed=2)
    write_vocabulary(home / "tokenizer")
    return home


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random encoder as transformers writes one."""
    import torch

    from packhorse import attention, checkpoint
    from packhorse.model.bert import Bert
    from packhorse.model.config import BertConfig
    from packhorse.model.heads import Embed, Pooler
    from packhorse.model.model import Model

    home = tmp_path_factory.mktemp("tiny")
    write_vocabulary(home / "vocab")
    config = BertConfig(VOCAB, 32, 2, 4, 64, max_positions=CAPACITY)
    torch.manual_seed(0)
    bert = Bert(config, attention.kernel("reference"))
    model = Model(bert, {"pooled": Pooler(config), "embed": Embed(("mean",), normalize=True)})
    tiny_checkpoint = checkpoint.Checkpoint(config, model.eval(), home / "vocab", "tiny", CAPACITY)
    return checkpoint.write(home / "model", tiny_checkpoint)


@pytest.fixture
def settings(corpus: Path) -> Callable[..., Any]:
    """Settings of a run on the corpus; what a test says goes before."""
    from packhorse.train.settings import TrainSettings

    usual = {
        "train": str(corpus),
        "layers": 2,
        "hidden_size": 32,
        "heads": 2,
        "batch": 16,
        "steps": 6,
        "optimizer": "lamb",
        "learning_rate": 0.01,
        "save_every": 0,
        "device": "cpu",
        "compile": "off",
    }
    return lambda **options: TrainSettings(**{**usual, **options})


def write_vocabulary(folder: Path) -> None:
    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    words = [*special, *WORDS, *(f"w{i}" for i in range(VOCAB - len(special) - len(WORDS)))]
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")


def write_rows(folder: Path, rows: int, seed: int) -> None:
    """Rows of two pairs each; tokens of a pair come from one half of the words."""
    from packhorse.data.packed.masking import Specials
    from packhorse.data.packed.packs import RowLayout, Rows
    from packhorse.data.packed.shards import Writer

    rng = np.random.default_rng(seed)
    ids, lengths, first = [], [], []
    for _ in range(2 * rows):
        half = 5 + 29 * int(rng.integers(2))
        first_segment, second_segment = (
            rng.integers(half, half + 29, rng.integers(3, 10)) for _ in range(2)
        )
        ids.append(np.concatenate([[2], first_segment, [3], second_segment, [3]]))
        lengths.append(len(ids[-1]))
        first.append(len(first_segment) + 2)
    packed = Rows(
        np.concatenate(ids).astype(np.uint16),
        np.array(lengths, np.uint16),
        np.array(first, np.uint16),
        rng.integers(2, size=len(lengths)).astype(np.uint8),
        np.arange(0, len(lengths) + 1, 2),
    )
    writer = Writer(folder, RowLayout(CAPACITY, VOCAB, 3), Specials(2, 3, 4, 0, VOCAB), {})
    writer.add(packed)
    writer.finish()
