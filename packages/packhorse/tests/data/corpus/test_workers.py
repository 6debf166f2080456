"""The local engine: order, a bound on what is in flight, and every way a worker can end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from packhorse.data.corpus.workers import AHEAD, local
from packhorse.errors import InputError, MissingExtra


def square(number: int) -> int:
    time.sleep(0.01 * (number % 3))
    return number * number


def fail(number: int) -> int:
    if number == 3:
        raise MissingExtra("ray", "cluster")
    return number


def die(number: int) -> int:
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def pid_and_threads(number: int) -> tuple[int, str]:
    return os.getpid(), os.environ["TOKENIZERS_PARALLELISM"]


def linger(path: str) -> None:
    Path(path).write_text(str(os.getpid()))
    time.sleep(60)


@pytest.mark.parametrize("workers", [1, 2])
def test_results_in_order_and_few_in_flight(workers: int) -> None:
    taken, results = 0, []

    def items() -> Iterator[tuple[int]]:
        nonlocal taken
        for number in range(20):
            taken += 1
            yield (number,)

    with local(workers) as run:
        for result in run(square, items()):
            results.append(result)
            assert taken - len(results) < AHEAD * workers
        assert [*run(square, [(5,)])] == [25]
    assert results == [number * number for number in range(20)]


def test_one_worker_is_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    with local(1) as run:
        assert [*run(pid_and_threads, [(0,)])] == [(os.getpid(), "false")]
    assert os.environ["TOKENIZERS_PARALLELISM"] == "true"


def test_two_are_not() -> None:
    with local(2) as run:
        actual = {*run(pid_and_threads, [(n,) for n in range(8)])}
    assert {threads for _, threads in actual} == {"false"}
    assert os.getpid() not in {pid for pid, _ in actual}


def test_an_error_of_any_kind_comes_through() -> None:
    with pytest.raises(InputError, match=r"packhorse\[cluster\]"), local(2) as run:
        list(run(fail, [(n,) for n in range(8)]))


def test_a_killed_worker_is_reported() -> None:
    with pytest.raises(InputError, match=r"died.*same command.*--workers"), local(2) as run:
        list(run(die, [(n,) for n in range(8)]))


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_workers_do_not_outlive_a_killed_master(end: signal.Signals, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from packhorse.data.corpus.workers import local\nimport test_workers\n"
        "if __name__ == '__main__':\n"
        "    with local(2) as run: list(run(test_workers.linger, [(sys.argv[2],)]))\n"
    )
    script = tmp_path / "master.py"
    script.write_text(code)
    command = [sys.executable, script, str(Path(__file__).parent), file]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as master:
        worker = int(_content(file))
        assert _alive(worker)
        master.send_signal(end)
        _, message = master.communicate(timeout=240)
    if end == signal.SIGTERM:
        assert (master.returncode, message) == (128 + end, "")
    until = time.monotonic() + 240
    while _alive(worker) and time.monotonic() < until:
        time.sleep(0.05)
    assert not _alive(worker)


def _alive(pid: int) -> bool:
    """There, and more than an entry that nobody has asked about yet."""
    try:
        os.kill(pid, 0)
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def _content(file: Path) -> str:
    for _ in range(600):
        if file.exists() and (text := file.read_text()):
            return text
        time.sleep(0.05)
    raise TimeoutError("the worker never began")


def test_no_workers() -> None:
    with pytest.raises(InputError, match="1 or more"), local(0):
        pass
