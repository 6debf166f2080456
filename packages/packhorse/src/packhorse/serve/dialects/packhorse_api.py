"""Packhorse's own routes: answer questions, fill masks, classify texts and pairs, find names.

Other servers have no routes for these tasks. Each takes one input or a list, and answers with a
list of one item per input, in their order. Offsets are code points of the text that was sent.
Unknown fields are refused. `/classify` is added by `shared_paths`, because vLLM and Infinity have
this path too.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import FastAPI
from pydantic import BaseModel, Field, RootModel, model_validator
from starlette.requests import Request
from starlette.responses import Response

from packhorse.results import Aggregation
from packhorse.serve.calls import json_response
from packhorse.serve.dialects import tasks
from packhorse.serve.dialects.schemas import (
    InputType,
    ListOf,
    LongText,
    ModelName,
    PromptName,
    StrictBody,
    TeiError,
    Text,
    Texts,
    TopK,
    error_responses,
)
from packhorse.serve.dialects.tasks import Truncation, run_task
from packhorse.serve.hosting import ServedModels
from packhorse.serve.settings import ServeSettings

TextPair = Annotated[list[str], Field(min_length=2, max_length=2)]


class AnswerRequest(StrictBody):
    """A question, and the text or texts to search for its answer."""

    question: str = Field(examples=["What carries the sacks?"])
    context: str | None = Field(default=None, examples=["The horse carries the sacks to market."])
    contexts: ListOf[str] | None = None
    top_k: int = Field(default=1, ge=1, le=100)
    stride: int | None = Field(
        default=None,
        ge=0,
        le=2**20,
        description="Tokens that neighboring windows of a long context share.",
    )
    max_answer_tokens: int = Field(default=30, ge=1, le=256)
    no_answer: float | None = Field(
        default=None,
        ge=-1e6,
        le=1e6,
        description="An empty answer comes first unless another scores higher by more than this.",
    )
    model: ModelName = None

    @model_validator(mode="after")
    def _check_contexts(self) -> AnswerRequest:
        if (self.context is None) == (self.contexts is None):
            raise ValueError("send either context or contexts")
        return self


class FillRequest(StrictBody):
    """Texts with the model's mask token in them."""

    inputs: Texts = Field(examples=["A horse carries the [MASK]."])
    top_k: TopK = 5
    targets: ListOf[str] | None = Field(default=None, description="Choose only among these words.")
    long: LongText | None = None
    model: ModelName = None


class EmbedMultiRequest(StrictBody):
    """Texts each token of which gets a vector."""

    inputs: Texts = Field(examples=["The horse carries the sacks to market."])
    input_type: InputType = "document"
    prompt_name: PromptName = None
    truncate: bool | None = Field(default=None, description="Truncate texts that are too long.")
    model: ModelName = None


class ClassifyRequest(StrictBody):
    """Texts and pairs of texts."""

    inputs: Text | ListOf[Text | TextPair] = Field(examples=["Packing is fun."])
    long: LongText | None = None
    model: ModelName = None


class NerRequest(StrictBody):
    """Texts to search for names."""

    inputs: Texts = Field(examples=["Ada lives in London."])
    aggregation: Aggregation = Field(
        default="simple",
        description="Return single tokens (none), or join neighbors of the same label: tokens "
        "(simple), or words, labeled by the first token, the average or the maximum.",
    )
    stride: int | None = Field(
        default=None,
        ge=0,
        le=2**20,
        description="Read a long text in windows that share this many tokens; instead of `long`.",
    )
    long: LongText | None = None
    model: ModelName = None

    @model_validator(mode="after")
    def _check_reading(self) -> NerRequest:
        if self.stride is not None and self.long is not None:
            raise ValueError("send either stride or long")
        return self


class AnswerSpan(BaseModel):
    """An answer, `context[start:end]`; empty if there is none."""

    text: str
    start: int
    end: int
    score: float


class MaskCandidate(BaseModel):
    """A word for the mask, and the text with it filled in."""

    word: str
    score: float
    text: str
    id: int


class LabelScores(BaseModel):
    """The best label, and the scores of all."""

    label: str
    score: float
    scores: dict[str, float]


class NamedSpan(BaseModel):
    """A name, `text[start:end]` of the input, and the kind of thing it names."""

    label: str
    text: str
    start: int
    end: int
    score: float


class MultiVectors(RootModel[list[list[list[float]]]]):
    """The vectors of the tokens of each input."""


class AnswerResponse(RootModel[list[list[AnswerSpan]]]):
    """The best answers of each context."""


class FillResponse(RootModel[list[list[list[MaskCandidate]]]]):
    """The best words for each mask of each text."""


class ClassifyResponse(RootModel[list[LabelScores]]):
    """One label per input."""


class NerResponse(RootModel[list[list[NamedSpan]]]):
    """The names in each text."""


def add(app: FastAPI, models: ServedModels, settings: ServeSettings) -> None:
    """Add the routes."""
    post = partial(app.post, tags=["Packhorse"], responses=error_responses(TeiError))

    @post("/embed_multi", response_model=MultiVectors)
    async def embed_multi(request: Request, body: EmbedMultiRequest) -> Response:
        """One vector per token of each input, to compare by MaxSim; 424 if no model makes them.

        Inputs are marked, filled up and stripped of punctuation as the model wants it. One that is
        longer than the model takes is cut, unless `truncate` is false.
        """
        model = models.find(body.model, "multi")
        result = await run_task(
            request,
            model,
            "multi",
            _as_list(body.inputs),
            Truncation.read(body.truncate, by_default=True),
            query=body.input_type == "query",
            prompt=body.prompt_name,
        )
        return json_response(result.values)

    @post("/answer", response_model=AnswerResponse)
    async def answer(request: Request, body: AnswerRequest) -> Response:
        """The spans of each context that answer the question best."""
        model = models.find(body.model, "answer")
        contexts = [body.context] if body.context is not None else body.contexts or []
        result = await tasks.answer(
            request,
            model,
            [(body.question, context) for context in contexts],
            stride=body.stride,
            top_k=body.top_k,
            no_answer=body.no_answer,
            max_answer_tokens=body.max_answer_tokens,
        )
        return json_response(result.values)

    @post("/fill", response_model=FillResponse)
    async def fill(request: Request, body: FillRequest) -> Response:
        """The best words for each mask."""
        model = models.find(body.model, "fill")
        texts = _as_list(body.inputs)
        truncation = Truncation.read(long=body.long)
        options = {"top_k": body.top_k, "targets": body.targets}
        result = await run_task(request, model, "fill", texts, truncation, **options)
        return json_response(result.values)

    @post("/ner", response_model=NerResponse)
    async def ner(request: Request, body: NerRequest) -> Response:
        """The names in each text, at their places in it."""
        model = models.find(body.model, "label")
        texts = _as_list(body.inputs)
        truncation = Truncation.read(long=body.long)
        result = await tasks.label(
            request, model, texts, truncation, stride=body.stride, aggregation=body.aggregation
        )
        return json_response(result.values)


async def classify(request: Request, models: ServedModels, body: ClassifyRequest) -> Response:
    """Answer `/classify` with `inputs`."""
    model = models.find(body.model, "classify")
    inputs = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    texts = [item if isinstance(item, str) else (item[0], item[1]) for item in inputs]
    truncation = Truncation.read(long=body.long)
    result = await run_task(request, model, "classify", texts, truncation)
    return json_response(result.values)


def _as_list(inputs: str | list[str]) -> list[str]:
    return [inputs] if isinstance(inputs, str) else inputs
