"""Haystack's components for Cohere."""

# package: cohere-haystack

from harness import inputs, method, run
from haystack import Document
from haystack.utils import Secret
from haystack_integrations.components.embedders.cohere import (
    CohereDocumentEmbedder,
    CohereTextEmbedder,
)
from haystack_integrations.components.rankers.cohere import CohereRanker

settings = {"api_base_url": inputs.url, "api_key": Secret.from_token("none")}


@method("CohereTextEmbedder.run", "vector")
def embed_text() -> list[float]:
    return CohereTextEmbedder(model="mini", **settings).run(inputs.texts[0])["embedding"]


@method("CohereDocumentEmbedder.run", "vectors")
def embed_documents() -> list[list[float]]:
    embedder = CohereDocumentEmbedder(model="mini", **settings)
    documents = embedder.run([Document(content=text) for text in inputs.texts])["documents"]
    return [document.embedding for document in documents]


@method("CohereRanker.run", "ranking")
def rank() -> list[tuple[int, float]]:
    documents = [
        Document(content=text, meta={"index": index}) for index, text in enumerate(inputs.documents)
    ]
    ranking = CohereRanker(model="ranker", **settings).run(inputs.query, documents)["documents"]
    return [(document.meta["index"], document.score) for document in ranking]


run()
