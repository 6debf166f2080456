"""Read files of lengths: histograms in JSON or CSV, or one length per line.

People write these formats by hand or with one line of code, so every error message names the file
and the line or entry of the mistake.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from packhorse.errors import InputError
from packhorse.packing.histogram import histogram_of

LONGEST = 1 << 20  # tokens; more is a mistake, and a histogram that long a waste of memory
MAX_COUNT = 1 << 53  # beyond this, JSON numbers of other programs lose digits


def read_histogram(spec: str) -> np.ndarray:
    """Read the histogram in `FILE` or `FILE:NAME`; entry i counts length i+1.

    JSON: a list of counts, or an object of named lists (also below "histograms"). CSV: lines of
    `length,count`, with or without that header.
    """
    path, name = _split_spec(spec)
    text = _read_text(path)
    if path.suffix.lower() == ".json" or text.lstrip()[:1] in ("[", "{"):
        counts = _from_json(text, path, name)
    elif name is not None:
        raise InputError(f"{path} is a CSV and holds one histogram; leave out :{name}")
    else:
        counts = _from_csv(text, path)
    if not counts.any():
        raise InputError(f"{path} counts no sequence; at least one count must be above 0")
    return counts


def read_lengths(path: Path) -> np.ndarray:
    """Read the histogram of a file with one length per line; empty lines do not count."""
    lengths = [
        _parse_int(line, f"{path} line {number}", "a length", least=1, most=LONGEST)
        for number, line in _lines(_read_text(path))
    ]
    if not lengths:
        raise InputError(f"{path} holds no length; write one number per line")
    return histogram_of(lengths)


def _split_spec(spec: str) -> tuple[Path, str | None]:
    """Split `FILE:NAME`; a file whose name contains the colon has precedence."""
    path = Path(spec).expanduser()
    file, colon, name = spec.rpartition(":")
    if path.exists() or not colon or not file:
        return path, None
    return Path(file).expanduser(), name


def _read_text(path: Path) -> str:
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
        line = f" line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise InputError(f"{path}{line}: not JSON ({error})") from error
    counts, label = _select_list(document, path, name)
    if len(counts) > LONGEST:
        raise InputError(f"{label} has {len(counts)} entries; lengths end at {LONGEST}")
    checked = [_check_count(value, f"{label} entry {index}") for index, value in enumerate(counts)]
    return np.array(checked, np.int64)


def _select_list(document: Any, path: Path, name: str | None) -> tuple[list[Any], str]:
    """Return the list of this name, and a label of it for messages."""
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
        hint = "name one" if name is None else f"{name!r} is not among them"
        raise InputError(f"{path} holds {', '.join(lists)}; {hint} ({path}:NAME)")
    return lists[name], f"{path}:{name}"


def _check_count(value: Any, location: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1:
        raise InputError(f"{location} is {value!r}, not a count of sequences")
    return _in_range(int(value), location, "a count", least=0, most=MAX_COUNT)


def _from_csv(text: str, path: Path) -> np.ndarray:
    counts: dict[int, int] = {}
    for number, line in _lines(text):
        cells = [cell.strip() for cell in line.split(",")]
        if not counts and [cell.lower() for cell in cells] == ["length", "count"]:
            continue
        if len(cells) != 2:
            raise InputError(f"{path} line {number}: {line!r} is not `length,count`")
        location = f"{path} line {number}"
        length = _parse_int(cells[0], location, "a length", least=1, most=LONGEST)
        count = _parse_int(cells[1], location, "a count", least=0, most=MAX_COUNT)
        counts[length] = counts.get(length, 0) + count
    histogram = np.zeros(max(counts, default=0), np.int64)
    for length, count in counts.items():
        histogram[length - 1] = count
    return histogram


def _parse_int(text: str, location: str, kind: str, least: int, most: int) -> int:
    try:
        value = int(text)
    except ValueError as error:
        raise InputError(f"{location}: {text[:40]!r} is not {kind}") from error
    return _in_range(value, location, kind, least, most)


def _in_range(value: int, location: str, kind: str, least: int, most: int) -> int:
    if not least <= value <= most:
        raise InputError(f"{location}: {value} is not {kind} from {least} to {most}")
    return value
