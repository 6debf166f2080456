"""`packhorse quantize`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import packhorse
from packhorse import checkpoint
from packhorse.cli import main
from packhorse.reports import random_model
from packhorse.runtime import quality, quantizing
from packhorse.runtime.evaluation import gate


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return random_model.write("tiny", tmp_path / "tiny")


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(f"text number {i} {'word ' * (i % 7)}" for i in range(40)) + "\n")
    return path


def test_writes_a_folder_that_loads_in_int8(source, texts, tmp_path, capsys) -> None:
    target = tmp_path / "int8"
    arguments = ["quantize", str(source), str(target), "--calibrate", str(texts), "--json"]
    assert main([*arguments, "--allow-loss"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["quality"]["texts"] == 40 and document["layers"] > 0
    assert document["bytes"] == sum(path.stat().st_size for path in target.rglob("*.*"))
    assert packhorse.load(target, device="cpu").dtype == torch.int8


def test_texts_count_once(source, texts, tmp_path, capsys) -> None:
    """Of equal texts, rounding decides which are nearest, which says nothing about a format."""
    texts.write_text(3 * texts.read_text())
    arguments = ["quantize", str(source), str(tmp_path / "x"), "--calibrate", str(texts), "--json"]
    assert main([*arguments, "--allow-loss"]) == 0
    assert json.loads(capsys.readouterr().out)["quality"]["texts"] == 40


def test_a_model_that_loses_too_much_is_not_written(
    source, texts, tmp_path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quality, "LEAST_MEAN", 1.1)
    target = tmp_path / "int8"
    assert main(["quantize", str(source), str(target), "--calibrate", str(texts)]) == 1
    output = capsys.readouterr()
    assert "too far from fp32" in output.err and "--allow-loss" in output.err
    assert not target.exists()


def test_too_few_texts_are_refused(source, tmp_path, capsys) -> None:
    path = tmp_path / "few.txt"
    path.write_text("one\ntwo\n")
    assert main(["quantize", str(source), str(tmp_path / "x"), "--calibrate", str(path)]) == 2
    assert "2 texts do not show whether the nearest 10 stay the same" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("limit", ["0", "-1"])
def test_a_limit_below_one_is_refused(limit: str, source, texts, tmp_path, capsys) -> None:
    arguments = ["quantize", str(source), str(tmp_path / "x"), "--calibrate", str(texts)]
    assert main([*arguments, "--limit", limit]) == 2
    assert f"--limit is {limit}; it must be 1 or more" in capsys.readouterr().err


def test_a_folder_in_the_way_is_seen_before_the_model_runs(
    source, texts, tmp_path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantizing, "choose_layers", pytest.fail)
    arguments = ["quantize", str(source), str(tmp_path), "--calibrate", str(texts)]
    assert main(arguments) == 2
    assert "is not empty; choose another folder" in capsys.readouterr().err


def test_float8_keeps_the_scales_of_its_texts(source, texts, tmp_path, capsys) -> None:
    target = tmp_path / "float8"
    arguments = ["quantize", str(source), str(target), "--dtype", "float8", "--device", "cpu"]
    assert main([*arguments, "--calibrate", str(texts), "--json", "--allow-loss"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["dtype"] == "float8" and document["layers"] == 8
    assert document["score"] is None
    loaded = checkpoint.load(target)
    assert loaded.quantized == torch.float8_e4m3fn and len(loaded.scales) == 8
    assert packhorse.load(target, device="cpu", dtype="float8").dtype == torch.float8_e4m3fn


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    path = tmp_path / "pairs.csv"
    rows = [f"text number {i},text {'word ' * (i % 5)},{i % 6}" for i in range(30)]
    path.write_text("\n".join(["sentence1,sentence2,score", *rows]) + "\n")
    return path


@pytest.mark.parametrize(("keep", "code"), [("1%", 0), ("100%", 1)])
def test_a_gate_is_the_users_own_task(
    keep: str, code: int, source, texts, pairs, tmp_path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cosines do not decide then; and a share that half of the layers cannot keep is refused."""
    scores = iter([0.8, *[0.5] * 20])  # fp32, then float8
    monkeypatch.setattr(gate, "open_gate", lambda task, path: lambda encoder: next(scores))
    monkeypatch.setattr(quality, "LEAST_MEAN", 1.1)
    target = tmp_path / "float8"
    arguments = ["quantize", str(source), str(target), "--dtype", "float8", "--device", "cpu"]
    arguments += ["--calibrate", str(texts), "--keep", keep, "--task", "stsb"]
    assert main([*arguments, "--input", str(pairs), "--json"]) == code
    output = capsys.readouterr()
    assert target.exists() == (code == 0)
    if code:
        assert "in float8 is too far from fp32, with 4 layers kept as floats" in output.err
    else:
        document = json.loads(output.out)
        assert document["score"] == 0.5 and document["score_fp32"] == 0.8


@pytest.mark.parametrize("score", [0.0, -0.2, float("nan")])
def test_a_gate_needs_a_score_to_keep(
    score: float, source, texts, pairs, tmp_path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """99.9 % of less than nothing is more than all of it."""
    monkeypatch.setattr(gate, "open_gate", lambda task, path: lambda encoder: score)
    arguments = ["quantize", str(source), str(tmp_path / "x"), "--calibrate", str(texts)]
    arguments += ["--keep", "99.9%", "--task", "stsb", "--input", str(pairs)]
    assert main(arguments) == 2
    assert "on the task in fp32, of which no share can be kept" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_a_gate_scores_as_evaluate_does(source, pairs, capsys) -> None:
    score = gate.open_gate("stsb", pairs)(packhorse.load(source, device="cpu"))
    arguments = ["evaluate", "--task", "stsb", "--input", str(pairs), "--model", str(source)]
    assert main([*arguments, "--device", "cpu", "--beside", "none", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    (ours,) = document["engines"]
    assert score == pytest.approx(ours["metrics"]["cosine_spearman"], abs=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--keep", "99.9%"], "--keep, --task and --input belong together"),
        (
            ["--keep", "101%", "--task", "stsb", "--input", "x.csv"],
            "--keep is '101%'; write a share",
        ),
        (
            ["--keep", "most", "--task", "stsb", "--input", "x.csv"],
            "--keep is 'most'; write a share",
        ),
        (["--device", "cpu"], "--device is for --dtype float8"),
    ],
)
def test_flags_that_do_not_fit_are_refused(
    arguments: list[str], message: str, source, tmp_path, capsys
) -> None:
    assert main(["quantize", str(source), str(tmp_path / "x"), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
