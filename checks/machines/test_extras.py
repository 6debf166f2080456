"""Without an extra the rest works, and what needs it names it. Once for each in pyproject.toml."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from packhorse.reports import random_model

REPOSITORY = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.extra, pytest.mark.slow]
# The modules that an extra brings, and a command or call that needs one of them.
EXTRAS: dict[str, tuple[set[str], str]] = {
    "data": ({"pyarrow", "mwparserfromhell", "nupunkt"}, 'main(["waste", "table.parquet"])'),
    "clean": (
        {"rensa", "py3langid"},
        'main(["data", "build", "texts.txt", "clean", "--tokenizer", "model", "--dedup", "near", '
        '"--languages", "en"])',
    ),
    "train": (
        {"tensorboard", "mlperf_logging"},
        "from packhorse.train.trackers import TensorBoard; TensorBoard(Path('run'), 0).close()",
    ),
    "wandb": (
        {"wandb"},
        "import os; os.environ['WANDB_MODE'] = 'offline'; "
        "from packhorse.train.journal import Journal; Journal(Path('run'), wandb='horses').close()",
    ),
    "serve": (
        {"fastapi", "uvicorn", "orjson", "prometheus_client"},
        'main(["serve", "--model", "model"])',
    ),
    "grpc": (
        {"grpc", "grpc_reflection"},
        'main(["serve", "--model", "model", "--grpc-port", "50051"])',
    ),
    "otel": (
        {"opentelemetry.sdk", "opentelemetry.exporter"},  # FastAPI has the rest
        'main(["serve", "--model", "model", "--otlp-endpoint", "http://127.0.0.1:4318"])',
    ),
    "gguf": ({"gguf"}, "from packhorse.checkpoint.gguf import _library; _library() and 0"),
    "onnx": ({"onnx", "onnxruntime"}, 'main(["convert", "model", "out", "--to", "onnx"])'),
    "plots": ({"matplotlib"}, 'main(["waste", "texts.txt", "-m", "model", "--plot", "x.png"])'),
    "cluster": (
        {"ray"},
        'main(["data", "build", "texts.txt", "corpus", "--tokenizer", "model", "--engine", "ray"])',
    ),
    "hf": ({"transformers", "datasets", "accelerate"}, "import packhorse.hf as hf; hf.register()"),
    "tensorflow": (
        {"tensorflow", "keras"},
        "from packhorse_port.tensorflow import install; install()",
    ),
    "tutorials": (
        {"sklearn", "tqdm", "matplotlib"},
        'main(["evaluate", "--task", "classification", "--input", "table.tsv", "--train", '
        '"table.tsv", "--model", "model", "--beside", "none"])',
    ),
}
# Nothing is asked of psutil and nvidia-ml-py where Linux's own files tell, and there is no GPU.
WORKS_WITHOUT = {"monitor": ({"psutil", "pynvml"}, 'main(["monitor", "--json"])')}
# Groups of other extras, packages of their own, and what those need who work on Packhorse.
GROUPS = {"all", "peers", "dev", "docs", "port", "bench"}
PROGRAM = """
import sys
from importlib.machinery import PathFinder
from pathlib import Path

find = PathFinder.find_spec
PathFinder.find_spec = staticmethod(
    lambda name, path=None, target=None:
    None if {modules} & {{name, name.split(".")[0]}} else find(name, path, target)
)
from packhorse.cli import main
from packhorse.errors import PackhorseError
assert main(["run", "w1 w2", "--model", "model", "--json"]) == 0
try:
    code = {call}
except PackhorseError as error:
    print(error, file=sys.stderr)
    code = error.exit_code
sys.exit(code)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("extras")
    write_files(folder)
    return folder


def write_files(folder: Path) -> None:
    """The files that the commands above name."""
    import pyarrow
    import pyarrow.parquet

    random_model.write("tiny", folder / "model")
    (folder / "texts.txt").write_text("w1 w2 w3\nw4 w5\n" * 20)
    (folder / "table.tsv").write_text("text\tlabel\n" + "w1 w2\ta\nw3 w4\tb\n" * 20)
    pyarrow.parquet.write_table(pyarrow.table({"text": ["w1"]}), folder / "table.parquet")


def run(folder: Path, modules: set[str], call: str) -> subprocess.CompletedProcess[str]:
    statements = call.split("; ")
    before = "".join(f"    {statement}\n" for statement in statements[:-1])
    program = PROGRAM.format(modules=modules, call=statements[-1])
    program = program.replace("try:\n", f"try:\n{before}")
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize("extra", EXTRAS)
def test_what_needs_an_extra_names_it(extra: str, folder: Path) -> None:
    completed = run(folder, *EXTRAS[extra])
    assert completed.returncode == 2, completed.stderr
    assert f"pip install 'packhorse[{extra}]'" in completed.stderr.splitlines()[-1]
    assert "Traceback" not in completed.stderr
    assert json.loads(completed.stdout.splitlines()[0])["results"]


@pytest.mark.parametrize("extra", WORKS_WITHOUT)
def test_what_does_without(extra: str, folder: Path) -> None:
    completed = run(folder, *WORKS_WITHOUT[extra])
    assert completed.returncode == 0, completed.stderr


def test_every_extra_is_here() -> None:
    project = tomllib.loads((REPOSITORY / "packages" / "packhorse" / "pyproject.toml").read_text())[
        "project"
    ]
    named = set(project["optional-dependencies"])
    assert named - GROUPS == {*EXTRAS, *WORKS_WITHOUT}
