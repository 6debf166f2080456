"""OpenAI's embeddings and list of models.

Follows its public API reference: a text, a list of texts, token ids or a list of those; numbers as
JSON or as base64 of little-endian float32, which is what its own client asks for; vectors shortened
to `dimensions` and scaled to length one again; `usage` in tokens that were run. Our additional
fields `truncate` and `long` can be sent in the client's `extra_body`. Otherwise vectors are as the
model makes them. Token ids are the model's own if they start and end like a text of its tokenizer;
see `token_ids` for others.
"""

from __future__ import annotations

import base64
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import FastAPI
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from packhorse.serve.calls import json_response
from packhorse.serve.dialects import tasks, token_ids
from packhorse.serve.dialects.schemas import (
    GET_STATUSES,
    NO_EFFECT,
    Direction,
    LenientBody,
    ListOf,
    LongText,
    ModelName,
    OpenAiError,
    PromptName,
    Text,
    TokenIds,
    error_responses,
    only,
    post_routes,
)
from packhorse.serve.dialects.tasks import Truncation
from packhorse.serve.dialects.tei import as_batch
from packhorse.serve.hosting import ServedModel, ServedModels
from packhorse.serve.settings import ServeSettings

OpenAiInput = Annotated[
    Text | TokenIds | ListOf[Text] | ListOf[TokenIds],
    Field(
        description="A text, a list of texts, token ids, or a list of token ids.",
        examples=[["What is packing?", "Sequences laid end to end."]],
    ),
]
Width = Annotated[int | None, Field(ge=1, le=2**20)]
FLOAT32 = "numbers are 32 bits wide, little-endian in base64"
USE_PROMPT_NAME = "name one of the model's prompts in `prompt_name`"


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
    embedding_type: Literal["float", "base64"] | None = Field(
        default=None, description="The same as `encoding_format`."
    )
    output_dtype: Annotated[str | None, only("float", instead=FLOAT32)] = None
    embed_dtype: Annotated[str | None, only("float32", instead=FLOAT32)] = None
    endianness: Annotated[str | None, only("little", "native", instead=FLOAT32)] = None
    task: Annotated[str | None, only(instead=USE_PROMPT_NAME)] = None
    input_type: Annotated[str | None, only(instead=USE_PROMPT_NAME)] = None
    modality: Annotated[str | None, only("text", instead="models read texts only")] = None
    late_chunking: Annotated[bool | None, only(False, instead="each text is read by itself")] = None
    return_multivector: Annotated[
        bool | None, only(False, instead="/embed_all returns a vector per token")
    ] = None
    add_special_tokens: Annotated[
        bool | None,
        only(True, instead="send token ids to /embed to choose special tokens yourself"),
    ] = None
    truncate_prompt_tokens: Annotated[
        int | None, only(-1, instead="use `truncate`; texts are truncated to what the model takes")
    ] = None
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
        if truncate is None and self.truncate_prompt_tokens == -1:
            truncate = True
        direction = self.truncation_direction or ("Left" if self.truncate == "START" else "Right")
        return Truncation.read(truncate, direction, self.long, by_default=True)


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
    """The vectors, in the order of the inputs."""

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
    tags: Any = ["OpenAI"]
    get = partial(app.get, tags=tags, responses=error_responses(OpenAiError, GET_STATUSES))
    post = post_routes(app, tags[0], OpenAiError)

    @post("/v1/embeddings", response_model=OpenAiEmbeddings)
    async def embeddings(request: Request, body: EmbeddingsRequest) -> Response:
        """One vector per input."""
        model = models.find(body.model, "embed")
        texts = await token_ids.decode_foreign(
            model, as_batch(body.input), table, settings.max_input_characters
        )
        result = await tasks.embed(
            request,
            model,
            texts,
            body.text_truncation,
            normalize=body.normalized if body.normalize is None else body.normalize,
            dimensions=body.dimensions or body.output_dimension,
            prompt=body.prompt_name,
        )
        encoding = body.encoding_format or body.embedding_type
        encode = _base64 if encoding == "base64" else np.asarray
        data = [
            {"object": "embedding", "index": index, "embedding": encode(vector)}
            for index, vector in enumerate(result.values)
        ]
        total = sum(result.tokens)
        usage = {"prompt_tokens": total, "total_tokens": total}
        return json_response({"object": "list", "data": data, "model": model.name, "usage": usage})

    @get("/v1/models", name="models", response_model=OpenAiModels)
    async def list_models() -> Response:
        """All served models."""
        return json_response({"object": "list", "data": [_describe(model) for model in models]})

    @get("/v1/models/{name:path}", response_model=OpenAiModel)
    async def model(name: str) -> Response:
        """One of the served models."""
        return json_response(_describe(models.named(name)))


def _base64(vector: np.ndarray) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


def _describe(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": int(model.opened),
        "owned_by": "packhorse",
        "tasks": list(model.tasks),
    }
