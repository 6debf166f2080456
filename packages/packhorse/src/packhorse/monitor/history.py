"""How figures went lately, as one short line of blocks each."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from typing import final

BLOCKS, PLAIN = "▁▂▃▄▅▆▇█", "_.-=+*%#"
LENGTH = 40  # looks that are remembered


@final
class History:
    """The last values of each figure; a figure that is no longer seen is forgotten."""

    def __init__(self, length: int = LENGTH) -> None:
        self._length = length
        self._values: dict[Hashable, deque[float | None]] = {}

    def add(self, figures: Iterable[tuple[Hashable, float | None]]) -> None:
        """One look: the value of each figure that was seen, None where it had none."""
        before, self._values = self._values, {}
        for key, value in figures:
            self._values[key] = before.get(key) or deque(maxlen=self._length)
            self._values[key].append(value)

    def of(self, key: Hashable) -> list[float | None]:
        """The values of a figure, oldest first."""
        return [*self._values.get(key, ())]


def sparkline(
    values: Sequence[float | None], most: float | None = None, blocks: str = BLOCKS
) -> str:
    """Each value as a block, zero the lowest, `most` (by default their own) the highest."""
    top = most or max((value for value in values if value is not None), default=0.0) or 1.0
    return "".join(" " if value is None else _block(value / top, blocks) for value in values)


def _block(share: float, blocks: str) -> str:
    last = len(blocks) - 1
    return blocks[max(0, min(last, round(share * last)))]
