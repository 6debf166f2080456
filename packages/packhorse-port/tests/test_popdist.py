"""Several processes: PopDist's names, poprun, and the same weights as one plain loop."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from packhorse.errors import InputError
from packhorse_port import popdist, poprun, script
from packhorse_port.popdist import poptorch as popdist_poptorch

SCRIPT = """
import json, sys, torch
import popdist, popdist.poptorch, poptorch
options = popdist.poptorch.Options(ipus_per_replica=2)
torch.manual_seed(popdist.getInstanceIndex())  # the first instance's weights are used
model = torch.nn.Linear(3, 1)
class Loss(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = model
    def forward(self, x, y):
        return torch.nn.functional.mse_loss(self.inner(x), y)
loss = Loss()
optimizer = torch.optim.SGD(loss.parameters(), lr=0.1)
training = poptorch.trainingModel(loss, options, optimizer)
x, y = (torch.tensor(rows) for rows in json.loads(sys.argv[1]))
local = len(x) // popdist.getNumInstances()
begin = popdist.getInstanceIndex() * local
training(x[begin : begin + local], y[begin : begin + local])
if popdist.getInstanceIndex() == 0:
    numbers = [popdist.getNumInstances(), popdist.getNumTotalReplicas(),
               popdist.getNumLocalReplicas(), popdist.getNumIpusPerReplica()]
    print(json.dumps([numbers, popdist.isPopdistEnvSet(), model.weight.tolist()]))
"""


def test_instances_train_what_a_plain_loop_trains(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(8, 3, generator=generator)
    y = torch.randn(8, 1, generator=generator)
    data = json.dumps([x.tolist(), y.tolist()])
    source = str(Path(script.__file__).parents[1])
    path = os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    words = ["-vv", "--mpi-global-args", "--tag-output", "--num-instances=2", "--num-replicas", "4"]
    words += ["--ipus-per-replica=2", "python", str(file), data]
    completed = subprocess.run(
        [sys.executable, "-m", "packhorse_port.poprun", *words],
        env={**environment, "PACKHORSE_DEVICE": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert completed.returncode == 0, completed.stderr
    numbers, is_set, weight = json.loads(completed.stdout)
    assert numbers == [2, 4, 2, 2] and is_set
    torch.manual_seed(0)
    plain = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    torch.nn.functional.mse_loss(plain(x), y).backward()
    optimizer.step()
    torch.testing.assert_close(torch.tensor(weight), plain.weight.detach(), rtol=1e-6, atol=1e-6)


def test_alone_there_is_one_instance(monkeypatch):
    for name in ("WORLD_SIZE", "RANK", popdist.TOTAL_REPLICAS, popdist.IPUS_PER_REPLICA):
        monkeypatch.delenv(name, raising=False)
    assert not popdist.isPopdistEnvSet() and popdist.getNumInstances() == 1
    options = popdist_poptorch.Options(ipus_per_replica=4).deviceIterations(2)
    assert options.Distributed.numProcesses == 1 and options.replication_factor == 1
    assert options.clone().device_iterations == 2
    monkeypatch.setenv(popdist.IPUS_PER_REPLICA, "2")
    with pytest.raises(RuntimeError, match="--ipus-per-replica 2"):
        popdist_poptorch.Options(ipus_per_replica=4)


def test_the_place_of_an_instance_is_the_launchers(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv(popdist.TOTAL_REPLICAS, "6")
    options = popdist_poptorch.Options()
    distributed = options.Distributed
    assert (distributed.processId, distributed.numProcesses) == (2, 3)
    assert options.replication_factor == 2 and popdist.getReplicaIndexOffset() == 4
    calls = {
        "useIpuId": lambda: options.useIpuId(1),
        "replicationFactor": lambda: options.replicationFactor(1),
        "Distributed.disable": distributed.disable,
        "Distributed.setEnvVarNames": lambda: distributed.setEnvVarNames("A", "B"),
        "Distributed.configureProcessId": lambda: distributed.configureProcessId(0, 1),
    }
    for name, call in calls.items():
        with pytest.raises(RuntimeError, match=f"Cannot call `{name}` with popdist"):
            call()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num-instances", "2"], "starts a command"),
        (["--num-instances"], "followed by a value"),
        (["--num-replicas=none", "python"], "a number from 1 on, not 'none'"),
        (["--num-instances=2", "--num-replicas=3", "python"], "cannot be shared"),
    ],
)
def test_mistakes_are_told_in_a_line(words, message):
    with pytest.raises(InputError, match=message):
        poprun.parse(words)


def test_the_script_keeps_its_own_options():
    numbers, command = poprun.parse(["--num-instances", "2", "sh", "--num-instances", "5"])
    assert numbers["--num-instances"] == numbers["--num-replicas"] == 2
    assert command == ["sh", "--num-instances", "5"]


@pytest.mark.parametrize("name", script.SDK)
def test_other_modules_of_the_sdk_are_refused_by_name(name, tmp_path):
    finder = script.ImportFinder()
    with pytest.raises(ModuleNotFoundError, match=script.SDK[name].split(";")[0]):
        finder.find_spec(name)
    assert script.hide_torchvision(lambda name, package=None: finder.find_spec(name))(name) is None


def test_poprun_names_a_command_that_there_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert poprun.main(["--num-instances", "2", "no-such-command", "x"]) == 2
    assert capsys.readouterr().err == "poprun: no-such-command is no command that can be run\n"
