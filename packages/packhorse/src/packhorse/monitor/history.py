"""Past values of each figure, drawn as a short line of blocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from typing import final

BLOCKS = "▁▂▃▄▅▆▇█"
PLAIN = "_.-=+*%#"  # for terminals without Unicode
LENGTH = 40  # values per figure


@final
class History:
    """The last values of each figure; a figure that is no longer added is dropped."""

    def __init__(self, length: int = LENGTH) -> None:
        self._length = length
        self._values: dict[Hashable, deque[float | None]] = {}

    def add(self, figures: Iterable[tuple[Hashable, float | None]]) -> None:
        """Add the values of one snapshot; None for a figure that has no value."""
        previous = self._values
        self._values = {}
        for key, value in figures:
            self._values[key] = previous.get(key) or deque(maxlen=self._length)
            self._values[key].append(value)

    def of(self, key: Hashable) -> list[float | None]:
        """Return the values of a figure, oldest first."""
        return [*self._values.get(key, ())]


def sparkline(
    values: Sequence[float | None], most: float | None = None, blocks: str = BLOCKS
) -> str:
    """Draw each value as a block from 0 to `most`, by default the largest value."""
    top = most or max((value for value in values if value is not None), default=0.0) or 1.0
    return "".join(" " if value is None else _block(value / top, blocks) for value in values)


def _block(share: float, blocks: str) -> str:
    last = len(blocks) - 1
    return blocks[max(0, min(last, round(share * last)))]
