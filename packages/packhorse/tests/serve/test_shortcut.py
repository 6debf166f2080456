"""The shortcut to handlers is taken by all routes that can, and gives the same answers."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from packhorse.serve.shortcut import Shortcut

from .bodies import BODIES

TIMES = re.compile("x-.*-time|x-packhorse-pack|x-request-id|traceparent|content-length")
# With options and inputs of other kinds, where a route has them.
GOOD: dict[str, dict[str, Any]] = BODIES | {
    "/embed": {"inputs": ["the cat", "a mat"], "normalize": False},
    "/embed_sparse": {"inputs": "the cat"},
    "/predict": {"inputs": [["the cat", "a mat"]]},
    "/v1/embeddings": {"input": [[2, 5, 6, 3]], "dimensions": 5},
    "/v1/rerank": {"query": "who sat", "documents": ["the cat", {"text": "a mat"}]},
    "/v2/rerank": {"query": "who sat", "documents": ["the cat", "a mat"], "top_n": 1},
    "/": {"inputs": {"question": "who sat", "context": "the cat sat"}},
    "/classify": {"inputs": ["the cat", ["a", "mat"]]},
}
# Bodies that two JSON parsers could read differently.
ODD = {
    "nothing": b"",
    "blank": b" ",
    "cut": b'{"inputs": "the cat"',
    "list": b"[]",
    "null": b"null",
    "no inputs": b"{}",
    "misspelt": b'{"input": "cat"}',
    "text for a number": b'{"inputs": "cat", "dimensions": "5"}',
    "fraction for a number": b'{"inputs": "cat", "dimensions": 5.0}',
    "number for a truth": b'{"inputs": "cat", "normalize": 1}',
    "number too large": b'{"inputs": "cat", "dimensions": 99999999999999999999999}',
    "truth for an id": b'{"inputs": [true]}',
    "mixed": b'{"inputs": ["cat", 5]}',
    "twice": b'{"inputs": "cat", "inputs": "mat"}',
    "no number": b'{"inputs": "cat", "other": [NaN, -Infinity, 1e999]}',
    "half a pair": rb'{"inputs": "\ud800"}',
    "half a pair elsewhere": rb'{"inputs": "cat", "other": "\ud800"}',
    "whole pair": rb'{"inputs": "\ud83d\udc0e cat"}',
    "nul": rb'{"inputs": "the\u0000cat"}',
    "raw nul": b'{"inputs": "the\0cat"}',
    "byte order mark": b'\xef\xbb\xbf{"inputs": "cat"}',
    "wide": '{"inputs": "cat"}'.encode("utf-16"),
    "not UTF-8": b'{"inputs": "\xff"}',
    "deep": b'{"inputs": "cat", "other": ' + b"[" * 500 + b"]" * 500 + b"}",
    "too deep": b'{"inputs": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
    "after the end": b'{"inputs": "cat"} x',
}


@pytest.fixture(scope="module")
def long(serving) -> Any:
    """A server without the shortcut."""
    server = serving(names=("tiny", "ranker", "tagger"))
    server.guard.app.user_middleware.clear()
    return server


def seen(answer: Any) -> tuple[Any, list[float]]:
    """Return what a client sees, without times and random ids; and its floats separately.

    The last digit of a float depends on the batch, and so does the length of the body.
    """
    headers = {name: value for name, value in answer.headers.items() if not TIMES.fullmatch(name)}
    fractions: list[float] = []
    document = json.loads(
        answer.content, parse_float=lambda number: fractions.append(float(number))
    )
    if isinstance(document, dict):
        document.pop("id", None)
        document.pop("created", None)
        for row in document.get("classifications", []):
            row.pop("id")
    return (answer.status_code, headers, document), fractions


def status(served: Any, long: Any, path: str, content: bytes) -> int:
    """Return the status of a request; asserts that both ways give the same answer."""
    headers = {"content-type": "application/json"}
    answers = [server.post(path, content=content, headers=headers) for server in (served, long)]
    (short, numbers), (whole, expected) = map(seen, answers)
    assert short == whole
    assert numbers == pytest.approx(expected, abs=1e-5)
    return answers[0].status_code


@pytest.mark.parametrize("path", GOOD)
def test_answers_are_those_of_the_long_way(served, long, path: str) -> None:
    actual = status(served, long, path, json.dumps(GOOD[path]).encode())
    assert actual == 200


@pytest.mark.parametrize("path", ["/embed", "/classify"])  # lenient, strict
@pytest.mark.parametrize("name", ODD)
def test_odd_bodies_are_read_alike(served, long, name: str, path: str) -> None:
    assert status(served, long, path, ODD[name]) in (200, 400, 422)


def test_the_short_way_is_taken(served, long) -> None:
    """By all routes that can; otherwise the tests above would compare nothing."""
    app = served.guard.app
    paths = app.openapi()["paths"]
    short = {path for path in paths if "post" in paths[path] and "{" not in path}
    assert set(Shortcut(app, app.routes, app.exception_handlers).table) == short
    assert short == set(GOOD), "a route without a body in bodies.py, or a body without a route"
    for server, expected in ((served, True), (long, False)):
        assert server.get("/health").status_code == 200
        assert (Shortcut in layers(server.guard.app.middleware_stack)) is expected


def layers(app: Any) -> list[type]:
    """Return the classes of an ASGI application and of those it wraps."""
    return [] if app is None else [type(app), *layers(getattr(app, "app", None))]
