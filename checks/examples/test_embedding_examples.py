"""The examples for LangChain, LlamaIndex and MTEB run, and say what the encoder says."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import packhorse

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TEXTS = ["Mules carry sacks.", "", "Bread needs time."]

# What the libraries and their dependencies warn of is not ours.
pytestmark = pytest.mark.filterwarnings("ignore")


def example(name: str, needs: str) -> ModuleType:
    """The script as a module, where what it is for is installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip(needs)
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def vectors(minilm: Path) -> np.ndarray:
    return packhorse.load(minilm, device="cpu", dtype="fp32").embed(TEXTS)


def test_langchain(minilm: Path, vectors: np.ndarray, capsys: pytest.CaptureFixture[str]) -> None:
    module = example("langchain_embeddings", "langchain_core")
    embeddings = module.PackhorseEmbeddings(str(minilm), device="cpu", dtype="fp32")
    assert np.abs(np.array(embeddings.embed_documents(TEXTS)) - vectors).max() <= 1e-5
    assert np.abs(np.array(embeddings.embed_query(TEXTS[0])) - vectors[0]).max() <= 1e-5
    module.main(str(minilm))
    assert "Mules carry sacks" in capsys.readouterr().out.splitlines()[0]


def test_llamaindex(minilm: Path, vectors: np.ndarray, capsys: pytest.CaptureFixture[str]) -> None:
    module = example("llamaindex_embeddings", "llama_index.core")
    embedding = module.PackhorseEmbedding(str(minilm), device="cpu", dtype="fp32")
    assert np.abs(np.array(embedding.get_text_embedding_batch(TEXTS)) - vectors).max() <= 1e-5
    assert np.abs(np.array(embedding.get_text_embedding(TEXTS[0])) - vectors[0]).max() <= 1e-5
    assert np.abs(np.array(embedding.get_query_embedding(TEXTS[0])) - vectors[0]).max() <= 1e-5
    module.main(str(minilm))
    assert "Mules carry sacks" in capsys.readouterr().out.splitlines()[0]


def test_mteb(minilm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example("mteb_task", "mteb").main(str(minilm))
    name, score = capsys.readouterr().out.splitlines()[-1].split(": ")
    assert name == "OurPairs" and 0.5 < float(score) <= 1
