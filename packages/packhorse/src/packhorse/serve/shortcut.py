"""Call the handler of a POST route directly, without FastAPI's routing and dependency injection.

Nearly all requests are a POST with one JSON body to a path without parameters, and for those
FastAPI took three times as long as the handler itself: it tries routes one after the other and
opens a stack for dependencies that no route has. Here a table finds the handler by its path, and
pydantic reads the body. FastAPI keeps all other routes, the OpenAPI description, and every body
that pydantic rejects, because FastAPI reports what is wrong with it. Clients must not be able to
tell which way a request took; a test compares the answers of both.
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

Handlers = Mapping[Any, Callable[[Request, Any], Any]]  # coroutine functions by exception class


@dataclass(frozen=True, slots=True)
class DirectRoute:
    """A route whose handler takes a body and at most the request besides."""

    route: APIRoute
    body: type[BaseModel]
    handler: Callable[..., Awaitable[Response]]
    takes_request: bool

    async def run(self, request: Request, body: BaseModel) -> Response:
        """Call the handler."""
        if self.takes_request:
            return await self.handler(request=request, body=body)
        return await self.handler(body=body)


class Shortcut:
    """ASGI middleware that calls handlers directly if it can, and passes other requests on."""

    def __init__(self, app: App, routes: Sequence[BaseRoute], handlers: Handlers) -> None:
        self.app = app
        self.handlers = handlers
        self.table = direct_routes(routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        direct = self.table.get(scope["path"]) if scope.get("method") == "POST" else None
        if direct is None:
            return await self.app(scope, receive, send)
        request = Request(scope, receive, send)
        content = await request.body()
        try:
            body = direct.body.model_validate_json(content)
        except ValidationError:
            return await self.app(scope, replay(content, receive), send)
        scope["route"] = direct.route  # for metrics and log
        try:
            response = await direct.run(request, body)
        except Exception as error:
            response = await self._error_response(request, error)
        await response(scope, receive, send)

    async def _error_response(self, request: Request, error: Exception) -> Response:
        """Answer with the application's handler for this class of error; raise if it has none."""
        # The last three classes are Exception, BaseException and object. The handler for Exception
        # is left to Starlette's outermost layer, which calls it and then raises the error again, so
        # that the guard can log it.
        kinds = (kind for kind in type(error).__mro__[:-3] if kind in self.handlers)
        kind = next(kinds, None)
        if kind is None:
            raise error
        return await self.handlers[kind](request, error)


def direct_routes(routes: Sequence[BaseRoute]) -> dict[str, DirectRoute]:
    """Return the routes that can be called directly, by their paths."""
    candidates = (_direct_route(route) for route in routes if isinstance(route, APIRoute))
    return {direct.route.path: direct for direct in candidates if direct is not None}


def _direct_route(route: APIRoute) -> DirectRoute | None:
    """Return the route if it can be called directly."""
    hints = get_type_hints(route.endpoint)
    parameters = set(hints) - {"return"}
    if "POST" not in (route.methods or ()) or not {"body"} <= parameters <= {"body", "request"}:
        return None
    return DirectRoute(route, hints["body"], route.endpoint, "request" in parameters)
