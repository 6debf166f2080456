"""Cohere's client, both versions: texts are sent 96 at a time, documents as they are."""

# package: cohere

import asyncio

import cohere
from harness import inputs, method, run

v1 = cohere.Client(api_key="none", base_url=inputs.url)
v2 = cohere.ClientV2(api_key="none", base_url=inputs.url)


@method("Client.embed", "vectors")
def embed() -> list[list[float]]:
    return v1.embed(model="mini", texts=inputs.texts, input_type="search_document").embeddings


@method("Client.embed, 2,048 texts", "many")
def embed_many() -> list[list[float]]:
    return v1.embed(model="mini", texts=inputs.many, input_type="search_document").embeddings


@method("Client.embed, a long text", "long")
def embed_long() -> list[float]:
    return v1.embed(model="mini", texts=[inputs.long], input_type="search_query").embeddings[0]


@method("Client.rerank", "ranking")
def rerank() -> list[tuple[int, float]]:
    response = v1.rerank(model="ranker", query=inputs.query, documents=inputs.documents)
    return [(result.index, result.relevance_score) for result in response.results]


@method("Client.classify", "labels")
def classify() -> dict[str, float]:
    response = v1.classify(model="judge", inputs=[inputs.statement])
    labels = response.classifications[0].labels
    return {name: label.confidence for name, label in labels.items()}


@method("Client.tokenize", "tokens of the text")
def tokenize() -> list[int]:
    return v1.tokenize(model="mini", text=inputs.texts[0], offline=False).tokens


@method("ClientV2.embed", "vectors")
def embed_v2() -> list[list[float]]:
    response = v2.embed(
        model="mini",
        texts=inputs.texts,
        input_type="search_document",
        embedding_types=["float"],
    )
    return response.embeddings.float_


@method("ClientV2.embed, output_dimension=64", "short vectors")
def embed_short() -> list[list[float]]:
    response = v2.embed(
        model="mini",
        texts=inputs.texts,
        input_type="search_query",
        embedding_types=["float"],
        output_dimension=64,
    )
    return response.embeddings.float_


@method("ClientV2.embed, int8, uint8, binary, ubinary", "compact vectors")
def embed_compact() -> dict[str, list[list[int]]]:
    types = ["int8", "uint8", "binary", "ubinary"]
    response = v2.embed(
        model="mini",
        texts=inputs.texts,
        input_type="search_document",
        embedding_types=types,
    )
    return {name: getattr(response.embeddings, name) for name in types}


@method("ClientV2.embed, inputs of content parts", "vectors")
def embed_parts() -> list[list[float]]:
    response = v2.embed(
        model="mini",
        inputs=[{"content": [{"type": "text", "text": text}]} for text in inputs.texts],
        input_type="search_document",
        embedding_types=["float"],
    )
    return response.embeddings.float_


@method("ClientV2.rerank", "ranking")
def rerank_v2() -> list[tuple[int, float]]:
    response = v2.rerank(model="ranker", query=inputs.query, documents=inputs.documents)
    return [(result.index, result.relevance_score) for result in response.results]


@method("AsyncClientV2.embed", "vectors")
def embed_in_asyncio() -> list[list[float]]:
    async def ask() -> list[list[float]]:
        async with cohere.AsyncClientV2(api_key="none", base_url=inputs.url) as client:
            response = await client.embed(
                model="mini",
                texts=inputs.texts,
                input_type="search_document",
                embedding_types=["float"],
            )
        return response.embeddings.float_

    return asyncio.run(ask())


run()
