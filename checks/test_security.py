"""Every line of SECURITY.md names the tests that hold it, and they are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]


def promises(text: str) -> dict[str, list[str]]:
    """Each bullet, and the tests that the comment behind it names."""
    bullets = re.split(r"^- ", text.partition("What it does not promise")[0], flags=re.MULTILINE)
    tests_by_promise = {}
    for bullet in bullets[1:]:
        promise, _, comment = bullet.partition("<!--")
        tests_by_promise[" ".join(promise.split())] = comment.partition("-->")[0].split()
    return tests_by_promise


PROMISES = promises((REPOSITORY / "SECURITY.md").read_text("utf-8"))


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise[:40])
def test_a_promise_has_its_tests(promise: str) -> None:
    assert PROMISES[promise], "no test is named behind it"
    for place in PROMISES[promise]:
        file, _, name = place.partition("::")
        tree = ast.parse((REPOSITORY / file).read_text("utf-8"))
        names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert not name or name in names, place


def test_a_promise_without_a_test_is_noticed() -> None:
    text = "- Kept.\n  <!-- tests/a.py::test_it -->\n- Only\n  said.\nWhat it does not promise: x"
    assert promises(text) == {"Kept.": ["tests/a.py::test_it"], "Only said.": []}
