"""OpenAI's embeddings and list of models, with the fields of servers that have the same route.

Follows its public API reference: a text, a list of texts, token ids or a list of those; numbers as
JSON or as base64 of little-endian float32, which is what its own client asks for; vectors shortened
to `dimensions` and scaled to length one again; `usage` in tokens that were run. Our additional
fields `truncate` and `long` can be sent in the client's `extra_body`. Otherwise vectors are as the
model makes them. Token ids are the model's own if they start and end like a text of its tokenizer;
see `token_ids` for others.

Jina's inputs may be objects, and its `late_chunking` has all inputs read as one text. Number types
(Voyage's and Mistral's `output_dtype`, Jina's `embedding_type`) and purposes (Jina's `task`,
Voyage's and NVIDIA's `input_type`) are those of `vectors`. vLLM's `embed_dtype` and `endianness`
are about base64 alone, as there.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import FastAPI
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from packhorse.errors import InputError
from packhorse.runtime.tasks import is_ids
from packhorse.serve.calls import json_response
from packhorse.serve.dialects import tasks, token_ids, vectors
from packhorse.serve.dialects.schemas import (
    GET_STATUSES,
    NO_EFFECT,
    Direction,
    EmbeddingsError,
    LenientBody,
    ListOf,
    LongText,
    ModelName,
    OpenAiError,
    PromptName,
    Text,
    TokenIds,
    TokenLimit,
    error_responses,
    only,
    post_routes,
)
from packhorse.serve.dialects.tasks import Truncation
from packhorse.serve.dialects.tei import as_batch
from packhorse.serve.dialects.vectors import Endianness, FloatType, NumberType
from packhorse.serve.hosting import ServedModel, ServedModels
from packhorse.serve.settings import ServeSettings


class TextObject(LenientBody):
    """A text as Jina's API has it."""

    text: str | None = None
    image: Annotated[Any, only(instead="models read texts only")] = None


OpenAiInput = Annotated[
    Text | TokenIds | ListOf[Text] | ListOf[TokenIds] | ListOf[TextObject],
    Field(
        description="A text, a list of texts, token ids, or a list of token ids. The texts of a "
        "list may be objects with the field `text`.",
        examples=[["What is packing?", "Sequences laid end to end."]],
    ),
]
Width = Annotated[int | None, Field(ge=1, le=2**20)]
Purpose = Annotated[
    str | None,
    Field(
        description="What the texts are for: puts the model's prompt of this name before them, or "
        "that for queries (query, search_query, retrieval.query) or documents (document, passage, "
        "search_document, retrieval.passage), if it has one. `prompt_name` overrides it."
    ),
]
EmbeddingType = Literal["float", "base64", "binary", "ubinary"]


class EmbeddingsRequest(LenientBody):
    """Texts or token ids to embed, and the format of the vectors."""

    input: OpenAiInput
    model: ModelName = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Width = None
    user: str | None = NO_EFFECT
    # Our own fields, and those of text-embeddings-inference on /embed:
    truncate: bool | Literal["NONE", "START", "END"] | None = Field(
        default=None,
        description="Truncate texts that are too long; NVIDIA's values are accepted too.",
    )
    truncation_direction: Direction | None = None
    long: LongText | None = Field(default=None, description="Overrides `truncate`.")
    normalize: bool | None = Field(
        default=None, description="Whether to scale vectors to length one."
    )
    prompt_name: PromptName = None
    # Fields of Jina, Voyage, Mistral, vLLM, Infinity and NVIDIA, which have this route too:
    normalized: bool | None = Field(default=None, description="The same as `normalize`.")
    truncation: bool | None = Field(default=None, description="The same as `truncate`.")
    output_dimension: Width = None
    embedding_type: (
        EmbeddingType | Annotated[list[EmbeddingType], Field(min_length=1, max_length=1)] | None
    ) = Field(default=None, description="`encoding_format` and `output_dtype` in one field.")
    output_dtype: NumberType | None = Field(
        default=None,
        description="int8 and uint8 are by the ranges of `--calibration`, without them of vectors "
        "of length one in steps of 8 / (127 √E); binary and ubinary have eight numbers in a byte.",
    )
    embed_dtype: FloatType | None = Field(
        default=None, description="The number type of floats in base64."
    )
    endianness: Endianness | None = Field(
        default=None, description="The byte order of floats in base64; native is little."
    )
    task: Purpose = None
    input_type: Purpose = None
    modality: Annotated[str | None, only("text", instead="models read texts only")] = None
    late_chunking: bool | None = Field(
        default=None,
        description="Read all inputs as one text, joined by blanks, and average the states of each "
        "input. Needs a model with mean pooling, which takes that many tokens.",
    )
    return_multivector: Annotated[
        bool | None, only(False, instead="/embed_all returns a vector per token")
    ] = None
    add_special_tokens: Annotated[
        bool | None,
        only(True, instead="send token ids to /embed to choose special tokens yourself"),
    ] = None
    truncate_prompt_tokens: TokenLimit = None
    priority: int | None = NO_EFFECT
    request_id: str | None = NO_EFFECT

    @property
    def text_truncation(self) -> Truncation:
        """What to do with a text that is too long."""
        nvidia_values = {"NONE": False, "START": True, "END": True}
        truncate = self.truncate
        if isinstance(truncate, str):
            truncate = nvidia_values[truncate]
        if truncate is None:
            truncate = self.truncation
        if truncate is None and self.truncate_prompt_tokens is not None:
            truncate = True
        direction = self.truncation_direction or ("Left" if self.truncate == "START" else "Right")
        return Truncation.read(truncate, direction, self.long, by_default=True)

    @property
    def number_type(self) -> NumberType:
        """The type of a vector's numbers."""
        kind = self._embedding_type
        by_type: NumberType = "float" if kind is None or kind == "base64" else kind
        by_dtype: NumberType = self.output_dtype or "float"
        if "float" not in (by_type, by_dtype) and by_type != by_dtype:
            raise InputError("embedding_type and output_dtype differ; send one of them")
        return by_type if by_dtype == "float" else by_dtype

    @property
    def is_base64(self) -> bool:
        """Whether vectors are written as base64."""
        return "base64" in (self.encoding_format, self._embedding_type)

    @property
    def _embedding_type(self) -> EmbeddingType | None:
        kind = self.embedding_type
        return kind[0] if isinstance(kind, list) else kind


class OpenAiVector(BaseModel):
    """The vector of one input."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str = Field(examples=[[0.6, 0.8]])


class OpenAiUsage(BaseModel):
    """Tokens that were run."""

    prompt_tokens: int
    total_tokens: int


class OpenAiEmbeddings(BaseModel):
    """The vectors, in the order of the inputs; `id` and `created` as vLLM and Mistral have them."""

    id: str
    created: int
    object: Literal["list"] = "list"
    data: list[OpenAiVector]
    model: str
    usage: OpenAiUsage


class OpenAiModel(BaseModel):
    """A served model."""

    id: str = Field(examples=["all-MiniLM-L6-v2"])
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    tasks: list[str] = Field(description="Our own field: the tasks that the model supports.")


class OpenAiModels(BaseModel):
    """All served models."""

    object: Literal["list"] = "list"
    data: list[OpenAiModel]


def add(app: FastAPI, models: ServedModels, settings: ServeSettings) -> None:
    """Add the routes."""
    table = token_ids.load_table(settings.token_ids)
    calibration = vectors.load_calibration(settings.calibration, models)
    tags: Any = ["OpenAI"]
    get = partial(app.get, tags=tags, responses=error_responses(OpenAiError, GET_STATUSES))
    post = post_routes(app, tags[0], EmbeddingsError)

    @post("/v1/embeddings", response_model=OpenAiEmbeddings)
    async def embeddings(request: Request, body: EmbeddingsRequest) -> Response:
        """One vector per input."""
        model = models.find(body.model, "embed")
        number_type = body.number_type
        texts = await token_ids.decode_foreign(
            model, as_batch(_plain_texts(body.input)), table, settings.max_input_characters
        )
        if body.late_chunking and any(map(is_ids, texts)):
            raise InputError("late_chunking joins texts; send texts, not token ids")
        limit = body.truncate_prompt_tokens
        prompt = body.prompt_name
        if prompt is None:
            prompt = vectors.choose_prompt(model, body.task or body.input_type)
        result = await tasks.embed(
            request,
            model,
            texts,
            body.text_truncation,
            normalize=body.normalized if body.normalize is None else body.normalize,
            dimensions=body.dimensions or body.output_dimension,
            prompt=prompt,
            max_length=None if limit == -1 else limit,
            late_chunking=bool(body.late_chunking),
        )
        rows = vectors.quantize_vectors(model, result.values, number_type, calibration)
        written: Sequence[Any] = rows
        if body.is_base64:
            written = await vectors.base64_texts(
                rows, body.embed_dtype or "float32", body.endianness or "little"
            )
        data = [
            {"object": "embedding", "index": index, "embedding": embedding}
            for index, embedding in enumerate(written)
        ]
        total = sum(result.tokens)
        usage = {"prompt_tokens": total, "total_tokens": total}
        answer = {"id": f"embd-{uuid.uuid4()}", "object": "list", "created": int(time.time())}
        return json_response({**answer, "data": data, "model": model.name, "usage": usage})

    @get("/v1/models", name="models", response_model=OpenAiModels)
    async def list_models() -> Response:
        """All served models."""
        return json_response({"object": "list", "data": [_describe(model) for model in models]})

    @get("/v1/models/{name:path}", response_model=OpenAiModel)
    async def model(name: str) -> Response:
        """One of the served models."""
        return json_response(_describe(models.named(name)))


def _plain_texts(inputs: Any) -> Any:
    """Return the inputs, with texts in place of objects."""
    if not (isinstance(inputs, list) and inputs and isinstance(inputs[0], TextObject)):
        return inputs
    texts = [item.text for item in inputs]
    if None in texts:
        raise InputError("an input has no `text`; models read texts only")
    return texts


def _describe(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": int(model.opened),
        "owned_by": "packhorse",
        "tasks": list(model.tasks),
    }
