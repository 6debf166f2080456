"""`packhorse doctor`: true of this machine, and helpful about what is missing."""

from __future__ import annotations

import json

import pytest
import torch

from packhorse.attention import KERNELS
from packhorse.cli import doctor, main

pytestmark = pytest.mark.machine


def test_it_says_what_runs_and_why_not(capsys) -> None:
    assert main(["doctor", "--json"]) == 0
    out, shown = capsys.readouterr()
    report = json.loads(out)
    assert report["machine"]["torch"] == torch.__version__
    on_cpu = {(r["kernel"], r["dtype"]): r for r in report["kernels"] if r["device"] == "cpu"}
    assert set(on_cpu) == {(name, dtype) for name in KERNELS for dtype in ("fp32", "bf16")}
    assert on_cpu["reference", "fp32"]["runs"] is True
    assert on_cpu["varlen", "fp32"]["runs"] is False
    assert "cuda" in on_cpu["varlen", "fp32"]["why"]
    assert "NVIDIA GPU" in on_cpu["varlen", "fp32"]["fix"]
    assert "Attention kernels" in shown


def test_missing_things_come_with_their_fix(monkeypatch) -> None:
    from packhorse import executable

    monkeypatch.setattr(executable, "cpp_compiler", lambda: None)
    monkeypatch.setitem(doctor.EXTRAS, "data", "a-package-nobody-has")
    report = doctor.examine()
    assert "none" in report["machine"]["C++ compiler"]
    extra = next(row for row in report["extras"] if row["extra"] == "data")
    assert extra == {"extra": "data", "version": None, "fix": "pip install 'packhorse[data]'"}


def test_a_cache_folder_of_others_is_reported_not_raised(monkeypatch, tmp_path) -> None:
    tmp_path.chmod(0o777)
    monkeypatch.setenv("PACKHORSE_CACHE", str(tmp_path))
    assert "can be written by others" in doctor.examine()["machine"]["cache folder"]
