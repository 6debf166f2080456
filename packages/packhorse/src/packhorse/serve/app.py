"""The application: routes, what happens to errors, and what the process says of its own health.

This is the one place where a kind of error becomes an HTTP status. A request that no model can run
is 424, as text-embeddings-inference says it; one that nobody can serve now is 429 with the seconds
after which what waits will have run; a dead engine is 503.

`/health` says that the process lives and its engines run; `/ready` that a forward pass worked a
moment ago, and runs one where the last was long ago.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from packhorse import __version__
from packhorse.errors import (
    CheckpointError,
    InputError,
    KernelError,
    MissingExtra,
    Overloaded,
    PackhorseError,
    RequestFailed,
    RunnerStopped,
)
from packhorse.serve import page
from packhorse.serve.calls import reply
from packhorse.serve.dialects import cohere, huggingface, openai, own, tei
from packhorse.serve.failures import ClientGone, Empty, Failure, TooLarge, UnknownModel, blame
from packhorse.serve.guard import Guard
from packhorse.serve.hosting import Hosts
from packhorse.serve.metrics import CONTENT_TYPE, Metrics, Seen
from packhorse.serve.settings import Settings
from packhorse.serve.shortcut import Shortcut

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
    ClientGone: 499,
    RunnerStopped: 503,
    PackhorseError: 500,
}


def create(settings: Settings, hosts: Hosts) -> FastAPI:
    """The application over these models; whoever runs it closes them by its lifespan."""
    app = shell(settings, hosts, Metrics(hosts))
    for routes in (tei, openai, cohere, huggingface, own, page):
        routes.add(app, hosts, settings)
    app.add_middleware(Shortcut, routes=app.routes, handlers=app.exception_handlers)
    return app


def shell(
    settings: Settings,
    hosts: Hosts,
    metrics: Metrics,
    openapi_url: str | None = "/openapi.json",
) -> FastAPI:
    """What every application of ours has: health, figures, and what becomes of errors."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(hosts.close)

    app = FastAPI(
        title="Packhorse",
        version=__version__,
        description="BERT without padding, behind HTTP.",
        docs_url=None,  # its scripts come from another host
        redoc_url=None,
        openapi_url=openapi_url,
        redirect_slashes=False,  # its Location would repeat the Host that was sent
        lifespan=lifespan,
    )
    app.state.settings, app.state.hosts, app.state.metrics = settings, hosts, metrics
    _add_own_routes(app, settings, hosts, metrics)
    _add_handlers(app)
    return app


def guarded(app: FastAPI) -> tuple[Any, Guard]:
    """What the world may call, and the guard in it."""
    settings: Settings = app.state.settings
    guard = app.state.guard = Guard(app, settings, app.state.hosts, app.state.metrics)
    if not settings.cors_origin:
        return guard, guard
    # Outside the guard: a browser asks for permission without a key. No credentials: a key in a
    # header is none in the sense of CORS, and cookies there are not.
    cors = CORSMiddleware(
        guard,
        allow_origins=settings.cors_origin,
        allow_methods=["GET", "POST"],
        allow_headers=["authorization", "content-type"],
        expose_headers=["x-packhorse-pack", "x-packhorse-ignored-fields", "retry-after"],
    )
    return cors, guard


def _add_own_routes(app: FastAPI, settings: Settings, hosts: Hosts, metrics: Metrics) -> None:
    async def health() -> Response:
        """Does the process live, and do its engines run?"""
        guard: Guard | None = getattr(app.state, "guard", None)
        if guard is not None and guard.draining:
            raise RunnerStopped("the server is shutting down")
        if not hosts.alive:
            raise RunnerStopped("the engine is not running; the server has to be started again")
        return reply({"status": "ok"})

    async def ready() -> Response:
        """Did a forward pass work just now?"""
        await health()
        await hosts.ready(settings.ready_seconds)
        return reply({"status": "ready", "models": [host.name for host in hosts]})

    async def figures() -> Response:
        """Figures for Prometheus."""
        return Response(await asyncio.to_thread(metrics.page), media_type=CONTENT_TYPE)

    unhealthy: dict[int | str, dict[str, Any]] = {503: {"description": "It is not."}}
    about: dict[str, Any] = {"tags": ["Server"], "response_class": Response}
    app.get("/health", responses=unhealthy, **about)(health)
    app.get("/ready", responses=unhealthy, **about)(ready)
    app.get("/metrics", **about)(figures)


def _add_handlers(app: FastAPI) -> None:
    for kind, handler in {
        PackhorseError: _ours,
        RequestValidationError: _invalid,
        HTTPException: _framework,
        Exception: _mistake,
    }.items():
        app.add_exception_handler(kind, handler)


async def _ours(request: Request, error: Any) -> Response:
    seen: Seen = request.scope["packhorse"]
    status = next(STATUS[kind] for kind in type(error).__mro__ if kind in STATUS)
    headers = {}
    if status == 429:
        hosts: Hosts = request.app.state.hosts
        headers["retry-after"] = str((seen.host or hosts.default).retry_after())
    blamed = "model" if isinstance(error, UnknownModel) else None
    return _failed(request, type(error).__name__, Failure(status, str(error), headers, blamed))


async def _invalid(request: Request, error: Any) -> Response:
    """A body that is not JSON is 400, one that does not fit the schema 422; neither is repeated."""
    errors = error.errors()
    if errors[0]["type"] == "json_invalid":
        return _failed(request, "NotJson", Failure(400, "the body is not JSON"))
    place, message = blame(errors, error.body)
    told = f"{'.'.join(place) or 'the body'}: {message}"
    return _failed(request, "Invalid", Failure(422, told, field=(place or [None])[0]))


async def _framework(request: Request, error: Any) -> Response:
    """No such route, or not by this method."""
    message = {404: "there is no such route", 405: "not by this method"}
    failure = Failure(
        error.status_code, message.get(error.status_code, str(error.detail)), error.headers or {}
    )
    return _failed(request, str(error.status_code), failure)


async def _mistake(request: Request, error: Any) -> Response:
    """Ours to fix, not the client's to read; the guard logs where it happened."""
    return _failed(request, type(error).__name__, Failure(500, "the server made a mistake"))


def _failed(request: Request, kind: str, failure: Failure) -> Response:
    request.scope["packhorse"].error = kind
    body = failure.body(request.url.path)
    return Response(body, failure.status, dict(failure.headers), "application/json")
