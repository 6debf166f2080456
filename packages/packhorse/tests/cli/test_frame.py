"""The frame around the commands: how they are found, how they end, and what they print."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import packhorse
from packhorse import cli as frame
from packhorse import progress
from packhorse.cli import console
from packhorse.errors import CheckpointError, InputError, MissingExtra

Cli = Callable[..., Any]


def python(*arguments: str, **more: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **more)  # type: ignore[call-overload]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], None]:
    """Make a function the command `do`."""

    def register(function: Callable[[], None]) -> None:
        module = types.ModuleType("a_command")
        module.do = function  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "a_command", module)
        monkeypatch.setattr(frame, "COMMANDS", {"do": ("a_command:do", "Do it.")})

    return register


def test_help_names_every_command(cli: Cli) -> None:
    result = cli("--help")
    assert result.code == 0 and result.err == ""
    for name, (_, line) in frame.COMMANDS.items():
        assert name in result.out and line in result.out
    assert cli().out == result.out


@pytest.mark.parametrize("name", frame.COMMANDS)
def test_every_command_has_help_with_examples(name: str, cli: Cli) -> None:
    result = cli(name, "--help")
    assert result.code == 0
    below_usage = result.out.partition("\n")[2]
    assert f"packhorse {name}" in below_usage or "Commands" in below_usage


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        (
            "evaluate",
            ["--task", "--input", "--model", "--limit", "--config", "--beside", "--top-k"],
        ),
        ("data stats", ["--verify", "--samples"]),
        ("data build", ["--tokenizer", "--max-bad", "--workers", "--json"]),
        ("onnx pack", ["--mode", "--explain", "--input-shape"]),
        ("freeze", ["--input-checkpoint", "--input_checkpoint"]),
        ("waste", ["--column", "--batch-size", "--price"]),
    ],
)
def test_flags_with_and_without_a_group_are_in_the_help(
    command: str, flags: list[str], cli: Cli
) -> None:
    result = cli(*command.split(), "--help")
    assert result.code == 0
    assert [flag for flag in flags if f" {flag} " not in result.out] == []


def test_commands_are_cheap_to_import() -> None:
    """Help for one command, or a mistyped one, must not cost a torch."""
    modules = [place.split(":")[0] for place, _ in frame.COMMANDS.values()]
    heavy = "{'torch', 'numpy', 'pyarrow', 'rich'} & {*sys.modules}"
    code = f"import sys, {', '.join(modules)}\nprint(*{heavy})"
    completed = python("-c", code)
    assert (completed.returncode, completed.stdout.strip()) == (0, "")


def test_module_and_version() -> None:
    completed = python("-m", "packhorse", "--version")
    assert (completed.returncode, completed.stdout.strip()) == (0, packhorse.__version__)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rnu"], 'Did you mean "run"?'),
        (["run", "--nope"], "Unknown option: --nope"),
        (["run", "-bs", "many"], "-bs"),
        (["run", "-bs"], "-bs requires an argument"),
        (["run", "--dtype", "int3"], '"fp32"'),
        (["run", "--task", "dance"], '"embed"'),
    ],
)
def test_usage_errors_are_one_line(arguments: list[str], message: str, cli: Cli) -> None:
    result = cli(*arguments)
    assert result.code == 2 and result.out == ""
    assert result.err.startswith("packhorse: ") and result.err.count("\n") == 1
    assert message in result.err
    assert ("`packhorse run --help`" in result.err) == (arguments[0] == "run")


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (InputError("bad\n  text"), 2, "packhorse: bad text"),
        (CheckpointError("no weights"), 2, "packhorse: no weights"),
        (MissingExtra("pyarrow", "data"), 2, "pip install 'packhorse[data]'"),
        (KeyboardInterrupt(), 130, "packhorse: interrupted"),
        (RuntimeError("ours"), 1, "unexpected RuntimeError: ours (PACKHORSE_TRACEBACK=1"),
    ],
)
def test_errors_are_one_line(
    error: BaseException, code: int, line: str, cli: Cli, command: Callable
) -> None:
    def do() -> None:
        raise error

    command(do)
    result = cli("do")
    assert result.code == code and line in result.err and result.err.count("\n") == 1


def test_a_traceback_on_demand(command: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    def do() -> None:
        raise RuntimeError("ours")

    command(do)
    monkeypatch.setenv("PACKHORSE_TRACEBACK", "1")
    with pytest.raises(RuntimeError, match="ours"):
        frame.main(["do"])


def test_warnings_are_notes(cli: Cli, command: Callable) -> None:
    def do() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("careful", stacklevel=2)

    command(do)
    assert cli("do") == (0, "", "warning: careful\n")


def test_warnings_of_one_kind_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with console.summarize_warnings(FutureWarning), pytest.warns(UserWarning, match="another kind"):
        for text in ("12 cut", "3 cut"):
            warnings.warn(text, FutureWarning, stacklevel=2)
        warnings.warn("another kind", UserWarning, stacklevel=2)
    assert capsys.readouterr().err == "warning: 12 cut (the first of 2 such warnings)\n"


def test_a_list_that_goes_on_says_so(cli) -> None:
    result = cli("runn")
    assert result.code == 2 and ", ...; see `packhorse --help`" in result.err


def test_a_closed_pipe_is_quiet() -> None:
    code = (
        "import sys; from packhorse.cli import main\n"
        "import packhorse.cli.run as r\n"
        "r.__dict__['run'] = lambda: [print('x' * 9999) for _ in range(99)] and None\n"
        "sys.exit(main(['run']))"
    )
    command = [sys.executable, "-W", "error", "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout and process.stderr
        process.stdout.read(10)
        process.stdout.close()
        result = process.stderr.read()
    assert (process.returncode, result) == (141, b"")


def test_a_terminal_without_the_characters() -> None:
    code = "from packhorse.cli import main, console\nmain(['--version']); print(chr(0x2026))"
    completed = python("-X", "utf8=0", "-c", code, env={"PYTHONIOENCODING": "ascii", "LC_ALL": "C"})
    assert (completed.returncode, completed.stdout.split()[-1]) == (0, r"\u2026")


# What they print ------------------------------------------------------------------------------


def test_emit(capsys: pytest.CaptureFixture[str]) -> None:
    console.emit({"b": 1}, as_json=False)
    assert capsys.readouterr().out == ""
    console.emit({"b": float("nan"), "a": np.float32(0.5), "c": ["é", Path("x").name]}, True)
    out = capsys.readouterr().out
    assert out == '{"b":null,"a":0.5,"c":["\\u00e9","x"]}\n'
    assert list(json.loads(out)) == ["b", "a", "c"]


ROWS = [["[MASK] one", 1234567, 0.5], ["two\x1b[31m", 8, 12345.678]]


def test_a_plain_table(capsys: pytest.CaptureFixture[str]) -> None:
    console.table("A title", ["name", "count", "share"], ROWS)
    assert capsys.readouterr().out.splitlines() == [
        "A title",
        "name            count   share",
        "----------  ---------  ------",
        "[MASK] one  1,234,567     0.5",
        "two [31m            8  12,346",
    ]
    console.table(None, ["nothing"], [])
    assert capsys.readouterr().out == "nothing\n-------\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_table_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("TERM", "dumb")
    console.table("A title", ["name", "count", "share"], ROWS)
    drawn = sys.stdout.getvalue()  # type: ignore[attr-defined]
    assert "[MASK] one" in drawn and "1,234,567" in drawn, "texts are not markup"
    assert "\x1b[31m" not in drawn, "nor do they command the terminal"


@pytest.mark.parametrize(
    ("text", "shown"), [("a\nb", "a b"), ("x" * 60, "x" * 47 + "…"), (" " * 900 + "x", "…")]
)
def test_short(text: str, shown: str) -> None:
    assert console.short(text) == shown


def test_progress_off_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(progress, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    with console.progress("packing") as advance:
        for second in range(101):
            now[0] = float(second)
            advance(second, 100)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "packing: 10 of 100 (10%), 1:30 left" and len(lines) == 10
    assert lines[-1] == "packing: 100 of 100 (100%)"
    with console.progress("reading") as advance:
        for second in range(101, 113):
            now[0] = float(second)
            advance(second, 0)
    assert capsys.readouterr().err.splitlines() == ["reading: 105", "reading: 110"]


def test_progress_elsewhere(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "PAUSE", 0.0)
    with console.reserve_stdout_for_json(), console.progress("packing") as advance:
        advance(1, 1)
    assert capsys.readouterr().err == "", "a program that reads the document sees no progress"
    monkeypatch.setattr(sys, "stderr", Terminal())
    with console.progress("packing") as advance:
        advance(1, 4)
        advance(4, 4)
    assert "4/4" in sys.stderr.getvalue()  # type: ignore[attr-defined]
