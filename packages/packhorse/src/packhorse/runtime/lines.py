"""Requests that can share a batch, and the open batch that they are packed into as they arrive.

A line is for requests that ask the same of the model (the same heads). Nothing here locks or waits:
`admission` does both, and says when a batch goes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from concurrent.futures import Future
from typing import Any

from packhorse.runtime.jobs import Job, Row
from packhorse.runtime.modes import Shape
from packhorse.runtime.statistics import Ran
from packhorse.tokens import Encoding


class Awaited(Future[Any]):
    """A future that knows, once it is answered, in what company it ran and how long it waited."""

    ran: Ran | None = None  # the last of its batches
    waited = 0.0  # seconds until the first


class Request:
    """A job that someone waits for, and the rows of its sequences as they come in."""

    __slots__ = ("entered", "future", "job", "left", "line", "pieces", "rows", "started", "waiting")

    def __init__(self, job: Job, now: float) -> None:
        self.job = job
        self.line: Hashable = (job.heads, job.only)  # requests of one line can share a batch
        self.future = Awaited()
        self.pieces = [Piece(self, i, sequence) for i, sequence in enumerate(job.sequences)]
        self.rows: list[Row] = [()] * len(self.pieces)
        self.left = len(self.pieces)  # sequences that were not run yet
        self.waiting = True  # until the first of them runs
        self.entered = self.started = now


class Piece:
    """One sequence of a request."""

    __slots__ = ("index", "request", "sequence", "tokens")

    def __init__(self, request: Request, index: int, sequence: Encoding) -> None:
        self.request, self.index, self.sequence = request, index, sequence
        self.tokens = len(sequence.ids)


Batch = list[list[Piece]]  # what goes into each row


class Line:
    """Requests that can share a batch: the open batch, and those behind that did not fit in."""

    def __init__(self, shape: Shape, lookahead: int) -> None:
        self.shape, self.lookahead = shape, lookahead
        self.packer = shape.packer() if shape.mode == "mask" else None  # the others have one row
        self.open: dict[Piece, None] = {}
        self.behind: OrderedDict[Piece, None] = OrderedDict()
        self.tokens = 0  # of the open batch
        self.stale = False  # the packer still counts pieces that have left

    def __len__(self) -> int:
        return len(self.open) + len(self.behind)

    @property
    def full(self) -> bool:
        """Did something not fit, or would nothing any more?"""
        return (
            bool(self.behind)
            or self.tokens == self.shape.tokens
            or len(self.open) == self.shape.max_sequences
        )

    @property
    def oldest(self) -> float:
        """When the one that waits longest came."""
        fronts = [next(iter(pieces)) for pieces in (self.open, self.behind) if pieces]
        return min(piece.request.entered for piece in fronts)

    def add(self, piece: Piece) -> None:
        """Pack it, or let it wait behind."""
        if len(self.behind) <= self.lookahead and self._pack(piece):
            return
        self.behind[piece] = None
        if self.stale:
            self._repack()

    def remove(self, piece: Piece) -> bool:
        """It leaves, if it is still here."""
        if piece in self.open:
            del self.open[piece]
            self.tokens -= piece.tokens
            self.stale = True
            return True
        return self.behind.pop(piece, piece) is None

    def take(self) -> Batch:
        """The open batch; those behind begin the next."""
        if self.stale:
            self._repack()
        pieces = list(self.open)
        packs = self.packer.flush() if self.packer is not None else [range(len(pieces))]
        batch = [[pieces[i] for i in pack] for pack in packs]
        self.open, self.tokens = {}, 0
        self._refill()
        return batch

    def _pack(self, piece: Piece) -> bool:
        if self.packer is not None:
            fits = self.packer.add(piece.tokens) is not None
        else:
            fits = self.tokens + piece.tokens <= self.shape.tokens
            fits &= len(self.open) != self.shape.max_sequences
        if not fits:
            return False
        self.open[piece] = None
        self.tokens += piece.tokens
        return True

    def _refill(self) -> None:
        passed_over: list[Piece] = []
        while self.behind and len(passed_over) <= self.lookahead:
            piece, _ = self.behind.popitem(last=False)
            if not self._pack(piece):
                passed_over.append(piece)
        for piece in reversed(passed_over):
            self.behind[piece] = None
            self.behind.move_to_end(piece, last=False)

    def _repack(self) -> None:
        everyone = sorted((*self.open, *self.behind), key=lambda piece: piece.request.entered)
        if self.packer is not None:
            self.packer.flush()
        self.open, self.tokens, self.stale = {}, 0, False
        self.behind = OrderedDict.fromkeys(everyone)
        self._refill()
