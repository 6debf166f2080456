"""`make wheel`: the wheel with each of its extras in an empty environment does what it is for."""

from __future__ import annotations

from pathlib import Path
from zipfile import ZipFile

import pytest

from ..machines.test_extras import EXTRAS, WORKS_WITHOUT, write_files
from .conftest import Environment

pytestmark = [pytest.mark.wheel, pytest.mark.timeout(1800)]
# Extras that are for a command of another one.
BESIDE = {
    "clean": "data",
    "cluster": "data",
    "grpc": "serve",
    "otel": "serve",
    "tensorflow": "port",
}
# What fails without the extra (`machines.test_extras`), unless that does not end by itself.
CALLS = {name: call for name, (_, call) in (EXTRAS | WORKS_WITHOUT).items()}
CALLS |= {
    "serve": "from packhorse.serve.app import create",
    "grpc": "from packhorse.serve.rpc.server import RpcServer",
    "clean": 'main(["data", "build", "texts.txt", "clean", "--tokenizer", "model", "--dedup", '
    '"near", "--report-languages"])',
    "otel": "from packhorse.serve.telemetry import Telemetry",
    "all": CALLS["data"],
    "port": 'main(["port", "--check", "script.py"])',
    "bench": 'main(["bench", "packing", "--help"])',
    "peers": "import ctranslate2, onnxruntime, openvino, sentence_transformers",
    "docs": "import material, mkdocstrings",
}
PROGRAM = """
from pathlib import Path
from packhorse.cli import main

if __name__ == "__main__":
    {statements}
"""


@pytest.mark.parametrize("extra", CALLS)
def test_an_extra_brings_what_it_is_for(
    extra: str, environment: Environment, wheels: list[Path], tmp_path: Path
) -> None:
    extras = ",".join([extra, BESIDE[extra]] if extra in BESIDE else [extra])
    environment.require(f"pip install 'packhorse[{extras}]'", tmp_path)
    environment.require("pip check", tmp_path)
    with ZipFile(wheels[0]) as archive:
        (record,) = (name for name in archive.namelist() if name.endswith("/RECORD"))
        built = archive.read(record).decode().splitlines()
    installed = (environment.packages / record).read_text("utf-8").splitlines()
    sources = [line for line in built if line.startswith("packhorse/")]
    assert set(sources) <= set(installed), "pip took another packhorse than the one in dist/"
    write_files(tmp_path)
    (tmp_path / "script.py").write_text("import poptorch\n")
    *before, last = CALLS[extra].split("; ")
    if last.startswith("main("):
        last = f"assert {last} == 0"
    statements = "\n    ".join([*before, last])
    (tmp_path / "program.py").write_text(PROGRAM.format(statements=statements))
    environment.require("python program.py", tmp_path)
