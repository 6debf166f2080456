"""`packhorse train --texts`: from plain text to a model with its card, in one command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from packhorse import checkpoint

from ..data import corpora

pytest.importorskip("nupunkt", reason="no nupunkt: pip install 'packhorse[data]'")


@pytest.fixture
def flags(tmp_path: Path) -> dict[str, object]:
    """Of the command: a new, small model, and a text with a document per line."""
    corpora.write_vocabulary(tmp_path / "vocab.txt")
    texts = "".join(f"{' '.join(document)}\n\n" for document in corpora.documents(200))
    (tmp_path / "texts.jsonl").write_text(
        "".join(json.dumps(text) + "\n" for text in texts.split("\n\n") if text)
    )
    return {
        "--config": "domain-bert",
        "--texts": tmp_path / "texts.jsonl",
        "--tokenizer": tmp_path / "vocab.txt",
        "--out": tmp_path / "run",
        "--layers": 1,
        "--hidden-size": 16,
        "--heads": 2,
        "--dropout": 0,
        "--max-length": 64,
        "--learning-rate": 0.01,
        "--epochs": 0,
        "--steps": 12,
        "--eval-every": 4,
        "--eval-every-sequences": 0,
    }


def command(flags: dict[str, object], more: dict[str, object] | None = None) -> list[object]:
    pairs = (flags | (more or {})).items()
    return ["train", *(word for pair in pairs for word in pair)]


def evaluations(run: Path) -> list[dict[str, float]]:
    lines = (run / "log.jsonl").read_text().splitlines()
    return [value for line in lines if (value := json.loads(line).get("evaluation"))]


def test_texts_become_a_model_with_its_card(cli, flags: dict[str, object], tmp_path: Path) -> None:
    run = tmp_path / "run"
    result = cli(*command(flags))
    assert result.code == 0, result.err
    assert "200 documents" in result.err
    losses = [values["mlm_loss"] for values in evaluations(run)]
    assert len(losses) == 4 and losses[-1] < losses[0]
    card = (run / "model" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n") and "# run\n" in card
    assert f"| masked-word loss | {losses[0]:.4f} | {min(losses):.4f} |" in card
    assert "| documents read | 200 |" in card and "1 files: texts.jsonl" in card
    loaded = checkpoint.load(run / "model")
    assert "mlm" in loaded.model.heads
    again = cli(*command(flags))
    assert again.code == 0 and "nothing is left to train" in again.err


def test_text_that_changed_is_refused(cli, flags: dict[str, object], tmp_path: Path) -> None:
    assert cli(*command(flags, {"--steps": 1})).code == 0
    with (tmp_path / "texts.jsonl").open("a") as file:
        file.write('"One more document."\n')
    result = cli(*command(flags, {"--steps": 1}))
    assert result.code == 2 and f"remove {tmp_path / 'run' / 'corpus'}" in result.err


def test_a_run_without_progress_ends_by_patience(
    cli, flags: dict[str, object], tmp_path: Path
) -> None:
    """A learning rate of almost nothing improves nothing for long."""
    more = {"--steps": 40, "--eval-every": 1, "--patience": 3, "--measure": "mlm_accuracy"}
    result = cli(*command(flags, more | {"--learning-rate": 1e-12}))
    assert result.code == 0, result.err
    assert len(evaluations(tmp_path / "run")) == 4  # the first is the best, then three
    log = (tmp_path / "run" / "log.jsonl").read_text().splitlines()
    assert max(json.loads(line)["step"] for line in log) == 3


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"--train": "corpus"}, "texts are for pretraining, in place of train"),
        ({"--task": "classify"}, "texts are for pretraining"),
        ({"--eval-every": 0, "--patience": 2}, "patience counts evaluations"),
    ],
)
def test_what_does_not_go_together(
    cli, flags: dict[str, object], more: dict[str, object], message: str
) -> None:
    result = cli(*command(flags, more))
    assert result.code == 2 and message in result.err


def test_a_single_document_cannot_be_held_out(
    cli, flags: dict[str, object], tmp_path: Path
) -> None:
    (tmp_path / "one.txt").write_text("One document of text.")
    result = cli(*command(flags, {"--texts": tmp_path / "one.txt", "--eval-fraction": 1e-9}))
    assert result.code == 2 and "none of the 1 documents is held out" in result.err
    assert "--documents" in result.err and "flag of `packhorse data build`" in result.err


def test_texts_need_a_tokenizer(cli, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Text.")
    words = ("--config", "domain-bert", "--texts", tmp_path / "a.txt", "--out", tmp_path / "run")
    result = cli("train", *words)
    assert result.code == 2 and "set model to start from, or tokenizer" in result.err
