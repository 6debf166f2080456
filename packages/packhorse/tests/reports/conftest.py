"""A tiny random model as a folder, written once."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from packhorse.reports import random_model

    return random_model.write("tiny", tmp_path_factory.mktemp("reports") / "model")
