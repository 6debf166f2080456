"""LlamaIndex's embedding for text-embeddings-inference: 10 texts a request, truncated."""

# package: llama-index-embeddings-text-embeddings-inference

import asyncio

from harness import inputs, method, run
from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference

embedding = TextEmbeddingsInference(model_name="mini", base_url=inputs.url)


@method("TextEmbeddingsInference.get_text_embedding_batch", "vectors")
def get_text_embedding_batch() -> list[list[float]]:
    return embedding.get_text_embedding_batch(inputs.texts)


@method("TextEmbeddingsInference.get_query_embedding", "vector")
def get_query_embedding() -> list[float]:
    return embedding.get_query_embedding(inputs.texts[0])


@method("TextEmbeddingsInference.get_text_embedding, a long text", "long")
def get_text_embedding() -> list[float]:
    return embedding.get_text_embedding(inputs.long)


@method("TextEmbeddingsInference.aget_query_embedding", "vector")
def aget_query_embedding() -> list[float]:
    return asyncio.run(embedding.aget_query_embedding(inputs.texts[0]))


run()
