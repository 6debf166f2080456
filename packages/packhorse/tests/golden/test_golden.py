"""Vectors are API: a release that moves one of these is breaking, and says so.

The references were made once by transformers and sentence-transformers (make_golden.py). The bounds
are those of the promise in CONTRIBUTING.md: a cosine distance of 1e-5 in fp32 and 1e-3 in bf16.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

import packhorse
from packhorse import checkpoint
from packhorse.packing.batch import Packed

HERE = Path(__file__).resolve().parent
GOLDEN = HERE / "golden.npz"
BOUNDS = {"fp32": 1e-5, "bf16": 1e-3}
pytestmark = pytest.mark.machine


def load_maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_golden", HERE / "make_golden.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MAKER = load_maker()
FAMILIES = [family.lower() for family in MAKER.FAMILIES]


def distance(vectors: np.ndarray, references: np.ndarray) -> float:
    """The largest cosine distance of two vectors that belong together."""
    vectors = vectors.astype(np.float64)
    references = references.astype(np.float64)
    norms = np.linalg.norm(vectors, axis=1) * np.linalg.norm(references, axis=1)
    return float((1 - (vectors * references).sum(1) / norms).max())


def mean_states(family: str, dtype: torch.dtype) -> np.ndarray:
    """All sequences in one packed batch; the mean of each one's states."""
    loaded = checkpoint.load(HERE / family, dtype=dtype)
    sequences = [SimpleNamespace(ids=ids, types=np.zeros_like(ids)) for ids in MAKER.token_ids()]
    batch = Packed.build(sequences)
    with torch.inference_mode():
        (states,) = loaded.model(batch, "hidden")
    return np.array([part.float().mean(0).numpy() for part in batch.split(states)])


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_families_give_the_vectors_they_gave(family: str, dtype: str) -> None:
    number_format = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    with np.load(GOLDEN, allow_pickle=False) as golden:
        assert distance(mean_states(family, number_format), golden[family]) < BOUNDS[dtype]


@pytest.mark.parametrize("dtype", BOUNDS)
def test_minilm_gives_the_vectors_it_gave(dtype: str, minilm: Path) -> None:
    model = packhorse.load(minilm, dtype=dtype, device="cpu")
    with (
        np.load(GOLDEN, allow_pickle=False) as golden,
        pytest.warns(UserWarning, match="1 of 8 texts were cut"),
    ):
        assert distance(model.embed(list(MAKER.TEXTS)), golden["minilm"]) < BOUNDS[dtype]


def test_a_moved_vector_is_seen(minilm: Path) -> None:
    """The control: first-token pooling in place of the mean."""
    model = packhorse.load(minilm, dtype="fp32", device="cpu")
    states = model.hidden(list(MAKER.TEXTS[:2]))
    with np.load(GOLDEN, allow_pickle=False) as golden:
        moved = np.array(
            [rows.states[0] if hasattr(rows, "states") else rows[0] for rows in states]
        )
        assert distance(moved, golden["minilm"][:2]) > 100 * BOUNDS["bf16"]
