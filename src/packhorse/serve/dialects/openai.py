"""OpenAI's embeddings and list of models.

Follows its public API reference: a text, a list of texts, token ids or a list of those; numbers as
JSON or as base64 of little-endian float32, which is what its own client asks for; `dimensions` cut
and made one long again; `usage` in tokens that were run. `truncate` and `long` of our own can be
sent in the client's `extra_body`. Vectors are as the model makes them. Token ids are the model's own
where they are framed as its tokenizer frames a text; see `token_ids` for others.
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
from packhorse.serve.dialects.shapes import (
    READING,
    Ids,
    Lenient,
    Long,
    Many,
    Named,
    OpenAiError,
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


class EmbeddingsRequest(Lenient):
    """What to embed, and how to write it down."""

    input: OpenAiInput
    model: Named = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(default=None, ge=1, le=2**20)
    user: str | None = Field(default=None, description="Ignored.")
    truncate: bool | None = Field(default=None, description="Ours: cut texts that are too long.")
    long: Long | None = Field(default=None, description="Ours; goes before `truncate`.")


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

    @app.post(
        "/v1/embeddings", response_model=Embeddings, tags=tags, responses=refusals(OpenAiError)
    )
    async def embeddings(request: Request, body: EmbeddingsRequest) -> Response:
        """A vector an input."""
        host = hosts.find(body.model, "embed")
        texts = await as_given(host, batch(body.input), table, settings.max_input_characters)
        cut = Cut.read(body.truncate, long=body.long)
        found = await vectors(request, host, texts, cut, dimensions=body.dimensions)
        write = _base64 if body.encoding_format == "base64" else np.asarray
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
