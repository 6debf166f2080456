"""Anchored tensors: gradients, updated weights and outputs of modules, beside a plain loop."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import packhorse_port as poptorch

from .models import Line, points

All, Final, Sum, EveryN = (
    poptorch.OutputMode.All,
    poptorch.OutputMode.Final,
    poptorch.OutputMode.Sum,
    poptorch.OutputMode.EveryN,
)


def plain(model, x, y, iterations):
    """Gradient, updated weight and output of every iteration of a loop by hand."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = []
    for inputs, targets in zip(x.chunk(iterations), y.chunk(iterations), strict=True):
        optimizer.zero_grad()
        out = model.line(inputs)
        nn.functional.mse_loss(out, targets).backward()
        optimizer.step()
        row = (model.line.bias.grad, model.line.weight.detach(), out.detach())
        rows.append([tensor.clone() for tensor in row])
    return [torch.stack(column) for column in zip(*rows, strict=True)]


@pytest.mark.parametrize("mode", [None, Final, All, Sum, EveryN])
def test_anchored_tensors_are_those_of_a_plain_loop(mode):
    torch.manual_seed(1)
    model = Line()
    x, y = points(12)
    expected = plain(copy.deepcopy(model), x, y, 4)
    options = poptorch.Options().deviceIterations(4)
    names = {"gradient": "Gradient___line.bias", "weight": "UpdatedVar___line.weight"}
    names["output"] = "line"
    for short, name in names.items():
        options.anchorTensor(short, name, mode, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = poptorch.trainingModel(model, options, optimizer)
    training(x, y)
    assert set(names.values()) <= set(training.getTensorNames())
    for short, values in zip(names, expected, strict=True):
        wanted = {
            None: values[-1],  # the mode of a trainingModel's outputs
            Final: values[-1],
            All: values,
            Sum: values.sum(0),
            EveryN: values[1::2],
        }[mode]
        torch.testing.assert_close(training.getAnchoredTensor(short), wanted)


def test_a_tensor_that_is_not_there_is_named():
    options = poptorch.Options().anchorTensor("a", "Gradient___other")
    training = poptorch.trainingModel(Line(), options)
    with pytest.raises(poptorch.Error, match=r"no tensor 'Gradient___other'; take Gradient___WEI"):
        training(*points(2))
    inference = poptorch.inferenceModel(Line(), poptorch.Options().anchorTensor("out", "line/1"))
    with pytest.raises(AssertionError, match="No tensor with name out"):
        inference.getAnchoredTensor("out")
    out = inference(points(2)[0])
    assert torch.equal(inference.getAnchoredTensor("out"), out)
    with pytest.raises(AssertionError, match="Anchored are: out"):
        inference.getAnchoredTensor("other")


def test_anchors_survive_saving(tmp_path):
    options = poptorch.Options().anchorTensor("g", "Gradient___line.bias", EveryN, 3)
    training = poptorch.trainingModel(Line(), options)
    training(*points(2))
    training.save(tmp_path / "model.poptorch")
    loaded = poptorch.load(tmp_path / "model.poptorch")
    assert loaded.options.anchored_tensors["g"] == ["Gradient___line.bias", EveryN, 3]
