"""Run the inputs of one HTTP request through a model; shared by all dialects.

    result = await call(request, model, "embed", texts, prompt="query")
    return json_response({"data": result.values})

Inputs are checked and tokenized here, run by the model's `streams.Dispatcher` in batches together
with those of all other clients, and their answers are made here: the engine computes rows of
numbers and nothing else.

Short texts are tokenized on the event loop, where 20 tokens take less time than waking a thread.
Long requests are tokenized, and long answers written, in a thread and in parts: a single call of
orjson or of the tokenizer would keep Python's global lock, and with it the event loop, for as long
as it takes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from time import perf_counter
from typing import Any, cast

import numpy as np
import orjson
from starlette.requests import Request
from starlette.responses import Response

from packhorse.errors import DeadlineExceeded, InputError
from packhorse.runtime.engine import request_error
from packhorse.runtime.shares import Share
from packhorse.runtime.tasks import InferenceJob, TaskInput, is_ids, task_prompt
from packhorse.serve.failures import ClientGone, Empty, TooLarge
from packhorse.serve.hosting import ServedModel
from packhorse.serve.metrics import RequestRecord
from packhorse.serve.pack_info import PackInfo
from packhorse.serve.settings import ServeSettings
from packhorse.serve.streams import StreamResult

# Longer requests are tokenized in a thread, so that they do not block the event loop for all.
MAX_INLINE_CHARACTERS = 2048
# Of one request: as many inputs as OpenAI takes, each as long as BERT takes.
MAX_REQUEST_TOKENS = 2048 * 512
# Tokenized at a time, so that a request with too many tokens is refused before all its texts are.
GROUP_CHARACTERS = 1 << 16
# Of the results of one request, for the tasks that return a row of numbers per token or per mask.
MAX_RESULT_BYTES = {
    "hidden": 64 << 20,
    "multi": 64 << 20,
    "rerank": 64 << 20,
    "fill": 256 << 20,
    "sparse": 256 << 20,
}
# Numbers in an answer. Writing more takes milliseconds, and so happens in a thread.
MAX_INLINE_VALUES = 1 << 15
VALUES_PER_OBJECT = 8  # to make, count and write an object takes as long as these numbers of arrays
PART_BYTES = 1 << 20  # of a long answer, sent at a time
CHARACTERS_PER_VALUE = 32  # of a text, which take about as long to write as a number


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
    settings: ServeSettings = request.app.state.settings
    characters = check_inputs(settings, texts, options)
    inputs = len(options.get("documents", texts))
    record.task = task
    record.offered += inputs
    if task != "answer":  # which reads long texts in windows
        # Otherwise the encoder would also warn, and no client would see that.
        options.setdefault("long", "truncate")
    prepare = partial(_prepare, model, task, texts, options, settings, record.share)
    begun = perf_counter()
    if characters <= MAX_INLINE_CHARACTERS:
        jobs = prepare()
    else:
        jobs = await asyncio.to_thread(prepare)
    record.tokenized = perf_counter()
    record.tokenize_seconds += record.tokenized - begun
    _check_sizes(jobs, model, task)
    truncated = _check_truncation(jobs, model, truncate, options.get("max_length"))
    finished = await _run(model, jobs, request.receive, record, settings)
    if characters <= MAX_INLINE_CHARACTERS:
        values = _finish(jobs, finished)
    else:
        values = await asyncio.to_thread(_finish, jobs, finished)
    result = CallResult(values, [job.tokens for job in jobs], finished.pack)
    record.fingerprint = model.fingerprint(
        task_prompt(model.encoder, task, texts, options.get("prompt"), bool(options.get("query")))
    )
    _update(record, result, inputs)
    record.truncated += truncated
    return result


def json_response(document: Any, headers: Mapping[str, str] | None = None) -> Response:
    """Return a JSON response; the document may contain numpy arrays and dataclasses anywhere.

    It may be an iterator, of the items of a list. Use one where the items are many small objects:
    no more than a part of them then exists at a time, and to free a million objects at once would
    hold up the event loop.
    """
    if isinstance(document, Iterator):
        document = _first_items(cast("Iterator[Any]", document))
    if _count_values(document, MAX_INLINE_VALUES) > MAX_INLINE_VALUES:
        return _LongResponse(document, headers)
    return Response(_dump(document), headers=headers, media_type="application/json")


def _first_items(items: Iterator[Any]) -> list[Any] | Iterator[Any]:
    """Return a list of the items if it is short, else an iterator over them."""
    taken: list[Any] = []
    values = 0
    for item in items:
        taken.append(item)
        values += _count_values(item, MAX_INLINE_VALUES)
        if values > MAX_INLINE_VALUES:
            return chain(taken, items)
    return taken


class _LongResponse(Response):
    """A JSON response that is written in a thread, when it is sent, and sent in parts."""

    def __init__(self, document: Any, headers: Mapping[str, str] | None) -> None:
        super().__init__(headers=headers, media_type="application/json")
        self.document = document

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Write and send the response."""
        parts = await asyncio.to_thread(_write, self.document)
        self.headers["content-length"] = str(sum(map(len, parts)))
        start = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **start})
        for part in parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
            await asyncio.sleep(0)  # others have their turn, also if the client reads as fast
        await send({"type": "http.response.body", "body": b""})


async def response_content(response: Response) -> bytes:
    """Return what a response of `json_response` will send, to make it a part of another."""
    if isinstance(response, _LongResponse):
        return b"".join(await asyncio.to_thread(_write, response.document))
    return bytes(response.body)


def _dump(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)


def _write(document: Any) -> list[bytes]:
    """Return the same bytes as `_dump` in parts of about `PART_BYTES`.

    Between two parts other threads can run. They are not joined to one: to copy 40 MB takes 20 ms.
    """
    parts: list[bytes] = []
    pieces: list[bytes] = []
    size = 0
    for piece in _pieces(document):
        pieces.append(piece)
        size += len(piece)
        if size >= PART_BYTES:
            parts.append(b"".join(pieces))
            pieces.clear()
            size = 0
    return [*parts, b"".join(pieces)]


def _pieces(value: Any) -> Iterator[bytes]:
    """Yield the bytes of `_dump` in pieces of at most about `MAX_INLINE_VALUES` values."""
    is_vector = isinstance(value, np.ndarray) and value.ndim == 1
    is_short = _count_values(value, MAX_INLINE_VALUES) <= MAX_INLINE_VALUES
    if is_short or is_vector or isinstance(value, str):
        yield _dump(value)
    elif isinstance(value, dict):
        opening = b"{"
        for name, item in cast("dict[str, Any]", value).items():
            yield opening + _dump(name) + b":"
            yield from _pieces(item)
            opening = b","
        yield b"}"
    else:
        opening = b"["
        for item in value:
            yield opening
            yield from _pieces(item)
            opening = b","
        yield b"]"


def _count_values(value: Any, limit: int) -> int:
    """Count the numbers in a document, its texts and objects as several; stops after `limit`."""
    if isinstance(value, np.ndarray):
        return value.size
    if isinstance(value, str):
        return VALUES_PER_OBJECT + len(value) // CHARACTERS_PER_VALUE
    if isinstance(value, Iterator):
        return limit + 1  # `_first_items` left only long ones
    if not isinstance(value, list | dict):
        return VALUES_PER_OBJECT
    items = cast("Iterable[Any]", value.values() if isinstance(value, dict) else value)
    total = 0
    for item in items:
        total += _count_values(item, limit)
        if total > limit:
            break
    return total


def check_inputs(
    settings: ServeSettings, texts: Sequence[TaskInput], options: Mapping[str, Any] | None = None
) -> int:
    """Return the number of characters; raise `Empty` or `TooLarge` for inputs beyond the limits."""
    inputs = (options or {}).get("documents", texts)
    if not texts or not inputs:
        raise Empty("the request has no input")
    if len(inputs) > settings.max_batch_inputs:
        raise TooLarge(
            f"the request has {len(inputs)} inputs; at most {settings.max_batch_inputs} are "
            "allowed (max_batch_inputs)"
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


def _prepare(
    model: ServedModel,
    task: str,
    texts: Sequence[TaskInput],
    options: Mapping[str, Any],
    settings: ServeSettings,
    share: Share | None = None,
) -> list[InferenceJob]:
    """Tokenize the texts, a group at a time; refuse those that have too many tokens together."""
    limit = settings.max_request_tokens or MAX_REQUEST_TOKENS
    jobs: list[InferenceJob] = []
    tokens = 0
    # Late chunking reads all texts as one.
    groups = [texts] if options.get("late_chunking") else _groups(texts)
    for group in groups:
        try:
            prepared = model.runner.prepare(group, task, share=share, **options)
        except InputError as error:
            if not jobs:
                raise
            raise InputError(f"of the inputs from {len(jobs)} on, {error}") from error
        jobs += prepared
        tokens += sum(job.tokens for job in prepared)
        if tokens > limit:
            raise TooLarge(
                f"the request has more than the {limit} tokens that are allowed "
                "(max_request_tokens); send fewer inputs at once"
            )
    return jobs


def _groups(texts: Sequence[TaskInput]) -> Iterator[Sequence[TaskInput]]:
    """Divide texts into groups of about `GROUP_CHARACTERS`."""
    begin = 0
    characters = 0
    for end, text in enumerate(texts, 1):
        characters += _characters(text)
        if characters >= GROUP_CHARACTERS or end == len(texts):
            yield texts[begin:end]
            begin = end
            characters = 0


def _check_sizes(jobs: Sequence[InferenceJob], model: ServedModel, task: str) -> None:
    """Refuse what would not fit even into an empty queue, or whose results fill the memory."""
    if task in MAX_RESULT_BYTES:
        size = 4 * sum(_result_numbers(job, model) for job in jobs)
        if size > MAX_RESULT_BYTES[task]:
            raise TooLarge(
                f"the results of this request would take {size >> 20} MiB, more than the "
                f"{MAX_RESULT_BYTES[task] >> 20} MiB allowed; send fewer inputs at once"
            )
    max_inputs = model.runner.max_waiting_requests
    max_tokens = model.runner.max_waiting_tokens
    if len(jobs) > max_inputs:
        raise TooLarge(f"the request has {len(jobs)} inputs; the queue holds at most {max_inputs}")
    for number, job in enumerate(jobs):
        if job.tokens > max_tokens:
            raise TooLarge(
                f"input {number} has {job.tokens} tokens; the queue holds at most {max_tokens}"
            )


def _result_numbers(job: InferenceJob, model: ServedModel) -> int:
    """Count the numbers of a job whose head returns a row per token, mask or word."""
    encoder = model.encoder
    if "multi" in job.heads and encoder.multi_settings is not None:
        return job.tokens * encoder.multi_settings.width
    if "sparse" in job.heads and encoder.sparse_settings is not None:
        return len(job.sequences) * encoder.sparse_settings.width
    if job.only is None:
        return job.tokens * encoder.width if "hidden" in job.heads else job.tokens
    masks = sum(int((sequence.ids == job.only).sum()) for sequence in job.sequences)
    return masks * model.encoder.tokenizer.vocab_size


def _check_truncation(
    jobs: Sequence[InferenceJob], model: ServedModel, allowed: bool, max_length: int | None
) -> int:
    """Return how many inputs were cut, or refuse them if that is not allowed.

    `max_length` is the request's own limit, if it has one.
    """
    truncated = [
        number
        for number, job in enumerate(jobs)
        if any(sequence.truncated for sequence in job.sequences)
    ]
    if truncated and not allowed:
        limit = f"{model.encoder.max_length} that {model.name} takes"
        if max_length is not None and max_length < model.encoder.max_length:
            limit = f"{max_length} that the request allows"
        raise TooLarge(
            f"input {truncated[0]} has more tokens than the {limit}; shorten it or set truncate"
        )
    return len(truncated)


async def _run(
    model: ServedModel,
    jobs: Sequence[InferenceJob],
    receive: Callable[[], Awaitable[Any]],
    record: RequestRecord,
    settings: ServeSettings,
) -> StreamResult:
    """Run all jobs; cancel them if the client disconnects, or after `request_timeout`."""
    if not any(job.sequences for job in jobs):
        return StreamResult([], PackInfo())
    running = model.dispatcher.start(jobs, record.ticket)
    watcher = asyncio.ensure_future(_watch_client(receive, running.finished))
    try:
        if not settings.request_timeout:  # a client whose own timeout ends disconnects
            return await running.finished
        async with asyncio.timeout(record.deadline - time.monotonic()):
            return await running.finished
    except TimeoutError as error:
        raise DeadlineExceeded(
            f"the request was not answered within {settings.request_timeout:g} s "
            "(request_timeout); try again later"
        ) from error
    finally:
        watcher.cancel()
        running.stop()


async def _watch_client(
    receive: Callable[[], Awaitable[Any]], finished: asyncio.Future[StreamResult]
) -> None:
    """Wait until the client disconnects. The body was read before, so nothing else can arrive."""
    while (await receive())["type"] != "http.disconnect":
        pass
    if not finished.done():
        finished.set_exception(ClientGone("the client left before its answer was ready"))


def _finish(jobs: Sequence[InferenceJob], finished: StreamResult) -> list[Any]:
    """Turn the rows of all sequences into one answer per job."""
    rows = iter(finished.rows)
    try:
        return [job.finish(list(islice(rows, len(job.sequences)))) for job in jobs]
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # native code may raise more than `Exception`
        raise request_error(error) from None


def _update(record: RequestRecord, result: CallResult, inputs: int) -> None:
    """Add a result to the request's record; one HTTP request may make several calls."""
    record.pack = result.pack.header()
    record.inputs += inputs
    record.tokens += sum(result.tokens)
    record.queue_seconds = max(record.queue_seconds, result.pack.queue_ms / 1e3)
    record.compute_seconds = max(record.compute_seconds, result.pack.compute_ms / 1e3)
