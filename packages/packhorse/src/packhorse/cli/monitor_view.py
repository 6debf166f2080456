"""The monitor's tables: as wide as the terminal or as COLUMNS says, without limit in a file.

Words give way first (they are cut with …), then whole columns, the least important first: a line
that wraps is worse than one that lacks a figure. A column without any figure is not shown.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from packhorse.cli.console import printable
from packhorse.train.display import duration

if TYPE_CHECKING:
    from packhorse.monitor import Snapshot
    from packhorse.monitor.history import History
    from packhorse.monitor.machine import Device
    from packhorse.monitor.processes import Process

NARROWEST = 8  # characters that are left of words
QUIET = 10.0  # seconds without a word that are worth one
IDLE = "No packhorse process runs."


@dataclass(frozen=True, slots=True)
class Column:
    """One figure of every row; those of a high `rank` give way first."""

    title: str
    rank: int = 0
    words: bool = False


DEVICES = (
    Column("device"),
    Column("name", words=True),
    Column("busy"),
    Column("memory", 1),
    Column("clock", 4),
    Column("temp", 3),
    Column("power", 2),
    Column("features, processes", 5, words=True),
)
PROCESSES = (
    Column("pid"),
    Column("user", 5),
    Column("command", 3, words=True),
    Column("device", 2),
    Column("does", words=True),
    Column("seq/s"),
    Column("tok/s", 1),
    Column("full"),
    Column("queue"),
    Column("memory", 4),
    Column("time", 6),
)
HISTORY = (Column("pid"), Column("seq/s"), Column("full"), Column("queue", 1))


def show(seen: "Snapshot") -> None:
    """Both tables on stdout."""
    if sys.stdout.isatty():
        from rich.console import Console

        console = Console()
        for drawn in _drawn(seen, console.width):
            console.print(drawn)
        return
    width = os.environ.get("COLUMNS", "")
    _plain("Devices", DEVICES, _devices(seen), int(width) if width.isdigit() else None)
    if seen.processes:
        print()
        _plain("Processes", PROCESSES, _processes(seen), int(width) if width.isdigit() else None)
    else:
        print(f"\n{IDLE}")


@contextmanager
def screen() -> "Iterator[Callable[[Snapshot], None]]":
    """A screen of its own, drawn anew at every look, with how the figures went."""
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    from packhorse.monitor.history import BLOCKS, PLAIN, History

    console, history = Console(), History()
    blocks = BLOCKS if "utf" in console.encoding.lower() else PLAIN
    with Live(console=console, screen=True, auto_refresh=False) as live:

        def draw(seen: "Snapshot") -> None:
            history.add(_figures(seen))
            parts = [*_drawn(seen, console.width), *_past(seen, history, console.width, blocks)]
            parts += [Text(printable(each), style="yellow") for each in seen.notes]
            live.update(Group(*parts, Text("q leaves", style="dim")), refresh=True)

        yield draw


def _figures(seen: "Snapshot") -> Iterator[tuple[Any, float | None]]:
    for process in seen.processes:
        if process.name is not None:
            key = (process.pid, process.name)
            yield (*key, "seq/s"), process.sequences_per_second
            yield (*key, "full"), process.fill
            yield (*key, "queue"), process.queue


def _past(seen: "Snapshot", history: "History", width: int, blocks: str) -> list[Any]:
    from packhorse.monitor.history import sparkline

    most, room, rows = {"full": 1.0}, width // 4, []
    for process in seen.processes:
        if process.name is not None:
            past = {title: (process.pid, process.name, title) for title in _titles(HISTORY)[1:]}
            lines = [
                sparkline(history.of(key), most.get(title), blocks)[-room:]
                for title, key in past.items()
            ]
            rows.append([str(process.pid), *lines])
    return [_rich("History", HISTORY, rows, width)] if rows else []


def _drawn(seen: "Snapshot", width: int) -> list[Any]:
    from rich.text import Text

    drawn = [_rich("Devices", DEVICES, _devices(seen), width)]
    if seen.processes:
        return [*drawn, _rich("Processes", PROCESSES, _processes(seen), width)]
    return [*drawn, Text(IDLE)]


def _rich(title: str, columns: Sequence[Column], rows: list[list[str]], width: int) -> Any:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    columns, rows, widths = fit(columns, rows, width - 4, gap=3)  # 4: the frame at both sides
    drawn = Table(title=title, title_justify="left", box=box.ROUNDED)
    for column, wide in zip(columns, widths, strict=True):
        drawn.add_column(
            Text(column.title),
            justify="left" if column.words else "right",
            no_wrap=True,
            width=wide,
        )
    for row in rows:
        drawn.add_row(*map(Text, row))
    return drawn


def _plain(title: str, columns: Sequence[Column], rows: list[list[str]], width: int | None) -> None:
    columns, rows, widths = fit(columns, rows, width, gap=2)
    print(title)
    for row in (_titles(columns), ["-" * wide for wide in widths], *rows):
        cells = zip(columns, row, widths, strict=True)
        padded = [
            text.ljust(wide) if column.words else text.rjust(wide) for column, text, wide in cells
        ]
        print("  ".join(padded).rstrip())


def fit(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int | None, gap: int
) -> tuple[list[Column], list[list[str]], list[int]]:
    """The columns, cells and widths that go into `width` characters; None: all of them."""
    kept = [i for i, column in enumerate(columns) if not column.rank or any(r[i] for r in rows)]
    widths = [max(map(len, cells)) for cells in zip(_titles(columns), *rows, strict=True)]
    while width is not None and (over := sum(widths[i] + gap for i in kept) - gap - width) > 0:
        words = [i for i in kept if columns[i].words and widths[i] > NARROWEST]
        if words:
            widest = max(words, key=lambda i: widths[i])
            widths[widest] -= min(over, widths[widest] - NARROWEST, _lead(widths, words, widest))
        elif any(columns[i].rank for i in kept):
            kept.remove(max(kept, key=lambda i: columns[i].rank))
        else:
            break
    cells = [[_cut(row[i], widths[i]) for i in kept] for row in rows]
    chosen = [
        Column(_cut(columns[i].title, widths[i]), columns[i].rank, columns[i].words) for i in kept
    ]
    return chosen, cells, [widths[i] for i in kept]


def _lead(widths: list[int], words: list[int], widest: int) -> int:
    """By how much the widest is wider than the next, so that words give way evenly."""
    rest = [widths[i] for i in words if i != widest]
    return max(1, widths[widest] - max(rest, default=0))


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _titles(columns: Sequence[Column]) -> list[str]:
    return [column.title for column in columns]


def _devices(seen: "Snapshot") -> list[list[str]]:
    return [_device(device) for device in seen.devices]


def _device(device: "Device") -> list[str]:
    name = device.name + (f", {device.cores} cores" if device.cores else "")
    busy = f"load {device.load:.2f}" if device.load is not None else ""
    if device.utilisation is not None:
        busy = f"{device.utilisation:.0%}"
    used, total = device.memory_used, device.memory_total
    memory = f"{_gigabytes(used)}/{_gigabytes(total)} GiB" if total else ""
    more = [" ".join(device.features), " ".join(map(str, device.pids))]
    return [
        device.device,
        printable(name),
        busy,
        memory,
        _figure(device.clock, ".0f", " MHz"),
        _figure(device.temperature, ".0f", " °C"),
        _figure(device.power, ".0f", " W"),
        ", ".join(filter(None, more)),
    ]


def _processes(seen: "Snapshot") -> list[list[str]]:
    return [_process(process) for process in seen.processes]


def _process(process: "Process") -> list[str]:
    does = process.does or ""
    if process.silent is not None and process.silent >= QUIET:
        does = f"{does} (silent for {duration(process.silent)})"
    gpu = process.gpu_memory
    parts = [_gigabytes(process.memory), f"{_gigabytes(gpu)} on GPU" if gpu else ""]
    memory = " + ".join(filter(None, parts))
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
