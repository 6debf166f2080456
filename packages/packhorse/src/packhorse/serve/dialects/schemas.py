"""What the request bodies of all dialects share: field types, unknown fields, error responses.

Numbers are bounded and types are strict: 1 is not true and "5" is not 5. A list is refused at its
first wrong item, because a million wrong items would otherwise make a million error messages.

A body declares every field that one of the dialects of its route documents. A field is honored; or
it is accepted only with values that change nothing (`only`), so that any other value is 422; or it
never changes an answer (`user`) and is described as "No effect." Fields that a body does not
declare are ignored and named in the response header `X-Packhorse-Ignored-Fields`; with
`--strict-fields` they are 422. Our own routes always refuse them.

    modality: Annotated[str | None, only("text", instead="models read texts only")] = None
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator
from functools import partial, wraps
from itertools import islice
from typing import Annotated, Any, Literal, TypeVar

from fastapi import FastAPI
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, RootModel
from pydantic_core import PydanticCustomError
from starlette.requests import Request
from starlette.responses import Response

from packhorse.errors import InputError

# Field types -----------------------------------------------------------------------------------

Item = TypeVar("Item")
ListOf = Annotated[list[Item], Field(fail_fast=True)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[
    list[TokenId],
    Field(fail_fast=True, description="Token ids, including special tokens; used unchanged."),
]
Text = Annotated[str, Field(description="A text; an empty one is refused.")]
Inputs = Annotated[
    Text | TokenIds | ListOf[Text | TokenIds],
    Field(description="A text, token ids, or a list of those.", examples=["What is packing?"]),
]
Texts = Annotated[
    Text | ListOf[Text],
    Field(description="A text or a list of texts.", examples=["What is packing?"]),
]
Direction = Annotated[
    Literal["Right", "Left", "right", "left"],
    Field(description="The end at which a text is truncated."),
]
LongText = Annotated[
    Literal["error", "truncate", "chunk"],
    Field(
        description="What to do with a text that has more tokens than the model takes: refuse it, "
        "truncate it, or read it in chunks and average their results, weighted by their tokens."
    ),
]


def _check_token_limit(limit: int | None) -> int | None:
    if limit == 0:
        raise ValueError("no token would be left; use -1 for what the model takes")
    return limit


TokenLimit = Annotated[
    int | None,
    Field(
        ge=-1,
        le=2**31,
        description="Truncate inputs to this many tokens; -1: to what the model takes.",
    ),
    AfterValidator(_check_token_limit),
]
ModelName = Annotated[
    str | None,
    Field(
        description="The name of a served model; by default the first that supports the task. If "
        "only one model is served, every name means that one."
    ),
]
PromptName = Annotated[
    str | None,
    Field(description="The name of one of the model's prompts, to put before each text."),
]
InputType = Annotated[
    Literal["query", "document"],
    Field(description="Some models read queries in another way than documents."),
]
TopK = Annotated[int, Field(ge=1, le=1000)]
NO_EFFECT: Any = Field(default=None, description="No effect.")


class LenientBody(BaseModel):
    """A request body of another server's API, in which unknown fields are allowed."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())


class StrictBody(BaseModel):
    """A request body of our own API, in which an unknown or misspelled field is refused."""

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())


def only(*values: Any, instead: str) -> AfterValidator:
    """Refuse all other values of a field; `instead` tells the client what to do."""
    allowed = f"only {' or '.join(map(json.dumps, values))}" if values else "no value"

    def check(value: Any) -> Any:
        if value is None or value in values:
            return value
        reason = f"{allowed} is supported here: {instead}"
        raise PydanticCustomError("unsupported", "{reason}", {"reason": reason})

    return AfterValidator(check)


# Unknown fields --------------------------------------------------------------------------------

Handler = Callable[..., Awaitable[Response]]
# The names come from the client and go into a response header, so their number, their length and
# their characters are bounded.
MAX_NAMES_LISTED = 16
HEADER_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def post_routes(app: FastAPI, tag: str, error: type[BaseModel]) -> Callable[..., Any]:
    """Return `app.post` for the routes of a dialect; their unknown fields are reported."""
    post = partial(app.post, tags=[tag], responses=error_responses(error))

    def decorator(path: str, **options: Any) -> Callable[[Handler], Handler]:
        return lambda handler: post(path, **options)(report_unknown_fields(handler))

    return decorator


def report_unknown_fields(handler: Handler) -> Handler:
    """Wrap a handler: name the unknown fields of its body in a header, or refuse them."""

    @wraps(handler)
    async def wrapped(**arguments: Any) -> Response:
        request: Request = arguments["request"]
        body = arguments["body"]
        if isinstance(body, RootModel):  # one of several bodies
            body = body.root
        request.scope["packhorse_fields"] = body.model_fields_set  # for the dialect of an error
        names = list(unknown_fields(body))
        if names and request.app.state.settings.strict_fields:
            raise InputError(
                f"unknown fields: {_listed(names)} (refused because of --strict-fields)"
            )
        if names:
            request.scope["packhorse"].ignored = _listed(names)
        return await handler(**arguments)

    # FastAPI would evaluate the annotations, which are strings, in the namespace of this module
    # instead of the handler's; so they are evaluated here.
    signature = inspect.signature(handler, eval_str=True)
    wrapped.__signature__ = signature  # type: ignore[attr-defined]
    return wrapped


def unknown_fields(body: BaseModel, prefix: str = "") -> Iterator[str]:
    """Yield the names of fields that were sent but are not declared; in inner objects, dotted."""
    for name in body.model_extra or ():
        yield f"{prefix}{name}"
    for name, value in body.__dict__.items():
        items = value if isinstance(value, list) else [value]
        if items and isinstance(items[0], BaseModel):
            for item in items:
                yield from unknown_fields(item, f"{prefix}{name}.")


def _listed(names: list[str]) -> str:
    """Join names for a header; names that could break it, and those beyond a limit, are counted."""
    distinct = list(dict.fromkeys(names))
    allowed = (name for name in distinct if HEADER_NAME.fullmatch(name))
    listed = list(islice(allowed, MAX_NAMES_LISTED))
    rest = len(distinct) - len(listed)
    if rest:
        listed.append(f"and {rest} more")
    return ", ".join(listed)


# Error responses: how `failures.Failure` looks in each dialect, for the API description ---------


class TeiError(BaseModel):
    """The error body of text-embeddings-inference."""

    error: str = Field(examples=["the request has no input"])
    error_type: Literal[
        "Unhealthy", "Backend", "Overloaded", "Validation", "Tokenizer", "Empty"
    ] = Field(examples=["Empty"])


class OpenAiProblem(BaseModel):
    """The content of an `OpenAiError`."""

    message: str = Field(examples=["the request has no input"])
    type: str = Field(examples=["invalid_request_error"])
    param: str | None = Field(examples=["input"])
    code: str | None = Field(examples=[None])


class OpenAiError(BaseModel):
    """The error body of OpenAI's API."""

    error: OpenAiProblem


class EmbeddingsError(OpenAiError):
    """The error body of OpenAI's API, with the field of Jina's."""

    detail: str = Field(examples=["the request has no input"])


class VllmProblem(BaseModel):
    """The content of a `VllmError`."""

    message: str = Field(examples=["the request has no input"])
    type: str = Field(examples=["BadRequestError"])
    param: str | None = Field(examples=["input"])
    code: int = Field(description="The HTTP status.", examples=[400])


class VllmError(BaseModel):
    """The error body of vLLM and of Infinity."""

    error: VllmProblem


class TeiOrVllmError(RootModel[TeiError | VllmError]):
    """The error body of the server whose fields the request has."""


class CohereError(BaseModel):
    """The error body of Cohere's API (`message`) and of Jina's (`detail`)."""

    message: str = Field(examples=["the request has no input"])
    detail: str = Field(examples=["the request has no input"])


class HuggingFaceError(BaseModel):
    """The error body of Hugging Face's inference API."""

    error: str = Field(examples=["the request has no input"])


STATUS_DESCRIPTIONS = {
    400: "The body is not JSON, or there is no input",
    401: "The API key is missing or wrong",
    404: "No model of that name is served",
    408: "The body did not arrive in time",
    411: "The request has no Content-Length",
    413: "There are too many inputs, or one is too long",
    415: "The body is not application/json, or it is compressed",
    422: "The body does not fit the route's schema, or a text cannot be tokenized",
    424: "The model has no head for this task, or failed on this input",
    429: "The server is overloaded; try again after Retry-After seconds",
    500: "Internal server error",
    503: "The server is starting or shutting down, or an engine died",
}
GET_STATUSES = (401, 404, 422, 429, 500, 503)  # of routes without a body


def error_responses(
    schema: type[BaseModel], statuses: Iterable[int] = tuple(STATUS_DESCRIPTIONS)
) -> dict[int | str, dict[str, Any]]:
    """Return `responses` for a route: the error statuses it may answer with, and their body."""
    return {
        status: {"model": schema, "description": STATUS_DESCRIPTIONS[status]} for status in statuses
    }
