"""The course's script runs unchanged, and the plain script it stands for gives the same numbers."""

from __future__ import annotations

import ast
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import packhorse_port
from packhorse_port import notices, torchvision
from packhorse_port.patch import translate

SCRIPT = Path(__file__).parent / "scripts" / "section_four.py"

pytest.importorskip("sklearn")
pytest.importorskip("tqdm")
pytest.importorskip("matplotlib")


@pytest.fixture(autouse=True)
def _modules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Here, as `packhorse port` would have it."""
    monkeypatch.setitem(sys.modules, "poptorch", packhorse_port)
    monkeypatch.setitem(sys.modules, "torchvision", torchvision)
    monkeypatch.setenv("PACKHORSE_DATASETS", "digits")
    monkeypatch.chdir(tmp_path)
    notices.reset()


def test_it_runs_unchanged(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "packhorse", "port", str(SCRIPT)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    completed = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert completed.returncode == 0, completed.stderr
    accuracy = re.fullmatch(r"Eval accuracy: ([0-9.]+)%\n", completed.stdout)
    assert accuracy and float(accuracy[1]) > 60, "ten classes, one epoch of 1,500 digits"
    assert set(torch.load(tmp_path / "classifier.pth")) > {"conv1.weight", "fc2.bias"}
    assert "section_four.py:19: FashionMNIST is scikit-learn's digits" in completed.stderr
    assert "packhorse port: poptorch was packhorse_port" in completed.stderr


def both(text: str, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a script leaves behind, ported and translated."""
    completed = translate(text.encode(), "script.py")
    assert completed.untranslated == ()
    tree = ast.parse(completed.text)
    named = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert "poptorch" not in named and "import packhorse" not in completed.text
    (folder / "ported.py").write_text(text)
    (folder / "plain.py").write_text(completed.text)
    return (
        runpy.run_path(str(folder / "ported.py"), run_name="__main__"),
        runpy.run_path(str(folder / "plain.py"), run_name="__main__"),
    )


def same(ported: dict[str, Any], plain: dict[str, Any], *names: str) -> None:
    for single, second in zip(
        ported["model"].state_dict().values(), plain["model"].state_dict().values(), strict=True
    ):
        assert torch.equal(single, second)
    for name in names:
        assert torch.equal(torch.as_tensor(ported[name]), torch.as_tensor(plain[name]))


@pytest.mark.slow
def test_the_plain_script_gives_the_same_numbers(tmp_path: Path) -> None:
    text = SCRIPT.read_text().replace("import torch\n", "import torch\ntorch.manual_seed(3)\n", 1)
    # In this process: workers add nothing to the numbers. Two epochs, so that shuffles differ.
    text = re.sub(r"num_workers=\d+", "num_workers=0", text).replace("epochs = 1", "epochs = 2")
    ported, plain = both(text, tmp_path)
    same(ported, plain, "total_loss", "output", "predictions", "labels")
    assert len(plain["predictions"]) == 297 // 32 * 32
    assert "poptorch" not in plain


MANY = """
import torch
import poptorch

torch.manual_seed(5)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(6, 3)
        self.drop = torch.nn.Dropout(0.25)

    def forward(self, x, y):
        out = self.line(self.drop(poptorch.recomputationCheckpoint(x)))
        loss = torch.nn.functional.cross_entropy(out, y, reduction="none")
        return out, poptorch.identity_loss(loss, reduction="mean")


dataset = torch.utils.data.TensorDataset(torch.randn(200, 6), torch.randint(0, 3, (200,)))
model = Net()
opts = poptorch.Options().deviceIterations(2).outputMode({mode})
opts.Training.gradientAccumulation(2)
opts.Training.accumulationAndReplicationReductionType(poptorch.ReductionType.{reduction})
opts.replicationFactor({replicas})
opts.Precision.setPartialsType(torch.float16)
loader = poptorch.DataLoader(opts, dataset, batch_size=4, shuffle=True)
optimizer = poptorch.optim.AdamW(model.parameters(), lr=0.02, loss_scaling=64.0)
training = poptorch.trainingModel(model, opts, optimizer)
losses = []
for epoch in range(2):
    for x, y in loader:
        out, loss = training(x, y)
        losses.append(loss.sum())
    training.setOptimizer(optimizer)
losses = torch.stack(losses)
"""


@pytest.mark.parametrize(
    ("mode", "reduction", "replicas"),
    [
        ("poptorch.OutputMode.Default", "Mean", 1),
        ("poptorch.OutputMode.All", "Sum", 1),
        ("poptorch.OutputMode.EveryN, 2", "Mean", 1),
        ("poptorch.OutputMode.Sum", "Mean", 3),
    ],
)
def test_options_give_the_same_numbers(
    mode: str, reduction: str, replicas: int, tmp_path: Path
) -> None:
    text = MANY.format(mode=mode, reduction=reduction, replicas=replicas)
    ported, plain = both(text, tmp_path)
    same(ported, plain, "losses", "out", "loss")
    assert len(plain["losses"]) == 200 // (16 * replicas) * 2


def test_the_comparison_can_fail(tmp_path: Path) -> None:
    """A control: a translation that lost the accumulation would be seen."""
    text = MANY.format(mode="poptorch.OutputMode.Final", reduction="Mean", replicas=1)
    ported, _ = both(text, tmp_path)
    whole = translate(text.encode(), "script.py").text
    step = " " * 12 + "optimizer.step()"
    lossy = whole.replace(step, " " * 4 + step)  # after each part, no longer after both
    assert lossy != whole
    (tmp_path / "plain.py").write_text(lossy)
    plain = runpy.run_path(str(tmp_path / "plain.py"))
    with pytest.raises(AssertionError):
        same(ported, plain, "losses")
