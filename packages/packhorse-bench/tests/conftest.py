"""A random model, written once, and one thread: on busy cores threads wait for each other."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _one_thread(threads) -> None:
    threads(1)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of width 64, with a vocabulary, as `--config tiny` writes it."""
    from packhorse.reports import random_model

    return random_model.write("tiny", tmp_path_factory.mktemp("random") / "tiny")
