"""Packed equals padded: outputs and gradients against transformers, on random models.

For random sizes, activations and lengths, a model of transformers is saved, opened here, and both
see the same sequences: padded there, packed here, under every kernel that runs on a CPU.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from packhorse import attention, checkpoint
from packhorse.checkpoint import names
from packhorse.model.model import Model
from packhorse.packing.batch import Packed
from packhorse.runtime import batches

pytestmark = pytest.mark.machine

CPU = torch.device("cpu")
KERNELS = [name for name in attention.KERNELS if name not in ("fused", "varlen")]

# Class of transformers, our head, the outputs of theirs that it answers to.
CASES = {
    "hidden": ("BertModel", "hidden", "last_hidden_state"),
    "pooled": ("BertModel", "pooled", "pooler_output"),
    "mlm": ("BertForPreTraining", "mlm", "prediction_logits"),
    "nsp": ("BertForPreTraining", "nsp", "seq_relationship_logits"),
    "span": ("BertForQuestionAnswering", "span", ("start_logits", "end_logits")),
    "classify": ("BertForSequenceClassification", "classify", "logits"),
    "tokens": ("BertForTokenClassification", "tokens", "logits"),
}


class FakeSequence(NamedTuple):
    ids: np.ndarray
    types: np.ndarray


class Sizes(NamedTuple):
    layers: int
    heads: int
    head_size: int
    intermediate: int
    activation: str
    lengths: tuple[int, ...]
    seed: int


SIZES = st.builds(
    Sizes,
    layers=st.integers(1, 3),
    heads=st.integers(1, 4),
    head_size=st.sampled_from([2, 5, 8, 16]),
    intermediate=st.integers(1, 40),
    activation=st.sampled_from(["gelu", "gelu_new", "relu", "silu"]),
    lengths=st.lists(
        st.one_of(st.integers(1, 20), st.integers(1, 512)), min_size=1, max_size=5
    ).map(tuple),
    seed=st.integers(0, 2**16),
).filter(lambda sizes: sizes.heads * sizes.head_size >= 8)  # a LayerNorm needs some numbers
ODD = Sizes(2, 3, 7, 11, "gelu", (1, 512, 2, 33, 1), 7)


def make_theirs(class_name: str, sizes: Sizes, dtype: torch.dtype) -> Any:
    import transformers

    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=sizes.heads * sizes.head_size,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        intermediate_size=sizes.intermediate,
        hidden_act=sizes.activation,
        num_labels=2 if class_name == "BertForQuestionAnswering" else 3,
        initializer_range=0.1,
        attn_implementation="eager",
    )
    torch.manual_seed(sizes.seed)
    return getattr(transformers, class_name)(config).to(dtype).eval()


def open_here(reference: Any, dtype: torch.dtype) -> Model:
    with tempfile.TemporaryDirectory() as folder:
        reference.save_pretrained(folder)
        return checkpoint.load(folder, dtype=dtype).model


def make_sequences(sizes: Sizes) -> list[FakeSequence]:
    random = np.random.default_rng(sizes.seed)
    # Not token 0: transformers gives the padding word no gradient.
    return [
        FakeSequence(random.integers(1, 50, n), random.integers(0, 2, n)) for n in sizes.lengths
    ]


def run_padded(
    reference: Any, sequences: list[FakeSequence], outputs: str | tuple[str, ...]
) -> list[Any]:
    """One tensor a sequence, its padding cut off again where it has tokens."""
    longest = max(len(s.ids) for s in sequences)
    ids, types, mask = (torch.zeros(len(sequences), longest, dtype=torch.long) for _ in range(3))
    for row, sequence in enumerate(sequences):
        n = len(sequence.ids)
        ids[row, :n], types[row, :n] = map(torch.from_numpy, sequence)
        mask[row, :n] = 1
    result = reference(input_ids=ids, token_type_ids=types, attention_mask=mask)
    if isinstance(outputs, tuple):
        whole = torch.stack([getattr(result, name) for name in outputs], -1)
    else:
        whole = getattr(result, outputs)
    per_token = whole.ndim == 3
    return [x[: len(s.ids)] if per_token else x for x, s in zip(whole, sequences, strict=True)]


def run_packed(model: Model, kernel: str, sequences: list[FakeSequence], head: str) -> list[Any]:
    chosen = attention.kernel(kernel)
    model.bert.use(chosen)
    packed = batches.lay(sequences, 512 if chosen.serves.rows else 0)
    (output,) = model(packed, head)
    per_token = len(output) == len(packed.ids)
    return list(packed.split(output) if per_token else packed.pick(output))


def gradients(module: torch.nn.Module, results: list[Any], seed: int) -> dict[str, torch.Tensor]:
    """Of one fixed random projection of all results."""
    generator = torch.Generator().manual_seed(seed)
    module.zero_grad()
    total = sum(
        (x * torch.randn(x.shape, generator=generator, dtype=x.dtype)).sum() for x in results
    )
    torch.as_tensor(total).backward()
    return {n: p.grad for n, p in module.named_parameters() if p.grad is not None}


def paired_gradients(model: Model, actual: dict, yours: dict) -> Iterator[tuple[str, Any, Any]]:
    """Our gradients beside theirs, joined where ours are (queries, keys and values)."""
    bare = not any(name.startswith("bert.") for name in yours)
    table = names.table(names.BERT, tied=True)
    for name, grad in actual.items():
        sources = names.sources(name, table)
        spelled = [source.removeprefix("bert.") if bare else source for source in sources]
        spelled = ["cls.predictions.bias" if "decoder.bias" in s else s for s in spelled]
        yield name, grad, torch.cat([yours[s] for s in spelled])


def check(sizes: Sizes, case: str, dtype: torch.dtype, limit: float, backward: bool = True) -> None:
    class_name, head, outputs = CASES[case]
    reference = make_theirs(class_name, sizes, dtype)
    model = open_here(reference, dtype)
    sequences = make_sequences(sizes)
    expected = run_padded(reference, sequences, outputs)
    their_gradients = gradients(reference, expected, sizes.seed)
    for kernel in KERNELS:
        serves = attention.kernel(kernel).serves
        if serves.refusal(CPU, dtype):
            continue
        learns = backward and serves.backward
        with torch.set_grad_enabled(learns):
            actual = run_packed(model, kernel, sequences, head)
        for a, b in zip(actual, expected, strict=True):
            assert_close(a, b, limit, f"{case} under {kernel}")
        if not learns:
            continue
        packed_gradients = gradients(model, actual, sizes.seed)
        assert packed_gradients, "no gradient at all"
        largest = max(float(g.norm()) for g in packed_gradients.values())
        for name, a, b in paired_gradients(model, packed_gradients, their_gradients):
            # A key's bias has no gradient in theory and noise in practice: it is compared with
            # the size of the others.
            floor = 1e-3 * largest if name.endswith("qkv.bias") else 1e-6 * largest
            assert_close(a, b, limit, f"gradient of {name} under {kernel}", floor)


def assert_close(a: Any, b: Any, limit: float, description: str, floor: float = 1e-6) -> None:
    a, b = a.detach(), b.detach()
    error = float((a - b).norm()) / max(float(b.norm()), floor)
    assert error <= limit, f"{description}: relative difference {error:.2e}, allowed {limit:.0e}"


# No shrinking: an example is small enough to be read, and costs a second.
FOUND = {"suppress_health_check": list(HealthCheck), "phases": [Phase.explicit, Phase.generate]}
QUICK = settings(max_examples=4, **FOUND)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_an_odd_model_equals_transformers(case: str, dtype: torch.dtype, limit: float) -> None:
    check(ODD, case, dtype, limit)


@pytest.mark.parametrize("case", CASES)
@QUICK
@given(sizes=SIZES)
def test_random_models_equal_transformers(case: str, sizes: Sizes) -> None:
    check(sizes, case, torch.float64, 1e-10)
    # A LayerNorm over a few numbers loses digits that only float64 has to spare, and so do
    # gradients through it: fp32 is held to its bound where models are wide enough to be ones.
    if sizes.heads * sizes.head_size >= 16:
        check(sizes, case, torch.float32, 1e-5, backward=False)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@settings(max_examples=60, **FOUND)
@given(sizes=SIZES)
def test_many_random_models_equal_transformers(case: str, sizes: Sizes) -> None:
    check(sizes, case, torch.float64, 1e-10)
    # A LayerNorm over a few numbers loses digits that only float64 has to spare, and so do
    # gradients through it: fp32 is held to its bound where models are wide enough to be ones.
    if sizes.heads * sizes.head_size >= 16:
        check(sizes, case, torch.float32, 1e-5, backward=False)


def test_the_comparison_can_fail() -> None:
    """The control: the same model with one weight nudged is told apart."""
    reference = make_theirs("BertModel", ODD, torch.float64)
    model = open_here(reference, torch.float64)
    with torch.no_grad():
        model.bert.layers[0].down.bias[0] += 1e-6
    expected = run_padded(reference, make_sequences(ODD), "last_hidden_state")
    states = run_packed(model, "bucketed", make_sequences(ODD), "hidden")
    with pytest.raises(AssertionError, match="relative difference"):
        assert_close(states[1], expected[1], 1e-10, "nudged")


@pytest.mark.parametrize("kernel", KERNELS)
def test_minilm_equals_transformers(minilm, kernel: str, rng) -> None:
    import transformers

    if refusal := attention.kernel(kernel).serves.refusal(CPU, torch.float32):
        pytest.skip(refusal)

    reference = transformers.BertModel.from_pretrained(minilm, attn_implementation="eager").eval()
    model = checkpoint.load(minilm).model
    sequences = [
        FakeSequence(rng.integers(1000, 30000, n), np.zeros(n, int)) for n in (5, 256, 17, 90)
    ]
    with torch.inference_mode():
        states = run_padded(reference, sequences, "last_hidden_state")
        vectors = torch.nn.functional.normalize(torch.stack([s.mean(0) for s in states]), dim=-1)
        actual = torch.stack(run_packed(model, kernel, sequences, "embed"))
    assert float((actual - vectors).abs().max()) <= 1e-5


def test_packed_can_be_reused_under_every_kernel() -> None:
    """Plans come from the batch, never from what ran before."""
    model = open_here(make_theirs("BertModel", ODD, torch.float64), torch.float64)
    packed = Packed.build(make_sequences(ODD))
    outputs = []
    for kernel in ("reference", "bucketed", "repack", "reference"):
        model.bert.use(attention.kernel(kernel))
        outputs.append(model(packed, "hidden")[0])
    for output in outputs[1:]:
        torch.testing.assert_close(outputs[0], output, rtol=1e-10, atol=1e-10)
