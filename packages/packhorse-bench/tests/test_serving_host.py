"""What the machine does under load: which cores, which processes, which batches."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from packhorse_bench import serving_host as host
from packhorse_bench.serving_host import HostWatch, divide_cores, on_cores, processor_seconds
from packhorse_bench.serving_servers import OURS, Endpoint, ServerPlace, start, stopping

linux = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")


def machine_of(cores: int, usable: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    monkeypatch.setattr(host, "usable_cores", lambda: usable)


def test_generators_get_the_last_cores_where_there_are_enough(monkeypatch) -> None:
    machine_of(16, 16, monkeypatch)
    division = divide_cores(4)
    assert division.generators == (12, 13, 14, 15)
    assert division.servers == frozenset(range(12)) and division.server_cores == 12
    assert host.default_generators() == 4
    assert divide_cores(4, more=1).generators == (11, 12, 13, 14, 15)


def test_a_container_with_less_time_than_cores(monkeypatch) -> None:
    machine_of(64, 8, monkeypatch)
    division = divide_cores(2)
    assert division.generators == (6, 7) and division.server_cores == 6


@pytest.mark.parametrize(("cores", "generators"), [(2, 1), (3, 1), (16, 9)])
def test_too_few_cores_are_shared(cores: int, generators: int, monkeypatch) -> None:
    machine_of(cores, cores, monkeypatch)
    division = divide_cores(generators)
    assert division.generators == (None,) * generators
    assert division.servers is None and division.server_cores == cores


@linux
def test_processes_started_inside_run_on_these_cores() -> None:
    before = os.sched_getaffinity(0)
    core = min(before)
    code = "import os; print(sorted(os.sched_getaffinity(0)))"
    with on_cores(frozenset({core})):
        output = subprocess.check_output([sys.executable, "-S", "-c", code], text=True)
    assert output.strip() == f"[{core}]" and os.sched_getaffinity(0) == before
    with on_cores(None):
        assert os.sched_getaffinity(0) == before


@linux
def test_processes_of_our_server_write_their_stacks(tiny_folder: Path, tmp_path: Path) -> None:
    place = ServerPlace(tiny_folder, "cpu", "fp32", 1, 8, more=("--fronts", "1"))
    running = [start(OURS, place, tmp_path)]
    with stopping(running):
        running[0].wait()
        lines = host.stacks(running[0])
        assert running[0].vectors(["it still answers"]).shape[0] == 1
    files = "\n".join(lines)
    for name in ("supervisor.py", "processes/front.py", "processes/engine.py", "runtime/engine.py"):
        assert name in files, files


@linux
def test_processor_time_is_that_of_a_process_and_all_below_it() -> None:
    burn = "while True: pass"
    code = (
        f"import subprocess, sys; subprocess.Popen([sys.executable, '-S', '-c', '{burn}']).wait()"
    )
    process = subprocess.Popen([sys.executable, "-S", "-c", code], start_new_session=True)
    try:
        deadline = time.monotonic() + 240
        seconds: dict[int, float] = {}
        while sum(seconds.values()) < 0.2 and time.monotonic() < deadline:
            time.sleep(0.05)
            seconds = processor_seconds(process.pid) or {}
        assert len(seconds) == 2 and process.pid in seconds
        assert sum(seconds.values()) >= 0.2 > seconds[process.pid]
        assert os.getpid() not in seconds
    finally:
        os.killpg(process.pid, 9)
        process.wait()


def test_without_proc_nothing_is_known(tmp_path) -> None:
    assert processor_seconds(os.getpid(), tmp_path) is None


def test_a_server_that_is_gone_leaves_figures_unknown() -> None:
    with HostWatch(Endpoint(1), None, None, 0.01, 0.1) as watch:
        time.sleep(0.4)
    assert watch.figures() == host.HostFigures()


def test_a_watch_that_does_not_return_holds_up_nobody(monkeypatch) -> None:
    released = threading.Event()

    def hang(pid: int) -> None:  # as a driver may that NVML asks
        released.wait(60)

    monkeypatch.setattr(host, "END_SECONDS", 0.1)
    monkeypatch.setattr(host, "processor_seconds", hang)
    try:
        with HostWatch(Endpoint(1), os.getpid(), None, 0.0, 5.0) as watch:
            pass
        assert watch.is_stuck and watch.figures() == host.HostFigures()
    finally:
        released.set()
    watch._thread.join(60)
    assert not watch.is_stuck


def test_the_limit_on_open_files_only_rises() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        host.raise_file_limit(1)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == before
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, before[1]))
        host.raise_file_limit(200)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (200, before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
