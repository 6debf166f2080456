"""OpenAI's embeddings and list of models.

Follows its public API reference: a text, a list of texts, token ids or a list of those; numbers as
JSON or as base64 of little-endian float32, which is what its own client asks for; `dimensions` cut
and made one long again; `usage` in tokens that were run. `truncate` and `long` of our own can be
sent in the client's `extra_body`. Vectors are as the model makes them. Token ids are the model's
own where they are framed as its tokenizer frames a text; see `token_ids` for others.
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

from packhorse.serve import cl100k
from packhorse.serve.calls import reply
from packhorse.serve.dialects.asking import Cut, vectors
from packhorse.serve.dialects.fields import only, poster
from packhorse.serve.dialects.shapes import (
    NO_EFFECT,
    READING,
    Direction,
    Ids,
    Lenient,
    Long,
    Many,
    Named,
    OpenAiError,
    Prompt,
    Text,
    refusals,
)
from packhorse.serve.dialects.tei import batch
from packhorse.serve.dialects.token_ids import as_given
from packhorse.serve.hosting import Hosted, Hosts
from packhorse.serve.settings import Settings

OpenAiInput = Annotated[
    Text | Ids | Many[Text] | Many[Ids],
    Field(
        description="A text, a list of texts, token ids, or a list of token ids.",
        examples=[["What is packing?", "Sequences laid end to end."]],
    ),
]


Width = Annotated[int | None, Field(ge=1, le=2**20)]
NUMBERS = "numbers are 32 bits, little-endian in base64"
BY_NAME = "name one of the model's prompts in `prompt_name`"


class EmbeddingsRequest(Lenient):
    """What to embed, and how to write it down."""

    input: OpenAiInput
    model: Named = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Width = None
    user: str | None = NO_EFFECT
    # Ours, and of text-embeddings-inference on /embed:
    truncate: bool | Literal["NONE", "START", "END"] | None = Field(
        default=None, description="Cut texts that are too long; NVIDIA's words for it are known."
    )
    truncation_direction: Direction | None = None
    long: Long | None = Field(default=None, description="Goes before `truncate`.")
    normalize: bool | None = Field(default=None, description="Make vectors one long, or do not.")
    prompt_name: Prompt = None
    # Of Jina, Voyage, Mistral, vLLM, Infinity and NVIDIA, which have this route too:
    normalized: bool | None = Field(default=None, description="The same as `normalize`.")
    truncation: bool | None = Field(default=None, description="The same as `truncate`.")
    output_dimension: Width = None
    embedding_type: Literal["float", "base64"] | None = Field(
        default=None, description="The same as `encoding_format`."
    )
    output_dtype: Annotated[str | None, only("float", instead=NUMBERS)] = None
    embed_dtype: Annotated[str | None, only("float32", instead=NUMBERS)] = None
    endianness: Annotated[str | None, only("little", "native", instead=NUMBERS)] = None
    task: Annotated[str | None, only(instead=BY_NAME)] = None
    input_type: Annotated[str | None, only(instead=BY_NAME)] = None
    modality: Annotated[str | None, only("text", instead="models here read texts")] = None
    late_chunking: Annotated[bool | None, only(False, instead="each text is read by itself")] = None
    return_multivector: Annotated[
        bool | None, only(False, instead="/embed_all gives a vector for each token")
    ] = None
    add_special_tokens: Annotated[
        bool | None, only(True, instead="send token ids to /embed to choose them yourself")
    ] = None
    truncate_prompt_tokens: Annotated[
        int | None, only(-1, instead="use `truncate`; texts are cut to what the model takes")
    ] = None
    priority: int | None = NO_EFFECT
    request_id: str | None = NO_EFFECT

    @property
    def cut(self) -> Cut:
        """What becomes of a text that is too long."""
        words = {"NONE": False, "START": True, "END": True}
        truncate = words.get(self.truncate) if isinstance(self.truncate, str) else self.truncate
        if truncate is None:
            truncate = self.truncation or self.truncate_prompt_tokens == -1
        start = "Left" if self.truncate == "START" else "Right"
        return Cut.read(truncate, self.truncation_direction or start, self.long)


class OpenAiVector(BaseModel):
    """The vector of one input."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str = Field(examples=[[0.6, 0.8]])


class OpenAiUsage(BaseModel):
    """Tokens that were run."""

    prompt_tokens: int
    total_tokens: int


class Embeddings(BaseModel):
    """The vectors, in the order of the inputs."""

    object: Literal["list"] = "list"
    data: list[OpenAiVector]
    model: str
    usage: OpenAiUsage


class OpenAiModel(BaseModel):
    """A model that is served."""

    id: str = Field(examples=["all-MiniLM-L6-v2"])
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    tasks: list[str] = Field(description="Ours: what it can be asked.")


class OpenAiModels(BaseModel):
    """All of them."""

    object: Literal["list"] = "list"
    data: list[OpenAiModel]


def add(app: FastAPI, hosts: Hosts, settings: Settings) -> None:
    """Add the routes."""
    table = cl100k.table(settings.token_ids)
    tags: Any = ["OpenAI"]
    get = partial(app.get, tags=tags, responses=refusals(OpenAiError, READING))

    post = poster(app, tags[0], OpenAiError)

    @post("/v1/embeddings", response_model=Embeddings)
    async def embeddings(request: Request, body: EmbeddingsRequest) -> Response:
        """A vector an input."""
        host = hosts.find(body.model, "embed")
        texts = await as_given(host, batch(body.input), table, settings.max_input_characters)
        found = await vectors(
            request,
            host,
            texts,
            body.cut,
            normalise=body.normalized if body.normalize is None else body.normalize,
            dimensions=body.dimensions or body.output_dimension,
            prompt=body.prompt_name,
        )
        encoding = body.encoding_format or body.embedding_type
        write = _base64 if encoding == "base64" else np.asarray
        data = [
            {"object": "embedding", "index": index, "embedding": write(vector)}
            for index, vector in enumerate(found.values)
        ]
        total = sum(found.tokens)
        usage = {"prompt_tokens": total, "total_tokens": total}
        return reply({"object": "list", "data": data, "model": host.name, "usage": usage})

    @get("/v1/models", response_model=OpenAiModels)
    async def models() -> Response:
        """What is served."""
        return reply({"object": "list", "data": [_model(host) for host in hosts]})

    @get("/v1/models/{name:path}", response_model=OpenAiModel)
    async def model(name: str) -> Response:
        """One of the models."""
        return reply(_model(hosts.named(name)))


def _base64(vector: np.ndarray) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


def _model(host: Hosted) -> dict[str, Any]:
    return {
        "id": host.name,
        "object": "model",
        "created": int(host.opened),
        "owned_by": "packhorse",
        "tasks": list(host.tasks),
    }
