"""Packed gradients are unpacked gradients: every objective, kernel and layout, and its figures.

The reference runs each sequence alone through the same model and writes the loss out in full; then
transformers' own losses on padded batches. The controls break isolation, positions or weights on
purpose: each must be seen.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from packhorse import attention, checkpoint
from packhorse.checkpoint import names
from packhorse.data.packed import loader
from packhorse.data.tasks import targets
from packhorse.data.tasks.squad import Gold, SquadQuestion
from packhorse.errors import InputError
from packhorse.model.model import Model
from packhorse.packing.batch import Packed
from packhorse.tokens import Tokenizer
from packhorse.train.objectives import (
    OBJECTIVES,
    Classify,
    Embedding,
    Objective,
    Pretrain,
    SpanEnds,
)
from packhorse.train.objectives.span import squad_evaluation

CPU = torch.device("cpu")
KERNELS = [
    name
    for name in attention.KERNELS
    if attention.kernel(name).serves.refusal(CPU, torch.float64, backward=True) is None
]
LIMITS = {torch.float32: 1e-5, torch.float64: 1e-10}
LENGTHS = (9, 24, 4, 13, 7, 18)
GROUPS = ([0, 1, 2, 3, 4, 5],)  # one batch
PARTS = ([4, 5], [2, 3, 0, 1])  # a step of two, of which the second is twice as large
SHIFTS = ("heads.span.dense.bias", "bert.layers.1.norm.bias")


@dataclass(frozen=True)
class Sample:
    """A sequence and all that may be asked of it."""

    ids: np.ndarray
    types: np.ndarray
    masked: np.ndarray  # places within the sequence
    words: np.ndarray  # what stood there
    label: int
    flags: tuple[int, ...]
    score: float
    span: tuple[int, int]


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    random = np.random.default_rng(3)

    def sample(length: int, masked: int) -> Sample:
        ids, types = random.integers(0, 97, length), random.integers(0, 2, length)
        places = np.sort(random.choice(length, masked, replace=False))
        flags = tuple(np.flatnonzero(random.random(3) < 0.5).tolist())
        start, end = sorted(random.integers(0, length, 2).tolist())
        words, label = random.integers(0, 97, masked), int(random.integers(0, 2))
        score = float(np.float32(random.random()))
        return Sample(ids, types, places, words, label, flags, score, (start, end))

    return [sample(n, m) for n, m in zip(LENGTHS, (1, 6, 2, 1, 0, 4), strict=True)]


def ragged(chosen: Sequence[Sample]) -> Packed:
    return Packed.build(chosen)


def bucket(chosen: Sequence[Sample]) -> Packed:
    packed = Packed.build(chosen)
    return packed.pad(len(packed.ids) + 11, len(packed) + 5)


def rows(chosen: Sequence[Sample]) -> Packed:
    """Two sequences a row, the later one first; every row ends in a dummy."""
    packs = [list(range(i, min(i + 2, len(chosen))))[::-1] for i in range(0, len(chosen), 2)]
    return Packed.rows(chosen, packs, 50)


LAYOUTS = {"ragged": ragged, "bucket": bucket, "rows": rows}


def make_batch(objective: Objective, chosen: Sequence[Sample], packed: Packed) -> Any:
    """What the loaders would make of these sequences in this layout."""
    tokens = sum(len(sample.ids) for sample in chosen)
    starts = [int(packed.starts[place]) for place in packed.places]
    if isinstance(objective, Pretrain):
        both = sorted(
            (start + int(place), int(word))
            for start, sample in zip(starts, chosen, strict=True)
            for place, word in zip(sample.masked, sample.words, strict=True)
        )
        at, words = torch.tensor(both, dtype=torch.int64).reshape(-1, 2).unbind(1)
        labels = torch.tensor([sample.label for sample in chosen])
        return loader.PretrainingBatch(packed, at, words, labels, len(chosen), tokens, {})
    if isinstance(objective, SpanEnds):
        spans = [np.add(sample.span, start) for start, sample in zip(starts, chosen, strict=True)]
        expected = torch.from_numpy(np.array(spans).reshape(-1, 2))
    elif isinstance(objective, Classify) and objective.problem == "multi_label":
        expected = torch.zeros(len(chosen), 3)
        for row, sample in zip(expected, chosen, strict=True):
            row[list(sample.flags)] = 1
    elif isinstance(objective, Classify) and objective.problem == "single_label":
        expected = torch.tensor([sample.label for sample in chosen])
    else:
        paired = isinstance(objective, Embedding)
        expected = torch.tensor([sample.score for sample in chosen][:: 2 if paired else 1])
    numbers = tuple(range(len(expected)))
    return targets.TaskBatch(packed, expected, numbers, len(expected), tokens, {})


# The losses written out: from (sample, outputs of the sequence alone) pairs to a step's loss.
Alone = list[tuple[Sample, list[Tensor]]]


def nll(logits: Tensor, targets: Any) -> Tensor:
    return -logits.log_softmax(-1)[..., targets]


def words_of(sample: Sample, logits: Tensor) -> list[Tensor]:
    pairs = zip(sample.masked.tolist(), sample.words.tolist(), strict=True)
    return [nll(logits[place], word) for place, word in pairs]


def mean(values: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(values)).mean()


def by_token(runs: Alone) -> Tensor:
    words = mean(x for sample, (logits, _) in runs for x in words_of(sample, logits))
    return words + mean(nll(follows[0], sample.label) for sample, (_, follows) in runs)


def by_sequence(runs: Alone) -> Tensor:
    by_sample = [words_of(sample, logits) for sample, (logits, _) in runs]
    words = mean(mean(losses) for losses in by_sample if losses)
    return words + mean(nll(follows[0], sample.label) for sample, (_, follows) in runs)


def words_alone(runs: Alone) -> Tensor:
    return mean(x for sample, (logits,) in runs for x in words_of(sample, logits))


def ends(runs: Alone) -> Tensor:
    return mean(
        (nll(logits[:, 0], sample.span[0]) + nll(logits[:, 1], sample.span[1])) / 2
        for sample, (logits,) in runs
    )


def one_label(runs: Alone) -> Tensor:
    return mean(nll(logits[0], sample.label) for sample, (logits,) in runs)


def many_labels(runs: Alone) -> Tensor:
    return mean(
        -(F.logsigmoid(x) if i in sample.flags else F.logsigmoid(-x))
        for sample, (logits,) in runs
        for i, x in enumerate(logits[0])
    )


def squared(runs: Alone) -> Tensor:
    return mean((logits[0, 0] - sample.score) ** 2 for sample, (logits,) in runs)


def cosine(a: Tensor, b: Tensor) -> Tensor:
    return (a @ b) / (a.norm() * b.norm())


def likeness(runs: Alone) -> Tensor:
    pairs = zip(runs[::2], runs[1::2], strict=True)
    return mean((cosine(a[0][0], b[0][0]) - s.score) ** 2 for (s, a), (_, b) in pairs)


def contrast(runs: Alone) -> Tensor:
    firsts, seconds = ([run[0][0] for _, run in runs[i::2]] for i in (0, 1))
    rows = [torch.stack([cosine(a, b) / 0.3 for b in seconds]) for a in firsts]
    return mean(nll(row, i) for i, row in enumerate(rows))


CASES: dict[str, tuple[Objective, Callable[[Alone], Tensor]]] = {
    "pretrain by token": (Pretrain(), by_token),
    "pretrain by sequence": (Pretrain("sequence"), by_sequence),
    "words alone": (Pretrain(next_sentence=False), words_alone),
    "span": (SpanEnds(), ends),
    "single label": (Classify("single_label"), one_label),
    "multi label": (Classify("multi_label"), many_labels),
    "regression": (Classify("regression"), squared),
    "similarity": (Embedding("cosine"), likeness),
    "contrastive": (Embedding("ranking", 0.3), contrast),
}


@pytest.fixture(scope="module")
def model_for(make_model) -> Callable[[Objective, torch.dtype], Model]:
    """Models of 2 layers with every head; nothing is dropped out."""

    def build(objective: Objective, dtype: torch.dtype) -> Model:
        model = make_model(dtype)
        with torch.no_grad():  # vectors that are nearly parallel would lose digits in their cosine
            for name, parameter in model.named_parameters():
                if name.endswith("norm.weight"):
                    parameter += 1
        if objective == Classify("regression"):
            head: Any = model.heads["classify"]
            head.dense = torch.nn.Linear(48, 1).to(dtype)
            head.dense.weight.data.fill_(0.1)
        return model

    return build


def gradients(model: Model, *losses: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    for loss in losses:
        loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def unpacked(
    case: str, model: Model, samples: list[Sample], groups: Sequence[Sequence[int]]
) -> tuple[float, dict[str, Tensor]]:
    """Every sequence alone; only what is contrasted needs to know with whom."""
    objective, written_out = CASES[case]
    model.bert.use(attention.kernel("reference"))
    apart = groups if case == "contrastive" else [[i for group in groups for i in group]]
    share = [len(group) / sum(map(len, apart)) for group in apart]
    losses = []
    for group, weight in zip(apart, share, strict=True):
        runs = [(samples[i], model(Packed.build([samples[i]]), *objective.heads)) for i in group]
        losses.append(weight * written_out(runs))
    return sum(loss.item() for loss in losses), gradients(model, *losses)


def packed_step(
    objective: Objective,
    model: Model,
    samples: list[Sample],
    groups: Sequence[Sequence[int]],
    layout: Callable[[Sequence[Sample]], Packed],
) -> tuple[float, dict[str, Tensor]]:
    """A step of one or more batches, as the loop does it."""
    chosen = [[samples[i] for i in group] for group in groups]
    batches = [make_batch(objective, part, layout(part)) for part in chosen]
    totals = torch.stack([objective.weigh(batch) for batch in batches]).sum(0)
    losses = [objective.loss(model, batch, totals)[0] for batch in batches]
    return sum(loss.item() for loss in losses), gradients(model, *losses)


def difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The largest of all tensors, relative to the tensor's norm.

    What moves all logits of a softmax, or all vectors, together has next to no gradient, and noise:
    it is compared with the largest there is.
    """
    assert a.keys() == b.keys() and a
    largest = max(float(x.norm()) for x in b.values())
    together = SHIFTS[0] in a or not any(name.startswith("heads.") for name in a)
    nothing = SHIFTS if together else ()
    return max(
        float((a[n] - b[n]).norm()) / (largest if n in nothing else float(b[n].norm())) for n in a
    )


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_packed_gradients_are_unpacked_gradients(case, dtype, samples, model_for) -> None:
    objective, _ = CASES[case]
    model = model_for(objective, dtype)
    for groups in (GROUPS, PARTS):
        loss, truth = unpacked(case, model, samples, groups)
        for kernel in KERNELS:
            chosen = attention.kernel(kernel)
            model.bert.use(chosen)
            for name, layout in LAYOUTS.items():
                if chosen.serves.rows and name != "rows":
                    continue
                packed_loss, grads = packed_step(objective, model, samples, groups, layout)
                assert packed_loss == pytest.approx(loss, rel=LIMITS[dtype])
                assert difference(grads, truth) <= LIMITS[dtype], (kernel, name, groups)


def test_every_differentiable_kernel_was_tried() -> None:
    assert {"bucketed", "repack", "mask", "reference"} == set(KERNELS)


class Loose:
    """Attention told that the whole batch is one sequence."""

    kernel = attention.kernel("reference")
    serves = kernel.serves

    def plan(self, packed: Packed, dropout: float = 0.0) -> Any:
        bounds = packed.cu_seqlens[[0, -1]]
        return self.kernel.plan(replace(packed, cu_seqlens=bounds), dropout)

    def __call__(self, qkv: Tensor, plan: Any) -> Tensor:
        return self.kernel(qkv, plan)


def running_on(chosen: Sequence[Sample]) -> Packed:
    packed = Packed.build(chosen)
    return replace(packed, positions=torch.arange(len(packed.ids)))


@pytest.mark.parametrize("case", CASES)
def test_what_is_broken_on_purpose_is_seen(case: str, samples, model_for) -> None:
    objective, _ = CASES[case]
    model = model_for(objective, torch.float64)
    _, truth = unpacked(case, model, samples, PARTS)
    _, right = packed_step(objective, model, samples, PARTS, ragged)
    assert difference(right, truth) < 1e-10
    _, positions = packed_step(objective, model, samples, PARTS, running_on)
    assert difference(positions, truth) > 1e-2, "positions that are not reset"
    halves = [packed_step(objective, model, samples, [group], ragged)[1] for group in PARTS]
    means = {name: (halves[0][name] + halves[1][name]) / 2 for name in truth}
    assert difference(means, truth) > 1e-2, "the mean of the batches' means"
    model.bert.use(Loose())
    _, loose = packed_step(objective, model, samples, PARTS, ragged)
    assert difference(loose, truth) > 1e-2, "neighbors that see each other"


def test_averages_differ(samples, model_for) -> None:
    """Else the two could be one and the tests above would not know."""
    model = model_for(Pretrain(), torch.float64)
    (_, a), (_, b) = (unpacked(c, model, samples, GROUPS) for c in list(CASES)[:2])
    assert difference(a, b) > 1e-2


# ---- transformers

CLASSES = {
    "BertForPreTraining": Pretrain(),
    "single_label_classification": Classify("single_label"),
    "multi_label_classification": Classify("multi_label"),
    "regression": Classify("regression"),
    "BertForQuestionAnswering": SpanEnds(),
}


def make_theirs(name: str) -> Any:
    import transformers

    classifies = not name.startswith("Bert")
    labels = {"regression": 1, "multi_label_classification": 3}.get(name, 2)
    config = transformers.BertConfig(
        vocab_size=97,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        num_labels=labels,
        initializer_range=0.2,
        problem_type=name if classifies else None,
        attn_implementation="eager",
        pad_token_id=0,
    )
    kind = "BertForSequenceClassification" if classifies else name
    return getattr(transformers, kind)(config).double().eval()


def padded(name: str, samples: list[Sample]) -> dict[str, Tensor]:
    """The arguments of a forward pass of theirs."""
    size = (len(samples), max(len(sample.ids) for sample in samples))
    keys = ("input_ids", "token_type_ids", "attention_mask")
    tensors = {key: torch.zeros(size, dtype=torch.int64) for key in keys}
    words = torch.full(size, -100)
    for i, sample in enumerate(samples):
        values = (sample.ids, sample.types, np.ones_like(sample.ids))
        for key, value in zip(keys, values, strict=True):
            tensors[key][i, : len(value)] = torch.from_numpy(value)
        words[i, sample.masked] = torch.from_numpy(sample.words)
    expected = make_batch(CLASSES[name], samples, ragged(samples))
    if name == "BertForPreTraining":
        return {**tensors, "labels": words, "next_sentence_label": expected.next_labels}
    if name == "BertForQuestionAnswering":
        start, end = torch.tensor([sample.span for sample in samples]).unbind(1)
        return {**tensors, "start_positions": start, "end_positions": end}
    floats = name != "single_label_classification"
    return {**tensors, "labels": expected.targets.double() if floats else expected.targets}


@pytest.mark.parametrize("name", CLASSES)
def test_gradients_are_those_of_transformers(name: str, samples) -> None:
    # Not token 0: transformers gives the padding word no gradient.
    samples = [replace(sample, ids=sample.ids.clip(1)) for sample in samples]
    if name == "BertForQuestionAnswering":  # it gives padding a chance to be an answer
        samples = [sample for sample in samples if len(sample.ids) == 24] * 2
    reference, objective = make_theirs(name), CLASSES[name]
    with tempfile.TemporaryDirectory() as folder:
        reference.save_pretrained(folder)
        model = checkpoint.load(folder, dtype=torch.float64).model
    loss = reference(**padded(name, samples)).loss
    loss.backward()
    for layout in (ragged, rows):
        batch = make_batch(objective, samples, layout(samples))
        packed_loss, _ = objective.loss(model, batch)
        assert packed_loss.item() == pytest.approx(loss.item(), rel=1e-10)
        actual, yours = (
            gradients(model, packed_loss),
            {n: p.grad for n, p in reference.named_parameters()},
        )
        table = names.table(names.BERT, tied=True)
        for key, grad in actual.items():
            sources = names.sources(key, table)
            bias = "cls.predictions.bias"
            spelled = [bias if "decoder.bias" in source else source for source in sources]
            expected = torch.cat([yours[source] for source in spelled])
            assert float((grad - expected).norm() / expected.norm().clamp(min=1e-6)) <= 1e-9, key


# ---- figures


def half_known(model: Model, sample: Sample) -> Sample:
    """Of the masked words the first, the third … are what the model would say."""
    (logits,) = model(Packed.build([sample]), "mlm")
    words = sample.words.copy()
    words[::2] = logits[sample.masked].argmax(-1)[::2].numpy()
    return replace(sample, words=words)


def test_figures_of_pretraining_add_up(samples, model_for) -> None:
    """Counts over any division into batches are those of all sequences alone."""
    model, objective = model_for(Pretrain(), torch.float64), Pretrain("sequence")
    hits, per_sequence, follows = [], [], []
    samples = [half_known(model, sample) for sample in samples]
    for sample in samples:
        words, next_ = model(Packed.build([sample]), "mlm", "nsp")
        right = (words[sample.masked].argmax(-1).numpy() == sample.words).tolist()
        hits += right
        per_sequence += [np.mean(right)] if right else []
        follows.append(int(next_.argmax()) == sample.label)
    loss, _ = unpacked("pretrain by sequence", model, samples, GROUPS)
    expected = {
        "loss": loss,
        "mlm_accuracy": np.mean(hits),
        "mlm_sequence_accuracy": np.mean(per_sequence),
        "nsp_accuracy": np.mean(follows),
        "sequences": 6,
    }
    accuracies = {value for name, value in expected.items() if "accuracy" in name}
    assert len(accuracies) == 3 and all(0 < value < 1 for value in accuracies)
    for groups in (GROUPS, PARTS, [[i] for i in range(6)]):
        for layout in LAYOUTS.values():
            chosen = [[samples[i] for i in group] for group in groups]
            batches = [make_batch(objective, part, layout(part)) for part in chosen]
            figures = objective.evaluate(model, batches)
            assert figures["loss"] == pytest.approx(figures["mlm_loss"] + figures["nsp_loss"])
            for name, value in expected.items():
                assert figures[name] == pytest.approx(value, rel=1e-9), name
            stats = objective.loss(model, batches[0])[1]
            assert stats.sequences == len(chosen[0])
            assert stats.tokens == sum(len(sample.ids) for sample in chosen[0])


def test_a_model_that_knows_every_word_is_right(samples, model_for) -> None:
    class Knows(torch.nn.Module):
        def forward(self, packed: Packed, *heads: str, at: Tensor) -> list[Tensor]:
            return [F.one_hot(batch.masked_ids, 97).double()]

    objective = Pretrain(next_sentence=False)
    batch = make_batch(objective, samples, ragged(samples))
    figures = objective.evaluate(Knows(), [batch])
    assert figures["mlm_accuracy"] == figures["mlm_sequence_accuracy"] == 1


@pytest.mark.parametrize("case", CASES)
def test_evaluation_is_the_same_on_two_ranks_and_leaves_no_trace(case, samples, model_for) -> None:
    objective, _ = CASES[case]
    model = model_for(objective, torch.float32).train()
    batches = [
        make_batch(objective, [samples[i] for i in group], ragged([samples[i] for i in group]))
        for group in PARTS
    ]
    together = objective.evaluate(model, batches)
    assert model.training and not any(p.grad is not None for p in model.parameters())
    handed: list[Any] = []

    def send(results: list[Any]) -> list[Any]:
        handed.extend(results)
        return list(results)

    objective.evaluate(model, batches[1:], send)
    second = list(handed)
    apart = objective.evaluate(model, batches[:1], lambda results: [*results, *second])
    assert apart == pytest.approx(together)
    assert all(isinstance(value, float) for value in together.values())
    with pytest.raises(InputError, match="nothing to evaluate"):
        objective.evaluate(model, [])


class Says(torch.nn.Module):
    """Answers as it is told to."""

    def __init__(self, *logits: list[float]) -> None:
        super().__init__()
        self.logits = torch.tensor(logits)

    def forward(self, packed: Packed, head: str) -> list[Tensor]:
        return [self.logits]


@pytest.mark.parametrize(
    ("problem", "logits", "labels", "expected"),
    [
        (
            "single_label",
            ([0.0, 1.0], [2.0, 1.0], [0.0, 3.0]),
            [1, 1, 0],
            {"accuracy": 1 / 3, "f1": 0.5, "matthews": -0.5},
        ),
        (
            "multi_label",
            ([1.0, -1.0], [-2.0, 1.0], [0.5, 3.0]),
            [[1.0, 0.0], [1.0, 1.0], [1.0, 1.0]],
            {"accuracy": 2 / 3, "f1": 8 / 9},
        ),
        (
            "regression",
            ([1.0], [3.0], [2.0]),
            [1.0, 9.0, 4.0],
            {"pearson": 0.98974, "spearman": 1.0, "loss": 40 / 3},
        ),
    ],
)
def test_measures_of_glue(problem, logits, labels, expected, samples) -> None:
    objective = Classify(problem)
    batch = targets.TaskBatch(ragged(samples[:3]), torch.tensor(labels), (0, 1, 2), 3, 0, {})
    figures = objective.evaluate(Says(*logits), [batch])
    assert figures["sequences"] == 3
    assert {name: figures[name] for name in expected} == pytest.approx(expected, rel=1e-4)
    assert ("f1" in figures) == (problem != "regression")


@pytest.mark.parametrize("case", ["single label", "similarity", "contrastive", "span"])
def test_a_rank_without_examples_adds_nothing(case: str, samples, model_for) -> None:
    """Its gradients are there, because other ranks wait for them, and all 0."""
    objective, _ = CASES[case]
    model = model_for(objective, torch.float32)
    problem = {"single label": "single_label"}.get(case, case)
    task = targets.TrainingTask([targets.TaskExample((samples[0],) * 2, 0)], "contrastive")
    empty = next(iter(targets.TaskLoader(task, examples=1, epochs=1, world=2, rank=1)))
    assert not empty.numbers
    collated = targets.COLLATE[problem]([], task, empty.packed)
    batch = replace(empty, targets=collated)
    assert objective.weigh(batch).tolist() == [0]
    loss, stats = objective.loss(model, batch, torch.tensor([4]))
    assert loss.item() == 0 and stats.sequences == 0
    actual = gradients(model, loss)
    assert actual and not any(grad.any() for grad in actual.values())
    assert set(stats.means().values()) == {0.0}


def test_half_precision_is_summed_in_float(samples, model_for) -> None:
    objective = Pretrain()
    batch = make_batch(objective, samples, ragged(samples))
    loss, stats = objective.loss(model_for(objective, torch.bfloat16), batch)
    assert loss.dtype == stats.sums.dtype == torch.float32


def test_dropout_is_drawn_in_training_alone(samples, model_for) -> None:
    objective = Pretrain()
    model = model_for(objective, torch.float64)
    batch = make_batch(objective, samples, ragged(samples))
    still = [objective.loss(model, batch)[0].item() for _ in range(2)]
    model.train()
    drawn = [objective.loss(model, batch)[0].item() for _ in range(2)]
    assert still[0] == still[1] and len({*still, *drawn}) == 3


def test_the_table_knows_every_problem() -> None:
    assert {"pretrain", *targets.COLLATE} == set(OBJECTIVES)
    for name, make in OBJECTIVES.items():
        assert getattr(make(), "problem", name) == name and make().heads


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Pretrain(average="pack"), "average is 'pack'; .* by 'token' or 'sequence'"),  # type: ignore
        (lambda: Classify("ranking"), "problem is 'ranking'; it can be single_label"),  # type: ignore
        (lambda: Embedding(temperature=0.0), "above 0"),
        (lambda: Embedding(temperature=float("nan")), "above 0"),
    ],
)
def test_options_out_of_range(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


def test_a_head_of_another_size_is_refused(samples, model_for) -> None:
    model = model_for(Pretrain(), torch.float32)
    objective = Classify("regression")
    with pytest.raises(InputError, match="one output; the model's head has 3"):
        objective.loss(model, make_batch(objective, samples, ragged(samples)))
    several = Classify("multi_label")
    batch = make_batch(several, samples, ragged(samples))
    with pytest.raises(InputError, match="2 labels; the model's head has 3"):
        several.loss(model, replace(batch, targets=batch.targets[:, :2]))


# ---- answers

SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = (*SPECIALS, "who", "ate", "the", "red", "old", "apple", "a", "fox", "did")
CONTEXT = "the old fox ate the red apple"
QUESTIONS = [
    SquadQuestion("1", "who ate", CONTEXT, (Gold("the old fox", 0), Gold("fox", 8))),
    SquadQuestion("2", "who ate the apple", CONTEXT, (Gold("old fox", 4),)),
    SquadQuestion("3", "did the apple", CONTEXT, (), impossible=True),
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "vocab.txt"
    path.write_text("\n".join(WORDS))
    return Tokenizer.load(path)


class Finds(torch.nn.Module):
    """Is sure of the words it is given, wherever they stand in a context; else of no answer."""

    def __init__(self, first: str, last: str) -> None:
        super().__init__()
        self.ends = [WORDS.index(first), WORDS.index(last)]

    def forward(self, packed: Packed, head: str) -> list[Tensor]:
        assert head == "span"
        here = [(packed.ids == word) & (packed.types == 1) for word in self.ends]
        logits = torch.stack([10.0 * hit for hit in here], -1)
        logits[packed.starts.long()] = 6.0
        return [logits]


def scored(tokenizer: Tokenizer, count: int, first: str, last: str, **sizes: int) -> dict:
    laid_out = squad_evaluation(QUESTIONS[:count], tokenizer, **sizes)
    batches = list(targets.TaskLoader(laid_out.task(), examples=2, epochs=1))
    return SpanEnds(laid_out).evaluate(Finds(first, last), batches)


@pytest.mark.parametrize("sizes", [{}, {"max_length": 12, "stride": 2}])
def test_answers_are_scored_as_squad_scores_them(tokenizer, sizes) -> None:
    """Also where a context takes several windows, which come in any order."""
    figures = scored(tokenizer, 2, "old", "fox", **sizes)
    assert figures == {"exact_match": 100, "f1": 100, "questions": 2}
    figures = scored(tokenizer, 2, "fox", "fox", **sizes)
    assert figures == {"exact_match": 50, "f1": pytest.approx(250 / 3), "questions": 2}
    assert scored(tokenizer, 2, "red", "apple", **sizes)["f1"] == 0


def test_no_answer_is_an_answer_where_a_question_has_none(tokenizer) -> None:
    figures = scored(tokenizer, 3, "fox", "fox")
    assert (figures["exact_match"], figures["has_answer_exact_match"]) == (
        pytest.approx(100 / 3),
        50,
    )
    assert figures["no_answer_exact_match"] == 0
    silent = scored(tokenizer, 3, "a", "did")
    assert (silent["has_answer_f1"], silent["no_answer_f1"]) == (0, 100)


def test_windows_left_out_are_missed(tokenizer) -> None:
    evaluation = squad_evaluation(QUESTIONS, tokenizer)
    batches = list(targets.TaskLoader(evaluation.task(), examples=1, epochs=1))[:2]
    with pytest.raises(InputError, match="2 of 3 windows were given"):
        SpanEnds(evaluation).evaluate(Finds("old", "fox"), batches)
