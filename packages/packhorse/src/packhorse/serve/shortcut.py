"""The short way to a route: by its path alone, past the framework's search and its dependencies.

A POST with one body to a path without parameters is nearly all that a server is asked, and FastAPI
took three times as long for it as the handler itself: routes are tried one after the other, a stack
is opened for dependencies that nobody has. Here a table finds the handler and pydantic reads the
body as JSON. The description of the API and every other route stay FastAPI's, and so does every
body that pydantic cannot read: it goes the long way, which tells what is wrong with it. Which way a
request went must not be seen in its answer; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from packhorse.serve.guard import App, Receive, Scope, Send, replay

Handlers = Mapping[Any, Callable[[Request, Any], Any]]  # by kind of error; coroutines


@dataclass(frozen=True, slots=True)
class _Short:
    """A route that can be taken the short way."""

    route: APIRoute
    body: type[BaseModel]
    handler: Callable[..., Awaitable[Response]]
    wants_request: bool

    async def answer(self, request: Request, body: BaseModel) -> Response:
        if self.wants_request:
            return await self.handler(request=request, body=body)
        return await self.handler(body=body)


class Shortcut:
    """The application, with a short way to those of its routes that have one."""

    def __init__(self, app: App, routes: Sequence[BaseRoute], handlers: Handlers) -> None:
        self.app, self.handlers = app, handlers
        found = [_short(route) for route in routes if isinstance(route, APIRoute)]
        self.table = {short.route.path: short for short in found if short is not None}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, by either way."""
        short = self.table.get(scope["path"]) if scope.get("method") == "POST" else None
        if short is None:
            return await self.app(scope, receive, send)
        request = Request(scope, receive, send)
        sent = await request.body()
        try:
            body = short.body.model_validate_json(sent)
        except ValidationError:
            return await self.app(scope, replay(sent, receive), send)
        scope["route"] = short.route
        try:
            response = await short.answer(request, body)
        except Exception as error:
            response = await self._told(request, error)
        await response(scope, receive, send)

    async def _told(self, request: Request, error: Exception) -> Response:
        """As the application tells it; what it has no words for is the guard's."""
        known = (kind for kind in type(error).__mro__[:-3] if kind in self.handlers)
        kind = next(known, None)
        if kind is None:
            raise error
        return await self.handlers[kind](request, error)


def _short(route: APIRoute) -> _Short | None:
    hints = get_type_hints(route.endpoint)
    given = set(hints) - {"return"}
    if "POST" not in (route.methods or ()) or not {"body"} <= given <= {"body", "request"}:
        return None
    return _Short(route, hints["body"], route.endpoint, "request" in given)
