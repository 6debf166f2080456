"""Routes under /admin, which add, replace and remove models of a running server.

They exist only with --admin-key-file, whose key opens them and nothing else; API keys do not. Who
has that key may have any folder or hub id opened that this process can read.

A model is opened beside those that are served: until it runs, nothing has changed, so a model that
cannot be opened leaves everything as it was. Then new requests find it by its name. Requests that
have found another model before finish there; after the last of them its runner ends and its memory
is free. There is memory for both, old and new, while one replaces the other.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import FastAPI
from pydantic import BaseModel, Field
from starlette.responses import Response

from packhorse.errors import InputError
from packhorse.serve import hosting, logs
from packhorse.serve.calls import json_response
from packhorse.serve.dialects.schemas import StrictBody, TeiError, error_responses
from packhorse.serve.hosting import OtherProcesses, ServedModel, ServedModels
from packhorse.serve.settings import ServeSettings

MAX_NAME = 200
# Not "=", which divides NAME=MODEL of --model; a blank or a quote would be trouble in a log line.
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9._/@:-]+$", max_length=MAX_NAME)]


class AddModelRequest(StrictBody):
    """A model to serve."""

    name: Name = Field(examples=["minilm"], description="The name that requests use.")
    model: str = Field(
        min_length=1,
        max_length=4096,
        examples=["sentence-transformers/all-MiniLM-L6-v2"],
        description="A folder, file or hub id, as for --model.",
    )
    replace: bool = Field(default=False, description="Replace the model of this name.")


class AdminModel(BaseModel):
    """A served model."""

    name: str
    source: str = Field(description="What was opened: a folder, file or hub id.")
    tasks: list[str]
    width: int = Field(description="Numbers of a token's hidden state.")
    max_input_length: int
    device: str
    dtype: str
    fingerprint: str


class AdminModels(BaseModel):
    """All served models, the default first."""

    models: list[AdminModel]


class ModelChange(BaseModel):
    """What has changed."""

    model: AdminModel | None = Field(description="The model as it is served now.")
    replaced: AdminModel | None = Field(description="The model that is not served any more.")
    warnings: list[str] = Field(description="What users of the replaced model must know.")


class LocalModels:
    """Opens models in this process."""

    def __init__(self, models: ServedModels, settings: ServeSettings) -> None:
        self.models = models
        self.settings = settings

    async def open(self, name: str, source: str) -> None:
        """Open a model and serve it, in place of the one of this name if there is one."""
        model = await asyncio.to_thread(hosting.open_model, f"{name}={source}", self.settings)
        if (replaced := self.models.put(model)) is not None:
            hosting.release(replaced)

    async def remove(self, name: str) -> None:
        """Serve a model no more."""
        hosting.release(self.models.remove(name))


def add(app: FastAPI, models: ServedModels, changer: LocalModels | OtherProcesses) -> None:
    """Add the routes."""
    turn = asyncio.Lock()  # one change at a time
    options: dict[str, Any] = {
        "tags": ["Admin"],
        "responses": error_responses(TeiError, (401, 422, 424, 429, 503)),
    }

    @app.get("/admin/models", response_model=AdminModels, **options)
    async def list_models() -> Response:
        """The served models."""
        return json_response({"models": [describe(model) for model in models]})

    @app.post("/admin/models", response_model=ModelChange, **options)
    async def add_model(body: AddModelRequest) -> Response:
        """Open a model and serve it; the answer comes when it is served."""
        async with turn:
            before = _find(models, body.name)
            if before is not None and not body.replace:
                raise InputError(
                    f"a model named {body.name} is served already; set replace to replace it"
                )
            await changer.open(body.name, body.model)
            after = describe(models.named(body.name))
        logs.LOGGER.info("%s is served now, from %s", body.name, body.model)
        warnings = compare(before, after) if before else []
        return json_response({"model": after, "replaced": before, "warnings": warnings})

    @app.delete("/admin/models/{name:path}", response_model=ModelChange, **options)
    async def remove_model(name: str) -> Response:
        """Serve a model no more; requests under way on it are finished."""
        async with turn:
            removed = describe(models.named(name))
            if len(models) == 1:
                raise InputError(f"{name} is the only model; add another one first")
            await changer.remove(name)
        logs.LOGGER.info("%s is served no more", name)
        return json_response({"model": None, "replaced": removed, "warnings": []})


def describe(model: ServedModel) -> dict[str, Any]:
    """Return the fields of `AdminModel`."""
    encoder = model.encoder
    return {
        "name": model.name,
        "source": model.source,
        "tasks": list(model.tasks),
        "width": encoder.get_embedding_dimension(),
        "max_input_length": encoder.max_length,
        "device": str(encoder.device),
        "dtype": str(encoder.dtype).removeprefix("torch."),
        "fingerprint": str(model.fingerprint_parts),
    }


def compare(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return what users of the model before must know about the one after."""
    warnings: list[str] = []
    if before["width"] != after["width"]:
        warnings.append(
            f"vectors have another size: hidden states have {after['width']} numbers and had "
            f"{before['width']}; stored vectors cannot be compared with new ones"
        )
    elif before["fingerprint"] != after["fingerprint"]:
        warnings.append(
            "the fingerprint is another one: stored vectors cannot be compared with new ones"
        )
    if lost := sorted(set(before["tasks"]) - set(after["tasks"])):
        warnings.append(f"the new model does not support: {', '.join(lost)}")
    return warnings


def _find(models: ServedModels, name: str) -> dict[str, Any] | None:
    return next((describe(model) for model in models if model.name == name), None)
