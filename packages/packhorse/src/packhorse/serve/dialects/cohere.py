"""Cohere's rerank (v1 and v2), Jina's and Voyage's, which share a path and most of a body.

An answer has what either client reads: `id`, `results` and `meta` for Cohere, `model`, `object` and
`usage` for Jina. Voyage's rankings are in `data`; its client always sends `top_k`, as null too,
which the others call `top_n`. Scores are between 0 and 1. Documents that are too long are
truncated, as both servers do, unless the request forbids it. Documents are returned only if
`return_documents` is set, which is Cohere's default; Jina's is to return them. `rank_fields` are
joined by line breaks.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import FastAPI
from pydantic import BaseModel, Field, RootModel
from starlette.requests import Request
from starlette.responses import Response

from packhorse.errors import InputError
from packhorse.results import Ranked
from packhorse.serve.calls import CallResult, check_inputs, json_response
from packhorse.serve.dialects import tasks
from packhorse.serve.dialects.schemas import (
    NO_EFFECT,
    CohereError,
    LenientBody,
    ListOf,
    ModelName,
    only,
    post_routes,
)
from packhorse.serve.dialects.tasks import Truncation
from packhorse.serve.hosting import ServedModel, ServedModels
from packhorse.serve.settings import ServeSettings
from packhorse.tokens.tokenizer import SURROGATE, Tokenizer

Document = str | dict[str, str]
TopN = Annotated[int | None, Field(ge=1, le=2**31, description="Return only the best few.")]


class RerankBody(LenientBody):
    """The fields that both versions of Cohere's API, Jina's and those of other servers share."""

    query: str = Field(examples=["What is packing?"])
    model: ModelName = None
    top_n: TopN = None
    return_documents: bool | None = None
    max_tokens_per_doc: int | None = Field(default=None, ge=1, le=2**31)
    relevant_spans: Annotated[Any, only(instead="whole documents are scored")] = None
    priority: int | None = NO_EFFECT
    # Fields of Jina, Voyage, Infinity and vLLM, which have these routes too:
    top_k: TopN = None
    raw_scores: bool = Field(default=False, description="Return logits, not probabilities.")
    truncation: bool | None = Field(
        default=None,
        description="Whether to truncate documents that are too long; the default is true.",
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
    def is_voyage(self) -> bool:
        """Whether the request is written for Voyage."""
        return "top_k" in self.model_fields_set and "top_n" not in self.model_fields_set

    @property
    def document_truncation(self) -> Truncation:
        """What to do with a document that is too long."""
        wishes = {self.truncation, self.truncate} - {None}
        return Truncation.read(False not in wishes if wishes else None, by_default=True)


class RerankV1(RerankBody):
    """A query and the documents that may answer it."""

    documents: ListOf[Document] = Field(
        examples=[["Sequences laid end to end.", {"text": "A horse carries it."}]]
    )
    rank_fields: ListOf[str] | None = Field(
        default=None,
        description="The fields to read of documents that are objects; by default `text`.",
    )
    max_chunks_per_doc: int | None = Field(
        default=None,
        ge=1,
        description="Documents are not split: with 1 a long one is truncated, with more it is 413.",
    )

    @property
    def document_truncation(self) -> Truncation:
        """What to do with a document that is too long."""
        if self.max_chunks_per_doc is not None and self.max_chunks_per_doc > 1:
            return Truncation(allowed=False)
        return super().document_truncation


class RerankV2(RerankBody):
    """A query and the documents that may answer it."""

    documents: ListOf[str] = Field(examples=[["Sequences laid end to end.", "A horse carries it."]])
    rank_fields: Annotated[Any, only(instead="documents must be texts; see /v1/rerank")] = None
    max_chunks_per_doc: Annotated[
        int | None, only(1, instead="use `max_tokens_per_doc`, or /v1/rerank")
    ] = None


class Relevance(BaseModel):
    """The position of a document in the request, and its score."""

    index: int
    relevance_score: float = Field(
        examples=[0.93], description="Between 0 and 1; a logit if `raw_scores` is set."
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


class VoyageRelevance(BaseModel):
    """The position of a document in the request, and its score."""

    index: int
    relevance_score: float = Field(examples=[0.93])
    document: str | None = None


class VoyageReranked(BaseModel):
    """The documents, best first, as Voyage returns them; for requests with `top_k`."""

    object: Literal["list"] = "list"
    data: list[VoyageRelevance]
    model: str
    usage: RerankUsage


class AnyReranked(RootModel[Reranked | VoyageReranked]):
    """The documents, best first, in `results`; in `data` for requests with `top_k`."""


def add(app: FastAPI, models: ServedModels, settings: ServeSettings) -> None:
    """Add the routes."""
    post = post_routes(app, "Cohere and Jina", CohereError)

    async def answer(
        request: Request,
        body: RerankBody,
        documents: Sequence[Document],
        texts: list[str],
        version: str,
    ) -> Response:
        model = models.find(body.model, "rerank")
        if body.max_tokens_per_doc is not None and texts:
            # Checked here because shortening tokenizes all texts, before `calls` checks them.
            check_inputs(settings, [body.query], {"documents": texts})
            texts = await asyncio.to_thread(
                shorten, model.encoder.tokenizer, texts, body.max_tokens_per_doc
            )
        ranked, result = await tasks.rerank(
            request,
            model,
            body.query,
            texts,
            body.document_truncation,
            body.top_n or body.top_k,
            body.raw_scores,
        )
        returned = documents if body.return_documents else None
        if version == "1" and body.is_voyage:
            returned = texts if body.return_documents else None
            return json_response(_voyage_body(model, ranked, result, returned))
        return json_response(_response_body(model, ranked, result, returned, version))

    @post("/v1/rerank", response_model=AnyReranked)
    async def rerank(request: Request, body: RerankV1) -> Response:
        """The documents, sorted by how well they answer the query."""
        texts = [_text(document, body.rank_fields) for document in body.documents]
        return await answer(request, body, body.documents, texts, "1")

    @post("/v2/rerank", response_model=Reranked)
    async def rerank_v2(request: Request, body: RerankV2) -> Response:
        """The same as `/v1/rerank`, for documents that are texts."""
        return await answer(request, body, body.documents, body.documents, "2")


def _text(document: Document, fields: Sequence[str] | None) -> str:
    """Return the text to rank of a document; of an object, its fields joined by line breaks."""
    if isinstance(document, str):
        return document
    if any(map(SURROGATE.search, (*document, *document.values()))):
        raise InputError(
            "a document is not valid Unicode: it has half of a surrogate pair; remove it"
        )
    parts = [document[name] for name in fields or ["text"] if name in document]
    if not parts:
        raise InputError(
            "a document has none of the fields to rank by; send `text`, or name them in rank_fields"
        )
    return "\n".join(parts)


def shorten(tokenizer: Tokenizer, texts: Sequence[str], max_tokens: int) -> list[str]:
    """Cut each text after `max_tokens` tokens, special tokens not counted."""
    encodings = tokenizer.encode(texts, max_tokens + tokenizer.specials_per(pair=False))
    return [
        text[: int(encoding.offsets[encoding.spans[0]][-1][1])] if encoding.truncated else text
        for text, encoding in zip(texts, encodings, strict=True)
    ]


def _response_body(
    model: ServedModel,
    ranked: Sequence[Ranked],
    result: CallResult,
    documents: Sequence[Document] | None,
    version: str,
) -> dict[str, Any]:
    rows = []
    for rank in ranked:
        row: dict[str, Any] = {"index": rank.index, "relevance_score": rank.score}
        if documents is not None:
            document = documents[rank.index]
            row["document"] = {"text": document} if isinstance(document, str) else document
        rows.append(row)
    total = sum(result.tokens)
    return {
        "id": str(uuid.uuid4()),
        "object": "list",
        "model": model.name,
        "results": rows,
        "meta": {"api_version": {"version": version}, "billed_units": {"search_units": 1}},
        "usage": {"prompt_tokens": total, "total_tokens": total},
    }


def _voyage_body(
    model: ServedModel, ranked: Sequence[Ranked], result: CallResult, texts: Sequence[str] | None
) -> dict[str, Any]:
    rows = []
    for rank in ranked:
        row: dict[str, Any] = {"index": rank.index, "relevance_score": rank.score}
        if texts is not None:
            row["document"] = texts[rank.index]
        rows.append(row)
    total = sum(result.tokens)
    usage = {"prompt_tokens": total, "total_tokens": total}
    return {"object": "list", "data": rows, "model": model.name, "usage": usage}
