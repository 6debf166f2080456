"""Haystack's components for Jina."""

# package: jina-haystack

from harness import inputs, method, run
from haystack import Document
from haystack.utils import Secret
from haystack_integrations.components.embedders.jina import JinaDocumentEmbedder, JinaTextEmbedder
from haystack_integrations.components.rankers.jina import JinaRanker

key = Secret.from_token("none")
settings = {"model": "mini", "api_key": key, "base_url": f"{inputs.url}/v1/embeddings"}


@method("JinaTextEmbedder.run", "vector")
def embed_text() -> list[float]:
    return JinaTextEmbedder(**settings).run(inputs.texts[0])["embedding"]


@method("JinaDocumentEmbedder.run", "vectors")
def embed_documents() -> list[list[float]]:
    embedder = JinaDocumentEmbedder(**settings)
    documents = embedder.run([Document(content=text) for text in inputs.texts])["documents"]
    return [document.embedding for document in documents]


@method("JinaTextEmbedder.run, the message of an error", "unknown_model")
def name_a_wrong_model() -> str:
    try:
        JinaTextEmbedder(**{**settings, "model": "none"}).run(inputs.texts[0])
    except RuntimeError as error:
        return str(error)
    return "no error"


@method("JinaRanker.run", "ranking")
def rank() -> list[tuple[int, float]]:
    documents = [
        Document(content=text, meta={"index": index}) for index, text in enumerate(inputs.documents)
    ]
    ranker = JinaRanker(model="ranker", api_key=key, base_url=f"{inputs.url}/v1/rerank")
    ranking = ranker.run(inputs.query, documents)["documents"]
    return [(document.meta["index"], document.score) for document in ranking]


run()
