"""Cohere's rerank (v1 and v2) and Jina's, which share a path and most of a body.

An answer holds what either client reads: `id`, `results` and `meta` for Cohere, `model`, `object`
and `usage` for Jina. Scores are between 0 and 1. Documents are cut where they are too long, as both
do, unless the request says otherwise. They come back only where `return_documents` asks for them,
which is Cohere's default; Jina's is to send them. `rank_fields` are joined by line ends.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import FastAPI
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from packhorse.errors import InputError
from packhorse.results import Ranked
from packhorse.serve.calls import Outcome, check_inputs, reply
from packhorse.serve.dialects.asking import Cut, ranking
from packhorse.serve.dialects.fields import only, poster
from packhorse.serve.dialects.shapes import NO_EFFECT, CohereError, Lenient, Many, Named
from packhorse.serve.hosting import Hosted, Hosts
from packhorse.serve.settings import Settings
from packhorse.tokens import SURROGATE, Tokenizer

Document = str | dict[str, str]
_Ranking = tuple[Hosted, list[Ranked], Outcome]
TopN = Annotated[int | None, Field(ge=1, le=2**31, description="Return the best few alone.")]


class Rerank(Lenient):
    """What both versions, Jina's and those of other servers have of a body."""

    query: str = Field(examples=["What is packing?"])
    model: Named = None
    top_n: TopN = None
    return_documents: bool | None = None
    max_tokens_per_doc: int | None = Field(default=None, ge=1, le=2**31)
    relevant_spans: Annotated[Any, only(instead="scores are of whole documents")] = None
    priority: int | None = NO_EFFECT
    # Of Jina, Voyage, Infinity and vLLM, which have these routes too:
    top_k: TopN = None
    raw_scores: bool = Field(default=False, description="Logits instead of probabilities.")
    truncation: bool | None = Field(
        default=None,
        description="Whether documents that are too long are cut; they are, unless false.",
    )
    truncate: bool | None = Field(default=None, description="The same as `truncation`.")
    use_activation: Annotated[bool | None, only(True, instead="use `raw_scores`")] = None
    max_doc_length: Annotated[int | None, only(instead="use `max_tokens_per_doc`")] = None
    truncate_prompt_tokens: Annotated[int | None, only(-1, instead="use `max_tokens_per_doc`")] = (
        None
    )
    return_embeddings: Annotated[
        bool | None, only(False, instead="a cross-encoder has no vectors")
    ] = None
    user: str | None = NO_EFFECT

    @property
    def cut(self) -> Cut:
        """What becomes of a document that is too long."""
        return Cut("truncate", allowed=False not in (self.truncation, self.truncate))


class RerankV1(Rerank):
    """A query and the documents that may answer it."""

    documents: Many[Document] = Field(
        examples=[["Sequences laid end to end.", {"text": "A horse carries it."}]]
    )
    rank_fields: Many[str] | None = Field(
        default=None, description="What is read of documents that are objects; by default `text`."
    )
    max_chunks_per_doc: int | None = Field(
        default=None,
        ge=1,
        description="A document is one chunk: with 1 it is cut, with more a longer one is 413.",
    )

    @property
    def cut(self) -> Cut:
        """What becomes of a document that is too long."""
        several = self.max_chunks_per_doc is not None and self.max_chunks_per_doc > 1
        return Cut() if several else super().cut


class RerankV2(Rerank):
    """A query and the documents that may answer it."""

    documents: Many[str] = Field(examples=[["Sequences laid end to end.", "A horse carries it."]])
    rank_fields: Annotated[Any, only(instead="documents are texts here; see /v1/rerank")] = None
    max_chunks_per_doc: Annotated[
        int | None, only(1, instead="use `max_tokens_per_doc`, or /v1/rerank")
    ] = None


class Relevance(BaseModel):
    """A document's place."""

    index: int
    relevance_score: float = Field(
        examples=[0.93], description="Between 0 and 1, unless `raw_scores` asks for logits."
    )
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
    post = poster(app, "Cohere and Jina", CohereError)

    async def rank(request: Request, body: Rerank, texts: list[str]) -> _Ranking:
        host = hosts.find(body.model, "rerank")
        if body.max_tokens_per_doc is not None and texts:
            check_inputs(settings, [body.query], {"documents": texts})
            most = body.max_tokens_per_doc
            texts = await asyncio.to_thread(_shortened, host.encoder.tokenizer, texts, most)
        top = body.top_n or body.top_k
        found = await ranking(request, host, body.query, texts, body.cut, top, body.raw_scores)
        return host, *found

    @post("/v1/rerank", response_model=Reranked)
    async def rerank(request: Request, body: RerankV1) -> Response:
        """The documents by how well they answer the query."""
        texts = [_text(document, body.rank_fields) for document in body.documents]
        found = await rank(request, body, texts)
        given = body.documents if body.return_documents else None
        return reply(_document(*found, given, "1"))

    @post("/v2/rerank", response_model=Reranked)
    async def rerank_v2(request: Request, body: RerankV2) -> Response:
        """The same, of texts alone."""
        found = await rank(request, body, body.documents)
        given = body.documents if body.return_documents else None
        return reply(_document(*found, given, "2"))


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
