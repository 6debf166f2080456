"""Here the device that nobody names is the GPU, as for a user who has one."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACKHORSE_DEVICE", raising=False)
