"""LangChain's embeddings over Packhorse: texts of any length, no padding.

It needs `pip install packhorse langchain-core`; run it with
`python examples/langchain_embeddings.py`.
"""

from typing import Any

from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import InMemoryVectorStore

import packhorse


class PackhorseEmbeddings(Embeddings):
    def __init__(self, model: str, **options: Any) -> None:
        self.model = packhorse.load(model, **options)

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return self.model.encode_document(texts).tolist()

    def embed_query(self, text: str) -> list[float]:
        return self.model.encode_query(text).tolist()


def main(model: str = "sentence-transformers/all-MiniLM-L6-v2") -> None:
    texts = ["Mules carry sacks to market.", "The harbour froze in January.", "Bread needs time."]
    store = InMemoryVectorStore.from_texts(texts, PackhorseEmbeddings(model))
    for found, score in store.similarity_search_with_score("pack animals", k=2):
        print(f"{score:.3f}  {found.page_content}")


if __name__ == "__main__":
    main()
