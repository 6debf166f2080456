"""Commands of other packages: found by their entry points, named where they are not installed."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from packhorse import cli


def run(*words: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = os.environ | ({} if path is None else {"PYTHONPATH": str(path)})
    command = [sys.executable, "-m", "packhorse", *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    """A distribution with a command, as pip would have installed it."""
    (tmp_path / "stranger.py").write_text(
        "def greet(name: str):\n    '''Greet somebody.'''\n    print('hello', name)\n"
        "def prepare_tokens(tokens):\n    return [*tokens, 'world']\n"
    )
    info = tmp_path / "stranger-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[packhorse.commands]\ngreet = stranger:greet\n")
    return tmp_path


def test_our_own_packages_are_plugins() -> None:
    names = {entry.name for entry in entry_points(group=cli.GROUP)}
    assert names == set(cli.PLUGINS)
    assert not names & set(cli.COMMANDS)


def test_a_command_of_another_package(plugin: Path) -> None:
    completed = run("greet", path=plugin)
    assert (completed.returncode, completed.stdout) == (0, "hello world\n")
    assert "From the package stranger." in run("--help", path=plugin).stdout
    assert run("greet").returncode == 2  # without the package there is no such command


@pytest.mark.parametrize("name", cli.PLUGINS)
def test_a_package_that_is_not_installed_is_named(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "entry_points", lambda group: ())
    assert cli.main([name, "anything"]) == 2
    assert f"pip install 'packhorse[{name}]'" in capsys.readouterr().err
    assert cli.main(["--help"]) == 0
    assert f"'packhorse[{name}]'" in capsys.readouterr().out.replace("\n", " ")


def test_entry_points_are_not_read_for_commands_of_the_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(group: str) -> None:
        raise AssertionError("entry points are slow to read")

    monkeypatch.setattr(cli, "entry_points", refuse)
    assert cli.main(["pack", "--help"]) == 0


def test_the_name_of_0_1_still_works_with_a_warning() -> None:
    code = "import packhorse.port as poptorch, packhorse_port; print(poptorch is packhorse_port)"
    command = [sys.executable, "-W", "always", "-c", code]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert completed.stdout == "True\n" and "write `import packhorse_port`" in completed.stderr
