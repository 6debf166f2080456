"""Rows into tables, tables into dated notes.

A table is text ready to be shown: figures rounded to what they are good for and aligned, so that a
terminal and a note say the same. A note holds what is needed to run the measurement again: date,
machine, versions, command.
"""

from __future__ import annotations

import csv
import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from packhorse.errors import InputError

if TYPE_CHECKING:
    import torch
    from _typeshed import DataclassInstance

    from packhorse.reports.packing import PackingRow
    from packhorse.reports.waste import WasteRow

NUMERIC = re.compile(r"[-\d.,%x]*")
VERSIONS = (
    *("packhorse", "torch", "numpy", "scipy", "transformers", "sentence-transformers"),
    *("onnxruntime", "openvino", "ctranslate2", "tokenizers", "pyarrow"),
)


@dataclass(frozen=True)
class Table:
    """Columns and cells as they are to be shown."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
        """Columns of figures are aligned right, headings included."""
        lists = [[name, *cells] for name, *cells in zip(columns, *rows, strict=True)]
        aligned = [_right(column) for column in lists]
        heads, *rest = zip(*aligned, strict=True)
        return cls(tuple(heads), tuple(map(tuple, rest)))


def _right(column: list[str]) -> list[str]:
    if not all(NUMERIC.fullmatch(cell) for cell in column[1:]):
        return column
    width = max(map(len, column))
    return [cell.rjust(width) for cell in column]


def packing_table(rows: Sequence[PackingRow]) -> Table:
    """Plans; those with a problem are for `problems`."""
    columns = (
        *("max per pack", "algorithm", "packs", "efficiency", "factor"),
        *("lower bound", "gap", "seconds"),
    )
    return Table.of(
        columns,
        [
            (
                *(depth_name(row.max_per_pack), row.algorithm, f"{row.packs:,}"),
                *(f"{row.efficiency:.2%}", f"{row.factor:.3f}", f"{row.lower_bound:,}"),
                *(f"{row.gap:.4%}", f"{row.seconds:.3f}"),
            )
            for row in rows
            if row.problem is None
        ],
    )


def waste_table(rows: Sequence[WasteRow], costs: Sequence[float] | None = None) -> Table:
    """Ways to lay texts into rows; with costs, what a million of them cost."""
    columns = ["way", "tokens computed", "padding", "factor"]
    cells = [[r.way, f"{r.computed:,}", f"{r.padding:.1%}", f"{r.factor:.2f}x"] for r in rows]
    if costs is not None:
        columns.append("cost of a million texts")
        for row, cost in zip(cells, costs, strict=True):
            row.append(f"{cost:,.2f}")
    return Table.of(columns, cells)


class Measured(Protocol):
    """A row of a table that may have failed."""

    @property
    def subject(self) -> str: ...

    @property
    def problem(self) -> str | None: ...


def problems(rows: Sequence[Measured]) -> list[str]:
    """One line for each row that could not be measured."""
    return [f"{row.subject}: {row.problem}" for row in rows if row.problem is not None]


def depth_name(max_per_pack: int | None) -> str:
    """How a limit on the sequences of a pack is shown."""
    return "unlimited" if max_per_pack is None else str(max_per_pack)


def rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def milliseconds(*values: float | None) -> str:
    known = [f"{value:.1f}" for value in values if value is not None]
    return "/".join(known) or "-"


def markdown(table: Table) -> str:
    """The table as Markdown."""
    lines = [table.columns, ["---"] * len(table.columns), *table.rows]
    return "\n".join("| " + " | ".join(cell.strip() for cell in line) + " |" for line in lines)


def machine(device: torch.device | None = None) -> dict[str, str]:
    """What a figure depends on: date, processor or accelerator, versions."""
    found = {"date": date.today().isoformat(), "processor": _processor()}
    if device is not None:
        from packhorse.device import describe
        from packhorse.processor import features

        found["device"] = describe(device)
        if device.type == "cpu":
            found["features"] = ", ".join(features().names())
    found["system"] = (
        f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    )
    found["versions"] = ", ".join(f"{name} {at}" for name in VERSIONS if (at := _version(name)))
    return found


def _processor() -> str:
    """Its name, and how many cores this process may use."""
    usable = getattr(os, "sched_getaffinity", None)
    cores = len(usable(0)) if usable else os.cpu_count() or 1
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or 'unknown'}, {cores} cores"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def check_writable(path: Path | None) -> None:
    """Find out before the long part whether a file can be written there."""
    if path is not None and not path.expanduser().resolve().parent.is_dir():
        raise InputError(f"cannot write {path}: there is no folder {path.parent}")


def write_csv(path: Path, rows: Sequence[DataclassInstance]) -> None:
    """All figures of each row, under their names; empty where there is none."""
    try:
        with path.expanduser().open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, [field.name for field in fields(rows[0])])
            writer.writeheader()
            writer.writerows(map(asdict, rows))
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from error


def write_note(
    path: Path,
    title: str,
    command: str,
    facts: Mapping[str, str],
    table: Table,
    remarks: Sequence[str] = (),
) -> None:
    """A benchmark note: what was measured, where, how to do it again, and the table."""
    lines = [
        f"# {title}",
        "",
        *(f"- {name}: {value}" for name, value in facts.items()),
        "",
        f"```\n{command}\n```",
        "",
        markdown(table),
    ]
    if remarks:
        lines += ["", *(f"- {remark}" for remark in remarks)]
    try:
        path.expanduser().write_text("\n".join(lines) + "\n", "utf-8")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from error
