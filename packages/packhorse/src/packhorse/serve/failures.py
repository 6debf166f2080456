"""Errors of the HTTP API: their exception classes, and one JSON body per dialect, chosen by path.

Each dialect's error body names the kind of error the way that dialect's own server does, so its
clients raise the exceptions their users expect. Messages never repeat request content: texts must
not end up in logs, and input that cannot be decoded cannot be repeated anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from packhorse.errors import PackhorseError

Headers = Mapping[str, str]

# A large mapping with wrong values makes pydantic report one error per entry; beyond this many,
# more of them would only cost time.
MAX_ERRORS_READ = 100


# The names of these classes are values of the metric `packhorse_errors{kind}` and stand in logs.


class TooLarge(PackhorseError):
    """More inputs, characters or tokens than the server allows."""


class Empty(PackhorseError):
    """The request has no input, or an input without text."""


class UnknownModel(PackhorseError):
    """No model of that name is served here."""


class ClientGone(PackhorseError):
    """The client closed its connection before the answer was ready."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An HTTP error response, independent of the dialect it will be written in."""

    status: int
    message: str
    headers: Headers = field(default_factory=dict)
    field: str | None = None  # the request field that caused the error, if one did

    def body(self, path: str, fields: Collection[str] = ()) -> bytes:
        """Return the JSON body in the dialect of this path, or of a request with these fields."""
        to_body = _vllm if is_vllm(path, fields) else _dialect(path)
        return orjson.dumps(to_body(self))


TEI_TYPES = {
    400: "Empty",
    422: "Tokenizer",
    424: "Backend",
    429: "Overloaded",
    500: "Backend",
    503: "Unhealthy",
}
VLLM_TYPES = {404: "NotFoundError", 422: "UnprocessableEntityError"}
OPENAI_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
OPENAI_CODES = {401: "invalid_api_key", 404: "model_not_found", 429: "rate_limit_exceeded"}


def _tei(failure: Failure) -> dict[str, Any]:
    return {"error": failure.message, "error_type": TEI_TYPES.get(failure.status, "Validation")}


def _openai(failure: Failure) -> dict[str, Any]:
    default_type = "server_error" if failure.status >= 500 else "invalid_request_error"
    code = OPENAI_CODES.get(failure.status)
    if failure.status == 404 and failure.field is None:
        code = None  # an unknown route, not an unknown model
    problem = {
        "message": failure.message,
        "type": OPENAI_TYPES.get(failure.status, default_type),
        "param": failure.field,
        "code": code,
    }
    return {"error": problem}


def _embeddings(failure: Failure) -> dict[str, Any]:
    # Jina's API has the path of OpenAI's, and its clients read `detail`.
    return {**_openai(failure), "detail": failure.message}


def _vllm(failure: Failure) -> dict[str, Any]:
    # Infinity's errors have these fields too.
    default_type = "InternalServerError" if failure.status >= 500 else "BadRequestError"
    problem = {
        "message": failure.message,
        "type": VLLM_TYPES.get(failure.status, default_type),
        "param": failure.field,
        "code": failure.status,
    }
    return {"error": problem}


def _cohere(failure: Failure) -> dict[str, Any]:
    # Cohere's client reads `message`, Jina's reads `detail`.
    return {"message": failure.message, "detail": failure.message}


def _hugging_face(failure: Failure) -> dict[str, Any]:
    return {"error": failure.message}


# The first matching prefix wins; all other paths use text-embeddings-inference's error body.
DIALECTS: tuple[tuple[str, Callable[[Failure], dict[str, Any]]], ...] = (
    ("/v1/embeddings", _embeddings),
    ("/v1/classify", _cohere),
    ("/v1/detokenize", _cohere),
    ("/v1/embed", _cohere),
    ("/v1/rerank", _cohere),
    ("/v1/score", _vllm),
    ("/v1/tokenize", _cohere),
    ("/v2/", _cohere),
    ("/v1/", _openai),
    ("/models/", _hugging_face),
    ("/pipeline/", _hugging_face),
    ("/pooling", _vllm),
    ("/score", _vllm),
    ("/detokenize", _vllm),
    ("/version", _vllm),
    ("/embeddings", _vllm),
    ("/models", _vllm),
)


@dataclass(frozen=True, slots=True)
class SharedPath:
    """A path that other servers have and vLLM too; the fields of a request say whose it is."""

    others: frozenset[str]  # fields that only requests to the other servers have
    vllm: frozenset[str]  # fields that only requests to vLLM (and Infinity) have


# The fields for the two sides of a comparison on vLLM's /score.
TEXT_PAIRS = (
    ("text_1", "text_2"),
    ("queries", "documents"),
    ("queries", "items"),
    ("data_1", "data_2"),
)
SHARED_PATHS: dict[str, SharedPath] = {
    "/rerank": SharedPath(frozenset({"texts"}), frozenset({"documents"})),
    "/classify": SharedPath(frozenset({"inputs"}), frozenset({"input", "messages"})),
    "/tokenize": SharedPath(frozenset({"inputs"}), frozenset({"prompt", "messages"})),
    "/invocations": SharedPath(
        frozenset({"inputs", "texts"}),
        frozenset({"input", "messages", *(name for pair in TEXT_PAIRS for name in pair)}),
    ),
}


def is_vllm(path: str, fields: Collection[str]) -> bool:
    """Return whether a request to a path of several servers has the fields of vLLM's API."""
    shared = SHARED_PATHS.get(path)
    if shared is None or not shared.others.isdisjoint(fields):
        return False
    return not shared.vllm.isdisjoint(fields)


def _dialect(path: str) -> Callable[[Failure], dict[str, Any]]:
    if path == "/":
        return _hugging_face
    return next((to_body for prefix, to_body in DIALECTS if path.startswith(prefix)), _tei)


def locate_error(errors: Sequence[Mapping[str, Any]], body: Any) -> tuple[list[str], str]:
    """Choose one of pydantic's errors to report: the path to the wrong value, and a message.

    For a field of a union type pydantic reports errors of every member of the union, each under the
    member's name, which means nothing to a client. The member that matched the deepest part of the
    value is most likely the intended one, so its error is reported.
    """
    first = errors[0]
    if first["loc"][0] != "body":
        return [str(part) for part in first["loc"][1:]], first["msg"]
    errors_by_member: dict[tuple[Any, ...], list[_LocatedError]] = {}
    for error in errors[:MAX_ERRORS_READ]:
        if error["loc"][:2] == first["loc"][:2]:
            member, located = _locate(error, body)
            errors_by_member.setdefault(member, []).append(located)
    # Among members that matched equally deep, prefer the one with the fewest errors.
    best = max(errors_by_member.values(), key=lambda located: (located[0].depth, -len(located)))
    return [str(part)[:80] for part in best[0].path], best[0].message


@dataclass(frozen=True, slots=True)
class _LocatedError:
    path: Sequence[str | int]
    depth: Sequence[int]  # per step of the path how far it went; compared as a sequence
    message: str


def _locate(error: Mapping[str, Any], body: Any) -> tuple[tuple[Any, ...], _LocatedError]:
    """Split pydantic's location into names of union members and a path into the body.

    A part of the location that is no key or index of the body is the name of a union member.
    """
    members: list[Any] = []
    path: list[str | int] = []
    depth: list[int] = []
    parts = error["loc"][1:]
    for number, part in enumerate(parts, 1):
        if (isinstance(body, dict) and part in body) or (
            isinstance(body, list) and isinstance(part, int)
        ):
            body = body[part]
            depth.append(part if isinstance(part, int) else 1)
            path.append(part)
        elif error["type"] == "missing" and number == len(parts):
            depth.append(0)
            path.append(part)
        else:
            members.append(part)
    return tuple(members), _LocatedError(path, depth, error["msg"])
