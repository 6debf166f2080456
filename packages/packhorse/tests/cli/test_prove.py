"""`packhorse prove`: the table, the document, and a model that fails."""

from __future__ import annotations

import json

import pytest

from packhorse.cli import main
from packhorse.runtime import proof

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
