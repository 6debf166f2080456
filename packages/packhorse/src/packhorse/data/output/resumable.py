"""A file of results that grows chunk by chunk and survives being killed at any moment.

Rows are appended to `FILE.partial`; only when they are on disk does a small `FILE.partial.json` say
so (it is replaced whole, which a kill cannot tear). What lies in the partial file beyond what is
said there is the torn end of a chunk: it is cut off and that chunk done again. The finished file
takes its name last, so a file of that name is always whole. Chunks are cut at the same rows however
often the work was interrupted, hence the result is the same, byte for byte.

The cost is one fsync a chunk, and a second pass over the rows where the format (parquet) cannot be
appended to. The lock keeps two processes apart; it is the kernel's, and dies with its holder.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, final

from packhorse.atomic import lock, sync
from packhorse.data.output.rows import Row, Shape, format_of
from packhorse.errors import InputError

AGAIN = "pass --overwrite to begin again"


@dataclass
class _State:
    """What the partial files are vouched to hold."""

    made_by: dict[str, Any]
    consumed: int = 0  # texts of the input that need no second look
    rows: int = 0
    numbered: bool = True  # ids are 0, 1, 2 …: the number of an array's row says it all
    head: int = 0  # bytes before the first row
    sizes: tuple[int, ...] = ()  # bytes of each file; none before the first row


@final
class ResumableFile:
    """Rows on their way to `path`; `consumed` says where in the input to go on."""

    def __init__(
        self,
        path: str | Path,
        shape: Shape,
        made_by: Mapping[str, Any],
        *,
        overwrite: bool = False,
    ) -> None:
        """`made_by` names all that decides the rows; work made otherwise is not continued.

        overwrite: what is in the way, a whole file or such work, may go.
        """
        self.path = Path(path)
        self._shape, self._format = shape, format_of(self.path, shape)
        self._state = _State(json.loads(json.dumps(made_by)))
        self._head = b""
        self._files: list[BinaryIO] = []
        self._owned = False  # until then the partial files may be another's
        try:
            with self._named():
                self._refuse_whole(overwrite)
                self._open()
                self._refuse_whole(overwrite)
                self._resume(overwrite)
                self._owned = True
        except BaseException:
            self.close()
            raise

    @property
    def consumed(self) -> int:
        """How many texts of the input are done with."""
        return self._state.consumed

    @property
    def rows(self) -> int:
        """How many rows are on disk."""
        return self._state.rows

    def append(self, rows: Sequence[Row], consumed: int) -> None:
        """Make rows durable, together with how much of the input has been consumed for them."""
        with self._named():
            if rows:
                self._write(rows)
            self._state.consumed = consumed
            self._save()

    def finish(self) -> None:
        """Give the file its name; the work is then done."""
        if not self._state.sizes:
            raise InputError(f"{self.path}: there are no results to write")
        whole = Path(f"{self.path}.whole")
        partials = self._partials()
        with self._named():
            whole.unlink(missing_ok=True)  # of a kill, or somebody else's: not these rows
            self._format.finish(self._files[0], self._state.rows, whole)
            self._sync()
            self.path.unlink(missing_ok=True)  # never an old file beside new ids
            for partial, beside in zip(partials[1:], self._beside(), strict=True):
                if self._state.numbered:
                    beside.unlink(missing_ok=True)
                else:
                    partial.replace(beside)
            rewritten = whole if whole.exists() else partials[0]
            sync(rewritten)
            rewritten.replace(self.path)
            for leftover in (*partials, self._state_path()):
                leftover.unlink(missing_ok=True)
            sync(self.path.parent)
        self.close()

    def close(self) -> None:
        """Let go; what was appended stays, to be continued."""
        for file in self._files:
            file.close()
            if self._owned and not self._state.sizes:
                Path(file.name).unlink(missing_ok=True)
        self._files = []

    def _open(self) -> None:
        partials = self._partials()
        for partial, beside in zip(partials[1:], self._beside(), strict=True):
            # A kill may have come between this renaming and that of the file itself.
            done = self.path.exists() or partial.exists() or not self._state_path().exists()
            if beside.exists() and not done:
                beside.replace(partial)
        for partial in partials:
            partial.touch()
            self._files.append(partial.open("r+b"))
        lock(self._files[0], self.path)
        if not os.path.samestat(os.fstat(self._files[0].fileno()), partials[0].stat()):
            raise InputError(f"{self.path} was finished by another process just now")

    def _write(self, rows: Sequence[Row]) -> None:
        state = self._state
        pieces = [b""] * len(self._files)
        if not state.sizes:
            pieces = self._format.head(rows, self._shape)
            self._head = pieces[0]
        bodies = self._format.body(rows, self._head)
        for file, head, body in zip(self._files, pieces, bodies, strict=True):
            file.seek(0, os.SEEK_END)
            file.write(head + body)
        self._sync()
        state.sizes = tuple(file.tell() for file in self._files)
        state.head = len(self._head)
        numbers = range(state.rows, state.rows + len(rows))
        state.numbered &= all(row["id"] == i for row, i in zip(rows, numbers, strict=True))
        state.rows += len(rows)

    def _sync(self) -> None:
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())

    def _save(self) -> None:
        draft = Path(f"{self._state_path()}.new")
        draft.write_text(json.dumps(asdict(self._state)), "utf-8")
        sync(draft)
        draft.replace(self._state_path())
        sync(self.path.parent)

    def _resume(self, overwrite: bool) -> None:
        """Take up what an earlier run left, cut to what it vouched for."""
        before = self._state
        try:
            self._state = self._left() or before
        except InputError:
            if not overwrite:
                raise
            self._state_path().unlink()
        for file, size in zip(self._files, self._state.sizes or (0, 0), strict=False):
            file.truncate(size)
        self._head = self._files[0].read(self._state.head)

    def _left(self) -> _State | None:
        """What an earlier run of the same making vouched for."""
        path = self._state_path()
        if not path.exists():
            return None
        try:
            state = _State(**json.loads(path.read_text("utf-8")))
        except (ValueError, TypeError) as error:
            raise InputError(f"{path} is damaged; {AGAIN}") from error
        ours = self._state.made_by
        for key in (*ours, *state.made_by):
            then, now = state.made_by.get(key), ours.get(key)
            if then != now:
                raise InputError(
                    f"{self._partials()[0]} was begun with another {key} "
                    f"({then!r:.60}, now {now!r:.60}); {AGAIN}"
                )
        for file, size in zip(self._files, state.sizes, strict=False):
            if os.fstat(file.fileno()).st_size < size:
                raise InputError(f"{file.name} is shorter than it was left; {AGAIN}")
        return state

    def _refuse_whole(self, overwrite: bool) -> None:
        if self.path.is_dir():
            raise InputError(f"{self.path} is a folder; name a file")
        if self.path.exists() and not overwrite:
            raise InputError(f"{self.path} exists already; {AGAIN}")

    def _partials(self) -> list[Path]:
        return [Path(f"{self.path}{suffix}.partial") for suffix in ("", *self._format.beside)]

    def _beside(self) -> list[Path]:
        return [Path(f"{self.path}{suffix}") for suffix in self._format.beside]

    def _state_path(self) -> Path:
        return Path(f"{self.path}.partial.json")

    @contextmanager
    def _named(self) -> Iterator[None]:
        """What the disk refuses is the user's to hear of, by name."""
        try:
            yield
        except OSError as error:
            reason = error.strerror or error
            raise InputError(f"{self.path} cannot be written: {reason}") from error
