"""A packed step of Trainer has the gradient of the padded one, for every task; controls do not."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from packhorse import hf
from packhorse.errors import InputError

Features = list[dict[str, Any]]
FAMILIES = ("bert", "roberta", "distilbert", "electra")
IGNORED = -100


@pytest.fixture(scope="module", autouse=True)
def _little_to_collect() -> Iterator[None]:
    """Every training of Trainer collects garbage: what is there already need not be looked at."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def label_tokens(sequences: Features) -> Features:
    """One label in five is no one's concern."""
    return [
        {**sequence, "labels": [IGNORED if i % 5 == 1 else i % 3 for i in sequence["input_ids"]]}
        for sequence in sequences
    ]


def mark_spans(sequences: Features) -> Features:
    lengths = [len(sequence["input_ids"]) for sequence in sequences]
    spans = [(n // 3, n - 1) for n in lengths]
    return [
        {**sequence, "start_positions": a, "end_positions": b}
        for sequence, (a, b) in zip(sequences, spans, strict=True)
    ]


def number(sequences: Features, labels: Sequence[Any]) -> Features:
    return [{**sequence, "labels": x} for sequence, x in zip(sequences, labels, strict=True)]


# By task: the auto class, its labels, what changes in the configuration.
TASKS: dict[str, tuple[str, Callable[[Features], Features], dict[str, Any]]] = {
    "classify": ("SequenceClassification", lambda x: number(x, [0, 2, 1, 1, 0, 2]), {}),
    "regress": (
        "SequenceClassification",
        lambda x: number(x, [0.3, 1.5, -2.0, 0.1, 4.0, 1.0]),
        {"num_labels": 1},
    ),
    "several": (
        "SequenceClassification",
        lambda x: number(x, torch.eye(3).repeat(2, 1).tolist()),
        {"problem_type": "multi_label_classification"},
    ),
    "tokens": ("TokenClassification", label_tokens, {}),
    "words": ("MaskedLM", lambda x: x, {}),
    "spans": ("QuestionAnswering", mark_spans, {}),
}


def make_task(make: Any, family: str, task: str) -> Any:
    kind, _, changes = TASKS[task]
    labels = 2 if task == "spans" else 3
    changes = {"num_labels": labels, "classifier_dropout": 0.0, **changes}
    return make(family, f"AutoModelFor{kind}", **changes).train()


def inner_collator(tokenizer: Any, task: str) -> Any:
    if task == "words":
        return transformers.DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.4, seed=7)
    if task == "tokens":
        return transformers.DataCollatorForTokenClassification(tokenizer)
    return transformers.DataCollatorWithPadding(tokenizer)


class Watch(transformers.TrainerCallback):
    """Copies the gradients of the first step."""

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        self.gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]


def trainer(
    model: Any, collator: Any, data: Features, folder: Path, batch: int, steps: int, **more: Any
) -> transformers.Trainer:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=batch,
        per_device_eval_batch_size=batch,
        gradient_accumulation_steps=steps,
        max_steps=1,
        max_grad_norm=0.0,
        seed=3,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    options = {"train_dataset": data, "data_collator": collator, **more}
    return transformers.Trainer(model, arguments, **options)


def step(
    model: Any, collator: Any, data: Features, folder: Path, batch: int = 4, steps: int = 1
) -> Tensor:
    """The gradient of one step of Trainer."""
    watch = Watch()
    trainer(model, collator, data, folder, batch, steps, callbacks=[watch]).train()
    return torch.cat([gradient.flatten() for gradient in watch.gradients])


def off_by(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("task", [task for task in TASKS if task != "spans"])
def test_a_step_has_the_padded_gradient(
    make, tokenizer, sequences: Features, tmp_path: Path, family: str, task: str
) -> None:
    data = TASKS[task][1](sequences)
    eager = make_task(make, family, task)
    expected = step(eager, inner_collator(tokenizer, task), data, tmp_path, batch=6)
    packed = make_task(make, family, task)
    collator = hf.PackedCollator(inner_collator(tokenizer, task), packed)
    assert off_by(step(packed, collator, data, tmp_path, batch=6), expected) < 1e-5


@pytest.mark.parametrize("task", ["classify", "words", "tokens"])
def test_accumulated_steps_are_averaged_as_padded_ones(
    make, tokenizer, sequences: Features, tmp_path: Path, task: str
) -> None:
    data = TASKS[task][1](sequences)
    eager, packed = (make_task(make, "bert", task) for _ in range(2))
    expected = step(eager, inner_collator(tokenizer, task), data, tmp_path, batch=2, steps=3)
    collator = hf.PackedCollator(inner_collator(tokenizer, task), packed)
    assert off_by(step(packed, collator, data, tmp_path, batch=2, steps=3), expected) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_a_span_competes_within_its_own_sequence(
    make, tokenizer, sequences: Features, tmp_path: Path, family: str
) -> None:
    data, inner = mark_spans(sequences), inner_collator(tokenizer, "spans")
    # One sequence a batch has no padding, so transformers' own loss is that of the sequences.
    expected = step(make_task(make, family, "spans"), inner, data, tmp_path, batch=1, steps=6)
    packed = make_task(make, family, "spans")
    actual = step(packed, hf.PackedCollator(inner, packed), data, tmp_path, batch=6)
    assert off_by(actual, expected) < 1e-5
    padded = step(make_task(make, family, "spans"), inner, data, tmp_path, batch=6)
    assert off_by(padded, expected) > 1e-3  # there, padding takes part


def test_a_span_outside_its_sequence_is_ignored(make, tokenizer, sequences: Features) -> None:
    model = make_task(make, "bert", "spans")
    collator = hf.PackedCollator(tokenizer, model)
    data = mark_spans(sequences)
    expected = model(**collator(data[1:])).loss
    data[0]["start_positions"] = data[0]["end_positions"] = 20  # it has 5 tokens
    assert torch.allclose(model(**collator(data)).loss, expected)


def test_controls_have_another_gradient(
    make, tokenizer, sequences: Features, tmp_path: Path
) -> None:
    eager = make_task(make, "roberta", "words")
    expected = step(eager, inner_collator(tokenizer, "words"), sequences, tmp_path, batch=6)

    def broken(*, drop: Sequence[str] = (), shift: int = 0, merge: bool = False) -> float:
        packed = make_task(make, "roberta", "words")
        collator = hf.PackedCollator(inner_collator(tokenizer, "words"), packed)

        def collate(features: Features) -> dict[str, Any]:
            batch = {k: v for k, v in collator(features).items() if k not in drop}
            if merge:
                ends = torch.tensor([0, batch["input_ids"].numel()], dtype=torch.int32)
                batch |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
            return {**batch, "position_ids": batch["position_ids"] - shift}

        return off_by(step(packed, collate, sequences, tmp_path, batch=6), expected)

    assert broken() < 1e-5
    assert broken(drop=["cu_seq_lens_q", "cu_seq_lens_k"]) < 1e-5  # position ids tell the same
    assert broken(merge=True) > 1e-2  # sequences see each other
    assert broken(shift=2) > 1e-2  # positions as BERT counts them


def test_predictions_come_in_the_shapes_of_padded_ones(
    make, tokenizer, sequences: Features, tmp_path: Path
) -> None:
    for task in ("classify", "tokens"):
        data = TASKS[task][1](sequences)
        eager, packed = (make_task(make, "bert", task) for _ in range(2))
        inner = inner_collator(tokenizer, task)
        expected = trainer(eager, inner, data, tmp_path, 4, 1).predict(data)
        actual = trainer(packed, hf.PackedCollator(inner, packed), data, tmp_path, 4, 1).predict(
            data
        )
        real = expected.label_ids != IGNORED
        assert actual.predictions.shape == expected.predictions.shape
        assert abs(actual.predictions[real] - expected.predictions[real]).max() < 1e-5
        assert (actual.label_ids == expected.label_ids).all()
        assert actual.metrics["test_loss"] == pytest.approx(expected.metrics["test_loss"], rel=1e-5)


def test_pretraining_heads_stay_flat_and_pool_every_sequence(
    make, tokenizer, sequences: Features
) -> None:
    data = [
        {**features, "next_sentence_label": i % 2}
        for i, features in enumerate(label_tokens(sequences))
    ]
    eager, packed = (make("bert", "AutoModelForPreTraining") for _ in range(2))
    inner = transformers.DataCollatorForTokenClassification(tokenizer)
    batch = hf.PackedCollator(inner, packed)(data)
    expected, actual = eager(**inner(data)), packed(**batch)
    assert torch.allclose(actual.loss, expected.loss, rtol=1e-5)
    assert actual.prediction_logits.shape[:2] == batch["labels"].shape == (1, 96)
    assert torch.allclose(
        actual.seq_relationship_logits, expected.seq_relationship_logits, atol=1e-5
    )


def test_what_a_batch_holds(make, tokenizer, sequences: Features) -> None:
    model = make_task(make, "roberta", "tokens")
    collator = pickle.loads(pickle.dumps(hf.PackedCollator(tokenizer, model)))  # as workers get it
    data = label_tokens([{**x, "token_type_ids": [0] * len(x["input_ids"])} for x in sequences[:3]])
    batch = collator(data)
    assert batch["input_ids"].tolist() == [[*chain.from_iterable(x["input_ids"] for x in data)]]
    assert batch["position_ids"].tolist() == [[*range(2, 7), *range(2, 19), *range(2, 5)]]
    assert batch["cu_seq_lens_q"].tolist() == [0, 5, 22, 25]
    assert batch["cu_seq_lens_q"].dtype == torch.int32 and batch["max_length_q"] == 17
    assert batch["labels"].shape == (3, 17) and batch["token_type_ids"].shape == (1, 25)
    left_tokenizer = pickle.loads(pickle.dumps(tokenizer))
    left_tokenizer.padding_side = "left"
    inner = transformers.DataCollatorForTokenClassification(left_tokenizer, pad_to_multiple_of=16)
    left_padded = hf.PackedCollator(inner, model)(data)
    assert all(
        torch.equal(torch.as_tensor(left_padded[k]), torch.as_tensor(batch[k])) for k in batch
    )


FORMS: dict[str, Callable[[Any], Any]] = {
    "lists": lambda values: values,
    "arrays": np.asarray,
    "tensors": torch.tensor,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("task", [task for task in TASKS if task != "words"])
def test_laid_end_to_end_it_is_what_padding_and_taking_it_out_gives(
    make, tokenizer, sequences: Features, task: str, family: str, form: str
) -> None:
    model, data = make_task(make, family, task), TASKS[task][1](sequences)
    expected = hf.PackedCollator(inner_collator(tokenizer, task), model)(data)
    collator = hf.PackedCollator(tokenizer, model)
    shaped = [{name: FORMS[form](values) for name, values in features.items()} for features in data]
    padded = [filled(features, task, 40, tokenizer.pad_token_id) for features in data]
    for inputs in (shaped, padded):
        actual = collator(inputs)
        assert actual.keys() == expected.keys()
        for name, values in expected.items():
            assert torch.equal(torch.as_tensor(actual[name]), torch.as_tensor(values)), name
    reordered = collator([padded[1], padded[0], *padded[2:]])  # control: another order
    assert not torch.equal(reordered["input_ids"], expected["input_ids"])


def filled(features: dict[str, Any], task: str, width: int, padding: int) -> dict[str, Any]:
    """As a tokenizer with padding="max_length" makes it."""
    real = len(features["input_ids"])
    fill = {"input_ids": padding, "labels": IGNORED}

    features = {"attention_mask": [1] * real, **features}
    per_token = {name for name in features if name.endswith(("_ids", "_mask"))}
    if task == "tokens":
        per_token.add("labels")
    return {
        name: values + [fill.get(name, 0)] * (width - real) if name in per_token else values
        for name, values in features.items()
    }


def test_what_a_collator_refuses(make, tokenizer, sequences: Features) -> None:
    model = make_task(make, "bert", "classify")
    empty = {
        "input_ids": torch.ones(2, 3).long(),
        "attention_mask": torch.tensor([[1, 1, 1], [0, 0, 0]]),
    }
    for inner, message in [
        (lambda features: {"input_ids": empty["input_ids"]}, "no attention_mask"),
        (lambda features: dict(empty), "sequence 1 has no tokens"),
        (lambda features: {**empty, "attention_mask": torch.ones(2)}, "one row per sequence"),
    ]:
        with pytest.raises(InputError, match=message):
            hf.PackedCollator(inner, model)(sequences)
    with pytest.raises(InputError, match="sequence 0 has no tokens"):
        hf.PackedCollator(tokenizer, model)([{"input_ids": [], "labels": 0}])
    for column in (["a", "b"], [[1], [2, 3]], [None, 1]):
        data = [{"input_ids": [5], "note": value} for value in column]
        with pytest.raises(InputError, match="'note' is not a column of numbers"):
            hf.PackedCollator(tokenizer, model)(data)
    with pytest.raises(InputError, match="BertForMultipleChoice has a head that Packhorse"):
        hf.PackedCollator(tokenizer, make("bert", "AutoModelForMultipleChoice"))
    pooled = {"classifier_pooling": "mean"}
    with pytest.raises(InputError, match="classifier_pooling='mean'"):
        hf.packed(make("modernbert", "AutoModelForSequenceClassification", **pooled))


def test_a_model_whose_attention_was_changed_back_is_caught(
    make, tokenizer, sequences: Features
) -> None:
    model = make_task(make, "bert", "words")
    batch = hf.PackedCollator(tokenizer, model)(label_tokens(sequences))
    model.set_attn_implementation("sdpa")
    with pytest.raises(InputError, match='implementation to "packhorse" again'):
        model(**batch)
    hf.packed(hf.packed(model))
    assert model(**batch).loss > 0
    with pytest.raises(InputError, match="return_dict=True"):
        model.bert(**{k: v for k, v in batch.items() if k != "labels"}, return_dict=False)
