"""What commands print: results on stdout, notes and progress on stderr.

With --json the document alone is on stdout: tables go to stderr, and progress is not shown.

On a terminal tables and progress bars are drawn by rich. Elsewhere they are plain lines that can be
searched and logged, and rich is not even imported. Texts of users are shown as they are: nothing in
them is taken for markup, and control characters never reach the terminal.
"""

import itertools
import json
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from contextvars import ContextVar
from typing import Annotated, Any, Protocol, TextIO

from cyclopts import Parameter

from packhorse import status
from packhorse.data.output import to_plain
from packhorse.progress import progress_display

JsonFlag = Annotated[
    bool,
    Parameter(
        negative="", show_default=False, help="Print the result as one line of JSON on stdout."
    ),
]
Advance = Callable[[int, int], None]  # done, total; a total of 0 is unknown

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

    `detail` is shown with the bar; `figures` are published for `packhorse monitor`, which derives
    the speed of counts (see `status` for the names it knows).
    """

    def __call__(
        self,
        stage: str,
        done: int,
        total: int,
        *,
        detail: str = "",
        figures: Mapping[str, Any] | None = None,
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
            report(description, done, total, figures={counts: done} if counts else None)

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
    is_shown = _JSON_STREAM.get() is None
    display = progress_display(note) if is_shown else nullcontext(lambda *progress: None)
    with display as show, status.publishing(name, facts or {}) as publish:

        def report(
            stage: str,
            done: int,
            total: int,
            *,
            detail: str = "",
            figures: Mapping[str, Any] | None = None,
        ) -> None:
            show(printable(stage), done, total, detail)
            publish({"does": stage, "done": done, "total": total, **(figures or {})})

        yield report
