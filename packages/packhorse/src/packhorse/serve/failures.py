"""What a client is told when it goes wrong: one JSON shape for each dialect, chosen by path.

A shape says what kind of mistake it was in the words of that dialect's own server, so that its
clients raise the errors they are known for. Messages never repeat what was sent: texts belong into
no log, and what cannot be decoded cannot be repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from packhorse.errors import PackhorseError

Headers = Mapping[str, str]
COMPLAINTS = 100  # that are looked at: a mapping of wrong values brings one for each


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


def blame(errors: Sequence[Mapping[str, Any]], body: Any) -> tuple[list[str], str]:
    """The way to what is wrong in a request, and what is wrong there, of pydantic's complaints.

    A value that may be of several kinds brings complaints for each of them, below the kind's name,
    which no client knows. Told is the kind that got furthest into the value: it was meant.
    """
    first = errors[0]
    if first["loc"][0] != "body":
        return [str(part) for part in first["loc"][1:]], first["msg"]
    kinds: dict[tuple[Any, ...], list[_Complaint]] = {}
    for error in errors[:COMPLAINTS]:
        if error["loc"][:2] == first["loc"][:2]:
            kind, complaint = _complaint(error, body)
            kinds.setdefault(kind, []).append(complaint)
    # Of kinds that got as far, the one with the fewest complaints.
    told = max(kinds.values(), key=lambda each: (each[0].reached, -len(each)))[0]
    return [str(part)[:80] for part in told.place], told.message


@dataclass(frozen=True, slots=True)
class _Complaint:
    place: Sequence[str | int]
    reached: Sequence[int]  # at each step of the way, to be compared
    message: str


def _complaint(error: Mapping[str, Any], body: Any) -> tuple[tuple[Any, ...], _Complaint]:
    """Of which kinds it is, and the rest: what is no step into the body is the name of a kind."""
    kinds: list[Any] = []
    place: list[str | int] = []
    reached: list[int] = []
    ways = error["loc"][1:]
    for number, part in enumerate(ways, 1):
        if (isinstance(body, dict) and part in body) or (
            isinstance(body, list) and isinstance(part, int)
        ):
            body = body[part]
            reached.append(part if isinstance(part, int) else 1)
            place.append(part)
        elif error["type"] == "missing" and number == len(ways):
            reached.append(0)
            place.append(part)
        else:
            kinds.append(part)
    return tuple(kinds), _Complaint(place, reached, error["msg"])
