"""Pieces of request bodies, and the refusals that every route documents.

Numbers are bounded and kinds are strict: 1 is not true and "5" is not 5. A list of the wrong kind
is refused at its first wrong item; else a million of them would make a million complaints.
Fields that a dialect does not know are kept aside for `fields` to name; our own routes refuse them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

Item = TypeVar("Item")
Many = Annotated[list[Item], Field(fail_fast=True)]
Id = Annotated[int, Field(ge=0, lt=2**31)]
Ids = Annotated[
    list[Id],
    Field(fail_fast=True, description="Token ids as they are, special tokens included."),
]
Text = Annotated[str, Field(description="A text; an empty one is refused.")]
Inputs = Annotated[
    Text | Ids | Many[Text | Ids],
    Field(description="A text, token ids, or a list of those.", examples=["What is packing?"]),
]
Texts = Annotated[
    Text | Many[Text],
    Field(description="A text or a list of texts.", examples=["What is packing?"]),
]
Direction = Annotated[
    Literal["Right", "Left", "right", "left"],
    Field(description="The end that is cut off where a text is truncated."),
]
Long = Annotated[
    Literal["error", "truncate", "chunk"],
    Field(
        description="A text with more tokens than the model takes is refused, cut, or read in "
        "chunks whose results are averaged, each weighing as much as it has tokens."
    ),
]
Named = Annotated[
    str | None,
    Field(
        description="Which of the served models; by default the first that can do this. Where one "
        "is served, any name means it."
    ),
]
Prompt = Annotated[
    str | None, Field(description="The model's prompt of this name goes before each text.")
]
Top = Annotated[int, Field(ge=1, le=1000)]
NO_EFFECT: Any = Field(default=None, description="No effect.")


class Lenient(BaseModel):
    """A body of a dialect, beside whose fields there may be others."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())


class Exact(BaseModel):
    """A body of ours: a misspelt option is refused."""

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())


class TeiError(BaseModel):
    """As text-embeddings-inference tells what went wrong."""

    error: str = Field(examples=["the request has no input"])
    error_type: Literal[
        "Unhealthy", "Backend", "Overloaded", "Validation", "Tokenizer", "Empty"
    ] = Field(examples=["Empty"])


class OpenAiProblem(BaseModel):
    """What is inside of an `OpenAiError`."""

    message: str = Field(examples=["the request has no input"])
    type: str = Field(examples=["invalid_request_error"])
    param: str | None = Field(examples=["input"])
    code: str | None = Field(examples=[None])


class OpenAiError(BaseModel):
    """As OpenAI tells what went wrong."""

    error: OpenAiProblem


class CohereError(BaseModel):
    """As Cohere (`message`) and Jina (`detail`) tell what went wrong."""

    message: str = Field(examples=["the request has no input"])
    detail: str = Field(examples=["the request has no input"])


class HuggingFaceError(BaseModel):
    """As Hugging Face's inference API tells what went wrong."""

    error: str = Field(examples=["the request has no input"])


WHY = {
    400: "The body is not JSON, or there is no input",
    401: "The API key is missing or wrong",
    404: "No model of that name is served",
    408: "The body did not arrive in time",
    411: "The body has no length",
    413: "Too many inputs, or one that is too long",
    415: "The body is not application/json, or it is compressed",
    422: "The body is not of the route's shape, or a text cannot be tokenized",
    424: "The model has no head for this, or failed on this input",
    429: "Too much waits already; try again after Retry-After seconds",
    500: "The server is at fault",
    503: "The server is starting, stopping or out of order",
}


READING = (401, 404, 422, 429, 500, 503)  # of these, what a route without a body may say


def refusals(
    shape: type[BaseModel], statuses: Iterable[int] = tuple(WHY)
) -> dict[int | str, dict[str, Any]]:
    """For a route's `responses`: the statuses it may answer with, in the dialect's shape."""
    return {status: {"model": shape, "description": WHY[status]} for status in statuses}
