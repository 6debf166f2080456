"""The page of other servers' routes is true: each answers as it says, and no route is left out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from .bodies import BODIES

DOCS = Path(__file__).resolve().parents[4] / "docs"
PAGE = DOCS / "reference" / "routes-of-others.md"
ROW = re.compile(r"\| `(GET|POST) (\S+)` \| (yes|other|no) \|")
RANKED = {"query": "who sat", "documents": ["the cat", "a mat"]}
# Requests to paths that several servers have, other than those of `BODIES`.
OF_SERVER: dict[tuple[str, str], dict[str, Any]] = {
    ("vLLM", "/classify"): {"input": "the cat"},
    ("vLLM", "/rerank"): RANKED,
    ("vLLM", "/tokenize"): {"prompt": "the cat"},
    ("Infinity", "/classify"): {"input": ["the cat"], "raw_scores": False},
    ("Infinity", "/rerank"): RANKED | {"raw_scores": False},
    ("Jina", "/v1/classify"): {"input": ["the cat"], "labels": ["red", "blue"]},
}


def rows() -> list[tuple[str, str, str, str]]:
    """Return server, method, path and whether it works, of each row of the page."""
    table = []
    server = ""
    for line in PAGE.read_text("utf-8").splitlines():
        if line.startswith("## "):
            server = line.removeprefix("## ")
        elif match := ROW.match(line):
            table.append((server, *match.groups()))
    return table


def test_all_servers_are_there() -> None:
    servers = {server for server, *_ in rows()}
    assert servers == {"text-embeddings-inference", "vLLM", "Infinity", "Cohere", "Jina"}
    assert len(rows()) > 70


@pytest.mark.parametrize(("server", "method", "path", "works"), rows())
def test_it_works_as_the_page_says(served, server: str, method: str, path: str, works: str) -> None:
    path = path.replace("{model}", "tiny")
    body = OF_SERVER.get((server, path), BODIES.get(path, {"inputs": "the cat"}))
    response = served.get(path) if method == "GET" else served.post(path, body)
    if works == "no":
        # 422: the path is another server's, whose fields the request does not have.
        assert response.status_code in (404, 405, 422, 424), response.text
    else:
        assert response.status_code == 200, response.text


def test_every_route_is_in_the_reference(served) -> None:
    """The page of HTTP routes is made of openapi.json; routes of FastAPI itself are named in it."""
    import json

    described = set(json.loads((DOCS / "openapi.json").read_bytes())["paths"])
    on_pages = {path for _, _, path, works in rows() if works != "no"}
    text = (DOCS / "reference" / "http.md").read_text("utf-8")
    for route in served.guard.app.routes:
        path = route.path.replace(":path}", "}")
        assert path in described | on_pages or f"`{path}`" in text, path
