"""`packhorse bench sparse` and `multi`: rows of both libraries, and their outputs compared."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from packhorse_bench import retrieval


@pytest.fixture
def texts(tmp_path: Path, minilm: Path) -> Iterator[Path]:
    """A file of texts; the vocabulary is that of all-MiniLM-L6-v2."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("sentence_transformers")
        (tmp_path / "texts.txt").write_text("the horse carries sacks\nhome\ntwo sacks home\n")
        yield tmp_path / "texts.txt"


@pytest.mark.parametrize(("output", "side"), [("sparse", ()), ("multi", ("--as-query",))])
def test_both_libraries_in_one_run(
    cli: Any, texts: Path, minilm: Path, tmp_path: Path, output: str, side: tuple[str, ...]
) -> None:
    words = minilm
    note = tmp_path / "note.md"
    flags = ("--config", "tiny", "--vocab", words, "--texts", texts, "--repeats", 2, *side)
    peer = ("--peers", "sentence-transformers", "--note", note, "--json")
    result = cli("bench", output, *flags, *peer)
    assert result.code == 0, result.err
    ours, by_text, theirs = result.document["rows"]
    engines = [row["engine"] for row in result.document["rows"]]
    assert engines == ["packhorse", "packhorse, text by text", "sentence-transformers"]
    assert by_text["difference"] == 0 and by_text["times_ours"] > 0
    assert ours["times_ours"] == 1 and theirs["texts_per_second"] > 0
    assert theirs["difference"] < 1e-5 and "| packhorse" in note.read_text()
    if side:
        assert "32.0 vectors per text" in result.document["output"]
    for wrong, says in (
        (("--repeats", 0), "--repeats 0 measures nothing"),
        (("--peers", "nobody"), "unknown peer 'nobody'"),
        (("--config", "huge"), "unknown configuration 'huge'"),
        (("--plot", tmp_path / "x.svg"), "there is no plot"),
    ):
        result = cli("bench", output, "--texts", texts, "--vocab", words, *wrong)
        assert result.code != 0 and says in result.err, result.err


def test_another_number_of_vectors_is_no_small_difference() -> None:
    import numpy as np

    one, two = [np.zeros((2, 3))], [np.zeros((3, 3))]
    assert retrieval._difference(one, two) == float("inf")
    assert retrieval._difference(one, [np.ones((2, 3))]) == 1
