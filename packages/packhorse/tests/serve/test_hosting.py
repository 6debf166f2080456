"""Models that are opened: what they may keep prepared, and that a user's own word stands."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from packhorse.runtime.loading import PREPARED
from packhorse.serve import hosting
from packhorse.serve.settings import Settings


@pytest.mark.parametrize("said", [None, "9"])
def test_prepared_products_are_few(
    checkpoint_folder: Path, said: str | None, monkeypatch, threads
) -> None:
    for name in PREPARED:
        monkeypatch.setenv(name, said or "")
        if said is None:
            monkeypatch.delenv(name)
    hosts = hosting.open(Settings(model=(f"tiny={checkpoint_folder}",), threads=1))
    hosts.close()
    assert [os.environ[name] for name in PREPARED] == [said or "64"] * 2
