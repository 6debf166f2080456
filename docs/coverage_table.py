"""Write docs/coverage.md from the report of coverage.py; `make coverage` calls it.

    python docs/coverage_table.py .coverage.json

A row is a folder of the source, as docs/design.md divides it. Modules that run on a GPU only are
named in pyproject.toml, each with its reason; they have a table of their own and no part in the
totals.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = REPOSITORY / "docs" / "coverage.md"
SINGLE_MODULES = "modules without a folder"

HEAD = """# Test coverage

What the quick tests (`make test`) run of the source, measured by coverage.py with branches, in the
tests' processes and in those that they start: commands, servers, workers and ranks. `make coverage`
measures again and writes this page. C code and what runs on a GPU only are not measured.

Not counted: imports for type checkers, abstract methods, protocols, overloads and Triton kernels.
"""


@dataclass
class Tally:
    """Statements and branches of some files, and how many of them ran."""

    statements: int = 0
    statements_run: int = 0
    branches: int = 0
    branches_run: int = 0

    def add(self, summary: dict[str, Any]) -> None:
        """Count a file by its summary in coverage.py's report."""
        self.statements += summary["num_statements"]
        self.statements_run += summary["covered_lines"]
        self.branches += summary["num_branches"]
        self.branches_run += summary["covered_branches"]

    def cells(self) -> list[str]:
        """The row's figures for the table."""
        return [
            f"{self.statements:,}",
            share(self.statements_run, self.statements),
            f"{self.branches:,}",
            share(self.branches_run, self.branches),
        ]


def share(part: int, whole: int) -> str:
    """A percentage, rounded down so that 100 % means all."""
    return f"{1000 * part // whole / 10:.1f} %" if whole else ""


def room_of(path: str) -> tuple[str, str]:
    """Package and room of a source file: `("packhorse", "serve")`."""
    package, *inside = path.partition("/src/")[2].split("/")
    return package, inside[0] if len(inside) > 1 else SINGLE_MODULES


def page(report: dict[str, Any], gpu_only: dict[str, str]) -> str:
    """The text of the page."""
    rooms: defaultdict[tuple[str, str], Tally] = defaultdict(Tally)
    total = Tally()
    on_gpu = {}
    for path, file in report["files"].items():
        module = path.partition("/src/")[2]
        if module in gpu_only:
            on_gpu[module] = file["summary"]
        else:
            rooms[room_of(path)].add(file["summary"])
            total.add(file["summary"])
    if unknown := gpu_only.keys() - on_gpu.keys():
        raise SystemExit(f"pyproject.toml names modules that are not there: {', '.join(unknown)}")
    lines = [HEAD]
    lines += ["| package | room | statements | run | branches | run |", "|---|---|--:|--:|--:|--:|"]
    for (package, room), tally in sorted(rooms.items()):
        lines.append("| " + " | ".join([package, room, *tally.cells()]) + " |")
    lines.append("| **all** | | " + " | ".join(f"**{cell}**" for cell in total.cells()) + " |")
    lines += ["", "## GPU only", "", "Tests that need CUDA run these modules.", ""]
    lines += ["| module | why | statements | run without a GPU |", "|---|---|--:|--:|"]
    for module, summary in sorted(on_gpu.items()):
        run = share(summary["covered_lines"], summary["num_statements"])
        lines.append(f"| `{module}` | {gpu_only[module]} | {summary['num_statements']:,} | {run} |")
    return "\n".join(lines) + "\n"


def main(report_file: str) -> None:
    """Write the page from a JSON report."""
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))
    report = json.loads(Path(report_file).read_text("utf-8"))
    PAGE.write_text(page(report, settings["tool"]["packhorse"]["gpu-only"]), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
