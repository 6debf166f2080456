"""Files of lengths: histograms in JSON or CSV, or one length a line.

Small formats that people write by hand or with one line of code, so every mistake is told with the
file and the line or entry it is in.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from packhorse.errors import InputError
from packhorse.packing.histogram import histogram_of

LONGEST = 1 << 20  # a length beyond this is a mistake, and a histogram that long a waste of memory


def read_histogram(spec: str) -> np.ndarray:
    """The histogram in `FILE` or `FILE:NAME`; entry i counts length i+1.

    JSON: a list of counts, or an object of named lists (also below "histograms"). CSV: lines of
    `length,count`, with or without that header.
    """
    path, name = _locate(spec)
    text = _read(path)
    if path.suffix.lower() == ".json" or text.lstrip()[:1] in ("[", "{"):
        counts = _from_json(text, path, name)
    elif name is not None:
        raise InputError(f"{path} is a CSV and holds one histogram; leave out :{name}")
    else:
        counts = _from_csv(text, path)
    if not counts.any():
        raise InputError(f"{path} counts no sequence at all")
    return counts


def read_lengths(path: Path) -> np.ndarray:
    """The histogram of a file with one length a line; empty lines do not count."""
    lengths = [
        _whole(line, f"{path} line {number}", "a length", least=1, most=LONGEST)
        for number, line in _lines(_read(path))
    ]
    if not lengths:
        raise InputError(f"{path} holds no length; write one number a line")
    return histogram_of(lengths)


def _locate(spec: str) -> tuple[Path, str | None]:
    """A file whose own name has a colon wins over a name in a file."""
    path = Path(spec).expanduser()
    file, colon, name = spec.rpartition(":")
    if path.exists() or not colon or not file:
        return path, None
    return Path(file).expanduser(), name


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not a text file") from error
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error


def _lines(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            yield number, line.strip()


def _from_json(text: str, path: Path, name: str | None) -> np.ndarray:
    try:
        document = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        where = f" line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise InputError(f"{path}{where}: not JSON ({error})") from error
    counts, label = _named(document, path, name)
    if len(counts) > LONGEST:
        raise InputError(f"{label} has {len(counts)} entries; lengths end at {LONGEST}")
    checked = [_count(value, f"{label} entry {index}") for index, value in enumerate(counts)]
    return np.array(checked, np.int64)


def _named(document: Any, path: Path, name: str | None) -> tuple[list[Any], str]:
    """The list asked for, and what to call it in a message."""
    if isinstance(document, list):
        if name is not None:
            raise InputError(f"{path} holds one unnamed list; leave out :{name}")
        return document, str(path)
    group = document if isinstance(document, dict) else {}
    group = group["histograms"] if isinstance(group.get("histograms"), dict) else group
    lists = {key: value for key, value in group.items() if isinstance(value, list)}
    if not lists:
        raise InputError(f"{path} holds no list of counts; entry i counts length i+1")
    if name is None and len(lists) == 1:
        name = next(iter(lists))
    if name not in lists:
        asked = "name one" if name is None else f"{name!r} is not among them"
        raise InputError(f"{path} holds {', '.join(lists)}; {asked} ({path}:NAME)")
    return lists[name], f"{path}:{name}"


def _count(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1:
        raise InputError(f"{where} is {value!r}, not a count of sequences")
    return _in_range(int(value), where, "a count", least=0, most=1 << 53)


def _from_csv(text: str, path: Path) -> np.ndarray:
    counts: dict[int, int] = {}
    for number, line in _lines(text):
        cells = [cell.strip() for cell in line.split(",")]
        if not counts and [cell.lower() for cell in cells] == ["length", "count"]:
            continue
        if len(cells) != 2:
            raise InputError(f"{path} line {number}: {line!r} is not `length,count`")
        where = f"{path} line {number}"
        length = _whole(cells[0], where, "a length", least=1, most=LONGEST)
        count = _whole(cells[1], where, "a count", least=0, most=1 << 53)
        counts[length] = counts.get(length, 0) + count
    histogram = np.zeros(max(counts, default=0), np.int64)
    for length, count in counts.items():
        histogram[length - 1] = count
    return histogram


def _whole(text: str, where: str, what: str, least: int, most: int) -> int:
    try:
        value = int(text)
    except ValueError as error:
        raise InputError(f"{where}: {text[:40]!r} is not {what}") from error
    return _in_range(value, where, what, least, most)


def _in_range(value: int, where: str, what: str, least: int, most: int) -> int:
    if not least <= value <= most:
        raise InputError(f"{where}: {value} is not {what} from {least} to {most}")
    return value
