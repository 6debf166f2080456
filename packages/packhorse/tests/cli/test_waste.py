"""`packhorse waste` on texts of known lengths."""

from __future__ import annotations

from pathlib import Path

import pytest

# Two tokens more than words: [CLS] and [SEP].
TEXTS = ["horse", "the horse carries sacks", "mule", "the mule carries sacks to market"]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts.csv"
    path.write_text("body\n" + "\n".join(TEXTS) + "\n")
    return path


def test_padding_of_known_texts(cli, tiny, texts: Path) -> None:
    result = cli("waste", texts, "--column", "body", "-m", tiny("embed"), "-bs", 2, "--json")
    assert result.code == 0
    document = result.document
    assert document["texts"] == 4 and document["tokens"] == 3 + 6 + 3 + 8
    computed = [way["computed"] for way in document["ways"]]
    assert computed == [4 * 64, 2 * 6 + 2 * 8, 2 * 8 + 2 * 3, 64, 20]
    assert document["ways"][1]["padding"] == pytest.approx(1 - 20 / 28)
    assert "cost_of_a_million" not in document["ways"][0]
    assert "packed flat" in result.out


def test_cost_at_a_known_speed(cli, tiny, texts: Path) -> None:
    result = cli(
        *("waste", texts, "-m", tiny("embed"), "--price", 36, "--tokens-per-second", 1e6),
        "--json",
    )
    flat = result.document["ways"][-1]
    assert flat["cost_of_a_million"] == pytest.approx(20 / 4 * 1e6 / 1e6 / 3600 * 36)


def test_cost_at_a_measured_speed_and_a_plot(cli, tiny, texts: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "waste.svg"
    result = cli("waste", texts, "-m", tiny("embed"), "--price", 1, "--plot", plot, "--json")
    assert result.document["tokens_per_second"] > 0 and "measured here" in result.err
    assert plot.read_text().startswith("<?xml")


def test_long_texts_count_as_the_limit(cli, tiny, texts: Path) -> None:
    result = cli("waste", texts, "-m", tiny("embed"), "--max-length", 4, "--json")
    assert result.document["tokens"] == 3 + 4 + 3 + 4
    assert "2 texts are longer than 4 tokens" in result.err


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["{texts}", "--column", "none"], "no column 'none'"),
        (["{empty}"], "holds no text"),
        (["none.txt"], "cannot be read"),
        (["{texts}", "--price", "0"], "--price is 0"),
        (["{texts}", "--tokens-per-second", "5"], "pass --price too"),
        (["{texts}", "-bs", "0"], "--batch-size is 0"),
        (["{texts}", "--max-length", "65"], "takes 64 tokens"),
        (["{texts}", "--plot", "a.bmp"], "ends in"),
    ],
)
def test_mistakes_are_one_line(
    cli, tiny, texts: Path, tmp_path: Path, arguments: list[str], part: str
) -> None:
    (tmp_path / "empty.txt").write_text("")
    places = {"texts": texts, "empty": tmp_path / "empty.txt"}
    result = cli("waste", *(a.format(**places) for a in arguments), "-m", tiny("embed"))
    assert result.code == 2 and part in result.err
    assert result.err.splitlines()[-1].startswith("packhorse: ")
