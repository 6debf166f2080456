"""The example that packs a model of its own runs, and its gradients are those of padded rows."""

from __future__ import annotations

import re
import runpy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from packhorse.attention import PackedAttention
from packhorse.packing import Packed

EXAMPLE = Path(__file__).parents[2] / "examples" / "protein_encoder.py"
SMALL = ["--width", "16", "--heads", "2", "--batch", "8", "--count", "40", "--tokens", "1024"]


def test_it_compares_and_learns(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLE))["main"]([*SMALL, "--epochs", "3", "--workers", "1"])
    printed = capsys.readouterr().out
    tokens = dict(
        re.findall(r"^(padded|packed): +(\d+) tokens, +[\d.]+ ms per step$", printed, re.M)
    )
    assert 0 < int(tokens["packed"]) < int(tokens["padded"])
    (difference,) = re.findall(r"gradients differ by (\S+) of their norm", printed)
    assert float(difference) < 1e-5
    losses = [float(loss) for loss in re.findall(r"epoch \d: loss ([\d.]+)", printed)]
    assert len(losses) == 3 and losses[-1] < losses[0]


def test_the_comparison_sees_a_lost_boundary() -> None:
    example = runpy.run_path(str(EXAMPLE))

    def without_boundaries(packed: Packed) -> PackedAttention:
        bounds = packed.cu_seqlens[[0, -1]]
        return PackedAttention(replace(packed, cu_seqlens=bounds, max_seqlen=len(packed.ids)))

    torch.manual_seed(0)
    model = example["ProteinEncoder"](16, 2, 2)
    compare = example["compare"]
    proteins = example["make_proteins"](8)
    assert compare(model, proteins, torch.device("cpu")) < 1e-5
    example["packed_loss"].__globals__["PackedAttention"] = without_boundaries
    assert compare(model, proteins, torch.device("cpu")) > 1e-2
