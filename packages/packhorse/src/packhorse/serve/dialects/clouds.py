"""What machine learning clouds call: SageMaker's `/invocations` and Vertex AI's `/vertex`.

SageMaker posts every request to `/invocations` and asks `/ping` for health; the body alone says
which API it is meant for. The first line that fits decides:

1. `inputs`: Hugging Face's `/` if there are `parameters` or the inputs are objects; otherwise
   text-embeddings-inference's `/embed` or `/predict`, by what the model is made for; otherwise `/`
2. `query` with `texts` or `documents`: `/rerank`
3. two fields of vLLM's `/score`: `/score`
4. `input`: `/v1/embeddings`, vLLM's `/classify` or `/pooling`, by what the model is made for

The model is the one that the body names, otherwise the first. text-embeddings-inference decides by
its model alone (router/src/http/server.rs), vLLM tries the bodies of its routes in this order
(vllm/entrypoints/serve/sagemaker/api_router.py, vllm/entrypoints/pooling/factories.py).

Vertex AI posts `{"instances": [...]}` and expects `{"predictions": [...]}`, as
text-embeddings-inference answers on `/vertex`. Each instance is a body as of `/invocations`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field, RootModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from packhorse.errors import InputError
from packhorse.serve.calls import response_content
from packhorse.serve.dialects.schemas import (
    LenientBody,
    ListOf,
    TeiError,
    TeiOrVllmError,
    error_responses,
    post_routes,
)
from packhorse.serve.failures import TEXT_PAIRS, Empty, TooLarge
from packhorse.serve.hosting import ServedModel, ServedModels
from packhorse.serve.settings import ServeSettings
from packhorse.serve.shortcut import DirectRoute, direct_routes

MAX_RUNNING_INSTANCES = 8  # of one request to Vertex AI
# By the first task that a model supports.
TEI_PATHS = {"embed": "/embed", "classify": "/predict"}
VLLM_PATHS = {"embed": "/v1/embeddings", "classify": "/classify"}


class Invocation(RootModel[dict[str, Any]]):
    """A body of `/embed`, `/predict`, `/`, `/rerank`, `/score`, `/v1/embeddings`, `/classify` …"""

    model_config = {"json_schema_extra": {"examples": [{"inputs": "What is packing?"}]}}


class InvocationResponse(RootModel[Any]):
    """What the route answers that the body is meant for."""


class VertexRequest(LenientBody):
    """Bodies of requests, as `/invocations` takes them."""

    instances: ListOf[dict[str, Any]] = Field(examples=[[{"inputs": "What is packing?"}]])


class VertexResponse(BaseModel):
    """What is answered to each instance."""

    predictions: list[Any]


def add(app: FastAPI, models: ServedModels, settings: ServeSettings) -> None:
    """Add the routes; those that they answer by must be there."""
    tag = "SageMaker and Vertex AI"
    table = direct_routes(app.routes)
    errors = error_responses(TeiOrVllmError)

    @app.post("/invocations", response_model=InvocationResponse, tags=[tag], responses=errors)
    async def invocations(request: Request, body: Invocation) -> Response:
        """What the route answers that the body is meant for."""
        return await _invoke(request, models, table, body.root)

    @post_routes(app, tag, TeiError)("/vertex", response_model=VertexResponse)
    async def vertex(request: Request, body: VertexRequest) -> Response:
        """What `/invocations` answers to each instance, in their order."""
        limit = settings.max_batch_inputs
        if not body.instances:
            raise Empty("the request has no instances")
        inputs = sum(map(_count_inputs, body.instances))
        if inputs > limit:
            raise TooLarge(
                f"the instances have {inputs} inputs; at most {limit} are allowed "
                "(max_batch_inputs)"
            )
        # A few at a time, as one request of so many inputs would: the queue has room for those.
        turns = asyncio.Semaphore(MAX_RUNNING_INSTANCES)

        async def answer(instance: dict[str, Any]) -> Response:
            async with turns:
                return await _invoke(request, models, table, instance)

        try:
            async with asyncio.TaskGroup() as group:
                running = [group.create_task(answer(instance)) for instance in body.instances]
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None  # the others were cancelled
        predictions = b",".join([await response_content(task.result()) for task in running])
        content = b'{"predictions":[' + predictions + b"]}"
        return Response(content, media_type="application/json")


def _count_inputs(instance: Mapping[str, Any]) -> int:
    """Return how many texts, or documents to rank, an instance has."""
    fields = (instance.get(name) for name in ("inputs", "input", "texts", "documents"))
    return max((len(value) for value in fields if isinstance(value, list)), default=1)


async def _invoke(
    request: Request,
    models: ServedModels,
    table: Mapping[str, DirectRoute],
    document: dict[str, Any],
) -> Response:
    """Answer by the handler of the route that the body is meant for."""
    name = document.get("model")
    model = models.find(name if isinstance(name, str) else None)
    route = table[_path(document, model)]
    try:
        body = route.body.model_validate(document)
    except ValidationError as error:
        errors = [{**detail, "loc": ("body", *detail["loc"])} for detail in error.errors()]
        raise RequestValidationError(errors, body=document) from None
    return await route.run(request, body)


def _path(document: Mapping[str, Any], model: ServedModel) -> str:
    """Return the route that a body is meant for."""
    main_task = model.tasks[0]
    if "inputs" in document:
        inputs = document["inputs"]
        first = inputs[0] if isinstance(inputs, list) and inputs else inputs
        if "parameters" in document or isinstance(first, dict):
            return "/"
        return TEI_PATHS.get(main_task, "/")
    if "query" in document and ("texts" in document or "documents" in document):
        return "/rerank"
    if any(first in document and second in document for first, second in TEXT_PAIRS):
        return "/score"
    if "input" in document:
        return VLLM_PATHS.get(main_task, "/pooling")
    raise InputError(
        "the body fits no route; send inputs, input, query with texts or documents, or text_1 with "
        "text_2"
    )
