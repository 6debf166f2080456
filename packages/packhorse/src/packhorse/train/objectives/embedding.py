"""Embeddings, learned from groups of texts, from scored pairs, or from a teacher.

A group is an anchor, its positive and any number of negatives; all texts of a step are one packed
batch. The losses are those of sentence-transformers, whose names are in `LOSSES`' comments, and
equal them on the same batch:

- ranking: the cross entropy of the positive among all positives and negatives of the step (van den
  Oord et al. 2018). symmetric: the same, averaged with that of the anchor among all anchors.
- triplet: the positive should be nearer than the negative by a margin (Schroff et al. 2015).
- cosine: the squared error of the cosine of a scored pair. cosent: pairs with a higher score should
  have a higher cosine (Su 2022); angle: the same for the difference of angles in complex space (Li
  and Li 2023).
- margin, kl: a teacher's differences between positive and negatives (Hofstätter et al. 2020), or
  its distribution over them. vectors: a teacher's vectors (Reimers and Gurevych 2020).

With `widths`, the loss is the sum of those of the vectors cut to each width and normalized
(Matryoshka, Kusupati et al. 2022).

`ranking`, `symmetric`, `cosent` and `angle` compare examples with each other. So that a step learns
the same in however many parts and on however many ranks it runs, its vectors are computed first,
without gradients, then the loss of all of them and its gradient for each vector, then each part
once more with that gradient (`train.step`; GradCache, Gao et al. 2021).

Shapes: N examples of K texts each, E width of a vector.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from packhorse.data.tasks import glue_score
from packhorse.errors import InputError
from packhorse.train.objectives.stats import (
    BatchStats,
    Gather,
    at_least_fp32,
    evaluating,
    share_of_loss,
    single_process,
)

if TYPE_CHECKING:
    from packhorse.data.tasks.targets import TaskBatch

LossName = Literal[
    "ranking", "symmetric", "triplet", "cosine", "cosent", "angle", "margin", "kl", "vectors"
]
Distance = Literal["euclidean", "cosine"]

NO_PAIRS = "there is nothing to evaluate on: the data has no pair"
ACROSS = ("ranking", "symmetric", "cosent", "angle")  # compare examples with each other
SCORED = ("cosine", "cosent", "angle")  # learn from scores of pairs
TAUGHT = ("margin", "kl", "vectors")  # learn from a teacher
CUT = 10  # of the measures of retrieval
SCORES_AT_ONCE = 1 << 24  # similarities in memory, in evaluation


@dataclass(frozen=True, slots=True)
class Embedding:
    """One of the losses above, averaged over the examples of the step."""

    kind: LossName = "ranking"
    temperature: float = 0.05
    margin: float = 5.0  # of triplets
    distance: Distance = "euclidean"  # of triplets
    widths: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in LOSSES:
            raise InputError(f"loss is {self.kind!r}; it can be {', '.join(LOSSES)}")
        if not self.temperature > 0:
            raise InputError(f"temperature is {self.temperature}; it must be above 0")
        if self.distance not in get_args(Distance):
            raise InputError(f"distance is {self.distance!r}; it can be euclidean or cosine")

    @property
    def heads(self) -> tuple[str, ...]:
        """The heads that the model must have."""
        return ("embed",)

    @property
    def across(self) -> bool:
        """Does the loss compare the examples of a step with each other?"""
        return self.kind in ACROSS

    def weigh(self, batch: TaskBatch) -> Tensor:
        """The number of examples, [1]."""
        return torch.tensor([len(batch.numbers)])

    def loss(
        self, model: nn.Module, batch: TaskBatch, totals: Tensor | None = None
    ) -> tuple[Tensor, BatchStats]:
        """The batch's share of the step's loss, and its figures."""
        sums = self.sums(self.vectors(model, batch), batch.targets)
        loss = share_of_loss(sums["loss"][None], self.weigh(batch) if totals is None else totals)
        examples = float(len(batch.numbers))
        figures = {name: (total, examples) for name, total in sums.items()}
        return loss, BatchStats.of(batch.packed, batch.tokens, **figures)

    def vectors(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        """The vectors of a batch, [N, K, E]."""
        (vectors,) = model(batch.packed, *self.heads)
        vectors = at_least_fp32(batch.packed.pick(vectors))
        size = len(vectors) // max(1, len(batch.numbers))
        return vectors.unflatten(0, (len(batch.numbers), max(1, size)))

    def sums(self, vectors: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Sums over the examples: the loss and, of a ranking, how often the positive is first."""
        if not len(vectors):
            empty = vectors.sum()
            return {"loss": empty, "accuracy": empty.detach()} if self.ranks else {"loss": empty}
        self._check(vectors, targets)
        total = vectors.new_zeros(())
        for width in self.widths or (0,):
            cut = F.normalize(vectors[..., :width], dim=-1) if width else vectors
            total = total + LOSSES[self.kind](cut, targets, self)
        sums = {"loss": total}
        if self.ranks:
            scores = _cosines(vectors.detach())
            partners = torch.arange(len(scores), device=scores.device)
            sums["accuracy"] = (scores.argmax(1) == partners).sum().to(total)
        return sums

    @property
    def ranks(self) -> bool:
        """Is it learned which of a step's texts belongs to an anchor?"""
        return self.kind in ("ranking", "symmetric")

    def evaluate(
        self, model: nn.Module, batches: Iterable[TaskBatch], gather: Gather = single_process
    ) -> dict[str, float]:
        """Correlations of scored pairs; of groups, how well each anchor finds its positive.

        The candidates of an anchor are the positives and negatives of the whole data; `accuracy`
        alone is within a batch, as the loss is.
        """
        with evaluating(model):
            local = [
                (list(b.numbers), b.total, self.vectors(model, b).cpu(), b.targets.cpu())
                for b in batches
            ]
        results = [result for result in gather(local) if result[0]]
        if not results:
            raise InputError(NO_PAIRS)
        # In the order of the data, so that it does not matter how ranks divided each batch.
        order = np.argsort([n for numbers, *_ in results for n in numbers], kind="stable")
        at_once = max(total for _, total, *_ in results)
        groups, targets = (torch.cat([r[i] for r in results])[order] for i in (2, 3))
        parts = list(zip(groups.split(at_once), targets.split(at_once), strict=True))
        pairs = {"pairs": float(len(groups))}
        if targets.ndim == 1:
            scored = self if self.kind in SCORED else Embedding("cosine")
            return {**_correlations(scored, parts), **pairs}
        if self.kind in TAUGHT:  # held-out data have no teacher
            return {**_search_measures(groups), **pairs}
        sums = [self.sums(*part) for part in parts]
        means = {name: sum(float(s[name]) for s in sums) / len(groups) for name in sums[0]}
        return {**means, **_search_measures(groups), **pairs}

    def _check(self, vectors: Tensor, targets: Tensor) -> None:
        """Refuse groups, targets and widths that do not fit the loss."""
        count, size, width = vectors.shape
        if self.widths and not 0 < max(self.widths) <= width:
            raise InputError(f"widths are {self.widths}, but vectors have {width} numbers")
        if self.kind == "triplet" and size != 3:
            raise InputError(
                f"triplet needs an anchor, a positive and a negative, not {size} texts"
            )
        if self.kind in ("margin", "kl") and size < 3:
            raise InputError(f"{self.kind} needs a negative in each group; set negatives")
        if self.kind in SCORED and targets.shape != (count,):
            raise InputError(f"{self.kind} is learned from one score per pair")
        shapes = {
            "margin": ([count, size - 2], [count, size - 1]),
            "kl": ([count, size - 1],),
            "vectors": ([count, size, width],),
        }.get(self.kind)
        if shapes and list(targets.shape) not in shapes:
            raise InputError(
                f"{self.kind}: a teacher's targets are {list(targets.shape)}; here they must be "
                f"{' or '.join(map(str, shapes))} (groups, texts, width of a vector)"
            )


# Losses: vectors [N, K, E] and targets to the sum over examples of what is averaged ---------------

Loss = Callable[[Tensor, Tensor, Embedding], Tensor]


def _cosines(vectors: Tensor) -> Tensor:
    """[N, N (K - 1)]: of each anchor with all positives, then all first negatives, and so on."""
    unit = F.normalize(vectors, dim=-1)
    return unit[:, 0] @ unit[:, 1:].transpose(0, 1).flatten(0, 1).T


def _pair_cosines(vectors: Tensor) -> Tensor:
    return F.cosine_similarity(vectors[:, 0], vectors[:, 1])


def _ranking(vectors: Tensor, targets: Tensor, options: Embedding) -> Tensor:
    logits = _cosines(vectors) / options.temperature
    return (logits.logsumexp(1) - logits.diagonal()).sum()


def _symmetric(vectors: Tensor, targets: Tensor, options: Embedding) -> Tensor:
    logits = _cosines(vectors) / options.temperature
    back = logits[:, : len(logits)]  # of each positive with all anchors, by columns
    losses = logits.logsumexp(1) + back.logsumexp(0) - 2 * logits.diagonal()
    return losses.sum() / 2


def _triplet(vectors: Tensor, targets: Tensor, options: Embedding) -> Tensor:
    anchor, positive, negative = vectors.unbind(1)
    if options.distance == "cosine":
        near = 1 - F.cosine_similarity(anchor, positive)
        far = 1 - F.cosine_similarity(anchor, negative)
    else:
        # torch's norm has the gradient 0 at 0, where that of a root would be NaN.
        near = torch.linalg.vector_norm(anchor - positive, dim=1)
        far = torch.linalg.vector_norm(anchor - negative, dim=1)
    return F.relu(near - far + options.margin).sum()


def _cosine(vectors: Tensor, targets: Tensor, options: Embedding) -> Tensor:
    cosines = _pair_cosines(vectors)
    return F.mse_loss(cosines, targets.to(cosines), reduction="sum")


def _cosent(vectors: Tensor, targets: Tensor, options: Embedding) -> Tensor:
    return _in_order(_pair_cosines(vectors), targets, options)


def _angle(vectors: Tensor, targets: Tensor, options: Embedding) -> Tensor:
    """The halves of a vector are real and imaginary parts; see the paper's equation 6."""
    (a, b), (c, d) = (side.chunk(2, dim=1) for side in vectors[:, :2].unbind(1))
    squares = (c**2 + d**2).sum(1, keepdim=True)
    real = (a * c + b * d) / squares
    imaginary = (b * c - a * d) / squares
    lengths = (a**2 + b**2).sum(1, keepdim=True).sqrt() / squares.sqrt()
    angles = torch.cat([real / lengths, imaginary / lengths], 1).sum(1).abs()
    return _in_order(angles, targets, options)


def _in_order(scores: Tensor, targets: Tensor, options: Embedding) -> Tensor:
    """log(1 + the sum of exp(lower − higher) over pairs in the wrong order), times N."""
    scores = scores / options.temperature
    differences = scores[:, None] - scores[None, :]  # [N, N]
    wrong = targets[:, None] < targets[None, :]
    flat = torch.where(wrong, differences, -torch.inf).flatten()
    return torch.cat([flat.new_zeros(1), flat]).logsumexp(0) * len(scores)


def _products(vectors: Tensor) -> Tensor:
    """[N, K - 1] of each anchor with its positive and its negatives."""
    return (vectors[:, :1] * vectors[:, 1:]).sum(-1)


def _margin(vectors: Tensor, targets: Tensor, options: Embedding) -> Tensor:
    products = _products(vectors)
    targets = targets.to(products)
    if targets.shape == products.shape:
        targets = targets[:, :1] - targets[:, 1:]
    return F.mse_loss(products[:, :1] - products[:, 1:], targets, reduction="none").mean(1).sum()


def _kl(vectors: Tensor, targets: Tensor, options: Embedding) -> Tensor:
    student = (_products(vectors) / options.temperature).log_softmax(1)
    teacher = (targets.to(student) / options.temperature).softmax(1)
    return F.kl_div(student, teacher, reduction="sum") * options.temperature**2


def _vectors(vectors: Tensor, targets: Tensor, options: Embedding) -> Tensor:
    return F.mse_loss(vectors, targets.to(vectors), reduction="none").mean((1, 2)).sum()


LOSSES: dict[str, Loss] = {
    "ranking": _ranking,  # MultipleNegativesRankingLoss and its cached variant
    "symmetric": _symmetric,  # the same in two directions, each with its softmax
    "triplet": _triplet,  # TripletLoss
    "cosine": _cosine,  # CosineSimilarityLoss
    "cosent": _cosent,  # CoSENTLoss
    "angle": _angle,  # AnglELoss
    "margin": _margin,  # MarginMSELoss
    "kl": _kl,  # DistillKLDivLoss
    "vectors": _vectors,  # MSELoss
}


# Measures ----------------------------------------------------------------------------------------


def _correlations(objective: Embedding, results: list[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """The loss of scored pairs, and how well their cosines agree with the scores."""
    sums = [objective.sums(vectors, scores)["loss"] for vectors, scores in results]
    cosines = torch.cat([_pair_cosines(vectors.double()) for vectors, _ in results]).numpy()
    scores = torch.cat([scores for _, scores in results]).double().numpy()
    return {
        "loss": float(sum(sums)) / len(scores),
        "pearson": glue_score.pearson(cosines, scores),
        "spearman": glue_score.spearman(cosines, scores),
    }


def _search_measures(groups: Tensor) -> dict[str, float]:
    """Measures of a search for each anchor's positive among all that is no anchor, by cosine."""
    unit = F.normalize(groups.float(), dim=-1)
    candidates = unit[:, 1:].flatten(0, 1).T  # [E, N (K - 1)]
    ranks: list[np.ndarray] = []
    for part in unit.split(max(1, SCORES_AT_ONCE // candidates.shape[1])):
        own = (part[:, 0] * part[:, 1]).sum(1, keepdim=True)
        # The same text may be a positive twice: it does not stand in its own way.
        better = (part[:, 0] @ candidates > own + 1e-6).sum(1)
        ranks.append(better.numpy() + 1)
    rank = np.concatenate(ranks)
    seen = rank <= CUT
    return {
        f"mrr@{CUT}": float(np.where(seen, 1 / rank, 0).mean()),
        f"ndcg@{CUT}": float(np.where(seen, 1 / np.log2(rank + 1), 0).mean()),
        "recall@1": float((rank == 1).mean()),
        f"recall@{CUT}": float(seen.mean()),
    }
