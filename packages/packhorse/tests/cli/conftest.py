"""Commands run with one thread."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _one_thread(threads) -> None:
    """Small models gain nothing from more, and on busy cores threads wait for each other."""
    threads(1)
