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
from packhorse.cli import console, data_progress
from packhorse.cli import monitor as command
from packhorse.cli import monitor_view as view
from packhorse.data.corpus.building import Progress
from packhorse.data.corpus.parts import Found
from packhorse.monitor import Snapshot, look
from packhorse.monitor.machine import Device
from packhorse.monitor.processes import Process

from .conftest import Spoken

Cli = Callable[..., Spoken]
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
    said = cli("monitor")
    assert said.code == 0 and "\x1b" not in said.out
    line = next(line for line in said.out.splitlines() if line.split()[:1] == [str(os.getpid())])
    assert all(word in line for word in ("reading a very long book", "12.2", "3,456", "97.5%"))
    assert re.search(r"^ *cpu ", said.out, re.M) and "Devices" in said.out


def test_once_as_json(cli: Cli) -> None:
    publish()
    said = cli("monitor", "--json")
    assert said.code == 0 and len(said.out.splitlines()) == 1
    mine = [each for each in said.document["processes"] if each["pid"] == os.getpid()]
    assert mine[0]["queue"] == 4 and mine[0]["figures"]["fill"] == 0.975 and mine[0]["memory"]
    assert said.document["devices"][0]["device"] == "cpu"


def test_nothing_runs(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packhorse.monitor.processes.ProcSystem.pids", lambda self: [])
    assert view.IDLE in cli("monitor").out


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
    columns = [view.Column("id"), view.Column("a", words=True), view.Column("b", 1)]
    rows = [["1", "a long story " * 3, "12345"]]
    assert view.fit(columns, rows, None, gap=2)[1] == rows
    kept, cells, widths = view.fit(columns, rows, 30, gap=2)
    assert len(kept) == 3 and sum(widths) + 4 == 30 and cells[0][1].endswith("…")
    kept, cells, _ = view.fit(columns, rows, 15, gap=2)
    assert [column.title for column in kept] == ["id", "a"] and cells[0][0] == "1"
    assert len(view.fit(columns, [["1", "x", ""]], None, gap=2)[0]) == 2, "no one has a figure"


def test_text_of_others_cannot_speak_to_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    bad = "\x1b]0;title\x07[red]"
    process = Process(5, bad, bad, "x", bad, bad, silent=99.0, gpu_memory=3 << 30, memory=1 << 30)
    gpu = Device("gpu 0", bad, utilisation=0.5, temperature=40, power=70.4, pids=(5,))
    view.show(Snapshot(0.0, (gpu,), (process,)))
    said = capsys.readouterr().out
    assert "\x1b" not in said and "\x07" not in said and "[red]" in said
    assert all(word in said for word in ("50%", "40 °C", "70 W", "1.0 + 3.0 on GPU GiB", "1:39"))


def test_a_number_needs_watch(cli: Cli) -> None:
    for arguments in (["5"], ["--watch", "0"], ["--watch", "nan"], ["--watch", "-1"]):
        said = cli("monitor", *arguments)
        assert said.code == 2 and len(said.err.splitlines()) == 1


def test_lines_of_json_and_tables_for_a_file(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def third(seconds: float, looks: list[float] = []) -> None:  # noqa: B006
        looks.append(seconds)
        if len(looks) % 3 == 0:
            raise KeyboardInterrupt

    monkeypatch.setattr(command.time, "sleep", third)
    monkeypatch.setenv("PACKHORSE_RUNTIME", "/dev/null")
    said = cli("monitor", "--watch", "0.5", "--json")
    assert said.code == 0 and len([json.loads(line) for line in said.out.splitlines()]) == 3
    assert len(said.err.splitlines()) == 1, "what is to be noted is noted once"
    said = cli("monitor", "--watch")
    assert said.code == 0 and said.out.count("Devices") == 3 and "\x1b" not in said.out


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
        self.said = b""

    def until(self, words: bytes, seconds: float = 20.0) -> None:
        """Read until it has said this."""
        deadline = time.monotonic() + seconds
        while words not in self.said:
            assert time.monotonic() < deadline, self.said
            try:
                self.said += os.read(self.main, 1 << 16)
            except OSError:  # it has ended
                assert words in self.said
                return

    def end(self) -> int:
        """Its exit code, once it has said all."""
        try:
            while part := os.read(self.main, 1 << 16):
                self.said += part
        except OSError:
            pass
        os.close(self.main)
        return self.process.wait(10)


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
    said = terminal.said.decode()
    assert "History" in said and "reading" in said and "Traceback" not in said
    assert said.count("\x1b[?1049h") == said.count("\x1b[?1049l") == 1, "the screen is given back"
    assert said.rfind("\x1b[?25h") > said.rfind("\x1b[?25l"), "and the cursor"


def test_once_on_a_terminal() -> None:
    publish()
    terminal = Terminal()
    assert terminal.end() == 0
    assert "╭" in terminal.said.decode() and b"reading" in terminal.said


def test_it_imports_neither_torch_nor_numpy() -> None:
    """So that it can be repeated every two seconds."""
    publish()
    heavy = "{'torch', 'numpy', 'psutil', 'pyarrow', 'tokenizers'} & {*sys.modules}"
    code = (
        "import sys\nfrom packhorse.cli import main\n"
        f"code = main(['monitor'])\nprint('heavy:', *{heavy})\nsys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].split() == ["heavy:"]


# What long work says of itself


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """All that is published, in this process; a word at every chance."""
    words, publish = [], status.publish

    def keep(name: str, figures: dict[str, Any]) -> None:
        publish(name, figures)
        words.append(figures)

    monkeypatch.setattr(status, "publish", keep)
    monkeypatch.setattr(status, "PAUSE", 0.0)
    return words


def test_progress_is_published(said: list[dict[str, Any]]) -> None:
    with console.progress("packing", quiet=True, counts="sequences") as advance:
        advance(10, 40)
        advance(20, 40)
        (mine,) = [each for each in look(None).processes if each.name]
        assert mine.does == "packing, 50%" and mine.sequences_per_second
    assert [(each["done"], each["total"]) for each in said] == [(10, 40), (20, 40)]
    assert status.read() == []


def test_a_build_is_published(said: list[dict[str, Any]]) -> None:
    with data_progress.watching() as watch:
        watch(CorpusProgress("reading", 10, 100, CorpusCounts(documents=3, sequences=5, tokens=50)))
        watch(
            CorpusProgress("reading", 60, 100, CorpusCounts(documents=9, sequences=20, tokens=90))
        )
        (mine,) = [each for each in look(None).processes if each.name]
        assert mine.does and re.fullmatch(r"reading, 60%, [\d,]+ documents/s", mine.does)
        watch(CorpusProgress("writing train", 1, 2, CorpusCounts(sequences=20)))
    assert said[-1]["does"] == "writing train" and "sequences_per_second" not in said[-1]


@pytest.mark.parametrize("how", [["--perf", "-i", "2"], ["--chunk", "1", "--out", "OUT.jsonl"]])
def test_a_run_is_published(
    how: list[str],
    cli: Cli,
    tiny: Callable[[str], Path],
    said: list[dict[str, Any]],
    tmp_path: Path,
) -> None:
    how = [word.replace("OUT", str(tmp_path / "out")) for word in how]
    assert cli("run", "the horse", "a mule", "-m", tiny("embed"), "--task", "embed", *how).code == 0
    assert said[-1]["sequences"] >= 2 and said[-1]["sequences_per_second"] > 0
    assert (said[-1]["device"], said[-1]["model"]) == ("cpu", "embed")
    assert status.read() == []
