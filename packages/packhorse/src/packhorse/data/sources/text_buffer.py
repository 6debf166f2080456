"""A buffer over unpacked text: look ahead, then take from the front; never unpacks more."""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

from packhorse.data.sources.unpacking import PIECE_BYTES, Pieces


@final
class TextBuffer:
    """A buffer over pieces of text; their problems are kept for the next `take`."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._text = bytearray()
        self._problems: list[str] = []

    @property
    def problem(self) -> str:
        """The first problem that no `take` has returned yet, or ""."""
        return self._problems[0] if self._problems else ""

    def peek(self, position: int, count: int) -> bytes:
        """The text from `position` on, at most `count` bytes; less only at its end."""
        while len(self._text) < position + count and (piece := next(self._pieces, None)):
            text, problem = piece
            self._text += text
            if problem:
                self._problems.append(problem)
        return bytes(self._text[position : position + count])

    def take(self, count: int) -> tuple[bytes, tuple[str, ...]]:
        """The first bytes, which leave the buffer, and the problems up to now."""
        taken = bytes(self._text[:count])
        problems = tuple(self._problems)
        del self._text[:count], self._problems[:]
        return taken, problems

    def remaining(self) -> Iterator[tuple[bytes, str]]:
        """All that is left, as pieces."""
        while self.peek(0, PIECE_BYTES) or self._problems:
            text, problems = self.take(PIECE_BYTES)
            yield text, ""
            yield from ((b"", problem) for problem in problems)
