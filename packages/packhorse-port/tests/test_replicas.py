"""Replicas over processes: who runs what, and the numbers of one process."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch

import packhorse_port as poptorch
from packhorse import launcher
from packhorse_port.notices import UsageError
from packhorse_port.replicas import ReplicaGroup, _interleave

from .models import Classifier, Line, images

RANK = """
import json, sys, torch
sys.path.insert(0, sys.argv[1])
import models
import packhorse_port as poptorch
from packhorse import dist
rank = dist.team_from_environment().rank
torch.manual_seed(rank)  # neither weights nor data agree by themselves
model = models.Classifier()
if rank == 0:
    torch.manual_seed(1)
    model.load_state_dict(models.Classifier().state_dict())
opts = poptorch.Options().deviceIterations(2).replicationFactor(2)
opts.outputMode(poptorch.OutputMode.All)
training = poptorch.trainingModel(model, opts, torch.optim.SGD(model.parameters(), lr=0.1))
for call in range(3):
    data, labels = models.images(16, seed=call + 100 * rank)
    out, loss = training(data, labels)
found = [w.flatten().tolist() for w in model.parameters()]
with open(f"{sys.argv[2]}/{rank}", "w") as file:
    json.dump([found, out.tolist(), loss.tolist()], file)
"""


def started(monkeypatch: pytest.MonkeyPatch, rank: int, world: int) -> None:
    for name, value in {"RANK": rank, "WORLD_SIZE": world}.items():
        monkeypatch.setenv(name, str(value))


def test_each_process_has_its_share(monkeypatch):
    started(monkeypatch, 1, 2)
    group = ReplicaGroup.of(poptorch.Options().replicationFactor(4))
    assert group.local == range(2, 4) and group.shares_batches
    batches = [[number] for number in range(8)]  # two of each replica
    assert [(r, b[0]) for r, b in group.local_batches(batches)] == [(2, 2), (3, 3), (2, 6), (3, 7)]


def test_processes_that_do_not_fit_name_the_line(monkeypatch):
    started(monkeypatch, 0, 2)
    with pytest.raises(UsageError, match=r"write replicationFactor\(2\), or start torchrun"):
        poptorch.trainingModel(Line(), poptorch.Options().replicationFactor(3))
    monkeypatch.undo()
    opts = poptorch.Options()
    opts.Distributed.configureProcessId(0, 2)
    with pytest.raises(UsageError, match="torchrun --nproc-per-node 2"):
        poptorch.trainingModel(Line(), opts)


def test_outputs_are_in_the_order_of_one_process():
    first, second = torch.tensor([0, 1, 4, 5]), torch.tensor([2, 3, 6, 7])
    assert _interleave((first, second), 2).tolist() == list(range(8))
    assert _interleave((torch.tensor(1), torch.tensor(2)), 1).tolist() == [1, 2]
    assert _interleave(("a", "b"), 1) == "a"


@pytest.mark.slow
def test_two_processes_give_the_numbers_of_one(tmp_path):
    here = Path(__file__).parent
    (tmp_path / "rank.py").write_text(RANK)
    command = [sys.executable, str(tmp_path / "rank.py"), str(here), str(tmp_path)]
    result: list[str] = []
    environ = {"PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": ""}
    assert launcher.launch(2, command, environ=environ, report=result.append) == 0, result
    torch.manual_seed(1)
    model = Classifier()
    opts = poptorch.Options().deviceIterations(2).replicationFactor(2)
    opts.outputMode(poptorch.OutputMode.All)
    training = poptorch.trainingModel(model, opts, torch.optim.SGD(model.parameters(), lr=0.1))
    out, loss = [training(*images(16, seed=call)) for call in range(3)][-1]
    for rank in range(2):
        weights, values, losses = json.loads((tmp_path / str(rank)).read_text())
        for a, b in zip(weights, model.parameters(), strict=True):
            torch.testing.assert_close(torch.tensor(a), b.detach().flatten(), rtol=0, atol=1e-6)
        torch.testing.assert_close(torch.tensor(values), out, rtol=0, atol=1e-5)
        torch.testing.assert_close(torch.tensor(losses), loss, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["Consecutive", "Orthogonal", "NoGrouping"])
def test_replicas_of_a_group_get_the_same_input(kind):
    group_type = poptorch.CommGroupType[kind]
    options = poptorch.Options().deviceIterations(2).replicationFactor(6)
    options.inputReplicaGrouping(2, group_type)
    groups = 6 if kind == "NoGrouping" else 3
    loader = poptorch.DataLoader(options, torch.arange(4 * groups), batch_size=2)
    (batch,) = loader  # of two iterations with two rows a group
    out = poptorch.inferenceModel(torch.nn.Identity(), options)(batch)
    order = {
        "Consecutive": [0, 0, 1, 1, 2, 2],  # neighbors
        "Orthogonal": [0, 1, 2, 0, 1, 2],  # every third
        "NoGrouping": [0, 1, 2, 3, 4, 5],
    }[kind]
    inputs = batch.reshape(2, groups, 2)
    assert out.tolist() == inputs[:, order].flatten().tolist()


def test_a_grouping_that_does_not_fit_is_refused():
    options = poptorch.Options().replicationFactor(4)
    with pytest.raises(ValueError, match="cannot be All"):
        options.inputReplicaGrouping(2, poptorch.CommGroupType.All)
    with pytest.raises(ValueError, match="3 must be a factor of replication_factor 4"):
        options.inputReplicaGrouping(3, poptorch.CommGroupType.Consecutive)
    options.inputReplicaGrouping(4, poptorch.CommGroupType.Consecutive).replicationFactor(6)
    with pytest.raises(UsageError, match=r"inputReplicaGrouping\(4, …\) does not divide"):
        poptorch.inferenceModel(Line(), options)
