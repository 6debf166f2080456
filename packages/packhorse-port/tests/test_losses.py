"""Finding the loss: marked, or returned; several, or none."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as f

import packhorse_port as poptorch
from packhorse_port.notices import UsageError

X, Y = torch.randn(4, 3), torch.randn(4, 3)


def weight_after(forward, batch=X) -> torch.Tensor:
    """The weights of a model with this forward after one step; 2 on the diagonal before."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(2 * torch.eye(3))

        def forward(self, x, y):
            return forward(x @ self.w, y)

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    poptorch.trainingModel(model, None, optimizer)(batch, Y[: len(batch)])
    return model.w.detach()


def expected(loss, batch=X) -> torch.Tensor:
    w = (2 * torch.eye(3)).requires_grad_()
    loss(batch @ w, Y[: len(batch)]).sum().backward()
    assert w.grad is not None
    return (w - 0.1 * w.grad).detach()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none", 0, 1, 2])
def test_identity_loss_reduces_as_asked(reduction):
    method = str({0: "sum", 1: "mean", 2: "none"}.get(reduction, reduction))
    got = weight_after(lambda out, y: poptorch.identity_loss((out - y) ** 2, reduction))
    reference = expected(lambda out, y: f.mse_loss(out, y, reduction=method))
    torch.testing.assert_close(got, reference)


def test_a_marked_loss_need_not_be_returned():
    def forward(out, y):
        poptorch.identity_loss(f.l1_loss(out, y), reduction="none")
        return out

    torch.testing.assert_close(weight_after(forward), expected(f.l1_loss))


def test_the_last_of_marks_that_lead_to_each_other_counts():
    def forward(out, y):
        part = poptorch.identity_loss(out - y, reduction="none")
        return poptorch.identity_loss(part * part * 5, reduction="mean")

    reference = expected(lambda out, y: (((out - y) ** 2) * 5).mean())
    torch.testing.assert_close(weight_after(forward), reference)


def test_independent_marks_are_refused():
    def forward(out, y):
        poptorch.identity_loss(f.l1_loss(out, y))
        return poptorch.identity_loss(f.mse_loss(out, y))

    with pytest.raises(UsageError, match="several independent losses; mark the final one"):
        weight_after(forward)


def test_a_metric_beside_the_loss_is_not_it():
    def forward(out, y):
        return f.mse_loss(out, y), out.mean(), (out > 0).float().mean()

    torch.testing.assert_close(weight_after(forward), expected(f.mse_loss))


def test_a_batch_of_one_has_no_second_loss():
    got = weight_after(lambda out, y: (out[:, :1], f.mse_loss(out, y)), X[:1])
    torch.testing.assert_close(got, expected(f.mse_loss, X[:1]))


def test_two_scalars_are_refused_and_none_too():
    with pytest.raises(UsageError, match="returns 2 scalars; mark the final one"):
        weight_after(lambda out, y: (out.mean(), (out - y).mean()))
    with pytest.raises(UsageError, match=r"test_losses.py:\d+\) returns no loss"):
        weight_after(lambda out, y: out)


def test_outside_a_model_nothing_is_marked():
    assert not poptorch.isRunningOnIpu()
    assert poptorch.identity_loss(torch.ones(2), reduction="sum") == 2
    with pytest.raises(UsageError, match="'sum', 'mean' or 'none'"):
        poptorch.identity_loss(torch.ones(2), reduction="most")


def test_is_running_on_ipu_is_true_inside_a_model():
    class Asking(nn.Module):
        def forward(self, x):
            return x + poptorch.isRunningOnIpu()

    assert torch.equal(poptorch.inferenceModel(Asking())(X), X + 1)


def test_a_loss_that_depends_on_no_weight_trains_nothing(caplog):
    class Detached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))

        def forward(self, x, y):
            return self.w.detach() * x, f.mse_loss(x, y)

    model = Detached()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, loss = poptorch.trainingModel(model, None, optimizer)(X, Y)
    assert loss == f.mse_loss(X, Y) and torch.equal(model.w, torch.ones(3))
    assert "its loss depends on no weight" in caplog.text
