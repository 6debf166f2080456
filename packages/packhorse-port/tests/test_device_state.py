"""What PopTorch's user guide says of executors: weights, modes, optimizers and buffers apart.

The oracle is the guide of PopTorch 3.3 (docs/user_guide/overview.rst of graphcore/poptorch), quoted
by its headings. PopTorch's own tests of the same are run by `make test-outside`.
"""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor, nn

import packhorse_port as poptorch
from packhorse_port import notices

from .models import Classifier, Line, images, points


@pytest.fixture(autouse=True)
def fresh() -> None:
    notices.reset()


def trainer(model: nn.Module, opts: poptorch.Options | None = None) -> poptorch.PoplarExecutor:
    return poptorch.trainingModel(model, opts, torch.optim.SGD(model.parameters(), lr=0.1))


def logged_keys(subject: str) -> list[str]:
    """The keys of what the script was told about a subject."""
    return [notice.key for notice in notices.logged() if notice.key.startswith(subject)]


# "PyTorch buffers"


class Counter(nn.Module):
    def __init__(self, buffer: bool) -> None:
        super().__init__()
        self.i: Tensor
        if buffer:
            self.register_buffer("i", torch.tensor([0.0]))
        else:
            self.i = torch.tensor([0.0])

    def forward(self, x: Tensor | None = None):
        self.i += 1
        return self.i


def test_a_plain_tensor_is_a_constant_and_the_script_is_told():
    """buffers.py of the guide, "the wrong way": 1, 1, and the module's own is 1."""
    model = Counter(buffer=False)
    counting = poptorch.inferenceModel(model)
    assert [counting().item() for _ in range(3)] == [1, 1, 1]
    assert model.i == 1
    assert logged_keys("constant") == ["constant Counter.i"]


def test_a_buffer_counts_and_is_copied_to_the_host_when_asked():
    """buffers.py of the guide: 1, 2; an inference model's are not copied implicitly."""
    model = Counter(buffer=True)
    counting = poptorch.inferenceModel(model)
    assert [counting().item(), counting().item(), model.i.item()] == [1, 2, 0]
    counting.copyWeightsToHost()
    assert model.i == 2


@pytest.mark.parametrize("mode", ["All", "Final", "Sum", "EveryN"])
def test_what_a_step_returns_is_a_copy(mode):
    opts = poptorch.Options().deviceIterations(4)
    opts.outputMode(poptorch.OutputMode[mode], 2 if mode == "EveryN" else None)
    counting = poptorch.inferenceModel(Counter(buffer=True), opts)
    expected = {"All": [1, 2, 3, 4], "Final": [4], "Sum": [10], "EveryN": [2, 4]}[mode]
    assert counting(torch.zeros(4)).tolist() == expected


class ReturnsAll(Line):
    def forward(self, x, y=None):
        out, loss = super().forward(x, y)
        return out, loss, self.line.weight, x


def test_a_weight_and_an_input_that_are_returned_are_copies():
    model, (x, y) = ReturnsAll(), points(4)
    before = model.line.weight.detach().clone()
    training = trainer(model)
    weight, same = training(x, y)[2:]
    assert torch.equal(weight, before) and torch.equal(same, x)
    same += 1
    training(x, y)
    assert torch.equal(weight, before) and not torch.equal(same, x)


# In-place changes of inputs


class AddsOne(nn.Module):
    def forward(self, x: Tensor) -> None:
        x += 1


def as_asked(steps: str) -> poptorch.Options:
    opts = poptorch.Options()
    return opts.compileStep("trace") if steps == "traced" else opts


@pytest.mark.parametrize("steps", ["default", "traced"])
def test_a_change_of_the_input_is_made_once_a_call(steps):
    x = torch.tensor([1.0])
    adding = poptorch.inferenceModel(AddsOne(), as_asked(steps))
    seen = []
    for _ in range(4):
        assert adding(x) is None
        seen.append(x.item())
    assert seen == [2, 3, 4, 5]


class Remembers(Line):
    """Python state of three kinds: a dictionary, a number, a tensor that is set anew."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, int] = {"calls": 0}

    def forward(self, x, y=None):
        self.seen["calls"] += 1
        return super().forward(x * self.seen["calls"], y)


@pytest.mark.parametrize("steps", ["default", "traced"])
def test_python_state_is_followed_or_a_trace_is_refused(steps):
    torch.manual_seed(0)
    model = Remembers()
    second = copy.deepcopy(model)
    x, _ = points(4)
    running = poptorch.inferenceModel(model, as_asked(steps))
    for _ in range(4):
        assert torch.equal(running(x), second(x).detach())
    assert logged_keys("steps") == ["steps Remembers"] * (steps == "traced")


# "Model wrapping functions": the mode is that of the wrapping


def test_validating_on_the_host_leaves_the_training_in_train_mode():
    torch.manual_seed(0)
    model = Classifier(dropout=0.5, norm=True)
    data, labels = images(8)
    training = trainer(model)
    for _ in range(2):
        training(data, labels)
    model.eval()
    before = model.norm.running_mean.clone()
    model(data)
    assert torch.equal(model.norm.running_mean, before)  # the host's own evaluation
    outputs = [training(data, labels)[0] for _ in range(2)]
    assert not torch.equal(model.norm.running_mean, before)
    training.load_state_dict(copy.deepcopy(model.state_dict()))
    assert not torch.equal(*outputs)  # dropout still draws
    assert not model.training  # and the module is as the script left it


def test_an_inference_model_stays_in_eval_mode():
    """trainingModel.py of the guide: "poptorch_inf will remain in eval mode"."""
    torch.manual_seed(0)
    model = Classifier(dropout=0.5, norm=True)
    data, labels = images(8)
    inference = poptorch.inferenceModel(model.eval())
    training = trainer(model.train())
    training(data, labels)
    before = model.norm.running_mean.clone()
    assert torch.equal(inference(data), inference(data))
    training(data, labels)
    model.eval()
    assert torch.equal(inference(data), model(data).detach())
    assert not torch.equal(model.norm.running_mean, before) and inference.model.norm is model.norm
    inference.copyWeightsToHost()
    assert model.norm.num_batches_tracked == 2  # two steps of training, none of validation


def test_a_mode_that_is_set_between_wrapping_and_the_first_call():
    x = torch.ones(4, 16)
    model = nn.Dropout(0.5)
    inference = poptorch.inferenceModel(model)  # wrapped in train mode
    model.eval()
    assert torch.equal(inference(x), x)
    model.train()
    assert torch.equal(inference(x), x)
    assert not logged_keys("inference")
    assert not torch.equal(poptorch.inferenceModel(nn.Dropout(0.5))(x), x)
    assert logged_keys("inference") == ["inference in train mode"]


# "poptorch.PoplarExecutor": when weights are copied


def test_a_weight_changed_on_the_host_acts_when_it_is_copied():
    model, (x, _) = Line(), points(4)
    inference = poptorch.inferenceModel(model)
    before = inference(x)
    with torch.no_grad():
        model.line.weight.zero_()
        model.line.bias.zero_()
    assert torch.equal(inference(x), before)
    inference.copyWeightsToDevice()
    assert torch.equal(inference(x), torch.zeros(4, 2))


def test_copying_to_the_device_goes_back_to_the_modules_weights():
    model, (x, y) = Line(), points(4)
    training = trainer(model)
    first = training(x, y)[0]
    training.copyWeightsToDevice()  # before anyone has looked at what was trained
    assert torch.equal(training(x, y)[0], first)


def test_training_is_seen_by_the_module_and_by_inference_without_a_word():
    model, (x, y) = Line(), points(4)
    inference = poptorch.inferenceModel(model)
    before = inference(x)
    training = trainer(model)
    training(x, y)
    assert not torch.equal(inference(x), before)
    assert torch.equal(inference(x), model(x).detach())
    training(x, y)
    state = model.state_dict()["line.weight"]
    training(x, y)
    assert not torch.equal(state, before)
    assert torch.equal(model.line.weight, training.state_dict()["line.weight"])


def test_no_weight_is_copied_while_a_script_only_trains(monkeypatch):
    model, (x, y) = Line(), points(4)
    training = trainer(model)
    copies = []
    download = training._weights.download
    monkeypatch.setattr(training._weights, "download", lambda: (copies.append(1), download()))
    for _ in range(5):
        training(x, y)
        training.setOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    assert not copies
    _ = model.line.weight.sum(), model.line.bias.sum()
    assert len(copies) == 1


@pytest.mark.parametrize("read", [str, torch.clone, Tensor.tolist, copy.deepcopy, pickle.dumps])
def test_any_way_to_read_a_weight_gives_the_trained_one(read):
    torch.manual_seed(0)
    model, (x, y) = Line(), points(4)
    before = copy.deepcopy(model)
    stored = model.line.weight  # by a name that the script had before
    trainer(model)(x, y)
    assert str(read(stored)) != str(read(before.line.weight))
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert type(loaded.line.weight) is nn.Parameter
    assert torch.equal(loaded.line.weight, model.line.weight)


def test_weights_outlive_an_executor_that_is_forgotten():
    model, (x, y) = Line(), points(4)
    before = model.line.weight.detach().clone()
    trainer(model)(x, y)
    assert type(model.line.weight) is nn.Parameter
    assert not torch.equal(model.line.weight, before)


def test_a_wrapped_module_is_unwrapped_by_destroy():
    model, (x, y) = Line(), points(4)
    training = trainer(model)
    training(x, y)
    with pytest.raises(RuntimeError, match=r"already been wrapped in 'poptorch\.trainingModel'"):
        trainer(model)
    model.destroy()  # pyright: ignore[reportCallIssue]
    assert type(model.line.weight) is nn.Parameter and not hasattr(model, "destroy")
    with pytest.raises(poptorch.Error, match="has not been compiled or has been destroyed"):
        training.copyWeightsToHost()
    trainer(model)(x, y)


def test_detached_and_attached_the_weights_are_the_modules():
    model, (x, y) = Line(), points(4)
    training = trainer(model)
    training(x, y)
    training.detachFromDevice()
    with torch.no_grad():
        model.line.weight.zero_()
    out = training(x, y)[0]
    assert torch.allclose(out, out[0].expand(4, 2))  # computed with the weight of zeros


# "You must call setOptimizer to apply the new optimizer values to the model"


def test_a_learning_rate_acts_through_setOptimizer():
    model, (x, y) = Line(), points(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    training = poptorch.trainingModel(model, None, optimizer)
    before = model.line.weight.detach().clone()
    optimizer.param_groups[0]["lr"] = 0.1
    training(x, y)
    assert torch.equal(model.line.weight, before)
    training.setOptimizer(optimizer)
    training(x, y)
    assert not torch.equal(model.line.weight, before)


def test_moments_are_the_optimizers_and_live_on_in_the_next():
    torch.manual_seed(0)
    ported, (x, y) = Line(), points(4)
    expected = copy.deepcopy(ported)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9)
    first = torch.optim.SGD(ported.parameters(), lr=0.1, momentum=0.9)
    training = poptorch.trainingModel(ported, None, first)
    for step in range(4):
        if step == 2:  # another one without moments: those on the device stay
            training.setOptimizer(torch.optim.SGD(ported.parameters(), lr=0.1, momentum=0.9))
        training(x, y)
        optimizer.zero_grad()
        expected(x, y)[1].backward()
        optimizer.step()
    assert torch.equal(ported.line.weight, expected.line.weight)
    moment = first.state[ported.line.weight]["momentum_buffer"]
    assert torch.equal(moment, optimizer.state[expected.line.weight]["momentum_buffer"])


# What says otherwise


def test_shared_weights_act_at_once(monkeypatch):
    monkeypatch.setenv("PACKHORSE_PORT_WEIGHTS", "shared")
    model, (x, y) = Line(), points(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    training = poptorch.trainingModel(model, None, optimizer)
    inference = poptorch.inferenceModel(model)
    training(x, y)
    before = inference(x)
    with torch.no_grad():
        model.line.weight.zero_()
    assert not torch.equal(inference(x), before)
    optimizer.param_groups[0]["lr"] = 0.1
    training(x, y)
    assert not torch.equal(model.line.weight, torch.zeros(2, 3))
    assert type(model.line.weight) is nn.Parameter


@pytest.mark.parametrize("variable", ["PACKHORSE_PORT_WEIGHTS", "PACKHORSE_PORT_STEPS"])
def test_a_variable_with_another_word_is_refused(variable, monkeypatch):
    monkeypatch.setenv(variable, "sometimes")
    with pytest.raises(poptorch.Error, match=f"{variable} is 'sometimes'; set it to one of"):
        poptorch.Options()


def test_steps_are_chosen_by_a_variable(monkeypatch):
    assert poptorch.Options().steps == "modules"
    monkeypatch.setenv("PACKHORSE_PORT_STEPS", "traced")
    assert poptorch.Options().steps == "traced"
    assert poptorch.Options().compileStep(False).steps == "modules"


# Buffers by name


def test_named_buffers_are_copied_alone():
    model = Classifier(norm=True).eval()
    data, _ = images(2)
    opts = poptorch.Options().updatableNamedBuffers(["norm.running_mean"])
    inference = poptorch.inferenceModel(model, opts)
    first = inference(data)
    model.norm.running_var.fill_(4)
    inference.copyNamedBuffersToDevice()
    assert torch.equal(inference(data), first)
    model.norm.running_mean.fill_(4)
    inference.copyNamedBuffersToDevice()
    assert not torch.equal(inference(data), first)
    wrong = poptorch.Options().updatableNamedBuffers(["none"])
    with pytest.raises(poptorch.Error, match="names none, which the model does not have"):
        poptorch.inferenceModel(model, wrong)(data)


@pytest.mark.parametrize("replaced", [True, False])
def test_a_buffer_that_forward_replaces_is_refused(replaced):
    class Replaces(Counter):
        def forward(self, x=None):
            if replaced:
                self.i = self.i + 1
            else:
                del self._buffers["i"]
            return torch.zeros(1)

    model = Replaces(buffer=True)
    says = r"Buffer i is reassigned .*self\.i\.copy_\(src\)" if replaced else "Buffer i is removed"
    with pytest.raises(poptorch.Error, match=says):
        poptorch.inferenceModel(model)()
    assert torch.equal(model.i, torch.zeros(1))
