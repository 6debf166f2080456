"""LlamaIndex's embeddings over Packhorse: texts of any length, no padding.

It needs `pip install packhorse llama-index-core`; run it with
`python examples/llamaindex_embeddings.py`.
"""

from typing import Any

from llama_index.core import VectorStoreIndex
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.schema import TextNode

import packhorse


class PackhorseEmbedding(BaseEmbedding):
    def __init__(self, model: str, **options: Any) -> None:
        super().__init__(model_name=model, embed_batch_size=2048)  # batches go by tokens
        self._model = packhorse.load(model, **options)

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return self._model.encode_document(texts).tolist()

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._get_text_embeddings([text])[0]

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._model.encode_query(query).tolist()

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_query_embedding(query)


def main(model: str = "sentence-transformers/all-MiniLM-L6-v2") -> None:
    texts = ["Mules carry sacks to market.", "The harbour froze in January.", "Bread needs time."]
    nodes = [TextNode(text=text) for text in texts]
    index = VectorStoreIndex(nodes, embed_model=PackhorseEmbedding(model))
    for found in index.as_retriever(similarity_top_k=2).retrieve("pack animals"):
        print(f"{found.score:.3f}  {found.text}")


if __name__ == "__main__":
    main()
