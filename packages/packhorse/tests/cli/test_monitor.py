"""`packhorse monitor`: light, as wide as it may be, and left without fuss."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from packhorse import status
from packhorse.cli import console, data
from packhorse.cli import monitor as command
from packhorse.data.corpus.building import CorpusCounts, CorpusProgress
from packhorse.monitor import Snapshot, look
from packhorse.monitor.machine import Device
from packhorse.monitor.processes import Process

Cli = Callable[..., Any]
pty = pytest.importorskip("pty", reason="no terminals of this kind")


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("PACKHORSE_RUNTIME", str(tmp_path / "runtime"))
    monkeypatch.delenv("COLUMNS", raising=False)
    return tmp_path / "runtime"


def publish() -> None:
    figures = {"does": "reading a very long book", "device": "cpu", "sequences_per_second": 12.25}
    status.publish("work", {**figures, "tokens_per_second": 3456, "fill": 0.975, "queue": 4})


def test_once_as_a_table(cli: Cli) -> None:
    publish()
    result = cli("monitor")
    assert result.code == 0 and "\x1b" not in result.out
    line = next(line for line in result.out.splitlines() if line.split()[:1] == [str(os.getpid())])
    assert all(word in line for word in ("reading a very long book", "12.2", "3,456", "97.5%"))
    assert re.search(r"^ *cpu ", result.out, re.M) and "Devices" in result.out


def test_once_as_json(cli: Cli) -> None:
    publish()
    result = cli("monitor", "--json")
    assert result.code == 0 and len(result.out.splitlines()) == 1
    (process,) = [
        process for process in result.document["processes"] if process["pid"] == os.getpid()
    ]
    assert process["queue"] == 4 and process["figures"]["fill"] == 0.975 and process["memory"]
    assert result.document["devices"][0]["device"] == "cpu"


def test_the_monitor_without_processes(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packhorse.monitor.processes.ProcSystem.pids", lambda self: [])
    assert command.NO_PROCESS in cli("monitor").out


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_no_line_is_wider_than_it_may_be(
    width: int, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish()
    monkeypatch.setenv("COLUMNS", str(width))
    lines = cli("monitor").out.splitlines()
    assert max(map(len, lines)) <= width
    if width >= 60:
        assert any(str(os.getpid()) in line and "12.2" in line for line in lines)
    monkeypatch.delenv("COLUMNS")
    assert max(map(len, cli("monitor").out.splitlines())) > 80, "a file has no width"


def test_words_give_way_before_figures() -> None:
    columns = [command.Column("id"), command.Column("a", is_text=True), command.Column("b", 1)]
    rows = [["1", "a long story " * 3, "12345"]]
    assert command.fit(columns, rows, None, gap=2)[1] == rows
    shown, cells, widths = command.fit(columns, rows, 30, gap=2)
    assert len(shown) == 3 and sum(widths) + 4 == 30 and cells[0][1].endswith("…")
    shown, cells, _ = command.fit(columns, rows, 15, gap=2)
    assert [column.title for column in shown] == ["id", "a"] and cells[0][0] == "1"
    assert len(command.fit(columns, [["1", "x", ""]], None, gap=2)[0]) == 2, "no one has a figure"


def test_text_of_others_cannot_speak_to_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    bad = "\x1b]0;title\x07[red]"
    process = Process(5, bad, bad, "x", bad, bad, silent=99.0, gpu_memory=3 << 30, memory=1 << 30)
    gpu = Device("gpu 0", bad, utilisation=0.5, temperature=40, power=70.4, pids=(5,))
    command.show(Snapshot(0.0, (gpu,), (process,)))
    result = capsys.readouterr().out
    assert "\x1b" not in result and "\x07" not in result and "[red]" in result
    assert all(word in result for word in ("50%", "40 °C", "70 W", "1.0 + 3.0 on GPU GiB", "1:39"))


def test_a_number_needs_watch(cli: Cli) -> None:
    for arguments in (["5"], ["--watch", "0"], ["--watch", "nan"], ["--watch", "-1"]):
        result = cli("monitor", *arguments)
        assert result.code == 2 and len(result.err.splitlines()) == 1


def test_lines_of_json_and_tables_for_a_file(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def third(seconds: float, looks: list[float] = []) -> None:  # noqa: B006
        looks.append(seconds)
        if len(looks) % 3 == 0:
            raise KeyboardInterrupt

    monkeypatch.setattr(command.time, "sleep", third)
    monkeypatch.setenv("PACKHORSE_RUNTIME", "/dev/null")
    result = cli("monitor", "--watch", "0.5", "--json")
    assert result.code == 0 and len([json.loads(line) for line in result.out.splitlines()]) == 3
    assert len(result.err.splitlines()) == 1, "what is to be noted is noted once"
    result = cli("monitor", "--watch")
    assert result.code == 0 and result.out.count("Devices") == 3 and "\x1b" not in result.out


# On a terminal


class Terminal:
    """The command on a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        main, child = pty.openpty()
        self.main = main
        self.process = subprocess.Popen(
            [sys.executable, "-m", "packhorse", "monitor", *arguments],
            stdin=child,
            stdout=child,
            stderr=child,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "40"},
        )
        os.close(child)
        self.output = b""

    def until(self, words: bytes, seconds: float = 20.0) -> None:
        """Read until these words appear."""
        deadline = time.monotonic() + seconds
        while words not in self.output:
            assert time.monotonic() < deadline, self.output
            try:
                self.output += os.read(self.main, 1 << 16)
            except OSError:  # it has ended
                assert words in self.output
                return

    def end(self) -> int:
        """Return the exit code, once all output is read."""
        try:
            while part := os.read(self.main, 1 << 16):
                self.output += part
        except OSError:
            pass
        os.close(self.main)
        return self.process.wait(120)


@pytest.mark.parametrize(
    ("way", "code"), [("q", 0), (signal.SIGINT, 0), (signal.SIGTERM, 143)], ids=str
)
def test_a_screen_is_left_and_the_terminal_put_right(way: str | signal.Signals, code: int) -> None:
    publish()
    terminal = Terminal("--watch", "0.1")
    terminal.until("█".encode())  # the second look has a history
    if isinstance(way, str):
        os.write(terminal.main, b"xq")
    else:
        terminal.process.send_signal(way)
    assert terminal.end() == code
    result = terminal.output.decode()
    assert "History" in result and "reading" in result and "Traceback" not in result
    assert result.count("\x1b[?1049h") == result.count("\x1b[?1049l") == 1, (
        "the screen is given back"
    )
    assert result.rfind("\x1b[?25h") > result.rfind("\x1b[?25l"), "and the cursor"


def test_once_on_a_terminal() -> None:
    publish()
    terminal = Terminal()
    assert terminal.end() == 0
    assert "╭" in terminal.output.decode() and b"reading" in terminal.output


def test_it_imports_neither_torch_nor_numpy() -> None:
    """So that it can be repeated every two seconds."""
    publish()
    heavy = "{'torch', 'numpy', 'psutil', 'pyarrow', 'tokenizers'} & {*sys.modules}"
    code = (
        "import sys\nfrom packhorse.cli import main\n"
        f"code = main(['monitor'])\nprint('heavy:', *{heavy})\nsys.exit(code)"
    )
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.splitlines()[-1].split() == ["heavy:"]


# What long work says of itself


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """All that is published, in this process; a word at every chance."""
    words, publish = [], status.publish

    def keep(name: str, figures: dict[str, Any]) -> None:
        publish(name, figures)
        words.append(figures)

    monkeypatch.setattr(status, "publish", keep)
    monkeypatch.setattr(status, "PAUSE", 0.0)
    return words


def test_progress_is_published(published: list[dict[str, Any]]) -> None:
    with console.progress("packing", counts="sequences") as advance:
        advance(10, 40)
        advance(20, 40)
        (process,) = [process for process in look(None).processes if process.name]
        assert process.does == "packing, 50%" and process.sequences_per_second
    assert [(figures["done"], figures["total"]) for figures in published] == [(10, 40), (20, 40)]
    assert status.read() == []


def test_a_build_is_published(published: list[dict[str, Any]]) -> None:
    with data.build_progress() as watch:
        watch(CorpusProgress("reading", 10, 100, CorpusCounts(documents=3, sequences=5, tokens=50)))
        watch(
            CorpusProgress("reading", 60, 100, CorpusCounts(documents=9, sequences=20, tokens=90))
        )
        (process,) = [process for process in look(None).processes if process.name]
        assert process.does and re.fullmatch(r"reading, 60%, [\d,]+ documents/s", process.does)
        watch(CorpusProgress("writing train", 1, 2, CorpusCounts(sequences=20)))
    assert published[-1]["does"] == "writing train" and "sequences_per_second" not in published[-1]


@pytest.mark.parametrize("flags", [["--perf", "-i", "2"], ["--chunk", "1", "--out", "OUT.jsonl"]])
def test_a_run_is_published(
    flags: list[str],
    cli: Cli,
    tiny: Callable[[str], Path],
    published: list[dict[str, Any]],
    tmp_path: Path,
) -> None:
    flags = [word.replace("OUT", str(tmp_path / "out")) for word in flags]
    assert (
        cli("run", "the horse", "a mule", "-m", tiny("embed"), "--task", "embed", *flags).code == 0
    )
    last = published[-1]
    assert last["sequences"] >= 2 and last["sequences_per_second"] > 0
    assert (last["device"], last["model"]) == ("cpu", "embed")
    assert status.read() == []
