"""`invariant=True` on CUDA: the same bits whatever the neighbors, the place and the batch.

Skipped where there is no NVIDIA GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

import packhorse
from packhorse.errors import KernelError
from packhorse.packing.batch import Packed
from packhorse.runtime import invariant
from packhorse.runtime.backend import TorchBackend
from packhorse.runtime.batches import LaunchedBatch
from packhorse.runtime.encoder import Encoder
from packhorse.runtime.proof import SyntheticSequence

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
CUDA = torch.device("cuda")
BIG = {"width": 128, "heads": 4, "positions": 512, "std": 0.1}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TOKENS = 8192


def make_backend(make_model, dtype: torch.dtype, kernel: str | None, fixed: int) -> TorchBackend:
    model = make_model(dtype, **BIG)
    model.bert.use(invariant.pick(CUDA, dtype, name=kernel, head_size=32).kernel)
    return TorchBackend(model, CUDA, fixed=fixed)


def made_up(rng: np.random.Generator, count: int) -> list[SyntheticSequence]:
    lengths = np.ceil(512 ** rng.random(count)).astype(int)
    return [SyntheticSequence(rng.integers(0, 97, n), np.zeros(n, int)) for n in lengths]


def rows_of(
    backend: TorchBackend, sequences: Sequence[SyntheticSequence], heads: Sequence[str]
) -> list[bytes]:
    packed = Packed.build(sequences)
    batch = LaunchedBatch(packed, tuple(heads), backend(packed, heads), None).copy_to_host()
    return [b"".join(x.tobytes() for x in row) for row in batch.rows()]


def differing(backend: TorchBackend, rng: np.random.Generator) -> int:
    """Sequences that became something else among others than alone."""
    heads = ("hidden", "raw", *backend.model.heads)
    separate, wrong = [*made_up(rng, 7), SyntheticSequence(np.array([3]), np.array([0]))], 0
    alone = [rows_of(backend, [sequence], heads)[0] for sequence in separate]
    for number in range(12):
        others = made_up(rng, int(rng.integers(0, 120)))
        place = (0, len(others), len(others) // 2)[number % 3]
        result = rows_of(backend, [*others[:place], *separate, *others[place:]], heads)
        own_rows = result[place : place + len(separate)]
        wrong += sum(a != b for a, b in zip(alone, own_rows, strict=True))
    return wrong


@pytest.mark.parametrize(
    ("dtype", "kernel"),
    [("bf16", None), ("fp16", None), ("fp32", None), ("bf16", "varlen"), ("bf16", "reference")],
)
def test_every_head_gives_the_same_bits(make_model, rng, dtype: str, kernel: str | None) -> None:
    backend = make_backend(make_model, DTYPES[dtype], kernel, TOKENS)
    assert differing(backend, rng) == 0


def test_bits_differ_without_it(make_model, rng) -> None:
    ordinary = [make_backend(make_model, dtype, None, 0) for dtype in DTYPES.values()]
    assert sum(differing(backend, rng) for backend in ordinary) > 0


def texts_of(rng: np.random.Generator, count: int) -> list[str]:
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "one", "red", "hat"]
    return [" ".join(rng.choice(words, int(n))) for n in np.ceil(150 ** rng.random(count))]


@pytest.fixture(scope="module", params=list(DTYPES))
def encoder(request: pytest.FixtureRequest, minilm: Path) -> Encoder:
    return packhorse.load(minilm, device="cuda", dtype=request.param, invariant=True)


def test_minilm_alone_among_others_and_through_a_runner(encoder: Encoder, rng) -> None:
    texts = texts_of(rng, 600)
    vectors = encoder.embed(texts)
    for _ in range(8):
        selected = rng.permutation(len(texts))[: rng.integers(1, 300)]
        assert encoder.embed([texts[i] for i in selected]).tobytes() == vectors[selected].tobytes()
    for i in range(40):
        assert encoder.embed([texts[i]]).tobytes() == vectors[i].tobytes()
    with packhorse.PackRunner(encoder, timeout=0.001, publish=False) as runner:
        for result, vector in zip(runner.run(texts), vectors, strict=True):
            assert result.tobytes() == vector.tobytes()


def test_the_reference_serves_where_the_fastest_lays_sequences_together() -> None:
    assert invariant.pick(CUDA, torch.float32).name == "reference"
    assert invariant.pick(CUDA, torch.bfloat16, head_size=64).name == "fused"
    with pytest.raises(KernelError, match="computes several sequences together"):
        invariant.pick(CUDA, torch.bfloat16, name="bucketed")
