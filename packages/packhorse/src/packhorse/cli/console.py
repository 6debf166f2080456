"""What commands print: results on stdout, notes and progress on stderr.

With --json the document alone is on stdout: tables go to stderr, and progress is not shown.

On a terminal tables and progress bars are drawn by rich. Elsewhere they are plain lines that can be
searched and logged, and rich is not even imported. Texts of users are shown as they are: nothing in
them is taken for markup, and control characters never reach the terminal.
"""

import itertools
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from contextvars import ContextVar
from typing import Annotated, Any, Protocol, TextIO

from cyclopts import Parameter

from packhorse import status
from packhorse.data.output import to_plain

JsonFlag = Annotated[
    bool,
    Parameter(
        negative="", show_default=False, help="Print the result as one line of JSON on stdout."
    ),
]
Advance = Callable[[int, int], None]  # done, total; a total of 0 is unknown

# Off a terminal a line of progress needs both a pause and another tenth of the work, so that a log
# stays short; but a reader of the log should see within a minute that the work goes on.
PAUSE = 5.0  # seconds
PATIENCE = 60.0  # seconds
WORK_NUMBERS = itertools.count(1)
_JSON_STREAM: ContextVar[TextIO | None] = ContextVar("json_stream", default=None)


@contextmanager
def reserve_stdout_for_json() -> Iterator[None]:
    """Send everything that is printed to stderr, except the document of `emit`."""
    token = _JSON_STREAM.set(sys.stdout)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _JSON_STREAM.reset(token)


def emit(document: dict[str, Any], as_json: bool) -> None:
    """With `as_json`, print the document as one line on stdout; NaN and infinity become null."""
    if as_json:
        text = json.dumps(to_plain(document), separators=(",", ":"))
        print(text, file=_JSON_STREAM.get() or sys.stdout, flush=True)


def note(message: object) -> None:
    """Print one line on stderr: a choice that was made, a warning, an error."""
    print(one_line(message), file=sys.stderr)


def one_line(message: object) -> str:
    """Return the message without line breaks or other control characters."""
    return " ".join(printable(str(message)).split())


def printable(text: str) -> str:
    """Replace control characters with blanks."""
    return "".join(char if char.isprintable() else " " for char in text)


def short(text: str, width: int = 48) -> str:
    """Return the beginning of a text, enough to recognize it by."""
    line = one_line(text[: 4 * width])
    return line if len(line) <= width and len(text) <= 4 * width else line[: width - 1] + "…"


@contextmanager
def summarize_warnings(category: type[Warning]) -> Iterator[None]:
    """Print one line at the end for all warnings of this category, however many there were."""
    show = warnings.showwarning
    messages = []

    def collect(message: Any, kind: Any, *location: Any, **options: Any) -> None:
        if issubclass(kind, category):
            messages.append(message)
        else:
            show(message, kind, *location, **options)

    with warnings.catch_warnings():
        warnings.simplefilter("always", category)
        warnings.showwarning = collect
        try:
            yield
        finally:
            if messages:
                count = len(messages)
                suffix = f" (the first of {count} such warnings)" if count > 1 else ""
                note(f"warning: {messages[0]}{suffix}")


def table(title: str | None, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table on stdout; columns of numbers are aligned right."""
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
    """Print nested names as a tree on stdout."""
    print(title)
    _print_branches(branches, "")


def _print_branches(branches: dict[str, Any], indent: str) -> None:
    for number, (name, children) in enumerate(branches.items(), 1):
        last = number == len(branches)
        print(f"{indent}{'└── ' if last else '├── '}{printable(name)}")
        _print_branches(children, indent + ("    " if last else "│   "))


# Progress --------------------------------------------------------------------------------------


class ReportProgress(Protocol):
    """Takes the progress of one stage, as often as the caller likes; a total of 0 is unknown.

    `detail` is shown behind the bar; `counts` are published for `packhorse monitor`, which derives
    their speed (see `status.SPEEDS` for the names it knows).
    """

    def __call__(
        self,
        stage: str,
        done: int,
        total: int,
        *,
        detail: str = "",
        counts: Mapping[str, int] | None = None,
    ) -> None: ...


@contextmanager
def progress(
    description: str, *, counts: str = "", facts: Mapping[str, Any] | None = None
) -> Iterator[Advance]:
    """Show the progress of work in one stage; yields a function of what is done and the total.

    If sequences, tokens or documents are counted, `counts` names them, and `packhorse monitor`
    shows their speed. `facts` is what it shows besides: the model, the device.
    """
    with stage_progress(facts=facts) as report:

        def advance(done: int, total: int) -> None:
            report(description, done, total, counts={counts: done} if counts else None)

        yield advance


@contextmanager
def stage_progress(
    name: str | None = None, *, facts: Mapping[str, Any] | None = None
) -> Iterator[ReportProgress]:
    """Show the progress of work in several stages, one bar each, and publish it for the monitor.

    On a terminal bars have the total and the time left; elsewhere there is a line now and then, and
    with --json nothing is shown. `name` is that of the work in the monitor.
    """
    name = name or f"work-{next(WORK_NUMBERS)}"
    with _progress_display() as show, status.publishing(name, facts or {}) as publish:

        def report(
            stage: str,
            done: int,
            total: int,
            *,
            detail: str = "",
            counts: Mapping[str, int] | None = None,
        ) -> None:
            show(stage, done, total, detail)
            publish({"does": stage, "done": done, "total": total, **(counts or {})})

        yield report


ShowProgress = Callable[[str, int, int, str], None]  # stage, done, total, detail


@contextmanager
def _progress_display() -> Iterator[ShowProgress]:
    if _JSON_STREAM.get() is not None:
        yield lambda stage, done, total, detail: None
    elif sys.stderr.isatty():
        with _progress_bars() as show:
            yield show
    else:
        yield _progress_lines()


@contextmanager
def _progress_bars() -> Iterator[ShowProgress]:
    from rich import progress as rich_progress
    from rich.console import Console

    columns = (
        rich_progress.TextColumn("{task.description}", markup=False),
        rich_progress.BarColumn(),
        rich_progress.MofNCompleteColumn(),
        rich_progress.TimeElapsedColumn(),
        rich_progress.TimeRemainingColumn(),
        rich_progress.TextColumn("{task.fields[detail]}", markup=False),
    )
    with rich_progress.Progress(*columns, console=Console(stderr=True)) as bars:
        tasks: dict[str, rich_progress.TaskID] = {}

        def show(stage: str, done: int, total: int, detail: str) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(printable(stage), total=None, detail="")
            bars.update(tasks[stage], completed=done, total=total or None, detail=detail)

        yield show


def _progress_lines() -> ShowProgress:
    last_stage = ""
    last_tenths = 0
    last_time = time.monotonic()

    def show(stage: str, done: int, total: int, detail: str) -> None:
        nonlocal last_stage, last_tenths, last_time
        if stage != last_stage:
            last_stage = stage
            last_tenths = 0
        tenths = 10 * done // total if total else 0
        waited = time.monotonic() - last_time
        if waited >= PATIENCE or (waited >= PAUSE and (not total or tenths > last_tenths)):
            share = f" of {total:,} ({done / total:.0%})" if total else ""
            note(f"{stage}: {done:,}{share}" + (f", {detail}" if detail else ""))
            last_tenths = tenths
            last_time = time.monotonic()

    return show
