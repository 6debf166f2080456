"""PackRunner: requests that arrive one by one, packed together under a latency budget.

    with packhorse.PackRunner(model, timeout=0.005) as runner:
        futures = [runner.submit(text) for text in texts]

The thread that submits a text tokenizes it; `admission` packs what arrives into the next batch; the
`engine`, a thread, runs one batch after another and replies. This file is the interface to the two.

A thread and not a process: requests and answers are shared by reference, torch releases the
interpreter's lock while it computes, and the host's work per batch is small compared to that.

No method holds a lock of its own. `admission` and `engine` say which locks there are, in which
order they are taken, and why every wait ends.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from typing import Any

import numpy as np

from packhorse.data.tables import as_texts
from packhorse.errors import InputError, RunnerStopped
from packhorse.exports import renamed_attribute
from packhorse.packing.batch import Packed
from packhorse.runtime.admission import Admission, PackedFuture
from packhorse.runtime.batches import PackedShape
from packhorse.runtime.encoder import Encoder
from packhorse.runtime.engine import RunnerEngine
from packhorse.runtime.shares import Share, Ticket
from packhorse.runtime.statistics import BatchRecord, RunnerStats
from packhorse.runtime.tasks import InferenceJob, Row, TaskInput

CHUNK = 64  # texts that `run` prepares at a time, while the engine cannot have the interpreter
# `run` submits as many texts at once as are this share of a batch: other callers come in between.
RUN_SHARE = 1 / 4
BATCHES_WAITING = 8  # how many batches may wait by default


class PackRunner:
    """An encoder that takes requests from any thread and answers each as if it were alone.

    A batch has `rows` × `capacity` tokens (by default the encoder's budget in rows of its longest
    text); `capacity` is also the length limit of a sequence. `mode` is the layout of a batch, see
    `runtime.batches`: "ragged", "mask" or "repack", with any kernel. By default the kernels `mask`
    and `repack` run in the mode of their name, all others run ragged.

    A batch runs when it is full, when it has `max_sequences`, or when its oldest request has waited
    `timeout` seconds. It waits that long even if the device is idle, because the next request may
    share the batch; with 0, a batch is whatever waits when the device becomes free. With
    `wait_alone=False` a request does not wait if there was no other beside it or shortly before:
    the server does this. `policy` chooses the row of a sequence in mode "mask". `lookahead` is how
    many sequences that do not fit may be passed over for later ones that do: rows get fuller and
    long sequences wait longer; 0 by default.

    At most `max_waiting_tokens` (by default 8 batches) and `max_waiting_requests` wait; beyond that
    `submit` raises `Overloaded`. With `publish`, the default, `packhorse monitor` shows the figures
    of `stats()`; it costs one small file per second, and a file that cannot be written is no error.
    `when_idle` is called while no request waits, again and again until it returns False; for work
    that makes later batches faster.

    Coming from PopRT: `timeout_microseconds=15000` is `timeout=0.015`, `max_valid_num` is
    `max_sequences`, `segment_max_size` is `capacity`, the batch size is `rows`, the algorithm is
    `policy`, `enable_input_single_row_mode` is `mode="mask"` and without it `mode="repack"`; a
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
        wait_alone: bool = True,
        policy: str = "first_fit",
        mode: str | None = None,
        lookahead: int = 0,
        max_waiting_tokens: int | None = None,
        max_waiting_requests: int = 1024,
        publish: bool = True,
        when_idle: Callable[[], bool] | None = None,
    ) -> None:
        if isinstance(encoder, str):
            raise InputError(
                f"PackRunner takes an encoder, not a name: PackRunner(packhorse.load({encoder!r}))"
            )
        capacity = encoder.max_length if capacity is None else capacity
        rows = max(1, encoder.budget // max(1, capacity)) if rows is None else rows
        shape = PackedShape(_mode(encoder, mode), rows, capacity, max_sequences, policy)
        max_tokens = max_waiting_tokens or BATCHES_WAITING * shape.tokens
        if not 0 <= timeout <= threading.TIMEOUT_MAX:
            raise InputError(f"timeout is {timeout} seconds; it must be 0 or more")
        if max_tokens < capacity or max_waiting_requests < 1 or lookahead < 0:
            raise InputError(
                f"max_waiting_tokens ({max_tokens}) must be at least a sequence of {capacity}, "
                f"max_waiting_requests ({max_waiting_requests}) at least 1 and lookahead "
                f"({lookahead}) at least 0"
            )
        self.encoder = replace(encoder, max_length=min(encoder.max_length, capacity))
        self.shape = shape
        self._admission = Admission(
            shape,
            timeout=timeout,
            max_tokens=max_tokens,
            max_requests=max_waiting_requests,
            lookahead=lookahead,
            wait_alone=wait_alone,
        )
        self._engine = RunnerEngine(self.encoder, self._admission, when_idle)
        self._admission.pace = self._engine.recorder.pace
        # The threads refer to the engine and not to the runner, so that a runner that nobody uses
        # any more is collected, and its threads end. At exit the engine has a handler of its own.
        weakref.finalize(self, self._engine.abandon).atexit = False
        self._engine.start(publish)

    def submit(self, text: TaskInput, task: str = "embed", **options: Any) -> Future[Any]:
        """Return a future of what the encoder's method named by `task` returns for this text.

        `text` is a text, a pair, or token ids as they are; `options` are those of that method. Bad
        input and `Overloaded` are raised here. The future's callbacks run on the engine's thread:
        they should be short, and must not call `run`, which waits for that thread.
        """
        self._check_process()
        with self._admission.check_capacity():
            (job,) = self.encoder.prepare(task, [text], **options)
        return self._push(job)

    def prepare(
        self,
        texts: Sequence[TaskInput],
        task: str = "embed",
        *,
        share: Share | None = None,
        **options: Any,
    ) -> list[InferenceJob]:
        """Do the first half of `submit` for several texts, or raise `Overloaded`."""
        self._check_process()
        with self._admission.check_capacity(share):
            return self.encoder.prepare(task, texts, **options)

    def enqueue(self, job: InferenceJob, share: Share | None = None) -> PackedFuture:
        """Do the second half of `submit`, for a job of `prepare`; may raise `Overloaded`.

        A job of several inputs is admitted as soon as there is room for one of them. `share` says
        whose it is, where clients divide the queue (`runtime.shares`).
        """
        self._check_process()
        return self._push(job, share=share)

    def follow(self, job: InferenceJob, share: Share | None = None) -> PackedFuture:
        """Admit a later job of a request whose first was admitted by `enqueue`; never refused.

        It never waits, and so may be called from a future's callback.
        """
        return self._admission.push_follow_up(job, share) if job.sequences else self._push(job)

    def check_deadline(self, tokens: int, ticket: Ticket) -> None:
        """Raise `DeadlineExceeded` if a request of so many tokens cannot be answered in time."""
        self._admission.check_deadline(tokens, ticket)

    def seconds_until_run(self, share: Share | None = None) -> float:
        """Return in how many seconds what waits now will have run; 0 if nothing is known."""
        return self._admission.seconds_until_run(share)

    def waiting_rate(self) -> float:
        """Return the tokens per second at which full batches run; 0 if nothing is known."""
        return self._admission.pace.rate(self.shape.tokens)

    def measure(self, tokens: int) -> None:
        """Run a batch of about so many tokens, alone, so that the first estimates are right."""
        jobs = self.encoder.prepare("hidden", [np.zeros(self.shape.capacity, int)])
        count = max(1, min(tokens, self.shape.tokens) // self.shape.capacity)
        sequences = [jobs[0].sequences[0]] * count
        packed = self.shape.lay(sequences, [[row] for row in range(count)])
        begun = time.perf_counter()
        self.encoder.launch(packed, ("hidden",)).wait()
        used = count * self.shape.capacity
        self._engine.recorder.pace.add(used, time.perf_counter() - begun)

    def reserve(self, jobs: Sequence[InferenceJob]) -> None:
        """Reserve room for jobs that are admitted one after another, or raise `Overloaded`."""
        self._check_process()
        self._admission.reserve(*_size(jobs))

    promise = renamed_attribute("promise", "reserve")

    def admit(self, job: InferenceJob) -> PackedFuture:
        """Do the second half of `submit`, for a job that has room reserved.

        It never waits, and so may be called from a future's callback.
        """
        if job.sequences:
            return self._admission.push_reserved(job)
        self._admission.release(job.inputs, 0)
        return self._push(job)

    def release(self, jobs: Sequence[InferenceJob]) -> None:
        """Give back the room of jobs that were reserved and will not be admitted."""
        self._admission.release(*_size(jobs))

    def on_replied(self, callback: Callable[[], None]) -> None:
        """Call a function on the engine's thread after all requests of a batch were answered.

        For callers that send the answers of a batch on together. It must not raise.
        """
        self._engine.on_replied = callback

    def wait_for_engine(self) -> None:
        """Wait while the engine prepares a batch for an accelerator or replies to one.

        A thread that submits a lot would otherwise take the interpreter from the engine each time
        that torch lets go of it.
        """
        with self._admission.engine_busy:
            pass

    async def asubmit(self, text: TaskInput, task: str = "embed", **options: Any) -> Any:
        """`submit` for asyncio; cancelling the awaiting task cancels the request."""
        self._check_process()
        # A thread that tokenizes cannot be interrupted. So it counts against the capacity until it
        # ends by itself, not until the task that awaits it is cancelled.
        capacity = self._admission.check_capacity()
        capacity.__enter__()
        prepared: Future[list[InferenceJob]] = Future()
        prepared.add_done_callback(lambda _: capacity.__exit__(None, None, None))
        prepare = partial(self.encoder.prepare, task, [text], **options)
        try:
            asyncio.get_running_loop().run_in_executor(None, _run_into, prepared, prepare)
        except BaseException:
            prepared.cancel()
            raise
        (job,) = await asyncio.wrap_future(prepared)
        return await asyncio.wrap_future(self._push(job))

    def run(self, texts: Sequence[TaskInput], task: str = "embed", **options: Any) -> list[Any]:
        """Return all answers, in order; wait for room instead of raising `Overloaded`."""
        self._check_process()
        if options.get("late_chunking"):
            raise InputError(
                "late_chunking reads all texts as one, and the runner takes them apart; use "
                "Encoder.embed"
            )
        texts = as_texts(texts)
        if not isinstance(texts, Sequence):  # pyright: ignore[reportUnnecessaryIsInstance]
            texts = list(texts)  # users pass any iterable
        limit = max(1, min(int(RUN_SHARE * self.shape.tokens), self.max_waiting_tokens))
        futures: list[Future[Any]] = []
        try:
            # In chunks, so that the engine runs the first while the rest is tokenized.
            for begin in range(0, len(texts), CHUNK):
                jobs = self.encoder.prepare(task, texts[begin : begin + CHUNK], **options)
                for job in joined(jobs, limit, self.max_waiting_requests):
                    futures.append(self._push(job, patient=True))
            self._admission.flush()
            return [answer for future in futures for answer in future.result()]
        except BaseException:
            for future in futures:
                future.cancel()
            raise

    def warm(self, task: str = "embed") -> None:
        """Run a batch of every size, so that nothing is compiled while a client waits.

        For an encoder with `graphs`, before the first request; `task` must accept token ids.
        """
        (job,) = self.encoder.prepare(task, [np.zeros(1, int)])
        for packed in self.batches_of_every_size():
            self.encoder.launch(packed, job.heads, job.only).wait()

    def run_largest(self) -> None:
        """Run a full batch, alone; raises what the device raises if it has no memory for it."""
        self.encoder.launch(self.batches_of_every_size()[-1], ("hidden",)).wait()

    def batches_of_every_size(self) -> list[Packed]:
        """Return a batch for each size that is compiled or recorded separately."""
        packed: list[Packed] = []
        for size in self.shape.sizes():
            full_rows, rest = divmod(size, self.shape.capacity)
            lengths = [self.shape.capacity] * full_rows
            if rest:
                lengths.append(rest)
            jobs = self.encoder.prepare("hidden", [np.zeros(length, int) for length in lengths])
            sequences = [sequence for job in jobs for sequence in job.sequences]
            packed.append(self.shape.lay(sequences, [[row] for row in range(len(sequences))]))
        return packed

    def stats(self) -> RunnerStats:
        """Return the statistics of this moment."""
        return self._engine.stats()

    @property
    def waiting_tokens(self) -> int:
        """The tokens that were admitted, or have room reserved, and did not run yet."""
        return self._admission.waiting_tokens + self._admission.reserved_tokens

    @property
    def max_waiting_requests(self) -> int:
        """How many requests may wait, and how many can be reserved together."""
        return self._admission.max_requests

    @property
    def max_waiting_tokens(self) -> int:
        """How many tokens may wait; no single request can be larger."""
        return self._admission.max_tokens

    def recent(self) -> list[BatchRecord]:
        """Return the last batches as they were laid out, the newest last."""
        return self._engine.recorder.recent()

    def rate(self) -> float:
        """Return tokens per second while the last batches ran; 0 before the first."""
        return self._engine.recorder.rate

    def idle_seconds(self) -> float:
        """Return the seconds since the last batch ended; infinite before the first."""
        records = self.recent()
        return time.monotonic() - records[-1].ended if records else math.inf

    @property
    def alive(self) -> bool:
        """Whether requests are still admitted, if there is room."""
        return self._admission.stopped is None and not self._engine.was_forked

    def close(self, drain: bool = True) -> None:
        """Admit nothing more, answer what waits (without `drain`, fail it), end the threads."""
        if not self._engine.was_forked:
            self._engine.close("the runner is closed", drain)

    def __enter__(self) -> PackRunner:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        shape = f"{self.shape.mode}, {self.shape.rows} rows of {self.shape.capacity} tokens"
        return f"PackRunner({self.encoder!r}; {shape})"

    def _push(
        self, job: InferenceJob, patient: bool = False, share: Share | None = None
    ) -> PackedFuture:
        if job.sequences:
            return self._admission.push(job, patient, share)
        future = PackedFuture()  # nothing to run: a ranking of no documents
        future.set_result(job.finish([]))
        return future

    def _check_process(self) -> None:
        if self._engine.was_forked:
            raise RunnerStopped("a runner cannot be used after a fork; create one in this process")


def joined(jobs: Sequence[InferenceJob], tokens: int, inputs: int) -> Iterator[InferenceJob]:
    """Yield jobs of at most so many tokens and inputs that return the answers of several.

    A job costs more than a sequence of it. Those that share one need the same heads.
    """
    part: list[InferenceJob] = []
    used = 0
    for job in jobs:
        size = job.tokens
        if part and (used + size > tokens or len(part) == inputs):
            yield _join(part)
            part = []
            used = 0
        part.append(job)
        used += size
    if part:
        yield _join(part)


def _join(jobs: list[InferenceJob]) -> InferenceJob:
    def finish(rows: Sequence[Row]) -> list[Any]:
        remaining = iter(rows)
        return [job.finish(list(islice(remaining, len(job.sequences)))) for job in jobs]

    sequences = tuple(chain.from_iterable(job.sequences for job in jobs))
    return InferenceJob(sequences, jobs[0].heads, finish, jobs[0].only, len(jobs))


def _size(jobs: Sequence[InferenceJob]) -> tuple[int, int]:
    """Return the inputs and the tokens of jobs."""
    return sum(job.inputs for job in jobs), sum(job.tokens for job in jobs)


def _run_into(future: Future[Any], function: Callable[[], Any]) -> None:
    """Set the future to what the function returns or raises, unless it was cancelled."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)


def _mode(encoder: Encoder, mode: str | None) -> str:
    """Choose the layout of batches; every kernel runs in each, except `mask`, which needs rows."""
    default = encoder.kernel if encoder.kernel in ("mask", "repack") else "ragged"
    if mode is not None and mode != default and default == "mask":
        raise InputError(
            f"mode {mode!r} does not work with this encoder's kernel 'mask', which needs rows; "
            "load it with another kernel"
        )
    return mode or default
