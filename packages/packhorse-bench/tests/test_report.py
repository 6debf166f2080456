"""Tables say what rows say; notes say how to do it again."""

from __future__ import annotations

from datetime import date
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from packhorse.errors import InputError
from packhorse.reports import tables as report
from packhorse.reports.packing import PackingRow
from packhorse.reports.waste import WasteRow
from packhorse_bench import tables as bench_tables
from packhorse_bench.encode import EncodeRow

GOOD = EncodeRow("packhorse", "fp32", "sorted", 1234.5, 99.94, 1300.4, 7, 1.2, None, 0.999994, 1.0)
BAD = EncodeRow("openvino", "int8", "", problem="no nncf")


def test_figures_are_aligned_right() -> None:
    table = report.Table.of(("name", "n"), [("a", "1"), ("bb", "1,000")])
    assert table.columns == ("name", "    n")
    assert table.rows == (("a", "    1"), ("bb", "1,000"))
    assert report.Table.of(("a",), []).rows == ()


def test_encode_table_leaves_problems_out() -> None:
    table = bench_tables.encode_table([GOOD, BAD])
    cells = dict(zip(map(str.strip, table.columns), map(str.strip, table.rows[0]), strict=True))
    assert len(table.rows) == 1
    assert cells["seq/s"] == "1,234" and cells["slowest to fastest"] == "99.9 to 1,300"
    assert cells["x hf sorted"] == "1.20" and cells["x hf arrival"] == "-"
    assert cells["min cosine"] == "0.99999"
    assert report.problems([GOOD, BAD]) == ["openvino int8: no nncf"]


def test_packing_and_waste_tables() -> None:
    rows = [PackingRow("optimum", None, 10, 0.5, 2.0, 9, 1 / 9, 0.1)]
    failed = PackingRow("nnlshp", 4, problem="too many")
    table = report.packing_table([*rows, failed])
    assert table.rows[0][0] == "unlimited" and "50.00%" in table.rows[0][3]
    assert report.problems([failed]) == ["nnlshp, 4 per pack: too many"]
    ways = [WasteRow("padded", 2000, 0.25, 1.0)]
    assert [cell.strip() for cell in report.waste_table(ways).rows[0]][1:] == [
        *("2,000", "25.0%", "1.00x")
    ]
    assert report.waste_table(ways, [3.456]).rows[0][-1].strip() == "3.46"


def test_markdown() -> None:
    table = report.Table.of(("name", "n"), [("a", "1"), ("b", "20")])
    assert report.markdown(table).splitlines() == [
        *("| name | n |", "| --- | --- |", "| a | 1 |", "| b | 20 |")
    ]


def test_a_note_has_date_machine_command_and_table(tmp_path: Path) -> None:
    facts = report.machine(torch.device("cpu"))
    assert facts["date"] == date.today().isoformat()
    assert "cores" in facts["processor"] and f"torch {version('torch')}" in facts["versions"]
    path = tmp_path / "note.md"
    report.write_note(
        path,
        "Encoding",
        "packhorse bench encode",
        facts,
        bench_tables.encode_table([GOOD]),
        ["a remark"],
    )
    text = path.read_text("utf-8")
    for part in ("# Encoding", facts["date"], "packhorse bench encode", "| packhorse |", "- a re"):
        assert part in text


def test_where_a_note_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no folder"):
        report.check_writable(tmp_path / "none" / "note.md")
    with pytest.raises(InputError, match="cannot write"):
        report.write_note(tmp_path, "t", "c", {}, report.Table.of(("a",), [("1",)]))
