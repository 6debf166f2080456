"""The course's scripts for Keras, unchanged, end to end."""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

SCRIPTS = Path(__file__).parent / "scripts"
pytestmark = pytest.mark.skipif(
    find_spec("tensorflow") is None, reason="tensorflow-cpu is not installed"
)
VARIANTS = ("keras_faster", "keras_replicated", "keras_pipelining")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files as MNIST has them: bright bars in places that tell the class, over noise."""
    folder, rng = tmp_path_factory.mktemp("mnist"), np.random.default_rng(0)
    for part, count in (("train", 1100), ("t10k", 1050)):
        labels = rng.integers(0, 10, count, dtype=np.uint8)
        pixels = rng.integers(0, 60, (count, 28, 28), dtype=np.uint8)
        for image, label in zip(pixels, labels, strict=True):
            image[2 * label + 3 : 2 * label + 6] += 180
        for kind, values in (("images-idx3", pixels), ("labels-idx1", labels)):
            head = struct.pack(f">I{values.ndim}I", 0x800 + values.ndim, *values.shape)
            (folder / f"{part}-{kind}-ubyte").write_bytes(head + values.tobytes())
    return folder


def port(script: str, images: Path, folder: Path, **environment: str):
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_HOME": str(folder)}
    return subprocess.run(
        [sys.executable, "-m", "packhorse", "port", str(SCRIPTS / f"{script}.py")],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
        env=os.environ | quiet | {"PACKHORSE_DATASETS": str(images)} | environment,
    )


def accuracies(text: str) -> list[float]:
    return [float(actual) for actual in re.findall(r"accuracy: ([\d.]+)", text)]


def test_the_courses_script(images: Path, tmp_path: Path) -> None:
    completed = port("section_three", images, tmp_path)
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.splitlines()[-1] == "Program ran successfully"
    assert len(set(accuracies(completed.stdout))) > 1, "it trained and evaluated"
    caught = completed.stderr.splitlines()[-2:]
    assert caught[0] == "packhorse port: tensorflow.python.ipu was packhorse_port.tensorflow"
    assert "mnist (section_three.py:16)" in caught[1]


@pytest.mark.slow
@pytest.mark.parametrize("script", VARIANTS)
def test_its_variants(script: str, images: Path, tmp_path: Path) -> None:
    completed = port(script, images, tmp_path)
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.splitlines()[-1] == "Program ran successfully"


@pytest.mark.slow
def test_compiled_code_is_found_again(images: Path, tmp_path: Path) -> None:
    """XLA's, where a script asks for XLA: the second run compiles nothing that the first has."""
    text = (SCRIPTS / "section_three.py").read_text()
    script = tmp_path / "jit.py"
    script.write_text(
        text.replace('metrics=["accuracy"]', 'metrics=["accuracy"], jit_compile=True')
    )
    cache = tmp_path / "cache"
    flags = {"TF_POPLAR_FLAGS": f"--executable_cache_path={cache}"}
    stored = []
    for _ in range(2):
        completed = port(str(script.with_suffix("")), images, tmp_path, **flags)
        assert completed.returncode == 0, completed.stderr
        stored.append({path.name: path.stat().st_mtime_ns for path in (cache / "xla").iterdir()})
    assert stored[0] and stored[0] == stored[1]
