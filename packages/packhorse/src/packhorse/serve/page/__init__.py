"""The page at `GET /`, one HTML file, `GET /engine`, the figures that it draws, and `GET /docs`.

The file loads nothing from anywhere, and the content security policy sent with it makes the browser
enforce that: only the page's own script and style, by their hashes, and calls to this server. There
is no framework and no build step: index.html is the source.

With an API key the page is as closed as every other route. A browser asks whoever opens it for a
user and a password: any user will do, the password is the key, and the browser sends both with each
call of the page. If a call is refused nevertheless, because the server was restarted with another
key, the page shows a field for one, which it keeps in its memory only.
"""

from __future__ import annotations

import asyncio
import re
from base64 import b64encode
from functools import cache, partial
from hashlib import sha256
from importlib.resources import files
from typing import Annotated, Any

from fastapi import FastAPI, Query
from pydantic import BaseModel, Field
from starlette.responses import HTMLResponse, Response

from packhorse.runtime.statistics import RECENT
from packhorse.serve.calls import json_response
from packhorse.serve.dialects.schemas import (
    GET_STATUSES,
    HuggingFaceError,
    TeiError,
    error_responses,
)
from packhorse.serve.hosting import (
    THROUGHPUT_SECONDS,
    OtherProcesses,
    ServedModels,
    describe_engine,
)
from packhorse.serve.page import reference
from packhorse.serve.settings import ServeSettings

Count = Annotated[int, Query(ge=0, le=RECENT, description="How many of the last batches to list.")]


class LastBatch(BaseModel):
    """A batch that ran, with its layout."""

    number: int = Field(description="Counted from 1 since the model was opened.")
    seconds_ago: float
    ms: float = Field(description="Compute time.")
    tokens: int = Field(description="Computed tokens, including those of no input.")
    fill: float = Field(description="Tokens of inputs / all tokens.")
    rows: list[list[int]] = Field(description="The lengths of the sequences in each row, in order.")


class ModelEngine(BaseModel):
    """The engine of one model; times are over the last inputs."""

    name: str
    alive: bool
    mask: str | None = Field(description="The mask token of the model's tokenizer.")
    mode: str = Field(description="ragged, mask or repack.")
    rows_a_batch: int
    row_tokens: int = Field(description="The capacity of a row.")
    waiting_inputs: int
    waiting_tokens: int
    most_waiting_tokens: int
    running_inputs: int
    tokens_per_second: float = Field(description=f"Over the last {THROUGHPUT_SECONDS:g} seconds.")
    fill: float = Field(description="Of the batches below.")
    p50_ms: float
    p99_ms: float
    queue_ms: float
    compute_ms: float
    batches: list[LastBatch] = Field(description="The newest last.")


class Engines(BaseModel):
    """The engines of all served models."""

    models: list[ModelEngine]


def add(app: FastAPI, models: ServedModels, settings: ServeSettings) -> None:
    """Add the routes."""
    get = partial(app.get, tags=["Server"])
    html = files(__name__).joinpath("index.html").read_text("utf-8")
    if settings.keys:  # the commands that it writes to be copied then have a place for a key
        html = html.replace('data-key="no"', 'data-key="yes"')
    headers = page_headers(html)
    page_errors = error_responses(HuggingFaceError, (401, 429, 503))

    @get("/", response_class=HTMLResponse, responses=page_errors)
    async def page() -> Response:
        """The page, for a browser."""
        return HTMLResponse(html, headers=headers)

    @cache
    def api_reference() -> HTMLResponse:
        content = reference.render(app.openapi())
        return HTMLResponse(content, headers=page_headers(content))

    docs_errors = error_responses(TeiError, (401, 429, 503))

    @get("/docs", response_class=HTMLResponse, responses=docs_errors)
    async def docs() -> Response:
        """The API reference, for a browser."""
        return await asyncio.to_thread(api_reference)

    def describe_engines(batches: int) -> list[dict[str, Any]]:
        return [describe_engine(model, batches) for model in models]

    @get("/engine", response_model=Engines, responses=error_responses(TeiError, GET_STATUSES))
    async def engine(batches: Count = RECENT) -> Response:
        """The last batches of each model with their layout, the queue, and the throughput."""
        others: OtherProcesses | None = app.state.others
        if others is not None:
            return json_response({"models": await others.engines(batches)})
        # In a thread, because it sorts the last latencies.
        return json_response({"models": await asyncio.to_thread(describe_engines, batches)})


def page_headers(html: str) -> dict[str, str]:
    """Return the headers that a page is sent with."""
    return {
        "content-security-policy": content_policy(html),
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }


def content_policy(html: str) -> str:
    """Return the page's content security policy: run what is in it, and call this server."""
    scripts = _hashes(html, "script") or "'none'"
    styles = _hashes(html, "style")
    return (
        f"default-src 'none'; connect-src 'self'; img-src data:; "
        f"script-src {scripts}; style-src {styles}; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _hashes(html: str, tag: str) -> str:
    contents = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    digests = [b64encode(sha256(content.encode()).digest()).decode() for content in contents]
    return " ".join(f"'sha256-{digest}'" for digest in digests)
