"""`packhorse monitor`: devices and running packhorse processes, once or for as long as one looks.

Once it is a table that `watch -n 2 packhorse monitor` can repeat; with --watch a screen of its own
on a terminal, plain tables elsewhere. Leaving by q or Ctrl-C is no failure.
"""

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from packhorse.cli.console import JsonFlag, emit, note
from packhorse.errors import InputError

if TYPE_CHECKING:
    from packhorse.monitor import Snapshot

Wait = Callable[[float], bool]  # so many seconds; True: whoever looks wants to leave
SECONDS = 2.0
SHORTEST = 0.1


def monitor(
    seconds: Annotated[
        float | None, Parameter(help="Between two looks, with --watch; default 2.")
    ] = None,
    /,
    *,
    watch: Annotated[
        bool, Parameter(negative="", show_default=False, help="Look again and again, with history.")
    ] = False,
    json: JsonFlag = False,
) -> None:
    """Show the devices here, and what packhorse processes do on them.

    With --json one document, with --watch one a line. A screen is left with q
    or Ctrl-C.

    Try:
      packhorse monitor
      packhorse monitor --watch
      packhorse monitor --watch 0.5
      watch -n 2 packhorse monitor
    """
    from packhorse.monitor import look, nvidia

    if seconds is not None and not watch:
        raise InputError(f"{seconds:g} seconds between what? Add --watch to look again and again")
    if seconds is not None and not SHORTEST <= seconds < float("inf"):
        raise InputError(f"seconds between two looks must be {SHORTEST:g} or more, not {seconds:g}")
    with nvidia.opened() as (library, notes):
        for each in notes:
            note(each)
        if watch:
            _watch(lambda: look(library), SECONDS if seconds is None else seconds, json)
        else:
            seen = look(library)
            for each in seen.notes:
                note(each)
            _once(seen, json)


def _once(seen: "Snapshot", json: bool) -> None:
    from packhorse.cli.monitor_view import show

    if not json:
        show(seen)
    emit(document(seen), json)


def document(seen: "Snapshot") -> dict[str, Any]:
    """As JSON has it; of a GPU's processes only ours are told."""
    told = asdict(seen)
    for device in told["devices"]:
        del device["memory_by_pid"]
    return told


def _watch(look: "Callable[[], Snapshot]", seconds: float, json: bool) -> None:
    with _ended_in_order():
        try:
            if json or not sys.stdout.isatty():
                _lines(look, seconds, json)
            else:
                from packhorse.cli.monitor_view import screen

                with keys() as wait, screen() as draw:
                    draw(look())
                    while not wait(seconds):
                        draw(look())
        except KeyboardInterrupt:
            return


def _lines(look: "Callable[[], Snapshot]", seconds: float, json: bool) -> None:
    """Look after look, for a file or another program; what is to be noted, when it is new."""
    noted: tuple[str, ...] = ()
    while True:
        seen = look()
        for each in set(seen.notes) - set(noted):
            note(each)
        noted = seen.notes
        if not json:
            print(time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seen.time)))
        _once(seen, json)
        sys.stdout.flush()
        time.sleep(seconds)


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """A terminal is put right again whatever ends the watch."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def keys() -> Iterator[Wait]:
    """Something that waits, and ends at once when q is pressed."""
    try:
        import select
        import termios
        import tty

        before = termios.tcgetattr(sys.stdin)
    except Exception:  # no terminal to be read, or not of this kind: Ctrl-C is left
        yield lambda seconds: bool(time.sleep(seconds))
        return

    def wait(seconds: float) -> bool:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if select.select([sys.stdin], [], [], left)[0] and _quits(sys.stdin.fileno()):
                return True
        return False

    tty.setcbreak(sys.stdin)
    try:
        yield wait
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _quits(descriptor: int) -> bool:
    """Is what was typed, or the end of it, a wish to leave?"""
    import os

    typed = os.read(descriptor, 64)
    return not typed or bool(set(typed) & set(b"qQ\x04"))
