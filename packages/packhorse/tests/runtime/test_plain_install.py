"""What a plain install can do: every extra absent, as after `pip install packhorse`."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[4]
# The modules that the extras bring and the core does not.
EXTRAS = (
    *("onnx", "onnxruntime", "onnxscript", "transformers", "tensorflow", "matplotlib", "pyarrow"),
    *("openvino", "ctranslate2", "sentence_transformers", "datasets", "ray", "fastapi", "psutil"),
)
WITHOUT = """
import json, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {extras}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
from packhorse.cli import main
codes = [main(words) for words in json.loads(sys.argv[1])]
print()
print(json.dumps(codes))
"""


def run(*commands: tuple[object, ...]) -> tuple[list[int], str]:
    """The exit codes of the commands, one after the other in one process, and its errors."""
    words = json.dumps([[str(word) for word in command] for command in commands])
    command = [sys.executable, "-c", WITHOUT.format(extras=set(EXTRAS)), words]
    completed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert completed.returncode == 0, completed.stderr
    return json.loads(completed.stdout.splitlines()[-1]), completed.stderr


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from packhorse.reports import random_model

    return random_model.write("tiny", tmp_path_factory.mktemp("plain") / "model")


def test_the_core_does_without_any_extra(model: Path, tmp_path: Path) -> None:
    codes, errors = run(
        ("run", "w1 w2", "--task", "embed", "--model", model),
        ("inspect", model),
        ("convert", model, tmp_path / "tf1", "--to", "tf1"),
        ("run", "w1 w2", "--model", tmp_path / "tf1" / "bert_model.ckpt"),
        ("verify", model, tmp_path / "tf1"),
        ("bench", "packing", "--count", "1000", "--depths", "2", "--algorithms", "spfhp"),
        ("doctor",),
    )
    assert codes == [0] * 7, errors


def test_what_needs_an_extra_names_it(model: Path, tmp_path: Path) -> None:
    """The control too: the extras really are away."""
    codes, errors = run(
        ("convert", model, tmp_path / "onnx", "--to", "onnx"),
        ("onnx", "pack", "in.onnx", tmp_path / "out.onnx", "--mode", "mask"),
    )
    assert codes == [2, 2], errors
    assert all("packhorse[onnx]" in line for line in errors.splitlines()), errors
    assert list(tmp_path.iterdir()) == []


def test_the_list_above_is_of_extras() -> None:
    project = tomllib.loads((REPOSITORY / "packages" / "packhorse" / "pyproject.toml").read_text())[
        "project"
    ]
    core = {line.split(">")[0].replace("-", "_") for line in project["dependencies"]}
    assert not core & set(EXTRAS)
