"""What processes say of themselves: whole or not at all, and only while they live."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from packhorse import status
from packhorse.errors import InputError

posix = pytest.mark.skipif(os.name != "posix", reason="owners and modes are POSIX's")


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("PACKHORSE_RUNTIME", str(tmp_path / "runtime"))
    return tmp_path / "runtime"


def speak(code: str) -> subprocess.Popen[str]:
    """Another process that publishes, says so, and waits until its input closes."""
    text = f"import sys\nfrom packhorse import status\n{code}\nprint('said', flush=True)\n"
    command = [sys.executable, "-c", text + "sys.stdin.read()"]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    assert process.stdout and process.stdout.readline() == "said\n"
    return process


def test_a_status_is_published_read_and_withdrawn() -> None:
    assert status.read() == []
    status.publish("runner-1", {"requests": 1, "model": "ŧiny"})
    status.publish("runner-2", {})
    status.publish("runner-1", {"requests": 2})
    first, second = sorted(status.read(), key=lambda published: published.name)
    assert (first.pid, first.name, first.figures) == (os.getpid(), "runner-1", {"requests": 2})
    assert second.name == "runner-2" and second.time >= first.time - 1
    status.withdraw("runner-1")
    status.withdraw("runner-1")
    assert [published.name for published in status.read()] == ["runner-2"]


def test_other_processes_are_seen_while_they_live(home: Path) -> None:
    another = speak("status.publish('trainer', {'step': 7})")
    try:
        status.publish("here", {})
        assert {(published.pid, published.name) for published in status.read()} == {
            (another.pid, "trainer"),
            (os.getpid(), "here"),
        }
    finally:
        another.kill()
    another.communicate()
    assert [published.name for published in status.read()] == ["here"]
    assert len(list(home.iterdir())) == 1, "what the dead left is tidied away"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the kernel tells no birthdays")
def test_a_number_used_again_is_another_process(home: Path) -> None:
    status.publish("mine", {})
    (path,) = home.iterdir()
    published = json.loads(path.read_text())
    path.write_text(json.dumps(published | {"born": published["born"] - 1}))
    assert status.read() == []
    zombie = speak("status.publish('trainer', {})")
    zombie.kill()
    while Path(f"/proc/{zombie.pid}/stat").read_text().split(")")[1].split()[0] != "Z":
        pass
    assert status.read() == []
    zombie.communicate()


@posix
def test_no_one_else_can_read_or_write(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status.publish("mine", {})
    (path,) = home.iterdir()
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    home.chmod(0o777)
    for ask in (status.read, lambda: status.publish("mine", {})):
        with pytest.raises(InputError, match="not yours alone"):
            ask()
    home.chmod(0o700)
    link = home.with_name("link")
    link.symlink_to(home)
    monkeypatch.setenv("PACKHORSE_RUNTIME", str(link))
    with pytest.raises(InputError, match="not yours alone"):
        status.read()
    monkeypatch.setenv("PACKHORSE_RUNTIME", str(path / "below a file"))
    with pytest.raises(InputError, match="cannot use the folder"):
        status.publish("mine", {})
    status.withdraw("mine")  # what cannot be there need not be removed


def test_the_folder_is_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACKHORSE_RUNTIME")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert status.folder() == tmp_path / "packhorse"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr(status.tempfile, "gettempdir", lambda: str(tmp_path))
    assert status.folder().parent == tmp_path and status.folder().name.startswith("packhorse-")


def test_rubbish_is_passed_over(home: Path) -> None:
    status.publish("good", {})
    (good,) = home.iterdir()
    published = json.loads(good.read_text())
    for i, text in enumerate(
        [
            "",
            "{",
            "[]",
            "null",
            "[" * 100_000,
            json.dumps(published)[:-9],
            json.dumps(published | {"pid": "1"}),
            json.dumps(published | {"pid": -1}),
            json.dumps(published | {"pid": 1 << 80}),
            json.dumps({key: published[key] for key in published if key != "figures"}),
            json.dumps(published | {"figures": {"x": "y" * status.MAX_FILE_BYTES}}),
        ]
    ):
        (home / f"{i}.rubbish.json").write_text(text)
    (home / "bytes.json").write_bytes(b"\xff\xfe\x00")
    (home / "folder.json").mkdir()
    if hasattr(os, "mkfifo"):
        os.mkfifo(home / "pipe.json")  # would be waited for
    assert [result.name for result in status.read()] == ["good"]


@pytest.mark.parametrize("name", ["", "../up", "a/b", "a b", "x" * 65, "é", ".\n"])
def test_a_name_is_a_plain_word(name: str) -> None:
    with pytest.raises(InputError, match="plain name"):
        status.publish(name, {})


def test_figures_must_be_numbers_that_json_knows() -> None:
    for figures in ({"x": float("nan")}, {"x": object()}):
        with pytest.raises((ValueError, TypeError)):
            status.publish("mine", figures)
    assert status.read() == []


def test_a_reader_never_sees_half_of_it() -> None:
    """Written and read as fast as possible: always there, always whole."""
    status.publish("busy", {"a": 0, "b": 0})
    completed = threading.Event()

    def write() -> None:
        for i in range(300):
            status.publish("busy", {"a": i, "b": i, "filler": "x" * (i * 37 % 4000)})
        completed.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not completed.is_set():
        (published,) = status.read()
        assert published.figures["a"] == published.figures["b"]
    writer.join()


def last_published() -> dict[str, object]:
    (published,) = status.read()
    return published.figures


def test_a_status_is_written_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """As often as one likes, a word a second; how fast it goes is told from what is counted."""
    clock = iter([100.0, 100.5, 102.0])
    with status.publishing("work", {"does": "reading"}) as report:
        # A clock of its own: the threads of this process go on by the real one.
        now = SimpleNamespace(monotonic=lambda: next(clock), time=time.time)
        monkeypatch.setattr(status, "time", now)
        report({"documents": 10, "loss": float("nan")})
        assert last_published() == {"does": "reading", "documents": 10, "loss": None}
        report({"documents": 11})
        assert last_published()["documents"] == 10, "too soon"
        report({"documents": 30, "does": "writing"})
        assert last_published() == {
            "does": "writing",
            "documents": 30,
            "documents_per_second": 10.0,
        }
    assert status.read() == []


def test_work_continues_if_its_status_cannot_be_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PACKHORSE_RUNTIME", str(tmp_path / "file"))
    with status.publishing("work", {}) as report:
        report({"done": 1})
    with pytest.raises(ZeroDivisionError), status.publishing("work", {}) as report:
        report({"done": 1 // 0})
