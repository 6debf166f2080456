"""Frameworks with a model of sentence-transformers inside of them: the model, accelerated.

LangChain, LlamaIndex and Haystack open it themselves, by name, so what they opened is accelerated;
BERTopic takes the object. Each is used by its own interface, before and after. They are skipped
where they are not installed: `pip install langchain-huggingface llama-index-embeddings-huggingface
sentence-transformers-haystack bertopic`, without BERTopic's dependencies if you like.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import packhorse

pytestmark = pytest.mark.filterwarnings("ignore")  # what the frameworks warn of is not ours
TEXTS = ["A man eats.", "Someone has a meal.", "Seven dogs bark at the moon, and nobody minds."]
Framework = tuple[Callable[[list[str]], Any], Any]  # vectors of texts, and the model within


def langchain(folder: Path) -> Framework:
    module = pytest.importorskip("langchain_huggingface")
    embeddings = module.HuggingFaceEmbeddings(
        model_name=str(folder), model_kwargs={"device": "cpu"}
    )
    return embeddings.embed_documents, embeddings._client


def llamaindex(folder: Path) -> Framework:
    module = pytest.importorskip("llama_index.embeddings.huggingface")
    embedding = module.HuggingFaceEmbedding(model_name=str(folder), device="cpu")
    return embedding.get_text_embedding_batch, embedding._model


def haystack(folder: Path) -> Framework:
    os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"
    module = pytest.importorskip("haystack_integrations.components.embedders.sentence_transformers")
    from haystack.utils import ComponentDevice

    embedder = module.SentenceTransformersTextEmbedder(
        model=str(folder), device=ComponentDevice.from_str("cpu"), progress_bar=False
    )
    embedder.warm_up()

    def embed(texts: list[str]) -> list[Any]:
        return [embedder.run(text=text)["embedding"] for text in texts]

    return embed, embedder.embedding_backend.model


def bertopic(folder: Path) -> Framework:
    backends = pytest.importorskip("bertopic.backend._utils")
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), device="cpu")
    backend = backends.select_backend(model)
    assert type(backend).__name__ == "SentenceTransformerBackend"
    return backend.embed_documents, model


@pytest.mark.parametrize("framework", [langchain, llamaindex, haystack, bertopic])
def test_the_model_within_is_accelerated(
    framework: Callable[[Path], Framework], minilm: Path
) -> None:
    embed, model = framework(minilm)
    before = np.array(embed(TEXTS))
    assert packhorse.accelerate(model) is model
    after = np.array(embed(TEXTS))
    assert after.shape == (3, 384) and np.abs(after - before).max() <= 1e-5
    assert model._inference._encoder is not None, "the library's own method ran"
    assert np.abs(after[0] - after[2]).max() > 0.01
