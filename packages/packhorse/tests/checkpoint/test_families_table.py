"""docs/reference/families.md is what its script writes, and its figures are within their limits."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from packhorse.checkpoint.names.families import FAMILIES

DOCS = Path(__file__).resolve().parents[4] / "docs"
# Without a class in transformers: GTE's own code, and NeoBERT.
WITHOUT = {"new", "neobert"}


@pytest.fixture(scope="module")
def table() -> ModuleType:
    spec = importlib.util.spec_from_file_location("families_table", DOCS / "families_table.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["families_table"] = module
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_script_writes(table: ModuleType) -> None:
    sections = json.loads(table.FIGURES.read_text())
    assert table.PAGE.read_text("utf-8") == table.page(sections)


def test_every_family_is_there_and_within_the_limits(table: ModuleType) -> None:
    assert set(table.FAMILIES) == set(FAMILIES) - WITHOUT
    for kind, section in json.loads(table.FIGURES.read_text()).items():
        assert set(section["rows"]) == set(table.FAMILIES)
        for family, heads in section["rows"].items():
            for column, difference in heads["hidden"].items():
                limit = table.LIMITS.get(column.split()[1])
                if kind == "cuda" and column.endswith("fp64") and family in table.ROTARY:
                    limit = table.ROTARY_LIMIT
                assert limit is None or difference <= limit, (family, column, difference)


def test_what_it_measures(
    table: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One family again; and the control: with a result changed, the figure shows it."""
    monkeypatch.setattr(table, "FAMILIES", {"mpnet": table.FAMILIES["mpnet"]})
    with torch.inference_mode():
        table.write_oracle(tmp_path)
        (_, head, differences), *_ = table.figures(tmp_path, table.CPU)
        assert head == "hidden" and 0 < max(differences.values()) <= 1e-5
        assert {"native fp32", "reference fp64"} & set(differences)
        honest = table.computed
        monkeypatch.setattr(table, "computed", lambda *arguments: honest(*arguments) + 1e-3)
        (_, _, moved), *_ = table.figures(tmp_path, table.CPU)
    assert min(moved.values()) > 9e-4
