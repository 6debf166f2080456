"""Draw docs/picture.svg, README's picture, from the notes in docs/benchmarks.

    python docs/picture.py

Every bar is a number of a note's table, so a new measurement needs no more than a new run; a test
compares the file with what this prints. The picture has its own background, because the page around
it may be light or dark.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).resolve().parent
WIDTH = 760
LEFT = 236  # where bars begin
LONGEST = 410
BAR = 20
STYLE = """
  .card { fill: #ffffff; stroke: #d5dadd }
  text { font-family: system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif }
  .title { fill: #1c2a30; font-size: 15px; font-weight: 600 }
  .label, .value { fill: #44525a; font-size: 13px }
  .label { text-anchor: end }
  .ours.label, .ours.value { fill: #14607a; font-weight: 600 }
  .bar { fill: #b4bcc1 }
  .ours.bar { fill: #14607a }
  @media (prefers-color-scheme: dark) {
    .card { fill: #12181b; stroke: #2f3a40 }
    .title { fill: #e8eef0 }
    .label, .value { fill: #b3bfc5 }
    .ours.label, .ours.value { fill: #6cc3de }
    .bar { fill: #57646b }
    .ours.bar { fill: #2f93b3 }
  }
"""


@dataclass(frozen=True)
class Bar:
    """A row of a note's table: its first cells, up to what tells it apart from other rows."""

    label: str
    row: tuple[str, ...]


@dataclass(frozen=True)
class Group:
    """One measurement: ours first, then what one would use instead."""

    title: str
    note: str
    column: str
    bars: tuple[Bar, ...]


GROUPS = (
    Group(
        "Embed texts on two CPU cores, bf16: texts a second",
        "2026-11-16-encode-cpu.md",
        "seq/s",
        (
            Bar("Packhorse", ("packhorse", "bf16", "arrival")),
            Bar("OpenVINO, sorted", ("openvino", "bf16", "sorted")),
            Bar("transformers, sorted", ("transformers", "bf16", "sorted")),
            Bar("sentence-transformers", ("sentence-transformers", "bf16", "sorted")),
        ),
    ),
    Group(
        "Serve on two CPU cores: requests a second, 99 of 100 within 500 ms",
        "2026-11-16-serve-cpu.md",
        "req/s within 500 ms",
        (
            Bar("Packhorse", ("packhorse",)),
            Bar("infinity", ("infinity",)),
            Bar("sentence-transformers", ("sentence-transformers",)),
        ),
    ),
    Group(
        "BERT-Large on one H200, bf16, lengths like SQuAD's: sequences a second",
        "2026-11-16-encode-h200-squad.md",
        "seq/s",
        (
            Bar("Packhorse", ("packhorse graphs", "bf16", "arrival")),
            Bar("transformers compiled, sorted", ("transformers compiled", "bf16", "sorted")),
            Bar("transformers compiled", ("transformers compiled", "bf16", "fixed")),
        ),
    ),
    Group(
        "Pretrain BERT-Large on one H200, bf16: real tokens a second",
        "2026-11-16-train-h200.md",
        "real tok/s",
        (
            Bar("Packhorse", ("packhorse, packed, compiled",)),
            Bar("transformers compiled", ("transformers, padded to 512, compiled",)),
        ),
    ),
)


def number(note: str, row: tuple[str, ...], column: str) -> str:
    """A cell of the first table of a note that has this column and this row."""
    columns: list[str] = []
    for line in (DOCS / "benchmarks" / note).read_text("utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if column in cells:
            columns = cells
        elif columns and tuple(cells[: len(row)]) == row:
            return cells[columns.index(column)]
    raise SystemExit(f"{note} has no row {row} with the column {column!r}")


def draw() -> str:
    """The picture as SVG."""
    shapes: list[str] = []
    y = 34
    for group in GROUPS:
        values = [number(group.note, bar.row, group.column) for bar in group.bars]
        amounts = [float(value.replace(",", "")) for value in values]
        shapes.append(f'<text class="title" x="24" y="{y}">{group.title}</text>')
        y += 12
        for bar, value, amount in zip(group.bars, values, amounts, strict=True):
            kind = "ours " if bar is group.bars[0] else ""
            width = round(LONGEST * amount / max(amounts))
            middle = y + BAR - 6
            shapes += [
                f'<text class="{kind}label" x="{LEFT - 10}" y="{middle}">{bar.label}</text>',
                f'<rect class="{kind}bar" x="{LEFT}" y="{y}" width="{width}" height="{BAR - 2}"/>',
                f'<text class="{kind}value" x="{LEFT + width + 8}" y="{middle}">{value}</text>',
            ]
            y += BAR
        y += 34
    height = y - 14
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img">\n'
        "<title>Packhorse beside other libraries: longer bars are faster</title>\n"
        f"<style>{STYLE}</style>\n"
        f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>\n'
        + "\n".join(shapes)
        + "\n</svg>\n"
    )


if __name__ == "__main__":
    (DOCS / "picture.svg").write_text(draw(), "utf-8")
