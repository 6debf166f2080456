"""A random model, written once, and one thread: on busy cores threads wait for each other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of width 64, with a vocabulary, as `--config tiny` writes it."""
    from packhorse.bench import random_model

    return random_model.write("tiny", tmp_path_factory.mktemp("random") / "tiny")
