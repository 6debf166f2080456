"""`packhorse onnx pack`, from the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from packhorse import cli as frame

pytest.importorskip("onnx", reason="the extra onnx is not installed")
pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")

Cli = Callable[..., Any]


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = frame.COMMANDS | {"onnx": ("packhorse.cli.onnx:app", "Rewrite ONNX models.")}
    monkeypatch.setattr(frame, "COMMANDS", commands)


@pytest.fixture
def model(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny classifier, as our own exporter writes it."""
    from packhorse import checkpoint

    folder = tmp_path_factory.mktemp("model") / "onnx"
    return checkpoint.write(folder, checkpoint.load(tiny("classify")), to="onnx") / "model.onnx"


def test_packs_and_explains(cli: Cli, model: Path, tmp_path: Path) -> None:
    target = tmp_path / "packed.onnx"
    result = cli(
        *("onnx", "pack", model, target, "--mode", "mask", "--input-shape", "4,32"),
        *("--output", "logits=sequence", "--explain", "--json"),
    )
    assert result.code == 0, result.err
    assert target.is_file() and "nodes became" in result.err
    for word in ("positions", "Gather", "Softmax", "first token", "one per sequence"):
        assert word in result.out
    document = result.document
    assert document["mode"] == "mask" and document["shape"] == [4, 32]
    assert document["outputs"]["last_hidden_state"] == "token"
    assert document["outputs"]["logits"] == "sequence"
    assert document["inputs"]["first"] == "first_positions"
    assert document["files"] == [str(target)]
    assert min(document["nodes"].values()) > 50
    assert document["difference"] < 1e-5
    assert {finding["what"] for finding in document["findings"]} == {
        *("positions", "head", "attention", "output"),
    }


def test_replaces_only_when_told(cli: Cli, model: Path, tmp_path: Path) -> None:
    target = tmp_path / "packed.onnx"
    pack = ("onnx", "pack", model, target, "--mode")
    assert cli(*pack, "repack").code == 0
    again = cli(*pack, "positions")
    assert again.code == 2 and "is there already" in again.err
    assert cli(*pack, "positions", "--overwrite", "--precision", "fp16").code == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--mode", "mask", "--input-shape", "16x256"), "'16x256' is not ROWS,TOKENS"),
        (("--mode", "mask", "--input-shape", "0,256"), "holds nothing"),
        (("--mode", "mask", "--output", "logits"), "is not NAME=token"),
        (("--mode", "mask", "--output", "logits=both"), "is not NAME=token"),
        (("--mode", "mask", "--output", "logits=token"), "per sequence, not per token"),
        (("--mode", "mask", "--output", "scores=token"), "there is no output 'scores'"),
        (("--mode", "guess"), "--mode"),
        ((), "--mode"),
    ],
)
def test_mistakes_are_one_line(
    flags: tuple[str, ...], message: str, cli: Cli, model: Path, tmp_path: Path
) -> None:
    result = cli("onnx", "pack", model, tmp_path / "packed.onnx", *flags)
    assert result.code == 2 and message in result.err and result.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_help_tells_the_modes(cli: Cli) -> None:
    result = cli("onnx", "pack", "--help")
    assert result.code == 0
    words = ("positions", "unpack_info", "first_positions", "packhorse onnx pack model.onnx")
    assert [word for word in words if word not in result.out] == []


def test_a_large_difference_is_a_warning(cli: Cli, tmp_path: Path) -> None:
    """Static int8 scales: ONNX Runtime fuses the original and the packed graph differently."""
    model = Path(__file__).parents[1] / "checkpoint" / "exports" / "optimum-bert-mlm-qdq.onnx"
    result = cli("onnx", "pack", model, tmp_path / "packed.onnx", "--mode", "mask", "--json")
    assert result.code == 0, result.err
    document = result.document
    assert document["difference_unfused"] < 1e-4
    far = document["difference"] > 0.05
    assert far == bool(document["warning"]) == ("warning: the packed model's answers" in result.err)
