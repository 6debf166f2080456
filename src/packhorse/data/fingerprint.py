"""All that decides the bytes of a build, as a small JSON-able value.

A source stands in it by its name, size, time of change, and a hash of its first and last bytes: to
hash a corpus whole would take as long as reading it. Together the files make one digest, so the
value stays small for a million files. Paths are not in it (a corpus may be moved), nor is what only
decides how the work is done: workers, engine, how much bad input is put up with.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packhorse import __version__
from packhorse.data.documents import Source
from packhorse.errors import InputError

EDGE = 4096  # bytes at either end of a file
NAMED = 8  # sources whose names are kept, for the reader's eye
# The libraries whose releases may clean, split, cut or draw otherwise.
DECIDE = ("mwparserfromhell", "nupunkt", "numpy", "scipy", "tokenizers", "pyarrow")


def of_sources(sources: Sequence[Source]) -> dict[str, object]:
    """The files of a corpus, in their order."""
    digest = hashlib.sha256()
    for source in sources:
        try:
            digest.update(repr((source.kind, source.column, *_stamp(source.path))).encode())
        except OSError as error:
            reason = error.strerror or error
            raise InputError(f"{source.path} cannot be read: {reason}") from error
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


def _stamp(path: Path) -> tuple[str, int, int, str]:
    found = path.stat()
    with path.open("rb") as file:
        edges = file.read(EDGE)
        file.seek(max(0, found.st_size - EDGE))
        edges += file.read(EDGE)
    return path.name, found.st_size, found.st_mtime_ns, hashlib.sha256(edges).hexdigest()
