"""What the commands print: tables on stdout, notes and progress on stderr. With --json the document
alone is on stdout, and tables are on stderr too.

On a terminal tables and bars are rich's; elsewhere they are plain lines that can be searched and
logged, and rich is not even imported. Texts of users are shown as they are: nothing in them is
taken for markup, and control characters never reach the terminal.
"""

import itertools
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from contextvars import ContextVar
from typing import Annotated, Any, TextIO

from cyclopts import Parameter

from packhorse import status
from packhorse.data.output import to_plain

JsonFlag = Annotated[
    bool, Parameter(negative="", show_default=False, help="One line of JSON on stdout, at the end.")
]
Advance = Callable[[int, int], None]  # done, in all; 0 in all: not known

PAUSE = 5.0  # seconds between two plain lines of progress, and a tenth of the work as well …
PATIENCE = 60.0  # … but no longer than this without a word
WORKS = itertools.count(1)
_RESULT: ContextVar[TextIO | None] = ContextVar("result", default=None)


@contextmanager
def json_alone() -> Iterator[None]:
    """Leave stdout to `emit`, for a program that reads it; what else is printed goes to stderr."""
    token = _RESULT.set(sys.stdout)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _RESULT.reset(token)


def emit(document: dict[str, Any], as_json: bool) -> None:
    """With `as_json`, the document as a line on stdout; what is not a number is null."""
    if as_json:
        text = json.dumps(to_plain(document), separators=(",", ":"))
        print(text, file=_RESULT.get() or sys.stdout, flush=True)


def note(message: object) -> None:
    """A line on stderr: a choice that was made, a warning."""
    print(one_line(message), file=sys.stderr)


def one_line(message: object) -> str:
    """Without line breaks or other control characters."""
    return " ".join(printable(str(message)).split())


def printable(text: str) -> str:
    """Control characters as blanks."""
    return "".join(char if char.isprintable() else " " for char in text)


def short(text: str, width: int = 48) -> str:
    """The beginning of a text, to know it by."""
    line = one_line(text[: 4 * width])
    return line if len(line) <= width and len(text) <= 4 * width else line[: width - 1] + "…"


@contextmanager
def once(category: type[Warning]) -> Iterator[None]:
    """Warnings of this kind make one line at the end, however many there were."""
    show, given = warnings.showwarning, []

    def keep(message: Any, kind: Any, *where: Any, **more: Any) -> None:
        if issubclass(kind, category):
            given.append(message)
        else:
            show(message, kind, *where, **more)

    with warnings.catch_warnings():
        warnings.simplefilter("always", category)
        warnings.showwarning = keep
        try:
            yield
        finally:
            more = f" (the first of {len(given)} such warnings)" if len(given) > 1 else ""
            if given:
                note(f"warning: {given[0]}{more}")


def table(title: str | None, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table on stdout; columns of numbers are aligned right."""
    cells = [[_cell(value) for value in row] for row in rows]
    right = [
        bool(rows) and all(isinstance(row[i], int | float) for row in rows)
        for i in range(len(columns))
    ]
    if sys.stdout.isatty():
        _rich_table(title, columns, cells, right)
    else:
        _plain_table(title, columns, cells, right)


def _cell(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "" if value is None else printable(str(value))
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def _plain_table(
    title: str | None,
    columns: Sequence[str],
    cells: Sequence[Sequence[str]],
    right: Sequence[bool],
) -> None:
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    if title:
        print(printable(title))
    for row in (columns, ["-" * width for width in widths], *cells):
        padded = [
            text.rjust(width) if to_right else text.ljust(width)
            for text, width, to_right in zip(row, widths, right, strict=True)
        ]
        print("  ".join(padded).rstrip())


def _rich_table(
    title: str | None,
    columns: Sequence[str],
    cells: Sequence[Sequence[str]],
    right: Sequence[bool],
) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(
        title=Text(printable(title)) if title else None, title_justify="left", box=box.ROUNDED
    )
    for name, to_right in zip(columns, right, strict=True):
        drawn.add_column(Text(name), justify="right" if to_right else "left")
    for row in cells:
        drawn.add_row(*map(Text, row))
    Console().print(drawn)


def tree(title: str, branches: dict[str, Any]) -> None:
    """Names within names on stdout."""
    print(title)
    _branches(branches, "")


def _branches(branches: dict[str, Any], before: str) -> None:
    for number, (name, inner) in enumerate(branches.items(), 1):
        last = number == len(branches)
        print(f"{before}{'└── ' if last else '├── '}{printable(name)}")
        _branches(inner, before + ("    " if last else "│   "))


@contextmanager
def progress(
    what: str, quiet: bool = False, *, counts: str = "", about: Mapping[str, Any] | None = None
) -> Iterator[Advance]:
    """Something to call with what is done and what there is in all, as often as one likes.

    `packhorse monitor` sees it too, with the model and device in `about`; where what is done are
    sequences, tokens or documents, `counts` says so, and it tells their speed.
    """
    told = {"does": what, **(about or {})}
    with _shown(what, quiet) as show, status.publishing(f"work-{next(WORKS)}", told) as say:

        def advance(done: int, total: int) -> None:
            show(done, total)
            say({"done": done, "total": total, **({counts: done} if counts else {})})

        yield advance


@contextmanager
def _shown(what: str, quiet: bool) -> Iterator[Advance]:
    if quiet:
        yield lambda done, total: None
    elif sys.stderr.isatty():
        with _bar(what) as advance:
            yield advance
    else:
        yield _lines(what)


@contextmanager
def _bar(what: str) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeElapsedColumn as Elapsed
    from rich.progress import TimeRemainingColumn as Remaining

    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()]
    with Progress(*columns, Elapsed(), Remaining(), console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total or None)


def _lines(what: str) -> Advance:
    said, at = 0, time.monotonic()

    def advance(done: int, total: int) -> None:
        nonlocal said, at
        tenths, waited = 10 * done // total if total else 0, time.monotonic() - at
        if waited >= PATIENCE or (waited >= PAUSE and (not total or tenths > said)):
            of_all = f" of {total:,} ({done / total:.0%})" if total else ""
            note(f"{what}: {done:,}{of_all}")
            said, at = tenths, time.monotonic()

    return advance
