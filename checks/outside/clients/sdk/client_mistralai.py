"""Mistral's client, whose embeddings have OpenAI's route."""

# package: mistralai

from harness import inputs, method, run
from mistralai.client import Mistral

client = Mistral(api_key="none", server_url=inputs.url)


@method("embeddings.create", "vectors")
def create() -> list[list[float]]:
    response = client.embeddings.create(model="mini", inputs=inputs.texts)
    return [row.embedding for row in response.data]


@method("embeddings.create, 2,048 texts", "many")
def create_many() -> list[list[float]]:
    response = client.embeddings.create(model="mini", inputs=inputs.many)
    return [row.embedding for row in response.data]


run()
