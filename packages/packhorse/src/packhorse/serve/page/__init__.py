"""The page at `GET /`, one HTML file, and `GET /engine`, what it draws of the engines.

The file loads nothing from anywhere, and the policy that is sent with it holds the browser to that:
its own script and style by their hashes, and calls to this server. No framework and no build step:
what is read here is what runs there.

With an API key the page is as closed as every other route. Who opens it is asked by the browser for
a user and a password: any user will do, the password is the key, and the browser sends both along
with each call of the page. When a call is refused all the same, because the server was started
again with another key, the page shows a field for one; it is kept in the page's memory only.
"""

from __future__ import annotations

import re
import time
from base64 import b64encode
from functools import partial
from hashlib import sha256
from importlib.resources import files
from typing import Annotated, Any

from fastapi import FastAPI, Query
from pydantic import BaseModel, Field
from starlette.responses import HTMLResponse, Response

from packhorse.runtime.statistics import RECENT, BatchRecord, throughput
from packhorse.serve.calls import reply
from packhorse.serve.dialects.shapes import READING, HuggingFaceError, TeiError, refusals
from packhorse.serve.hosting import Hosted, Hosts
from packhorse.serve.settings import Settings

SECONDS = 5.0  # over which throughput is told
Count = Annotated[int, Query(ge=0, le=RECENT, description="How many of the last batches to tell.")]


class LastBatch(BaseModel):
    """A batch that ran, as it was laid."""

    number: int = Field(description="Counted from 1 since the model was opened.")
    seconds_ago: float
    ms: float = Field(description="What it took to compute.")
    tokens: int = Field(description="That were computed, with what nobody asked for.")
    fill: float = Field(description="Somebody's tokens / all tokens.")
    rows: list[list[int]] = Field(description="The lengths of the sequences in each row, in order.")


class ModelEngine(BaseModel):
    """How the engine of one model does; times over the last inputs."""

    name: str
    alive: bool
    mask: str | None = Field(description="The token that stands for a hidden word.")
    mode: str = Field(description="ragged, mask or repack.")
    rows_a_batch: int
    row_tokens: int = Field(description="What fits into a row of a batch.")
    waiting_inputs: int
    waiting_tokens: int
    most_waiting_tokens: int
    running_inputs: int
    tokens_per_second: float = Field(description=f"Over the last {SECONDS:g} seconds.")
    fill: float = Field(description="Of the batches below.")
    p50_ms: float
    p99_ms: float
    queue_ms: float
    compute_ms: float
    batches: list[LastBatch] = Field(description="The newest last.")


class Engines(BaseModel):
    """Every model that is served."""

    models: list[ModelEngine]


def add(app: FastAPI, hosts: Hosts, settings: Settings) -> None:
    """Add the routes."""
    get = partial(app.get, tags=["Server"])
    html = files(__name__).joinpath("index.html").read_text("utf-8")
    headers = {"content-security-policy": policy(html), "referrer-policy": "no-referrer"}
    headers |= {"cache-control": "no-cache"}

    @get("/", response_class=HTMLResponse, responses=refusals(HuggingFaceError, (401, 429, 503)))
    async def page() -> Response:
        """The page, for a browser."""
        return HTMLResponse(html, headers=headers)

    @get("/engine", response_model=Engines, responses=refusals(TeiError, READING))
    def engine(batches: Count = RECENT) -> Response:  # in a thread: it sorts the last latencies
        """The last batches of each model as they were laid, what waits, and how fast it goes."""
        return reply({"models": [_engine(host, batches) for host in hosts]})


def policy(html: str) -> str:
    """What the browser may do for the page: run what stands in it, and call this server."""
    allowed = {tag: _hashes(html, tag) for tag in ("script", "style")}
    return (
        f"default-src 'none'; connect-src 'self'; img-src data:; "
        f"script-src {allowed['script']}; style-src {allowed['style']}; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _hashes(html: str, tag: str) -> str:
    inside = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    digests = [b64encode(sha256(each.encode()).digest()).decode() for each in inside]
    return " ".join(f"'sha256-{digest}'" for digest in digests)


def _engine(host: Hosted, count: int) -> dict[str, Any]:
    runner, now = host.runner, time.monotonic()
    shape, stats, recent = runner.shape, runner.stats(), runner.recent()
    told = recent[len(recent) - min(count, len(recent)) :]
    apart = shape.mode == "mask"  # else sequences lie end to end over the whole batch
    tokenizer = host.encoder.tokenizer
    return {
        "name": host.name,
        "alive": runner.alive,
        "mask": None if tokenizer.mask_id is None else tokenizer.token(tokenizer.mask_id),
        "mode": shape.mode,
        "rows_a_batch": shape.rows if apart else 1,
        "row_tokens": shape.capacity if apart else shape.tokens,
        "waiting_inputs": stats.waiting_requests,
        "waiting_tokens": stats.waiting_tokens,
        "most_waiting_tokens": runner.max_waiting_tokens,
        "running_inputs": stats.running_requests,
        "tokens_per_second": throughput(recent, now, SECONDS),
        "fill": sum(each.used for each in told) / max(1, sum(each.tokens for each in told)),
        "p50_ms": stats.p50_ms,
        "p99_ms": stats.p99_ms,
        "queue_ms": stats.queue_ms,
        "compute_ms": stats.compute_ms,
        "batches": [_batch(each, now) for each in told],
    }


def _batch(ran: BatchRecord, now: float) -> dict[str, Any]:
    return {
        "number": ran.number,
        "seconds_ago": now - ran.ended,
        "ms": 1e3 * ran.seconds,
        "tokens": ran.tokens,
        "fill": ran.fill,
        "rows": ran.rows,
    }
