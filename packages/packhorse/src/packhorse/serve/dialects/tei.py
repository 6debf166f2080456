"""text-embeddings-inference's routes: embed, classify, rerank, compare, tokenize, and tell.

Follows its OpenAPI description (1.7): bodies, answers, response headers, kinds of errors, and that
a text with more tokens than the model takes is refused (413) unless `truncate` is set. A single
input of `/embed` is answered with a list of one, one of `/predict` without a list. Added: `model`
chooses among several, `long: "chunk"` reads a long text in parts, pairs may be of any two lengths.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, cast

import numpy as np
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from packhorse import __version__, device
from packhorse.errors import CheckpointError
from packhorse.runtime.tasks import TaskInput, prompted
from packhorse.serve.calls import Outcome, check_inputs, reply
from packhorse.serve.dialects import tei_shapes as shapes
from packhorse.serve.dialects.asking import Cut, ask, ranking, vectors
from packhorse.serve.dialects.fields import poster
from packhorse.serve.dialects.shapes import READING, TeiError, refusals
from packhorse.serve.failures import Empty, TooLarge
from packhorse.serve.hosting import Hosted, Hosts
from packhorse.serve.settings import Settings
from packhorse.tokens import NO_LIMIT, Tokenizer

Post = Callable[..., Callable[..., Any]]  # FastAPI's decorator, with what all of these routes share


def add(app: FastAPI, hosts: Hosts, settings: Settings) -> None:
    """Add the routes."""
    tags: Any = ["Text Embeddings Inference"]
    post = poster(app, tags[0], TeiError)
    _add_vectors(post, hosts)
    _add_scores(post, hosts)
    _add_tokens(post, hosts, settings)

    @app.get("/info", response_model=shapes.Info, tags=tags, responses=refusals(TeiError, READING))
    async def info() -> Response:
        """What is served, and within which limits."""
        return reply(about(hosts, settings))


def _add_vectors(post: Post, hosts: Hosts) -> None:
    @post("/embed", response_model=shapes.Vectors)
    async def embed(request: Request, body: shapes.EmbedRequest) -> Response:
        """A vector an input; 424 where no model makes vectors."""
        start, host, texts = perf_counter(), hosts.find(body.model, "embed"), batch(body.inputs)
        cut = Cut.read(body.truncate, body.truncation_direction, body.long)
        how = {"normalise": body.normalize, "dimensions": body.dimensions}
        found = await vectors(request, host, texts, cut, prompt=body.prompt_name, **how)
        return timed(found.values, found, host, texts, start)

    @post("/embed_all", response_model=shapes.TokenVectors)
    async def embed_all(request: Request, body: shapes.EmbedAllRequest) -> Response:
        """A vector for each token of each input, before pooling."""
        start, host, texts = perf_counter(), hosts.find(body.model, "hidden"), batch(body.inputs)
        cut = Cut.read(body.truncate, body.truncation_direction)
        found = await ask(request, host, "hidden", texts, cut, prompt=body.prompt_name)
        return timed([each.states for each in found.values], found, host, texts, start)

    @post("/similarity", response_model=shapes.Similarities)
    async def similarity(request: Request, body: shapes.SimilarityRequest) -> Response:
        """The cosine of each sentence with the source."""
        start, host = perf_counter(), hosts.find(body.model, "embed")
        texts = [body.inputs.source_sentence, *body.inputs.sentences]
        found = await similarities(request, host, texts, body.parameters)
        return timed(found.values, found, host, texts, start)

    @post("/embed_sparse", response_model=shapes.Vectors)
    async def embed_sparse(request: Request, body: shapes.EmbedAllRequest) -> Response:
        """Always 424: no model here has a SPLADE head."""
        host = hosts.find(body.model)
        raise CheckpointError(
            f"{host.name} makes no sparse vectors; it can be asked for: {', '.join(host.tasks)}"
        )


def _add_scores(post: Post, hosts: Hosts) -> None:
    @post("/predict", response_model=shapes.Predictions)
    async def predict(request: Request, body: shapes.PredictRequest) -> Response:
        """The labels of each text or pair; 424 where no model classifies."""
        start, host = perf_counter(), hosts.find(body.model, "classify")
        texts, single = sequences(body.inputs)
        cut = Cut.read(body.truncate, body.truncation_direction)
        problem = problem_of(host, body.raw_scores)
        found = await ask(request, host, "classify", texts, cut, problem=problem)
        rows = [
            [{"score": score, "label": label} for label, score in each.scores.items()]
            for each in found.values
        ]
        return timed(rows[0] if single else rows, found, host, texts, start)

    @post("/rerank", response_model=shapes.Ranks, response_model_exclude_none=True)
    async def rerank(request: Request, body: shapes.RerankRequest) -> Response:
        """The texts, best first; 424 where no model is a cross-encoder of one score."""
        start, host = perf_counter(), hosts.find(body.model, "rerank")
        cut = Cut.read(body.truncate, body.truncation_direction)
        raw = body.raw_scores
        ranked, found = await ranking(
            request, host, body.query, body.texts, cut, top=body.top_n, raw=raw
        )
        with_text = body.return_text or body.return_documents
        rows = [
            {"index": each.index, "score": each.score} | ({"text": each.text} if with_text else {})
            for each in ranked
        ]
        return timed(rows, found, host, [body.query, *body.texts], start)


def _add_tokens(post: Post, hosts: Hosts, settings: Settings) -> None:
    @post("/tokenize", response_model=shapes.Tokens)
    async def tokenize(request: Request, body: shapes.TokenizeRequest) -> Response:
        """The tokens of each text; none is cut."""
        host = hosts.find(body.model)
        texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
        if check_inputs(settings, texts) > settings.max_input_characters:
            raise TooLarge(
                f"all texts together have over {settings.max_input_characters} characters"
            )
        texts = cast("list[str]", prompted(host.encoder, texts, body.prompt_name))
        return await asyncio.to_thread(_tokens, host.encoder.tokenizer, texts, body)

    @post("/decode", response_model=shapes.Decoded)
    async def decode(request: Request, body: shapes.DecodeRequest) -> Response:
        """The text of each list of ids."""
        tokenizer = hosts.find(body.model).encoder.tokenizer
        many = cast("list[list[int]]", batch(body.ids))
        check_inputs(settings, many)
        return await asyncio.to_thread(
            lambda: reply([tokenizer.decode(ids, body.skip_special_tokens) for ids in many])
        )


def batch(inputs: str | Sequence[Any]) -> list[TaskInput]:
    """A single input is a batch of one; so is a list of token ids."""
    if isinstance(inputs, str) or (inputs and isinstance(inputs[0], int)):
        return [inputs]
    if [] in inputs:
        raise Empty("a list of token ids is empty")
    return list(inputs)


def sequences(inputs: str | Sequence[Any]) -> tuple[list[TaskInput], bool]:
    """Texts and pairs; and was there one that is no list of one?"""
    single = isinstance(inputs, str) or isinstance(inputs[:1] and inputs[0], str)
    rows = [[inputs] if isinstance(inputs, str) else inputs] if single else inputs
    return [row[0] if len(row) == 1 else (row[0], row[1]) for row in rows], single


def problem_of(host: Hosted, raw: bool) -> str | None:
    """What to make of logits: one of its own is a probability for itself."""
    if raw:
        return "raw"
    return "multi_label" if len(host.encoder.labels) == 1 else None


async def similarities(
    request: Request,
    host: Hosted,
    texts: Sequence[str],
    parameters: shapes.SimilarityParameters | None,
) -> Outcome:
    """Cosines of the first text with the others."""
    if len(texts) < 2:
        raise Empty("there is no sentence to compare with")
    how = parameters or shapes.SimilarityParameters()
    cut = Cut.read(how.truncate, how.truncation_direction)
    found = await vectors(request, host, texts, cut, normalise=True, prompt=how.prompt_name)
    first, *others = found.values
    return Outcome([float(np.dot(first, each)) for each in others], found.tokens, found.pack)


def timed(
    document: Any, found: Outcome, host: Hosted, texts: Sequence[TaskInput], start: float
) -> Response:
    """The answer, with the times and counts that text-embeddings-inference tells in headers."""
    total = (perf_counter() - start) * 1e3
    spent = found.pack.queue_ms + found.pack.compute_ms
    where = "cpu" if host.encoder.device.type == "cpu" else "gpu"
    headers = {
        "x-compute-type": f"{where}+optimized",
        "x-compute-time": f"{total:.0f}",
        "x-compute-characters": str(sum(map(_characters, texts))),
        "x-compute-tokens": str(sum(found.tokens)),
        "x-total-time": f"{total:.0f}",
        # What is neither waiting nor computing is nearly all tokenization.
        "x-tokenization-time": f"{max(0.0, total - spent):.0f}",
        "x-queue-time": f"{found.pack.queue_ms:.0f}",
        "x-inference-time": f"{found.pack.compute_ms:.0f}",
    }
    return reply(document, headers)


def _characters(text: Any) -> int:
    return sum(map(len, text)) if isinstance(text, tuple) else len(text)


def _tokens(tokenizer: Tokenizer, texts: Sequence[str], body: shapes.TokenizeRequest) -> Response:
    """Written down in the thread that makes them: a token is a small object, and there are many."""
    found = []
    for encoding in tokenizer.encode(texts, NO_LIMIT):
        keep = slice(None) if body.add_special_tokens else encoding.spans[0]
        columns = encoding.ids[keep], encoding.special[keep], encoding.offsets[keep]
        found.append(
            [
                {
                    "id": id,
                    "text": tokenizer.token(id),
                    "special": special,
                    "start": None if special else start,
                    "stop": None if special else stop,
                }
                for id, special, (start, stop) in zip(*(c.tolist() for c in columns), strict=True)
            ]
        )
    return reply(found)


def about(hosts: Hosts, settings: Settings) -> dict[str, Any]:
    """The document of `/info`."""
    host = hosts.default
    return {
        "model_id": host.name,
        "model_sha": None,
        "model_dtype": str(host.encoder.dtype).removeprefix("torch."),
        "model_type": _kind(host),
        "max_concurrent_requests": settings.max_concurrent_requests,
        "max_input_length": host.encoder.max_length,
        "max_batch_tokens": host.runner.shape.tokens,
        "max_batch_requests": None,
        "max_client_batch_size": settings.max_batch_inputs,
        "auto_truncate": False,
        "tokenization_workers": 1,
        "version": __version__,
        "sha": None,
        "docker_label": None,
        "models": [_served(each) for each in hosts],
    }


def _kind(host: Hosted) -> dict[str, Any]:
    labels = host.encoder.labels
    if "classify" in host.tasks:
        names = {str(i): label for i, label in enumerate(labels)}
        ids = {label: i for i, label in enumerate(labels)}
        kind = "reranker" if len(labels) == 1 else "classifier"
        return {kind: {"id2label": names, "label2id": ids}}
    if "embed" in host.tasks:
        made = host.encoder.embedder
        return {"embedding": {"pooling": "+".join(made.pooling) if made else "graph"}}
    return {}


def _served(host: Hosted) -> dict[str, Any]:
    encoder = host.encoder
    return {
        "name": host.name,
        "tasks": list(host.tasks),
        "max_input_length": encoder.max_length,
        "dtype": device.dtype_name(encoder.dtype),
        "device": str(encoder.device),
        "kernel": encoder.kernel,
        "prompts": sorted(encoder.prompts),
    }
