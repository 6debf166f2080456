"""The loss of masked words: −log softmax of the scores of a vocabulary, at the target.

Shapes: M words, V vocabulary.
"""

from __future__ import annotations

from importlib import import_module

import torch
from torch import Tensor
from torch.nn import functional as F

from packhorse.device import runs_triton
from packhorse.train.objectives.stats import at_least_fp32


def word_loss(scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of each word, [M] in fp32 or wider, and whether its target has the largest score.

    scores: [M, V]; targets: [M], each below V.
    """
    half = scores.dtype in (torch.bfloat16, torch.float16)
    if half and runs_triton(scores.device):
        kernels = import_module("packhorse.train.objectives.word_kernels")
        return kernels.WordLoss.apply(scores, targets)
    return plain(scores, targets)


def plain(scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The same by torch, anywhere."""
    loss = F.cross_entropy(at_least_fp32(scores), targets, reduction="none")
    return loss, scores.detach().argmax(-1) == targets
