"""The ASGI application: how it is put together, and which error becomes which HTTP status.

The way of a request, from its socket to its answer: `connections.BoundedConnection` reads the bytes
of a connection and parses them within its limits; uvicorn turns each complete set of headers into
an ASGI call. The outermost ASGI layer is CORS, if origins are allowed, because browsers ask for
permission without sending a key. Next is `guard.Guard`: it checks Host, key and body headers,
receives the whole body, and takes a place among the concurrent requests. Inside it is FastAPI with
one middleware of ours, `shortcut.Shortcut`, which calls the handler of most POST requests directly
after pydantic has read the body; other requests, and bodies that pydantic rejects, go on through
FastAPI's own routing and validation. The handler, in a module of `dialects/` or in `page/`, finds
the `hosting.ServedModel`, turns the body into texts and options, and awaits `calls.call`. That
tokenizes the texts and hands them to the model's `streams.Dispatcher`, which runs them in batches
together with those of other clients: by a `PackRunner` in this process, or by an engine process
(`processes`). When all are answered, the handler writes the values as JSON in the shape of its
dialect. On the way out the guard adds the headers `x-packhorse-*`, gives the place back, and
reports the request to `metrics` and `logs`. An exception anywhere on the way becomes an error
response by the handlers below; what the guard itself refuses never reaches them. If the client
disconnects, `calls` cancels what has not run yet.

This module is the only place where an exception becomes an HTTP status. A request that the model
cannot run is 424, as in text-embeddings-inference; one that finds the queue full is 429, with the
seconds in which the queue will have run; a dead engine is 503.

`/health` reports that the process and its engines run; `/ready` that a forward pass succeeded
recently, and runs one if the last was long ago.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from packhorse import __version__
from packhorse.errors import (
    CheckpointError,
    DeadlineExceeded,
    InputError,
    KernelError,
    MissingExtra,
    Overloaded,
    PackhorseError,
    RequestFailed,
    RunnerStopped,
)
from packhorse.serve import admin, page
from packhorse.serve.admin import LocalModels
from packhorse.serve.calls import json_response
from packhorse.serve.dialects import (
    clouds,
    cohere,
    cohere_embed,
    huggingface,
    infinity,
    openai,
    packhorse_api,
    shared_paths,
    tei,
    vllm,
)
from packhorse.serve.failures import (
    ClientGone,
    Empty,
    Failure,
    TooLarge,
    UnknownModel,
    locate_error,
)
from packhorse.serve.guard import Guard
from packhorse.serve.hosting import OtherProcesses, ServedModels, retry_seconds
from packhorse.serve.metrics import CONTENT_TYPE, Metrics, RequestRecord
from packhorse.serve.settings import ServeSettings
from packhorse.serve.shortcut import Shortcut
from packhorse.serve.tracing import read_ids

RESTART_SECONDS = 5  # Retry-After where an engine is gone: a new one needs about that long
STATUS: dict[type[PackhorseError], int] = {
    Empty: 400,
    UnknownModel: 404,
    TooLarge: 413,
    InputError: 422,
    CheckpointError: 424,
    KernelError: 424,
    MissingExtra: 424,
    RequestFailed: 424,
    Overloaded: 429,
    DeadlineExceeded: 429,
    ClientGone: 499,
    RunnerStopped: 503,
    PackhorseError: 500,
}


def create(
    settings: ServeSettings, models: ServedModels, others: OtherProcesses | None = None
) -> FastAPI:
    """Return the application over these models; its lifespan closes them when it ends."""
    # Where engines are other processes, their figures come from there.
    metrics = Metrics(models) if others is None else Metrics(models, list)
    app = create_base(settings, models, metrics)
    app.state.others = others
    dialects = (tei, openai, cohere, cohere_embed, huggingface, packhorse_api, vllm, shared_paths)
    for routes in (*dialects, page):
        routes.add(app, models, settings)
    # These answer by the handlers of routes above.
    infinity.add(app, models, settings)
    clouds.add(app, models, settings)
    if settings.admin_key:
        # Where engines are other processes, those open the models.
        admin.add(app, models, others or LocalModels(models, settings))
    app.add_middleware(Shortcut, routes=app.routes, handlers=app.exception_handlers)
    return app


def create_base(
    settings: ServeSettings,
    models: ServedModels,
    metrics: Metrics,
    openapi_url: str | None = "/openapi.json",
) -> FastAPI:
    """Return an application with health, metrics and error handlers, but no routes to models."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(models.close)

    app = FastAPI(
        title="Packhorse",
        version=__version__,
        description="BERT without padding, behind HTTP.",
        docs_url=None,  # FastAPI's documentation page loads scripts from other hosts
        redoc_url=None,
        openapi_url=openapi_url,
        strict_content_type=False,  # the guard knows better which bodies are JSON
        redirect_slashes=False,  # the redirect's Location would repeat the Host that was sent
        lifespan=lifespan,
    )
    app.state.settings = settings
    app.state.models = models
    app.state.metrics = metrics
    app.state.others = None
    _add_server_routes(app, settings, models, metrics)
    app.add_exception_handler(PackhorseError, _handle_packhorse_error)
    app.add_exception_handler(RequestValidationError, _handle_invalid)
    app.add_exception_handler(HTTPException, _handle_http_exception)
    app.add_exception_handler(Exception, _handle_unexpected)
    return app


def create_metrics_app(app: FastAPI, guard: Guard) -> FastAPI:
    """Return an application with the health and metrics of another one, for a port of its own."""
    side_app = create_base(app.state.settings, app.state.models, app.state.metrics, None)
    side_app.state.others = app.state.others
    side_app.state.guard = guard  # of the other one: /health tells whether that one drains
    return side_app


def guarded(app: FastAPI, limits: ServeSettings | None = None) -> tuple[Any, Guard]:
    """Return the outermost ASGI application, to be served, and the guard within it.

    `limits` are the settings with this process's share of the limits, if there are several.
    """
    settings: ServeSettings = limits or app.state.settings
    guard = Guard(app, settings, app.state.models, app.state.metrics)
    app.state.guard = guard
    if not settings.cors_origin:
        return guard, guard
    # CORS is outside of the guard, because a browser's preflight request carries no key.
    # Credentials are not allowed: in CORS that means cookies, which this server does not use, and
    # not a key in a header.
    cors = _IdentifiedCors(
        guard,
        allow_origins=settings.cors_origin,
        allow_methods=["GET", "POST"],
        # Clients send headers of their own (x-stainless-*, openai-*, traceparent) that nobody can
        # list. Allowing them all gives a page nothing: its origin must be allowed, a header grants
        # no right except a key, which the page must know, and cookies are never sent.
        allow_headers=["*"],
        expose_headers=[
            "x-packhorse-pack",
            "x-packhorse-fingerprint",
            "x-packhorse-ignored-fields",
            "x-packhorse-truncated",
            "x-request-id",
            "traceparent",
            "retry-after",
        ],
    )
    return cors, guard


class _IdentifiedCors(CORSMiddleware):
    """CORS whose answers to preflight requests, which the guard never sees, have ids too."""

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        response.raw_headers += read_ids(request_headers.raw).headers()
        return response


def _add_server_routes(
    app: FastAPI, settings: ServeSettings, models: ServedModels, metrics: Metrics
) -> None:
    async def health() -> Response:
        """Whether the process and its engines are running."""
        guard: Guard | None = getattr(app.state, "guard", None)
        if guard is not None and guard.draining:
            raise RunnerStopped("the server is shutting down")
        if not models.alive:
            raise RunnerStopped("an engine is not running")
        return json_response({"status": "ok", "unix": int(time.time())})

    async def ready() -> Response:
        """Whether a forward pass succeeded recently."""
        await health()
        await models.check_ready(settings.ready_seconds)
        return json_response({"status": "ready", "models": [model.name for model in models]})

    async def figures() -> Response:
        """Metrics for Prometheus."""
        others: OtherProcesses | None = app.state.others
        if others is not None:
            return Response(await others.metrics(), media_type=CONTENT_TYPE)
        return Response(await asyncio.to_thread(metrics.page), media_type=CONTENT_TYPE)

    unavailable: dict[int | str, dict[str, Any]] = {503: {"description": "It is not."}}
    options: dict[str, Any] = {"tags": ["Server"], "response_class": Response}
    app.get("/health", responses=unavailable, **options)(health)
    app.get("/ping", responses=unavailable, name="ping", **options)(health)  # SageMaker's probe
    app.get("/ready", responses=unavailable, **options)(ready)
    for path, handler in (("/health", health), ("/ready", ready)):  # some load balancers ask so
        app.head(path, include_in_schema=False)(handler)
    app.get("/metrics", **options)(figures)


def failure_of(request: Request, error: PackhorseError) -> Failure:
    """Return the status of the error's class, or of its nearest base class that has one."""
    status = next(STATUS[kind] for kind in type(error).__mro__ if kind in STATUS)
    headers = {}
    if status == 503:
        headers["retry-after"] = str(RESTART_SECONDS)
    if status == 429:
        headers["retry-after"] = str(_retry_after(request, error))
    field = "model" if isinstance(error, UnknownModel) else None
    return Failure(status, str(error), headers, field)


def _retry_after(request: Request, error: PackhorseError) -> int:
    """Return the seconds after which a refused request may be sent again."""
    if error.retry_after:
        return retry_seconds(error.retry_after)
    record: RequestRecord = request.scope["packhorse"]
    models: ServedModels = request.app.state.models
    return (record.model or models.default).retry_after()


async def _handle_packhorse_error(request: Request, error: Any) -> Response:
    return _error_response(request, type(error).__name__, failure_of(request, error))


async def _handle_invalid(request: Request, error: Any) -> Response:
    """Answer 400 to a body that is not JSON, 422 to one that does not fit the route's schema."""
    errors = error.errors()
    if errors[0]["type"] == "json_invalid":
        return _error_response(request, "NotJson", Failure(400, "the body is not valid JSON"))
    path, message = locate_error(errors, error.body)
    text = f"{'.'.join(path) or 'the body'}: {message}"
    failure = Failure(422, text, field=path[0] if path else None)
    if isinstance(error.body, dict):
        request.scope["packhorse_fields"] = error.body.keys()
    return _error_response(request, "Invalid", failure)


async def _handle_http_exception(request: Request, error: Any) -> Response:
    """Answer to an unknown route or method."""
    messages = {404: "there is no such route", 405: "the route does not allow this method"}
    message = messages.get(error.status_code, str(error.detail))
    failure = Failure(error.status_code, message, error.headers or {})
    return _error_response(request, str(error.status_code), failure)


async def _handle_unexpected(request: Request, error: Any) -> Response:
    """Answer 500 without details, which are for us and not for clients; the guard logs them."""
    return _error_response(request, type(error).__name__, Failure(500, "internal server error"))


def _error_response(request: Request, kind: str, failure: Failure) -> Response:
    request.scope["packhorse"].error = kind
    body = failure.body(request.url.path, request.scope.get("packhorse_fields", ()))
    return Response(body, failure.status, dict(failure.headers), "application/json")
