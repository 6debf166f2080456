"""What a start imports and compiles before the first request is answered."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import httpx
import pytest

from packhorse import executable

from .processes.server import children, wait_for
from .test_metrics_port import free_port

# No server needs these to be ready, and each takes longer to import than a small model to open.
SLOW_IMPORTS = ("transformers", "scipy", "pandas", "matplotlib", "sklearn", "sympy", "onnxruntime")
COMPILER = "torch._dynamo."  # one of its modules


@pytest.mark.parametrize(
    ("graphs", "fronts"),
    [
        (False, "0"),
        pytest.param(True, "0", marks=pytest.mark.slow),
        pytest.param(True, "1", marks=pytest.mark.slow),
    ],
)
def test_ready_waits_for_no_compiler_and_no_other_library(start, tmp_path, graphs, fronts) -> None:
    flags = ["--fronts", fronts]
    flags += ["--graphs", "--batch-tokens", "64"] if graphs else []
    words = {"PYTHONPROFILEIMPORTTIME": "1", "PACKHORSE_CACHE": str(tmp_path)}
    server = start("--device", "cpu", *flags, **words).wait_until_ready()
    text = {"inputs": "w1"}
    assert httpx.post(f"{server.url}/embed", json=text, timeout=120).status_code == 200
    if graphs and executable.why_uncompiled() == "":
        # The control: what must not come before does come after.
        wait_for(lambda: f" {COMPILER}" in server.log())
    imports, _, _ = server.log().partition("serving on http")
    names = {line.rpartition("|")[2].strip() for line in imports.splitlines() if "|" in line}
    assert "torch" in names and "fastapi" in names
    assert names.isdisjoint(SLOW_IMPORTS)
    assert not [name for name in names if name.startswith(COMPILER)]


# Runs first in a server: prints which modules are loaded whenever a process is started.
HOOK = """
def report(event, arguments):
    if event == "subprocess.Popen" and "packhorse.serve.processes" in arguments[1]:
        heavy = {"torch", "fastapi", "uvicorn"} & sys.modules.keys()
        print("STARTS", arguments[1][-2], "WITH", *heavy, file=sys.stderr, flush=True)
sys.addaudithook(report)
"""


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="fronts need Linux's memfd")
@pytest.mark.parametrize("has_side_port", [False, True])
def test_processes_are_started_before_torch_is_loaded(start, has_side_port: bool) -> None:
    flags = ["--fronts", "1", "--device", "cpu"]
    # The batch that an engine ran to start counts for /ready; the control lets none count.
    flags += ["--ready-seconds", "0.001" if has_side_port else "600"]
    flags += ["--metrics-port", str(free_port())] if has_side_port else []
    server = start(*flags, before=HOOK).wait_until_ready()
    lines = [line.split() for line in server.log().splitlines() if line.startswith("STARTS")]
    assert lines == [["STARTS", "front", "WITH"], ["STARTS", "engine", "WITH"]]
    (engine,) = children(server.popen.pid)["engine"]
    assert _has_torch(engine)
    assert _has_torch(server.popen.pid) is has_side_port
    os.kill(engine, signal.SIGSTOP)
    try:
        ready = httpx.get(f"{server.url}/ready", timeout=60).status_code
    finally:
        os.kill(engine, signal.SIGCONT)
    assert ready == (503 if has_side_port else 200)


def _has_torch(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()
