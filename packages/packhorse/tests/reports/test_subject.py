"""The model of a measurement, as a folder that every engine reads."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from packhorse import checkpoint
from packhorse.errors import CheckpointError, InputError, PackhorseError
from packhorse.reports import random_model, subject


def of(**values: Any) -> Any:
    nothing = {"model": "", "config": None, "vocab": None, "heads": None, "seed": 0}
    return SimpleNamespace(**(nothing | values))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model.write("tiny", tmp_path_factory.mktemp("subject") / "model")


def test_a_geometry_is_random_weights(tmp_path: Path) -> None:
    model = of(config="tiny")
    assert subject.name(model) == "random weights, tiny"
    assert checkpoint.load(subject.folder(model, tmp_path)).config.hidden_size == 64


def test_random_weights_with_a_vocabulary(tmp_path: Path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "horse", "##s"]
    vocab = tmp_path / "vocab.txt"
    vocab.write_text("\n".join(words) + "\n", "utf-8")
    model = checkpoint.load(subject.folder(of(config="tiny", vocab=str(vocab)), tmp_path))
    (encoding,) = checkpoint.tokenizer(model).encode(["Horses"])
    assert encoding.ids.tolist() == [2, 5, 6, 3] and model.config.vocab_size == 2048
    vocab.write_text("\n".join([*words, *map(str, range(2048))]) + "\n", "utf-8")
    with pytest.raises(PackhorseError, match="2048"):
        subject.folder(of(config="tiny", vocab=str(vocab)), tmp_path / "too-many")


def test_a_folder_is_taken_as_it_is(written: Path, tmp_path: Path) -> None:
    model = of(model=str(written))
    assert subject.folder(model, tmp_path) == written and list(tmp_path.iterdir()) == []
    assert subject.name(model) == str(written)


def test_another_format_becomes_a_folder(written: Path, tmp_path: Path) -> None:
    old = checkpoint.write(tmp_path / "tf1", checkpoint.load(written), to="tf1")
    apart = tmp_path / "apart"
    apart.mkdir()
    (old / "bert_config.json").rename(apart / "settings.json")
    (old / "vocab.txt").rename(apart / "words.txt")
    prefix = str(old / "bert_model.ckpt")
    with pytest.raises(CheckpointError, match="--config"):
        subject.folder(of(model=prefix), tmp_path / "a")
    files = {"config": str(apart / "settings.json"), "vocab": str(apart / "words.txt")}
    folder = subject.folder(of(model=prefix, **files), tmp_path)
    assert (folder / "model.safetensors").is_file() and (folder / "vocab.txt").is_file()
    with pytest.raises(InputError, match=r"unknown configuration 'gigantic'.*large, or a file"):
        subject.folder(of(model=prefix, config="gigantic"), tmp_path / "b")
