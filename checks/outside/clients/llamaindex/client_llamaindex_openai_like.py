"""LlamaIndex's embedding for servers with OpenAI's API: 10 texts a request."""

# package: llama-index-embeddings-openai-like

import asyncio

from harness import inputs, method, run
from llama_index.embeddings.openai_like import OpenAILikeEmbedding

embedding = OpenAILikeEmbedding(model_name="mini", api_base=f"{inputs.url}/v1")


@method("OpenAILikeEmbedding.get_text_embedding_batch", "vectors")
def get_text_embedding_batch() -> list[list[float]]:
    return embedding.get_text_embedding_batch(inputs.texts)


@method("OpenAILikeEmbedding.get_query_embedding", "vector")
def get_query_embedding() -> list[float]:
    return embedding.get_query_embedding(inputs.texts[0])


@method("OpenAILikeEmbedding.get_text_embedding, a long text", "long")
def get_text_embedding() -> list[float]:
    return embedding.get_text_embedding(inputs.long)


@method("OpenAILikeEmbedding.aget_text_embedding_batch", "vectors")
def aget_text_embedding_batch() -> list[list[float]]:
    return asyncio.run(embedding.aget_text_embedding_batch(inputs.texts))


run()
