"""Voyage's client: base64 by default, long texts truncated, rankings under `data`."""

# package: voyageai

import voyageai
from harness import inputs, method, run

client = voyageai.Client(api_key="none", base_url=f"{inputs.url}/v1")


@method("Client.embed", "vectors")
def embed() -> list[list[float]]:
    return client.embed(inputs.texts, model="mini").embeddings


@method('Client.embed, input_type="document"', "vectors")
def embed_documents() -> list[list[float]]:
    return client.embed(inputs.texts, model="mini", input_type="document").embeddings


@method("Client.embed, a long text", "long")
def embed_long() -> list[float]:
    return client.embed([inputs.long], model="mini").embeddings[0]


@method("Client.rerank", "ranking")
def rerank() -> list[tuple[int, float]]:
    response = client.rerank(inputs.query, inputs.documents, model="ranker")
    return [(result.index, result.relevance_score) for result in response.results]


@method("Client.rerank, top_k=2", "first_two")
def rerank_best() -> list[tuple[int, float]]:
    response = client.rerank(inputs.query, inputs.documents, model="ranker", top_k=2)
    return [(result.index, result.relevance_score) for result in response.results]


run()
