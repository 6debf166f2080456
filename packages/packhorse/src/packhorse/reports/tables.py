"""Turn rows of figures into tables, and tables into dated notes.

A table is text ready to be shown: figures are rounded to their precision and aligned, so that a
terminal and a note show the same. A note holds what is needed to repeat the measurement: date,
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
    "packhorse",
    "torch",
    "numpy",
    "scipy",
    "transformers",
    "sentence-transformers",
    "onnxruntime",
    "openvino",
    "ctranslate2",
    "tokenizers",
    "pyarrow",
)


@dataclass(frozen=True)
class Table:
    """Column headings and cells, as text ready to be shown."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
        """Make a table; columns of figures are aligned right, headings included."""
        aligned = [_align(list(column)) for column in zip(columns, *rows, strict=True)]
        headings, *cells = zip(*aligned, strict=True)
        return cls(tuple(headings), tuple(map(tuple, cells)))


def _align(column: list[str]) -> list[str]:
    if not all(NUMERIC.fullmatch(cell) for cell in column[1:]):
        return column
    width = max(map(len, column))
    return [cell.rjust(width) for cell in column]


def packing_table(rows: Sequence[PackingRow]) -> Table:
    """Return the table of all plans; `problems` has the rows without a plan."""
    columns = (
        "max per pack",
        "algorithm",
        "packs",
        "efficiency",
        "factor",
        "lower bound",
        "gap",
        "seconds",
    )
    cells = [
        (
            depth_name(row.max_per_pack),
            row.algorithm,
            f"{row.packs:,}",
            f"{row.efficiency:.2%}",
            f"{row.factor:.3f}",
            f"{row.lower_bound:,}",
            f"{row.gap:.4%}",
            f"{row.seconds:.3f}",
        )
        for row in rows
        if row.problem is None
    ]
    return Table.of(columns, cells)


def waste_table(rows: Sequence[WasteRow], costs: Sequence[float] | None = None) -> Table:
    """Return the table of ways to batch texts; with costs, what a million texts cost."""
    columns = ["way", "tokens computed", "padding", "factor"]
    cells = [
        [row.way, f"{row.computed:,}", f"{row.padding:.1%}", f"{row.factor:.2f}x"] for row in rows
    ]
    if costs is not None:
        columns.append("cost of a million texts")
        for row_cells, cost in zip(cells, costs, strict=True):
            row_cells.append(f"{cost:,.2f}")
    return Table.of(columns, cells)


class MeasuredRow(Protocol):
    """A row of a table, whose measurement may have failed."""

    @property
    def subject(self) -> str: ...

    @property
    def problem(self) -> str | None: ...


def problems(rows: Sequence[MeasuredRow]) -> list[str]:
    """Return a line for each row that could not be measured."""
    return [f"{row.subject}: {row.problem}" for row in rows if row.problem is not None]


def depth_name(max_per_pack: int | None) -> str:
    """Return how a limit on the sequences per pack is shown."""
    return "unlimited" if max_per_pack is None else str(max_per_pack)


def rate(value: float) -> str:
    """Format a speed."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def times(value: float | None) -> str:
    """Format a factor; "-" if there is none."""
    return "-" if value is None else f"{value:.2f}"


def milliseconds(*values: float | None) -> str:
    """Format one or several times, separated by slashes; "-" if there is none."""
    known = [f"{value:.1f}" for value in values if value is not None]
    return "/".join(known) or "-"


def markdown(table: Table) -> str:
    """Format the table as Markdown."""
    lines = [table.columns, ["---" for _ in table.columns], *table.rows]
    return "\n".join("| " + " | ".join(cell.strip() for cell in line) + " |" for line in lines)


def machine(device: torch.device | None = None) -> dict[str, str]:
    """Return what a figure depends on: date, processor or accelerator, versions."""
    facts = {"date": date.today().isoformat(), "processor": _processor()}
    if device is not None:
        from packhorse.device import describe
        from packhorse.processor import features

        facts["device"] = describe(device)
        if device.type == "cpu":
            facts["features"] = ", ".join(features().names())
    facts["system"] = (
        f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    )
    versions = {name: _version(name) for name in VERSIONS}
    facts["versions"] = ", ".join(f"{name} {number}" for name, number in versions.items() if number)
    return facts


def _processor() -> str:
    """Return the name of the processor, and how many cores this process may use."""
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
    """Check before the long part of a command that a file can be written there."""
    if path is not None and not path.expanduser().resolve().parent.is_dir():
        raise InputError(f"cannot write {path}: there is no folder {path.parent}")


def write_csv(path: Path, rows: Sequence[DataclassInstance]) -> None:
    """Write all figures of each row under their names; a missing figure is an empty cell."""
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
    """Write a benchmark note: what was measured, where, how to repeat it, and the table."""
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
