"""`packhorse monitor`: show devices and running packhorse processes, once or repeatedly.

Once, it prints tables that `watch -n 2 packhorse monitor` can repeat. With --watch it draws a full
screen on a terminal and prints plain tables elsewhere. Leaving with q or Ctrl-C is no failure.

Tables are as wide as the terminal or as COLUMNS says, without limit in a file. If there is too
little room, text columns are cut first (with …), then whole columns are dropped, the least
important first: a line that wraps is worse than one that lacks a figure. A column without any
figure is not shown.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from packhorse.cli.console import JsonFlag, emit, note, printable
from packhorse.cli.flags import flag
from packhorse.errors import InputError
from packhorse.progress import duration

if TYPE_CHECKING:
    from packhorse.monitor import Snapshot
    from packhorse.monitor.history import History
    from packhorse.monitor.machine import Device
    from packhorse.monitor.processes import Process

Wait = Callable[[float], bool]  # seconds; returns True if the user wants to leave
DEFAULT_INTERVAL = 2.0  # seconds
SHORTEST_INTERVAL = 0.1
MIN_TEXT_WIDTH = 8  # characters that remain of a text column
SILENT_SECONDS = 10.0  # without new figures, after which a process is marked as silent
NO_PROCESS = "No packhorse process runs."


def monitor(
    seconds: Annotated[
        float | None, Parameter(help="Seconds between two updates, with --watch; default 2.")
    ] = None,
    /,
    *,
    watch: Annotated[bool, flag(help="Update until you leave, and show the history.")] = False,
    json: JsonFlag = False,
) -> None:
    """Show the devices of this machine, and what packhorse processes do on them.

    --json prints one document, with --watch one per line. Leave the screen with q
    or Ctrl-C.

    Try:
      packhorse monitor
      packhorse monitor --watch
      packhorse monitor --watch 0.5
      watch -n 2 packhorse monitor
    """
    from packhorse.monitor import look, nvidia

    if seconds is not None and not watch:
        raise InputError(
            f"{seconds:g} seconds have no use without --watch; add it to keep updating"
        )
    if seconds is not None and not SHORTEST_INTERVAL <= seconds < float("inf"):
        raise InputError(
            f"seconds between updates must be {SHORTEST_INTERVAL:g} or more, not {seconds:g}"
        )
    with nvidia.opened() as (library, notes):
        for message in notes:
            note(message)
        if watch:
            _watch(lambda: look(library), DEFAULT_INTERVAL if seconds is None else seconds, json)
        else:
            seen = look(library)
            for message in seen.notes:
                note(message)
            _print_once(seen, json)


def _print_once(seen: "Snapshot", json: bool) -> None:
    if not json:
        show(seen)
    emit(document(seen), json)


def document(seen: "Snapshot") -> dict[str, Any]:
    """Return what was seen as a JSON document, without the GPU memory of foreign processes."""
    values = asdict(seen)
    for device in values["devices"]:
        del device["memory_by_pid"]
    return values


def _watch(look: "Callable[[], Snapshot]", seconds: float, json: bool) -> None:
    with _exit_on_sigterm():
        try:
            if json or not sys.stdout.isatty():
                _print_repeatedly(look, seconds, json)
            else:
                with keys() as wait, screen() as draw:
                    draw(look())
                    while not wait(seconds):
                        draw(look())
        except KeyboardInterrupt:
            return


def _print_repeatedly(look: "Callable[[], Snapshot]", seconds: float, json: bool) -> None:
    """Print update after update, for a file or another program; notes only when they are new."""
    last_notes: tuple[str, ...] = ()
    while True:
        seen = look()
        for message in set(seen.notes) - set(last_notes):
            note(message)
        last_notes = seen.notes
        if not json:
            print(time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seen.time)))
        _print_once(seen, json)
        sys.stdout.flush()
        time.sleep(seconds)


@contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Turn SIGTERM into an exception, so that the terminal is restored whatever ends the watch."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextmanager
def keys() -> Iterator[Wait]:
    """Yield a function that waits, and returns True at once if q is pressed."""
    try:
        import select
        import termios
        import tty

        settings = termios.tcgetattr(sys.stdin)
    except Exception:  # stdin is no terminal, or not of this kind: Ctrl-C still works
        yield lambda seconds: bool(time.sleep(seconds))
        return

    def wait(seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while (remaining := deadline - time.monotonic()) > 0:
            if select.select([sys.stdin], [], [], remaining)[0] and _quits(sys.stdin.fileno()):
                return True
        return False

    tty.setcbreak(sys.stdin)
    try:
        yield wait
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, settings)


def _quits(descriptor: int) -> bool:
    """Return whether the input is q or Ctrl-D, or has ended."""
    typed = os.read(descriptor, 64)
    return not typed or bool(set(typed) & set(b"qQ\x04"))


# Tables ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table; columns of the highest `rank` are dropped first, rank 0 never."""

    title: str
    rank: int = 0
    is_text: bool = False


DEVICE_COLUMNS = (
    Column("device"),
    Column("name", is_text=True),
    Column("busy"),
    Column("memory", 1),
    Column("clock", 4),
    Column("temp", 3),
    Column("power", 2),
    Column("features, processes", 5, is_text=True),
)
PROCESS_COLUMNS = (
    Column("pid"),
    Column("user", 5),
    Column("command", 3, is_text=True),
    Column("device", 2),
    Column("does", is_text=True),
    Column("seq/s"),
    Column("tok/s", 1),
    Column("full"),
    Column("queue"),
    Column("memory", 4),
    Column("time", 6),
)
HISTORY_COLUMNS = (Column("pid"), Column("seq/s"), Column("full"), Column("queue", 1))


def show(seen: "Snapshot") -> None:
    """Print the tables of devices and processes on stdout."""
    if sys.stdout.isatty():
        from rich.console import Console

        console = Console()
        for drawn in _rich_tables(seen, console.width):
            console.print(drawn)
        return
    columns = os.environ.get("COLUMNS", "")
    width = int(columns) if columns.isdigit() else None
    _print_plain_table("Devices", DEVICE_COLUMNS, _device_rows(seen), width)
    print()
    if seen.processes:
        _print_plain_table("Processes", PROCESS_COLUMNS, _process_rows(seen), width)
    else:
        print(NO_PROCESS)


@contextmanager
def screen() -> "Iterator[Callable[[Snapshot], None]]":
    """Take over the terminal; yields a function that draws one update, with the history."""
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    from packhorse.monitor.history import BLOCKS, PLAIN, History

    console = Console()
    history = History()
    blocks = BLOCKS if "utf" in console.encoding.lower() else PLAIN
    with Live(console=console, screen=True, auto_refresh=False) as live:

        def draw(seen: "Snapshot") -> None:
            history.add(_history_values(seen))
            parts = _rich_tables(seen, console.width)
            parts += _rich_history(seen, history, console.width, blocks)
            parts += [Text(printable(message), style="yellow") for message in seen.notes]
            live.update(Group(*parts, Text("q leaves", style="dim")), refresh=True)

        yield draw


def _history_values(seen: "Snapshot") -> Iterator[tuple[Any, float | None]]:
    for process in seen.processes:
        if process.name is not None:
            yield (process.pid, process.name, "seq/s"), process.sequences_per_second
            yield (process.pid, process.name, "full"), process.fill
            yield (process.pid, process.name, "queue"), process.queue


def _rich_history(seen: "Snapshot", history: "History", width: int, blocks: str) -> list[Any]:
    from packhorse.monitor.history import sparkline

    scale = {"full": 1.0}  # a share; the others are scaled to their largest value
    room = width // 4
    rows = []
    for process in seen.processes:
        if process.name is not None:
            lines = [
                sparkline(history.of((process.pid, process.name, title)), scale.get(title), blocks)[
                    -room:
                ]
                for title in _titles(HISTORY_COLUMNS)[1:]
            ]
            rows.append([str(process.pid), *lines])
    return [_rich_table("History", HISTORY_COLUMNS, rows, width)] if rows else []


def _rich_tables(seen: "Snapshot", width: int) -> list[Any]:
    from rich.text import Text

    devices = _rich_table("Devices", DEVICE_COLUMNS, _device_rows(seen), width)
    if not seen.processes:
        return [devices, Text(NO_PROCESS)]
    return [devices, _rich_table("Processes", PROCESS_COLUMNS, _process_rows(seen), width)]


def _rich_table(title: str, columns: Sequence[Column], rows: list[list[str]], width: int) -> Any:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    columns, rows, widths = fit(columns, rows, width - 4, gap=3)  # 4: the frame at both sides
    drawn = Table(title=title, title_justify="left", box=box.ROUNDED)
    for column, column_width in zip(columns, widths, strict=True):
        drawn.add_column(
            Text(column.title),
            justify="left" if column.is_text else "right",
            no_wrap=True,
            width=column_width,
        )
    for row in rows:
        drawn.add_row(*map(Text, row))
    return drawn


def _print_plain_table(
    title: str, columns: Sequence[Column], rows: list[list[str]], width: int | None
) -> None:
    columns, rows, widths = fit(columns, rows, width, gap=2)
    print(title)
    for row in (_titles(columns), ["-" * column_width for column_width in widths], *rows):
        padded = [
            text.ljust(column_width) if column.is_text else text.rjust(column_width)
            for column, text, column_width in zip(columns, row, widths, strict=True)
        ]
        print("  ".join(padded).rstrip())


def fit(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int | None, gap: int
) -> tuple[list[Column], list[list[str]], list[int]]:
    """Return the columns, cells and widths that fit into `width` characters; None is no limit."""
    shown = [
        i for i, column in enumerate(columns) if not column.rank or any(row[i] for row in rows)
    ]
    widths = [max(map(len, cells)) for cells in zip(_titles(columns), *rows, strict=True)]
    while width is not None:
        excess = sum(widths[i] + gap for i in shown) - gap - width
        if excess <= 0:
            break
        texts = [i for i in shown if columns[i].is_text and widths[i] > MIN_TEXT_WIDTH]
        if texts:
            # Cut the widest text to the next widest, so that all of them shrink evenly.
            widest = max(texts, key=lambda i: widths[i])
            next_widest = max((widths[i] for i in texts if i != widest), default=0)
            lead = max(1, widths[widest] - next_widest)
            widths[widest] -= min(excess, widths[widest] - MIN_TEXT_WIDTH, lead)
        elif any(columns[i].rank for i in shown):
            shown.remove(max(shown, key=lambda i: columns[i].rank))
        else:
            break
    cells = [[_cut(row[i], widths[i]) for i in shown] for row in rows]
    chosen = [replace(columns[i], title=_cut(columns[i].title, widths[i])) for i in shown]
    return chosen, cells, [widths[i] for i in shown]


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _titles(columns: Sequence[Column]) -> list[str]:
    return [column.title for column in columns]


def _device_rows(seen: "Snapshot") -> list[list[str]]:
    return [_device_row(device) for device in seen.devices]


def _device_row(device: "Device") -> list[str]:
    name = device.name + (f", {device.cores} cores" if device.cores else "")
    busy = f"load {device.load:.2f}" if device.load is not None else ""
    if device.utilisation is not None:
        busy = f"{device.utilisation:.0%}"
    memory = ""
    if device.memory_total:
        memory = f"{_gigabytes(device.memory_used)}/{_gigabytes(device.memory_total)} GiB"
    features = " ".join(device.features)
    pids = " ".join(map(str, device.pids))
    return [
        device.device,
        printable(name),
        busy,
        memory,
        _figure(device.clock, ".0f", " MHz"),
        _figure(device.temperature, ".0f", " °C"),
        _figure(device.power, ".0f", " W"),
        ", ".join(filter(None, [features, pids])),
    ]


def _process_rows(seen: "Snapshot") -> list[list[str]]:
    return [_process_row(process) for process in seen.processes]


def _process_row(process: "Process") -> list[str]:
    does = process.does or ""
    if process.silent is not None and process.silent >= SILENT_SECONDS:
        does = f"{does} (silent for {duration(process.silent)})"
    memory = _gigabytes(process.memory)
    if process.gpu_memory:
        gpu = f"{_gigabytes(process.gpu_memory)} on GPU"
        memory = f"{memory} + {gpu}" if memory else gpu
    return [
        str(process.pid),
        printable(process.user or "?"),
        printable(process.command),
        printable(process.device or ""),
        printable(does),
        _figure(process.sequences_per_second, ",.1f"),
        _figure(process.tokens_per_second, ",.0f"),
        _figure(process.fill, ".1%"),
        _figure(process.queue, ",.0f"),
        f"{memory} GiB" if memory else "",
        "" if process.seconds is None else duration(process.seconds),
    ]


def _gigabytes(size: int | None) -> str:
    return "" if size is None else f"{size / 2**30:.1f}"


def _figure(value: float | None, form: str, unit: str = "") -> str:
    return "" if value is None else f"{value:{form}}{unit}"
