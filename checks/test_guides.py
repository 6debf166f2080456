"""The guide for people with a model of their own runs as it stands, block after block."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

GUIDE = Path(__file__).parents[1] / "docs" / "guides" / "pack-your-own-model.md"


def blocks(text: str) -> list[str]:
    """The blocks of Python, at the lines where they stand, for tracebacks."""
    scripts = []
    for block in re.finditer(r"^```python\n(.*?)^```$", text, re.M | re.S):
        scripts.append("\n" * text.count("\n", 0, block.start(1)) + block[1])
    return scripts


def test_every_block_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"__name__": "guide"}
    for block in blocks(GUIDE.read_text("utf-8")):
        exec(compile(block, str(GUIDE), "exec"), names)
    assert names["features"].shape == (56, 12)
    assert names["scores"].shape[1] == 7 and names["ends"].shape == names["means"].shape
    assert len(names["losses"]) == len(names["packs"]) > 5
    assert names["control"] > 1e-2 > 1e-5 > names["difference"]
    assert "without boundaries" in capsys.readouterr().out


def test_the_table_of_kernels_is_true() -> None:
    """As far as a machine without CUDA can tell; tests/gpu has the rest."""
    from packhorse.attention import kernel, pick

    text = GUIDE.read_text("utf-8")
    cpu = torch.device("cpu")
    training = {"fp32": pick(cpu, torch.float32, backward=True).name}
    training["bf16"] = pick(cpu, torch.bfloat16, backward=True).name
    for dtype, name in training.items():
        assert re.search(rf"^\| CPU, {dtype} \| `native`.* \| `{name}`", text, re.M), dtype
    assert kernel("native").serves.mismatch(cpu, torch.float32) is None
    assert kernel("native").serves.mismatch(cpu, torch.bfloat16) is None
    cuda = torch.device("cuda")
    assert kernel("fused").serves.mismatch(cuda, torch.bfloat16, True, 64) is None
    assert "heads of 32, 64, 96 or 128" in text
    assert list(kernel("fused").serves.head_sizes or ()) == [32, 64, 96, 128]
    assert kernel("varlen").serves.mismatch(cuda, torch.float16, True, 128) is None


@pytest.mark.parametrize("name", ["from-tei", "from-vllm", "from-infinity"])
def test_flags_that_replace_others_exist(name: str) -> None:
    """Each flag of ours in a table of flags is a setting of `packhorse serve`."""
    from packhorse.serve.settings import ServeSettings
    from packhorse.settings import setting_fields

    known = {f"--{field.replace('_', '-')}" for field in setting_fields(ServeSettings)}
    known.add("--no-graphs")
    rows = re.findall(
        r"^\| (.+?) \| (.+?) \| .*\|$", GUIDE.with_name(f"{name}.md").read_text(), re.M
    )
    ours = {flag for _, cell in rows for flag in re.findall(r"--[a-z][\w-]*", cell)}
    assert len(rows) > 20 and len(ours) > 10
    assert ours <= known
