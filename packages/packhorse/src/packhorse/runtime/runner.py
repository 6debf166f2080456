"""PackRunner: requests that come one by one, packed together under a latency budget.

    with packhorse.PackRunner(model, timeout=0.005) as runner:
        futures = [runner.submit(text) for text in texts]

Whoever submits a text tokenizes it; `admission` packs what arrives into the next batch; the
`engine`, a thread, runs one batch after the other and replies. This file is the door to the three.

A thread and not a process: requests and answers are shared by reference, torch lets go of the
interpreter's lock while it computes, and the host's work for a batch is small beside it.
"""

from __future__ import annotations

import asyncio
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from packhorse.data.tables import as_texts
from packhorse.errors import InputError, RunnerStopped
from packhorse.runtime.admission import Admission
from packhorse.runtime.encoder import Encoder
from packhorse.runtime.engine import Engine
from packhorse.runtime.jobs import Given, Job
from packhorse.runtime.lines import Awaited
from packhorse.runtime.modes import Shape
from packhorse.runtime.statistics import Ran, Stats

CHUNK = 256  # texts that `run` prepares at a time
BATCHES_WAITING = 8  # what may wait by default, in batches


class PackRunner:
    """An encoder that takes requests from any thread and answers each as if it were alone.

    A batch has `rows` × `capacity` tokens (by default the encoder's budget in rows of its longest
    text); `capacity` is also the longest a sequence may be. `mode` is the batch's shape, see
    `runtime.modes`: "ragged", "mask" or "repack", whatever the kernel. Without a mode a kernel of
    that name decides, any other runs ragged.

    A batch goes out when it is full, when it has `max_sequences`, or when its oldest request has
    waited `timeout` seconds. That is waited for even when the device is idle, because the next
    request may be about to share the batch; with 0, a batch is what waits when the device is free.
    `policy` is the row a sequence goes to in mode "mask"; `lookahead` how many sequences that do
    not fit may be passed over for later ones that do: rows get fuller by it and long sequences wait
    longer, so it is 0 unless you ask.

    At most `max_waiting_tokens` (by default 8 batches) and `max_waiting_requests` wait; beyond that
    `submit` raises `Overloaded`. With `publish` the figures of `stats()` can be seen by `packhorse
    monitor`: it is on, costs a small file a second, and a file that cannot be written is no error.

    For those who come from PopRT: `timeout_microseconds=15000` is `timeout=0.015`, `max_valid_num`
    is `max_sequences`, `segment_max_size` is `capacity`, the batch size is `rows`, the algorithm is
    `policy`, `enable_input_single_row_mode` is `mode="mask"` and its absence `mode="repack"`; a
    batch closes at the first request that does not fit.
    """

    def __init__(
        self,
        encoder: Encoder,
        *,
        capacity: int | None = None,
        rows: int | None = None,
        max_sequences: int | None = None,
        timeout: float = 0.005,
        policy: str = "first_fit",
        mode: str | None = None,
        lookahead: int = 0,
        max_waiting_tokens: int | None = None,
        max_waiting_requests: int = 1024,
        publish: bool = True,
    ) -> None:
        if isinstance(encoder, str):
            raise InputError(f"a runner takes an encoder: PackRunner(packhorse.load({encoder!r}))")
        capacity = encoder.max_length if capacity is None else capacity
        rows = max(1, encoder.budget // max(1, capacity)) if rows is None else rows
        shape = Shape(_mode(encoder, mode), rows, capacity, max_sequences, policy)
        max_tokens = max_waiting_tokens or BATCHES_WAITING * shape.tokens
        if not 0 <= timeout <= threading.TIMEOUT_MAX:
            raise InputError(f"timeout is {timeout} seconds; it must be 0 or more")
        if max_tokens < capacity or max_waiting_requests < 1 or lookahead < 0:
            raise InputError(
                f"max_waiting_tokens ({max_tokens}) must be at least a sequence of {capacity}, "
                f"max_waiting_requests ({max_waiting_requests}) 1 and lookahead ({lookahead}) 0"
            )
        self.encoder = replace(encoder, max_length=min(encoder.max_length, capacity))
        self.shape = shape
        self._admission = Admission(
            shape,
            timeout=timeout,
            max_tokens=max_tokens,
            max_requests=max_waiting_requests,
            lookahead=lookahead,
        )
        self._engine = Engine(self.encoder, self._admission)
        # The threads know the engine and not the runner, so that they end when no one knows it.
        weakref.finalize(self, self._engine.let_go).atexit = False
        self._engine.start(publish)

    def submit(self, text: Given, task: str = "embed", **options: Any) -> Future[Any]:
        """A future of what the encoder's method named by `task` gives for this one text.

        `text` is a text, a pair, or token ids as they are; `options` are that method's own. Bad
        input and `Overloaded` are raised here; the future's callbacks run on the engine's thread
        and should be brief.
        """
        self._check_process()
        with self._admission.door():
            (job,) = self.encoder.prepare(task, [text], **options)
        return self._push(job)

    def prepare(self, texts: Sequence[Given], task: str = "embed", **options: Any) -> list[Job]:
        """The first half of `submit`, for several: `Overloaded` at once where no one gets in."""
        self._check_process()
        with self._admission.door():
            return self.encoder.prepare(task, texts, **options)

    def promise(self, jobs: Sequence[Job]) -> None:
        """Keep room for all of these, which are admitted one after the other; or `Overloaded`."""
        self._check_process()
        self._admission.promise(len(jobs), sum(job.tokens for job in jobs))

    def admit(self, job: Job) -> Awaited:
        """The second half of `submit`, for a job that was promised room.

        It is brief, and so may be called from a future's callback.
        """
        if job.sequences:
            return self._admission.push_promised(job)
        self._admission.release(1, 0)
        return self._push(job)

    def release(self, jobs: Sequence[Job]) -> None:
        """Those that were promised room will not come."""
        self._admission.release(len(jobs), sum(job.tokens for job in jobs))

    async def asubmit(self, text: Given, task: str = "embed", **options: Any) -> Any:
        """`submit` for asyncio: cancelling what awaits it cancels the request."""
        self._check_process()
        # A thread cannot be ended. So its place at the door is given back when it ends by itself,
        # not when whoever awaits it is cancelled.
        place = self._admission.door()
        place.__enter__()
        prepared: Future[list[Job]] = Future()
        prepared.add_done_callback(lambda _: place.__exit__(None, None, None))
        prepare = partial(self.encoder.prepare, task, [text], **options)
        try:
            asyncio.get_running_loop().run_in_executor(None, _run_into, prepared, prepare)
        except BaseException:
            prepared.cancel()
            raise
        (job,) = await asyncio.wrap_future(prepared)
        return await asyncio.wrap_future(self._push(job))

    def run(self, texts: Sequence[Given], task: str = "embed", **options: Any) -> list[Any]:
        """All the answers, in order; waits for room instead of raising `Overloaded`."""
        self._check_process()
        texts = as_texts(texts)
        texts = texts if isinstance(texts, Sequence) else list(texts)
        futures: list[Future[Any]] = []
        try:
            for begin in range(0, len(texts), CHUNK):  # the engine runs while the rest is prepared
                for job in self.encoder.prepare(task, texts[begin : begin + CHUNK], **options):
                    futures.append(self._push(job, patient=True))
            return [future.result() for future in futures]
        except BaseException:
            for future in futures:
                future.cancel()
            raise

    def warm(self, task: str = "embed") -> None:
        """Run a batch of every size, so that nothing is compiled while someone waits for an answer.

        For an encoder with `graphs`, before the first request; `task` is one that takes token ids.
        """
        for size in self.shape.sizes():
            lengths = [self.shape.capacity] * (size // self.shape.capacity)
            lengths += [size % self.shape.capacity] * (size % self.shape.capacity > 0)
            jobs = self.encoder.prepare(task, [np.zeros(length, int) for length in lengths])
            sequences = [sequence for job in jobs for sequence in job.sequences]
            packed = self.shape.lay(sequences, [[place] for place in range(len(sequences))])
            self.encoder.launch(packed, jobs[0].heads, jobs[0].only).land()

    def stats(self) -> Stats:
        """The figures of this moment."""
        return self._engine.stats()

    @property
    def waiting_tokens(self) -> int:
        """That were admitted, or promised room, and did not run yet."""
        return self._admission.waiting_tokens + self._admission.promised_tokens

    @property
    def max_waiting_requests(self) -> int:
        """More than that never wait; no more can be promised room together."""
        return self._admission.max_requests

    @property
    def max_waiting_tokens(self) -> int:
        """More than that never waits; no single request can be larger."""
        return self._admission.max_tokens

    def recent(self) -> list[Ran]:
        """The last batches as they were laid, the newest last."""
        return self._engine.recorder.recent()

    def rate(self) -> float:
        """Tokens a second while the last batches ran; 0 before the first."""
        ran = self.recent()
        return sum(each.tokens for each in ran) / max(1e-9, sum(each.seconds for each in ran))

    def idle_seconds(self) -> float:
        """Since a batch came back; infinite before the first."""
        ran = self.recent()
        return time.monotonic() - ran[-1].ended if ran else math.inf

    @property
    def alive(self) -> bool:
        """Would a request be admitted, if there is room?"""
        return self._admission.stopped is None and self._engine.pid == os.getpid()

    def close(self, drain: bool = True) -> None:
        """Admit no more, answer what waits (or fail it, without `drain`), and end the threads."""
        if self._engine.pid == os.getpid():
            self._engine.close("the runner is closed", drain)

    def __enter__(self) -> PackRunner:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        shape = f"{self.shape.mode}, {self.shape.rows} rows of {self.shape.capacity} tokens"
        return f"PackRunner({self.encoder!r}; {shape})"

    def _push(self, job: Job, patient: bool = False) -> Awaited:
        if job.sequences:
            return self._admission.push(job, patient)
        answered = Awaited()  # nothing to run: a ranking of no documents
        answered.set_result(job.finish([]))
        return answered

    def _check_process(self) -> None:
        if self._engine.pid != os.getpid():
            raise RunnerStopped("a runner cannot be used after a fork; make one in this process")


def _run_into(future: Future[Any], function: Callable[[], Any]) -> None:
    """Answer the future with what the function returns or raises, unless it was cancelled."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)


def _mode(encoder: Encoder, mode: str | None) -> str:
    """The shape of batches: every kernel keeps sequences apart in each, but `mask` needs rows."""
    own = encoder.kernel if encoder.kernel in ("mask", "repack") else "ragged"
    if mode is not None and mode != own and own == "mask":
        raise InputError(
            f"mode {mode!r} does not go with an encoder of kernel 'mask', which needs rows; "
            f"load it with another kernel"
        )
    return mode or own
