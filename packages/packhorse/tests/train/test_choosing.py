"""Multiple choice: transformers' loss on the same batch, its model, and whole runs."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from packhorse import checkpoint
from packhorse.checkpoint import names
from packhorse.data.tasks import targets
from packhorse.data.tasks.choices import read_choices
from packhorse.errors import InputError
from packhorse.train.job import assemble
from packhorse.train.loop import train
from packhorse.train.objectives import Choose
from packhorse.train.settings import TrainSettings

NOUNS = ("horse", "mule", "cart", "road")


def swag(path: Path, number: int = 16) -> Path:
    """The right ending repeats the first word."""
    rows = []
    for i in range(number):
        order = [NOUNS[(i + j) % 4] for j in range(3)]
        right = i % 3
        word = order[right]
        row = {"sent1": f"{word} good" + " w1" * (i % 4), "sent2": "nice", "label": right}
        rows.append(row | {f"ending{j}": f"{noun} fine" for j, noun in enumerate(order)})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_loss_and_gradients_are_those_of_transformers(tiny: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=48,
        num_labels=1,
        initializer_range=0.2,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    reference = transformers.BertForMultipleChoice(config).double().eval()
    reference.save_pretrained(tmp_path / "model")
    raw = json.loads((tmp_path / "model/config.json").read_text())
    raw |= {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "choice"}}
    (tmp_path / "model/config.json").write_text(json.dumps(raw))
    read = read_choices(swag(tmp_path / "a.jsonl", 6))
    words = transformers.BertTokenizerFast(str(tiny / "vocab.txt"))
    flat = [pair for pairs in read.pairs for pair in pairs]
    padded = words([a for a, _ in flat], [b for _, b in flat], padding=True, return_tensors="pt")
    padded = {name: tensor.view(6, 3, -1) for name, tensor in padded.items()}
    loss = reference(**padded, labels=torch.tensor(read.right)).loss
    loss.backward()
    task = targets.choice_task(read, checkpoint.tokenizer(checkpoint.load(tiny)))
    model = checkpoint.load(tmp_path / "model", dtype=torch.float64).model
    for parts in (1, 3):
        model.zero_grad()
        batches = list(targets.TaskLoader(task, examples=6, epochs=1, shuffle=False, parts=parts))
        totals = torch.stack([Choose().weigh(batch) for batch in batches]).sum(0)
        losses = [Choose().loss(model, batch, totals)[0] for batch in batches]
        for part in losses:
            part.backward()
        assert sum(part.item() for part in losses) == pytest.approx(loss.item(), rel=1e-10)
        table = names.table(names.BERT)
        theirs = {n: p.grad for n, p in reference.named_parameters()}
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                expected = torch.cat([theirs[part] for part in names.sources(name, table)])
                assert torch.allclose(parameter.grad, expected, rtol=1e-8, atol=1e-11), name
    # The control: the choices of an example apart from each other.
    (batch,) = targets.TaskLoader(task, examples=6, epochs=1, shuffle=False)
    logits = model(batch.packed, "classify")[0].view(3, 6).T
    assert abs(torch.nn.functional.cross_entropy(logits, batch.targets) - loss) > 1e-3


@pytest.fixture
def of(tiny: Path, tmp_path: Path) -> Callable[..., TrainSettings]:
    data = str(swag(tmp_path / "swag.jsonl"))
    usual = {"task": "choose", "model": str(tiny), "train": data, "eval": data, "device": "cpu"}
    usual |= {"batch": 8, "steps": 60, "learning_rate": 5e-3, "compile": "off", "dropout": 0.0}
    return lambda **options: TrainSettings(**{**usual, **options})


def test_a_run_whose_model_transformers_opens(of: Any, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    outcome = train(assemble(of()), tmp_path / "run")
    assert outcome.evaluation["accuracy"] > 0.8 and outcome.model is not None
    kind = transformers.AutoModelForMultipleChoice
    reference, loading = kind.from_pretrained(outcome.model, output_loading_info=True)
    assert not loading["missing_keys"]
    words = transformers.AutoTokenizer.from_pretrained(outcome.model)
    read = read_choices(tmp_path / "swag.jsonl")
    hits = 0
    for pairs, right in zip(read.pairs, read.right, strict=True):
        first, second = zip(*pairs, strict=True)
        inputs = words(list(first), list(second), padding=True, return_tensors="pt")
        with torch.no_grad():
            scores = reference.eval()(**{n: t[None] for n, t in inputs.items()}).logits[0]
        hits += int(scores.argmax()) == right
    assert hits / len(read.right) == pytest.approx(outcome.evaluation["accuracy"])


def test_a_run_that_was_stopped_goes_on_to_the_bit(of: Any, tmp_path: Path) -> None:
    settings = of(steps=6, dropout=0.1, micro_tokens=60, eval_every=2)
    train(assemble(settings), tmp_path / "whole")
    for steps in (2, 2):
        calls = count()
        wish = lambda calls=calls, steps=steps: signal.SIGTERM if next(calls) >= steps else 0  # noqa: E731
        train(assemble(settings), tmp_path / "cut", stop_signal=wish)
    assert train(assemble(settings), tmp_path / "cut").step == 6
    for name in ("model/model.safetensors", "log.jsonl"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.parametrize(
    ("row", "pairs", "right"),
    [
        (
            {"ctx": "a", "endings": ["b", "c"], "label": "1"},
            (("a", "b"), ("a", "c")),
            1,
        ),
        (
            {"article": "a", "question": "q", "options": ["b", "c"], "answer": "B"},
            (("a", "q b"), ("a", "q c")),
            1,
        ),
        (
            {
                "question": "q",
                "choices": {"label": ["A", "B"], "text": ["b", "c"]},
                "answerKey": "A",
            },
            (("q", "b"), ("q", "c")),
            0,
        ),
        (
            {
                "question": "q",
                "choices": {"label": ["1", "2", "3"], "text": ["b", "c", "d"]},
                "answerKey": "2",
            },
            (("q", "b"), ("q", "c"), ("q", "d")),
            1,
        ),
    ],
)
def test_the_forms_of_known_sets(
    tmp_path: Path, row: dict[str, Any], pairs: tuple[Any, ...], right: int
) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    read = read_choices(tmp_path / "a.jsonl")
    assert read.pairs == [pairs] and read.right == [right]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"ctx": "a", "endings": ["b"], "label": 0}], "1 choices; there must be two or more"),
        ([{"ctx": "a", "endings": ["b", "c"], "label": 2}], "a number from 0 to 1 or a letter"),
        ([{"ctx": "a", "endings": ["b", "c"]}], "the right choice is ''"),
        ([{"ctx": "a", "endings": ["b", 3], "label": 0}], "3 is not a text"),
        ([{"ctx": "a", "label": 0}], "a text and its choices"),
        (
            [
                {"ctx": "a", "endings": ["b", "c"], "label": 0},
                {"ctx": "a", "endings": ["b", "c", "d"], "label": 0},
            ],
            "3 choices; there must be 2",
        ),
        ([], "holds no rows"),
    ],
)
def test_what_is_refused(tmp_path: Path, rows: list[dict[str, Any]], message: str) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(InputError, match=message):
        read_choices(tmp_path / "a.jsonl")
