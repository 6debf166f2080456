"""LangChain's community classes for Infinity and for Hugging Face's inference API."""

# package: langchain-community

from harness import inputs, method, run
from langchain_community.embeddings import HuggingFaceInferenceAPIEmbeddings, InfinityEmbeddings

infinity = InfinityEmbeddings(model="mini", infinity_api_url=inputs.url)


@method("InfinityEmbeddings.embed_documents", "vectors")
def embed_documents() -> list[list[float]]:
    return infinity.embed_documents(inputs.texts)


@method("InfinityEmbeddings.embed_documents, 2,048 texts", "many")
def embed_many() -> list[list[float]]:
    return infinity.embed_documents(inputs.many)


@method("InfinityEmbeddings.embed_query", "vector")
def embed_query() -> list[float]:
    return infinity.embed_query(inputs.texts[0])


@method("HuggingFaceInferenceAPIEmbeddings.embed_documents", "vectors")
def embed_by_inference_api() -> list[list[float]]:
    embeddings = HuggingFaceInferenceAPIEmbeddings(api_key="none", api_url=inputs.url)
    return embeddings.embed_documents(inputs.texts)


run()
