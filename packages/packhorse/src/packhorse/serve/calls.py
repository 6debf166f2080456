"""Run the inputs of one HTTP request through a model's runner; shared by all dialects.

    result = await call(request, model, "embed", texts, prompt="query")
    return json_response({"data": result.values})

Each input is a request of its own to the runner, so that the inputs of one client are packed with
those of all others. A request is admitted as a whole or refused as a whole, but it does not enter
the queue as one block: at most one batch of its tokens, or a quarter of them if that is more, are
there at a time (`RequestStream`). The next inputs are submitted when earlier ones are answered, on
the engine's own thread and so before the next batch is closed. A short text that arrives meanwhile
finds a quarter of a long request ahead of it and not all of it; the long request pays for that by
being overtaken at most three times.

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
from packhorse.serve.hosting import ServedModel
from packhorse.serve.metrics import RequestRecord
from packhorse.serve.settings import ServeSettings

# Longer requests are tokenized in a thread, so that they do not block the event loop for all.
MAX_INLINE_CHARACTERS = 2048
# A long request goes through the queue in this many parts. More parts would let short requests pass
# it more often; fewer would make them wait longer.
STREAM_PARTS = 4


@dataclass(frozen=True, slots=True)
class PackInfo:
    """The batches that a request ran in: means over its inputs, and the longest times."""

    fill: float  # tokens of inputs / all tokens of the batch
    neighbors: float  # other sequences in the batch
    queue_ms: float
    compute_ms: float

    def header(self) -> str:
        """Return the value of the header `x-packhorse-pack`, whose field names clients know."""
        return f"fill={self.fill:.3f};neighbours={self.neighbors:.0f};queue_ms={self.queue_ms:.1f}"


@dataclass(frozen=True, slots=True)
class CallResult:
    """The answers of a model, one per input and in the order of the inputs."""

    values: list[Any]
    tokens: list[int]  # run per input, with special tokens and all windows
    pack: PackInfo


async def call(
    request: Request,
    model: ServedModel,
    task: str,
    texts: Sequence[TaskInput],
    *,
    truncate: bool = True,
    **options: Any,
) -> CallResult:
    """Run `task` for each text; `options` are those of the encoder's method of that name.

    Raises `Empty` for no input or an empty one, `TooLarge` for too many or too long inputs (without
    `truncate` also for those with more tokens than the model takes), `CheckpointError` for a task
    that the model has no head for, and `Overloaded` if the queue is too full. If the client
    disconnects, all inputs that have not run yet are cancelled (`ClientGone`).
    """
    record: RequestRecord = request.scope["packhorse"]
    record.model = model
    model.check_task(task)
    characters = check_inputs(request.app.state.settings, texts, options)
    if task != "answer":  # which reads long texts in windows
        # Otherwise the encoder would also warn, and no client would see that.
        options.setdefault("long", "truncate")
    prepare = partial(model.runner.prepare, texts, task, **options)
    if characters <= MAX_INLINE_CHARACTERS:
        jobs = prepare()
    else:
        jobs = await asyncio.to_thread(prepare)
    _check_tokens(jobs, model, truncate)
    futures = await _run(model.runner, jobs, request.receive)
    values = [future.result() for future in futures]
    result = CallResult(values, [job.tokens for job in jobs], _pack_info(futures))
    _update(record, result, len(options.get("documents", texts)))
    return result


def json_response(document: Any, headers: Mapping[str, str] | None = None) -> Response:
    """Return a JSON response; the document may contain numpy arrays and dataclasses anywhere."""
    content = orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
    return Response(content, headers=headers, media_type="application/json")


def check_inputs(
    settings: ServeSettings, texts: Sequence[TaskInput], options: Mapping[str, Any] | None = None
) -> int:
    """Return the number of characters; raise `Empty` or `TooLarge` for inputs beyond the limits."""
    inputs = (options or {}).get("documents", texts)
    if not texts or not inputs:
        raise Empty("the request has no input")
    if len(inputs) > settings.max_batch_inputs:
        raise TooLarge(
            f"the request has {len(inputs)} inputs; at most {settings.max_batch_inputs} are allowed"
        )
    sizes = [_characters(text) for text in texts]
    if inputs is not texts:
        sizes += [_characters(text) for text in inputs]
    for number, size in enumerate(sizes):
        if size > settings.max_input_characters:
            raise TooLarge(
                f"input {number} has {size} characters; "
                f"at most {settings.max_input_characters} are allowed"
            )
    return sum(sizes)


def _characters(text: TaskInput) -> int:
    """Count the characters of a text or pair; token ids have none and need no tokenization."""
    if isinstance(text, str):
        if not text:
            raise Empty("an input is empty; there is nothing to encode")
        return len(text)
    return 0 if is_ids(text) else sum(len(part) for part in cast("tuple[str, str]", text))


def _check_tokens(jobs: Sequence[InferenceJob], model: ServedModel, truncate: bool) -> None:
    """Refuse what would not fit even into an empty queue, and truncation that nobody asked for."""
    max_inputs = model.runner.max_waiting_requests
    max_tokens = model.runner.max_waiting_tokens
    if len(jobs) > max_inputs:
        raise TooLarge(f"the request has {len(jobs)} inputs; the queue holds at most {max_inputs}")
    for number, job in enumerate(jobs):
        if job.tokens > max_tokens:
            raise TooLarge(
                f"input {number} has {job.tokens} tokens; the queue holds at most {max_tokens}"
            )
        if not truncate and any(sequence.truncated for sequence in job.sequences):
            raise TooLarge(
                f"input {number} has more tokens than the {model.encoder.max_length} that "
                f"{model.name} takes; shorten it or set truncate"
            )


async def _run(
    runner: PackRunner, jobs: Sequence[InferenceJob], receive: Callable[[], Awaitable[Any]]
) -> list[PackedFuture]:
    """Run all jobs; cancel them if the client disconnects."""
    loop = asyncio.get_running_loop()
    stream = RequestStream(runner, jobs, loop)
    watcher: asyncio.Task[None] | None = None
    try:
        stream.start()
        watcher = loop.create_task(_watch_client(receive, stream.finished))
        await stream.finished
        return stream.futures
    finally:
        if watcher is not None:
            watcher.cancel()
        stream.stop()


async def _watch_client(
    receive: Callable[[], Awaitable[Any]], finished: asyncio.Future[None]
) -> None:
    """Wait until the client disconnects. The body was read before, so nothing else can arrive."""
    while (await receive())["type"] != "http.disconnect":
        pass
    if not finished.done():
        finished.set_exception(ClientGone("the client left before its answer was ready"))


class RequestStream:
    """The jobs of one HTTP request on their way through the runner, a few at a time.

    Answers arrive on the engine's thread, which also submits the next jobs. The lock is needed
    because the event loop submits the first ones, and because a request can be stopped early from
    the event loop. It is reentrant: a job that the runner answers at once calls `_on_answer` on the
    thread that is submitting it and holds the lock.
    """

    def __init__(
        self, runner: PackRunner, jobs: Sequence[InferenceJob], loop: asyncio.AbstractEventLoop
    ) -> None:
        self.runner = runner
        self.loop = loop
        # Tokens that may be in the runner at once: a part of the request, but at least one batch,
        # because a request that fits into one batch gains nothing from being split.
        part = -(-sum(job.tokens for job in jobs) // STREAM_PARTS)
        self.window = max(runner.shape.tokens, part)
        self.waiting = deque(jobs)  # not submitted yet
        self.unanswered = len(jobs)
        self.tokens = 0  # in the runner
        self.futures: list[PackedFuture] = []  # in the order of the jobs
        self.finished: asyncio.Future[None] = loop.create_future()
        self.reserved = False
        self.ended = False
        self._lock = threading.RLock()

    def start(self) -> None:
        """Reserve room in the queue for all jobs and submit the first; raises `Overloaded`."""
        self.runner.reserve(self.waiting)
        self.reserved = True
        with self._lock:
            self._submit()

    def stop(self) -> None:
        """Cancel what has not run yet and give its room in the queue back."""
        with self._lock:
            self.ended = True
            if self.reserved:
                self.runner.release(self.waiting)
        for future in self.futures:
            future.cancel()

    def _submit(self) -> None:
        """Submit jobs until the window is full; the lock is held."""
        while self.waiting and not self.ended:
            job = self.waiting[0]
            if self.tokens and self.tokens + job.tokens > self.window:
                return
            future = self.runner.admit(job)
            self.waiting.popleft()
            self.futures.append(future)
            self.tokens += job.tokens
            future.add_done_callback(partial(self._on_answer, job.tokens))

    def _submit_next(self) -> None:
        try:
            with self._lock:
                self._submit()
        except Exception as error:
            self._finish(error)

    def _on_answer(self, tokens: int, future: Future[Any]) -> None:
        with self._lock:
            if self.ended:
                return
            self.tokens -= tokens
            self.unanswered -= 1
            error = None if future.cancelled() else future.exception()
            if error is None and self.unanswered:
                return self._submit_next()
            self.ended = True
        self._finish(error)

    def _finish(self, error: BaseException | None) -> None:
        # Futures of asyncio may only be set on the event loop's own thread.
        self.loop.call_soon_threadsafe(_set_finished, self.finished, error)


def _set_finished(finished: asyncio.Future[None], error: BaseException | None) -> None:
    if finished.done():  # the client left meanwhile
        return
    if error is None:
        finished.set_result(None)
    else:
        finished.set_exception(error)


def _pack_info(futures: Sequence[PackedFuture]) -> PackInfo:
    batches = [future.ran for future in futures if future.ran is not None]
    count = max(1, len(batches))
    return PackInfo(
        fill=sum(batch.fill for batch in batches) / count,
        neighbors=sum(batch.sequences - 1 for batch in batches) / count,
        queue_ms=1e3 * max((future.waited for future in futures), default=0.0),
        compute_ms=1e3 * max((batch.seconds for batch in batches), default=0.0),
    )


def _update(record: RequestRecord, result: CallResult, inputs: int) -> None:
    """Add a result to the request's record; one HTTP request may make several calls."""
    record.pack = result.pack.header()
    record.inputs += inputs
    record.tokens += sum(result.tokens)
    record.queue_seconds = max(record.queue_seconds, result.pack.queue_ms / 1e3)
    record.compute_seconds = max(record.compute_seconds, result.pack.compute_ms / 1e3)
