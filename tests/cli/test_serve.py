"""`packhorse serve`: what can be told without loading a model."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from packhorse.cli import main
from packhorse.serve.settings import KINDS


def test_every_setting_is_a_flag(capsys) -> None:
    assert main(["serve", "--help"]) == 0
    told = capsys.readouterr().out
    for name in KINDS:
        assert f"--{name.replace('_', '-')}" in told
    assert "--keys" not in told and "--no-" not in told


def test_settings_are_shown_and_keys_are_not(capsys, monkeypatch) -> None:
    monkeypatch.setenv("PACKHORSE_API_KEY", "sesame")
    monkeypatch.setenv("PACKHORSE_SERVE_PORT", "1234")
    words = ["--host", "0.0.0.0", "--model", "a=x", "--model", "y", "--graphs"]
    assert main(["serve", "--print-config", "--json", *words]) == 0
    out = capsys.readouterr().out
    shown = json.loads(out.splitlines()[-1])
    assert (shown["port"], shown["model"], shown["graphs"]) == (1234, ["a=x", "y"], True)
    assert "sesame" not in out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--host", "0.0.0.0"], "--insecure"),
        (["--port", "99999"], "65535"),
        (["--api-key", "x"], "--api-key"),
        (["--config", "/nowhere.toml"], "cannot be read"),
    ],
)
def test_mistakes_are_one_line(words: list[str], told: str, capsys) -> None:
    assert main(["serve", *words]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and told in lines[0]


def test_help_imports_neither_torch_nor_a_web_framework() -> None:
    code = (
        "import sys\nfrom packhorse.cli import main\nmain(['serve', '--help'])\n"
        "sys.exit(bool({'torch', 'fastapi', 'uvicorn', 'starlette'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
