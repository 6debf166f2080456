"""Half and float in one model: PopTorch's casts, beside the same casts by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import packhorse_port as poptorch
from packhorse_port.casting import MixedTypes

from .models import Line, points

h = torch.float16
f = torch.float32
LAYERS = {
    "linear": (lambda: nn.Linear(4, 3), (2, 4)),
    "linear of sequences": (lambda: nn.Linear(4, 3), (2, 5, 4)),
    "linear without bias": (lambda: nn.Linear(4, 3, bias=False), (2, 4)),
    "convolution": (lambda: nn.Conv2d(4, 5, 2), (2, 4, 3, 3)),
    "transposed": (lambda: nn.ConvTranspose1d(4, 5, 2), (2, 4, 3)),
    "attention": (lambda: Attention(), (2, 5, 4)),
    "encoder": (lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0), (5, 2, 4)),
}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        return self.inner(x, x, x)[0]


class Trained(nn.Module):
    """A layer with the sum of its squares as the loss."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x):
        out = self.layer(x)
        return out, poptorch.identity_loss(out.float().square(), "mean")


@pytest.mark.parametrize("weights", [h, f])
@pytest.mark.parametrize("inputs", [h, f])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_computes_in_the_type_of_its_activations(name, inputs, weights):
    make, shape = LAYERS[name]
    torch.manual_seed(0)
    layer = make().to(weights)
    x = torch.randn(shape).to(inputs)
    expected = make().to(inputs)
    expected.load_state_dict(layer.state_dict())
    out = poptorch.inferenceModel(layer)(x)
    assert out.dtype == inputs
    with torch.no_grad():
        torch.testing.assert_close(out, expected(x), rtol=5e-3, atol=5e-3)
    if inputs != weights and name != "encoder":  # torch's fast path takes any types
        with pytest.raises(RuntimeError):  # the control: torch refuses
            layer(x)


@pytest.mark.parametrize(("inputs", "weights"), [(h, f), (f, h)])
def test_gradients_have_the_type_of_the_weights(inputs, weights):
    torch.manual_seed(0)
    layer = nn.Linear(4, 3).to(weights)
    x = torch.randn(8, 4).to(inputs)
    expected = nn.Linear(4, 3).to(weights)
    expected.load_state_dict(layer.state_dict())
    out = functional.linear(x, expected.weight.to(inputs), expected.bias.to(inputs))
    loss = out.float().square().mean()
    loss.backward()
    torch.optim.SGD(expected.parameters(), lr=0.5).step()
    model = Trained(layer)
    training = poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5))
    actual = training(x)
    assert layer.weight.dtype == weights
    torch.testing.assert_close(actual, (out.detach(), loss.detach()), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(layer.state_dict(), expected.state_dict(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "make", [lambda: nn.BatchNorm1d(4), lambda: nn.LayerNorm(4), lambda: nn.GroupNorm(2, 4)]
)
@pytest.mark.parametrize(("inputs", "weights"), [(h, f), (f, h), (h, h)])
def test_norms_compute_in_the_type_of_their_activations(make, inputs, weights):
    torch.manual_seed(0)
    norm = make().to(weights)
    expected = make()
    x = torch.randn(8, 4).to(inputs)
    training = poptorch.trainingModel(Trained(norm))
    for _ in range(3):
        out, _ = training(x)
        wanted = expected(x.float())
    assert out.dtype == inputs
    torch.testing.assert_close(out.float(), wanted.detach(), rtol=2e-2, atol=2e-2)
    for name, buffer in norm.named_buffers():
        wanted = expected.get_buffer(name).to(buffer.dtype)
        torch.testing.assert_close(buffer, wanted, rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("training", [True, False])
def test_a_batch_norm_may_have_statistics_of_another_type(training):
    norm = nn.BatchNorm1d(4).half()
    norm.running_mean = torch.ones(4)
    norm.running_var = torch.full((4,), 4.0)
    x = torch.randn(8, 4).half()
    wanted = functional.batch_norm(x.float(), torch.ones(4), torch.full((4,), 4.0))
    norm.train(training)
    if training:
        wanted = functional.batch_norm(x.float(), None, None, training=True)
        out, _ = poptorch.trainingModel(Trained(norm))(x)
    else:
        out = poptorch.inferenceModel(norm)(x)
    assert out.dtype == h and norm.running_mean.dtype == f
    torch.testing.assert_close(out.float(), wanted, rtol=2e-2, atol=2e-2)


def test_elementwise_operations_promote_as_in_torch():
    class Sum(nn.Module):
        def forward(self, x, y):
            return x + y, torch.where(x > y, x, y), functional.mse_loss(x, y)

    x = torch.tensor([1.0, 2.0]).half()
    outputs = poptorch.inferenceModel(Sum())(x, x.float() * 2)
    assert [out.dtype for out in outputs] == [f, f, f]


def test_casts_are_paid_for_where_types_meet_only(monkeypatch):
    model = poptorch.inferenceModel(Line().eval())
    model(points(2)[0])
    assert model._step.mixed is False
    monkeypatch.setattr(MixedTypes, "__enter__", lambda self: pytest.fail("not needed any more"))
    model(points(2)[0])


def test_a_cast_inside_the_model_is_seen():
    class Casting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(3, 2)

        def forward(self, x):
            return self.line(x.half())

    model = poptorch.inferenceModel(Casting())
    x = torch.ones(2, 3)
    assert model(x).dtype == model(x).dtype == h and model._step.mixed


def test_autocast_is_torchs_in_half():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(3, 2)

        def forward(self, x):
            with poptorch.autocast():
                inside = self.line(x)
            return inside, self.decorated(x), self.line(x)

        @poptorch.autocast(enabled=True)
        def decorated(self, x):
            return self.line(x)

    model = Model()
    x = torch.randn(4, 3)
    outputs = poptorch.inferenceModel(model)(x)
    assert [out.dtype for out in outputs] == [h, h, f]
    with torch.autocast("cpu", dtype=h):
        torch.testing.assert_close(outputs[0], model.line(x).detach(), rtol=0, atol=0)
    policy = poptorch.autocasting.Policy(fp16=[torch.matmul], fp32=["aten::sum"])
    assert policy.fp16 == [torch.matmul] and policy.promote == []
