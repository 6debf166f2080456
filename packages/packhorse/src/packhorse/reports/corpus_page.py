"""A corpus as a web page: counts, lengths, languages, duplicates and samples.

One HTML file without scripts that loads nothing. All text of the corpus is escaped: it is not
trusted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from packhorse.data.packed.statistics import Sample, Statistics

BINS = 32
LANGUAGES_SHOWN = 20
_STYLE = """
:root { color-scheme: light dark; --bar: #14607a; --faint: #8a8f94; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; }
td, th { text-align: left; padding: .1rem .6rem .1rem 0; vertical-align: top; }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.wide { width: 60%; }
.bar { background: var(--bar); height: .8em; border-radius: 2px; min-width: 1px; }
.sample { border-left: 3px solid var(--bar); padding-left: .8rem; margin: .8rem 0;
  overflow-wrap: anywhere; }
.faint { color: var(--faint); }
"""


def corpus_page(
    title: str,
    datasets: Sequence[tuple[Statistics, Sequence[Sample]]],
    source_labels: Mapping[str, str],
) -> str:
    """The page of one corpus: its datasets with their samples; labels name the counts."""
    counts = datasets[0][0].manifest.config.get("found") or {}
    sections = [
        _section("Sources", _count_table(counts, source_labels)),
        _section(
            "Documents by characters", _document_lengths(counts.get("document_lengths") or ())
        ),
        _section("Documents by language", _languages(counts.get("languages") or {})),
    ]
    for statistics, _ in datasets:
        sections.append(_section(f"{statistics.name}: rows", _packing_table(statistics)))
        sections.append(
            _section(f"{statistics.name}: sequences by tokens", _sequence_lengths(statistics))
        )
    pairs = counts.get("duplicate_samples") or ()
    sections.append(_section("Duplicates: what was kept, and what was left out", _pairs(pairs)))
    sections += [
        _section(f"{statistics.name}: samples", "".join(map(_sample, samples)))
        for statistics, samples in datasets
    ]
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n"
        f"<body><h1>{escape(title)}</h1>\n{''.join(sections)}</body></html>\n"
    )


def _section(title: str, content: str) -> str:
    return f"<h2>{escape(title)}</h2>\n{content}\n" if content else ""


def _table(rows: Iterable[tuple[str, str]]) -> str:
    cells = (
        f'<tr><td>{escape(name)}</td><td class="number">{escape(value)}</td>'
        '<td class="wide"></td></tr>\n'
        for name, value in rows
    )
    return f"<table>\n{''.join(cells)}</table>"


def _bars(rows: Sequence[tuple[str, int]]) -> str:
    """A table of counts with a bar for each."""
    most = max((count for _, count in rows), default=0)
    if not most:
        return ""
    lines = (
        f'<tr><td>{escape(name)}</td><td class="number">{count:,}</td>'
        f'<td class="wide"><div class="bar" style="width:{100 * count / most:.1f}%"></div></td>'
        "</tr>\n"
        for name, count in rows
    )
    return f"<table>\n{''.join(lines)}</table>"


def _count_table(counts: Mapping[str, Any], labels: Mapping[str, str]) -> str:
    rows = [(labels[name], f"{counts[name]:,}") for name in labels if counts.get(name) is not None]
    return _table(rows) if rows else ""


def _document_lengths(counts: Sequence[int]) -> str:
    """Entry i counts documents of 2^i to 2^(i+1) - 1 characters."""
    return _bars([(f"{1 << i:,} to {(2 << i) - 1:,}", count) for i, count in enumerate(counts)])


def _languages(counts: Mapping[str, int]) -> str:
    ranked = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    rows = ranked[:LANGUAGES_SHOWN]
    if rest := sum(count for _, count in ranked[LANGUAGES_SHOWN:]):
        rows.append((f"{len(ranked) - LANGUAGES_SHOWN} others", rest))
    return _bars(rows)


def _packing_table(statistics: Statistics) -> str:
    manifest = statistics.manifest
    rows = [
        ("rows", f"{manifest.rows:,}"),
        ("sequences", f"{manifest.sequences:,}"),
        ("tokens", f"{manifest.tokens:,}"),
        ("tokens per row at most", f"{manifest.layout.capacity:,}"),
        ("full", f"{manifest.efficiency:.2%}"),
    ]
    if statistics.random_next is not None:
        rows.append(("random next sentences", f"{statistics.random_next / manifest.sequences:.1%}"))
    return _table(rows)


def _sequence_lengths(statistics: Statistics) -> str:
    from packhorse.data.packed.statistics import bins

    return _bars([(f"{a} to {b}", count) for a, b, count in bins(statistics.lengths, BINS)])


def _pairs(pairs: Iterable[Sequence[str]]) -> str:
    return "".join(
        f'<div class="sample"><div>{escape(kept)}</div>'
        f'<div class="faint">{escape(left_out)}</div></div>\n'
        for kept, left_out in pairs
    )


def _sample(sample: Sample) -> str:
    label = f", next sentence: {sample.next_label}" if sample.next_label else ""
    heading = f"row {sample.row:,}, {sample.tokens:,} tokens{label}"
    return (
        f'<div class="sample"><div class="faint">{escape(heading)}</div>'
        f"<div>{escape(sample.text)}</div></div>\n"
    )
