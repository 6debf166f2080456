"""Cohere's embed (v1 and v2), classify, tokenize and detokenize; rerank is in `cohere`.

Follows its public API reference. `input_type` chooses one of the model's prompts, if it has one for
that purpose. Number types are those of `vectors`; "base64" is little-endian float32. Texts that are
too long are truncated at the end, as there, unless the request says otherwise. `classify` answers
by the model's own labels: examples in the request, of which Cohere makes a classifier, are refused.
Models read texts only, so images are refused.
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

from packhorse.errors import CheckpointError, InputError
from packhorse.results import Classified
from packhorse.serve.calls import CallResult, check_inputs, json_response
from packhorse.serve.dialects import tasks, vectors
from packhorse.serve.dialects.schemas import (
    NO_EFFECT,
    CohereError,
    LenientBody,
    ListOf,
    ModelName,
    Text,
    TokenIds,
    only,
    post_routes,
)
from packhorse.serve.dialects.tasks import Truncation
from packhorse.serve.dialects.vectors import NumberType
from packhorse.serve.failures import Empty
from packhorse.serve.hosting import ServedModel, ServedModels
from packhorse.serve.settings import ServeSettings
from packhorse.tokens.tokenizer import NO_LIMIT

TEXTS_ONLY = "models read texts only"
MIN_CONFIDENCE = 0.5  # of a label among several that may apply
EmbeddingType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]
Truncate = Annotated[
    Literal["NONE", "START", "END"] | None,
    Field(description="Where to cut a text that is too long, by default its end; NONE: 413."),
]

# Bodies ----------------------------------------------------------------------------------------


class EmbedBody(LenientBody):
    """The fields that both versions share."""

    texts: ListOf[Text] | None = Field(default=None, examples=[["What is packing?"]])
    images: Annotated[Any, only(instead=TEXTS_ONLY)] = None
    model: ModelName = None
    input_type: (
        Literal["search_document", "search_query", "classification", "clustering", "image"] | None
    ) = Field(
        default=None,
        description="What the texts are for: puts the model's prompt for that before them, if it "
        "has one.",
    )
    embedding_types: Annotated[list[EmbeddingType], Field(min_length=1, max_length=6)] | None = (
        Field(
            default=None,
            description="int8 and uint8 are by the ranges of `--calibration`, without them of "
            "vectors of length one in steps of 8 / (127 √E).",
        )
    )
    truncate: Truncate = None

    @property
    def all_texts(self) -> list[str]:
        """The texts to embed."""
        return self.texts or []


class EmbedV1(EmbedBody):
    """Texts to embed."""


class TextContent(LenientBody):
    """A part of an input."""

    type: Literal["text", "image_url"] = Field(examples=["text"])
    text: str | None = None
    image_url: Annotated[Any, only(instead=TEXTS_ONLY)] = None


class EmbedInput(LenientBody):
    """An input of parts, whose texts are joined by line breaks."""

    content: ListOf[TextContent] = Field(examples=[[{"type": "text", "text": "What is packing?"}]])


class EmbedV2(EmbedBody):
    """Texts to embed, in `texts` or `inputs`."""

    inputs: ListOf[EmbedInput] | None = None
    max_tokens: int | None = Field(
        default=None,
        ge=1,
        le=2**31,
        description="Tokens of a text, special tokens not counted; `truncate` says what happens "
        "beyond.",
    )
    output_dimension: int | None = Field(default=None, ge=1, le=2**20)
    priority: int | None = NO_EFFECT

    @property
    def all_texts(self) -> list[str]:
        """The texts to embed."""
        if self.inputs is None:
            return self.texts or []
        if self.texts is not None:
            raise InputError("the request has both texts and inputs; send one of them")
        return [_joined(item) for item in self.inputs]


class CohereClassifyRequest(LenientBody):
    """Texts to classify by the model's own labels."""

    inputs: ListOf[Text] = Field(examples=[["Packing is fun."]])
    examples: Annotated[
        list[Any] | None,
        only([], instead="serve a model that was trained with them, as packhorse train does"),
    ] = None
    model: ModelName = None
    preset: Annotated[str | None, only(instead="name a served model in `model`")] = None
    truncate: Truncate = None


class CohereTokenizeRequest(LenientBody):
    """A text to tokenize."""

    text: Text = Field(examples=["What is packing?"])
    model: ModelName = None


class CohereDetokenizeRequest(LenientBody):
    """Token ids to turn into a text."""

    tokens: TokenIds = Field(examples=[[101, 2054, 102]])
    model: ModelName = None


# Answers ---------------------------------------------------------------------------------------


class EmbeddingsByType(BaseModel):
    """The vectors, in each of the requested types."""

    float: list[list[float]] | None = None
    int8: list[list[int]] | None = None
    uint8: list[list[int]] | None = None
    binary: list[list[int]] | None = None
    ubinary: list[list[int]] | None = None
    base64: list[str] | None = None


class CohereEmbeddings(BaseModel):
    """One vector per text: a list, or by type where the request names types."""

    id: str
    response_type: Literal["embeddings_floats", "embeddings_by_type"]
    embeddings: list[list[float]] | EmbeddingsByType
    texts: list[str]
    meta: dict[str, Any]


class LabelConfidence(BaseModel):
    """The score of a label."""

    confidence: float


class CohereClassification(BaseModel):
    """The labels of one text."""

    id: str
    input: str
    prediction: str | None
    predictions: list[str]
    confidence: float | None
    confidences: list[float]
    labels: dict[str, LabelConfidence]
    classification_type: Literal["single-label", "multi-label"]


class CohereClassifications(BaseModel):
    """The labels of all texts, in their order."""

    id: str
    classifications: list[CohereClassification]
    meta: dict[str, Any]


class CohereTokens(BaseModel):
    """The tokens of a text, without special tokens."""

    tokens: list[int]
    token_strings: list[str]
    meta: dict[str, Any]


class CohereText(BaseModel):
    """The text of some tokens."""

    text: str
    meta: dict[str, Any]


# Routes ----------------------------------------------------------------------------------------


def add(app: FastAPI, models: ServedModels, settings: ServeSettings) -> None:
    """Add the routes."""
    post = post_routes(app, "Cohere", CohereError)
    calibration = vectors.load_calibration(settings.calibration, models)

    async def embed(
        request: Request,
        body: EmbedBody,
        types: Sequence[EmbeddingType],
        dimensions: int | None = None,
        max_tokens: int | None = None,
    ) -> tuple[dict[str, Any], list[str], CallResult]:
        if body.input_type == "image":
            raise InputError(f"input_type is image, but {TEXTS_ONLY}")
        texts = body.all_texts
        model = models.find(body.model, "embed")
        max_length = None
        if max_tokens is not None:
            specials = model.encoder.tokenizer.specials_per(pair=False)
            max_length = min(max_tokens + specials, model.encoder.max_length)
        result = await tasks.embed(
            request,
            model,
            texts,
            _truncation(body.truncate),
            dimensions=dimensions,
            prompt=vectors.choose_prompt(model, body.input_type),
            max_length=max_length,
        )
        by_type: dict[str, Any] = {}
        for name in types:
            numbers: NumberType = "float" if name == "base64" else name
            rows = vectors.quantize_vectors(model, result.values, numbers, calibration)
            by_type[name] = await vectors.base64_texts(rows) if name == "base64" else rows
        return by_type, texts, result

    @post("/v1/embed", response_model=CohereEmbeddings)
    async def embed_v1(request: Request, body: EmbedV1) -> Response:
        """One vector per text."""
        types: list[EmbeddingType] = body.embedding_types or ["float"]
        by_type, texts, result = await embed(request, body, types)
        typed = body.embedding_types is not None
        return json_response(
            {
                "id": str(uuid.uuid4()),
                "response_type": "embeddings_by_type" if typed else "embeddings_floats",
                "embeddings": by_type if typed else by_type["float"],
                "texts": texts,
                "meta": _meta("1", input_tokens=sum(result.tokens)),
            }
        )

    @post("/v2/embed", response_model=CohereEmbeddings)
    async def embed_v2(request: Request, body: EmbedV2) -> Response:
        """One vector per text, by type."""
        by_type, texts, result = await embed(
            request,
            body,
            body.embedding_types or ["float"],
            body.output_dimension,
            body.max_tokens,
        )
        return json_response(
            {
                "id": str(uuid.uuid4()),
                "response_type": "embeddings_by_type",
                "embeddings": by_type,
                "texts": texts,
                "meta": _meta("2", input_tokens=sum(result.tokens)),
            }
        )

    @post("/v1/classify", response_model=CohereClassifications)
    async def classify(request: Request, body: CohereClassifyRequest) -> Response:
        """The labels of each text, by the model's own classifier."""
        model = models.find(body.model, "classify")
        if model.encoder.problem == "regression":
            raise CheckpointError(f"{model.name} has a score and no labels; use /v1/rerank")
        truncation = _truncation(body.truncate)
        result = await tasks.run_task(request, model, "classify", body.inputs, truncation)
        rows = [
            _classification(model, text, value)
            for text, value in zip(body.inputs, result.values, strict=True)
        ]
        meta = _meta("1", classifications=len(rows))
        return json_response({"id": str(uuid.uuid4()), "classifications": rows, "meta": meta})

    @post("/v1/tokenize", response_model=CohereTokens)
    async def tokenize(request: Request, body: CohereTokenizeRequest) -> Response:
        """The tokens of a text, never truncated and without special tokens."""
        tokenizer = models.find(body.model).encoder.tokenizer
        check_inputs(settings, [body.text])

        def tokens() -> Response:
            (encoding,) = tokenizer.encode([body.text], NO_LIMIT)
            ids = encoding.ids[encoding.spans[0]].tolist()
            strings = [tokenizer.token(id) for id in ids]
            return json_response({"tokens": ids, "token_strings": strings, "meta": _meta("1")})

        return await asyncio.to_thread(tokens)

    @post("/v1/detokenize", response_model=CohereText)
    async def detokenize(request: Request, body: CohereDetokenizeRequest) -> Response:
        """The text of token ids."""
        tokenizer = models.find(body.model).encoder.tokenizer
        if not body.tokens:
            raise Empty("the request has no tokens")
        text = await asyncio.to_thread(tokenizer.decode, body.tokens)
        return json_response({"text": text, "meta": _meta("1")})


def _truncation(truncate: str | None) -> Truncation:
    is_wanted = None if truncate is None else truncate != "NONE"
    direction = "left" if truncate == "START" else "right"
    return Truncation.read(is_wanted, direction, by_default=True)


def _joined(item: EmbedInput) -> str:
    """Return the text of an input of parts."""
    texts: list[str] = []
    for part in item.content:
        if part.type != "text" or part.text is None:
            raise InputError(f"an input has a part without text; {TEXTS_ONLY}")
        texts.append(part.text)
    return "\n".join(texts)


def _classification(model: ServedModel, text: str, value: Classified) -> dict[str, Any]:
    single = model.encoder.problem == "single_label"
    if single:
        predictions = [value.label]
    else:
        predictions = [label for label, score in value.scores.items() if score >= MIN_CONFIDENCE]
    return {
        "id": str(uuid.uuid4()),
        "input": text,
        "prediction": value.label if single else None,
        "predictions": predictions,
        "confidence": value.score if single else None,
        "confidences": [value.scores[label] for label in predictions],
        "labels": {label: {"confidence": score} for label, score in value.scores.items()},
        "classification_type": "single-label" if single else "multi-label",
    }


def _meta(version: str, **billed: int) -> dict[str, Any]:
    meta: dict[str, Any] = {"api_version": {"version": version}}
    return meta | {"billed_units": billed} if billed else meta
