"""Infinity's generated client; without a model it sends "default/not-specified"."""

# package: infinity_client

from typing import Any

from harness import inputs, method, run
from infinity_client import Client
from infinity_client.api.default import classify, embeddings, health, models, rerank
from infinity_client.models import ClassifyInput, OpenAIEmbeddingInputText, RerankInput

client = Client(base_url=inputs.url, raise_on_unexpected_status=True)


@method("embeddings.sync", "vectors")
def embed() -> list[list[float]]:
    body = OpenAIEmbeddingInputText.from_dict({"input": inputs.texts, "model": "mini"})
    return vectors(embeddings.sync(client=client, body=body))


@method("embeddings.sync, all fields by default", "vectors")
def embed_by_default() -> list[list[float]]:
    body = OpenAIEmbeddingInputText(input_=inputs.texts)
    return vectors(embeddings.sync(client=client, body=body))


def vectors(result: Any) -> list[list[float]]:
    return [row.embedding for row in result.data]


@method("rerank.sync", "ranking")
def rank() -> list[tuple[int, float]]:
    body = RerankInput(query=inputs.query, documents=inputs.documents, model="ranker")
    result: Any = rerank.sync(client=client, body=body)
    return [(rank.index, rank.relevance_score) for rank in result.results]


@method("classify.sync", "labels")
def label() -> dict[str, float]:
    body = ClassifyInput(input_=[inputs.statement], model="judge")
    result: Any = classify.sync(client=client, body=body)
    return {row.label: row.score for row in result.data[0]}


@method("models.sync", "models")
def names() -> list[str]:
    result: Any = models.sync(client=client)
    return [model.id for model in result.data]


@method("health.sync", "health")
def healthy() -> bool:
    return "unix" in health.sync(client=client).additional_properties


run()
