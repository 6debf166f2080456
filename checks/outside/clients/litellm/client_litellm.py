"""LiteLLM, by the providers whose APIs the server has."""

# package: litellm

import asyncio
from typing import Any

import litellm
from harness import inputs, method, run


def vectors(response: Any) -> list[list[float]]:
    return [row["embedding"] for row in response.data]


def ranking(response: Any) -> list[tuple[int, float]]:
    return [(result["index"], result["relevance_score"]) for result in response.results]


def embed(model: str, path: str, **options: Any) -> list[list[float]]:
    response = litellm.embedding(
        model=model, input=inputs.texts, api_base=inputs.url + path, api_key="none", **options
    )
    return vectors(response)


def rerank(model: str, path: str, **options: Any) -> list[tuple[int, float]]:
    response = litellm.rerank(
        model=model,
        query=inputs.query,
        documents=inputs.documents,
        api_base=inputs.url + path,
        api_key="none",
        **options,
    )
    return ranking(response)


@method("embedding, openai/", "vectors")
def openai() -> list[list[float]]:
    return embed("openai/mini", "/v1")


@method("embedding, openai/, 2,048 texts", "many")
def openai_many() -> list[list[float]]:
    response = litellm.embedding(
        model="openai/mini", input=inputs.many, api_base=f"{inputs.url}/v1", api_key="none"
    )
    return vectors(response)


@method("aembedding, openai/", "vectors")
def openai_in_asyncio() -> list[list[float]]:
    response = litellm.aembedding(
        model="openai/mini", input=inputs.texts, api_base=f"{inputs.url}/v1", api_key="none"
    )
    return vectors(asyncio.run(response))


@method("embedding, hosted_vllm/", "vectors")
def hosted_vllm() -> list[list[float]]:
    return embed("hosted_vllm/mini", "/v1")


@method("embedding, cohere/", "vectors")
def cohere() -> list[list[float]]:
    return embed("cohere/mini", "/v2/embed")


@method("embedding, infinity/", "vectors")
def infinity() -> list[list[float]]:
    return embed("infinity/mini", "")


@method("embedding, jina_ai/", "vectors")
def jina_ai() -> list[list[float]]:
    return embed("jina_ai/mini", "/v1")


@method("embedding, voyage/", "vectors")
def voyage() -> list[list[float]]:
    return embed("voyage/mini", "/v1")


@method("embedding, huggingface/", "vectors")
def huggingface() -> list[list[float]]:
    return embed("huggingface/mini", "/models/mini", input_type="embed")


@method("rerank, cohere/", "ranking")
def rerank_cohere() -> list[tuple[int, float]]:
    return rerank("cohere/ranker", "")


@method("rerank, infinity/", "ranking")
def rerank_infinity() -> list[tuple[int, float]]:
    return rerank("infinity/ranker", "")


@method("rerank, infinity/, return_documents=False", "ranking")
def rerank_infinity_without_documents() -> list[tuple[int, float]]:
    return rerank("infinity/ranker", "", return_documents=False)


@method("rerank, hosted_vllm/", "ranking")
def rerank_hosted_vllm() -> list[tuple[int, float]]:
    return rerank("hosted_vllm/ranker", "")


@method("rerank, jina_ai/", "ranking")
def rerank_jina_ai() -> list[tuple[int, float]]:
    return rerank("jina_ai/ranker", "/v1/rerank")


@method("rerank, voyage/", "ranking")
def rerank_voyage() -> list[tuple[int, float]]:
    return rerank("voyage/ranker", "/v1")


@method("rerank, voyage/, top_n=2", "first_two")
def rerank_voyage_best() -> list[tuple[int, float]]:
    return rerank("voyage/ranker", "/v1", top_n=2)


run()
