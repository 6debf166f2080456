"""Fine-tuning for every kind of task, and that others can use what comes of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import packhorse
from packhorse.errors import CheckpointError, InputError
from packhorse.train.job import assemble
from packhorse.train.loop import RunOutcome, train

GOOD, BAD, THINGS = ("good", "fine", "nice"), ("bad", "poor", "ugly"), ("horse", "mule", "cart")
Tune = Callable[..., RunOutcome]


@pytest.fixture
def tune(tiny: Path, tmp_path: Path) -> Tune:
    """Fine-tune the tiny model on a table of this name, which is also evaluated on."""
    from packhorse.train.settings import TrainSettings

    def run(table: str, content: str, **options: Any) -> RunOutcome:
        path = tmp_path / table
        path.write_text(content)
        usual = {"model": str(tiny), "train": str(path), "eval": str(path), "device": "cpu"}
        usual |= {"steps": 60, "batch": 16, "learning_rate": 3e-3, "dropout": 0.0, "warmup": 0.1}
        return train(assemble(TrainSettings(**{**usual, **options})), tmp_path / "run")

    return run


def phrases(number: int = 48) -> list[tuple[str, str, str]]:
    """Texts, labels and scores that follow from one word."""
    rng = np.random.default_rng(0)
    rows = []
    for i in range(number):
        words = GOOD if i % 2 else BAD
        text = f"{rng.choice(THINGS)} {rng.choice(words)} {rng.choice(THINGS)}"
        rows.append((text, "pos" if i % 2 else "neg", f"{1.0 if i % 2 else 0.0}"))
    return rows


def table(*columns: str, rows: list[tuple[str, ...]]) -> str:
    return "\n".join("\t".join(row) for row in [columns, *rows]) + "\n"


def test_one_label_and_transformers_agrees(tune: Tune, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    rows = [(text, label) for text, label, _ in phrases()]
    outcome = tune("train.tsv", table("sentence", "label", rows=rows), task="classify")
    assert outcome.evaluation["accuracy"] == 1.0
    assert outcome.model is not None
    config = json.loads((outcome.model / "config.json").read_text())
    assert config["architectures"] == ["BertForSequenceClassification"]
    assert config["id2label"] == {"0": "neg", "1": "pos"}
    reference = transformers.AutoModelForSequenceClassification.from_pretrained(
        outcome.model
    ).eval()
    words = transformers.AutoTokenizer.from_pretrained(outcome.model)
    encoder = packhorse.load(outcome.model, device="cpu", dtype="fp32")
    texts = ["good horse", "mule bad cart road"]
    for text, result in zip(texts, encoder.classify(texts), strict=True):
        with torch.no_grad():
            scores = reference(**words(text, return_tensors="pt")).logits.softmax(-1)[0]
        assert result.label == reference.config.id2label[int(scores.argmax())]
        assert abs(result.score - float(scores.max())) < 1e-5


def test_several_labels(tune: Tune) -> None:
    rows = [
        (text, ",".join([label, "horse"] if "horse" in text else [label]))
        for text, label, _ in phrases()
    ]
    options = {"task": "classify", "separator": ",", "problem": "multi_label", "steps": 150}
    outcome = tune("train.tsv", table("text", "labels", rows=rows), **options)
    assert outcome.evaluation["f1"] > 0.95


def test_a_score(tune: Tune) -> None:
    rows = [(text, score) for text, _, score in phrases()]
    outcome = tune("train.tsv", table("text", "score", rows=rows), task="classify")
    assert outcome.evaluation["pearson"] > 0.95
    assert outcome.model is not None
    assert json.loads((outcome.model / "config.json").read_text())["problem_type"] == "regression"


def pairs() -> list[tuple[str, str, str]]:
    rows = phrases()
    again = [rows[i] for i in np.random.default_rng(1).permutation(len(rows))]
    return [
        (first[0], second[0], "5.0" if first[1] == second[1] else "0.0")
        for first, second in zip(rows, again, strict=True)
    ]


def test_fine_tuning_on_similar_pairs(tune: Tune, tiny: Path) -> None:
    rows = [*pairs(), ("good horse", "fine horse", "5.0"), ("good mule", "bad mule", "0.0")]
    options = {"task": "similarity", "scale": (0.0, 5.0), "steps": 40}
    outcome = tune("train.tsv", table("sentence1", "sentence2", "score", rows=rows), **options)
    assert outcome.evaluation["spearman"] > 0.8
    assert outcome.model is not None
    encoder = packhorse.load(outcome.model, device="cpu", dtype="fp32")
    anchor, like, unlike = encoder.embed(["nice cart", "fine cart", "ugly cart"])
    assert anchor @ like > 0.7 > anchor @ unlike
    before, after = (weights(path)["pooler.dense.weight"] for path in (tiny, outcome.model))
    assert torch.equal(before, after)  # kept, for transformers' sake, and not trained


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def test_pairs_without_scores(tune: Tune) -> None:
    rows = [(f"{w} {noun}", f"{noun} {w}") for w in (*GOOD, *BAD) for noun in THINGS]
    options = {"task": "contrastive", "text": ("one", "other"), "batch": 9, "steps": 80}
    outcome = tune("train.tsv", table("one", "other", rows=rows), **options)
    assert outcome.evaluation["accuracy"] > 0.8


def test_answers(tune: Tune) -> None:
    questions = []
    for i, (noun, word) in enumerate((t, w) for t in THINGS for w in (*GOOD, *BAD)):
        context = f"road {noun} {word} cart"
        gold = {"text": word, "answer_start": context.index(word)}
        question = {"id": str(i), "question": "road", "answers": [gold]}
        questions.append({"context": context, "qas": [question]})
    squad = {"version": "1.1", "data": [{"title": "t", "paragraphs": questions}]}
    outcome = tune("train.json", json.dumps(squad), task="answer", steps=80)
    assert outcome.evaluation["exact_match"] > 90
    assert outcome.model is not None
    encoder = packhorse.load(outcome.model, device="cpu", dtype="fp32")
    assert encoder.answer([("road", "road mule nice cart")])[0][0].text == "nice"


def test_a_classifier_keeps_its_labels_or_gets_a_new_head(
    tune: Tune, tmp_path: Path, tiny: Path
) -> None:
    rows = [(text, label) for text, label, _ in phrases()]
    first = tune("train.tsv", table("sentence", "label", rows=rows), task="classify", steps=5)
    assert first.model is not None
    before = weights(first.model)["classifier.weight"]

    def begun(labels: list[str]) -> tuple[torch.Tensor, tuple[str, ...], tuple[str, ...]]:
        from packhorse.train.settings import TrainSettings

        labeled = [(text, label) for (text, *_), label in zip(phrases(), labels, strict=True)]
        (tmp_path / "other.tsv").write_text(table("sentence", "label", rows=labeled))
        data = str(tmp_path / "other.tsv")
        usual = {"task": "classify", "steps": 1, "device": "cpu"}
        job = assemble(TrainSettings(model=str(first.model), train=data, **usual))
        head = job.model.get_parameter("heads.classify.dense.weight").detach()
        return head, job.checkpoint.labels, job.notes

    same, labels, notes = begun([str(i % 2) for i in range(48)])  # numbers of the model's labels
    assert torch.equal(same, before) and labels == ("neg", "pos") and not notes
    new, labels, notes = begun([("a", "b", "c")[i % 3] for i in range(48)])
    assert new.shape[0] == 3 and labels == ("a", "b", "c")
    assert "heads.classify.dense.weight" in notes[0]


def test_what_does_not_fit_is_refused(tune: Tune) -> None:
    rows = [(text, label) for text, label, _ in phrases()]
    text = table("sentence", "label", rows=rows)
    for options, message in (
        ({"max_length": 4096}, "takes 48 tokens"),
        ({"layers": 7}, "layers is set to 7, but model has 2"),
        ({"eval": "nowhere.tsv"}, "nowhere.tsv"),
        ({"task": "similarity"}, "score|number"),
        ({"target": 0.5, "eval": ""}, "set eval"),
    ):
        with pytest.raises(InputError, match=message):
            tune("train.tsv", text, **{"task": "classify", **options})
    with pytest.raises(CheckpointError, match="nowhere"):
        tune("train.tsv", text, task="classify", model="./nowhere/at-all")
