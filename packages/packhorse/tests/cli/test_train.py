"""`packhorse train` from the outside: flags, looks ahead, runs, signals, and what it leaves."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from packhorse import progress, status
from packhorse.cli.train import run_progress
from packhorse.train import recipes
from packhorse.train.journal import RunStatus

SIZES = ("--layers", "2", "--hidden-size", "32", "--heads", "2", "--device", "cpu")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packed rows of a few words, as `packhorse data build` leaves them."""
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    from packhorse.cli import main

    home = tmp_path_factory.mktemp("corpus")
    words = ["the", "horse", "mule", "carries", "sacks", "to", "market", "slowly", "."]
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (home / "vocab.txt").write_text("\n".join([*special, *words]) + "\n")
    sentences = [f"the {w} carries {v} to the market ." for w in words[1:3] for v in words[3:8]]
    documents = ["\n".join(sentences[i % 7 :] + sentences[: i % 5]) for i in range(30)]
    (home / "part-00000-of-00001").write_text("\n\n".join(documents) + "\n")
    flags = ("--tokenizer", str(home / "vocab.txt"), "--max-length", "48", "--workers", "1")
    source, out = str(home / "part-00000-of-00001"), str(home / "out")
    assert main(["data", "build", source, out, *flags, "--format", "sentences"]) == 0
    return home / "out"


def test_settings_are_shown_and_come_from_everywhere(
    cli: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.toml").write_text("batch = 3\nsteps = 3\nseed = 3\n")
    monkeypatch.setenv("PACKHORSE_TRAIN_STEPS", "4")
    monkeypatch.setenv("PACKHORSE_TRAIN_SEED", "4")
    file = tmp_path / "a.toml"
    result = cli("train", "--config", file, "--seed", "5", "--no-next-sentence", "--print-config")
    lines = [line.partition("  #")[0].rstrip() for line in result.out.splitlines()]
    assert {"batch = 3", "steps = 4", "seed = 5", "next_sentence = false"} <= set(lines)
    result = cli(
        "train", "--config", file, "--text", "a", "--text", "b", "--print-config", "--json"
    )
    assert result.document["text"] == ["a", "b"] and result.document["steps"] == 4


def test_a_flag_of_several_takes_all_that_follow(cli: Callable) -> None:
    flags = ("--clamp", "1", "3", "--text", "a", "b", "--scale", "-1", "1", "--steps", "4")
    settings = cli("train", *flags, "--print-config", "--json").document
    assert (settings["clamp"], settings["text"], settings["scale"]) == (
        [1.0, 3.0],
        ["a", "b"],
        [-1.0, 1.0],
    )
    assert settings["steps"] == 4
    result = cli("train", "--clamp", "3", "1", "--print-config")
    assert result.code == 2 and "clamp is (3.0, 1.0); give two numbers, the minimum" in result.err


def test_a_preset_is_shown_as_toml(cli: Callable, tmp_path: Path) -> None:
    preset = {"num_layers": 3, "optimizer": "LAMB", "layers_per_ipu": [3], "batch_size": 2}
    (tmp_path / "mini.json").write_text(json.dumps(preset))
    result = cli("train", "--config", tmp_path / "mini.json", "--print-config")
    assert result.code == 0 and "layers = 3" in result.out and 'optimizer = "lamb"' in result.out
    assert result.err.count("layers_per_ipu") == 1


def test_the_recipes_are_listed(cli: Callable) -> None:
    result = cli("train", "--list", "--json")
    assert result.code == 0 and set(result.document) == set(recipes.names())
    assert "laptop" in result.document["mini"]
    plain = cli("train", "--list").out
    assert all(name in plain for name in recipes.names())
    shown = " ".join(cli("train", "--help").out.replace("│", " ").split())
    assert ", ".join(recipes.names()) in shown


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--learning-rat", "1"), "--learning-rat"),
        (("--batch", "few"), "batch"),
        (("--batch", "0", "--print-config"), "batch is 0; it must be a whole number, 1 or more"),
        (("--config", "nowhere.toml"), "there is no file nowhere.toml"),
        (("--steps", "1"), "names no data"),
        (("--train", "nowhere", "--steps", "1"), "`packhorse data build SOURCES nowhere --tok"),
        (("--train", "nowhere", "--nproc", "2", "--timeout=-1"), "timeout is -1 s; it must be"),
        (("--train", "nowhere", "--nproc", "2", "--timeout=inf"), "timeout is inf s; it must be"),
    ],
)
def test_mistakes_are_one_line(cli: Callable, flags: tuple[str, ...], message: str) -> None:
    result = cli("train", *flags)
    assert result.code == 2 and message in result.err and result.err.count("\n") == 1


def test_a_look_ahead_and_the_run_it_speaks_of(cli: Callable, corpus: Path, tmp_path: Path) -> None:
    run = ("train", "--train", corpus, *SIZES, "--batch", "12", "--epochs", "2")
    run += ("--micro-tokens", "96", "--out", tmp_path / "run", "--log-every", "2", "--json")
    ahead = cli(*run, "--dry-run")
    assert ahead.code == 0 and not (tmp_path / "run").exists()
    estimate = ahead.document
    assert estimate["hours"] > 0 and "trial" in estimate["rate"] and "trial" in ahead.out
    assert estimate["accumulation"] * estimate["micro_batch"] == pytest.approx(
        estimate["global_batch"]
    )
    result = cli(*run)
    assert result.code == 0, result.err
    assert result.document["step"] == estimate["steps"]
    assert result.document["sequences"] == pytest.approx(estimate["sequences"], rel=0.1)
    assert "tok/s" not in result.err, "with --json no progress is shown"
    assert result.document["settings"]["batch"] == 12
    assert "earlier run" in cli(*run, "--dry-run").document["rate"]
    again = cli(*run)
    assert again.document["step"] == estimate["steps"] and "nothing is left to train" in again.err
    filled = cli("run", "the [MASK] carries sacks", "--model", result.document["model"])
    assert filled.code == 0, filled.err
    _refuses_other_settings(cli, run, tmp_path / "run")


def _refuses_other_settings(cli: Callable, run: tuple[Any, ...], folder: Path) -> None:
    """For it is finished; made longer, it goes on."""
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    result = cli(*run, "--learning-rate", "0.5")
    assert result.code == 2 and "Traceback" not in result.err
    last = result.err.splitlines()[-1]
    assert "is finished" in last and "learning_rate is now 0.5; it was 0.0001" in last
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    at = run.index("--epochs") + 1
    longer = cli(*run[:at], "3", *run[at + 1 :], "--learning-rate", "0.5")
    assert longer.code == 0 and "learning_rate is now 0.5; it was 0.0001" in longer.err
    assert "learning_rate = 0.5" in (folder / "settings.toml").read_text()


@pytest.mark.parametrize("look", [("--dry-run",), ()])
def test_a_model_that_is_missing_is_missed(
    look: tuple[str, ...], cli: Callable, corpus: Path, tmp_path: Path
) -> None:
    flags = ("--model", "tf-checkpoints/model.ckpt-28252", "--train", corpus, "--steps", "9")
    result = cli("train", *flags, *SIZES, "--out", tmp_path / "run", *look)
    assert result.code == 2 and "MLCommons" in result.err  # where the file comes from


def test_a_target_without_held_out_data_names_the_command_that_makes_some(
    cli: Callable, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ("train", "--train", corpus, *SIZES, "--steps", "2", "--target", "0.01")
    run += ("--out", tmp_path / "run")
    result = cli(*run)
    assert result.code == 2
    command = result.err.split("`")[1].split()
    assert command[:3] == ["packhorse", "data", "build"]
    # With texts to hold out, it is a command, and what it makes is what was missing.
    source = corpus.parent / "part-00000-of-00001"
    command = [str(source) if word == "HELD_OUT_TEXTS" else word for word in command[1:]]
    held_out = tmp_path / "held-out"
    command[command.index(f"{corpus}-eval")] = str(held_out)
    assert cli(*command, "--format", "sentences", "--workers", "1").code == 0
    assert f"set eval to {corpus}-eval/train" in result.err
    monkeypatch.setattr(progress, "PAUSE", 0.0)
    trained = cli(*run, "--eval", held_out / "train", "--log-every", "1")
    assert trained.code == 0
    lines = trained.err.splitlines()
    steps = [line for line in lines if line.startswith("training: ")]
    assert steps[0] == "training: 0"
    assert steps[1].startswith("training: 1 of 2 (50%), loss ") and steps[1].endswith("% full")
    assert steps[2].startswith("training: 2 of 2 (100%), loss ") and "tok/s" in steps[2]
    (evaluation,) = [line for line in lines if line.startswith("step 2, ")]
    assert "mlm_accuracy" in evaluation and lines.index(evaluation) > lines.index(steps[2])


def _published(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """The figures that the process publishes for the monitor."""
    return next((entry.figures for entry in status.read() if entry.pid == process.pid), {})


@pytest.mark.parametrize(
    ("number", "code"),
    [pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow), (signal.SIGTERM, 143)],
)
def test_a_signal_ends_behind_the_step(
    number: signal.Signals, code: int, cli: Callable, corpus: Path, tmp_path: Path
) -> None:
    run = ("train", "--train", corpus, *SIZES, "--batch", "12", "--out", tmp_path)
    command = [sys.executable, "-m", "packhorse", *map(str, run)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, "--steps", "100000", "--log-every", "1"], stderr=subprocess.PIPE, env=environment
    )
    log = tmp_path / "log.jsonl"
    deadline = time.monotonic() + 240
    while not (
        log.exists() and log.read_bytes().count(b"\n") > 3 and _published(process).get("done")
    ):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    figures = _published(process)
    assert 0 < figures["done"] < figures["total"] == 100000 and figures["does"].startswith(
        "training, loss"
    )
    assert figures["tokens_per_second"] > figures["sequences_per_second"] > 0 < figures["fill"] <= 1
    process.send_signal(number)
    _, error = process.communicate(timeout=60)
    assert process.returncode == code, error
    (saved,) = tmp_path.glob("step-*")
    step = int(saved.name[5:])
    assert f"stopped after step {step:,}".encode() in error
    assert log.read_bytes().count(b"\n") == step and not (tmp_path / "model").exists()
    result = cli(*run, "--steps", step + 2, "--json")
    assert result.code == 0 and result.document["step"] == step + 2
    assert f"resuming after step {step}" in result.err and "steps is now" in result.err


def test_a_loss_that_is_no_number_has_its_own_code(
    cli: Callable, corpus: Path, tmp_path: Path
) -> None:
    run = ("train", "--train", corpus, *SIZES, "--steps", "30", "--out", tmp_path)
    run += ("--learning-rate", "1e30", "--optimizer", "adamw", "--clip", "0")
    result = cli(*run, "--json")
    assert result.code == 3 and "step " in result.err and "rows " in result.err
    document = result.document
    assert (document["exit_code"], document["checkpoint"], document["out"]) == (
        3,
        None,
        str(tmp_path),
    )
    assert document["error"] in result.err and f"step {document['step']}: " in document["error"]
    assert document["settings"]["learning_rate"] == 1e30
    assert cli(*run).out == ""  # nothing that was not asked for


STATUS = RunStatus(
    step=20,
    steps=100,
    loss=6.54321,
    accuracy=0.1234,
    sequences=640,
    sequences_per_second=1234.5,
    tokens_per_second=213_000.0,
    fill=0.9975,
    mfu=0.417,
)
FIGURES = "loss 6.5432, accuracy 0.1234, 1,234.5 seq/s, 213,000 tok/s, 99.8% full, MFU 41.7%"


def test_progress_of_training_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PACKHORSE_RUNTIME", str(tmp_path))  # not what earlier tests publish
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with run_progress(rank=0) as show:
        show("training", None)
        show("training", STATUS)
        show("training", replace(STATUS, evaluation={"f1[x]": 0.25}))
        (published,) = [item.figures for item in status.read() if item.pid == os.getpid()]
    shown = " ".join(terminal.getvalue().split())
    assert "20/100" in shown and FIGURES in shown
    assert "step 20, 640 sequences: f1[x] 0.25" in shown, "a measure's name is not markup"
    assert published["does"] == "training, first steps"


def test_only_rank_0_shows_progress(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PACKHORSE_RUNTIME", str(tmp_path))
    with run_progress(rank=1) as show:
        show("training", None)
        show("training", replace(STATUS, evaluation={"f1": 0.25}))
        assert not [item for item in status.read() if item.pid == os.getpid()]
    assert capsys.readouterr().err == ""


def test_figures_that_a_run_lacks_are_left_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "PAUSE", 0.0)
    with run_progress(rank=0) as show:
        show("run 3", replace(STATUS, mfu=None, accuracy=None))
    line = "run 3: 20 of 100 (20%), loss 6.5432, 1,234.5 seq/s, 213,000 tok/s, 99.8% full\n"
    assert capsys.readouterr().err == line


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True
