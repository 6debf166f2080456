"""The page of test coverage: rooms and totals, with modules for a GPU apart."""

from __future__ import annotations

import importlib.util
import sys
import tomllib
from types import ModuleType
from typing import Any

import pytest

from .documented import REPOSITORY

SETTINGS = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))["tool"]


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "coverage_table", REPOSITORY / "docs" / "coverage_table.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # its dataclass looks itself up there
    spec.loader.exec_module(module)
    return module


def measured(path: str, *counts: int) -> dict[str, Any]:
    """A file of coverage.py's report: statements, those run, branches, those run."""
    names = ("num_statements", "covered_lines", "num_branches", "covered_branches")
    return {f"packages/{path}": {"summary": dict(zip(names, counts, strict=True))}}


def test_rooms_are_added_up_and_gpu_modules_stand_apart(table: ModuleType) -> None:
    files = {
        **measured("packhorse/src/packhorse/serve/app.py", 100, 90, 20, 10),
        **measured("packhorse/src/packhorse/serve/dialects/tei.py", 100, 100, 20, 20),
        **measured("packhorse/src/packhorse/atomic.py", 30, 20, 0, 0),
        **measured("packhorse/src/packhorse/attention/varlen.py", 50, 5, 10, 1),
    }
    reason = {"packhorse/attention/varlen.py": "attention in CUDA"}
    text = table.page({"files": files}, reason)
    assert "| packhorse | serve | 200 | 95.0 % | 40 | 75.0 % |" in text
    assert "| packhorse | modules without a folder | 30 | 66.6 % | 0 |  |" in text
    assert "| **all** | | **230** | **91.3 %** | **40** | **75.0 %** |" in text
    assert "| `packhorse/attention/varlen.py` | attention in CUDA | 50 | 10.0 % |" in text
    with pytest.raises(SystemExit, match=r"not there: packhorse/gone\.py"):
        table.page({"files": files}, {**reason, "packhorse/gone.py": "gone"})


def test_gpu_modules_are_there() -> None:
    for module in SETTINGS["packhorse"]["gpu-only"]:
        package = module.partition("/")[0].replace("_", "-")
        assert (REPOSITORY / "packages" / package / "src" / module).is_file(), module
