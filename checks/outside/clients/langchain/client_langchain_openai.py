"""LangChain's OpenAIEmbeddings: token ids of cl100k by default, or 1,000 texts a request."""

# package: langchain-openai

import asyncio

from harness import inputs, method, run
from langchain_openai import OpenAIEmbeddings

settings = {"model": "mini", "base_url": f"{inputs.url}/v1", "api_key": "none"}
embeddings = OpenAIEmbeddings(**settings, check_embedding_ctx_length=False)


@method("OpenAIEmbeddings.embed_documents", "vectors")
def embed_token_ids() -> list[list[float]]:
    return OpenAIEmbeddings(**settings).embed_documents(inputs.texts)


@method("OpenAIEmbeddings.embed_documents, to a server with --token-ids cl100k", "vectors")
def embed_decoded_token_ids() -> list[list[float]]:
    decoding = settings | {"base_url": f"{inputs.decoding_url}/v1"}
    return OpenAIEmbeddings(**decoding).embed_documents(inputs.texts)


@method("check_embedding_ctx_length=False: embed_documents", "vectors")
def embed_documents() -> list[list[float]]:
    return embeddings.embed_documents(inputs.texts)


@method("check_embedding_ctx_length=False: embed_query", "vector")
def embed_query() -> list[float]:
    return embeddings.embed_query(inputs.texts[0])


@method("check_embedding_ctx_length=False: embed_documents, 2,048 texts", "many")
def embed_many() -> list[list[float]]:
    return embeddings.embed_documents(inputs.many)


@method("check_embedding_ctx_length=False: embed_query, a long text", "long")
def embed_long() -> list[float]:
    return embeddings.embed_query(inputs.long)


@method("check_embedding_ctx_length=False: aembed_documents", "vectors")
def embed_in_asyncio() -> list[list[float]]:
    return asyncio.run(embeddings.aembed_documents(inputs.texts))


run()
