"""Every plot becomes a file of its kind, and shows what it was given."""

from __future__ import annotations

from pathlib import Path

import pytest

from packhorse.errors import InputError
from packhorse.packing.histogram import histogram_of
from packhorse.reports import packing, plots, waste
from packhorse_bench import plots as bench_plots
from packhorse_bench import workloads
from packhorse_bench.encode import EncodeRow

pytest.importorskip("matplotlib")

LENGTHS = workloads.draw("squad", 300, longest=64)
COUNTS = histogram_of(LENGTHS)


def words(path: Path) -> str:
    return path.read_text("utf-8")


@pytest.fixture(autouse=True)
def _text_stays_text() -> None:
    """An SVG then holds its labels as text."""
    import matplotlib

    matplotlib.rcParams["svg.fonttype"] = "none"


def test_plans(tmp_path: Path) -> None:
    path = tmp_path / "plans.svg"
    room = len(COUNTS)
    plots.draw_plans(path, COUNTS, room, packing.compare(COUNTS, room, ("optimum", "spfhp"), (2,)))
    assert all(f">{label}<" in words(path) for label in ("optimum", "spfhp", "one per row"))
    assert "300 sequences by length" in words(path)


def test_packing(tmp_path: Path) -> None:
    rows = packing.compare(COUNTS, len(COUNTS), ("optimum", "lpfhp"), (2, None))
    plots.draw_packing(tmp_path / "a.svg", rows)
    assert ">unlimited<" in words(tmp_path / "a.svg") and ">lpfhp<" in words(tmp_path / "a.svg")


def test_encode(tmp_path: Path) -> None:
    rows = [
        *(EncodeRow("packhorse", d, "sorted", 1234.0) for d in ("fp32", "bf16")),
        EncodeRow("openvino", "int8", "", problem="no"),
    ]
    bench_plots.draw_encode(tmp_path / "a.svg", rows, "a model")
    text = words(tmp_path / "a.svg")
    assert ">fp32<" in text and ">bf16<" in text and ">1,234<" in text
    assert "openvino" not in text


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".pdf", b"%PDF")])
def test_kinds_of_file(suffix: str, magic: bytes, tmp_path: Path) -> None:
    path = tmp_path / f"a{suffix}"
    plots.check(path)
    plots.draw_speeds(path, ["packed", "padded"], [2.0, 1.0], "texts")
    assert path.read_bytes().startswith(magic)


def test_waste(tmp_path: Path) -> None:
    plots.draw_waste(tmp_path / "a.svg", COUNTS, waste.measure(LENGTHS, 64, 8))
    assert "padded to 64" in words(tmp_path / "a.svg")


@pytest.mark.parametrize(("name", "message"), [("a.gif", "ends in"), ("none/a.png", "no folder")])
def test_refused_before_the_long_part(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        plots.check(tmp_path / name)
    plots.check(None)
