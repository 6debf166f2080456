"""All that decides the bytes of a build, as a small JSON-able value.

A source stands in it by its name, size, and a hash of its first and last MiB: to hash a corpus
whole would take as long as reading it. Together the files make one digest, so the value stays small
for a million files. Paths and times are not in it (a corpus may be moved or copied), nor is what
only decides how the work is done: workers, engine, how much bad input is put up with.

While a build is unfinished more must be known: which file is not as it was, and whether a large one
was changed in its middle. That is what `stamps` are for, a line a file; there, and only there, a
file that was not hashed whole is known by its time as well.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import zip_longest
from pathlib import Path

from packhorse import __version__
from packhorse.data.sources.documents import Source
from packhorse.errors import InputError

EDGE = 1 << 20  # bytes at either end of a file
NAMED = 8  # sources whose names are kept, for the reader's eye
# The libraries whose releases may clean, split, cut or draw otherwise.
DECIDE = ("mwparserfromhell", "nupunkt", "numpy", "scipy", "tokenizers", "pyarrow")


def stamps(sources: Sequence[Source]) -> list[str]:
    """A line for each file: its name, its time if its edges are not all of it, what it holds."""
    return [_stamp(source) for source in sources]


def changed(then: Sequence[str], now: Sequence[str]) -> str | None:
    """The name of the first file that is not as it was, or new, or gone; None where all are."""
    for old, new in zip_longest(then, now):
        if old != new:
            return json.loads(new or old)[0]
    return None


def of_sources(sources: Sequence[Source], stamped: Sequence[str]) -> dict[str, object]:
    """The files of a corpus, in their order, and their stamps."""
    digest = hashlib.sha256()
    for line in stamped:
        name, _, *content = json.loads(line)
        digest.update(repr((name, *content)).encode())
    return {
        "files": len(sources),
        "bytes": sum(source.size for source in sources),
        "names": [source.path.name for source in sources[:NAMED]],
        "sha256": digest.hexdigest(),
    }


def of_files(paths: Iterable[Path]) -> str:
    """The content of small files."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def of_libraries() -> dict[str, str]:
    """What is installed of that which decides."""
    found = {"packhorse": __version__}
    for name in DECIDE:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _stamp(source: Source) -> str:
    try:
        found = source.path.stat()
        with source.path.open("rb") as file:
            edges = hashlib.sha256(file.read(EDGE))
            file.seek(max(0, found.st_size - EDGE))
            edges.update(file.read(EDGE))
    except OSError as error:
        raise InputError(f"{source.path} cannot be read: {error.strerror or error}") from error
    time = found.st_mtime_ns if found.st_size > 2 * EDGE else None
    content = (source.kind, source.column, found.st_size, edges.hexdigest())
    return json.dumps([source.path.name, time, *content])
