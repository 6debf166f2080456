"""Infinity's routes without prefix: embeddings and models; see `shared_paths` for the others.

Follows its FastAPI application and schemas (libs/infinity_emb/infinity_emb/infinity_server.py and
fastapi_schemas/pymodels.py of michaelfeil/infinity, 0.0.77) and what its own client sends by
default: `dimensions` 0 for whole vectors, and a placeholder where no model is named. `/embeddings`
is text-embeddings-inference's path too; it is answered by the handler of `/v1/embeddings`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import FastAPI
from pydantic import AfterValidator, BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from packhorse import device
from packhorse.serve.calls import json_response
from packhorse.serve.dialects.openai import EmbeddingsRequest, OpenAiEmbeddings
from packhorse.serve.dialects.schemas import (
    GET_STATUSES,
    ModelName,
    VllmError,
    error_responses,
    post_routes,
)
from packhorse.serve.hosting import ServedModel, ServedModels
from packhorse.serve.settings import ServeSettings
from packhorse.serve.shortcut import direct_routes

NOT_SPECIFIED = (
    "default/not-specified"  # the name that Infinity's client sends if its user has none
)
CAPABILITIES = {"embed": "embed", "rerank": "rerank", "classify": "classify"}


def _read_name(name: str | None) -> str | None:
    return None if name == NOT_SPECIFIED else name


OptionalModelName = Annotated[ModelName, AfterValidator(_read_name)]
WholeOrShort = Annotated[
    int | None,
    Field(ge=0, le=2**20, description="Keep this many numbers of each vector; 0: all."),
    AfterValidator(lambda width: width or None),
]


class InfinityEmbeddingsRequest(EmbeddingsRequest):
    """Texts to embed, and the format of the vectors."""

    model: OptionalModelName = None
    dimensions: WholeOrShort = None


class QueueStats(BaseModel):
    """What waits for a model."""

    queue_fraction: float = Field(description="How full the queue is, in tokens.")
    queue_absolute: int = Field(description="Tokens that wait.")
    results_pending: int = Field(description="Always 0: results are not queued.")
    batch_size: int = Field(description="Sequences of full length per batch.")


class InfinityModel(BaseModel):
    """A served model."""

    id: str = Field(examples=["all-MiniLM-L6-v2"])
    stats: QueueStats
    object: Literal["model"] = "model"
    owned_by: Literal["infinity"] = "infinity"
    created: int
    backend: str = Field(examples=["torch"])
    capabilities: list[str] = Field(examples=[["embed"]])
    dtype: str
    device: str


class InfinityModels(BaseModel):
    """All served models."""

    data: list[InfinityModel]
    object: Literal["list"] = "list"


def add(app: FastAPI, models: ServedModels, settings: ServeSettings) -> None:
    """Add the routes; `/v1/embeddings` must be there."""
    tags: Any = ["Infinity"]
    post = post_routes(app, tags[0], VllmError)
    openai_embeddings = direct_routes(app.routes)["/v1/embeddings"]

    @post("/embeddings", response_model=OpenAiEmbeddings)
    async def embeddings(request: Request, body: InfinityEmbeddingsRequest) -> Response:
        """One vector per input."""
        return await openai_embeddings.run(request, body)

    list_errors = error_responses(VllmError, GET_STATUSES)

    @app.get("/models", response_model=InfinityModels, tags=tags, responses=list_errors)
    async def infinity_models() -> Response:
        """All served models, and what waits for them."""
        return json_response({"data": [_describe(model) for model in models], "object": "list"})


def _describe(model: ServedModel) -> dict[str, Any]:
    runner = model.runner
    encoder = model.encoder
    waiting = int(runner.waiting_tokens)
    return {
        "id": model.name,
        "stats": {
            "queue_fraction": waiting / runner.max_waiting_tokens,
            "queue_absolute": waiting,
            "results_pending": 0,
            "batch_size": max(1, runner.shape.tokens // encoder.max_length),
        },
        "object": "model",
        # The only value that Infinity's client accepts.
        "owned_by": "infinity",
        "created": int(model.opened),
        "backend": "torch",
        "capabilities": [name for task, name in CAPABILITIES.items() if task in model.tasks],
        "dtype": device.dtype_name(encoder.dtype),
        "device": str(encoder.device),
    }
