"""The Dockerfile, as far as it can be checked without Docker: read, and its Python run."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from packhorse.cli import main
from packhorse.serve.settings import ServeSettings

REPOSITORY = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Line:
    """An instruction and what it is told."""

    word: str
    text: str

    def listed(self) -> list[str]:
        """The exec form: a JSON list."""
        return json.loads(self.text[self.text.index("[") :])


def read(text: str) -> list[Line]:
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    return [Line(*line.split(maxsplit=1)) for line in joined.splitlines()]


def complaints(lines: list[Line], root: Path = REPOSITORY) -> list[str]:
    """What is wrong with it."""
    problems: list[str] = []
    user = "root"
    for line in lines:
        words = line.text.split()
        if line.word == "ARG" and line.text.startswith("BASE_DIGEST"):
            if not re.fullmatch(r"BASE_DIGEST=sha256:[0-9a-f]{64}", line.text):
                problems.append("the base image's digest is none")
        elif line.word == "FROM":
            if not re.fullmatch(r"\S+:(?!latest)\S+@\$\{BASE_DIGEST\}", words[0]):
                problems.append(f"{words[0]} has no fixed tag and digest")
            user = "root"
        elif line.word == "COPY":
            for source in words[:-1]:
                if not (root / source).exists():
                    problems.append(f"{source} is not there")
                elif ignored(source, root):
                    problems.append(f"{source} is ignored")
        elif line.word == "RUN":
            problems += [f"{call} takes any file" for call in pip_calls(line) if not is_bound(call)]
        elif line.word == "USER":
            user = words[0]
        elif line.word == "ADD":
            problems.append("COPY does it")
    if user in ("root", "0"):
        problems.append("it runs as root")
    missing = {"HEALTHCHECK", "VOLUME", "ENTRYPOINT"} - {line.word for line in lines}
    return problems + [f"no {word}" for word in sorted(missing)]


def pip_calls(line: Line) -> list[str]:
    return re.findall(r"pip install[^;&]*", line.text)


def is_bound(call: str) -> bool:
    """Is it by hashes, of what lies here, or torch alone from its own index?"""
    alone = "--no-deps" in call and "--extra-index-url" not in call
    from_checkout = (
        call.strip().endswith(" ./packages/packhorse") and "--no-build-isolation" in call
    )
    torch = re.search(r"--index-url https://download\.pytorch\.org/\S+ torch==[\d.]+\s*$", call)
    return alone and ("--require-hashes" in call or from_checkout or torch is not None)


def ignored(source: str, root: Path) -> bool:
    """The last pattern that fits decides."""
    is_ignored = False
    for line in (root / ".dockerignore").read_text().splitlines():
        if line and not line.startswith("#") and fnmatch.fnmatch(source, line.lstrip("!")):
            is_ignored = not line.startswith("!")
    return is_ignored


@pytest.fixture(scope="module")
def lines() -> list[Line]:
    return read((REPOSITORY / "Dockerfile").read_text())


def test_it_is_sound(lines: list[Line]) -> None:
    assert len(lines) > 15
    assert complaints(lines) == []


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("python:3.12-slim-bookworm@", "python@", "no fixed tag"),
        ("python:3.12-slim-bookworm@", "python:latest@", "no fixed tag"),
        ("bookworm@${BASE_DIGEST}", "bookworm", "no fixed tag and digest"),
        ("ARG BASE_DIGEST=sha256:", "ARG BASE_DIGEST=", "the base image's digest is none"),
        ("--require-hashes", "--no-input", "takes any file"),
        ("--index-url", "--extra-index-url", "takes any file"),
        ("--no-build-isolation", "--no-input", "takes any file"),
        ("USER packhorse\n", "", "root"),
        ("COPY packages/packhorse", "COPY packages/source", "not there"),
        ("COPY packages/packhorse", "COPY docs", "ignored"),
        ("COPY packages/packhorse", "ADD packages/packhorse", "COPY"),
        ("HEALTHCHECK", "LABEL", "HEALTHCHECK"),
    ],
)
def test_the_check_can_fail(old: str, new: str, message: str) -> None:
    text = (REPOSITORY / "Dockerfile").read_text()
    assert old in text
    assert message in " ".join(complaints(read(text.replace(old, new))))


def test_nothing_but_what_is_needed_is_sent(lines: list[Line]) -> None:
    copied = {source for line in lines if line.word == "COPY" for source in line.text.split()[:-1]}
    places = [*REPOSITORY.iterdir(), *(REPOSITORY / "packages").iterdir()]
    names = {place.relative_to(REPOSITORY).as_posix() for place in places} - {"packages"}
    sent = {name for name in names if not ignored(name, REPOSITORY)}
    assert sent == copied
    project = tomllib.loads((REPOSITORY / "packages" / "packhorse" / "pyproject.toml").read_text())[
        "project"
    ]
    library = REPOSITORY / "packages" / "packhorse"
    assert all(
        (library / name).is_file() for name in (project["readme"], *project["license-files"])
    )


def test_what_it_installs_is_offered(lines: list[Line]) -> None:
    project = tomllib.loads((REPOSITORY / "packages" / "packhorse" / "pyproject.toml").read_text())[
        "project"
    ]
    extras = next(line.text for line in lines if line.text.startswith("EXTRAS="))
    chosen = extras.removeprefix("EXTRAS=")
    assert {*chosen.split(",")} <= {*project["optional-dependencies"]}
    assert (REPOSITORY / "locks" / f"{chosen}.txt").exists()


@pytest.mark.parametrize("device", ["cpu", "cuda", "gpu"])
def test_torch_is_the_devices(lines: list[Line], tmp_path: Path, device: str) -> None:
    """What is run with a pip that only says what it was told."""
    command = next(line.text for line in lines if line.word == "RUN" and "DEVICE" in line.text)
    (tmp_path / "pip").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "pip").chmod(0o755)
    variables = {"DEVICE": device, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ran = subprocess.run(["sh", "-c", command], env=variables, capture_output=True, text=True)
    if device == "gpu":
        assert (ran.returncode, ran.stdout) == (2, "")
        return
    assert ran.returncode == 0
    constraints = (REPOSITORY / "constraints.txt").read_text()
    (pin,) = re.findall(r"^torch==.*$", constraints, re.MULTILINE)
    arguments = f"whl/cpu {pin}" if device == "cpu" else "--require-hashes -r locks/torch.txt"
    assert ran.stdout.endswith(f"{arguments}\n")


def test_it_starts_what_the_package_has(lines: list[Line], monkeypatch, capsys) -> None:
    """With the image's variables; and not without a key."""
    variables = dict(
        word.split("=", 1) for line in lines if line.word == "ENV" for word in line.text.split()
    )
    for name, value in variables.items():
        if name.startswith("PACKHORSE"):
            monkeypatch.setenv(name, value)
    command, *words = next(line for line in lines if line.word == "ENTRYPOINT").listed()
    scripts = tomllib.loads((REPOSITORY / "packages" / "packhorse" / "pyproject.toml").read_text())[
        "project"
    ]["scripts"]
    assert command in scripts
    monkeypatch.delenv("PACKHORSE_API_KEY", raising=False)
    assert main([*words, "--print-config"]) == 2
    assert "no API key" in capsys.readouterr().err
    monkeypatch.setenv("PACKHORSE_API_KEY", "secret")
    assert main([*words, "--print-config", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out.splitlines()[-1])
    port = int(next(line.text for line in lines if line.word == "EXPOSE"))
    assert (shown["host"], shown["port"]) == ("0.0.0.0", port) == ("0.0.0.0", ServeSettings().port)
    assert variables["HF_HOME"].startswith(next(x.text for x in lines if x.word == "VOLUME"))


@pytest.fixture
def answering() -> Iterator[dict[str, int]]:
    """A server whose /health says what is asked for."""
    state = {"status": 200}

    class Health(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(state["status"] if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Health) as server:
        state["port"] = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield state
        server.shutdown()
        thread.join()


def test_the_health_check(lines: list[Line], answering: dict[str, int]) -> None:
    command = next(line for line in lines if line.word == "HEALTHCHECK").listed()
    assert command[0] == "python"

    def healthy() -> bool:
        variables = {"PACKHORSE_SERVE_PORT": str(answering["port"]), "http_proxy": "http://[::1]:9"}
        completed = subprocess.run(
            [sys.executable, *command[1:]], env={**os.environ, **variables}, capture_output=True
        )
        return completed.returncode == 0

    assert healthy()
    answering["status"] = 503
    assert not healthy()
