"""What becomes of each field of a request: honored, refused, or ignored and named.

The bodies of the routes are the table. A body declares every field that one of the dialects of its
route documents: those we honor with what they may be; those we cannot honor with the only values
that change nothing (`only`), so that any other is 422; those that never change an answer (`user`)
with "No effect." as their description. Whatever a body does not declare is kept aside by pydantic,
ignored, and named in the response's `X-Packhorse-Ignored-Fields`; with `--strict-fields` it is 422.
Our own routes refuse it always.

    late_chunking: Annotated[bool | None, only(False, instead="vectors are of whole texts")] = None
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Awaitable, Callable, Iterator
from functools import partial, wraps
from typing import Any

from fastapi import FastAPI
from pydantic import AfterValidator, BaseModel
from pydantic_core import PydanticCustomError
from starlette.requests import Request
from starlette.responses import Response

from packhorse.errors import InputError
from packhorse.serve.dialects.shapes import refusals

Handler = Callable[..., Awaitable[Response]]
MOST_NAMED = 16
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")  # what may stand in a header


def only(*values: Any, instead: str) -> AfterValidator:
    """Refuse any other value; `instead` tells the client what to do."""
    allowed = f"only {' or '.join(map(json.dumps, values))}" if values else "no value"

    def check(value: Any) -> Any:
        if value is None or value in values:
            return value
        why = f"{allowed} is supported here: {instead}"
        raise PydanticCustomError("unsupported", "{why}", {"why": why})

    return AfterValidator(check)


def poster(app: FastAPI, tag: str, error: type[BaseModel]) -> Callable[..., Any]:
    """`app.post` for the routes of a dialect: unknown fields are named before a handler runs."""
    post = partial(app.post, tags=[tag], responses=refusals(error))
    return lambda path, **how: lambda handler: post(path, **how)(naming(handler))


def naming(handler: Handler) -> Handler:
    """The handler, which then refuses or names the fields of its body that it does not know."""

    @wraps(handler)
    async def named(**arguments: Any) -> Response:
        request: Request = arguments["request"]
        names = list(unknown(arguments["body"]))
        if names and request.app.state.settings.strict_fields:
            raise InputError(f"this route does not know {_listed(names)} (--strict-fields)")
        request.scope["packhorse"].ignored = _listed(names)
        return await handler(**arguments)

    # FastAPI looks names up where the wrapper was defined, so they are looked up here.
    named.__signature__ = inspect.signature(handler, eval_str=True)  # type: ignore[attr-defined]
    return named


def unknown(body: BaseModel, path: str = "") -> Iterator[str]:
    """The fields that were sent and are not declared, those of inner objects by their path."""
    for name in body.model_extra or ():
        yield f"{path}{name}"
    for name, value in body.__dict__.items():
        inner = value if isinstance(value, list) else (value,)
        for item in inner if inner and isinstance(inner[0], BaseModel) else ():
            yield from unknown(item, f"{path}{name}.")


def _listed(names: list[str]) -> str:
    """For a header: what could break it, or would be too much, is only counted."""
    distinct = list(dict.fromkeys(names))
    shown = [name for name in distinct if NAME.fullmatch(name)][:MOST_NAMED]
    rest = len(distinct) - len(shown)
    return ", ".join([*shown, f"and {rest} more"] if rest else shown)
