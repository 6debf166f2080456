"""The loss of masked words in one kernel: torch's in float64, and its gradient.

On a GPU, or anywhere in Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import os

import pytest
import torch

from packhorse.train.objectives import word_loss

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() or INTERPRETED), reason="no CUDA device"
)
pytest.importorskip("triton")
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")


@pytest.mark.parametrize("words", [300, 5000] if INTERPRETED else [300, 4096, 30522])
def test_loss_gradient_and_hits(words: int) -> None:
    from packhorse.train.objectives.word_kernels import WordLoss

    # A part of a wider matrix, as the model's head returns it.
    scores = (3 * torch.randn(50, words + 6, device=DEVICE)).half()[:, :words]
    targets = torch.randint(words // 2, words, (50,), device=DEVICE)
    targets[::2] = scores.argmax(1)[::2]
    scores[1, : words // 2] = float("-inf")
    held = scores.detach().cpu().double().requires_grad_()
    expected, hits = word_loss.plain(held, targets.cpu())
    weights = torch.randn(50, device=DEVICE)
    expected.backward(weights.cpu().double())
    assert held.grad is not None

    leaf = scores.detach().requires_grad_()
    loss, correct = WordLoss.apply(leaf, targets)  # pyright: ignore[reportGeneralTypeIssues]
    loss.backward(weights)
    assert leaf.grad is not None and leaf.grad.shape == leaf.shape
    torch.testing.assert_close(
        loss.detach().cpu().double(), expected.detach(), rtol=1e-5, atol=1e-5
    )
    assert torch.equal(correct.cpu(), hits) and 20 < int(hits.sum()) < 50
    gap = (leaf.grad.cpu().double() - held.grad).norm() / held.grad.norm()
    assert float(gap) < 1e-3
    other, _ = word_loss.plain(held.detach(), targets.roll(1).cpu())
    assert float((other - expected.detach()).abs().max()) > 1


def test_what_is_no_number_stays_none() -> None:
    from packhorse.train.objectives.word_kernels import WordLoss

    scores = torch.zeros(2, 100, device=DEVICE).half()
    scores[1, 7] = float("nan")
    loss, _ = WordLoss.apply(scores, torch.tensor([3, 4], device=DEVICE))  # pyright: ignore[reportGeneralTypeIssues]
    assert loss.isnan().tolist() == [False, True]
