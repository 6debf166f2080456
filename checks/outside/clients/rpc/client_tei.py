"""The client of text-embeddings-inference that speaks gRPC; each of its calls is a stream.

Its classification and ranking ask `Info` first, and refuse a server whose first model embeds.
"""

# package: tei-client

import asyncio
from typing import Any

from harness import inputs, method, run
from tei_client import GrpcClient

client = GrpcClient(inputs.grpc_address)


@method("GrpcClient.embed", "vectors")
def embed() -> list[list[float]]:
    return [list(vector) for vector in client.embed(inputs.texts)]


@method("GrpcClient.embed, truncate=True", "long")
def embed_long() -> list[float]:
    return list(client.embed(inputs.long, truncate=True)[0])


@method("GrpcClient.embed, normalize=False", "raw_vectors")
def embed_raw() -> list[list[float]]:
    return [list(vector) for vector in client.embed(inputs.texts, normalize=False)]


@method("GrpcClient.async_embed", "vectors")
def embed_in_asyncio() -> list[list[float]]:
    async def embed() -> Any:
        return await GrpcClient(inputs.grpc_address).async_embed(inputs.texts)

    return [list(vector) for vector in asyncio.run(embed())]


@method("GrpcClient.embed_all", "states")
def embed_tokens() -> list[list[float]]:
    return [list(vector) for vector in client.embed_all(inputs.texts[0])[0]]


@method("GrpcClient.tokenize", "tokens")
def tokenize() -> list[int]:
    return [token.id for token in client.tokenize(inputs.texts[0])[0].tokens]


@method("GrpcClient.decode", "decoded")
def decode() -> Any:
    tokens = client.tokenize(inputs.texts[0])[0].tokens
    return client.decode([token.id for token in tokens])


@method("GrpcClient.info", "model")
def info() -> str:
    return client.info().server_model_id


run()
