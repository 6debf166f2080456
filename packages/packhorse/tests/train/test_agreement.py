"""R-Drop: what two answers' agreement adds to a loss, however the step is divided."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli, Categorical, Normal, kl_divergence

from packhorse.data.tasks import targets
from packhorse.errors import InputError
from packhorse.packing.batch import Packed
from packhorse.runtime.proof import SyntheticSequence
from packhorse.train.objectives import Classify
from packhorse.train.objectives.classify import ERRORS
from packhorse.train.settings import TrainSettings

WANTED = {
    "single_label": torch.tensor([2, 0, 1, 1, 2]),
    "multi_label": torch.tensor([[1.0, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0], [0, 0, 1]]),
    "regression": torch.tensor([0.1, 0.9, 0.5, 0.3, 0.7]),
}
KINDS: dict[str, Any] = {
    "single_label": lambda logits: Categorical(logits=logits),
    "multi_label": lambda logits: Bernoulli(logits=logits),
    "regression": lambda scores: Normal(scores, 1.0),
}


class Wavers(nn.Module):
    """One answer, then another, in turns; each sequence's own, wherever it stands."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        weights = torch.randn(2, 10, outputs, generator=torch.Generator().manual_seed(0)).double()
        self.weights = nn.Parameter(weights)
        self.turn = 1

    def forward(self, packed: Packed, head: str) -> list[Tensor]:
        self.turn = 1 - self.turn
        return [self.weights[self.turn][packed.ids[packed.starts]]]


def batch_of(problem: str, chosen: list[int]) -> targets.TaskBatch:
    packed = Packed.build([SyntheticSequence([2 * i, 1], [0, 0]) for i in chosen])  # type: ignore[arg-type]
    return targets.TaskBatch(packed, WANTED[problem][chosen], tuple(chosen), 5, 2 * len(chosen), {})


@pytest.mark.parametrize("problem", WANTED)
def test_it_is_both_divergences_as_torch_has_them(problem: str) -> None:
    model = Wavers(1 if problem == "regression" else 3)
    batch = batch_of(problem, [0, 1, 2, 3, 4])
    first, second = (weights[::2] for weights in model.weights.detach())
    errors = sum(ERRORS[problem](logits, batch.targets) for logits in (first, second)) / 2
    first_kind, second_kind = KINDS[problem](first), KINDS[problem](second)
    apart = (
        kl_divergence(first_kind, second_kind).sum() + kl_divergence(second_kind, first_kind).sum()
    ) / 2
    loss, _ = Classify(problem, agreement=1.5).loss(model, batch)
    assert loss.item() == pytest.approx(float(errors + 1.5 * apart) / batch.targets.numel())
    alone, _ = Classify(problem).loss(model, batch)  # control: one answer
    assert alone.item() != pytest.approx(loss.item(), rel=0.1)


@pytest.mark.parametrize("problem", WANTED)
def test_a_step_in_parts_has_the_gradient_of_one(problem: str) -> None:
    objective = Classify(problem, agreement=2.0)

    def gradient(*parts: list[int]) -> Tensor:
        model = Wavers(1 if problem == "regression" else 3)
        batches = [batch_of(problem, part) for part in parts]
        totals = torch.stack([objective.weigh(batch) for batch in batches]).sum(0)
        for batch in batches:
            objective.loss(model, batch, totals)[0].backward()
        assert model.weights.grad is not None
        return model.weights.grad

    whole = gradient([0, 1, 2, 3, 4])
    torch.testing.assert_close(gradient([3], [1, 0, 4, 2]), whole)
    assert not torch.allclose(gradient([3], [1, 0, 4]), whole)  # control: one is missing


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "answer"}, "it is for the task classify, not answer"),
        ({"task": "classify", "dropout": 0.0}, "two passes without dropout are the same"),
        ({"task": "classify", "agreement": -1.0}, "it must be a number, 0 or more"),
    ],
)
def test_where_it_makes_no_sense_it_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"agreement is .*{message}"):
        TrainSettings(**{"agreement": 1.0, **options})


def test_two_passes_are_planned_for() -> None:
    assert TrainSettings(task="classify", agreement=1.0).passes == 2
    assert TrainSettings(task="classify").passes == 1
