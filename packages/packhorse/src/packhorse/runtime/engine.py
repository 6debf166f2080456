"""The engine of a runner: take a batch, run it, reply; in one thread that survives what it runs.

On an accelerator a full batch is handed over while the one before it still runs, exactly one ahead.
When a batch has come back, the next is handed over first and replies are made while that one waits
its turn: what replying takes is never waited for. On a CPU the engine itself computes: a thread
beside it would only take cores from it, and requests are packed as they arrive anyway.

A request fails alone. Numbers that are not finite stay in their own sequence, because packing keeps
sequences apart. Where the model raises, the batch is run again in halves until the culprit is by
itself, and everyone else is answered: about 2 log2(n) small batches for one among n. The engine
ends only with what ends any program (SystemExit, KeyboardInterrupt), a lost device or a mistake of
ours; then every request there is or will be gets an error at once.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import InvalidStateError
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import count
from typing import Any

import numpy as np
import torch

from packhorse import status
from packhorse.errors import PackhorseError, RequestFailed, RunnerStopped
from packhorse.runtime import jobs
from packhorse.runtime.admission import Admission
from packhorse.runtime.encoder import Encoder
from packhorse.runtime.jobs import Row
from packhorse.runtime.lines import Batch, Piece, Request
from packhorse.runtime.statistics import Ran, Recorder, Stats

LOGGER = logging.getLogger(__name__)
PUBLISH_SECONDS = 1.0
LINGER = 0.06  # of a batch's time: what an idle device may cost for the next to be fuller
EXIT_SECONDS = 5.0  # how long the interpreter's exit waits for the batch that runs
NUMBERS = count(1)
NOT_FINITE = (
    "what the model made of this request is not finite (NaN, or too large for its number format); "
    "if this is not the text's fault, load it with dtype='fp32'"
)


@dataclass(frozen=True, slots=True)
class Flight:
    """A batch that was handed to the device, or what kept it from there or from coming back."""

    batch: Batch
    begun: float
    outcome: jobs.Batch | BaseException


@dataclass(frozen=True, slots=True)
class Landed:
    """What came of a batch: a row for each sequence, None where a number in it is not finite."""

    rows: Sequence[Row | None]
    tokens: int


class Engine:
    """The threads of a runner, and all they do."""

    def __init__(self, encoder: Encoder, admission: Admission) -> None:
        self.encoder, self.admission, self.recorder = encoder, admission, Recorder()
        self.name, self.pid = f"runner-{next(NUMBERS)}", os.getpid()
        self.ahead: Flight | None = None  # on an accelerator, the batch that was handed over last
        self.back: Flight | None = None  # has landed and is not replied to yet
        self.ended = threading.Event()
        self.threads = [threading.Thread(target=self._live, name=self.name, daemon=True)]

    def start(self, publish: bool) -> None:
        """Begin to run what is admitted."""
        atexit.register(self._at_exit)
        if publish:
            name = f"{self.name}-status"
            self.threads += [threading.Thread(target=self._publish, name=name, daemon=True)]
        for thread in self.threads:
            thread.start()

    def close(self, why: str, drain: bool, timeout: float | None = None) -> None:
        """Answer what waits, or fail it without `drain`; then end, and wait for that."""
        for request in self.admission.stop(why, drain):
            self._fail(request, RunnerStopped(why))
        if threading.current_thread() not in self.threads:  # a future's callback may close, too
            for thread in self.threads:
                thread.join(timeout)

    def let_go(self) -> None:
        """Answer what waits and end; no one is left to wait for it. Safe at any moment."""
        if self.pid == os.getpid():
            self.admission.stop("the runner was let go")

    def stats(self) -> Stats:
        """The figures of this moment."""
        admission, seen = self.admission, self.recorder
        waiting = admission.waiting_requests
        return Stats(
            requests=admission.admitted,
            answered=seen.answered,
            failed=seen.failed,
            cancelled=admission.cancelled,
            refused=admission.refused,
            waiting_requests=waiting,
            waiting_tokens=admission.waiting_tokens,
            running_requests=max(0, len(admission.unanswered) - waiting),
            tokens=seen.tokens,
            batches=seen.batches,
            reruns=seen.reruns,
            fill=seen.tokens / max(1, seen.batch_tokens),
            sequences_a_batch=seen.sequences / max(1, seen.batches),
            **seen.times(),
        )

    def _live(self) -> None:
        why = "the runner is closed"
        try:
            while self._step():
                pass
        except BaseException as error:
            LOGGER.critical("the engine of %s died", self.name, exc_info=True)
            why = f"the runner's engine died: {type(error).__name__}: {error}"
        finally:
            self.ended.set()
            waiting = self.admission.stop(why, drain=False)
            for request in [*waiting, *self.admission.all_unanswered()]:
                self._fail(request, RunnerStopped(why))
            atexit.unregister(self._at_exit)

    def _step(self) -> bool:
        """Hand over a batch that is due, reply to the one that is back, wait for the one that runs.

        False when all is done.
        """
        running, back = self.ahead, self.back
        batch = self.admission.next_batch(wait=not (running or back))
        computes = self.encoder.device.type == "cpu"
        with nullcontext() if computes else self.admission.hands:
            self.ahead = self._launch(batch) if batch else None
            if back:
                self._finish(back)
        self.back = _landed(running) if running else None
        if self.ahead and computes:  # it has been computed already
            self._finish(_landed(self.ahead))
            self.ahead = None
        return bool(batch or running or back)

    def _launch(self, batch: Batch) -> Flight:
        return Flight(batch, self.admission.clock(), _attempt(self._start, batch))

    def _start(self, batch: Batch) -> jobs.Batch:
        places = count()
        packs = [[next(places) for _ in row] for row in batch]
        pieces = _flat(batch)
        packed = self.admission.shape.lay([piece.sequence for piece in pieces], packs)
        job = pieces[0].request.job
        return self.encoder.launch(packed, job.heads, job.only)

    def _finish(self, flight: Flight) -> None:
        """Reply to a batch that is back; where it failed, try its halves."""
        landed = _attempt(_read, flight.outcome)
        if isinstance(landed, BaseException):
            return self._divide(flight.batch, landed)
        pieces = _flat(flight.batch)
        seconds = self.admission.clock() - flight.begun
        lengths = [[piece.tokens for piece in row] for row in flight.batch]
        ran = self.recorder.batch(lengths, landed.tokens, seconds)
        self._reply(pieces, landed.rows, ran)
        if self.admission.timeout:
            self.admission.linger(LINGER * seconds, len({piece.request for piece in pieces}))

    def _divide(self, batch: Batch, error: BaseException) -> None:
        """Run a failed batch again in halves; a sequence that fails by itself is the culprit."""
        # Where the device is lost this raises, and the engine ends at once.
        torch.zeros(1, device=self.encoder.device).cpu()
        if len(pieces := _flat(batch)) == 1:
            return self._fail(pieces[0].request, _blame(error))
        pieces = [piece for piece in pieces if not piece.request.future.done()]
        middle = len(pieces) // 2
        for half in map(set, (pieces[:middle], pieces[middle:])):
            if half:
                self.recorder.rerun()
                self._finish(
                    _landed(self._launch([[p for p in row if p in half] for row in batch]))
                )

    def _reply(self, pieces: Sequence[Piece], rows: Sequence[Row | None], ran: Ran) -> None:
        """Hand each sequence its row; requests that are whole by that are answered."""
        answers = []
        for piece, row in zip(pieces, rows, strict=True):
            request = piece.request
            if row is None:
                self._fail(request, RequestFailed(NOT_FINITE))
                continue
            request.rows[piece.index] = row
            request.left -= 1
            if not request.left:
                request.future.ran, request.future.waited = ran, request.started - request.entered
                answers.append((request, _attempt(request.job.finish, request.rows)))
        now = self.admission.clock()
        good = [request for request, found in answers if not isinstance(found, BaseException)]
        self.recorder.answer([(now - r.entered, r.future.waited) for r in good])
        for request, found in answers:
            if isinstance(found, BaseException):
                self._fail(request, _blame(found))
            else:
                _settle(request.future.set_result, found)

    def _fail(self, request: Request, error: BaseException) -> None:
        if not request.future.done():
            self.recorder.fail()
            _settle(request.future.set_exception, error)

    def _publish(self) -> None:
        """Say how it goes, once a second, in a thread that cannot harm the other."""
        about = {"model": self.encoder.name, "device": str(self.encoder.device)}
        try:
            with status.publishing(self.name, about) as say:
                while True:
                    say({**asdict(self.stats()), "sequences": self.recorder.sequences})
                    if self.ended.wait(PUBLISH_SECONDS):
                        return
        except Exception:
            LOGGER.debug("figures cannot be published", exc_info=True)

    def _at_exit(self) -> None:
        """A thread inside torch while the interpreter is torn down would crash it."""
        if self.pid == os.getpid():
            self.close("the interpreter exits", drain=False, timeout=EXIT_SECONDS)


def _flat(batch: Batch) -> list[Piece]:
    return [piece for row in batch for piece in row]


def _landed(flight: Flight) -> Flight:
    """Wait for a batch; what kept it from the device, or from coming back, is its outcome."""
    if isinstance(flight.outcome, BaseException):
        return flight
    return replace(flight, outcome=_attempt(flight.outcome.land))


def _read(outcome: jobs.Batch | BaseException) -> Landed:
    if isinstance(outcome, BaseException):
        raise outcome
    rows: list[Row | None] = [*outcome.rows()]
    if not outcome.finite():
        rows = [row if row and all(np.isfinite(x).all() for x in row) else None for row in rows]
    return Landed(rows, len(outcome.packed.ids))


def _attempt(function: Callable[..., Any], *given: Any) -> Any:
    """What it returns, or what it raised; native code may raise what is not an `Exception`."""
    try:
        return function(*given)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        return error


def _blame(error: BaseException) -> BaseException:
    """The error for a request that made the model fail, with its traceback as text.

    The frames themselves hold the whole batch, and whoever keeps the error would keep that too.
    """
    text = "".join(traceback.format_exception(error))
    for link in _chain(error):
        link.__traceback__ = None
    if isinstance(error, PackhorseError):
        return error
    failed = RequestFailed(f"the model failed on this request: {type(error).__name__}: {error}")
    failed.__cause__ = error
    failed.add_note(text)
    return failed


def _chain(error: BaseException) -> list[BaseException]:
    """An error, all that caused it and the members of groups; each once, as chains may loop."""
    chain: dict[int, BaseException] = {}
    ahead: list[BaseException | None] = [error]
    while ahead:
        link = ahead.pop()
        if link is None or id(link) in chain:
            continue
        chain[id(link)] = link
        ahead += [link.__cause__, link.__context__]
        if isinstance(link, BaseExceptionGroup):
            ahead += link.exceptions
    return list(chain.values())


def _settle(answer: Callable[[Any], None], value: Any) -> None:
    """Answer a future. Someone may have answered it in our place, and its callbacks may raise."""
    try:
        answer(value)
    except InvalidStateError:
        pass
    except BaseException:
        LOGGER.exception("a callback of a future raised")
