"""The methods of text-embeddings-inference's services: a request message to a response message.

A method does what the HTTP route of its name does (`dialects.tei`), for one text. A message cannot
name a model, so with several models the first that has the task answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, cast

from starlette.requests import Request

from packhorse.errors import InputError
from packhorse.runtime.tasks import TaskInput, prompted
from packhorse.serve.calls import CallResult, check_inputs
from packhorse.serve.dialects import tasks, tei
from packhorse.serve.dialects.tasks import Truncation, run_task
from packhorse.serve.failures import Empty
from packhorse.serve.hosting import ServedModels
from packhorse.serve.pack_info import PackInfo
from packhorse.serve.settings import ServeSettings
from packhorse.tokens.tokenizer import NO_LIMIT

DIRECTIONS = {0: "Right", 1: "Left"}
MODEL_TYPES = {"embedding": 0, "classifier": 1, "reranker": 2}


@dataclass(frozen=True, slots=True)
class RpcCall:
    """A call while it is answered, and what its method needs."""

    request: Request  # what `calls.call` reads of a request
    models: ServedModels
    settings: ServeSettings
    messages: Mapping[str, Any]  # message classes by full name
    headers: dict[str, str]  # initial metadata of the response; methods add to it

    def make(self, name: str, **fields: Any) -> Any:
        """Return a message of this name."""
        return self.messages[f"tei.v1.{name}"](**fields)


Method = Callable[[RpcCall, Any], Awaitable[Any]]


async def info(call: RpcCall, message: Any) -> Any:
    """The default model and the limits."""
    document = tei.describe_server(call.models, call.settings)
    kind = next(iter(document.pop("model_type")), "embedding")
    names = [field.name for field in call.messages["tei.v1.InfoResponse"].DESCRIPTOR.fields]
    fields = {name: document[name] for name in names if document.get(name) is not None}
    return call.make("InfoResponse", model_type=MODEL_TYPES[kind], **fields)


async def embed(call: RpcCall, message: Any) -> Any:
    """The vector of a text."""
    start = perf_counter()
    model = call.models.find(None, "embed")
    dimensions = _optional(message, "dimensions")
    if dimensions == 0:
        raise InputError("dimensions is 0; a vector has at least one number")
    normalize = _optional(message, "normalize")
    result = await tasks.embed(
        call.request,
        model,
        [message.inputs],
        _truncation(message),
        normalize=True if normalize is None else normalize,
        dimensions=dimensions,
        prompt=_optional(message, "prompt_name"),
    )
    (vector,) = result.values
    metadata = _metadata(call, result, [message.inputs], start)
    return call.make("EmbedResponse", embeddings=vector.tolist(), metadata=metadata)


async def embed_all(call: RpcCall, message: Any) -> Any:
    """The vectors of all tokens of a text."""
    start = perf_counter()
    model = call.models.find(None, "hidden")
    prompt = _optional(message, "prompt_name")
    truncation = _truncation(message)
    result = await run_task(
        call.request, model, "hidden", [message.inputs], truncation, prompt=prompt
    )
    metadata = _metadata(call, result, [message.inputs], start)
    states = result.values[0].states

    def build() -> Any:
        rows = [call.make("TokenEmbedding", embeddings=row) for row in states.tolist()]
        return call.make("EmbedAllResponse", token_embeddings=rows, metadata=metadata)

    return await asyncio.to_thread(build)  # hundreds of thousands of numbers


async def embed_sparse(call: RpcCall, message: Any) -> Any:
    """The weights of words in a text."""
    start = perf_counter()
    model = call.models.find(None, "sparse")
    prompt = _optional(message, "prompt_name")
    truncation = _truncation(message)
    result = await run_task(
        call.request, model, "sparse", [message.inputs], truncation, prompt=prompt
    )
    metadata = _metadata(call, result, [message.inputs], start)
    vector = result.values[0]
    values = [
        call.make("SparseValue", index=index, value=value)
        for index, value in zip(vector.indices.tolist(), vector.weights.tolist(), strict=True)
    ]
    return call.make("EmbedSparseResponse", sparse_embeddings=values, metadata=metadata)


async def predict(call: RpcCall, message: Any) -> Any:
    """The labels of a text."""
    return await _predict(call, message, message.inputs)


async def predict_pair(call: RpcCall, message: Any) -> Any:
    """The labels of a pair, or of a single text in a list."""
    if len(message.inputs) == 1:
        return await _predict(call, message, message.inputs[0])
    if len(message.inputs) != 2:
        raise InputError(f"inputs has {len(message.inputs)} texts; send one, or the two of a pair")
    return await _predict(call, message, (message.inputs[0], message.inputs[1]))


async def _predict(call: RpcCall, message: Any, text: TaskInput) -> Any:
    start = perf_counter()
    model = call.models.find(None, "classify")
    problem = tei.problem_of(model, message.raw_scores)
    truncation = _truncation(message)
    result = await run_task(call.request, model, "classify", [text], truncation, problem=problem)
    predictions = [
        call.make("Prediction", score=score, label=label)
        for label, score in result.values[0].scores.items()
    ]
    metadata = _metadata(call, result, [text], start)
    return call.make("PredictResponse", predictions=predictions, metadata=metadata)


async def rerank(call: RpcCall, message: Any) -> Any:
    """Texts, ranked by how well they answer a query."""
    start = perf_counter()
    model = call.models.find(None, "rerank")
    texts = list(message.texts)
    truncation = _truncation(message)
    ranked, result = await tasks.rerank(
        call.request, model, message.query, texts, truncation, raw=message.raw_scores
    )
    ranks = [
        call.make(
            "Rank",
            index=rank.index,
            score=rank.score,
            text=rank.text if message.return_text else None,
        )
        for rank in ranked
    ]
    metadata = _metadata(call, result, [message.query, *texts], start)
    return call.make("RerankResponse", ranks=ranks, metadata=metadata)


async def rerank_stream(call: RpcCall, messages: Sequence[Any]) -> Any:
    """The texts of a whole stream, ranked; each message has a query and truncation of its own."""
    start = perf_counter()
    model = call.models.find(None, "rerank")
    if not messages:
        raise Empty("the stream has no text to rank")
    problem = tei.problem_of(model, messages[0].raw_scores)
    pairs: list[TaskInput] = [(message.query, message.text) for message in messages]
    check_inputs(call.settings, pairs)
    by_truncation: dict[Truncation, list[int]] = {}
    for index, message in enumerate(messages):
        by_truncation.setdefault(_truncation(message), []).append(index)
    scores: dict[int, float] = {}
    tokens: list[int] = []
    pack = PackInfo()
    for truncation, indices in by_truncation.items():
        texts = [pairs[index] for index in indices]
        result = await run_task(call.request, model, "classify", texts, truncation, problem=problem)
        scores |= {i: value.score for i, value in zip(indices, result.values, strict=True)}
        tokens += result.tokens
        pack = result.pack
    ranks = [
        call.make(
            "Rank",
            index=index,
            score=scores[index],
            text=messages[index].text if messages[0].return_text else None,
        )
        for index in sorted(scores, key=lambda index: (-scores[index], index))
    ]
    metadata = _metadata(call, CallResult([], tokens, pack), pairs, start)
    return call.make("RerankResponse", ranks=ranks, metadata=metadata)


async def tokenize(call: RpcCall, message: Any) -> Any:
    """The tokens of a text, never truncated."""
    model = call.models.find()
    check_inputs(call.settings, [message.inputs])
    prompt = _optional(message, "prompt_name")
    texts = cast("list[str]", prompted(model.encoder, [message.inputs], prompt))

    def build() -> Any:
        tokenizer = model.encoder.tokenizer
        encodings = tokenizer.encode(texts, NO_LIMIT)
        (rows,) = tei.token_rows(tokenizer, encodings, message.add_special_tokens)
        tokens = [call.make("SimpleToken", **row) for row in rows]
        return call.make("EncodeResponse", tokens=tokens)

    return await asyncio.to_thread(build)


async def decode(call: RpcCall, message: Any) -> Any:
    """The text of a list of token ids."""
    tokenizer = call.models.find().encoder.tokenizer
    ids = list(message.ids)
    check_inputs(call.settings, tei.as_batch(ids))
    text = await asyncio.to_thread(tokenizer.decode, ids, message.skip_special_tokens)
    return call.make("DecodeResponse", text=text)


# By service and name, as in tei.proto. The method of a stream is called with each message of it,
# that of a stream with a single answer (RerankStream) with a list of them all.
METHODS: dict[str, Method] = {
    "Info/Info": info,
    "Embed/Embed": embed,
    "Embed/EmbedStream": embed,
    "Embed/EmbedSparse": embed_sparse,
    "Embed/EmbedSparseStream": embed_sparse,
    "Embed/EmbedAll": embed_all,
    "Embed/EmbedAllStream": embed_all,
    "Predict/Predict": predict,
    "Predict/PredictPair": predict_pair,
    "Predict/PredictStream": predict,
    "Predict/PredictPairStream": predict_pair,
    "Rerank/Rerank": rerank,
    "Rerank/RerankStream": rerank_stream,
    "Tokenize/Tokenize": tokenize,
    "Tokenize/TokenizeStream": tokenize,
    "Tokenize/Decode": decode,
    "Tokenize/DecodeStream": decode,
}


def _optional(message: Any, field: str) -> Any:
    """Return a field with presence, or None if it is not set."""
    return getattr(message, field) if message.HasField(field) else None


def _truncation(message: Any) -> Truncation:
    direction = DIRECTIONS.get(message.truncation_direction)
    if direction is None:
        raise InputError(
            f"truncation_direction is {message.truncation_direction}; "
            "it must be 0 (right) or 1 (left)"
        )
    # A field without presence: false may mean that the client said nothing.
    return Truncation.read(message.truncate or None, direction)


def _metadata(call: RpcCall, result: CallResult, texts: Sequence[TaskInput], start: float) -> Any:
    """Return the message of times and counts; the same goes into the response's headers."""
    model = call.request.scope["packhorse"].model
    call.headers.update(tei.timing_headers(result, model, texts, start))
    total = round((perf_counter() - start) * 1e9)
    queue = round(result.pack.queue_ms * 1e6)
    inference = round(result.pack.compute_ms * 1e6)
    return call.make(
        "Metadata",
        compute_chars=int(call.headers["x-compute-characters"]),
        compute_tokens=sum(result.tokens),
        total_time_ns=total,
        tokenization_time_ns=max(0, total - queue - inference),
        queue_time_ns=queue,
        inference_time_ns=inference,
    )
