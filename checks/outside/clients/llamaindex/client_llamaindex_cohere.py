"""LlamaIndex's embedding by Cohere's API, which refuses names of other models."""

# package: llama-index-embeddings-cohere

from harness import inputs, method, run
from llama_index.embeddings.cohere import CohereEmbedding

embedding = CohereEmbedding(model_name="embed-english-v3.0", base_url=inputs.url, api_key="none")


@method("CohereEmbedding.get_text_embedding_batch", "vectors")
def get_text_embedding_batch() -> list[list[float]]:
    return embedding.get_text_embedding_batch(inputs.texts)


@method("CohereEmbedding.get_query_embedding", "vector")
def get_query_embedding() -> list[float]:
    return embedding.get_query_embedding(inputs.texts[0])


@method("CohereEmbedding.get_text_embedding, a long text", "long")
def get_text_embedding() -> list[float]:
    return embedding.get_text_embedding(inputs.long)


run()
