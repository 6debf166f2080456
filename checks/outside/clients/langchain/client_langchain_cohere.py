"""LangChain's classes for Cohere: vectors by version 1 of its API, rankings by version 2."""

# package: langchain-cohere

from harness import inputs, method, run
from langchain_cohere import CohereEmbeddings, CohereRerank
from langchain_core.documents import Document

embeddings = CohereEmbeddings(model="mini", base_url=inputs.url, cohere_api_key="none")
reranker = CohereRerank(model="ranker", base_url=inputs.url, cohere_api_key="none", top_n=None)


@method("CohereEmbeddings.embed_documents", "vectors")
def embed_documents() -> list[list[float]]:
    return embeddings.embed_documents(inputs.texts)


@method("CohereEmbeddings.embed_documents, 2,048 texts", "many")
def embed_many() -> list[list[float]]:
    return embeddings.embed_documents(inputs.many)


@method("CohereEmbeddings.embed_query", "vector")
def embed_query() -> list[float]:
    return embeddings.embed_query(inputs.texts[0])


@method("CohereEmbeddings.embed_query, a long text", "long")
def embed_long() -> list[float]:
    return embeddings.embed_query(inputs.long)


@method("CohereRerank.rerank", "ranking")
def rerank() -> list[tuple[int, float]]:
    ranking = reranker.rerank(inputs.documents, inputs.query)
    return [(rank["index"], rank["relevance_score"]) for rank in ranking]


@method("CohereRerank.compress_documents", "ranking")
def compress_documents() -> list[tuple[int, float]]:
    documents = [
        Document(page_content=text, metadata={"index": index})
        for index, text in enumerate(inputs.documents)
    ]
    ranking = reranker.compress_documents(documents, inputs.query)
    return [(rank.metadata["index"], rank.metadata["relevance_score"]) for rank in ranking]


run()
