"""Who runs, in spite of stale files, wrong ones, missing rights and processes that end."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from packhorse import status
from packhorse.monitor import Snapshot, look, processes
from packhorse.monitor.machine import Device
from packhorse.monitor.processes import (
    ProcessFacts,
    ProcSystem,
    PsutilSystem,
    find_processes,
    packhorse_command,
)
from packhorse.status import PublishedStatus

needs_proc = pytest.mark.skipif(not Path("/proc/uptime").exists(), reason="no /proc here")


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("PACKHORSE_RUNTIME", str(tmp_path / "runtime"))
    return tmp_path / "runtime"


@dataclass
class Machine:
    """A system with these processes."""

    known: dict[int, ProcessFacts] = field(default_factory=dict)
    gone: tuple[int, ...] = ()  # were there when they were listed

    def pids(self) -> list[int]:
        return [*self.known]

    def command(self, pid: int) -> Any:
        return self.known[pid].command if pid in self.known else ()

    def facts(self, pid: int) -> ProcessFacts | None:
        return None if pid in self.gone else self.known.get(pid)


def published(pid: int, **figures: Any) -> PublishedStatus:
    return PublishedStatus(pid, "runner-1", time.time(), figures)


@pytest.mark.parametrize(
    ("line", "typed"),
    [
        ("/usr/bin/packhorse train --seed 1", "packhorse train --seed 1"),
        ("/v/bin/python /v/bin/packhorse run x", "packhorse run x"),
        ("python3.11 -u -X importtime -m packhorse serve", "packhorse serve"),
        ("python -m packhorse_port script.py", "packhorse_port script.py"),
        ("python -m packhorses", ""),
        ("python -m", ""),
        ("python script.py packhorse", ""),
        ("vim packhorse", ""),
        ("watch -n 2 packhorse monitor", ""),
        ("python", ""),
        ("", ""),
    ],
)
def test_a_command_line_of_ours(line: str, typed: str) -> None:
    assert " ".join(packhorse_command(line.split())) == typed


def test_processes_with_and_without_a_status_are_listed() -> None:
    machine = Machine(
        {
            1: ProcessFacts(("/sbin/init",), "root", 1, 999.0),
            5: ProcessFacts(("python", "mine.py"), "ann", 2 << 30, 50.0),
            6: ProcessFacts(("packhorse", "train"), "bob", 1 << 30, 70.0),
            7: ProcessFacts(("packhorse", "monitor", "--watch"), "ann", 1, 80.0),
        }
    )
    entry = published(
        5,
        model="minilm",
        device="cuda:0",
        sequences_per_second=12.5,
        tokens_per_second=900,
        fill=0.97,
        waiting_requests=3,
    )
    silent, speaking = find_processes(machine, [entry], [])
    assert (silent.pid, silent.user, silent.command, silent.does) == (
        6,
        "bob",
        "packhorse train",
        None,
    )
    assert (speaking.command, speaking.user, speaking.seconds) == ("python mine.py", "ann", 50.0)
    assert (speaking.sequences_per_second, speaking.tokens_per_second) == (12.5, 900)
    assert (speaking.fill, speaking.queue, speaking.device, speaking.does) == (
        0.97,
        3,
        "cuda:0",
        "minilm",
    )
    assert speaking.figures == entry.figures and speaking.silent is not None and speaking.silent < 5


def test_one_process_may_publish_several_statuses() -> None:
    words = [PublishedStatus(5, name, time.time(), {"does": name}) for name in ("b", "a")]
    assert [line.does for line in find_processes(Machine({5: ProcessFacts()}), words, [])] == [
        "a",
        "b",
    ]


def test_one_that_ends_between_two_looks_is_left_out() -> None:
    machine = Machine(
        {5: ProcessFacts(("packhorse", "run")), 6: ProcessFacts(("packhorse", "run"))}, gone=(5, 6)
    )
    assert find_processes(machine, [published(6)], []) == []


@pytest.mark.parametrize(
    ("figures", "does"),
    [
        ({}, None),
        ({"does": "reading", "done": 1, "total": 4, "documents_per_second": 1234.5}, None),
        ({"does": "writing x", "done": 5, "total": 0}, "writing x"),
        ({"does": "writing x", "done": 9, "total": 4}, "writing x, 100%"),
        ({"does": 3, "model": ["a"], "done": "x", "total": True}, None),
    ],
)
def test_what_it_does_in_a_few_words(figures: dict[str, Any], does: str | None) -> None:
    (line,) = find_processes(Machine({5: ProcessFacts()}), [published(5, **figures)], [])
    if "documents_per_second" in figures:
        assert line.does in ("reading, 25%, 1,234 documents/s", "reading, 25%, 1,235 documents/s")
    else:
        assert line.does == does


@pytest.mark.parametrize("wrong", ["12", None, True, [1], float("nan"), float("inf"), 10**400])
def test_a_figure_of_the_wrong_kind_is_none(wrong: Any) -> None:
    entry = published(
        5, fill=wrong, queue=wrong, sequences_per_second=wrong, device=wrong, does=wrong
    )
    (line,) = find_processes(Machine({5: ProcessFacts()}), [entry], [])
    assert line.fill is line.queue is line.sequences_per_second is None
    assert line.device == line.does == (wrong if isinstance(wrong, str) else None)


def test_a_clock_that_is_wrong_is_no_error() -> None:
    for at, known in [(float("-inf"), False), (time.time() + 99, True), (-1e300, False)]:
        entries = [PublishedStatus(5, "x", at, {})]
        (line,) = find_processes(Machine({5: ProcessFacts()}), entries, [])
        assert (line.silent is not None) == known


def test_which_processes_use_a_gpu() -> None:
    machine = Machine(
        {5: ProcessFacts(("packhorse", "run")), 6: ProcessFacts(("packhorse", "pack"))}
    )
    gpus = [
        Device("gpu 0", "A", pids=(5, 77), memory_by_pid={5: 10, 77: 99}),
        Device("gpu 1", "B", pids=(5,), memory_by_pid={5: 7}),
        Device("gpu 2", "C", pids=(5,), memory_by_pid={5: None}),
    ]
    first, second = find_processes(machine, [], gpus)
    assert (first.device, first.gpu_memory) == ("gpu 0, gpu 1, gpu 2", 17)
    assert (second.device, second.gpu_memory) == (None, None)
    (process, _) = find_processes(machine, [published(5, device="cuda:1")], gpus[2:])
    assert (process.device, process.gpu_memory) == ("cuda:1", None)


# The system itself


@needs_proc
def test_this_process_in_files_and_by_psutil_is_the_same() -> None:
    psutil = pytest.importorskip("psutil")
    from_files, from_psutil = (
        system.facts(os.getpid()) for system in (ProcSystem(Path("/proc")), PsutilSystem(psutil))
    )
    assert from_files and from_psutil and from_files.memory and from_psutil.memory
    assert [*from_files.command] == [*from_psutil.command] and from_files.user == from_psutil.user
    assert from_files.memory == pytest.approx(from_psutil.memory, rel=0.2)
    assert from_files.seconds == pytest.approx(from_psutil.seconds, abs=2.0)
    for system in (ProcSystem(Path("/proc")), PsutilSystem(psutil)):
        assert os.getpid() in system.pids()
        assert system.facts(1 << 22) is None and not system.command(1 << 22)


def fake_proc(root: Path, pid: int, stat: str, command: bytes) -> Path:
    (root / str(pid)).mkdir(parents=True)
    (root / "uptime").write_text("1000.00 900.00\n")
    (root / str(pid) / "stat").write_text(stat)
    (root / str(pid) / "cmdline").write_bytes(command)
    return root


def test_files_that_are_hard_to_read(tmp_path: Path) -> None:
    numbers = " ".join(map(str, range(18))) + f" {100 * os.sysconf('SC_CLK_TCK')} 0 25 0 0"
    proc = fake_proc(tmp_path, 9, f"9 (a ) S) R {numbers}", b"python\0-m\0packhorse\0\xff\0")
    fake_proc(tmp_path, 10, f"10 (dead) Z {numbers}", b"")
    (tmp_path / "11").mkdir()
    facts = ProcSystem(proc).facts(9)
    assert facts and [*facts.command] == ["python", "-m", "packhorse", "\ufffd"]
    assert (facts.seconds, facts.memory) == (900.0, 25 * os.sysconf("SC_PAGE_SIZE"))
    assert ProcSystem(proc).facts(10) is None and ProcSystem(proc).facts(11) is None
    assert sorted(ProcSystem(proc).pids()) == [9, 10, 11]


def test_without_rights_to_a_process_it_is_still_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any, **more: Any) -> str:
        raise PermissionError

    proc = fake_proc(tmp_path, 9, "", b"packhorse\0run\0")
    monkeypatch.setattr(Path, "read_text", refuse)
    facts = ProcSystem(proc).facts(9)
    assert facts == ProcessFacts()
    (line,) = find_processes(Machine({9: ProcessFacts()}), [published(9, does="work")], [])
    assert (line.pid, line.user, line.memory, line.does) == (9, None, None, "work")


def test_without_any_way_to_ask_what_was_published_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "psutil", None)
    system, notes = processes.system(tmp_path)
    assert "packhorse[monitor]" in notes[0]
    status.publish("mine", {"does": "work"})
    (line,) = look(None, system).processes
    assert (line.pid, line.does, line.memory) == (os.getpid(), "work", None)


def names(seen: Snapshot) -> list[str | None]:
    return [process.name for process in seen.processes if process.name]


def test_stale_and_wrong_files_are_passed_over(home: Path) -> None:
    status.publish("good", {"does": "work"})
    (good,) = home.iterdir()
    entry = json.loads(good.read_text())
    (home / "1.stale.json").write_text(json.dumps(entry | {"pid": 1 << 22}))
    (home / "2.reused.json").write_text(json.dumps(entry | {"born": 1}))
    (home / "3.half.json").write_text(good.read_text()[:20])
    (home / "4.mad.json").write_text('{"pid": NaN}')
    seen = look(None)
    assert names(seen) == ["good"] and seen.notes == ()
    assert seen.devices[0].device == "cpu" and not (home / "1.stale.json").exists()


def test_a_folder_that_cannot_be_used_is_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PACKHORSE_RUNTIME", str(tmp_path / "file"))
    seen = look(None)
    assert len(seen.devices) == 1 and "PACKHORSE_RUNTIME" in seen.notes[0]
