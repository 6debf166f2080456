"""Files of datasets on the Hugging Face hub, read without a copy on disk: `hf://org/name`.

    for file in hub_files("hf://org/name@main/data"): file.open() ...

A `HubFile` has the methods of `Path` that sources need, so any worker can read a chunk of it as of
a local file: by HTTP ranges. It names a commit, so every worker, and a build that is resumed days
later, reads the same bytes.

huggingface_hub reads HF_ENDPOINT and HF_TOKEN when it is imported, so it is imported only when a
dataset is named.
"""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple, cast, final

from packhorse.errors import InputError

SCHEME = "hf://"
BLOCK_BYTES = 1 << 22  # of a request
ADDRESS = re.compile(
    r"(?:datasets/)?(?P<repository>[\w.-]+/[\w.-]+)(?:@(?P<revision>[^/@]+))?(?:/(?P<inside>.+))?"
)
# Formats that hold texts, the best described first; all files that are read have one of them.
FORMATS = (".parquet", ".jsonl", ".json", ".txt")
_PACKED = (".gz", ".zst", ".xz", ".bz2")
_NO_DATA = re.compile(r"(^|/)[._]|(^|/)(dataset_infos?|dataset_dict|state|config)\.json$")
_TRAIN = re.compile(r"(^|[/_.-])train([/_.-]|$)")


class _Status(NamedTuple):
    st_size: int


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a dataset at one commit."""

    repository: str
    commit: str
    file: str
    size: int
    content_id: str

    @property
    def name(self) -> str:
        """The last part of its path."""
        return PurePosixPath(self.file).name

    def __str__(self) -> str:
        return f"{SCHEME}{self.repository}/{self.file}"

    def stat(self) -> _Status:
        """Its size."""
        return _Status(self.size)

    def absolute(self) -> HubFile:
        """Itself: its name does not depend on a working directory."""
        return self

    def resolve(self) -> HubFile:
        """Itself."""
        return self

    def open(self, mode: str = "rb") -> BinaryIO:
        """Open it for reading; the bytes are fetched as they are asked for."""
        from huggingface_hub import HfFileSystem

        path = f"datasets/{self.repository}@{self.commit}/{self.file}"
        with _connection_errors(str(self)):
            file: Any = HfFileSystem().open(path, mode, block_size=BLOCK_BYTES)
        return cast(BinaryIO, _RemoteFile(file, str(self)))


@contextmanager
def _connection_errors(name: str) -> Iterator[None]:
    """Turn errors of the connection into a message; readers would take an OSError for damage."""
    try:
        yield
    except Exception as error:  # of the client, of HTTP and of the connection
        reason = str(error) or type(error).__name__
        raise InputError(
            f"{name} cannot be read: {reason}; check the connection and try again"
        ) from error


@final
class _RemoteFile(io.RawIOBase):
    """A file of the hub, whose errors name it."""

    def __init__(self, file: Any, name: str) -> None:
        self._file = file
        self._name = name

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0, /) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def read(self, size: int | None = -1, /) -> bytes:
        with _connection_errors(self._name):
            return self._file.read(-1 if size is None else size)

    def close(self) -> None:
        self._file.close()
        super().close()


SourcePath = Path | HubFile


def is_address(path: Path) -> bool:
    """Whether it names a dataset of the hub; `Path` turns the two slashes into one."""
    return str(path).startswith(("hf:/", SCHEME))


def hub_files(path: Path) -> list[HubFile]:
    """The files of text of a dataset, or of a folder in it, in sorted order.

    Without a folder it is those of the train split, where file names tell.
    """
    address = re.sub(r"^hf:/+", "", str(path))
    match = ADDRESS.fullmatch(address)
    if match is None:
        raise InputError(
            f"{SCHEME}{address} is no dataset; write {SCHEME}org/name[@revision][/folder]"
        )
    inside = match["inside"] or ""
    commit, entries = _list_files(match["repository"], match["revision"])
    files = [
        HubFile(match["repository"], commit, entry.path, entry.size, entry.blob_id)
        for entry in entries
        if _format_of(entry.path) and not _NO_DATA.search(entry.path) and entry.size
    ]
    if inside:
        files = [f for f in files if f.file == inside or f.file.startswith(f"{inside}/")]
    elif train := [file for file in files if _TRAIN.search(file.file)]:
        files = train
    if not files:
        raise InputError(
            f"{SCHEME}{address} has no file of text; read are {', '.join(FORMATS)}, packed"
            f" ({', '.join(_PACKED)}) or not"
        )
    formats = Counter(_format_of(file.file) for file in files)
    best = next(name for name in FORMATS if formats[name])
    return sorted((f for f in files if _format_of(f.file) == best), key=lambda file: file.file)


def _format_of(name: str) -> str:
    """One of FORMATS; "" if it has another."""
    path = PurePosixPath(name.lower())
    if path.suffix in _PACKED:
        path = path.with_suffix("")
    return path.suffix if path.suffix in FORMATS else ""


def _list_files(repository: str, revision: str | None) -> tuple[str, list[Any]]:
    """The commit, and what it holds."""
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    try:
        api = HfApi()
        commit = api.dataset_info(repository, revision=revision).sha
        tree = api.list_repo_tree(repository, recursive=True, revision=commit, repo_type="dataset")
        return str(commit), [entry for entry in tree if isinstance(entry, RepoFile)]
    except Exception as error:  # of the client, of HTTP and of the connection
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise InputError(
            f"{SCHEME}{repository} cannot be listed: {lines[0]};"
            " check the name, HF_TOKEN for a private one, and the connection"
        ) from error
