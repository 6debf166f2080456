"""vLLM's routes for pooling models: pooling, score, tokenize; and what it shares with Infinity.

Follows vLLM's protocol classes (vllm/entrypoints/pooling/*/protocol.py and
vllm/entrypoints/serve/tokenize/protocol.py of vllm-project/vllm, August 2026). A text with more
tokens than the model takes is refused unless `truncate_prompt_tokens` is set. Scores are those of a
cross-encoder's head, or cosine similarities of an embedding model's vectors. Chat messages are
refused: encoders have no chat template. `use_activation` false returns vectors before
normalization, and logits in place of probabilities.

vLLM's `/rerank`, `/classify` and `/tokenize` are paths of other servers too: see `shared_paths`.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import FastAPI
from pydantic import BaseModel, Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from packhorse import __version__
from packhorse.errors import InputError
from packhorse.results import activated, softmax
from packhorse.runtime.tasks import TaskInput
from packhorse.serve.calls import CallResult, check_inputs, json_response
from packhorse.serve.dialects.cohere import shorten
from packhorse.serve.dialects.schemas import (
    GET_STATUSES,
    NO_EFFECT,
    Inputs,
    LenientBody,
    ModelName,
    Texts,
    TokenIds,
    TokenLimit,
    VllmError,
    error_responses,
    only,
    post_routes,
)
from packhorse.serve.dialects.tasks import Truncation, run_task
from packhorse.serve.dialects.tei import as_batch, problem_of
from packhorse.serve.dialects.vectors import base64_texts
from packhorse.serve.failures import TEXT_PAIRS, Empty
from packhorse.serve.hosting import ServedModel, ServedModels
from packhorse.serve.settings import ServeSettings
from packhorse.tokens.tokenizer import NO_LIMIT

FLOAT32 = "numbers are 32 bits wide, little-endian in base64"
NO_CHAT = only(instead="encoders have no chat template; send texts")
# Our tasks by vLLM's names, in the order in which one is chosen if the request names none.
POOLING_TASKS = {
    "embed": "embed",
    "classify": "classify",
    "score": "rerank",
    "token_classify": "label",
    "token_embed": "hidden",
}
PoolingTask = Literal["embed", "classify", "score", "token_classify", "token_embed"]


MaxTokens = Annotated[
    int, Field(ge=0, le=2**31, description="Cut the text after this many tokens; 0: do not.")
]

# Request bodies --------------------------------------------------------------------------------


class VllmBody(LenientBody):
    """The fields that most of vLLM's bodies have."""

    model: ModelName = None
    user: str | None = NO_EFFECT
    truncate_prompt_tokens: TokenLimit = None
    truncation_side: Literal["left", "right"] | None = None
    request_id: str | None = NO_EFFECT
    priority: int | None = NO_EFFECT
    cache_salt: str | None = NO_EFFECT
    mm_processor_kwargs: Annotated[Any, only(instead="models read texts only")] = None
    use_activation: bool | None = Field(
        default=None,
        description="Whether vectors are normalized and logits made probabilities; by default the "
        "former as the model does, the latter always.",
    )

    @property
    def text_truncation(self) -> Truncation:
        """What to do with a text that is too long."""
        truncate = True if self.truncate_prompt_tokens is not None else None
        return Truncation.read(truncate, self.truncation_side or "right")

    @property
    def max_length(self) -> int | None:
        """The tokens to truncate inputs to; None: what the model takes."""
        limit = self.truncate_prompt_tokens
        return None if limit == -1 else limit


class InputBody(VllmBody):
    """One input or several."""

    messages: Annotated[Any, NO_CHAT] = None
    input: Inputs
    add_special_tokens: Annotated[
        bool | None, only(True, instead="send token ids to choose special tokens yourself")
    ] = None


class PoolingRequest(InputBody):
    """Texts or token ids, and what to return of them."""

    task: PoolingTask | None = Field(
        default=None,
        description="By default the first of embed, classify, token_classify and token_embed that "
        "the model supports.",
    )
    encoding_format: Literal["float", "base64"] = "float"
    embed_dtype: Annotated[str | None, only("float32", instead=FLOAT32)] = None
    endianness: Annotated[str | None, only("little", "native", instead=FLOAT32)] = None
    dimensions: Annotated[int | None, only(instead="/v1/embeddings shortens vectors")] = None
    data: Annotated[Any, only(instead="there are no plugins; send `input`")] = None


class ScoringBody(VllmBody):
    """The fields that scoring and ranking share."""

    max_tokens_per_query: MaxTokens = 0
    max_tokens_per_doc: MaxTokens = 0
    instruction: Annotated[str | None, NO_CHAT] = None
    chat_template_kwargs: Annotated[Any, NO_CHAT] = None


class ScoreRequest(ScoringBody):
    """Texts to compare: one with one, one with several, or as many with as many.

    Their fields are `text_1` and `text_2`, `queries` and `documents`, `queries` and `items`, or
    `data_1` and `data_2`.
    """

    text_1: Texts | None = Field(default=None, examples=["What is packing?"])
    text_2: Texts | None = Field(default=None, examples=["Sequences laid end to end."])
    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None

    @model_validator(mode="after")
    def _check_texts(self) -> ScoreRequest:
        if len(self._complete_pairs()) != 1:
            names = " or ".join(f"{first} and {second}" for first, second in TEXT_PAIRS)
            raise ValueError(f"send {names}")
        return self

    def _complete_pairs(self) -> list[tuple[Any, Any]]:
        pairs = [(getattr(self, first), getattr(self, second)) for first, second in TEXT_PAIRS]
        return [pair for pair in pairs if None not in pair]

    @property
    def text_lists(self) -> tuple[list[str], list[str]]:
        """The texts on both sides, as lists of one length."""
        first, second = map(_as_list, self._complete_pairs()[0])
        if not first or not second:
            raise Empty("the request has no input")
        if len(first) == 1:
            first = first * len(second)
        if len(first) != len(second):
            raise InputError(
                f"there are {len(first)} texts and {len(second)} to compare them with; send one "
                "text and several, or as many of both"
            )
        return first, second


class PromptTokenizeRequest(LenientBody):
    """A text to tokenize; it is not truncated."""

    messages: Annotated[Any, NO_CHAT] = None
    prompt: str = Field(examples=["What is packing?"])
    add_special_tokens: bool = True
    return_token_strs: bool | None = False
    model: ModelName = None


class DetokenizeRequest(LenientBody):
    """Token ids to convert to text."""

    tokens: TokenIds = Field(examples=[[101, 7592, 102]])
    model: ModelName = None


# Response bodies -------------------------------------------------------------------------------


class VllmUsage(BaseModel):
    """Tokens that were run."""

    prompt_tokens: int
    total_tokens: int


class VllmAnswer(BaseModel):
    """The fields that most answers have."""

    id: str
    created: int
    model: str
    usage: VllmUsage


class PooledData(BaseModel):
    """The numbers of one input: a vector, scores per label, or one of these per token."""

    index: int
    object: Literal["pooling"] = "pooling"
    data: list[float] | list[list[float]] | str


class PoolingResponse(VllmAnswer):
    """One item per input."""

    object: Literal["list"] = "list"
    data: list[PooledData]


class VllmScore(BaseModel):
    """The score of a pair of texts."""

    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreResponse(VllmAnswer):
    """One score per pair."""

    object: Literal["list"] = "list"
    data: list[VllmScore]


class PromptTokens(BaseModel):
    """The token ids of a text."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(BaseModel):
    """The text of token ids, special tokens included."""

    prompt: str


class Version(BaseModel):
    """The version of the server."""

    version: str


# Routes ----------------------------------------------------------------------------------------


def add(app: FastAPI, models: ServedModels, settings: ServeSettings) -> None:
    """Add the routes."""
    tags: Any = ["vLLM"]
    post = post_routes(app, tags[0], VllmError)

    @post("/pooling", response_model=PoolingResponse)
    async def pooling(request: Request, body: PoolingRequest) -> Response:
        """Vectors or scores of each input or of its tokens; 424 if the model has no such head."""
        model = models.find(body.model, POOLING_TASKS[body.task] if body.task else None)
        result = await _pool(request, model, body)
        values: Sequence[Any] = result.values
        if body.encoding_format == "base64":
            values = await base64_texts(values)
        data = [
            {"index": index, "object": "pooling", "data": value}
            for index, value in enumerate(values)
        ]
        return json_response(_list_answer("pool", model, result, data))

    async def answer_score(request: Request, body: ScoreRequest) -> Response:
        first, second = body.text_lists
        model, task = find_scorer(models, body.model)
        result = await score_pairs(request, model, task, first, second, body)
        data = [
            {"index": index, "object": "score", "score": score}
            for index, score in enumerate(result.values)
        ]
        return json_response(_list_answer("score", model, result, data))

    @post("/score", response_model=ScoreResponse)
    async def score(request: Request, body: ScoreRequest) -> Response:
        """The score of each pair: of a cross-encoder, otherwise the cosine similarity."""
        return await answer_score(request, body)

    @post("/v1/score", response_model=ScoreResponse)
    async def score_v1(request: Request, body: ScoreRequest) -> Response:
        """The same as `/score`, under its former path."""
        return await answer_score(request, body)

    @post("/detokenize", response_model=DetokenizeResponse)
    async def detokenize(request: Request, body: DetokenizeRequest) -> Response:
        """The text of token ids."""
        tokenizer = models.find(body.model).encoder.tokenizer
        check_inputs(settings, as_batch(body.tokens))
        text = await asyncio.to_thread(tokenizer.decode, body.tokens, False)
        return json_response({"prompt": text})

    version_errors = error_responses(VllmError, GET_STATUSES)

    @app.get("/version", response_model=Version, tags=tags, responses=version_errors)
    async def version() -> Response:
        """The version of Packhorse."""
        return json_response({"version": __version__})


async def tokenize(
    models: ServedModels, settings: ServeSettings, body: PromptTokenizeRequest
) -> Response:
    """Answer `/tokenize` with `prompt`."""
    model = models.find(body.model)
    check_inputs(settings, [body.prompt])
    tokenizer = model.encoder.tokenizer
    (encoding,) = await asyncio.to_thread(tokenizer.encode, [body.prompt], NO_LIMIT)
    ids = encoding.ids if body.add_special_tokens else encoding.ids[encoding.spans[0]]
    tokens: list[int] = ids.tolist()
    strings = None
    if body.return_token_strs:
        strings = await asyncio.to_thread(lambda: list(map(tokenizer.token, tokens)))
    document = {
        "count": len(tokens),
        "max_model_len": model.encoder.max_length,
        "tokens": tokens,
        "token_strs": strings,
    }
    return json_response(document)


# Tasks -----------------------------------------------------------------------------------------


async def _pool(request: Request, model: ServedModel, body: PoolingRequest) -> CallResult:
    """Run the task of a request to `/pooling`; values are arrays."""
    supported = (name for name, task in POOLING_TASKS.items() if task in model.tasks)
    task = body.task or next(supported)
    inputs = as_batch(body.input)
    truncation = body.text_truncation
    max_length = body.max_length
    if task == "embed":
        return await run_task(
            request,
            model,
            "embed",
            inputs,
            truncation,
            normalize=body.use_activation,
            max_length=max_length,
        )
    if task in ("classify", "score"):
        result = await classify_inputs(request, model, body)
        labels = model.encoder.labels
        return replace(result, values=[label_scores(value, labels) for value in result.values])
    if task == "token_embed":
        result = await run_task(request, model, "hidden", inputs, truncation, max_length=max_length)
        states: list[np.ndarray] = [value.states for value in result.values]
        if body.use_activation is not False:
            # Millions of numbers, as many as an answer may have.
            states = await asyncio.to_thread(lambda: list(map(_unit_rows, states)))
        return replace(result, values=states)
    result = await run_task(
        request, model, "label", inputs, truncation, max_length=max_length, logits=True
    )
    if body.use_activation is False:
        return result
    probabilities = await asyncio.to_thread(lambda: list(map(softmax, result.values)))
    return replace(result, values=probabilities)


async def classify_inputs(
    request: Request, model: ServedModel, body: InputBody, raw: bool = False
) -> CallResult:
    """Return all labels of each input with their scores, which are logits with `raw`."""
    return await run_task(
        request,
        model,
        "classify",
        as_batch(body.input),
        body.text_truncation,
        max_length=body.max_length,
        problem=problem_of(model, raw or body.use_activation is False),
    )


def label_scores(value: Any, labels: Sequence[str]) -> np.ndarray:
    """Return the scores of a `Classified` in the order of the model's labels."""
    return np.array([value.scores[label] for label in labels], np.float32)


def find_scorer(models: ServedModels, name: str | None) -> tuple[ServedModel, str]:
    """Return a model that can score pairs, and how: by the task rerank, or else by embed.

    Without a name a cross-encoder is preferred to an embedding model.
    """
    candidates = list(models) if name is None else [models.find(name)]
    for task in ("rerank", "embed"):
        for model in candidates:
            if task in model.tasks:
                return model, task
    return models.find(name, "rerank"), "rerank"  # raises: the model supports neither


async def score_pairs(
    request: Request,
    model: ServedModel,
    task: str,
    first: Sequence[str],
    second: Sequence[str],
    body: ScoringBody,
    activation: str | None = None,
) -> CallResult:
    """Return the score of each pair.

    activation: what a cross-encoder's logits go through, see `results.activated`; None: what the
    model's own configuration says, as in vLLM.
    """
    texts = await _shortened(request, model, first, body.max_tokens_per_query)
    others = await _shortened(request, model, second, body.max_tokens_per_doc)
    options = {"max_length": body.max_length}
    if task == "embed":
        # One text that is compared with many is embedded once.
        is_one = len(set(texts)) == 1
        inputs: list[TaskInput] = [*(texts[:1] if is_one else texts), *others]
        result = await run_task(
            request, model, "embed", inputs, body.text_truncation, normalize=True, **options
        )
        vectors = np.array(result.values, np.float64)
        count = len(inputs) - len(others)
        cosines = (vectors[:count] * vectors[count:]).sum(axis=1)
        return replace(result, values=cosines.tolist())
    pairs = list(zip(texts, others, strict=True))
    result = await run_task(
        request, model, "classify", pairs, body.text_truncation, problem="raw", **options
    )
    logits = np.array([value.score for value in result.values], np.float64)
    if body.use_activation is False:
        activation = "Identity"
    scores = activated(logits, activation or model.encoder.score_activation)
    return replace(result, values=scores)


async def _shortened(
    request: Request, model: ServedModel, texts: Sequence[str], max_tokens: int
) -> Sequence[str]:
    """Cut each text after `max_tokens` tokens; 0 leaves them as they are."""
    if not max_tokens:
        return texts
    # Checked here because shortening tokenizes all texts, before `calls` checks them.
    check_inputs(request.app.state.settings, texts)
    return await asyncio.to_thread(shorten, model.encoder.tokenizer, texts, max_tokens)


# Answers ---------------------------------------------------------------------------------------


def answer_fields(prefix: str, model: ServedModel, result: CallResult) -> dict[str, Any]:
    """Return the fields that all answers of vLLM and Infinity have."""
    total = sum(result.tokens)
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "created": int(time.time()),
        "model": model.name,
        "usage": {"prompt_tokens": total, "total_tokens": total},
    }


def _list_answer(
    prefix: str, model: ServedModel, result: CallResult, data: Sequence[Any]
) -> dict[str, Any]:
    return {**answer_fields(prefix, model, result), "object": "list", "data": data}


def _unit_rows(vectors: np.ndarray) -> np.ndarray:
    """Scale each row to length one; a row of zeros stays as it is."""
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / np.where(lengths == 0, 1, lengths)


def _as_list(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts
