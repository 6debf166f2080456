"""What a plain install can do: every extra absent, as after `pip install packhorse`."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
# The modules that the extras bring and the core does not.
EXTRAS = (
    *("onnx", "onnxruntime", "onnxscript", "transformers", "tensorflow", "matplotlib", "pyarrow"),
    *("openvino", "ctranslate2", "sentence_transformers", "datasets", "ray", "fastapi", "psutil"),
)
WITHOUT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {extras}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
from packhorse.cli import main
sys.exit(main(sys.argv[1:]))
"""


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    code = WITHOUT.format(extras=set(EXTRAS))
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from packhorse.bench import random_model

    return random_model.write("tiny", tmp_path_factory.mktemp("plain") / "model")


def test_the_core_does_without_any_extra(model: Path, tmp_path: Path) -> None:
    for arguments in (
        ("run", "w1 w2", "--task", "embed", "--model", model),
        ("inspect", model),
        ("convert", model, tmp_path / "tf1", "--to", "tf1"),
        ("run", "w1 w2", "--model", tmp_path / "tf1" / "bert_model.ckpt"),
        ("verify", model, tmp_path / "tf1"),
        ("bench", "packing", "--count", "1000", "--depths", "2", "--algorithms", "spfhp"),
        ("doctor",),
    ):
        found = run(*arguments)
        assert found.returncode == 0, (arguments, found.stderr)


def test_what_needs_an_extra_names_it(model: Path, tmp_path: Path) -> None:
    """The control too: the extras really are away."""
    for arguments, extra in (
        (("convert", model, tmp_path / "onnx", "--to", "onnx"), "packhorse[onnx]"),
        (("onnx", "pack", "in.onnx", tmp_path / "out.onnx", "--mode", "mask"), "packhorse[onnx]"),
    ):
        found = run(*arguments)
        assert found.returncode == 2 and extra in found.stderr, (arguments, found.stderr)
    assert list(tmp_path.iterdir()) == []


def test_the_list_above_is_of_extras() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    core = {line.split(">")[0].replace("-", "_") for line in project["dependencies"]}
    assert not core & set(EXTRAS)
