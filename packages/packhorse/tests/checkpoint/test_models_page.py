"""docs/models.md is what its script writes, and its verdicts are those of the loader."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from packhorse.checkpoint.names.families import FAMILIES

DOCS = Path(__file__).resolve().parents[4] / "docs"


@pytest.fixture(scope="module")
def models() -> ModuleType:
    spec = importlib.util.spec_from_file_location("models_page", DOCS / "models.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_script_writes(models: ModuleType) -> None:
    message = "verdicts have changed; where they should: python docs/models.py docs/models.md"
    assert (DOCS / "models.md").read_text("utf-8") == models.page(), message


def test_every_family_and_every_gap_has_a_model(models: ModuleType) -> None:
    result = list(models.rows())
    assert len(result) >= 50 and len({name for _, name, *_ in result}) == len(result)
    assert {raw["model_type"] for _, _, raw, good, _ in result if good} == set(FAMILIES)
    assert {models.lacking(raw) for _, _, raw, good, _ in result if not good} == set(models.MISSING)


def test_a_verdict_is_the_check_of_the_loader(models: ModuleType) -> None:
    """The control: one field more, and a model that works does not."""
    assert models.verdict(models.modernbert()) == (True, "")
    good, reason = models.verdict(models.modernbert() | {"rope_scaling": {"factor": 2.0}})
    assert not good and "rotary positions" in reason
    assert not models.verdict(models.bert(is_decoder=True))[0]
