"""`packhorse demo` on the real model and a corner of the real library."""

from __future__ import annotations

import io
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from packhorse.reports import side_by_side

FEW = ("--sample", 12, "--texts", 40)


@pytest.fixture(autouse=True)
def _a_corner(minilm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading all of the library takes seconds; one package of it shows as much."""
    corner = Path(sysconfig.get_path("stdlib")) / "email"
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(corner))
    monkeypatch.setattr("sys.stdin", io.StringIO())


def test_both_sides_agree_and_a_query_is_answered(cli, tmp_path: Path) -> None:
    plot = tmp_path / "demo.png"
    completed = cli("demo", "parse a mail message", *FEW, "--plot", plot, "--json")
    assert completed.code == 0
    document = completed.document
    assert [way["padding"] > 0 for way in document["ways"]] == [False, True, True]
    assert document["largest_difference"] < 1e-4 and document["smallest_cosine"] > 0.99999
    assert document["texts"] == 12 and document["searched"] == 40
    (answer,) = document["answers"]
    scores = [result["score"] for result in answer["results"]]
    assert answer["query"] == "parse a mail message"
    assert len(scores) == 5 and scores == sorted(scores, reverse=True)
    for part in ("packed", "padding", "The vectors agree", answer["results"][0]["name"]):
        assert part in completed.err
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_without_a_query_off_a_terminal_there_is_a_default(cli) -> None:
    from packhorse.cli.demo import DEFAULT_QUERY

    result = cli("demo", *FEW, "--json")
    assert [answer["query"] for answer in result.document["answers"]] == [DEFAULT_QUERY]


def test_disagreement_fails_the_demo(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    right = side_by_side.packed_vectors
    monkeypatch.setattr(
        side_by_side, "packed_vectors", lambda *inputs: np.roll(right(*inputs), 1, axis=0)
    )
    result = cli("demo", *FEW)
    assert result.code == 1
    assert "do not agree" in result.err.splitlines()[-1]


@pytest.mark.slow
def test_the_first_look_decides_how_many(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packhorse.cli.demo.COMPARE_SECONDS", 1e-9)
    monkeypatch.setattr("packhorse.cli.demo.SEARCH_SECONDS", 1e-9)
    monkeypatch.setattr("packhorse.cli.demo.TRIAL_TEXTS", 8)
    result = cli("demo", "mail", "--json")
    assert result.document["texts"] == result.document["searched"] == 8


@pytest.mark.parametrize("flag", ["--sample", "--texts"])
def test_nothing_to_do_is_refused(cli, flag: str) -> None:
    result = cli("demo", flag, 0)
    assert result.code == 2 and result.err == f"packhorse: {flag} is 0; it must be 1 or more\n"
