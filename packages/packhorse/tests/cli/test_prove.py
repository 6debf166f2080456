"""`packhorse prove`: the table, the document, and a model that fails."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from packhorse import checkpoint
from packhorse.cli import main
from packhorse.model.int8 import Int8Linear
from packhorse.reports import random_model
from packhorse.runtime import proof
from packhorse.runtime.backend import TorchBackend

pytestmark = pytest.mark.machine


@pytest.mark.parametrize(
    "kernels", ["bucketed", pytest.param("bucketed,mask", marks=pytest.mark.slow)]
)
def test_minilm_is_proven(minilm, capsys, kernels: str) -> None:
    # One pack: a control that saw only that could find a sequence alone in its row.
    arguments = ["prove", str(minilm), "--packs", "1", "--dtype", "fp32", "--json"]
    assert main([*arguments, "--kernel", kernels]) == 0
    out, shown = capsys.readouterr()
    document = json.loads(out)
    assert document["ok"] is True
    assert {p["kernel"] for p in document["proofs"]} == set(kernels.split(","))
    assert {p["check"] for p in document["proofs"]} == set(proof.CHECKS)
    assert {p["head"] for p in document["proofs"]} == {"hidden", "pooled", "embed"}
    assert "bit-equal" in shown


def test_a_broken_model_is_not(minilm, capsys, monkeypatch) -> None:
    """The control: with isolation broken the command fails and says where."""
    from packhorse.attention.reference import Reference, ReferencePlan

    def whole(self, packed, dropout=0.0):
        return ReferencePlan([len(packed.ids)], {len(packed.ids): None}, dropout)

    monkeypatch.setattr(Reference, "plan", whole)
    arguments = ["prove", str(minilm), "--packs", "1", "--dtype", "fp32", "--kernel", "reference"]
    assert main(arguments) == 1
    captured = capsys.readouterr()
    assert "FAILED" in captured.out
    assert "checks failed, first neighbour of hidden under reference in fp32" in captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere/at-all"], "nowhere/at-all"),
        (["{minilm}", "--packs", "0"], "--packs is 0; it must be 1 or more"),
        (["{minilm}", "--dtype", "int3"], "unknown dtype 'int3'"),
        (["{minilm}", "--dtype", "fp32", "--kernel", "varlen"], "it runs on cuda"),
        (["{minilm}", "--device", "moon"], "unknown device"),
    ],
)
def test_mistakes_are_one_line(minilm, capsys, arguments: list[str], message: str) -> None:
    assert main(["prove", *(a.format(minilm=minilm) for a in arguments)]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert message in lines[-1] and lines[-1].startswith("packhorse: ")


def test_layers_that_a_folder_keeps_are_proven_as_they_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = random_model.write("tiny", tmp_path / "tiny")
    loaded = replace(checkpoint.load(source), kept=("1.down",))
    folder = checkpoint.write(tmp_path / "int8", loaded, products=torch.int8)
    kinds: list[set[str]] = []

    class Seen(TorchBackend):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            layers = self.model.bert.layers
            modules = dict(layers.named_modules())
            kinds.append({n for n, m in modules.items() if isinstance(m, Int8Linear)})

    monkeypatch.setattr(proof, "TorchBackend", Seen)
    arguments = ["prove", str(folder), "--packs", "1", "--dtype", "int8", "--device", "cpu"]
    assert main([*arguments, "--kernel", "reference"]) == 0
    (names,) = kinds
    assert "1.up" in names and "1.down" not in names
