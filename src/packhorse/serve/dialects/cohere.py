"""Cohere's rerank (v1 and v2) and Jina's, which share a path and most of a body.

An answer holds what either client reads: `id`, `results` and `meta` for Cohere, `model`, `object`
and `usage` for Jina. Scores are between 0 and 1. Documents are cut where they are too long, as both
do. They come back only where `return_documents` asks for them, which is Cohere's default; Jina's is
to send them. `rank_fields` are joined by line ends.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import FastAPI
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from packhorse.errors import InputError
from packhorse.results import Ranked
from packhorse.serve.calls import Outcome, check_inputs, reply
from packhorse.serve.dialects.asking import Cut, ranking
from packhorse.serve.dialects.shapes import CohereError, Lenient, Many, Named, refusals
from packhorse.serve.hosting import Hosted, Hosts
from packhorse.serve.settings import Settings
from packhorse.tokens import SURROGATE, Tokenizer

Document = str | dict[str, str]
CUT = Cut("truncate", allowed=True)
TopN = Annotated[int | None, Field(ge=1, le=2**31, description="Return the best few alone.")]


class RerankV1(Lenient):
    """A query and the documents that may answer it."""

    query: str = Field(examples=["What is packing?"])
    documents: Many[Document] = Field(
        examples=[["Sequences laid end to end.", {"text": "A horse carries it."}]]
    )
    model: Named = None
    top_n: TopN = None
    return_documents: bool | None = None
    rank_fields: Many[str] | None = Field(
        default=None, description="What is read of documents that are objects; by default `text`."
    )
    max_chunks_per_doc: int | None = Field(default=None, description="Ignored: documents are cut.")


class RerankV2(Lenient):
    """A query and the documents that may answer it."""

    query: str = Field(examples=["What is packing?"])
    documents: Many[str] = Field(examples=[["Sequences laid end to end.", "A horse carries it."]])
    model: Named = None
    top_n: TopN = None
    max_tokens_per_doc: int | None = Field(default=None, ge=1, le=2**31)
    return_documents: bool | None = None


class Relevance(BaseModel):
    """A document's place."""

    index: int
    relevance_score: float = Field(ge=0, le=1, examples=[0.93])
    document: dict[str, str] | None = Field(default=None, examples=[{"text": "Sequences …"}])


class RerankUsage(BaseModel):
    """Tokens that were run."""

    prompt_tokens: int
    total_tokens: int


class Reranked(BaseModel):
    """The documents, best first."""

    id: str
    object: Literal["list"] = "list"
    model: str
    results: list[Relevance]
    meta: dict[str, Any]
    usage: RerankUsage


def add(app: FastAPI, hosts: Hosts, settings: Settings) -> None:
    """Add the routes."""
    post = partial(app.post, tags=["Cohere and Jina"], responses=refusals(CohereError))

    @post("/v1/rerank", response_model=Reranked)
    async def rerank(request: Request, body: RerankV1) -> Response:
        """The documents by how well they answer the query."""
        host = hosts.find(body.model, "rerank")
        texts = [_text(document, body.rank_fields) for document in body.documents]
        found = await ranking(request, host, body.query, texts, CUT, body.top_n)
        given = body.documents if body.return_documents else None
        return reply(_document(host, *found, given, "1"))

    @post("/v2/rerank", response_model=Reranked)
    async def rerank_v2(request: Request, body: RerankV2) -> Response:
        """The same, of texts alone."""
        host = hosts.find(body.model, "rerank")
        texts = body.documents
        if body.max_tokens_per_doc is not None and texts:
            check_inputs(settings, [body.query], {"documents": texts})
            most = body.max_tokens_per_doc
            texts = await asyncio.to_thread(_shortened, host.encoder.tokenizer, texts, most)
        found = await ranking(request, host, body.query, texts, CUT, body.top_n)
        given = body.documents if body.return_documents else None
        return reply(_document(host, *found, given, "2"))


def _text(document: Document, fields: Sequence[str] | None) -> str:
    if isinstance(document, str):
        return document
    if any(map(SURROGATE.search, (*document, *document.values()))):
        raise InputError("a document is not Unicode: it holds half a surrogate pair; remove it")
    found = [document[name] for name in fields or ["text"] if name in document]
    if not found:
        raise InputError("a document has none of the fields to rank by; that is `text` by default")
    return "\n".join(found)


def _shortened(tokenizer: Tokenizer, texts: Sequence[str], most: int) -> list[str]:
    """Each text up to its token number `most`."""
    found = tokenizer.encode(texts, most + tokenizer.specials_per(pair=False))
    return [
        text[: int(encoding.offsets[encoding.spans[0]][-1][1])] if encoding.truncated else text
        for text, encoding in zip(texts, found, strict=True)
    ]


def _document(
    host: Hosted,
    ranked: Sequence[Ranked],
    outcome: Outcome,
    given: Sequence[Document] | None,
    version: str,
) -> dict[str, Any]:
    results = []
    for each in ranked:
        result: dict[str, Any] = {"index": each.index, "relevance_score": each.score}
        if given is not None:
            document = given[each.index]
            result["document"] = {"text": document} if isinstance(document, str) else document
        results.append(result)
    total = sum(outcome.tokens)
    return {
        "id": str(uuid.uuid4()),
        "object": "list",
        "model": host.name,
        "results": results,
        "meta": {"api_version": {"version": version}, "billed_units": {"search_units": 1}},
        "usage": {"prompt_tokens": total, "total_tokens": total},
    }
