"""Opening models: the cache of prepared weights, and that a user's variable overrides it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from packhorse.runtime.loading import PREPARED
from packhorse.serve import hosting
from packhorse.serve.settings import ServeSettings


@pytest.mark.parametrize("variable", [None, "9"])
def test_prepared_products_are_few(
    checkpoint_folder: Path, variable: str | None, monkeypatch, threads
) -> None:
    for name in PREPARED:
        monkeypatch.setenv(name, variable or "")
        if variable is None:
            monkeypatch.delenv(name)
    models = hosting.open_models(ServeSettings(model=(f"tiny={checkpoint_folder}",), threads=1))
    models.close()
    assert [os.environ[name] for name in PREPARED] == [variable or "64"] * 2
