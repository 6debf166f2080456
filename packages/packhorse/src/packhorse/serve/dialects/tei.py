"""text-embeddings-inference's routes: embed, classify, rerank, compare, tokenize, info.

Follows its OpenAPI description (1.9): bodies, answers, response headers, kinds of errors, and that
a text with more tokens than the model takes is cut unless `truncate` is false (413). A single
input of `/embed` is answered with a list of one, a single input of `/predict` without a list. Added
are `model`, which chooses among several, and `long: "chunk"`, which reads a long text in parts; and
the two texts of a pair may have any lengths. `/rerank` and `/tokenize` are added by `shared_paths`,
because vLLM has these paths too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import Annotated, Any, Literal, cast

import numpy as np
from fastapi import FastAPI
from pydantic import BaseModel, Field, RootModel
from starlette.requests import Request
from starlette.responses import Response

from packhorse import __version__, device
from packhorse.results import SparseVector, words
from packhorse.runtime.tasks import TaskInput, prompted
from packhorse.serve.calls import CallResult, check_inputs, json_response
from packhorse.serve.dialects import tasks
from packhorse.serve.dialects.schemas import (
    GET_STATUSES,
    Direction,
    Inputs,
    InputType,
    LenientBody,
    ListOf,
    LongText,
    ModelName,
    PromptName,
    TeiError,
    Text,
    Texts,
    TokenIds,
    error_responses,
    only,
    post_routes,
)
from packhorse.serve.dialects.tasks import Truncation, run_task
from packhorse.serve.failures import Empty, TooLarge
from packhorse.serve.hosting import ServedModel, ServedModels
from packhorse.serve.settings import ServeSettings
from packhorse.tokens.tokenizer import NO_LIMIT, Encoding, Tokenizer

# Request bodies --------------------------------------------------------------------------------

Pair = Annotated[list[str], Field(min_length=1, max_length=2)]
PredictInputs = Annotated[
    Text | Pair | ListOf[Pair],
    Field(
        description="A text, a pair [a, b], or a list of [text] and [a, b].",
        examples=["Packing is fun."],
    ),
]
Dimensions = Annotated[
    int | None, Field(ge=1, le=2**20, description="Keep this many numbers of each vector.")
]


class TruncatingBody(LenientBody):
    """The fields about long texts that most bodies have."""

    truncate: bool | None = Field(default=None, description="Truncate texts that are too long.")
    truncation_direction: Direction = "Right"
    model: ModelName = None


class EmbedRequest(TruncatingBody):
    """Texts or token ids to embed."""

    inputs: Inputs
    prompt_name: PromptName = None
    normalize: bool = Field(default=True, description="Scale vectors to length one.")
    dimensions: Dimensions = None
    long: LongText | None = Field(default=None, description="Overrides `truncate`.")


class EmbedAllRequest(TruncatingBody):
    """Texts or token ids, each token of which is embedded."""

    inputs: Inputs
    prompt_name: PromptName = None


class EmbedSparseRequest(TruncatingBody):
    """Texts or token ids to weigh the words of."""

    inputs: Inputs
    prompt_name: PromptName = None
    input_type: InputType = "document"
    top_k: int | None = Field(
        default=None, ge=1, le=2**20, description="Keep this many words of each text."
    )
    format: Literal["indices", "words"] = Field(
        default="indices",
        description="How words are named: by their number, as text-embeddings-inference does, or "
        "as the fields of an object, which OpenSearch stores as rank_features.",
    )


class PredictRequest(TruncatingBody):
    """Texts and pairs to classify."""

    inputs: PredictInputs
    raw_scores: bool = Field(default=False, description="Return logits, not probabilities.")


class RerankRequest(TruncatingBody):
    """Texts to rank by how well they answer a query."""

    query: str = Field(examples=["What is packing?"])
    documents: Annotated[Any, only(instead="send either `texts` or `documents`")] = None
    texts: ListOf[str] = Field(examples=[["Sequences laid end to end.", "A horse carries it."]])
    raw_scores: bool = Field(default=False, description="Return logits, not probabilities.")
    return_text: bool = False
    # Fields of Infinity, vLLM and Jina, which have this route too:
    top_n: int | None = Field(default=None, ge=1, le=2**31, description="Return only the best few.")
    return_documents: bool | None = Field(default=None, description="The same as `return_text`.")


class SimilarityInput(LenientBody):
    """A text and the texts to compare it with."""

    source_sentence: str = Field(examples=["What is packing?"])
    sentences: ListOf[str] = Field(examples=[["What is padding?", "A horse carries it."]])


class SimilarityParameters(LenientBody):
    """Options of a comparison."""

    truncate: bool | None = None
    truncation_direction: Direction = "Right"
    prompt_name: PromptName = None


class SimilarityRequest(LenientBody):
    """A text, the texts to compare it with, and options."""

    inputs: SimilarityInput
    parameters: SimilarityParameters | None = None
    model: ModelName = None


class TokenizeRequest(LenientBody):
    """Texts to tokenize; none is truncated."""

    inputs: Texts
    add_special_tokens: bool = True
    prompt_name: PromptName = None
    model: ModelName = None


class DecodeRequest(LenientBody):
    """Token ids to convert to text."""

    ids: TokenIds | ListOf[TokenIds] = Field(examples=[[101, 7592, 102]])
    skip_special_tokens: bool = True
    model: ModelName = None


# Response bodies -------------------------------------------------------------------------------


class Vectors(RootModel[list[list[float]]]):
    """One vector per input."""

    model_config = {"json_schema_extra": {"examples": [[[0.6, 0.8]]]}}


class TokenVectors(RootModel[list[list[list[float]]]]):
    """One vector per token of each input, special tokens included."""

    model_config = {"json_schema_extra": {"examples": [[[[0.1, 0.9], [0.6, 0.8]]]]}}


class SparseValue(BaseModel):
    """A word of the vocabulary, by its number, and its weight."""

    index: int = Field(examples=[1996])
    value: float = Field(examples=[0.83])


class SparseVectors(RootModel[list[list[SparseValue]] | list[dict[str, float]]]):
    """The words of each text that have a weight."""


class Prediction(BaseModel):
    """A label and its score."""

    score: float = Field(examples=[0.98])
    label: str = Field(examples=["POSITIVE"])


class Predictions(RootModel[list[Prediction] | list[list[Prediction]]]):
    """All labels, best first; for a list of inputs, a list of these."""


class Rank(BaseModel):
    """The position of a text in the request, and its score."""

    index: int = Field(examples=[0])
    score: float = Field(examples=[0.93])
    text: str | None = Field(default=None, description="Only if `return_text` is set.")


class RerankResponse(RootModel[list[Rank]]):
    """The texts, best first."""


class Similarities(RootModel[list[float]]):
    """The cosine similarity of each sentence with the source sentence."""

    model_config = {"json_schema_extra": {"examples": [[0.71, 0.12]]}}


class Token(BaseModel):
    """A token and its offsets in the text, in code points."""

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


class TokenizeResponse(RootModel[list[list[Token]]]):
    """The tokens of each text."""


class Decoded(RootModel[list[str]]):
    """One text per list of ids."""


class EmbeddingModel(BaseModel):
    """How the vectors of tokens are pooled."""

    pooling: str = Field(examples=["mean"])


class ClassifierModel(BaseModel):
    """The labels of a classifier."""

    id2label: dict[str, str]
    label2id: dict[str, int]


class ModelType(BaseModel):
    """The kind of model; one of these, or none."""

    embedding: EmbeddingModel | None = None
    classifier: ClassifierModel | None = None
    reranker: ClassifierModel | None = None


class FingerprintParts(BaseModel):
    """What decides the vectors of a model, part by part."""

    weights: str = Field(examples=["b1d6a4fd0dcb5a4c"])
    config: str = Field(examples=["2f0c3f3d6a3a5a3e"])
    tokenizer: str = Field(examples=["6a2d0b1be2d2a7c4"])
    max_length: int
    pooling: str = Field(examples=["mean, normalize"])
    prompt: str = Field(description="The text of the default prompt.")
    dtype: str = Field(examples=["fp32"])
    version: str = Field(description="Packhorse's minor version.", examples=["0.1"])


class ModelSummary(BaseModel):
    """One of the served models."""

    name: str
    tasks: list[str] = Field(examples=[["embed", "hidden"]])
    max_input_length: int
    dtype: str
    device: str
    kernel: str
    prompts: list[str]
    fingerprint: str = Field(
        description="Equal for models that give the same vectors; of texts with the default "
        "prompt. Answers have that of their own prompt in the header x-packhorse-fingerprint.",
        examples=["0a1b2c3d4e5f6071"],
    )
    fingerprint_parts: FingerprintParts


class Info(BaseModel):
    """The default model and the limits, as text-embeddings-inference names them; all models."""

    model_id: str = Field(examples=["all-MiniLM-L6-v2"])
    model_sha: str | None
    model_dtype: str = Field(examples=["float32"])
    model_type: ModelType
    max_concurrent_requests: int
    max_input_length: int
    max_batch_tokens: int
    max_batch_requests: int | None
    max_client_batch_size: int
    auto_truncate: bool = Field(description="Whether these routes truncate by default.")
    tokenization_workers: int
    version: str
    sha: str | None
    docker_label: str | None
    models: list[ModelSummary]


# Routes ----------------------------------------------------------------------------------------

Post = Callable[..., Callable[..., Any]]  # the decorator that `post_routes` returns


def add(app: FastAPI, models: ServedModels, settings: ServeSettings) -> None:
    """Add the routes."""
    tags: Any = ["Text Embeddings Inference"]
    post = post_routes(app, tags[0], TeiError)
    _add_vectors(post, models)
    _add_scores(post, models)
    _add_tokens(post, models, settings)

    info_errors = error_responses(TeiError, GET_STATUSES)

    @app.get("/info", response_model=Info, tags=tags, responses=info_errors)
    async def info() -> Response:
        """The served models and the limits."""
        return json_response(describe_server(models, settings))


def _add_vectors(post: Post, models: ServedModels) -> None:
    @post("/embed", response_model=Vectors)
    async def embed(request: Request, body: EmbedRequest) -> Response:
        """One vector per input; 424 if no model makes vectors."""
        start = perf_counter()
        model = models.find(body.model, "embed")
        texts = as_batch(body.inputs)
        truncation = _truncation(body.truncate, body.truncation_direction, body.long)
        result = await tasks.embed(
            request,
            model,
            texts,
            truncation,
            normalize=body.normalize,
            dimensions=body.dimensions,
            prompt=body.prompt_name,
        )
        return timed_response(result.values, result, model, texts, start)

    @post("/embed_all", response_model=TokenVectors)
    async def embed_all(request: Request, body: EmbedAllRequest) -> Response:
        """One vector per token of each input, before pooling."""
        start = perf_counter()
        model = models.find(body.model, "hidden")
        texts = as_batch(body.inputs)
        truncation = _truncation(body.truncate, body.truncation_direction)
        result = await run_task(
            request, model, "hidden", texts, truncation, prompt=body.prompt_name
        )
        states = [value.states for value in result.values]
        return timed_response(states, result, model, texts, start)

    @post("/similarity", response_model=Similarities)
    async def similarity(request: Request, body: SimilarityRequest) -> Response:
        """The cosine similarity of each sentence with the source sentence."""
        start = perf_counter()
        model = models.find(body.model, "embed")
        texts = [body.inputs.source_sentence, *body.inputs.sentences]
        result = await similarities(request, model, texts, body.parameters)
        return timed_response(result.values, result, model, texts, start)

    @post("/embed_sparse", response_model=SparseVectors)
    async def embed_sparse(request: Request, body: EmbedSparseRequest) -> Response:
        """The weights of words in each input; 424 if no model makes sparse vectors."""
        start = perf_counter()
        model = models.find(body.model, "sparse")
        texts = as_batch(body.inputs)
        truncation = _truncation(body.truncate, body.truncation_direction)
        result = await run_task(
            request,
            model,
            "sparse",
            texts,
            truncation,
            query=body.input_type == "query",
            prompt=body.prompt_name,
            top_k=body.top_k,
        )
        tokenizer = model.encoder.tokenizer if body.format == "words" else None
        rows = sparse_rows(result.values, tokenizer)
        return timed_response(rows, result, model, texts, start)


def sparse_rows(
    vectors: Sequence[SparseVector], tokenizer: Tokenizer | None
) -> Iterator[list[dict[str, float]] | dict[str, float]]:
    """Yield the fields of `SparseVectors`; with a tokenizer, words instead of their numbers."""
    for vector in vectors:
        weights = vector.weights.tolist()
        if tokenizer is not None:
            yield dict(zip(words(vector, tokenizer), weights, strict=True))
        else:
            pairs = zip(vector.indices.tolist(), weights, strict=True)
            yield [{"index": index, "value": weight} for index, weight in pairs]


def _add_scores(post: Post, models: ServedModels) -> None:
    @post("/predict", response_model=Predictions)
    async def predict(request: Request, body: PredictRequest) -> Response:
        """The labels of each text or pair; 424 if no model classifies."""
        start = perf_counter()
        model = models.find(body.model, "classify")
        texts, is_single = as_sequences(body.inputs)
        truncation = _truncation(body.truncate, body.truncation_direction)
        problem = problem_of(model, body.raw_scores)
        result = await run_task(request, model, "classify", texts, truncation, problem=problem)
        rows = (
            [{"score": score, "label": label} for label, score in value.scores.items()]
            for value in result.values
        )
        return timed_response(next(rows) if is_single else rows, result, model, texts, start)


def _add_tokens(post: Post, models: ServedModels, settings: ServeSettings) -> None:
    @post("/decode", response_model=Decoded)
    async def decode(request: Request, body: DecodeRequest) -> Response:
        """The text of each list of ids."""
        tokenizer = models.find(body.model).encoder.tokenizer
        lists = cast("list[list[int]]", as_batch(body.ids))
        check_inputs(settings, lists)
        return await asyncio.to_thread(
            lambda: json_response(
                [tokenizer.decode(ids, body.skip_special_tokens) for ids in lists]
            )
        )


async def rerank(request: Request, models: ServedModels, body: RerankRequest) -> Response:
    """Answer `/rerank` with `texts`."""
    start = perf_counter()
    model = models.find(body.model, "rerank")
    truncation = _truncation(body.truncate, body.truncation_direction)
    ranked, result = await tasks.rerank(
        request, model, body.query, body.texts, truncation, body.top_n, body.raw_scores
    )
    rows: list[dict[str, Any]] = []
    for rank in ranked:
        row: dict[str, Any] = {"index": rank.index, "score": rank.score}
        if body.return_text or body.return_documents:
            row["text"] = rank.text
        rows.append(row)
    return timed_response(rows, result, model, [body.query, *body.texts], start)


async def tokenize(
    models: ServedModels, settings: ServeSettings, body: TokenizeRequest
) -> Response:
    """Answer `/tokenize` with `inputs`."""
    model = models.find(body.model)
    texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    # The answer has an object for each token, many times its size; so the limit that elsewhere
    # is for one input is here for all of them together.
    if check_inputs(settings, texts) > settings.max_input_characters:
        raise TooLarge(
            f"all texts together have more than {settings.max_input_characters} characters"
        )
    texts = cast("list[str]", prompted(model.encoder, texts, body.prompt_name))
    tokenizer = model.encoder.tokenizer

    def answer() -> Response:
        encodings = tokenizer.encode(texts, NO_LIMIT)
        return json_response(token_rows(tokenizer, encodings, body.add_special_tokens))

    return await asyncio.to_thread(answer)  # the objects of one long text are made at once


def _truncation(truncate: bool | None, direction: str, long: str | None = None) -> Truncation:
    """Combine the fields of a body; theirs has cut by default since 1.9."""
    return Truncation.read(truncate, direction, long, by_default=True)


def as_batch(inputs: str | Sequence[Any]) -> list[TaskInput]:
    """Return a list of inputs; a single text or list of token ids becomes a list of one."""
    if isinstance(inputs, str) or (inputs and isinstance(inputs[0], int)):
        return [inputs]
    if [] in inputs:
        raise Empty("a list of token ids is empty")
    return list(inputs)


def as_sequences(inputs: str | Sequence[Any]) -> tuple[list[TaskInput], bool]:
    """Return texts and pairs, and whether the request has a single one that is not in a list."""
    is_single = isinstance(inputs, str) or isinstance(inputs[:1] and inputs[0], str)
    rows = [[inputs] if isinstance(inputs, str) else inputs] if is_single else inputs
    return [row[0] if len(row) == 1 else (row[0], row[1]) for row in rows], is_single


def problem_of(model: ServedModel, raw: bool) -> str | None:
    """Return how to turn logits into scores; a single logit becomes a probability by itself."""
    if raw:
        return "raw"
    return "multi_label" if len(model.encoder.labels) == 1 else None


async def similarities(
    request: Request,
    model: ServedModel,
    texts: Sequence[str],
    parameters: SimilarityParameters | None,
) -> CallResult:
    """Return the cosine similarities of the first text with the others."""
    if len(texts) < 2:
        raise Empty("there is no sentence to compare with")
    options = parameters or SimilarityParameters()
    truncation = _truncation(options.truncate, options.truncation_direction)
    result = await tasks.embed(
        request, model, texts, truncation, normalize=True, prompt=options.prompt_name
    )
    source, *vectors = result.values
    cosines = [float(np.dot(source, vector)) for vector in vectors]
    return CallResult(cosines, result.tokens, result.pack)


def timed_response(
    document: Any, result: CallResult, model: ServedModel, texts: Sequence[TaskInput], start: float
) -> Response:
    """Return a response with text-embeddings-inference's headers of times and counts."""
    return json_response(document, timing_headers(result, model, texts, start))


def timing_headers(
    result: CallResult, model: ServedModel, texts: Sequence[TaskInput], start: float
) -> dict[str, str]:
    """Return text-embeddings-inference's headers of times and counts."""
    total = (perf_counter() - start) * 1e3
    spent = result.pack.queue_ms + result.pack.compute_ms
    processor = "cpu" if model.encoder.device.type == "cpu" else "gpu"
    return {
        "x-compute-type": f"{processor}+optimized",
        "x-compute-time": f"{total:.0f}",
        "x-compute-characters": str(sum(map(_characters, texts))),
        "x-compute-tokens": str(sum(result.tokens)),
        "x-total-time": f"{total:.0f}",
        # What is neither waiting nor computing is nearly all tokenization.
        "x-tokenization-time": f"{max(0.0, total - spent):.0f}",
        "x-queue-time": f"{result.pack.queue_ms:.0f}",
        "x-inference-time": f"{result.pack.compute_ms:.0f}",
    }


def _characters(text: Any) -> int:
    return sum(map(len, text)) if isinstance(text, tuple) else len(text)


def token_rows(
    tokenizer: Tokenizer, encodings: Sequence[Encoding], add_special_tokens: bool
) -> Iterator[list[dict[str, Any]]]:
    """Yield the tokens of each text, with the fields of `Token`."""
    for encoding in encodings:
        selected = slice(None) if add_special_tokens else encoding.spans[0]
        columns = (encoding.ids[selected], encoding.special[selected], encoding.offsets[selected])
        rows = zip(*(column.tolist() for column in columns), strict=True)
        yield [
            {
                "id": id,
                "text": tokenizer.token(id),
                "special": special,
                "start": None if special else start,
                "stop": None if special else stop,
            }
            for id, special, (start, stop) in rows
        ]


def describe_server(models: ServedModels, settings: ServeSettings) -> dict[str, Any]:
    """Return the document of `/info`."""
    model = models.default
    return {
        "model_id": model.name,
        "model_sha": None,
        "model_dtype": str(model.encoder.dtype).removeprefix("torch."),
        "model_type": _model_type(model),
        "max_concurrent_requests": settings.max_concurrent_requests,
        "max_input_length": model.encoder.max_length,
        "max_batch_tokens": model.runner.shape.tokens,
        "max_batch_requests": None,
        "max_client_batch_size": min(settings.max_batch_inputs, settings.max_queue_inputs),
        "auto_truncate": settings.auto_truncate is not False,
        "tokenization_workers": 1,
        "version": __version__,
        "sha": None,
        "docker_label": None,
        "models": [_summary(model) for model in models],
    }


def _model_type(model: ServedModel) -> dict[str, Any]:
    labels = model.encoder.labels
    if "classify" in model.tasks:
        id2label = {str(i): label for i, label in enumerate(labels)}
        label2id = {label: i for i, label in enumerate(labels)}
        kind = "reranker" if len(labels) == 1 else "classifier"
        return {kind: {"id2label": id2label, "label2id": label2id}}
    if "embed" in model.tasks:
        # An ONNX model that pools by itself has no embedder of ours.
        embedder = model.encoder.embedder
        return {"embedding": {"pooling": "+".join(embedder.pooling) if embedder else "graph"}}
    return {}


def _summary(model: ServedModel) -> dict[str, Any]:
    encoder = model.encoder
    parts = model.fingerprint_parts
    return {
        "name": model.name,
        "tasks": list(model.tasks),
        "max_input_length": encoder.max_length,
        "dtype": device.dtype_name(encoder.dtype),
        "device": str(encoder.device),
        "kernel": encoder.kernel,
        "prompts": sorted(encoder.prompts),
        "fingerprint": str(parts),
        "fingerprint_parts": parts.parts,
    }
