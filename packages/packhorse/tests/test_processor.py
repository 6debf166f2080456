"""What the processor can do, against the kernel's own list, torch's libraries and data sheets."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from packhorse import device, processor
from packhorse.errors import InputError
from packhorse.model import freeze
from packhorse.processor import CPU_LEVELS, PROBES, VARIABLE, Features, features, level, limit

pytestmark = pytest.mark.machine
CPUINFO = Path("/proc/cpuinfo")
on_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="names x86 instruction sets")
# The kernel's names of what each feature needs.
FLAGS = {
    "avx2": {"avx2"},
    "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
    "vnni": {"avx512_vnni"},
    "avx512_bf16": {"avx512_bf16"},
    "amx": {"amx_tile"},
}
# A model in bf16 beside the same in fp32, on a processor that torch believes to have no bf16.
ENCODE = """
import json, sys, warnings
import packhorse
texts = ["A short text.", "packing leaves no token to waste " * 9, "x"]
half = packhorse.load(sys.argv[1], device="cpu", dtype="bf16")
full = packhorse.load(sys.argv[1], device="cpu", dtype="fp32")
cosines = (half.embed(texts) * full.embed(texts)).sum(1).tolist()
import torch
from packhorse.cli.doctor import examine
from packhorse.processor import features
report = {"cosines": cosines, "features": features().names(), "march": features().march}
report["torch"] = torch.backends.cpu.get_cpu_capability()
report["onednn"] = torch.ops.mkldnn._is_mkldnn_bf16_supported()
report["doctor"] = examine()
print(json.dumps(report))
"""


def kernel_flags() -> set[str]:
    """The instruction sets that Linux lists."""
    lines = CPUINFO.read_text().splitlines() if CPUINFO.exists() else []
    listed = next((line for line in lines if line.startswith("flags")), None)
    if listed is None:
        pytest.skip("there is no list of x86 instruction sets here")
    return set(listed.split(":")[1].split())


def held_to() -> str:
    """The rung that this process was started with."""
    if os.environ.get("ATEN_CPU_CAPABILITY") == "avx2":
        return "avx2"
    return os.environ.get(VARIABLE) or "amx"


def report(program: str, *arguments: object, **environment: str) -> dict:
    """What a fresh process prints last, as JSON, and its errors."""
    variables = {VARIABLE, *CPU_LEVELS["avx2"].switches}
    clean = {key: value for key, value in os.environ.items() if key not in variables}
    command = [sys.executable, "-c", program, *map(str, arguments)]
    completed = subprocess.run(
        command, env=clean | environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert completed.returncode == 0, completed.stderr
    return json.loads(completed.stdout.splitlines()[-1]) | {"stderr": completed.stderr}


@pytest.mark.skipif(
    os.environ.get("PACKHORSE_TEST_LANE") == "haswell",
    reason="the kernel lists the real processor's features, not those that programs see",
)
def test_features_are_those_that_the_kernel_lists() -> None:
    listed, rungs = kernel_flags(), list(CPU_LEVELS)
    below = {CPU_LEVELS[key].adds for key in rungs[: rungs.index(held_to()) + 1]}
    expected = {name for name, needs in FLAGS.items() if needs <= listed and name in below}
    result = features()
    assert set(result.names()) - {"bf16"} == expected
    assert result.bf16 == bool(expected & {"avx512_bf16", "amx"})
    assert device.fast_bf16(torch.device("cpu")) == result.bf16


@on_x86
def test_torch_was_held_to_the_rung_that_this_process_was_started_with() -> None:
    if held_to() == "avx2":
        assert torch.backends.cpu.get_cpu_capability() == "AVX2"
        assert not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    elif features().avx512:
        assert torch.backends.cpu.get_cpu_capability() == "AVX512"


# ---- other machines: what torch's probes say there, and oneDNN about bf16 ----

NO_X86: set[str] = set()
MACHINES = {
    "Haswell": ({"avx2"}, False, False),
    "Skylake server": ({"avx2", "avx512"}, True, False),
    "Cascade Lake": ({"avx2", "avx512", "vnni"}, True, False),
    "Zen 4": ({"avx2", "avx512", "vnni", "avx512_bf16"}, True, True),
    "Sapphire Rapids": ({"avx2", "avx512", "vnni", "avx512_bf16", "amx"}, True, True),
    "Alder Lake, AVX-VNNI without AVX-512": ({"avx2"}, False, False),
    "Sierra Forest, which converts bf16 and does not multiply it": ({"avx2"}, True, False),
    "Neoverse V1, ARM with bf16": (NO_X86, True, True),
    "Neoverse N1, ARM without": (NO_X86, False, False),
}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """Has torch see another processor."""
    processor._features.cache_clear()
    monkeypatch.delenv(VARIABLE, raising=False)

    def pretend(has: set[str], onednn: bool) -> None:
        for name, probe in PROBES.items():
            monkeypatch.setattr(torch.cpu, probe, lambda name=name: name in has, raising=False)
        capability = "AVX512" if "avx512" in has else "AVX2" if "avx2" in has else "DEFAULT"
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
        operators = SimpleNamespace(_is_mkldnn_bf16_supported=lambda: onednn)
        monkeypatch.setattr(torch.ops, "mkldnn", operators)

    yield pretend
    processor._features.cache_clear()


@pytest.mark.parametrize("name", MACHINES)
def test_bf16_is_multiplied_where_the_processor_has_an_instruction_for_it(name, machine) -> None:
    has, onednn, multiplies = MACHINES[name]
    machine(has, onednn)
    assert set(features().names()) - {"bf16"} == has
    assert features().bf16 == device.fast_bf16(torch.device("cpu")) == multiplies
    assert features().march == "native"
    wide = freeze._product_dtype(torch.bfloat16) == torch.float32
    assert wide != multiplies
    assert freeze._product_dtype(torch.float32) == torch.float32


@on_x86
@pytest.mark.parametrize("rung", CPU_LEVELS)
def test_each_rung_has_all_below_it_and_nothing_above(rung: str, machine, monkeypatch) -> None:
    machine(MACHINES["Sapphire Rapids"][0], True)
    for key, value in CPU_LEVELS[rung].switches.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv(VARIABLE, rung)
    rungs = list(CPU_LEVELS)
    expected = {CPU_LEVELS[key].adds for key in rungs[: rungs.index(rung) + 1]}
    assert set(features().names()) - {"bf16"} == expected
    assert features().bf16 == (rung in ("bf16", "amx"))
    assert features().march == CPU_LEVELS[rung].march


@on_x86
def test_a_rung_above_the_machine_changes_nothing(machine, monkeypatch) -> None:
    machine(MACHINES["Haswell"][0], False)
    for key, value in CPU_LEVELS["vnni"].switches.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv(VARIABLE, "vnni")
    assert features() == Features(avx2=True, march="native")


def test_a_switch_of_atens_own_counts(machine, monkeypatch) -> None:
    machine(MACHINES["Zen 4"][0], False)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert features() == Features(avx2=True, march="haswell")


# ---- PACKHORSE_CPU ----


@pytest.mark.parametrize(
    ("machine_name", "value", "message"),
    [
        ("x86_64", "sse9", "PACKHORSE_CPU is 'sse9'; choose one of avx2, avx512, vnni, bf16, amx"),
        (
            "aarch64",
            "avx2",
            "PACKHORSE_CPU is 'avx2', which only x86 processors have, and this one is",
        ),
    ],
)
def test_what_cannot_be_pretended_is_refused(machine_name, value, message, monkeypatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine_name)
    monkeypatch.setenv(VARIABLE, value)
    for ask in (level, limit, features):
        with pytest.raises(InputError, match=message):
            ask()


@on_x86
def test_too_late_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "avx512")
    for key in CPU_LEVELS["avx512"].switches:
        monkeypatch.setenv(key, "")
    torch.ones(2) + 1
    with pytest.warns(RuntimeWarning, match="came too late for torch.*ONEDNN_MAX_CPU_ISA=AVX512"):
        limit()
    limit()  # the switches are set by now, for processes that this one starts


def test_without_the_variable_nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in (VARIABLE, *CPU_LEVELS["avx2"].switches):
        monkeypatch.delenv(key, raising=False)
    limit()
    assert not set(CPU_LEVELS["avx2"].switches) & set(os.environ)


@on_x86
@pytest.mark.parametrize("by", ["ours", pytest.param("theirs", marks=pytest.mark.slow)])
def test_a_model_in_bf16_on_a_processor_without(by: str, minilm: Path) -> None:
    """The switch of ours, and those that torch and oneDNN document themselves."""
    expected = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    result = report(ENCODE, minilm, **{VARIABLE: "avx2"} if by == "ours" else expected)
    assert result["torch"] == "AVX2" and not result["onednn"]
    assert result["features"] == ["avx2"]
    assert min(result["cosines"]) > 0.999
    doctor = result["doctor"]
    assert doctor["machine"]["cpu features"] == ["avx2"]
    rows = [row for row in doctor["kernels"] if row["dtype"] == "bf16" and row["runs"]]
    assert rows and all("no bf16" in row["why"] and "fp32" in row["fix"] for row in rows)


@on_x86
@pytest.mark.slow
@pytest.mark.parametrize("rung", [key for key in CPU_LEVELS if key != "avx2"])
def test_a_model_in_bf16_on_every_rung(rung: str, minilm: Path) -> None:
    result = report(ENCODE, minilm, **{VARIABLE: rung})
    assert min(result["cosines"]) > 0.999
    assert ("bf16" in result["features"]) <= (rung in ("bf16", "amx"))


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 64),
        ({"cpu.max": "max 100000"}, 64),
        ({"cpu.max": "200000 100000"}, 2),
        ({"cpu.max": "150000 100000"}, 2),
        ({"cpu.max": "5000 100000"}, 1),
        ({"cpu.max": "12800000 100000"}, 64),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 64),
        ({"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 2),
        ({"cpu.max": "of another version"}, 64),
    ],
)
def test_a_containers_quota_limits_the_cores(
    files: dict[str, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert processor.usable_cores(tmp_path) == cores
