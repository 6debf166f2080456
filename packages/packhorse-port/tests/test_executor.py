"""Executors: PopTorch's methods on a module that stays the user's own."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import packhorse_port as poptorch
from packhorse.errors import PackhorseError
from packhorse_port import notices
from packhorse_port.notices import UsageError

from .models import Classifier, Line, images, points


@pytest.fixture(autouse=True)
def fresh() -> None:
    notices.reset()


def trainer(model: nn.Module, opts: poptorch.Options | None = None) -> poptorch.PoplarExecutor:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return poptorch.trainingModel(model, opts, optimizer)


def test_options_and_optimizer_may_be_left_out():
    torch.manual_seed(0)
    model = Line()
    second = copy.deepcopy(model)
    data, targets = points(4)
    poptorch.trainingModel(model)(data, targets)
    optimizer = torch.optim.SGD(second.parameters(), lr=0.01)
    second(data, targets)[1].backward()
    optimizer.step()
    assert torch.equal(model.line.weight, second.line.weight)
    assert [result.key for result in notices.logged()] == ["optimizer"]
    assert torch.equal(poptorch.inferenceModel(model)(data), model(data).detach())


def test_weights_are_shared_with_the_module_and_its_parts():
    class Both(nn.Module):
        def __init__(self, part: nn.Module) -> None:
            super().__init__()
            self.part = part

        def forward(self, x, y):
            return nn.functional.mse_loss(self.part(x), y)

    line = Line()
    inference = poptorch.inferenceModel(line)
    data, targets = points(4)
    before = inference(data)
    trainer(Both(line))(data, targets)
    assert not torch.equal(inference(data), before)
    assert torch.equal(inference(data), line(data).detach())
    assert torch.equal(inference.state_dict()["line.weight"], line.line.weight)


def test_the_modules_own_attributes_are_there():
    training = trainer(Classifier())
    assert training.conv.out_channels == 4
    training.eval()
    assert not training.model.training
    assert isinstance(training.options, poptorch.Options)
    with pytest.raises(AssertionError, match="not been compiled"):
        training.getTensorNames()
    with pytest.raises(AttributeError, match=r"test_executor.py:\d+: .*ptimiser'; the nearest"):
        training.setOptimiser(None)


def test_a_wrapped_model_may_be_wrapped_again():
    training = trainer(Line())
    assert poptorch.inferenceModel(training).model is training.model


def test_load_state_dict_and_setOptimizer():
    model = Line()
    training = trainer(model)
    data, targets = points(4)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    training(data, targets)
    training.load_state_dict(state)
    training.setOptimizer(torch.optim.SGD(model.parameters(), lr=0.0))
    training(data, targets)
    assert torch.equal(model.line.weight, state["line.weight"])


def test_attached_compiled_destroyed():
    training = trainer(Line())
    assert not training.isAttachedToDevice() and not training.isCompiled()
    training.compile(*points(4))
    assert training.isCompiled() and training.compilationTime() > 0
    training(*points(4))
    assert training.isAttachedToDevice()
    training.detachFromDevice()
    assert not training.isAttachedToDevice() and training.isCompiled()
    assert not training.copyWeightsToHostIfNeeded()
    training.destroy()
    assert not training.isCompiled()
    training(*points(4))
    assert training.isCompiled()


def test_compile_takes_no_step():
    model = Line()
    before = model.line.weight.clone()
    trainer(model).compile(*points(4))
    assert torch.equal(model.line.weight, before)


def test_times_answer_in_seconds():
    inference = poptorch.inferenceModel(Line())
    assert inference.getPerfCounters()["input"] == [[]]
    assert inference.getLatency() == (0.0, 0.0, 0.0)
    with pytest.raises(UsageError, match="call the model first"):
        inference.cycleCount()
    inference(points(4)[0])
    least, most, mean = inference.getLatency()
    assert 0 < least <= mean <= most < 60
    parts = (
        inference.getHostIpuLatency(),
        inference.getComputeLatency(),
        inference.getIpuHostLatency(),
    )
    assert sum(part[2] for part in parts) == pytest.approx(mean)
    assert inference.cycleCount() == pytest.approx(parts[1][2] * 1e9, abs=1)
    assert len(inference.getPerfCounters()["output_complete"][0]) == 1


def test_random_numbers_can_be_put_back():
    training = trainer(Classifier(dropout=0.5), poptorch.Options().randomSeed(3))
    data, labels = images(4)
    state = training.rng_state
    assert state[0] == 3
    first = training(data, labels)[0]
    weights = copy.deepcopy(training.state_dict())
    assert not torch.equal(training(data, labels)[0], first)
    training.load_state_dict(weights)
    training.rng_state = state
    again = poptorch.inferenceModel(training.model)
    drawn = again(data, labels)[0]
    training.rng_state = state
    assert torch.equal(again(data, labels)[0], drawn)


def test_synthetic_data_is_read_once():
    opts = poptorch.Options().enableSyntheticData(True)
    inference = poptorch.inferenceModel(Line(), opts)
    first, _ = points(4)
    assert torch.equal(inference(first), inference(torch.zeros(4, 3)))


def test_backward_of_an_output_says_which_line_to_delete():
    _, loss = trainer(Line())(*points(4))
    assert loss.requires_grad is False
    with pytest.raises(UsageError, match=r"test_executor.py:\d+: delete the line with backward"):
        loss.backward()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: poptorch.trainingModel(len), "takes a torch.nn.Module"),  # pyright: ignore[reportArgumentType]
        (lambda: poptorch.trainingModel(Line(), {"a": 1}), r"options=poptorch.Options\(\)"),  # pyright: ignore[reportArgumentType]
        (lambda: poptorch.trainingModel(Line(), None, 0.1), "poptorch.optim.SGD"),  # pyright: ignore[reportArgumentType]
        (
            lambda: poptorch.trainingModel(
                Line(), None, torch.optim.SGD(Line().parameters(), lr=0.1)
            ),
            "none of the model's parameters",
        ),
        (lambda: poptorch.inferenceModel(Line()).setOptimizer(None), "delete the line"),  # pyright: ignore[reportArgumentType]
        (lambda: trainer(Line())(points(4)[0]), r"Line.forward \(models.py:\d+\) returns no loss"),
    ],
)
def test_wrong_use_says_what_to_write(wrong, says):
    with pytest.raises(UsageError, match=says):
        wrong()


def test_accumulation_is_not_for_inference():
    opts = poptorch.Options()
    opts.Training.gradientAccumulation(2)
    with pytest.raises(UsageError, match=r"options of its own: poptorch.Options\(\)"):
        poptorch.inferenceModel(Line(), opts)


def test_options_are_fixed_once_a_model_has_them():
    opts = poptorch.Options()
    trainer(Line(), opts)
    with pytest.raises(PackhorseError, match=r"test_executor.py:\d+: .*trainingModel took them at"):
        opts.deviceIterations(2)
    assert opts.clone().deviceIterations(2).device_iterations == 2


def test_never_connected_compiles_and_does_not_run():
    opts = poptorch.Options().connectionType(poptorch.ConnectionType.Never)
    training = trainer(Line(), opts)
    training.compile(*points(4))
    with pytest.raises(UsageError, match="compiles and does not run"):
        training(*points(4))


def test_a_name_that_is_not_there_says_what_to_write_instead():
    with pytest.raises(AttributeError, match=r"test_executor.py:\d+: poptorch.eager .*delete"):
        _ = poptorch.eager
    with pytest.raises(AttributeError, match="nearest is trainingModel"):
        _ = poptorch.trainModel
    assert all(hasattr(poptorch, name) for name in dir(poptorch))


def test_outputs_have_32_bits():
    class Wide(torch.nn.Module):
        def forward(self, x):
            return x, x.double(), x.argmax(), x.half(), x > 0

    outputs = poptorch.inferenceModel(Wide())(torch.arange(3))
    kinds = [torch.int32, torch.float32, torch.int32, torch.float16, torch.bool]
    assert [out.dtype for out in outputs] == kinds


def test_a_model_without_weights_to_train_runs():
    model = Classifier(norm=True).eval().requires_grad_(False)
    data, labels = images(4)
    out, loss = model(data, labels)
    training = poptorch.trainingModel(model)
    torch.testing.assert_close(training(data, labels), (out, loss))


def test_hooks_around_the_first_call():
    calls = []
    handles = [
        poptorch.registerPreCompileHook(lambda: calls.append("before")),
        poptorch.registerPostCompileHook(lambda: calls.append("after")),
    ]
    model = poptorch.inferenceModel(Line())
    for _ in range(2):
        model(torch.ones(1, 3))
    assert calls == ["before", "after"]
    for handle in handles:
        handle.remove()
    poptorch.inferenceModel(Line())(torch.ones(1, 3))
    assert calls == ["before", "after"]
    with pytest.raises(RuntimeError, match="must be callable"):
        poptorch.registerPreCompileHook(3)  # pyright: ignore[reportArgumentType]


def test_mistakes_are_of_the_kinds_that_poptorch_raises():
    model = poptorch.inferenceModel(Line())
    for kind in (AssertionError, RuntimeError, ValueError, poptorch.Error):
        with pytest.raises(kind, match="has not been compiled"):
            model.getTensorNames()
    assert issubclass(poptorch.poptorch_core.RecoverableError, poptorch.Error)
    assert issubclass(poptorch.optim.LAMB, poptorch.optim.Optimizer)


def test_sections_are_shown_by_torchs_profiler():
    channel = poptorch.profiling.Channel("mine")
    model = channel.instrument(Line(), "forward")
    with torch.profiler.profile() as profile, channel.tracepoint("part"):
        model(torch.ones(1, 3))
    names = {event.key for event in profile.key_averages()}
    assert {"mine.part", "mine.Line.forward"} <= names
    assert poptorch.testing.allclose([torch.ones(2)], [torch.ones(2)])
    assert not poptorch.testing.allclose([torch.ones(2)], (torch.ones(2),))
