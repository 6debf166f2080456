"""What README and the site claim: figures are those of a note, and commands can be given again.

A figure is a number with a unit of speed or a factor ("4,283 sequences a second", "2 times"), or a
cell of a table; where a note is linked, every number with decimals or thousands is one. Each stands
in a paragraph, list item or table that links to its note, and the note holds that number, at the
precision of the page. Every command in a code block of README, the site and the notes is parsed by
the real command line, so a flag that was renamed is seen; it is not run.
"""

from __future__ import annotations

import re
import shlex
from math import floor, log10
from pathlib import Path

import pytest
from cyclopts import CycloptsError, MissingArgumentError

from packhorse.cli import _app
from packhorse_port.command import prepare_tokens

from .documented import REPOSITORY, blocks, documents, notes

# Pages that make claims to users; the others explain, with numbers of many kinds.
CLAIMING = [
    page
    for page in documents()
    if page.parent.name in ("guides", "reference")
    or page.stem in ("README", "index", "known-issues")
]
NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)?"
UNITS = (
    *("times", "requests a second", "sequences a second", "real tokens a second"),
    *("tokens a second", "texts a second", "in float8", "MB/s", "s against", "ms"),
)
FIGURE = re.compile(
    rf"(?<![\w.,])({NUMBER})(?= (?:{'|'.join(UNITS)})\b)"
    r"|(?<![\w.,])(\d+,\d{3}|\d+\.\d+)(?![\w.,]*\d| GB)"
)
LINK = re.compile(r"\]\(([\w./-]*benchmarks/(?!index)[^)#]+\.md)\)")
CELL = re.compile(rf"(?<![\w.,-])({NUMBER})(?![\w.,-]|\.\d)")


def passages(text: str) -> list[str]:
    """Paragraphs and list items; a table goes with the paragraphs before and after it."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    parts = [part for part in re.split(r"\n\n|\n(?=- )|\n(?=#)", text) if part.strip()]
    joined = []
    for place, part in enumerate(parts):
        if part.startswith("|"):
            joined.append("\n".join(parts[max(place - 1, 0) : place + 2]))
        else:
            joined.append(part)
    return joined


def figures(block: str) -> list[str]:
    """The numbers of a block that claim a measurement."""
    lines = block.splitlines()
    rows = [line for line in lines if line.startswith("|")]
    prose = "\n".join(line for line in lines if not line.startswith("|"))
    matches = FIGURE.findall(re.sub(r"\]\([^)]*\)|`[^`]*`", "]", prose))
    linked = LINK.search(block) is not None
    claimed = [with_unit or precise for with_unit, precise in matches if with_unit or linked]
    # Numbers of other tables are versions, sizes or the like: measurements are aligned right.
    if not linked and "---:" not in block:
        return claimed
    return claimed + [number for row in rows for number in _cells(row)]


def _cells(row: str) -> list[str]:
    """Numbers of the cells after the first, without code."""
    cells = re.sub(r"`[^`]*`|\*\*", "", row).strip("|").split("|")[1:]
    return [number for cell in cells for number in CELL.findall(cell)]


def holds(note: str, figure: str) -> bool:
    """Whether a number of the note, rounded to the digits that the figure shows, is the figure."""
    value = float(figure.replace(",", ""))
    if "." in figure:
        unit = 10.0 ** -len(figure.partition(".")[2])
    else:
        digits = len(figure.replace(",", "").rstrip("0")) or 1
        unit = 10.0 ** (floor(log10(value)) - digits + 1) if value else 1.0
    numbers = (float(text.replace(",", "")) for text in re.findall(NUMBER, note))
    return any(abs(number - value) <= unit / 2 * (1 + 1e-9) for number in numbers)


def unproved(text: str, folder: Path) -> list[str]:
    """Figures of a page that stand without a note, or that no linked note holds."""
    wrong = []
    for block in passages(text):
        links = LINK.findall(block)
        notes = "\n".join((folder / link).read_text(encoding="utf-8") for link in links)
        for figure in figures(block):
            if not links:
                wrong.append(f"{figure}: no note beside it in {block.strip()[:60]!r}")
            elif not holds(notes, figure):
                wrong.append(f"{figure}: not in {', '.join(links)}")
    return wrong


@pytest.mark.parametrize("page", CLAIMING, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_a_page_has_the_figures_of_its_notes(page: Path) -> None:
    assert unproved(page.read_text("utf-8"), page.parent) == []


def test_the_pages_that_claim_most_are_read() -> None:
    """The control of the selection: README, the front page and a guide have figures."""
    counts = {
        str(page.relative_to(REPOSITORY)): sum(
            len(figures(passage)) for passage in passages(page.read_text("utf-8"))
        )
        for page in CLAIMING
    }
    assert counts["README.md"] >= 15 and counts["docs/index.md"] >= 15
    assert counts["docs/guides/hugging-face.md"] >= 5 and counts["docs/known-issues.md"] >= 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("It is 1.25 times as fast.", "1.25: no note"),
        ("It is 1.26 times as fast ([note](docs/benchmarks/a.md)).", "1.26: not in"),
        (
            "Rates ([note](docs/benchmarks/a.md)):\n\n| | seq/s |\n|---|---:|\n| x | 51 |",
            "51: not in",
        ),
    ],
)
def test_a_false_figure_is_seen(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "docs/benchmarks").mkdir(parents=True)
    (tmp_path / "docs/benchmarks/a.md").write_text("| x | 1.2478 | 50.2 | 220,432 |")
    (complaint,) = unproved(text, tmp_path)
    assert message in complaint
    right = (
        text.replace("1.26", "1.25")
        .replace("51", "50")
        .replace("fast.", "fast ([note](docs/benchmarks/a.md)).")
    )
    assert unproved(right, tmp_path) == []


def commands() -> list[tuple[str, str]]:
    listed = []
    for page in [*documents(), *notes()]:
        for block in blocks(page):
            for line in block.commands if block.language in ("", "sh") else ():
                command = re.sub(r"\s#.*|[;|>].*", "", line).strip()
                if command.startswith("packhorse ") and "…" not in command and "[" not in command:
                    listed.append((page.name, command))
    return listed


@pytest.mark.parametrize(("place", "command"), commands())
def test_commands_still_parse(place: str, command: str) -> None:
    tokens = shlex.split(command)[1:]
    tokens = prepare_tokens(tokens) if tokens[0] == "port" else tokens
    _app(None).parse_args(tokens, print_error=False, exit_on_error=False)


def refused(text: str) -> list[str]:
    """Commands in the sentences and tables of a page that the command line does not know.

    A sentence may leave arguments out, as `packhorse onnx pack` does; what is there must be right.
    """
    wrong = []
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    for command in re.findall(r"`(packhorse [^`…\[]+)`", prose):
        tokens = shlex.split(re.sub(r"[;|>].*", "", command))[1:]
        tokens = prepare_tokens(tokens) if tokens[0] == "port" else tokens
        try:
            _app(None).parse_args(tokens, print_error=False, exit_on_error=False)
        except MissingArgumentError:
            continue
        except CycloptsError as error:
            wrong.append(f"{command}: {error}")
    return wrong


@pytest.mark.parametrize("page", documents(), ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_commands_in_sentences_still_parse(page: Path) -> None:
    assert refused(page.read_text("utf-8")) == []


def test_a_vanished_flag_is_seen() -> None:
    assert (
        "--no-such-flag" in refused("Say `packhorse pack --no-such-flag` or `packhorse freeze`.")[0]
    )
    with pytest.raises(Exception, match="no-such-flag"):
        _app(None).parse_args(["pack", "--no-such-flag"], print_error=False, exit_on_error=False)
