"""OpenAI's client: vectors as base64 by default, up to 2,048 texts a request, none of them cut."""

# package: openai

import asyncio

from harness import inputs, method, run
from openai import AsyncOpenAI, OpenAI

client = OpenAI(base_url=f"{inputs.url}/v1", api_key="none")


@method("embeddings.create", "vectors")
def create() -> list[list[float]]:
    response = client.embeddings.create(model="mini", input=inputs.texts)
    return [row.embedding for row in response.data]


@method("embeddings.create, one text", "vector")
def create_one() -> list[float]:
    return client.embeddings.create(model="mini", input=inputs.texts[0]).data[0].embedding


@method("embeddings.create, 2,048 texts", "many")
def create_many() -> list[list[float]]:
    response = client.embeddings.create(model="mini", input=inputs.many)
    return [row.embedding for row in response.data]


@method("embeddings.create, a long text", "long")
def create_long() -> list[float]:
    return client.embeddings.create(model="mini", input=inputs.long).data[0].embedding


@method('embeddings.create, encoding_format="float"', "vectors")
def create_floats() -> list[list[float]]:
    response = client.embeddings.create(model="mini", input=inputs.texts, encoding_format="float")
    return [row.embedding for row in response.data]


@method("embeddings.create, dimensions=64", "short vectors")
def create_short() -> list[list[float]]:
    response = client.embeddings.create(model="mini", input=inputs.texts, dimensions=64)
    return [row.embedding for row in response.data]


@method("AsyncOpenAI.embeddings.create", "vectors")
def create_in_asyncio() -> list[list[float]]:
    async def ask() -> list[list[float]]:
        async with AsyncOpenAI(base_url=f"{inputs.url}/v1", api_key="none") as client:
            response = await client.embeddings.create(model="mini", input=inputs.texts)
        return [row.embedding for row in response.data]

    return asyncio.run(ask())


@method("models.list", "models")
def models() -> list[str]:
    return [model.id for model in client.models.list()]


run()
