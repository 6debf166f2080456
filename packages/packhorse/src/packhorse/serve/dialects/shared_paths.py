"""Paths that several servers have: `/rerank`, `/classify` and `/tokenize`.

A request is told apart by its fields (`failures.SHARED_PATHS`) and answered in the shape of the
server that it was written for, errors included:

| path        | field       | server                               |
|-------------|-------------|--------------------------------------|
| `/rerank`   | `texts`     | text-embeddings-inference            |
| `/rerank`   | `documents` | vLLM; with `raw_scores` Infinity     |
| `/classify` | `inputs`    | our own                              |
| `/classify` | `input`     | vLLM; with `raw_scores` Infinity     |
| `/tokenize` | `inputs`    | text-embeddings-inference            |
| `/tokenize` | `prompt`    | vLLM                                 |

vLLM's and Infinity's requests look alike. `raw_scores` is a field of Infinity alone, and its own
client always sends it. A request without it is answered as by vLLM, which LiteLLM relies on: it
sends vLLM `return_documents`, otherwise a field of Infinity. The shapes differ in `document` of a
ranking (`{"text": …}` or the text) and in `data` of a classification (objects with probabilities in
the order of the labels, or lists of labels, best first).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import FastAPI
from pydantic import BaseModel, Discriminator, Field, RootModel, Tag
from starlette.requests import Request
from starlette.responses import Response

from packhorse.serve.calls import CallResult, json_response
from packhorse.serve.dialects import packhorse_api, tei, vllm
from packhorse.serve.dialects.infinity import OptionalModelName
from packhorse.serve.dialects.schemas import ListOf, TeiOrVllmError, post_routes
from packhorse.serve.dialects.tasks import Truncation
from packhorse.serve.failures import Empty, is_vllm
from packhorse.serve.hosting import ServedModel, ServedModels
from packhorse.serve.settings import ServeSettings

# Names of the bodies in a union; pydantic puts them into the locations of errors.
VLLM = Tag("as vLLM")
OTHER = Tag("as others")


def _by_fields(path: str) -> Discriminator:
    """Choose between the bodies of a path by their fields."""

    def choose(body: Any) -> str:
        fields = body if isinstance(body, Mapping) else ()
        return VLLM.tag if is_vllm(path, fields) else OTHER.tag

    return Discriminator(choose)


# Request bodies --------------------------------------------------------------------------------


class InfinityFields(vllm.VllmBody):
    """What a request to vLLM may have to be one to Infinity."""

    model: OptionalModelName = None
    raw_scores: bool | None = Field(
        default=None,
        description="Return logits. Whatever the value, the answer has Infinity's shape.",
    )

    @property
    def is_infinity(self) -> bool:
        """Whether the request is written for Infinity."""
        return self.raw_scores is not None

    @property
    def text_truncation(self) -> Truncation:
        """What to do with a text that is too long; Infinity truncates it, vLLM refuses it."""
        if self.is_infinity and self.truncate_prompt_tokens is None:
            return Truncation.read(by_default=True)
        return super().text_truncation


class DocumentsRequest(InfinityFields, vllm.ScoringBody):
    """Documents to rank by how well they answer a query."""

    query: str = Field(examples=["What is packing?"])
    documents: str | ListOf[str] = Field(
        examples=[["Sequences laid end to end.", "A horse carries it."]]
    )
    top_n: int | None = Field(
        default=None, ge=0, le=2**31, description="Return only the best few; 0: all."
    )
    return_documents: bool | None = Field(
        default=None,
        description="By default true, as in vLLM; with `raw_scores` false, as in Infinity.",
    )


class InputRequest(InfinityFields, vllm.InputBody):
    """Texts or token ids to classify."""


class RerankRequests(
    RootModel[
        Annotated[
            Annotated[tei.RerankRequest, OTHER] | Annotated[DocumentsRequest, VLLM],
            _by_fields("/rerank"),
        ]
    ]
):
    """A query with `texts` (text-embeddings-inference) or `documents` (vLLM, Infinity)."""


class ClassifyRequests(
    RootModel[
        Annotated[
            Annotated[packhorse_api.ClassifyRequest, OTHER] | Annotated[InputRequest, VLLM],
            _by_fields("/classify"),
        ]
    ]
):
    """Texts in `inputs` (our own) or `input` (vLLM, Infinity)."""


class TokenizeRequests(
    RootModel[
        Annotated[
            Annotated[tei.TokenizeRequest, OTHER] | Annotated[vllm.PromptTokenizeRequest, VLLM],
            _by_fields("/tokenize"),
        ]
    ]
):
    """Texts in `inputs` (text-embeddings-inference) or one in `prompt` (vLLM)."""


# Response bodies -------------------------------------------------------------------------------


class RankedDocument(BaseModel):
    """The position of a document in the request, and its score."""

    index: int
    relevance_score: float
    document: dict[str, str] | str | None = None


class RankedDocuments(vllm.VllmAnswer):
    """The documents, best first."""

    object: Literal["rerank"] = "rerank"
    results: list[RankedDocument]


class LabelProbabilities(BaseModel):
    """The best label of an input, and the probabilities of all, in the order of the labels."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifiedInputs(vllm.VllmAnswer):
    """vLLM's answer: one item per input."""

    object: Literal["list"] = "list"
    data: list[LabelProbabilities]


class ClassifiedTexts(vllm.VllmAnswer):
    """Infinity's answer: all labels of each input, best first."""

    object: Literal["classify"] = "classify"
    data: list[list[tei.Prediction]]


class RerankResponses(RootModel[tei.RerankResponse | RankedDocuments]):
    """The texts or documents, best first."""


class ClassifyResponses(
    RootModel[packhorse_api.ClassifyResponse | ClassifiedInputs | ClassifiedTexts]
):
    """One item per input."""


class TokenizeResponses(RootModel[tei.TokenizeResponse | vllm.PromptTokens]):
    """The tokens of each text, or the token ids of the one."""


# Routes ----------------------------------------------------------------------------------------


def add(app: FastAPI, models: ServedModels, settings: ServeSettings) -> None:
    """Add the routes."""
    tei_post = post_routes(app, "Text Embeddings Inference", TeiOrVllmError)
    own_post = post_routes(app, "Packhorse", TeiOrVllmError)

    @tei_post("/rerank", response_model=RerankResponses)
    async def rerank(request: Request, body: RerankRequests) -> Response:
        """The texts, best first; without a cross-encoder `texts` are 424, `documents` cosines."""
        if isinstance(body.root, tei.RerankRequest):
            return await tei.rerank(request, models, body.root)
        return await _rerank_documents(request, models, body.root)

    @own_post("/classify", response_model=ClassifyResponses)
    async def classify(request: Request, body: ClassifyRequests) -> Response:
        """The label of each text or pair."""
        if isinstance(body.root, packhorse_api.ClassifyRequest):
            return await packhorse_api.classify(request, models, body.root)
        return await _classify_input(request, models, body.root)

    @tei_post("/tokenize", response_model=TokenizeResponses)
    async def tokenize(request: Request, body: TokenizeRequests) -> Response:
        """The tokens of each text, never truncated."""
        if isinstance(body.root, tei.TokenizeRequest):
            return await tei.tokenize(models, settings, body.root)
        return await vllm.tokenize(models, settings, body.root)


async def _rerank_documents(
    request: Request, models: ServedModels, body: DocumentsRequest
) -> Response:
    documents = [body.documents] if isinstance(body.documents, str) else body.documents
    if not documents:
        raise Empty("the request has no input")
    model, task = vllm.find_scorer(models, body.model)
    queries = [body.query] * len(documents)
    activation = None
    if body.is_infinity:  # which does not read the model's own
        activation = "Identity" if body.raw_scores else "Sigmoid"
    result = await vllm.score_pairs(request, model, task, queries, documents, body, activation)
    order = np.argsort(-np.array(result.values), kind="stable")[: body.top_n or None]
    returned = body.return_documents
    if returned is None:
        returned = not body.is_infinity
    rows: list[dict[str, Any]] = []
    for index in order.tolist():
        row: dict[str, Any] = {"index": index, "relevance_score": result.values[index]}
        if returned:
            text = documents[index]
            row["document"] = text if body.is_infinity else {"text": text}
        rows.append(row)
    fields = vllm.answer_fields("infinity" if body.is_infinity else "rerank", model, result)
    return json_response({**fields, "object": "rerank", "results": rows})


async def _classify_input(request: Request, models: ServedModels, body: InputRequest) -> Response:
    model = models.find(body.model, "classify")
    result = await vllm.classify_inputs(request, model, body, bool(body.raw_scores))
    if not body.is_infinity:
        return json_response(_probabilities(model, result))
    data = [
        [{"score": score, "label": label} for label, score in value.scores.items()]
        for value in result.values
    ]
    return json_response(
        {**vllm.answer_fields("infinity", model, result), "object": "classify", "data": data}
    )


def _probabilities(model: ServedModel, result: CallResult) -> dict[str, Any]:
    labels = model.encoder.labels
    data = [
        {
            "index": index,
            "label": value.label,
            "probs": vllm.label_scores(value, labels),
            "num_classes": len(labels),
        }
        for index, value in enumerate(result.values)
    ]
    return {**vllm.answer_fields("classify", model, result), "object": "list", "data": data}
