"""A client of text-embeddings-inference: its HTTP routes, and the model that `/info` describes."""

# package: tei-client

import asyncio
from typing import Any

from harness import inputs, method, run
from tei_client import HttpClient

client = HttpClient(inputs.url)


@method("HttpClient.embed", "vectors")
def embed() -> list[list[float]]:
    return client.embed(inputs.texts)


@method("HttpClient.embed, truncate=True", "long")
def embed_long() -> list[float]:
    return client.embed(inputs.long, truncate=True)[0]


@method("HttpClient.async_embed", "vectors")
def embed_in_asyncio() -> list[list[float]]:
    return asyncio.run(HttpClient(inputs.url).async_embed(inputs.texts))


@method("HttpClient.tokenize", "tokens")
def tokenize() -> list[int]:
    result: Any = client.tokenize(inputs.texts[0])
    return [token.id for token in result[0].tokens]


@method("HttpClient.info", "model")
def info() -> str:
    return client.info().server_model_id


run()
