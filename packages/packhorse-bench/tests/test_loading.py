"""A checkpoint as large as a model's, and rows of all that open it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from packhorse.checkpoint.tensorflow import tf1
from packhorse.errors import InputError
from packhorse.model.config import BertConfig
from packhorse.reports import random_model
from packhorse.reports import tables as report
from packhorse_bench import loading

TINY = random_model.CONFIGS["tiny"]


def test_the_variables_are_those_of_a_real_checkpoint(shared_data: Path) -> None:
    folder = shared_data / "tf1" / "keras_bert_tiny"
    raw = json.loads((folder / "bert_config.json").read_text())
    config = BertConfig(
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        layers=raw["num_hidden_layers"],
        heads=raw["num_attention_heads"],
        intermediate_size=raw["intermediate_size"],
        max_positions=raw["max_position_embeddings"],
        type_vocab_size=raw["type_vocab_size"],
    )
    real = {name: tuple(tensor.shape) for name, tensor in tf1.read(folder).tensors.items()}
    assert loading.variables(config) == real


def test_large_is_as_large_as_bert_large() -> None:
    shapes = loading.variables(random_model.CONFIGS["large"])
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == 336_226_108


def test_what_is_written_is_read(tmp_path: Path) -> None:
    prefix, shapes = loading.write(tmp_path, TINY)
    tensors = tf1.read(prefix).tensors
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == shapes
    assert 0.01 < tensors["bert/embeddings/word_embeddings"].std() < 0.03


def test_every_engine_in_a_process_of_its_own(tmp_path: Path) -> None:
    progress = []
    comparison = loading.compare(
        "tiny",
        repeats=1,
        folder=tmp_path,
        progress=lambda *at: progress.append(at),
        engines=("packhorse",),
    )
    assert progress == [(1, 2), (2, 2)] and not any(tmp_path.iterdir())
    plain, packhorse_row = comparison.rows
    assert (plain.engine, plain.over_plain, plain.best_over_plain) == ("plain read", 1, 1)
    assert packhorse_row.engine == "packhorse" and packhorse_row.problem is None
    assert packhorse_row.over_plain == pytest.approx(packhorse_row.seconds / plain.seconds)
    assert packhorse_row.gigabytes_per_second == pytest.approx(
        comparison.bytes / packhorse_row.seconds / 1e9
    )
    assert (
        packhorse_row.memory is None or packhorse_row.memory < 64 << 20
    )  # what was imported does not count
    shown = loading.table(comparison)
    assert len(shown.rows) == 2 and len(shown.columns) == len(shown.rows[0])


@pytest.mark.slow
def test_tensorflow_beside_ours(tmp_path: Path) -> None:
    pytest.importorskip("tensorflow", reason="tensorflow-cpu is not installed")
    rows = loading.compare("tiny", repeats=2, folder=tmp_path).rows
    assert [row.engine for row in rows] == ["plain read", "packhorse", "tensorflow"]
    assert all(row.problem is None and row.best_seconds <= row.seconds for row in rows)


def test_what_fails_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "find_spec", lambda name: None)
    comparison = loading.compare("tiny", repeats=1, folder=tmp_path, engines=("tensorflow",))
    assert report.problems(comparison.rows) == ["tensorflow: tensorflow is not installed"]
    assert [row[0].strip() for row in loading.table(comparison).rows] == ["plain read"]


@pytest.mark.parametrize(
    ("config", "repeats", "engine"),
    [("huge", 1, "packhorse"), ("tiny", 0, "packhorse"), ("tiny", 1, "numpy")],
)
def test_a_wrong_question_is_an_error(config: str, repeats: int, engine: str) -> None:
    with pytest.raises(InputError):
        loading.compare(config, repeats, engines=(engine,))
