"""Haystack's components for text-embeddings-inference; vectors are not normalized by default."""

# package: huggingface-api-haystack

from harness import inputs, method, run
from haystack import Document
from haystack_integrations.components.embedders.huggingface_api import (
    HuggingFaceAPIDocumentEmbedder,
    HuggingFaceAPITextEmbedder,
)
from haystack_integrations.components.rankers.huggingface_api import HuggingFaceTEIRanker

settings = {"api_type": "text_embeddings_inference", "api_params": {"url": inputs.url}}


def embed(**options: bool) -> list[list[float]]:
    embedder = HuggingFaceAPIDocumentEmbedder(**settings, **options)
    documents = embedder.run([Document(content=text) for text in inputs.texts])["documents"]
    return [document.embedding for document in documents]


@method("HuggingFaceAPITextEmbedder.run", "raw vector")
def embed_text() -> list[float]:
    return HuggingFaceAPITextEmbedder(**settings).run(inputs.texts[0])["embedding"]


@method("HuggingFaceAPIDocumentEmbedder.run", "raw vectors")
def embed_documents() -> list[list[float]]:
    return embed()


@method("HuggingFaceAPIDocumentEmbedder.run, normalize=True", "vectors")
def embed_normalized() -> list[list[float]]:
    return embed(normalize=True)


@method("HuggingFaceTEIRanker.run", "ranking")
def rank() -> list[tuple[int, float]]:
    documents = [
        Document(content=text, meta={"index": index}) for index, text in enumerate(inputs.documents)
    ]
    ranking = HuggingFaceTEIRanker(url=inputs.url).run(inputs.query, documents)["documents"]
    return [(document.meta["index"], document.score) for document in ranking]


run()
