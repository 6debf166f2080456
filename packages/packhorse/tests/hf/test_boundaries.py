"""A flat batch answers as each text alone, however it tells where texts end; or it is refused."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from packhorse import hf
from packhorse.errors import InputError
from packhorse.hf.families import AFTER_PADDING
from packhorse.hf.layout import AddBoundaries, boundaries_of_positions

Batch = dict[str, Any]
Features = list[dict[str, list[int]]]


def first_position(family: str) -> int:
    return 2 if AFTER_PADDING[family] else 0  # the padding id is 1


@pytest.fixture
def flatten(sequences: Features) -> Any:
    """The sequences laid flat by transformers' own collator."""
    import transformers

    def flatten(start: int = 0, **options: Any) -> Batch:
        ids = [{"input_ids": sequence["input_ids"]} for sequence in sequences]
        batch = dict(transformers.DataCollatorWithFlattening(**options)(ids))
        batch.pop("labels")
        if "position_ids" in batch:
            batch["position_ids"] += start  # `position_ids_start` is younger than the collator
        return batch

    return flatten


def far(actual: torch.Tensor, expected: torch.Tensor) -> float:
    assert actual.shape == expected.shape
    return float((actual - expected).detach().norm() / expected.detach().norm())


def gradient(model: Any, outputs: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    outputs.square().sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def alone(model: Any, sequences: Features) -> torch.Tensor:
    """[T, E] of each sequence run by itself, numbered by the model."""
    batches = [torch.tensor([sequence["input_ids"]]) for sequence in sequences]
    return torch.cat([model(input_ids=ids)[0][0] for ids in batches])


@pytest.mark.parametrize("family", AFTER_PADDING)
def test_every_family_answers_as_each_text_alone(
    make, sequences: Features, flatten, family: str
) -> None:
    hf.register()
    eager, packed = make(family, attention="eager"), make(family, attention="packhorse")
    expected = alone(eager, sequences)
    slope = gradient(eager, expected)
    for options in ({}, {"return_flash_attn_kwargs": True}):
        batch = flatten(first_position(family), **options)
        assert ("cu_seq_lens_q" in batch) == bool(options)
        actual = packed(**batch)[0][0]
        assert far(actual, expected) <= 1e-5
        assert far(gradient(packed, actual), slope) <= 1e-5
    # Without the boundaries, which is what a plain attention sees, texts are mixed.
    mixed = eager(**flatten(first_position(family)))[0][0]
    assert far(mixed, expected) > 1e-3


def test_positions_from_zero_stay_what_the_collator_made_them(
    make, sequences: Features, flatten
) -> None:
    """RoBERTa counts from after its padding id; a batch that does not is kept as it is."""
    eager, packed = make("roberta", attention="eager"), hf.packed(make("roberta"))
    batches = [torch.tensor([sequence["input_ids"]]) for sequence in sequences]
    numbered = [(ids, torch.arange(ids.shape[1])[None]) for ids in batches]
    expected = [eager(input_ids=ids, position_ids=places)[0][0] for ids, places in numbered]
    rows = packed(**flatten())[0]  # a prepared model lays its answers in rows
    for row, states in zip(rows, expected, strict=True):
        assert far(row[: len(states)], states) <= 1e-5


def test_positions_are_seen_however_they_are_passed(make, sequences: Features, flatten) -> None:
    hf.register()
    expected, batch = alone(make("bert", attention="eager"), sequences), flatten()
    ids, positions = batch["input_ids"], batch["position_ids"]
    changed = make("bert")
    changed.set_attn_implementation("packhorse")
    for model in (changed, copy.deepcopy(changed), pickle.loads(pickle.dumps(changed))):
        assert far(model(ids, None, None, positions)[0][0], expected) <= 1e-5
        assert far(model(ids, torch.ones_like(ids), position_ids=positions)[0][0], expected) <= 1e-5
        assert [type(hook) for hook in model._forward_pre_hooks.values()] == [AddBoundaries]
    changed.set_attn_implementation("sdpa")
    assert far(changed(ids, position_ids=positions)[0][0], expected) > 1e-3


def test_a_config_changed_by_hand_mixes_nothing(make, sequences: Features, flatten, padded) -> None:
    """Written into the config, our attention comes without the hook that reads position ids."""
    hf.register()
    expected, batch = alone(make("bert", attention="eager"), sequences), flatten()
    model = make("bert", attention="eager")
    model.config._attn_implementation = "packhorse"
    for unread in (batch, padded):
        with pytest.raises(InputError, match=r"by its config alone.*set_attn_implementation"):
            model(**unread)
    told = flatten(return_flash_attn_kwargs=True)
    assert far(model(**told)[0][0], expected) <= 1e-5
    for prepare in (lambda model: model.set_attn_implementation("packhorse"), hf.packed):
        model = make("bert", "AutoModelForMaskedLM", attention="eager")
        scores = alone(model, sequences)
        model.config._attn_implementation = "packhorse"
        prepare(model)
        assert far(model(**batch).logits[0], scores) <= 1e-5


def test_a_model_that_shares_its_config_with_ours_mixes_nothing(make, flatten) -> None:
    hf.register()
    model = make("bert", attention="eager")
    twin = type(model)(model.config)
    model.set_attn_implementation("packhorse")
    assert twin.config is model.config
    with pytest.raises(InputError, match="by its config alone"):
        twin(**flatten())


def test_a_head_tells_its_encoder(make, sequences: Features, flatten) -> None:
    hf.register()
    eager = make("bert", "AutoModelForMaskedLM", attention="eager")
    packed = make("bert", "AutoModelForMaskedLM", attention="packhorse")
    states, batch = alone(eager, sequences), flatten()
    assert far(packed(**batch).logits[0], states) <= 1e-5
    labels = batch["input_ids"]
    expected = torch.nn.functional.cross_entropy(states, labels[0])
    assert torch.allclose(packed(**batch, labels=labels).loss, expected, atol=1e-5)


def test_rows_without_a_mask_are_a_sequence_each(make, sequences: Features) -> None:
    hf.register()
    eager, packed = make("bert", attention="eager"), make("bert", attention="packhorse")
    ids = torch.tensor(
        [sequence["input_ids"] for sequence in sequences if len(sequence["input_ids"]) == 30]
    )
    for positions in (None, torch.arange(30)[None], torch.arange(3, 33).expand(2, -1)):
        batch = {"input_ids": ids, "position_ids": positions}
        assert far(packed(**batch)[0], eager(**batch)[0]) <= 1e-5


def test_padded_rows_may_be_numbered_in_every_way(make, padded: Batch) -> None:
    hf.register()
    eager, packed = make("roberta", attention="eager"), make("roberta", attention="packhorse")
    mask = padded["attention_mask"]
    by_model = mask.cumsum(1) * mask + 1  # padding stays at its id
    for positions in (by_model, torch.arange(2, 2 + mask.shape[1])[None]):
        batch = {**padded, "position_ids": positions}
        real = mask.bool()
        assert far(packed(**batch)[0][real], eager(**batch)[0][real]) <= 1e-5


def test_a_ready_made_mask_of_ones_is_refused_too(make, flatten) -> None:
    """What it says of the texts in a row is not what their positions say."""
    model, batch = hf.packed(make("bert")), flatten()
    columns = batch["input_ids"].shape[1]
    with pytest.raises(InputError, match="ready-made mask"):
        model(**batch, attention_mask=torch.ones(1, columns, columns, dtype=torch.long))


REFUSED: dict[str, tuple[str, Batch, str]] = {
    "a gap": ("bert", {"position_ids": [[0, 1, 2, 4, 5]]}, r"at token 3 \(2, then 4\)"),
    "back to another": ("bert", {"position_ids": [[0, 1, 2, 1, 2]]}, "nor return to 0 at token 3"),
    "padding without a mask": (
        "roberta",
        {"position_ids": [[2, 3, 4, 1, 1]]},
        "pass cu_seq_lens_q",
    ),
    "padding comes first": (
        "roberta",
        {"position_ids": [[1, 1, 2, 3, 4]]},
        r"begin with 1, which this model keeps for padding.*position_ids_start=2",
    ),
    "several rows": (
        "bert",
        {"position_ids": [[0, 1, 2, 0, 1]], "input_ids": [[5] * 5] * 2},
        "restart within the rows of a batch of 2; lay all sequences in one row",
    ),
    "a mask with padding": (
        "bert",
        {"position_ids": [[0, 1, 0, 1, 2]], "attention_mask": [[1, 1, 1, 1, 0]]},
        "restart although an attention_mask marks padding",
    ),
    "numbered sequences": ("bert", {"seq_idx": [[0, 0, 1, 1, 1]]}, "there are no position_ids"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_stays_ambiguous_is_refused(make, case: str) -> None:
    hf.register()
    family, batch, message = REFUSED[case]
    batch = {"input_ids": [[5, 6, 7, 8, 9]], **batch}
    with pytest.raises(InputError, match=message):
        make(family, attention="packhorse")(**{k: torch.tensor(v) for k, v in batch.items()})


def test_a_model_that_takes_no_positions(make, flatten) -> None:
    hook = AddBoundaries(("input_ids", "attention_mask"), open_ended=True)
    with pytest.raises(InputError, match="BertModel takes no position_ids"):
        hook(hf.packed(make("bert")), (), flatten())


def test_boundaries_of_positions() -> None:
    for positions, bounds in [
        ([[0, 1, 2, 3]], None),
        ([[7, 8, 9]], None),
        ([[5]], None),
        ([[0, 1, 0, 0, 1, 2]], [0, 2, 3, 6]),
        ([[2, 3, 2, 3, 4]], [0, 2, 5]),
        ([[0, 0, 0]], [0, 1, 2, 3]),
    ]:
        actual = boundaries_of_positions(torch.tensor(positions))
        assert (None if actual is None else actual.tolist()) == bounds
        assert actual is None or actual.dtype == torch.int32


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch's own, in tracing
def test_a_traced_model_is_reported_too(make, sequences: Features, flatten) -> None:
    hf.register()
    expected = alone(make("bert", attention="eager"), sequences)
    traced = torch.compile(make("bert", attention="packhorse"), backend="eager")
    assert far(traced(**flatten())[0][0], expected) <= 1e-5
