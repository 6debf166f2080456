"""What a client is told when it goes wrong: one JSON shape for each dialect, chosen by path.

A shape says what kind of mistake it was in the words of that dialect's own server, so that its
clients raise the errors they are known for. Messages never repeat what was sent: texts belong into
no log, and what cannot be decoded cannot be repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from packhorse.errors import PackhorseError

Headers = Mapping[str, str]


class TooLarge(PackhorseError):
    """More inputs, characters or tokens than the server allows."""


class Empty(PackhorseError):
    """Nothing was asked: no input, or one without text."""


class UnknownModel(PackhorseError):
    """No model of that name is served here."""


class ClientGone(PackhorseError):
    """The client hung up before its answer was ready."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A refusal, before it is put into a dialect's words."""

    status: int
    message: str
    headers: Headers = field(default_factory=dict)
    field: str | None = None  # of the request, where one is to blame

    def body(self, path: str) -> bytes:
        """As the dialect of this path writes it."""
        return orjson.dumps(_dialect(path)(self))


TEI = {400: "Empty", 422: "Tokenizer", 424: "Backend", 429: "Overloaded"}
TEI |= {500: "Backend", 503: "Unhealthy"}
OPENAI = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
OPENAI_CODES = {401: "invalid_api_key", 404: "model_not_found", 429: "rate_limit_exceeded"}


def _tei(failure: Failure) -> dict[str, Any]:
    return {"error": failure.message, "error_type": TEI.get(failure.status, "Validation")}


def _openai(failure: Failure) -> dict[str, Any]:
    server = "server_error" if failure.status >= 500 else "invalid_request_error"
    kind = OPENAI.get(failure.status, server)
    code = OPENAI_CODES.get(failure.status) if failure.status != 404 or failure.field else None
    found = {"message": failure.message, "type": kind, "param": failure.field, "code": code}
    return {"error": found}


def _cohere(failure: Failure) -> dict[str, Any]:
    # Cohere reads `message`, Jina `detail`.
    return {"message": failure.message, "detail": failure.message}


def _hugging_face(failure: Failure) -> dict[str, Any]:
    return {"error": failure.message}


# The first prefix that fits; whatever is left speaks as text-embeddings-inference.
DIALECTS: tuple[tuple[str, Callable[[Failure], dict[str, Any]]], ...] = (
    ("/v1/rerank", _cohere),
    ("/v2/rerank", _cohere),
    ("/v1/", _openai),
    ("/models/", _hugging_face),
    ("/pipeline/", _hugging_face),
)


def _dialect(path: str) -> Callable[[Failure], dict[str, Any]]:
    if path == "/":
        return _hugging_face
    return next((shape for prefix, shape in DIALECTS if path.startswith(prefix)), _tei)
