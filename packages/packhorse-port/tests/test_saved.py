"""A saved executor, opened again: in this process, in another, compiled, damaged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import packhorse_port as poptorch
from packhorse.errors import CheckpointError, InputError
from packhorse.executable import cpp_compiler
from packhorse_port.notices import UsageError

from .models import Classifier, Line, images, points

SCRIPT = """
import json, sys, torch
folder, mode, path, cache = sys.argv[1:]
sys.path.insert(0, folder)
import models
import packhorse_port as poptorch
from packhorse.executable import cache_misses
data, labels = models.images(8)
if mode == "make":
    torch.manual_seed(0)
    model = models.Classifier()
    opts = poptorch.Options().deviceIterations(2)
    if cache:
        opts.compileStep().enableExecutableCaching(cache)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    training = poptorch.trainingModel(model, opts, optimizer)
    training(data, labels)
    training.save(path)
else:
    training = poptorch.load(path)
_, loss = training(data, labels)
weights = [w.flatten().tolist() for w in training.model.parameters()]
graphs = len(training._step.graphs)
print(json.dumps([loss.item(), weights, cache_misses(), graphs, training._step.refused]))
"""


def process(mode: str, path: Path, cache: Path | str) -> Any:
    """What a process of its own says."""
    words = [str(Path(__file__).parent), mode, str(path), str(cache)]
    result = subprocess.run([sys.executable, "-c", SCRIPT, *words], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def trained(kind: Any = Classifier, opts=None, optimizer: Any = torch.optim.AdamW, calls=3):
    torch.manual_seed(0)
    model = kind()
    opts = opts or poptorch.Options().deviceIterations(2)
    training = poptorch.trainingModel(model, opts, optimizer(model.parameters(), lr=0.01))
    for _ in range(calls):
        training(*(points(8) if isinstance(model, Line) else images(8)))
    return training


def weights(training) -> list[torch.Tensor]:
    return [weight.detach() for weight in training.model.parameters()]


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, poptorch.optim.SGD, poptorch.optim.Adam])
def test_goes_on_as_if_nothing_had_been(optimizer, tmp_path):
    training = trained(optimizer=optimizer)
    training.save(tmp_path / "model.poptorch")
    data, labels = images(8, seed=1)
    state = torch.get_rng_state()
    _, loss = training(data, labels)
    opened = poptorch.load(tmp_path / "model.poptorch")
    assert torch.equal(torch.get_rng_state(), state)
    _, again = opened(data, labels)
    assert torch.equal(loss, again)
    assert all(map(torch.equal, weights(training), weights(opened)))
    assert opened.options.device_iterations == 2 and type(opened._step.optimizer) is optimizer


def test_is_safetensors_and_json_and_nothing_else(tmp_path):
    training = trained()
    training.save(tmp_path)
    with safe_open(tmp_path / "model.poptorch", "pt") as file:
        header = json.loads(file.metadata()["packhorse.port"])
        names = set(file.keys())
    assert {"model.conv.weight", "optimizer.conv.weight|exp_avg", "rng"} <= names
    assert header["training"] and header["model"].endswith("models:Classifier")
    assert header["options"]["device_iterations"] == 2
    training.save(tmp_path / "small", export_model=False, save_rng_state=False)
    with safe_open(tmp_path / "small", "pt") as file:
        assert not list(file.keys())


def test_the_inference_model_is_the_same_one(tmp_path):
    model = Line().eval()
    inference = poptorch.inferenceModel(model)
    inference.compileAndExport(tmp_path / "line", points(4)[0])
    opened = poptorch.load(tmp_path / "line", lambda opts: opts.deviceIterations(1))
    assert opened.isCompiled() and not opened.model.training
    assert torch.equal(opened(points(4)[0]), inference(points(4)[0]))


def test_loadExecutable_leaves_the_weights(tmp_path):
    trained().save(tmp_path / "one", export_model=False)
    second = trained(calls=1)
    before = [weight.clone() for weight in weights(second)]
    second.loadExecutable(tmp_path / "one")
    assert all(map(torch.equal, weights(second), before))
    opts = poptorch.Options().deviceIterations(4)
    with pytest.raises(InputError, match="device_iterations 2 and these options say 4"):
        trained(opts=opts, calls=0).loadExecutable(tmp_path / "one")
    with pytest.raises(InputError, match="saved by a trainingModel"):
        poptorch.inferenceModel(Classifier()).loadExecutable(tmp_path / "one")
    with pytest.raises(InputError, match="export_model=False"):
        poptorch.load(tmp_path / "one")


def test_a_model_built_with_arguments_is_not_taken_for_one_without(tmp_path):
    trained(lambda: Classifier(dropout=0.5)).save(tmp_path / "one")
    with pytest.raises(InputError, match=r"built with arguments\); build the model yourself"):
        poptorch.load(tmp_path / "one")


def test_nothing_to_save_yet():
    with pytest.raises(UsageError, match="nothing to save yet"):
        trained(calls=0).save("never")


def test_what_is_no_saved_executor_is_reported(tmp_path):
    with pytest.raises(CheckpointError, match="there is no"):
        poptorch.load(tmp_path / "absent")
    (tmp_path / "pickled").write_bytes(b"\x80\x04cos\nsystem\n.")
    with pytest.raises(CheckpointError, match="not an executor that was saved here"):
        poptorch.load(tmp_path / "pickled")
    path = tmp_path / "whole"
    trained().save(path)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(CheckpointError):
        poptorch.load(path)


def test_no_class_is_imported_because_a_file_says_so(tmp_path):
    class Here(Line):
        pass

    training = trained(Here)
    training.save(tmp_path / "here")
    with pytest.raises(InputError, match="has not defined or imported"):
        poptorch.load(tmp_path / "here")


@pytest.mark.slow
@pytest.mark.skipif(cpp_compiler() is None, reason="no C++ compiler")
def test_compiled_within_rounding_and_opened_elsewhere_without_compiling(tmp_path):
    path, cache = tmp_path / "model.poptorch", tmp_path / "cache"
    loss, created, misses, compiled, refused = process("make", path, cache)
    assert compiled and misses > 0 and not refused and any(cache.rglob("*"))
    _, plain, none, *_ = process("make", tmp_path / "plain", "")
    assert none == 0 and plain != created
    for a, b in zip(created, plain, strict=True):
        torch.testing.assert_close(torch.tensor(a), torch.tensor(b), rtol=0, atol=1e-5)
    other_loss, opened, misses, compiled, refused = process("open", path, cache)
    assert compiled and misses == 0 and not refused
    assert (other_loss, opened) == (loss, created)


def test_a_half_model_comes_back_half(tmp_path):
    model = Line().half()
    data, targets = (item.half() for item in points(4))
    training = poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    training(data, targets)
    training.save(tmp_path / "half.poptorch")
    loaded = poptorch.load(tmp_path / "half.poptorch")
    assert torch.equal(loaded.model.line.weight, model.line.weight)  # of one type, too
    assert torch.equal(loaded(data, targets)[1], training(data, targets)[1])
