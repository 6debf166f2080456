"""Run the inputs of one HTTP request through a model; shared by all dialects.

    result = await call(request, model, "embed", texts, prompt="query")
    return json_response({"data": result.values})

Inputs are checked and tokenized here, run by the model's `streams.Dispatcher` in batches together
with those of all other clients, and their answers are made here: the engine computes rows of
numbers and nothing else.

Short texts are tokenized on the event loop, where 20 tokens take less time than waking a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, cast

import orjson
from starlette.requests import Request
from starlette.responses import Response

from packhorse.runtime.engine import request_error
from packhorse.runtime.tasks import InferenceJob, TaskInput, is_ids, task_prompt
from packhorse.serve.failures import ClientGone, Empty, TooLarge
from packhorse.serve.hosting import ServedModel
from packhorse.serve.metrics import RequestRecord
from packhorse.serve.settings import ServeSettings
from packhorse.serve.streams import PackInfo, StreamResult

# Longer requests are tokenized in a thread, so that they do not block the event loop for all.
MAX_INLINE_CHARACTERS = 2048
# Of one request: as many inputs as OpenAI takes, each as long as BERT takes.
MAX_REQUEST_TOKENS = 2048 * 512


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
    if task != "answer":  # which reads long texts in windows
        # Otherwise the encoder would also warn, and no client would see that.
        options.setdefault("long", "truncate")
    prepare = partial(model.runner.prepare, texts, task, **options)
    if characters <= MAX_INLINE_CHARACTERS:
        jobs = prepare()
    else:
        jobs = await asyncio.to_thread(prepare)
    _check_tokens(jobs, model, settings)
    truncated = _check_truncation(jobs, model, truncate)
    finished = await _run(model, jobs, request.receive)
    if characters <= MAX_INLINE_CHARACTERS:
        values = _finish(jobs, finished)
    else:
        values = await asyncio.to_thread(_finish, jobs, finished)
    result = CallResult(values, [job.tokens for job in jobs], finished.pack)
    record.fingerprint = model.fingerprint(
        task_prompt(model.encoder, task, texts, options.get("prompt"))
    )
    _update(record, result, len(options.get("documents", texts)))
    record.truncated += truncated
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


def _check_tokens(
    jobs: Sequence[InferenceJob], model: ServedModel, settings: ServeSettings
) -> None:
    """Refuse what has too many tokens, or would not fit even into an empty queue."""
    total = sum(job.tokens for job in jobs)
    max_total = settings.max_request_tokens or MAX_REQUEST_TOKENS
    if total > max_total:
        raise TooLarge(
            f"the request has {total} tokens; at most {max_total} are allowed (max_request_tokens): "
            "send fewer inputs at once"
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


def _check_truncation(jobs: Sequence[InferenceJob], model: ServedModel, allowed: bool) -> int:
    """Return how many inputs were cut to the model's length; refuse them if that is not allowed."""
    truncated = [
        number
        for number, job in enumerate(jobs)
        if any(sequence.truncated for sequence in job.sequences)
    ]
    if truncated and not allowed:
        raise TooLarge(
            f"input {truncated[0]} has more tokens than the {model.encoder.max_length} that "
            f"{model.name} takes; shorten it or set truncate"
        )
    return len(truncated)


async def _run(
    model: ServedModel, jobs: Sequence[InferenceJob], receive: Callable[[], Awaitable[Any]]
) -> StreamResult:
    """Run all jobs; cancel them if the client disconnects."""
    if not any(job.sequences for job in jobs):
        return StreamResult([], PackInfo())
    running = model.dispatcher.start(jobs)
    watcher = asyncio.ensure_future(_watch_client(receive, running.finished))
    try:
        return await running.finished
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
