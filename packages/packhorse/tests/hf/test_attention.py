"""transformers' encoders over our kernels answer as over their own, padded and flat, or refuse."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from packhorse import hf
from packhorse.attention.reference import Reference
from packhorse.errors import InputError, MissingExtra
from packhorse.hf.attention import attend
from packhorse.hf.families import AFTER_PADDING
from packhorse.hf.layout import layout_of_boundaries

Batch = dict[str, Any]
FLAT = ("cu_seq_lens_q", "cu_seq_lens_k")


def close(actual: torch.Tensor, expected: torch.Tensor, limit: float = 1e-5) -> bool:
    return bool((actual - expected).norm() <= limit * expected.norm())


def on_the_left(padded: Batch) -> Batch:
    mask = padded["attention_mask"].flip(1)
    shifts = (1 - mask).sum(1).tolist()
    turned = [row.roll(n) for row, n in zip(padded["input_ids"], shifts, strict=True)]
    return {"input_ids": torch.stack(turned), "attention_mask": mask}


def with_a_hole(padded: Batch) -> Batch:
    mask = padded["attention_mask"].clone()
    mask[:, 2] = 0
    mask[3, 9:13] = 0
    mask[4] = 0  # nothing is left of this one
    return {**padded, "attention_mask": mask}


@pytest.fixture
def flat(make, padded: Batch) -> Batch:
    return hf.PackedCollator(lambda features: padded, make("bert"))([])


@pytest.mark.parametrize("family", AFTER_PADDING)
@torch.no_grad()
def test_every_family_answers_as_over_its_own_attention(make, padded: Batch, family: str) -> None:
    eager, packed = make(family), make(family)
    collator = hf.PackedCollator(lambda features: padded, packed)
    assert packed.config._attn_implementation == "packhorse"
    odd = [] if family == "modernbert" else [with_a_hole(padded)]
    for batch in (padded, on_the_left(padded), *odd):
        real = batch["attention_mask"].bool()
        assert close(packed(**batch)[0][real], eager(**batch)[0][real])
    full = {"input_ids": padded["input_ids"].clamp(5)}
    assert close(packed(**full)[0], eager(**full)[0])

    real, expected, batch = padded["attention_mask"].bool(), eager(**padded), collator([])
    actual = packed(**batch, output_hidden_states=True)
    assert actual[0].shape == expected[0].shape and not actual[0][~real].any()
    assert close(actual[0][real], expected[0][real])
    assert actual.hidden_states[0].shape == expected[0].shape
    if expected.get("pooler_output") is not None:
        assert close(actual.pooler_output, expected.pooler_output)

    untold = {name: x for name, x in batch.items() if name not in FLAT}
    assert torch.equal(packed(**untold)[0], actual[0])  # position ids tell the same boundaries
    assert not close(eager(**untold)[0][0], expected[0][real], 1e-3)  # as one sequence


@torch.no_grad()
def test_a_family_that_mixes_tokens_elsewhere_needs_to_stay_outside(
    make, padded: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager, packed = make("mobilebert"), make("mobilebert")
    with pytest.raises(InputError, match="'mobilebert' cannot be replaced; Packhorse supports"):
        hf.packed(packed)
    monkeypatch.setitem(AFTER_PADDING, "mobilebert", False)
    real = padded["attention_mask"].bool()
    actual = packed(**hf.PackedCollator(lambda features: padded, packed)([]))
    assert not close(actual[0][real], eager(**padded)[0][real], 1e-3)  # a convolution over tokens


def test_a_batch_is_planned_once(make, flat: Batch, padded: Batch, monkeypatch) -> None:
    planned = []
    plan = Reference.plan
    monkeypatch.setattr(Reference, "plan", lambda *a: planned.append(a) or plan(*a))
    model = hf.packed(make("bert"))
    for batch in (flat, padded, flat):
        model(**batch)
    assert len(planned) == 2  # two layers, and the first batch came twice
    flat["cu_seq_lens_q"].copy_(flat["cu_seq_lens_q"].clone())
    model(**flat)
    assert len(planned) == 3  # it may have changed: read again


def test_boundaries_changed_in_place_are_seen(make, padded: Batch, flat: Batch) -> None:
    model = hf.packed(make("bert"))
    before = model(**flat).pooler_output
    flat["cu_seq_lens_q"][1] -= 1
    flat["cu_seq_lens_k"] = flat["cu_seq_lens_q"]
    assert not close(model(**flat).pooler_output, before, 1e-3)
    with torch.inference_mode():  # where changes are not counted
        bounds = flat["cu_seq_lens_q"].clone()
        arguments = {**flat, "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
        changed = model(**arguments).pooler_output
        bounds[1] += 1
        assert close(model(**arguments).pooler_output, before)
        assert not close(changed, before, 1e-3)


def gradients(model: Any, batch: Batch) -> torch.Tensor:
    model.zero_grad()
    mask = padded_mask(batch)
    (model(**batch)[0] * mask).square().mean().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def padded_mask(batch: Batch) -> torch.Tensor | float:
    return batch["attention_mask"].unsqueeze(-1) if "attention_mask" in batch else 1.0


@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_gradients_padded_flat_and_checkpointed(make, padded: Batch, family: str) -> None:
    expected = gradients(make(family, attention="eager").train(), padded)
    model = make(family).train()
    batch = hf.PackedCollator(lambda features: padded, model)([])
    assert close(gradients(model, padded), expected)
    assert close(gradients(model, batch), expected)
    model.gradient_checkpointing_enable()
    assert close(gradients(model, batch), expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch's own, in tracing
def test_a_traced_model_calls_our_attention(make, padded: Batch) -> None:
    model = make("bert").train()
    batch = hf.PackedCollator(lambda features: padded, model)([])
    expected = gradients(model, batch)
    assert close(gradients(torch.compile(model, backend="eager"), batch), expected)


def test_attention_dropout_and_autocast(make, flat: Batch) -> None:
    model = hf.packed(make("bert", attention_probs_dropout_prob=0.3))
    calm = model(**flat)[0]
    model.train()
    torch.manual_seed(1)
    first, second = model(**flat)[0], model(**flat)[0]
    torch.manual_seed(1)
    assert torch.equal(model(**flat)[0], first) and not torch.equal(first, second)
    assert not close(first, calm, 1e-2)
    with torch.autocast("cpu", torch.bfloat16):
        half = model.eval()(**flat)[0]
    assert close(half.float(), calm, 0.05) and not torch.equal(half, calm)


def test_a_scale_of_its_own(rng) -> None:
    q, k, v = (torch.tensor(rng.normal(size=(1, 2, 9, 4))) for _ in range(3))
    bounds = torch.tensor([0, 4, 9], dtype=torch.int32)
    out, none = attend(torch.nn.Identity(), q, k, v, None, scaling=0.1, cu_seq_lens_q=bounds)
    scores = (q @ k.transpose(-1, -2))[:, :, :4, :4] * 0.1
    assert close(out[:, :4], (scores.softmax(-1) @ v[:, :, :4]).transpose(1, 2))
    assert none is None


@pytest.mark.parametrize(
    ("family", "changes"), [("gpt2", {"n_embd": 32, "n_head": 2}), ("bert", {"is_decoder": True})]
)
def test_causal_models_are_refused(make, padded: Batch, family: str, changes: Batch) -> None:
    hf.register()
    model = make(family, attention="packhorse", **changes)
    with pytest.raises(InputError, match="causal"):
        model(**padded)
    with pytest.raises(InputError, match=r"is causal: Packhorse packs encoders"):
        hf.PackedCollator(lambda features: padded, model)


def test_attention_that_is_no_encoders_is_refused(make, padded: Batch, flat: Batch) -> None:
    model = hf.packed(make("bert"))
    rows, columns = padded["input_ids"].shape
    ready = torch.ones(rows, 1, columns, columns, dtype=torch.bool)
    with pytest.raises(InputError, match="ready-made mask"):
        model(padded["input_ids"], attention_mask=ready)
    with pytest.raises(InputError, match="probabilities are not computed"):
        model(**flat, output_attentions=True)
    crossed = make("bert", attention="packhorse", is_decoder=True, add_cross_attention=True)
    with pytest.raises(InputError, match=r"causal|cross"):
        crossed(**padded, encoder_hidden_states=torch.zeros(rows, 7, 32))
    q, short = torch.zeros(1, 2, 5, 4), torch.zeros(1, 2, 3, 4)
    with pytest.raises(InputError, match="keys of another shape than its queries"):
        attend(torch.nn.Identity(), q, short, short, None)
    with pytest.raises(InputError, match="a window and a mask with holes"):
        hf.packed(make("modernbert"))(**with_a_hole(padded))
    with pytest.raises(InputError, match="position_bias"):
        attend(torch.nn.Identity(), q, q, q, None, position_bias=q)
    with pytest.raises(InputError, match="Identity cannot tell whether a row"):
        attend(torch.nn.Identity(), q, q, q, None)


def test_boundaries_that_do_not_fit_are_refused(make, padded: Batch, flat: Batch) -> None:
    model = hf.packed(make("bert"))
    bounds = flat.pop("cu_seq_lens_q")
    for wrong, message in [
        (bounds[:-1], "is for 66 tokens, but the batch has 96"),
        (bounds + 1, "begin at 0"),
        (bounds.flip(0), "begin at 0"),
        (bounds.float(), "a flat tensor of integers"),
        (bounds[None], "a flat tensor of integers"),
    ]:
        with pytest.raises(InputError, match=message):
            model(**{**flat, "cu_seq_lens_q": wrong, "cu_seq_lens_k": wrong})
    with pytest.raises(InputError, match="differ: cross attention"):
        model(**{**flat, "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds + 1})
    with pytest.raises(InputError, match="leave attention_mask out"):
        model(**padded, cu_seq_lens_q=bounds)
    with pytest.raises(InputError, match="must begin at 0"):
        layout_of_boundaries(torch.zeros(1, dtype=torch.int32), 0)


def test_models_whose_attention_cannot_be_replaced(make, padded: Batch) -> None:
    hf.register()
    message = "attention of 'mpnet' cannot be replaced; Packhorse supports albert, bert"
    model = make("mpnet", attention="packhorse")
    with pytest.raises(InputError, match=message):  # else its own code would misread our mask
        model(**padded)
    with pytest.raises(InputError, match=message):
        hf.packed(model)
    with pytest.raises(InputError, match="Linear is not a model of transformers"):
        hf.packed(torch.nn.Linear(2, 2))  # pyright: ignore[reportArgumentType]


def test_a_transformers_that_is_missing_or_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "4.57.6")
    with pytest.raises(InputError, match=r"transformers 4\.57\.6 .* install transformers>=5"):
        hf.register()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtra, match=r"packhorse\[hf\]"):
        hf.register()
