"""What a start imports and compiles before the first request is answered."""

from __future__ import annotations

import httpx
import pytest

from packhorse import executable

from .processes.test_processes import wait_for

# No server needs these to be ready, and each takes longer to import than a small model to open.
SLOW_IMPORTS = ("transformers", "scipy", "pandas", "matplotlib", "sklearn", "sympy", "onnxruntime")
COMPILER = "torch._dynamo."  # one of its modules


@pytest.mark.parametrize("graphs", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_ready_waits_for_no_compiler_and_no_other_library(start, tmp_path, graphs) -> None:
    flags = ["--graphs", "--batch-tokens", "64"] if graphs else []
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
