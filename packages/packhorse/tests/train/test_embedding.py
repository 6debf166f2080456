"""Embedding models: losses of sentence-transformers on the same batch, cached steps, whole runs."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import packhorse
from packhorse import checkpoint
from packhorse.checkpoint import names
from packhorse.data.tasks import targets
from packhorse.errors import InputError
from packhorse.train.job import assemble
from packhorse.train.journal import Diverged
from packhorse.train.loop import train
from packhorse.train.objectives import Embedding
from packhorse.train.ranks import RankGroup
from packhorse.train.settings import TrainSettings
from packhorse.train.step import train_step

GOOD, BAD, THINGS = ("good", "fine", "nice"), ("bad", "poor", "ugly"), ("horse", "mule", "cart")
NOUNS = (*THINGS, "road")

# Texts of different lengths; each group is an anchor, its positive and two negatives.
GROUPS = [
    ("good horse", "fine horse cart", "bad mule", "ugly cart road w1 w2 w3"),
    ("bad mule cart", "poor mule", "nice horse w4", "good road"),
    ("nice road w5 w6 w7", "good road", "ugly mule", "w8"),
    ("ugly cart", "bad cart w9 w1 w4 w3 w2", "fine road horse", "nice"),
    ("w1 w2", "w2 w1 w3", "good", "poor horse mule cart"),
]
SCORES = [0.9, 0.1, 0.5, 0.5, 0.3]
MARGINS = [[0.4, 1.5], [-0.2, 3.0], [2.0, 0.1], [0.0, 0.7], [1.1, -0.6]]
JUDGED = [[1.0, 0.2, -0.5], [3.0, 1.0, 0.0], [0.4, 0.5, 0.6], [2.0, -1.0, 0.1], [0.0, 0.9, 0.3]]


@pytest.fixture(scope="module")
def theirs() -> ModuleType:
    pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    try:  # where it is since release 6
        return import_module("sentence_transformers.sentence_transformer.losses")
    except ImportError:
        return import_module("sentence_transformers.losses")


@pytest.fixture
def reference(theirs: ModuleType, tiny: Path) -> Any:
    """The tiny model in sentence-transformers, in double precision, without dropout."""
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(tiny), device="cpu").double().eval()


Build = Callable[[ModuleType, Any], Any]
VECTORS = np.random.default_rng(0).normal(size=(5, 2, 32)).astype(np.float32)
CASES: dict[str, tuple[Embedding, int, Any, Build]] = {
    "pairs": (
        Embedding("ranking"),
        2,
        None,
        lambda st, m: st.MultipleNegativesRankingLoss(m),
    ),
    "hard negatives": (
        Embedding("ranking", temperature=0.1),
        4,
        None,
        lambda st, m: st.MultipleNegativesRankingLoss(m, scale=10.0),
    ),
    "cached": (
        Embedding("ranking"),
        3,
        None,
        lambda st, m: st.CachedMultipleNegativesRankingLoss(m, mini_batch_size=2),
    ),
    "symmetric": (
        Embedding("symmetric"),
        3,
        None,
        lambda st, m: st.MultipleNegativesRankingLoss(
            m, directions=("query_to_doc", "doc_to_query"), partition_mode="per_direction"
        ),
    ),
    "matryoshka": (
        Embedding("ranking", widths=(32, 16, 4)),
        3,
        None,
        lambda st, m: st.MatryoshkaLoss(m, st.MultipleNegativesRankingLoss(m), [32, 16, 4]),
    ),
    "triplet": (Embedding("triplet"), 3, None, lambda st, m: st.TripletLoss(m)),
    "triplet by cosine": (
        Embedding("triplet", margin=0.4, distance="cosine"),
        3,
        None,
        lambda st, m: st.TripletLoss(m, st.TripletDistanceMetric.COSINE, 0.4),
    ),
    "cosine": (Embedding("cosine"), 2, SCORES, lambda st, m: st.CosineSimilarityLoss(m)),
    "cosent": (Embedding("cosent"), 2, SCORES, lambda st, m: st.CoSENTLoss(m)),
    "angle": (Embedding("angle"), 2, SCORES, lambda st, m: st.AnglELoss(m)),
    "cosent matryoshka": (
        Embedding("cosent", widths=(32, 8)),
        2,
        SCORES,
        lambda st, m: st.MatryoshkaLoss(m, st.CoSENTLoss(m), [32, 8]),
    ),
    "margins": (Embedding("margin"), 4, MARGINS, lambda st, m: st.MarginMSELoss(m)),
    "scores as margins": (Embedding("margin"), 4, JUDGED, lambda st, m: st.MarginMSELoss(m)),
    "one margin": (
        Embedding("margin"),
        3,
        [[row[0]] for row in MARGINS],
        lambda st, m: st.MarginMSELoss(m),
    ),
    "distribution": (
        Embedding("kl", temperature=2.0),
        4,
        JUDGED,
        lambda st, m: st.DistillKLDivLoss(m, temperature=2.0),
    ),
    "vectors": (Embedding("vectors"), 2, VECTORS, lambda st, m: st.MSELoss(m)),
}


def batch_of(tiny: Path, size: int, learned: Any) -> targets.TaskBatch:
    """All groups, cut to so many texts, as one packed batch."""
    tokenizer = checkpoint.tokenizer(checkpoint.load(tiny))
    texts = [group[:size] for group in GROUPS]
    if learned is None:
        task = targets.contrastive_task(texts, tokenizer)
    else:
        task = targets.distillation_task(texts, list(learned), tokenizer)
    (batch,) = targets.TaskLoader(task, examples=len(texts), epochs=1, shuffle=False)
    return batch


def by_column(reference: Any, size: int) -> list[dict[str, Tensor]]:
    """The same as their trainer hands it over: a padded batch for each column."""
    columns = zip(*(group[:size] for group in GROUPS), strict=True)
    return [dict(reference.preprocess(list(column))) for column in columns]


def their_gradients(reference: Any) -> dict[str, Tensor]:
    return {
        f"bert.{name.rpartition('auto_model.')[2].removeprefix('0.model.')}": parameter.grad
        for name, parameter in reference.named_parameters()
        if parameter.grad is not None
    }


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def furthest(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest difference of a gradient, relative to the largest norm of all."""
    table = names.table(names.BERT, tied=True)
    largest = max(float(grad.norm()) for grad in theirs.values())
    assert len(ours) > 20
    return (
        max(
            float((grad - torch.cat([theirs[part] for part in names.sources(name, table)])).norm())
            for name, grad in ours.items()
        )
        / largest
    )


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_those_of_sentence_transformers(
    case: str, tiny: Path, theirs: ModuleType, reference: Any
) -> None:
    objective, size, learned, build = CASES[case]
    labels = None if learned is None else torch.tensor(np.array(learned)).double()
    expected = build(theirs, reference)(by_column(reference, size), labels)
    expected.backward()
    model = checkpoint.load(tiny, dtype=torch.float64).model
    batch = batch_of(tiny, size, learned)
    loss, stats = objective.loss(model, batch)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert stats.sequences == size * len(GROUPS)
    assert furthest(gradients(model, loss), their_gradients(reference)) < 1e-6
    # The control: another group of the same step, and it is another loss.
    other = replace(batch, packed=batch_of(tiny, size, learned).packed, targets=batch.targets)
    mixed = model(other.packed, "embed")[0].unflatten(0, (len(GROUPS), size))
    moved = torch.cat([mixed[:, :1], mixed.roll(1, 0)[:, 1:]], 1)
    wrong = objective.sums(moved, batch.targets)["loss"] / len(GROUPS)
    assert abs(wrong.item() - expected.item()) > 1e-4 * abs(expected.item())


# ---- whole runs


def stopping_after(steps: int) -> Callable[[], int]:
    """A wish to stop that comes when so many steps are done in this process."""
    calls = count()
    return lambda: signal.SIGTERM if next(calls) >= steps else 0


def write_groups(path: Path, count: int = 24, hard: int = 1) -> Path:
    """Groups whose positive shares the anchor's words in another order."""
    rows = []
    for i in range(count):
        word, noun = (*GOOD, *BAD)[i % 6], NOUNS[i // 6 % 4]
        row = {"anchor": f"{word} {noun}" + " w1" * (i % 3), "positive": f"{noun} {word}"}
        for j in range(hard):
            row[f"negative_{j + 1}"] = f"{NOUNS[(i // 6 + 1 + j) % 4]} {word}"
        rows.append(row)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def of(tiny: Path, tmp_path: Path) -> Callable[..., TrainSettings]:
    """Settings of a run on such groups; what a test says goes before."""
    data = str(write_groups(tmp_path / "pairs.jsonl"))
    usual = {"task": "contrastive", "model": str(tiny), "train": data, "device": "cpu"}
    usual |= {"batch": 12, "steps": 6, "learning_rate": 3e-3, "compile": "off", "dropout": 0.1}
    return lambda **options: TrainSettings(**{**usual, **options})


def step_gradients(settings: TrainSettings) -> tuple[float, dict[str, Tensor], int]:
    """The loss and the gradients of the first step in double precision, and its parts."""
    job = assemble(settings)
    job.model.double()
    step = next(job.feed.steps(None))
    result = train_step(job, step, RankGroup())
    grads = {n: p.grad.clone() for n, p in job.model.named_parameters() if p.grad is not None}
    return float(result.row[0]), grads, len(step.batches)


@pytest.mark.parametrize(
    "options",
    [
        {"loss": "ranking"},
        {"loss": "symmetric", "negatives": 1},
        {"loss": "ranking", "widths": (32, 8)},
        {"task": "similarity", "loss": "cosent"},
        {"task": "similarity", "loss": "angle"},
    ],
    ids=str,
)
def test_a_step_in_parts_is_the_step(of: Any, tmp_path: Path, options: dict[str, Any]) -> None:
    if options.get("task") == "similarity":
        scored = zip(GROUPS * 3, SCORES * 3, strict=True)
        lines = [f"{group[0]}\t{group[1]}\t{score}" for group, score in scored]
        (tmp_path / "scored.tsv").write_text("\n".join(["sentence1\tsentence2\tscore", *lines]))
        options = {**options, "train": str(tmp_path / "scored.tsv")}
    plain = of(dropout=0.0, clip=0.0, **options)
    loss, whole, parts = step_gradients(plain)
    assert parts == 1
    divided_loss, divided, parts = step_gradients(replace(plain, micro_tokens=40))
    assert parts > 2
    assert divided_loss == pytest.approx(loss, rel=1e-9)
    assert all(
        torch.allclose(divided[name], grad, rtol=1e-8, atol=1e-10) for name, grad in whole.items()
    )
    # The control: each part by itself, as losses that compare nothing are divided.
    job = assemble(replace(plain, micro_tokens=40))
    job.model.double()
    step = next(job.feed.steps(None))
    totals = torch.tensor([sum(len(batch.numbers) for batch in step.batches)])
    apart = sum(job.objective.loss(job.model, batch, totals)[0].item() for batch in step.batches)
    assert abs(apart - loss) > 1e-3 * loss


def test_the_parts_of_a_step_drop_out_alike_both_times(of: Any) -> None:
    """Else the gradients would be those of other vectors than the loss was computed of."""
    job = assemble(of(micro_tokens=40, dropout=0.3))
    seen: list[Tensor] = []
    objective = job.objective
    assert isinstance(objective, Embedding)

    class Watched(Embedding):
        def vectors(self, model: Any, batch: Any) -> Tensor:
            vectors = Embedding.vectors(self, model, batch)
            seen.append(vectors.detach().clone())
            return vectors

    step = next(job.feed.steps(None))
    train_step(replace(job, objective=Watched()), step, RankGroup())
    half = len(seen) // 2
    assert half == len(step.batches) > 2
    for first, second in zip(seen[:half], seen[half:], strict=True):
        assert torch.equal(first, second)
    assert not torch.equal(seen[0], objective.vectors(job.model, step.batches[0]))


@pytest.mark.parametrize(
    "options",
    [{}, {"micro_tokens": 40}, {"loss": "triplet", "batch": 4}, {"widths": (32, 8)}],
    ids=str,
)
def test_a_run_that_was_stopped_goes_on_to_the_bit(
    of: Any, tmp_path: Path, options: dict[str, Any]
) -> None:
    data = str(write_groups(tmp_path / "pairs.jsonl"))
    settings = of(eval=data, eval_every=2, **options)
    train(assemble(settings), tmp_path / "whole")
    for _ in range(3):
        train(assemble(settings), tmp_path / "cut", stop_signal=stopping_after(2))
    outcome = train(assemble(settings), tmp_path / "cut")
    assert outcome.step == 6
    for name in ("model/model.safetensors", "log.jsonl"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_loss_that_is_no_number_is_told_and_leaves_the_last_checkpoint(
    of: Any, tmp_path: Path
) -> None:
    from packhorse.train import checkpoints

    settings = of(save_every=2, log_every=1, micro_tokens=40)
    train(assemble(replace(settings, steps=2)), tmp_path / "run")
    job = assemble(settings)
    real = job.objective

    class Broken(Embedding):
        def sums(self, vectors: Tensor, targets: Tensor) -> dict[str, Tensor]:
            return {k: v * float("nan") for k, v in Embedding.sums(self, vectors, targets).items()}

    with pytest.raises(Diverged, match="step 3: the loss is nan") as caught:
        train(replace(job, objective=Broken()), tmp_path / "run")
    assert caught.value.checkpoint == tmp_path / "run" / "step-00000002"
    newest = checkpoints.newest(tmp_path / "run")
    assert newest is not None and newest.step == 2
    assert isinstance(real, Embedding)
    assert train(job, tmp_path / "run").step == 6  # and with sound numbers it goes on


def test_what_was_learned_opens_in_sentence_transformers(
    of: Any, theirs: ModuleType, tmp_path: Path
) -> None:
    from sentence_transformers import SentenceTransformer

    data = str(write_groups(tmp_path / "pairs.jsonl"))
    prompts = {"query_prompt": "w9 w8 ", "document_prompt": "w7 "}
    settings = of(steps=40, eval=data, eval_first=True, eval_every=20, **prompts)
    outcome = train(assemble(settings), tmp_path / "run")
    assert outcome.model is not None
    log = [json.loads(line) for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    measured = [line["evaluation"] for line in log if "evaluation" in line]
    assert measured[-1]["ndcg@10"] > measured[0]["ndcg@10"]
    assert (outcome.model / "modules.json").is_file()
    reference = SentenceTransformer(str(outcome.model), device="cpu")
    encoder = packhorse.load(outcome.model, device="cpu", dtype="fp32")
    texts = ["good horse", "ugly mule cart road"]
    assert reference.prompts["query"] == "w9 w8 " and reference.prompts["document"] == "w7 "
    plain = {"prompt": ""}
    for name, options in (("encode_query", {}), ("encode_document", {}), ("encode", plain)):
        ours = np.asarray(getattr(encoder, name)(texts, **options))
        assert np.abs(ours - getattr(reference, name)(texts, **options)).max() < 1e-5
    queries = np.asarray(encoder.encode_query(texts))
    assert np.abs(queries - np.asarray(encoder.encode(texts, prompt=""))).max() > 1e-3


def test_a_plain_encoder_becomes_a_folder_of_sentence_transformers(
    of: Any, theirs: ModuleType, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    from sentence_transformers import SentenceTransformer

    config = transformers.BertConfig(
        vocab_size=64,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=48,
    )
    transformers.BertModel(config).save_pretrained(tmp_path / "plain")
    words = Path(of().model) / "vocab.txt"
    (tmp_path / "plain" / "vocab.txt").write_bytes(words.read_bytes())
    outcome = train(assemble(of(model=str(tmp_path / "plain"), steps=2)), tmp_path / "run")
    assert outcome.model is not None and (outcome.model / "1_Pooling").is_dir()
    texts = ["good horse", "ugly mule cart road"]
    reference = SentenceTransformer(str(outcome.model), device="cpu").encode(texts)
    ours = packhorse.load(outcome.model, device="cpu", dtype="fp32").embed(texts)
    assert np.abs(np.asarray(ours) - reference).max() < 1e-5


def test_measures_of_a_search_are_those_of_their_evaluator(
    tiny: Path, theirs: ModuleType, reference: Any
) -> None:
    place = f"{theirs.__name__.removesuffix('losses')}evaluation"
    InformationRetrievalEvaluator = import_module(place).InformationRetrievalEvaluator

    model = checkpoint.load(tiny, dtype=torch.float64).model
    tokenizer = checkpoint.tokenizer(checkpoint.load(tiny))
    rng = np.random.default_rng(5)
    words = (*GOOD, *BAD, *NOUNS)
    texts = {" ".join(rng.choice(words, 3)) for _ in range(200)}
    triples = np.array(sorted(texts))[: 3 * 40].reshape(40, 3)
    task = targets.contrastive_task([tuple(map(str, row)) for row in triples], tokenizer)
    found = Embedding().evaluate(model, targets.TaskLoader(task, examples=7, epochs=1))
    evaluator = InformationRetrievalEvaluator(
        queries={f"q{i}": str(row[0]) for i, row in enumerate(triples)},
        corpus={f"{i}-{k}": str(row[k]) for i, row in enumerate(triples) for k in (1, 2)},
        relevant_docs={f"q{i}": {f"{i}-1"} for i in range(len(triples))},
        mrr_at_k=[10],
        ndcg_at_k=[10],
        accuracy_at_k=[1, 10],
        precision_recall_at_k=[1, 10],
        map_at_k=[10],
        show_progress_bar=False,
    )
    expected = evaluator(reference)
    pairs = {"mrr@10": "mrr@10", "ndcg@10": "ndcg@10", "recall@1": "recall@1"}
    assert 0.02 < found["mrr@10"] < 0.9
    for ours, other in pairs.items():
        assert found[ours] == pytest.approx(expected[f"cosine_{other}"], abs=1e-6)


def test_scored_pairs_measure_a_contrastive_run(of: Any, tmp_path: Path) -> None:
    lines = [f"{g[0]}\t{g[1]}\t{s}" for g, s in zip(GROUPS, SCORES, strict=True)]
    (tmp_path / "sts.tsv").write_text("\n".join(["sentence1\tsentence2\tscore", *lines]) + "\n")
    outcome = train(assemble(of(eval=str(tmp_path / "sts.tsv"), steps=2)), tmp_path / "run")
    assert {"spearman", "pearson", "loss"} <= outcome.evaluation.keys()


# ---- teachers


def test_a_teacher_with_vectors_is_learned_from(of: Any, tiny: Path, tmp_path: Path) -> None:
    teacher = train(assemble(of(steps=15, dropout=0.0)), tmp_path / "teacher").model
    assert teacher is not None
    data = str(write_groups(tmp_path / "pairs.jsonl"))
    options = {"task": "distill", "loss": "vectors", "teacher": str(teacher), "eval": data}
    settings = of(steps=40, log_every=1, dropout=0.0, **options)
    outcome = train(assemble(settings), tmp_path / "run")
    log = [json.loads(line) for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in log if "loss" in line]
    assert losses[-1] < losses[0] / 5
    assert outcome.model is not None and "ndcg@10" in outcome.evaluation
    text = ["good horse"]
    before, after, taught = (
        packhorse.load(folder, device="cpu", dtype="fp32").embed(text)[0]
        for folder in (tiny, outcome.model, teacher)
    )
    assert np.linalg.norm(after - taught) < np.linalg.norm(before - taught) / 2


def test_a_reranker_teaches_margins(of: Any, tiny: Path, tmp_path: Path) -> None:
    rows = [f"{g[0]}\t{g[1]}\t{s}" for g, s in zip(GROUPS, SCORES, strict=True)]
    (tmp_path / "r.tsv").write_text("\n".join(["sentence1\tsentence2\tscore", *rows]) + "\n")
    reranker = train(
        assemble(of(task="classify", train=str(tmp_path / "r.tsv"), batch=5, steps=3)),
        tmp_path / "reranker",
    ).model
    assert reranker is not None
    job = assemble(of(task="distill", teacher=str(reranker)))
    batch = next(job.feed.steps(None)).batches[0]
    assert batch.targets.shape == (12, 2)
    encoder = packhorse.load(reranker, device="cpu", dtype="fp32")
    lines = (tmp_path / "pairs.jsonl").read_text().splitlines()
    row = json.loads(lines[batch.numbers[0]])
    ranked = encoder.rerank(row["anchor"], [row["positive"], row["negative_1"]], raw=True)
    scores = {one.index: one.score for one in ranked}
    assert batch.targets[0].tolist() == pytest.approx([scores[0], scores[1]], abs=1e-5)
    settings = of(task="distill", teacher=str(reranker), loss="kl", temperature=1.0, steps=4)
    train(assemble(settings), tmp_path / "run", stop_signal=lambda: 0)
    with pytest.raises(InputError, match="has 2 labels; a reranker has one"):
        assemble(of(task="distill", teacher=str(two_labels(of, tmp_path))))


def test_a_teacher_may_have_the_short_name_of_a_model(
    of: Any, minilm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    batch = next(assemble(of(task="distill", teacher="minilm")).feed.steps(None)).batches[0]
    assert batch.targets.shape == (12, 2)


def test_what_is_not_learned_of_groups_is_told(of: Any, tmp_path: Path) -> None:
    rows = [{"query": f"good w{i}", "pos": ["fine"], "neg": ["bad"] * (i % 3)} for i in range(6)]
    data = tmp_path / "uneven.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    notes = assemble(of(train=str(data), batch=2)).notes
    assert any("6 negatives are left out, because every group has 0" in n for n in notes), notes
    assert any("5 of 6 groups repeat an anchor or a positive" in n for n in notes), notes
    notes = assemble(of(train=str(data), batch=7)).notes
    assert any("batch is 7, more than 6 groups" in n for n in notes), notes
    notes = assemble(of(batch=2)).notes
    assert not any("left out" in n or "repeat" in n or "batch" in n for n in notes), notes


def test_held_out_groups_need_no_negatives(of: Any, tmp_path: Path) -> None:
    (tmp_path / "dev.tsv").write_text("anchor\tpositive\ngood mule\tfine mule\n")
    outcome = train(
        assemble(of(eval=str(tmp_path / "dev.tsv"), negatives=1, steps=1)), tmp_path / "run"
    )
    assert outcome.evaluation["pairs"] == 1


def two_labels(of: Any, tmp_path: Path) -> Path:
    rows = [f"{g[0]}\t{'ab'[i % 2]}" for i, g in enumerate(GROUPS)]
    (tmp_path / "two.tsv").write_text("\n".join(["sentence\tlabel", *rows]) + "\n")
    settings = of(task="classify", train=str(tmp_path / "two.tsv"), batch=5, steps=1)
    folder = train(assemble(settings), tmp_path / "two").model
    assert folder is not None
    return folder


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "cosent"}, "loss is 'cosent'; the task contrastive has ranking"),
        ({"task": "pretrain", "loss": "ranking"}, "has none to choose"),
        ({"teacher": "x"}, "it is for the task distill"),
        ({"widths": (0,)}, "counts from 1"),
        ({"task": "distill", "loss": "vectors"}, "no column with a teacher's scores"),
        ({"task": "distill"}, "no column with a teacher's scores"),
        ({"text": ("anchor",)}, "a row needs an anchor and a positive"),
        ({"text": ("anchor", "nowhere")}, "no column 'nowhere'"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(of: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        assemble(of(**options))


@pytest.mark.parametrize(
    ("objective", "size", "message"),
    [
        (Embedding(widths=(64,)), 3, "vectors have 32 numbers"),
        (Embedding("triplet"), 4, "not 4 texts"),
        (Embedding("margin"), 2, "needs a negative"),
        (Embedding("kl"), 3, "teacher's targets are"),
        (Embedding("cosent"), 2, "one score per pair"),
    ],
    ids=str,
)
def test_groups_that_do_not_fit_the_loss(
    tiny: Path, objective: Embedding, size: int, message: str
) -> None:
    model = checkpoint.load(tiny).model
    with pytest.raises(InputError, match=message):
        objective.loss(model, batch_of(tiny, size, None))
