"""Haystack's embedders for OpenAI's API: documents are sent 32 at a time."""

# package: haystack-ai

from harness import inputs, method, run
from haystack import Document
from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
from haystack.utils import Secret

settings = {"model": "mini", "api_base_url": f"{inputs.url}/v1"}
settings["api_key"] = Secret.from_token("none")


def embed(texts: list[str]) -> list[list[float]]:
    embedder = OpenAIDocumentEmbedder(**settings)
    documents = embedder.run([Document(content=text) for text in texts])["documents"]
    return [document.embedding for document in documents]


@method("OpenAITextEmbedder.run", "vector")
def embed_text() -> list[float]:
    return OpenAITextEmbedder(**settings).run(inputs.texts[0])["embedding"]


@method("OpenAITextEmbedder.run, a long text", "long")
def embed_long() -> list[float]:
    return OpenAITextEmbedder(**settings).run(inputs.long)["embedding"]


@method("OpenAIDocumentEmbedder.run", "vectors")
def embed_documents() -> list[list[float]]:
    return embed(inputs.texts)


@method("OpenAIDocumentEmbedder.run, 2,048 texts", "many")
def embed_many() -> list[list[float]]:
    return embed(inputs.many)


run()
