"""Chroma's embedding functions, by themselves and under a collection."""

# package: chromadb

import os

from harness import inputs, method, run

# Cohere's client, which Chroma calls without a URL, reads it from here when it is imported.
os.environ["CO_API_URL"] = inputs.url
os.environ["CHROMA_COHERE_API_KEY"] = "none"
os.environ["CHROMA_OPENAI_API_KEY"] = "none"

import chromadb
from chromadb.utils.embedding_functions import (
    CohereEmbeddingFunction,
    HuggingFaceEmbeddingServer,
    OpenAIEmbeddingFunction,
)

openai = OpenAIEmbeddingFunction(model_name="mini", api_base=f"{inputs.url}/v1")


@method("OpenAIEmbeddingFunction", "vectors")
def embed_by_openai() -> list[list[float]]:
    return openai(inputs.texts)


@method("OpenAIEmbeddingFunction, 2,048 texts", "many")
def embed_many() -> list[list[float]]:
    return openai(inputs.many)


@method("HuggingFaceEmbeddingServer", "vectors")
def embed_by_tei() -> list[list[float]]:
    return HuggingFaceEmbeddingServer(url=f"{inputs.url}/embed")(inputs.texts)


@method("CohereEmbeddingFunction", "vectors")
def embed_by_cohere() -> list[list[float]]:
    return CohereEmbeddingFunction(model_name="mini")(inputs.texts)


@method("Collection.add, Collection.get", "vectors")
def add_to_collection() -> list[list[float]]:
    client = chromadb.EphemeralClient()
    collection = client.create_collection("texts", embedding_function=openai)
    names = [str(index) for index in range(len(inputs.texts))]
    collection.add(ids=names, documents=inputs.texts)
    return collection.get(ids=names, include=["embeddings"])["embeddings"]


run()
