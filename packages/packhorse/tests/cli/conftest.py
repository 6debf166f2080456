"""Small models for every task, written once, and the command line in this process."""

from __future__ import annotations

import json
import string
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from packhorse.cli import main

WORDS = ("the", "horse", "mule", "carries", "sacks", "to", "market", "good", "bad", "hello")
LABELS = {"classify": ("good", "bad"), "rerank": ("score",), "tokens": ("O", "B-PER", "I-PER")}


class Spoken(NamedTuple):
    """What a command said, and how it ended."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """With --json it is alone on stdout."""
        return json.loads(self.out)


@pytest.fixture(autouse=True)
def _one_thread(threads) -> None:
    """Small models gain nothing from more, and on busy cores threads wait for each other."""
    threads(1)


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str]) -> Callable[..., Spoken]:
    """Run a command line here; its last word is its exit code."""

    def run(*arguments: object) -> Spoken:
        capfd.readouterr()
        code = main([str(argument) for argument in arguments])
        return Spoken(code, *capfd.readouterr())

    return run


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a random model with the head of this name: embed, mlm, span, classify …"""
    return cache(lambda head: write_tiny(head, tmp_path_factory.mktemp("models")))


def write_tiny(head: str, home: Path) -> Path:
    import torch

    from packhorse import attention, checkpoint
    from packhorse.model.bert import Bert
    from packhorse.model.config import BertConfig
    from packhorse.model.heads import Embed, Mlm, PooledLabels, Pooler, TokenLabels
    from packhorse.model.model import Model

    letters = string.ascii_lowercase + string.digits + string.punctuation
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *letters]
    words += [f"##{letter}" for letter in letters]
    config = BertConfig(len(words), 32, 2, 4, 64, max_positions=64)
    torch.manual_seed(0)
    bert, labels = Bert(config, attention.kernel("reference")), LABELS.get(head, ())
    heads = {
        "embed": lambda: Embed(("mean",), normalise=True),
        "mlm": lambda: Mlm(config, bert.embed.words, True),
        "span": lambda: TokenLabels(config, 2),
        "classify": lambda: PooledLabels(config, Pooler(config), 2),
        "rerank": lambda: PooledLabels(config, Pooler(config), 1),
        "tokens": lambda: TokenLabels(config, 3),
    }
    (home / "vocab").mkdir()
    (home / "vocab" / "vocab.txt").write_text("\n".join(words) + "\n")
    model = Model(bert, {"classify" if head == "rerank" else head: heads[head]()}).eval()
    model_files = checkpoint.Checkpoint(config, model, home / "vocab", head, 64, labels=labels)
    return checkpoint.write(home / head, model_files)
