"""`packhorse serve`: what can be told without loading a model."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from packhorse.cli import main
from packhorse.serve.settings import ServeSettings
from packhorse.settings import setting_fields


def test_every_setting_is_a_flag(capsys) -> None:
    assert main(["serve", "--help"]) == 0
    output = capsys.readouterr().out
    for name in setting_fields(ServeSettings):
        assert f"--{name.replace('_', '-')}" in output
    assert "--keys" not in output
    assert re.findall(r"--no-[a-z-]+", output) == ["--no-graphs", "--no-truncate"]


def test_truncation_has_three_states(capsys) -> None:
    for words, expected in (([], None), (["--auto-truncate"], True), (["--no-truncate"], False)):
        assert main(["serve", "--print-config", "--json", *words]) == 0
        shown = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert shown["auto_truncate"] is expected


def test_the_variables_of_kubernetes_are_ignored_with_a_notice(capsys, monkeypatch) -> None:
    """What it sets in each container if there is a Service named packhorse-serve."""
    variables = {
        "PORT": "tcp://203.0.113.7:8080",
        "SERVICE_HOST": "203.0.113.7",
        "SERVICE_PORT": "8080",
        "SERVICE_PORT_HTTP": "8080",
        "PORT_8080_TCP": "tcp://203.0.113.7:8080",
        "PORT_8080_TCP_PROTO": "tcp",
        "PORT_8080_TCP_PORT": "8080",
        "PORT_8080_TCP_ADDR": "203.0.113.7",
    }
    for name, value in variables.items():
        monkeypatch.setenv(f"PACKHORSE_SERVE_{name}", value)
    assert main(["serve", "--print-config", "--json"]) == 0
    output = capsys.readouterr()
    assert json.loads(output.out.splitlines()[-1])["port"] == 8080
    assert output.err.count("Kubernetes") == 1
    assert "203.0.113.7" not in output.err
    monkeypatch.setenv("PACKHORSE_SERVE_PORT", "8080tcp")
    assert main(["serve", "--print-config"]) != 0
    assert "PACKHORSE_SERVE_PORT" in capsys.readouterr().err


def test_settings_are_shown_and_keys_are_not(capsys, monkeypatch) -> None:
    monkeypatch.setenv("PACKHORSE_API_KEY", "sesame")
    monkeypatch.setenv("PACKHORSE_SERVE_PORT", "1234")
    words = ["--host", "0.0.0.0", "--model", "a=x", "--model", "y", "--graphs"]
    assert main(["serve", "--print-config", "--json", *words]) == 0
    out = capsys.readouterr().out
    shown = json.loads(out.splitlines()[-1])
    assert (shown["port"], shown["model"], shown["graphs"]) == (1234, ["a=x", "y"], True)
    assert "sesame" not in out


def test_what_is_shown_can_be_read(capsys, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PACKHORSE_API_KEY", "sesame")
    words = ["--host", "0.0.0.0", "--model", 'a="x"', "--model", "y", "--graphs", "--dtype", "bf16"]
    assert main(["serve", "--print-config", *words]) == 0
    out = capsys.readouterr().out
    assert "sesame" not in out and "# Age of a batch" in out
    (file := tmp_path / "serve.toml").write_text(out, "utf-8")
    monkeypatch.setenv("PACKHORSE_API_KEY", "sesame")
    assert main(["serve", "--config", str(file), "--print-config"]) == 0
    assert capsys.readouterr().out == out


def test_keys_leave_the_environment_once_read(monkeypatch) -> None:
    """What the server starts (replicas, compilers) inherits none; the server itself has it."""
    served = []

    def run(settings, ready, house) -> None:
        inherited = subprocess.run(["env"], capture_output=True, text=True, check=True).stdout
        served.append((settings.keys, inherited))

    monkeypatch.setattr("packhorse.serve.life.run", run)
    monkeypatch.setenv("PACKHORSE_API_KEY", "sesame")
    assert main(["serve"]) == 0
    (keys, inherited), *_ = served
    assert keys == ("sesame",) and "PATH=" in inherited
    assert "sesame" not in inherited and "PACKHORSE_API_KEY" not in inherited


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--host", "0.0.0.0"], "--insecure"),
        (["--port", "99999"], "65535"),
        (["--api-key", "x"], "--api-key"),
        (["--config", "/nowhere.toml"], "cannot be read"),
        # Files are read before models are loaded.
        (["--model", "nobody", "--port", "0", "--calibration", "/nowhere.npy"], "/nowhere.npy"),
        (
            ["--model", "nobody", "--port", "0", "--fronts", "1", "--calibration", "/nowhere.npy"],
            "/nowhere.npy",
        ),
    ],
)
def test_mistakes_are_one_line(words: list[str], message: str, capsys) -> None:
    assert main(["serve", *words]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and message in lines[0]


def test_help_imports_neither_torch_nor_a_web_framework() -> None:
    code = (
        "import sys\nfrom packhorse.cli import main\nmain(['serve', '--help'])\n"
        "sys.exit(bool({'torch', 'fastapi', 'uvicorn', 'starlette'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
