"""What all dialects share: ask a model, wait for the answer, and stop when nobody waits any more.

    outcome = await call(request, host, "embed", texts, prompt="query")
    return reply({"data": outcome.values})

Each input is a request of its own to the runner, so that the inputs of one client pack with those
of everybody else. All of a request is let in or all of it refused, but it does not stand in the
queue as one block: it has at most a batch of tokens or a quarter of its own there (`Flow`), and
hands in the next when some are answered, from the engine's own thread and so before the next batch
is closed. A short text that comes meanwhile finds a quarter of a long request before it and not the
whole; the long one, overtaken three times at most, pays for that.

Short texts are tokenized on the event loop, where 20 tokens take less time than waking a thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import orjson
from starlette.requests import Request
from starlette.responses import Response

from packhorse.runtime.admission import PackedFuture
from packhorse.runtime.runner import PackRunner
from packhorse.runtime.tasks import InferenceJob, TaskInput, is_ids
from packhorse.serve.failures import ClientGone, Empty, TooLarge
from packhorse.serve.hosting import Hosted
from packhorse.serve.metrics import Seen
from packhorse.serve.settings import Settings

PLAIN = orjson.OPT_SERIALIZE_NUMPY
INLINE_CHARACTERS = 2048  # that are tokenized on the event loop
ROUNDS = 4  # in which a long request goes through the queue, at most


@dataclass(frozen=True, slots=True)
class PackInfo:
    """In what company a request ran; over several inputs the means, and the longest wait."""

    fill: float  # somebody's tokens / all tokens of its batch
    neighbours: float  # other sequences in the batch
    queue_ms: float
    compute_ms: float

    def header(self) -> str:
        """For `x-packhorse-pack`."""
        return f"fill={self.fill:.3f};neighbours={self.neighbours:.0f};queue_ms={self.queue_ms:.1f}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a model said: an answer an input, in their order."""

    values: list[Any]
    tokens: list[int]  # that were run for each input, special ones and all windows
    pack: PackInfo


async def call(
    request: Request,
    host: Hosted,
    task: str,
    texts: Sequence[TaskInput],
    *,
    truncate: bool = True,
    **options: Any,
) -> Outcome:
    """Ask `task` of the model for each text; `options` are those of the encoder's method.

    Refused are: no input or an empty one (`Empty`), too many or too long ones (`TooLarge`; without
    `truncate` also those with more tokens than the model takes), a task without a head
    (`CheckpointError`), and anything while too much waits (`Overloaded`). When the client hangs up
    all that did not run yet is cancelled (`ClientGone`).
    """
    seen: Seen = request.scope["packhorse"]
    seen.host = host
    host.check(task)
    characters = check_inputs(request.app.state.settings, texts, options)
    if task != "answer":  # which reads all of a text
        options.setdefault("long", "truncate")  # in silence: no one here reads a warning
    prepare = partial(host.runner.prepare, texts, task, **options)
    jobs = prepare() if characters <= INLINE_CHARACTERS else await asyncio.to_thread(prepare)
    _check_tokens(jobs, host, truncate)
    futures = await _answers(host.runner, jobs, request.receive)
    outcome = Outcome(
        [future.result() for future in futures], [job.tokens for job in jobs], _company(futures)
    )
    _note(seen, outcome, len(options.get("documents", texts)))
    return outcome


def reply(document: Any, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON response, written at once; numpy arrays and dataclasses may stand anywhere in it."""
    written = orjson.dumps(document, option=PLAIN)
    return Response(written, headers=headers, media_type="application/json")


def check_inputs(
    settings: Settings, texts: Sequence[TaskInput], options: Mapping[str, Any] | None = None
) -> int:
    """Refuse too many inputs, too long ones and empty ones; the number of characters otherwise."""
    inputs = (options or {}).get("documents", texts)
    if not texts or not inputs:
        raise Empty("the request has no input")
    if len(inputs) > settings.max_batch_inputs:
        raise TooLarge(
            f"the request has {len(inputs)} inputs; at most {settings.max_batch_inputs} are allowed"
        )
    sizes = [_characters(text) for text in texts]
    sizes += [] if inputs is texts else [_characters(text) for text in inputs]
    for number, size in enumerate(sizes):
        if size > settings.max_input_characters:
            raise TooLarge(
                f"input {number} has {size} characters; "
                f"at most {settings.max_input_characters} are allowed"
            )
    return sum(sizes)


def _characters(text: TaskInput) -> int:
    """Of a text, or of a pair together; token ids have none and cost nothing to tokenize."""
    if isinstance(text, str):
        if not text:
            raise Empty("an input is empty; there is nothing to encode")
        return len(text)
    return 0 if is_ids(text) else sum(len(part) for part in cast("tuple[str, str]", text))


def _check_tokens(jobs: Sequence[InferenceJob], host: Hosted, truncate: bool) -> None:
    if len(jobs) > (most := host.runner.max_waiting_requests):
        raise TooLarge(f"the request has {len(jobs)} inputs; at most {most} may wait")
    most = host.runner.max_waiting_tokens
    for number, job in enumerate(jobs):
        if job.tokens > most:
            raise TooLarge(f"input {number} takes {job.tokens} tokens; at most {most} may wait")
        if not truncate and any(sequence.truncated for sequence in job.sequences):
            raise TooLarge(
                f"input {number} has more tokens than the {host.encoder.max_length} that "
                f"{host.name} takes; shorten it or set truncate"
            )


async def _answers(
    runner: PackRunner, jobs: Sequence[InferenceJob], receive: Callable[[], Awaitable[Any]]
) -> list[PackedFuture]:
    loop = asyncio.get_running_loop()
    flow = Flow(runner, jobs, loop)
    watch: asyncio.Task[None] | None = None
    try:
        flow.start()
        watch = loop.create_task(_watch(receive, flow.done))
        await flow.done
        return flow.futures
    finally:
        if watch is not None:
            watch.cancel()
        flow.stop()


async def _watch(receive: Callable[[], Awaitable[Any]], done: asyncio.Future[None]) -> None:
    """Wait for the client to leave. The body has been read: nothing else is left to come."""
    while (await receive())["type"] != "http.disconnect":
        pass
    if not done.done():
        done.set_exception(ClientGone("the client left before its answer was ready"))


class Flow:
    """The jobs of one request on their way through the runner, a few at a time.

    Answers come on the engine's thread, which also hands in what is next; the lock is for the first
    few, which the event loop hands in, and for a request that ends early.
    """

    def __init__(
        self, runner: PackRunner, jobs: Sequence[InferenceJob], loop: asyncio.AbstractEventLoop
    ) -> None:
        self.runner, self.loop = runner, loop
        self.window = max(runner.shape.tokens, -(-sum(job.tokens for job in jobs) // ROUNDS))
        self.behind = deque(jobs)
        self.left = len(jobs)  # not answered
        self.tokens = 0  # in the runner
        self.futures: list[PackedFuture] = []  # in the order of the jobs
        self.done: asyncio.Future[None] = loop.create_future()
        self.promised = self.ended = False
        self._lock = threading.RLock()

    def start(self) -> None:
        """Hand in the first; raises `Overloaded` where there is no room for all."""
        self.runner.reserve(self.behind)
        self.promised = True
        with self._lock:
            self._hand_in()

    def stop(self) -> None:
        """Nobody waits any more: what did not run yet leaves."""
        with self._lock:
            self.ended = True
            if self.promised:
                self.runner.release(self.behind)
        for future in self.futures:
            future.cancel()

    def _hand_in(self) -> None:
        while self.behind and not self.ended:
            job = self.behind[0]
            if self.tokens and self.tokens + job.tokens > self.window:
                return
            future = self.runner.admit(job)
            self.behind.popleft()
            self.futures.append(future)
            self.tokens += job.tokens
            future.add_done_callback(partial(self._answered, job.tokens))

    def _next(self) -> None:
        try:
            with self._lock:
                self._hand_in()
        except Exception as error:
            self._end(error)

    def _answered(self, tokens: int, future: Future[Any]) -> None:
        with self._lock:
            if self.ended:
                return
            self.tokens -= tokens
            self.left -= 1
            failed = None if future.cancelled() else future.exception()
            if failed is None and self.left:
                return self._next()
            self.ended = True
        self._end(failed)

    def _end(self, error: BaseException | None) -> None:
        self.loop.call_soon_threadsafe(_settle, self.done, error)


def _settle(done: asyncio.Future[None], error: BaseException | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)


def _company(futures: Sequence[PackedFuture]) -> PackInfo:
    ran = [future.ran for future in futures if future.ran is not None]
    count = max(1, len(ran))
    return PackInfo(
        fill=sum(each.fill for each in ran) / count,
        neighbours=sum(each.sequences - 1 for each in ran) / count,
        queue_ms=1e3 * max((future.waited for future in futures), default=0.0),
        compute_ms=1e3 * max((each.seconds for each in ran), default=0.0),
    )


def _note(seen: Seen, outcome: Outcome, inputs: int) -> None:
    """For the response's header, the figures and the log; a request may call more than once."""
    seen.pack = outcome.pack.header()
    seen.inputs += inputs
    seen.tokens += sum(outcome.tokens)
    seen.queue_seconds = max(seen.queue_seconds, outcome.pack.queue_ms / 1e3)
    seen.compute_seconds = max(seen.compute_seconds, outcome.pack.compute_ms / 1e3)
